"""Attention that a program spells out, replaced by `jp.attention` or computed a block of scores at a time."""

from .spelled import Spelled as Spelled
from .spelled import spelled as spelled
