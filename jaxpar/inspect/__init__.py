"""Costs and faults of a training step, read from the program itself and compared with closed forms."""
