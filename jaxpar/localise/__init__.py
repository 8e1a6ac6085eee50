"""The program of one tensor rank, from a loss on whole arrays."""

from .calls import RULES as RULES
from .localiser import localise as localise
