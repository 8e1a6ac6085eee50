"""Compiled programs as text: entries, kernels, products, what the partitioner moved."""
