"""Which strategy: candidates, their closed forms, their ranking and its reasons."""
