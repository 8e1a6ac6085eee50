"""Programs as jaxprs: reading them, comparing them, cutting and running them. Nothing here knows of strategies."""

# The table comes first: other modules make lists of its primitives while they are imported.
from . import factors as factors
from .registration import register as register
