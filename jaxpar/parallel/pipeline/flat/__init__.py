"""Pipelines of models without one stack of layers: stages are parts of the program of the loss."""
