"""This machine's collectives, measured."""
