"""Mixtures of experts: routing, buffers of experts, what overflows them, losses that keep them in balance."""

from .experts import Routing as Routing
from .experts import balanced as balanced
from .experts import swiglu as swiglu
