"""Attention that a program spells out, taken as `jp.attention` or a block of scores at a time."""

from .spelled import Spelled as Spelled
from .spelled import spelled as spelled
