"""The program of one context rank, which has some of the positions of every sequence."""

from . import neighbours as neighbours
from .localiser import split_sequence as split_sequence
from .logits import Logits as Logits
from .logits import chunked as chunked
from .rules import RULES as RULES
from .ways import Way as Way
from .ways import choose as choose
