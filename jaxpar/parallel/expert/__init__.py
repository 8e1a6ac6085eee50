"""The program of one expert rank, from a loss on one rank's rows and all experts."""

from .exchange import exchange_tokens as exchange_tokens
from .rules import RULES as RULES
