"""Find where NaN and infinity begin: the equation, and for a step also the microbatch, the rank and the rows."""

from .replay import Nonfinite as Nonfinite
from .replay import NonfiniteError as NonfiniteError
from .replay import Replay as Replay
from .search import Brought as Brought
from .search import Fault as Fault
from .search import Operand as Operand
from .search import trace_nonfinite as trace_nonfinite
