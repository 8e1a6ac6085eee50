"""jaxpar: train any Flax model under any parallelism strategy, chosen by one value."""

from . import collectives
from .attention import attention
from .data import pad_rows
from .frontends.linen import from_linen
from .frontends.nnx import from_nnx
from .inspect.plan import plan
from .inspect.verify import verify
from .kernels import local_kernel
from .loop import Hook, Loop, Units
from .mesh import enough_threads, simulate
from .model import Mean, Model, Replicated, all_rows
from .state import State
from .step import make_train_step
from .strategy import Strategy
from .trainer import Trainer

__all__ = [
    "Hook",
    "Loop",
    "Mean",
    "Model",
    "Replicated",
    "State",
    "Strategy",
    "Trainer",
    "Units",
    "all_rows",
    "attention",
    "collectives",
    "from_linen",
    "from_nnx",
    "local_kernel",
    "make_train_step",
    "pad_rows",
    "plan",
    "simulate",
    "verify",
]
__version__ = "0.1.0"

enough_threads()  # where XLA_FLAGS simulates devices; the backend reads it when it starts
