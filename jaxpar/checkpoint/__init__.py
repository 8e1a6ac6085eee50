"""Checkpoints: states on disk as the model has them, for any layout."""
