"""`Strategy`, the one value that chooses how a step is parallelized: presets, mesh axes, pipeline schedules by name."""

from .constraints import OFFLOADS as OFFLOADS
from .constraints import SUMS as SUMS
from .strategy import PER_RANK as PER_RANK
from .strategy import PRESETS as PRESETS
from .strategy import Strategy as Strategy
from .strategy import as_strategy as as_strategy
