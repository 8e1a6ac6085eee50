"""Optimizers that need whole matrices, such as Muon: which leaves these are, and which rank updates which."""
