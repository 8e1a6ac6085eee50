"""Mixtures of experts: routing, buffers of experts, tokens that overflow them, and losses that balance the load."""

from .experts import Routing as Routing
from .experts import balanced as balanced
from .experts import swiglu as swiglu
