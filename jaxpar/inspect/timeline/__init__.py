"""Pipelines drawn."""
