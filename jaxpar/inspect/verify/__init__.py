"""Parity with one device."""

from .parity import Report as Report
from .parity import verify as verify
