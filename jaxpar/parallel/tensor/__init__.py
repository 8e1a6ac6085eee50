"""Tensor parallelism: rewrite a loss on whole arrays into the program of one tensor rank."""

from . import calls as calls
from . import sums as sums
from .localiser import localise as localise
from .primitives import RULES as RULES
