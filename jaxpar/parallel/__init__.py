"""Strategies along the data axes, one file each, to be read beside its paper; a user's own registers as ours do."""

from .contract import Promise as Promise
from .contract import Rule as Rule
from .contract import Sent as Sent
from .contract import Times as Times
from .contract import Use as Use
from .contract import Uses as Uses
from .ddp import DDP as DDP
from .registry import register as register
from .registry import rule_of as rule_of
from .zero import publish as publish
