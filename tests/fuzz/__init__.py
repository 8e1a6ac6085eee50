"""Random programs, beside one device: `__main__.py` says how to run it, `generate.py` what is drawn."""
