"""The trainer: its loop, the folder of a run, progress, and the files that a run writes."""
