"""A traced loss as prologue, layer stacks and epilogue."""
