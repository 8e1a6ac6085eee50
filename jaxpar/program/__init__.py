"""Programs as jaxprs: reading them, comparing them, cutting and running them. Nothing here knows of strategies."""
