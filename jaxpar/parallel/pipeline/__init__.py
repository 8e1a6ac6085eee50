"""Pipelines: schedules as tables, chunks of layers, and the two engines that run them."""
