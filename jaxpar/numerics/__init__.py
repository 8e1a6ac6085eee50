"""FP8 products, logits in chunks, and optimizers of whole matrices."""
