"""Whether a loss couples rows, shown by running it: the same batch, its rows dealt otherwise among the blocks.

A block is one replica's rows of one microbatch, and a loss that is a mean over rows does not know which rows share one.
So the loss and every gradient stay what they are, to rounding, when rows change places; and half of the rows of each
block give what the same rows do, each twice. Reading (`rows/`) names the line; running decides where it cannot.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...layout.state import State
from ...model.batches import dealt, rows_of
from ...model.model import MAKERS
from ...program import jaxpr as jx
from ..step_view import RunnableStep as Step

Values = Mapping[str, np.ndarray]  # as `Step.measured` has them: of a gradient the norm, and another sum

# Measured on the models of the tests, whose rows are independent: off by at most 9e-7 in float32 (a bottleneck ResNet),
# 4e-3 in bfloat16 and 1e-4 in float16, a half and a tenth of their epsilon.
_LEAST, _EPSILONS = 1e-5, 4
_FLOOR = 1e-2  # of the norm of all gradients: a leaf's that is zero is rounding alone
_MARGIN = 16  # times what the parameters' last bit changes, which is one sample of rounding; as in `verify`


@dataclass(frozen=True)
class Dealing:
    """What a step computes of the same rows in two ways.

    Attributes:
      what: how they differ.
      before, after: by name the loss, and of each leaf's gradient the norm and the sum along a fixed direction.
      allowed: how far off each may be, as `errors` has it.
    """

    what: str
    before: Values
    after: Values
    allowed: Mapping[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """How far off each is, relative to the loss or 1 if that is more, to the norm of the gradient or a hundredth of
        that of all; infinite where what was finite is not.
        """
        return _errors(self.before, self.after)

    @property
    def finite(self) -> bool:
        """Whether there is something to compare."""
        return all(np.isfinite(x).all() for x in self.before.values())

    @property
    def same(self) -> bool:
        """Whether none is off by more than rounding."""
        return all(error <= self.allowed[name] for name, error in self.errors.items())

    def __str__(self) -> str:
        errors = self.errors
        worst = max(errors, key=lambda name: errors[name] / self.allowed[name])
        said = (
            f"{name} {self.before[name][0]:.7g} and {self.after[name][0]:.7g}, off by {errors[name]:.1e} "
            f"(allowed {self.allowed[name]:.0e})"
            for name in dict.fromkeys(["loss", worst])
        )
        return f"{self.what}: {'; '.join(said)}"


@dataclass(frozen=True)
class RowCheck:
    """What `check_rows` found; print it.

    Attributes:
      blocks: among which rows were dealt, as text.
      group: how many rows that follow one another may know of each other: no block parts them.
      dealings: what was compared.
      unjudged: what could not be seen, and why.
      evaluations: of the loss and its gradients.
    """

    blocks: str
    group: int
    dealings: tuple[Dealing, ...]
    unjudged: tuple[str, ...]
    evaluations: int

    @property
    def coupled(self) -> bool:
        """Whether rows are coupled."""
        return not all(dealing.same for dealing in self.dealings)

    @property
    def ok(self) -> bool:
        """Whether nothing couples rows, on this batch and with these parameters, and nothing is unjudged."""
        return not self.coupled and not self.unjudged

    def require(self) -> None:
        """Raise ValueError where rows are coupled, with the figures and what to do."""
        if self.coupled:
            raise ValueError(
                f"{self}\ntake what needs all rows from jp.all_rows(x), with microbatches=1, since it returns those of "
                "one microbatch; return jp.Mean(total, count) for a mean over anything but rows, and do not use the "
                f"number of rows; or, where blocks are meant to be on their own, give rows='independent' to {MAKERS}"
            )

    def __repr__(self) -> str:
        return f"RowCheck(ok={self.ok}, coupled={self.coupled}, {self.blocks}; print it)"

    def __str__(self) -> str:
        verdict = "are COUPLED" if self.coupled else "are independent" if self.ok else "may still be coupled"
        groups = f", but for groups of {self.group}, which no block parts" * (self.group > 1 and not self.coupled)
        said = [f"rows {verdict}{groups}: {self.blocks}, {self.evaluations} evaluations of the gradients"]
        return "\n- ".join([*said, *map(str, self.dealings), *(f"not judged: {what}" for what in self.unjudged)])


def check_rows(step: Step, state: State, batch: Any) -> RowCheck:
    """Whether a step computes the same of a batch however its rows are dealt; see `TrainStep.check_rows`."""
    shapes = step.shapes(batch)
    traced, rows, m = step.traced(shapes), rows_of(shapes), step.strategy.microbatches
    shared, each = step.tracing.takes_all_rows(traced), rows // (step.replicas * m)
    blocks = f"{step.replicas} x {m} blocks (replicas x microbatches) of {each} rows"
    if each < 2 or step.replicas * (1 if shared else m) < 2:
        why = "a block has one row; give more rows" if each < 2 else "no two blocks may exchange rows"
        return RowCheck(blocks, 1, (), (f"anything, as {why}",), 0)
    runs = _Runs(step, state, batch, _epsilon(step, traced.program.eqns))
    own = np.arange(rows).reshape(-1, each)
    tried: dict[int, tuple[np.ndarray, Dealing]] = {}
    for group in (g for g in range(1, each // 2 + 1) if each % g == 0):
        shape = (step.replicas, m, each // group) if shared else (step.replicas * m, 1, each // group)
        order = (_dealt_otherwise(shape, traced.draws)[..., None] * group + np.arange(group)).reshape(-1, each)
        tried[group] = order, (dealing := runs.compared("dealt otherwise", own, order))
        if dealing.same or not dealing.finite:
            break
    else:
        group = 1
    order, dealing = tried[group]
    dealings, unjudged, number = [dealing], list[str](), "the number of rows in a block"
    half = order[:, : each // 2]
    if not dealing.finite:
        dealings, unjudged = [], ["anything, as the loss or its gradients are not finite"]
    elif traced.draws:
        unjudged = [f"{number}, and a row's place, by which the loss draws random numbers"]
    elif each % (2 * group):
        unjudged = [f"{number}, as {each} cannot be halved; give twice as many"]
    elif why := _refused(step, jax.eval_shape(lambda batch: dealt(batch, half.reshape(-1)), shapes)):
        unjudged = [f"{number}, as half of it is refused: {why}"]
    elif dealing.same:
        other = runs.compared("half of each block, and that half twice", half, np.concatenate([half, half], -1))
        if not other.finite or (shared and not other.same):
            unjudged = [f"{number}: {other}" + ", as the loss takes all rows, and may count them" * shared]
        else:
            dealings.append(other)
    return RowCheck(blocks, group, tuple(dealings), tuple(unjudged), len(runs.values))


class _Runs:
    """What a step measures of one batch; every order of its rows is measured once."""

    def __init__(self, step: Step, state: State, batch: Any, epsilon: float):
        self.step, self.state, self.batch, self.epsilon = step, state, batch, epsilon
        self.values: dict[Any, Values] = {}

    def measured(self, order: np.ndarray, nudged: bool = False) -> Values:
        order = np.ascontiguousarray(order, np.int32).reshape(-1)
        if (kind := (order.tobytes(), nudged)) not in self.values:
            state = _nudged(self.state, self.epsilon) if nudged else self.state
            self.values[kind] = jax.tree.map(np.asarray, self.step.measured(state, self.batch, order))
        return self.values[kind]

    def compared(self, what: str, before: np.ndarray, after: np.ndarray) -> Dealing:
        one = self.measured(before)
        dealing = Dealing(what, one, self.measured(after), dict.fromkeys(one, max(_LEAST, _EPSILONS * self.epsilon)))
        if dealing.same or not dealing.finite:
            return dealing
        moved = self.measured(before, nudged=True)  # where terms cancel, rounding is all that is left
        noise = {name: _MARGIN * x for name, x in _errors(one, moved).items() if math.isfinite(x)}
        return replace(dealing, allowed={name: max(x, noise.get(name, x)) for name, x in dealing.allowed.items()})


def _dealt_otherwise(shape: tuple[int, int, int], keep: bool) -> np.ndarray:
    """Numbers from 0 in this shape, [blocks, sets, rows], so dealt that blocks of a set have others; always the same.

    With `keep` every row keeps its place in its block, and with it the noise that a loss draws for that place.
    """
    own = np.arange(math.prod(shape)).reshape(shape)
    for seed in itertools.count():
        random = np.random.default_rng(seed)
        mixed = random.permuted(own.swapaxes(0, 1).reshape(shape[1], -1), axis=1)
        order = random.permuted(own, axis=0) if keep else mixed.reshape(shape[1], shape[0], -1).swapaxes(0, 1)
        blocks = order // shape[-1]
        if (blocks != blocks[..., :1]).any():  # of few rows, chance may exchange whole blocks
            return order
    raise AssertionError("two blocks of two rows can always be dealt otherwise")


def _epsilon(step: Step, eqns: Any) -> float:
    """Of the lowest dtype in which matmuls run; those of float32 run in TF32 on GPUs, in bfloat16 on TPUs."""
    dtypes = {dtype for dtype in jx.matmuls(eqns) if jnp.issubdtype(dtype, jnp.inexact)}
    platform = step.mesh.devices.flat[0].platform
    if "float32" in dtypes and platform != "cpu" and jax.config.values["jax_default_matmul_precision"] is None:
        dtypes.add("bfloat16" if platform == "tpu" else "float16")  # whose mantissa is that of TF32
    return max(float(jnp.finfo(dtype).eps) for dtype in ("float32", *dtypes))


def _errors(before: Values, after: Values) -> dict[str, float]:
    """See `Dealing.errors`."""
    whole = math.hypot(*(x[0] for name, x in before.items() if name != "loss"))
    scales = {name: max(abs(x[0]), 1 if name == "loss" else _FLOOR * whole, 1e-30) for name, x in before.items()}
    off = {name: float(np.abs(after[name] - x).max()) / scales[name] for name, x in before.items()}
    return {name: x if math.isfinite(x) else math.inf for name, x in off.items()}


def _refused(step: Step, shapes: Any) -> str:
    """Why a step cannot be traced for a batch of these shapes; "" where it can."""
    try:
        step.traced(shapes)
    except (TypeError, ValueError) as error:  # the loss has its number of rows written down, say
        return str(error).partition("\n")[0]
    return ""


def _nudged(state: State, epsilon: float) -> State:
    """The state, its parameters changed at random by up to `epsilon`, relatively: in their last bit."""

    def change(leaves: list[jax.Array]) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(leaves))
        by = [1 + epsilon * jax.random.uniform(key, x.shape, minval=-1) for key, x in zip(keys, leaves, strict=True)]
        floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        return [(x * f).astype(x.dtype) if yes else x for x, f, yes in zip(leaves, by, floats, strict=True)]

    leaves, tree = jax.tree.flatten((state.params, state.copy))
    moved = jax.jit(change, out_shardings=[x.sharding for x in leaves])(leaves)
    params, copy = jax.tree.unflatten(tree, moved)
    return replace(state, params=params, copy=copy)
