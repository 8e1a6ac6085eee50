"""Pipelines of models without one stack of layers: their stages are parts of the loss's program."""
