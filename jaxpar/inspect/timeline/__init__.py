"""Drawings of pipeline schedules, in text and SVG."""
