"""Which dim of which leaf an axis splits: rules, and what shapes and creation order tell without them."""
