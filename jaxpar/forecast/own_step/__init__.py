"""Report the memory, communication and time of programs that jaxpar did not make: anything that `jax.jit` lowers."""

from .program import Argument as Argument
from .program import JittedMemory as JittedMemory
from .promises import Promises as Promises
from .promises import check as check
from .ranking import ShardingPlan as ShardingPlan
from .ranking import plan_shardings as plan_shardings
from .report import JittedExplanation as JittedExplanation
from .report import explain as explain
from .report import predict as predict
from .sites import Site as Site
