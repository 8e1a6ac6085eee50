"""The trainer and the command line."""
