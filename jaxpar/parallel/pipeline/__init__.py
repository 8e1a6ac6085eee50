"""Pipelines: their schedules as tables, the chunks of layers, the ticks that run them."""
