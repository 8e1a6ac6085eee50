"""Roll layers that a model writes as a Python loop into one scan."""
