"""Parts that the models share: sizes, batches and losses of text and images, stacked layers, the key/value cache."""
