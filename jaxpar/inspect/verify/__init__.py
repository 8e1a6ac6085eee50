"""Parity with one device."""

from .bisect import Bisected as Bisected
from .bisect import bisect as bisect
from .parity import Report as Report
from .parity import verify as verify
