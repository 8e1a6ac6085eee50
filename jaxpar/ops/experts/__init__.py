"""Mixtures of experts: routing, buffers of experts, what overflows them, losses that keep them in balance."""
