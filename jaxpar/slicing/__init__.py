"""A traced loss as prologue, layer stacks and epilogue, each of which fetches its own parameters."""
