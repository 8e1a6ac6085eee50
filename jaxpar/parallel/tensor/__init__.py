"""The program of one tensor rank, from a loss on whole arrays."""

from . import calls as calls
from . import sums as sums
from .localiser import localise as localise
from .primitives import RULES as RULES
