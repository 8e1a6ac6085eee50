"""The public names and their rooms. A name is imported when it is first used; type checkers read the same list."""

from . import collectives as collectives
from .checkpoint.saved import Checkpoint as Checkpoint
from .data import check_ids as check_ids
from .data import pad_rows as pad_rows
from .forecast.own_step import Promises as Promises
from .forecast.own_step import check as check
from .forecast.own_step import explain as explain
from .forecast.own_step import plan_shardings as plan_shardings
from .forecast.own_step import predict as predict
from .forecast.plan.planner import plan as plan
from .hosts.initialize import initialize as initialize
from .inspect.nonfinite import trace_nonfinite as trace_nonfinite
from .layout.mesh import simulate as simulate
from .layout.state import State as State
from .make import make_train_step as make_train_step
from .model.equinox import from_equinox as from_equinox
from .model.linen import from_linen as from_linen
from .model.model import Mean as Mean
from .model.model import Model as Model
from .model.model import Replicated as Replicated
from .model.model import all_rows as all_rows
from .model.nnx import from_nnx as from_nnx
from .models.parts.text import generate as generate
from .numerics.logits.cross_entropy import cross_entropy as cross_entropy
from .numerics.matrices.numbers import matrices as matrices
from .parallel.context.attention.fused import attention as attention
from .parallel.expert.ops.experts import experts as experts
from .parity import bisect as bisect
from .parity import verify as verify
from .program.kernels import local_kernel as local_kernel
from .run.train.loop import Hook as Hook
from .run.train.loop import Loop as Loop
from .run.train.loop import Units as Units
from .run.train.trainer import Trainer as Trainer
from .strategy import Strategy as Strategy

__version__: str
