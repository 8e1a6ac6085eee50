"""A training step, where model, optimizer, strategy and layout meet; README.md has the order in which to read it."""
