"""Expert parallelism: rewrite a loss on one rank's rows and all experts into the program of one expert rank."""

from .exchange import exchange_tokens as exchange_tokens
from .rules import RULES as RULES
