"""A traced loss as the program of one rank, equation by equation: what each axis makes of each value."""
