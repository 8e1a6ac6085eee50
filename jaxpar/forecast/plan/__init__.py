"""Rank strategies for a target: candidates, their closed forms, compiled lines with reasons."""
