"""Optimizers of whole matrices, such as Muon: find the hidden matrices, and assign each to the rank that updates it."""
