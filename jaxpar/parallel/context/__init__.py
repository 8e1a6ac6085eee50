"""Context parallelism: rewrite a loss into the program of one rank, which holds some positions of every sequence."""

from . import neighbours as neighbours
from . import recurrences as recurrences
from .attention_mode import AttentionMode as AttentionMode
from .attention_mode import calls as calls
from .attention_mode import choose as choose
from .entry import WholeLoss as WholeLoss
from .localiser import split_sequence as split_sequence
from .rules import RULES as RULES
