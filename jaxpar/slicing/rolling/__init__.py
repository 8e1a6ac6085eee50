"""Layers that a model writes as a Python loop, as one scan."""
