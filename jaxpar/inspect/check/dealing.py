"""Whether a loss couples rows, shown by running it on one batch with its rows distributed differently over the blocks.

A block is one replica's rows of one microbatch. A loss that is a mean over rows does not know which rows share a block.
So the loss and every gradient stay the same, to rounding,

- if rows are permuted between blocks;
- if each block keeps half of its rows and has each of them twice.

Reading the program (`rows/`) names the line that couples rows. Running it decides where reading cannot.
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

Values = Mapping[str, np.ndarray]  # from `Step.measured`: the loss; of each gradient, the norm and a projection

# The tolerance. On the models of the tests, whose rows are independent, errors were at most 9e-7 in float32 (a
# bottleneck ResNet), 4e-3 in bfloat16 and 1e-4 in float16: a half and a tenth of an epsilon.
_MIN_TOLERANCE, _EPSILONS = 1e-5, 4
# The error of a gradient is relative to at least this share of the norm of all gradients: a gradient that should be
# zero consists of rounding alone.
_NORM_FLOOR = 1e-2
# Changing the parameters' last bit gives one sample of rounding. An error may be this many times as large.
_MARGIN = 16


@dataclass(frozen=True)
class Dealing:
    """The values that a step computes from the same rows, distributed in two ways.

    Attributes:
      what: the difference between the two distributions, as text.
      before, after: the loss by name, and for each leaf's gradient its norm and its projection onto a fixed direction.
      allowed: the largest error of each that counts as rounding, in the unit of `errors`.
    """

    what: str
    before: Values
    after: Values
    allowed: Mapping[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """The relative error of each value; infinite if a finite value became infinite or NaN.

        The loss's error is relative to the larger of the loss and 1. A gradient's is relative to the larger of its norm
        and a hundredth of the norm of all gradients.
        """
        return _relative_errors(self.before, self.after)

    @property
    def finite(self) -> bool:
        """Whether all values are finite, so that they can be compared."""
        return all(np.isfinite(x).all() for x in self.before.values())

    @property
    def same(self) -> bool:
        """Whether all errors are within rounding."""
        return all(error <= self.allowed[name] for name, error in self.errors.items())

    def __str__(self) -> str:
        errors = self.errors
        worst_name = max(errors, key=lambda name: errors[name] / self.allowed[name])
        comparisons = (
            f"{name} {self.before[name][0]:.7g} and {self.after[name][0]:.7g}, off by {errors[name]:.1e} "
            f"(allowed {self.allowed[name]:.0e})"
            for name in dict.fromkeys(["loss", worst_name])
        )
        return f"{self.what}: {'; '.join(comparisons)}"


@dataclass(frozen=True)
class RowCheck:
    """The result of `check_rows`; print it.

    Attributes:
      blocks: the blocks over which rows were distributed, as text.
      group: the number of consecutive rows that may be coupled, since no block separates them.
      dealings: the comparisons.
      unjudged: what could not be checked, and why.
      evaluations: the number of evaluations of the loss and its gradients.
    """

    blocks: str
    group: int
    dealings: tuple[Dealing, ...]
    unjudged: tuple[str, ...]
    evaluations: int

    @property
    def coupled(self) -> bool:
        """Whether the loss couples rows."""
        return not all(dealing.same for dealing in self.dealings)

    @property
    def ok(self) -> bool:
        """Whether everything was checked and nothing couples rows, on this batch and with these parameters."""
        return not self.coupled and not self.unjudged

    def require(self) -> None:
        """Raise ValueError if the loss couples rows, with the figures and what to do."""
        if self.coupled:
            raise ValueError(
                f"{self}\ncompute what needs all rows from jp.all_rows(x), with microbatches=1, since it returns the "
                "rows of one microbatch; return jp.Mean(total, count) for a mean over anything but rows; do not use "
                f"the number of rows; or, if blocks are independent on purpose, give rows='independent' to {MAKERS}"
            )

    def __repr__(self) -> str:
        return f"RowCheck(ok={self.ok}, coupled={self.coupled}, {self.blocks}; print it)"

    def __str__(self) -> str:
        verdict = "are COUPLED" if self.coupled else "are independent" if self.ok else "may still be coupled"
        groups = f", except within groups of {self.group}, which no block separates" * (
            self.group > 1 and not self.coupled
        )
        summary = f"rows {verdict}{groups}: {self.blocks}, {self.evaluations} evaluations of the gradients"
        return "\n- ".join([summary, *map(str, self.dealings), *(f"not judged: {reason}" for reason in self.unjudged)])


def check_rows(step: Step, state: State, batch: Any) -> RowCheck:
    """Check whether a step's values depend on the distribution of rows over blocks; see `TrainStep.check_rows`."""
    shapes = step.shapes(batch)
    traced, rows, num_microbatches = step.traced(shapes), rows_of(shapes), step.strategy.microbatches
    takes_all_rows, rows_per_block = step.tracing.takes_all_rows(traced), rows // (step.replicas * num_microbatches)
    blocks = f"{step.replicas} x {num_microbatches} blocks (replicas x microbatches) of {rows_per_block} rows"
    # There is nothing to permute in blocks of one row, or in a single block.
    if rows_per_block < 2 or step.replicas * (1 if takes_all_rows else num_microbatches) < 2:
        reason = "a block has one row; give more rows" if rows_per_block < 2 else "no two blocks may exchange rows"
        return RowCheck(blocks, 1, (), (f"anything, as {reason}",), 0)
    measurements = _Measurements(step, state, batch, _lowest_epsilon(step, traced.program.eqns))
    block_order = np.arange(rows).reshape(-1, rows_per_block)
    tried_groups: dict[int, tuple[np.ndarray, Dealing]] = {}
    # 1. Permute rows. If they are coupled, permute pairs of rows, then larger groups, which a block may contain as a
    # unit.
    for group in (group for group in range(1, rows_per_block // 2 + 1) if rows_per_block % group == 0):
        # A loss that takes all rows sees one microbatch's rows: only blocks of one microbatch may exchange rows.
        shape = (
            (step.replicas, num_microbatches, rows_per_block // group)
            if takes_all_rows
            else (step.replicas * num_microbatches, 1, rows_per_block // group)
        )
        permuted_order = (_permuted_rows(shape, traced.draws)[..., None] * group + np.arange(group)).reshape(
            -1, rows_per_block
        )
        dealing = measurements.compared("rows permuted between blocks", block_order, permuted_order)
        tried_groups[group] = permuted_order, dealing
        if dealing.same or not dealing.finite:
            break
    # Every size of groups shows coupled rows: report single rows.
    else:
        group = 1
    # 2. Give each block half of its rows, each twice, which shows a loss that uses the number of rows.
    permuted_order, dealing = tried_groups[group]
    dealings, unjudged, row_count = [dealing], list[str](), "the number of rows in a block"
    # Half of each block of the permuted order, so that both comparisons have the groups found above.
    half_order = permuted_order[:, : rows_per_block // 2]
    if not dealing.finite:
        dealings, unjudged = [], ["anything, as the loss or its gradients are not finite"]
    elif traced.draws:
        unjudged = [f"{row_count}, and a row's place, by which the loss draws random numbers"]
    elif rows_per_block % (2 * group):
        unjudged = [f"{row_count}, as {rows_per_block} cannot be halved; give twice as many"]
    elif reason := _trace_error(step, jax.eval_shape(lambda batch: dealt(batch, half_order.reshape(-1)), shapes)):
        unjudged = [f"{row_count}, as half of it is refused: {reason}"]
    elif dealing.same:
        half_dealing = measurements.compared(
            "half of each block, and that half twice", half_order, np.concatenate([half_order, half_order], -1)
        )
        if not half_dealing.finite or (takes_all_rows and not half_dealing.same):
            unjudged = [
                f"{row_count}: {half_dealing}" + ", as the loss takes all rows, and may count them" * takes_all_rows
            ]
        else:
            dealings.append(half_dealing)
    return RowCheck(blocks, group, tuple(dealings), tuple(unjudged), len(measurements.values))


class _Measurements:
    """The values of a step for one batch and one state; every order of the rows is measured once."""

    def __init__(self, step: Step, state: State, batch: Any, epsilon: float):
        self.step, self.state, self.batch, self.epsilon = step, state, batch, epsilon
        self.values: dict[Any, Values] = {}

    def measured(self, order: np.ndarray, is_perturbed: bool = False) -> Values:
        """Return the values for rows in this order; if `is_perturbed`, for parameters perturbed in their last bit."""
        order = np.ascontiguousarray(order, np.int32).reshape(-1)
        if (cache_key := (order.tobytes(), is_perturbed)) not in self.values:
            state = _perturbed(self.state, self.epsilon) if is_perturbed else self.state
            self.values[cache_key] = jax.tree.map(np.asarray, self.step.measured(state, self.batch, order))
        return self.values[cache_key]

    def compared(self, description: str, first_order: np.ndarray, second_order: np.ndarray) -> Dealing:
        """Return the comparison of two orders of the rows."""
        values = self.measured(first_order)
        dealing = Dealing(
            description,
            values,
            self.measured(second_order),
            dict.fromkeys(values, max(_MIN_TOLERANCE, _EPSILONS * self.epsilon)),
        )
        if dealing.same or not dealing.finite:
            return dealing
        # If its terms cancel, a gradient consists of rounding alone. Changing the parameters' last bit shows how large
        # rounding is.
        perturbed_values = self.measured(first_order, is_perturbed=True)
        noise_levels = {
            name: _MARGIN * x for name, x in _relative_errors(values, perturbed_values).items() if math.isfinite(x)
        }
        return replace(
            dealing, allowed={name: max(x, noise_levels.get(name, x)) for name, x in dealing.allowed.items()}
        )


def _permuted_rows(shape: tuple[int, int, int], keep_place: bool) -> np.ndarray:
    """Return a permutation in which blocks of a set exchange rows, the same in every call.

    Args:
      shape: [blocks, sets, rows per block]; rows are exchanged between the blocks of one set.
      keep_place: whether every row keeps its place in its block, and with it the noise that the loss draws for that
        place.

    Returns:
      The row numbers, from 0, in this shape.
    """
    identity = np.arange(math.prod(shape)).reshape(shape)
    for seed in itertools.count():
        # Try seeds in turn until blocks differ. This is deterministic, so that all hosts agree.
        rng = np.random.default_rng(seed)
        permuted_sets = rng.permuted(identity.swapaxes(0, 1).reshape(shape[1], -1), axis=1)
        permuted = (
            rng.permuted(identity, axis=0)
            if keep_place
            else permuted_sets.reshape(shape[1], shape[0], -1).swapaxes(0, 1)
        )
        block_of_row = permuted // shape[-1]
        if (block_of_row != block_of_row[..., :1]).any():  # with few rows, chance may exchange whole blocks
            return permuted
    raise AssertionError("two blocks of two rows can always exchange rows")


def _lowest_epsilon(step: Step, eqns: Any) -> float:
    """Return the epsilon of the lowest dtype in which matmuls run.

    By default, float32 matmuls run in TF32 on GPUs and in bfloat16 on TPUs.
    """
    dtypes = {dtype for dtype in jx.matmuls(eqns) if jnp.issubdtype(dtype, jnp.inexact)}
    platform = step.mesh.devices.flat[0].platform
    if "float32" in dtypes and platform != "cpu" and jax.config.values["jax_default_matmul_precision"] is None:
        dtypes.add("bfloat16" if platform == "tpu" else "float16")  # float16 has TF32's mantissa
    return max(float(jnp.finfo(dtype).eps) for dtype in ("float32", *dtypes))


def _relative_errors(reference: Values, values: Values) -> dict[str, float]:
    """Return the relative error of each value; see `Dealing.errors`."""
    # Errors of small gradients are relative to all of them, or rounding would look large.
    total_norm = math.hypot(*(x[0] for name, x in reference.items() if name != "loss"))
    scales = {
        name: max(abs(x[0]), 1 if name == "loss" else _NORM_FLOOR * total_norm, 1e-30) for name, x in reference.items()
    }
    errors = {name: float(np.abs(values[name] - x).max()) / scales[name] for name, x in reference.items()}
    return {name: x if math.isfinite(x) else math.inf for name, x in errors.items()}


def _trace_error(step: Step, shapes: Any) -> str:
    """Return why a step cannot be traced for a batch of these shapes; "" if it can."""
    try:
        step.traced(shapes)
    except (TypeError, ValueError) as error:  # for example, the loss has a fixed number of rows
        return str(error).partition("\n")[0]
    return ""


def _perturbed(state: State, epsilon: float) -> State:
    """Return the state with its parameters changed at random by up to `epsilon`, relatively.

    `epsilon` is that of the compute dtype, so that about the last bit changes of what the loss computes with.
    """

    def change(leaves: list[jax.Array]) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(leaves))
        factors = (
            1 + epsilon * jax.random.uniform(key, x.shape, minval=-1) for key, x in zip(keys, leaves, strict=True)
        )
        return [
            (x * factor).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x
            for x, factor in zip(leaves, factors, strict=True)
        ]

    # A step computes with the copy in the compute dtype where it has one, and with the parameters otherwise. It never
    # reads both, so that they may change differently.
    leaves, tree = jax.tree.flatten((state.params, state.copy))
    perturbed = jax.jit(change, out_shardings=[x.sharding for x in leaves])(leaves)
    params, copy = jax.tree.unflatten(tree, perturbed)
    return replace(state, params=params, copy=copy)
