"""jaxpar: train any Flax model under any parallelism strategy, chosen by one value."""

from typing import TYPE_CHECKING, Any

from .backend.quiet import filter_start, is_command

if is_command():
    filter_start()

from . import collectives
from .backend.cpu_compiler import set_flag
from .checkpoint.saved import Checkpoint
from .data import check_ids, pad_rows
from .forecast.own_step import Promises, check, explain, plan_shardings, predict
from .forecast.plan.planner import plan
from .hosts.initialize import initialize
from .inspect.nonfinite import trace_nonfinite
from .layout.mesh import enough_threads, simulate
from .layout.state import State
from .make import make_train_step
from .model.equinox import from_equinox
from .model.linen import from_linen
from .model.model import Mean, Model, Replicated, all_rows
from .model.nnx import from_nnx
from .models.parts.text import generate
from .numerics.logits.cross_entropy import cross_entropy
from .numerics.matrices.numbers import matrices
from .parallel.context.attention.fused import attention
from .parallel.expert.ops.experts import experts
from .parity import bisect, verify
from .program.kernels import local_kernel
from .removed import removed
from .run.train.loop import Hook, Loop, Units
from .run.train.trainer import Trainer
from .strategy import Strategy

__all__ = [
    "Checkpoint",
    "Hook",
    "Loop",
    "Mean",
    "Model",
    "Promises",
    "Replicated",
    "State",
    "Strategy",
    "Trainer",
    "Units",
    "all_rows",
    "attention",
    "bisect",
    "check",
    "check_ids",
    "collectives",
    "cross_entropy",
    "experts",
    "explain",
    "from_equinox",
    "from_linen",
    "from_nnx",
    "generate",
    "initialize",
    "local_kernel",
    "make_train_step",
    "matrices",
    "pad_rows",
    "plan",
    "plan_shardings",
    "predict",
    "simulate",
    "trace_nonfinite",
    "verify",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # to which any name would then be one of ours

    def __getattr__(name: str) -> Any:
        """Say what to use instead of a name that was removed."""
        if says := removed(f"jp.{name}"):
            raise ImportError(says)  # of an AttributeError `from jaxpar import name` does not show the text
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


set_flag()
enough_threads()  # where XLA_FLAGS simulates devices; the backend reads both when it starts
