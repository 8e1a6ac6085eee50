"""A traced loss as prologue, layer stacks and epilogue, where every piece fetches its own parameters."""
