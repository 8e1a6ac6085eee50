"""Compare a strategy with one device, and find the equation at which two runs differ."""

from .bisected import Bisected as Bisected
from .bisection import bisect as bisect
from .differences import Difference as Difference
from .parity import Report as Report
from .parity import verify as verify
