"""Adapters from Flax modules to `jaxpar.Model`."""
