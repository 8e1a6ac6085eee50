"""Parallelism strategies, a folder each; the contract and the registry of data-parallel rules are public here."""

from .data import DDP as DDP
from .data import Promise as Promise
from .data import Rule as Rule
from .data import Sent as Sent
from .data import Times as Times
from .data import Use as Use
from .data import Uses as Uses
from .data import publish as publish
from .data import register as register
from .data import rule_of as rule_of
