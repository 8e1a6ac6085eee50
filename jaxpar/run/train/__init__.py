"""The trainer: loop, checkpoints, progress, what a run leaves behind."""
