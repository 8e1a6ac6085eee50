"""Where a loss that somebody wrote by hand parts from a model's own: two programs of other equations.

Both, with their gradients, are evaluated equation by equation on one device, loops iteration by iteration. Of every
result some numbers are kept: its size, its norm, two weighted sums. A result that the other program has too is aligned,
wherever it stands there and whatever made it. Back from the loss, or from the gradient that is furthest off, through
results that are not aligned, one comes to equations of which all operands are and the result is not: there they part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..backend.cpu_compiler import cpu_options
from ..model.model import Mean, Model, is_replicated
from ..program.evaluation import Evaluation, is_backward, line_of, scope_of
from ..step.gradients import block_key
from ..strategy import as_strategy
from .bisected import Bisected
from .differences import TOLERANCE, furthest
from .reference import Reference

_TAKEN = "a loss of (params, batch); of a step give the loss that it differentiates: if that agrees, optimizers part"


def beside(model: Model, loss: Callable[..., Any], batch: Any, key: jax.Array) -> Bisected:
    """Where a user's loss parts from the model's own, on one device, in the dtypes that the model declares.

    Args:
      loss: `loss(params, batch)` or `(params, batch, key)`, of a stateful model also `(params, variables, batch, key)`:
        a scalar, `jp.Mean`, or a tuple that begins with either. `params` is the tree of `step.params`, the key that of
        a first step's first block of rows.

    Costs two gradients as `jax.jit` makes them, and where they differ two evaluations without it, in which every result
    comes to the host once: one device's gradient in memory, unfused.

    Raises ValueError where `loss` takes or returns something else, and where only what XLA makes of the two differs.
    """
    name = getattr(loss, "__name__", repr(loss))
    ours, theirs = _own(model), _objective(loss, name, model)
    args = jax.tree.map(jnp.asarray, (*model.create(key), batch, block_key(jax.random.fold_in(key, 1), 0, 0)))
    tolerance = max(TOLERANCE[one] for one in Reference(model, as_strategy("single"), 1).low(batch))
    compiled = [_compiled(one, args) for one in (ours, theirs)]
    told = furthest(compiled[1], compiled[0], tolerance)
    said = "the model's own loss", name
    if told.error <= told.allowed:
        return Bisected(*said, "", "", "", None, False, "", 0.0, tolerance, 1)
    places = [i for i, x in enumerate(jax.tree.leaves(args[0]), 1) if jnp.issubdtype(x.dtype, jnp.inexact)]
    out = 0 if told.leaf is None else places[told.leaf]  # among the results of a value and its gradients
    one, two = (_Results(program, args) for program in (ours, theirs))
    at, there = one.first_apart(two, out, tolerance), two.first_apart(one, out, tolerance)
    if (first := at or there) is None:
        raise ValueError(
            f"{name} and the model's own loss differ as compiled, {told.what} by {told.error:.2g}, and agree equation "
            "by equation: XLA computes one of them wrong; compare it on two devices (mesh_b=), or call this again in a "
            "process with another release of jax"
        )
    other = f"in {name}: {there}" if there and at else f"this is of {name if there else said[0]}: the other has it all"
    common, count = sum(two.are_aligned(one, tolerance)), len(two.results)
    apart = f"{other}\n  {common} of {count} results of {name} are, by value, among the model's own {len(one.results)}"
    return Bisected(
        *said, first.sites[-1].primitive.name, line_of(first.sites), scope_of(first.sites), first.iteration, out > 0,
        told.what, told.error, tolerance, 1, apart,
    )  # fmt: skip


def _objective(loss: Callable[..., Any], name: str, model: Model) -> Callable[..., jax.Array]:
    """A user's loss as a function of parameters, variables, batch and key."""
    takes = len(inspect.signature(loss).parameters)
    if takes not in (2, 3, 4) or (takes == 4) > model.stateful:
        raise ValueError(f"bisect(b={name}) takes {takes} arguments; use (params, batch) or (params, batch, key)")

    def value(params: Any, variables: Any, batch: Any, key: Any) -> jax.Array:
        batch = jax.tree.map(lambda x: x.value if is_replicated(x) else x, batch, is_leaf=is_replicated)
        args = (variables, batch, key) if takes == 4 else (batch, key)[: takes - 1]
        try:
            out = loss(model.wrap(params), *args)
        except Exception as error:
            error.add_note(f"bisect(b={name}) calls it as {_TAKEN}")
            raise
        out = out[0] if isinstance(out, tuple) else out
        out = out.total / out.count if isinstance(out, Mean) else out
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(out)) or jnp.shape(out):
            said = f"an array of shape {jnp.shape(out)}" if hasattr(out, "shape") else f"a {type(out).__name__}"
            raise ValueError(f"bisect(b={name}) returned {said}; return a scalar: it is taken for {_TAKEN}")
        return jnp.asarray(out)

    return value


def _own(model: Model) -> Callable[..., jax.Array]:
    def value(params: Any, variables: Any, batch: Any, key: Any) -> jax.Array:
        mean = model.call(params, variables, batch, key)[0]["loss"]
        return mean.total / mean.count

    return value


def _compiled(loss: Callable[..., jax.Array], args: Sequence[Any]) -> tuple[float, Any]:
    value, grads = jax.jit(jax.value_and_grad(loss, allow_int=True), compiler_options=cpu_options())(*args)
    floats = lambda x: np.asarray(x) if jnp.issubdtype(x.dtype, jnp.inexact) else None
    return float(value), jax.tree.map(floats, grads)


@dataclass(frozen=True)
class _Result:
    """A value `x`, while it is held: by which equations it was computed, outermost first (none: it was given), of which
    others, with its `numbers`; or an iteration's part of another.
    """

    x: Any
    number: int
    sites: tuple[Any, ...]
    iteration: int | None
    operands: tuple[int, ...]
    size: int
    numbers: np.ndarray
    is_part: bool = False

    def __str__(self) -> str:
        at = f"{self.sites[-1].primitive.name} at {line_of(self.sites) or 'no line of the program'}"
        return at if self.iteration is None else f"{at}, iteration {self.iteration} of the loop"


class _Results(Evaluation):
    """Value and gradients of a loss, every result with its numbers."""

    def __init__(self, loss: Callable[..., jax.Array], args: Sequence[Any]):
        super().__init__(lambda outs: True)
        self.results: list[_Result] = []
        self.outs = self.of(jax.value_and_grad(loss, allow_int=True), [""] * len(jax.tree.leaves(args)), *args)

    def given(self, x: Any, name: str) -> _Result:
        return self._noted(x, (), ())

    def made(self, x: Any, at: int | None, ins: Sequence[_Result], within: Sequence[_Result] = ()) -> _Result:
        return self._noted(x, self.sites, within or ins, is_part=at is None)

    def first_apart(self, other: _Results, out: int, tolerance: float) -> _Result | None:
        """The first equation before an output that makes what the other has not, of operands that it has."""
        aligned = self.are_aligned(other, tolerance, forwards=out > 0)
        first: list[int | None] = []  # before each result
        for result, known in zip(self.results, aligned, strict=True):
            before = [at for i in result.operands if (at := first[i]) is not None]
            first.append(None if known else min(before, default=result.number))
        return None if (at := first[self.outs[out].number]) is None else self.results[at]

    def are_aligned(self, other: _Results, tolerance: float, forwards: bool = False) -> list[bool]:
        """Of each result whether it was given, or the other has it too, or that of which it is a part; or, where
        `forwards` says that the losses agree, whether it is one of the forward.
        """
        table: dict[int, list[np.ndarray]] = {}
        for result in other.results:
            table.setdefault(result.size, []).append(result.numbers)
        stacked = {size: np.stack(numbers) for size, numbers in table.items()}
        aligned: list[bool] = []
        for result in self.results:
            among = stacked.get(result.size, np.full((1, 3), np.inf))
            near = np.abs(among - result.numbers) <= 3 * tolerance * max(result.numbers[0], 1e-30)
            known = not result.sites or (forwards and not is_backward(result.sites)) or bool(near.all(1).any())
            aligned.append(known or (result.is_part and aligned[result.operands[0]]))
        return aligned

    def _noted(self, x: Any, sites: tuple[Any, ...], of: Sequence[_Result], is_part: bool = False) -> _Result:
        """A result; its numbers are the same whatever its shape is."""
        key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
        values = np.asarray(jax.random.key_data(x) if key else x).ravel()
        values = np.where(np.isfinite(values), values, 1e4).astype(np.float64)
        places = np.arange(values.size)
        numbers = [np.sqrt((values**2).sum()), values @ np.cos(places + 1), values @ np.cos(0.37 * places**1.5)]
        iteration, operands = self.loops[-1][1] if self.loops else None, tuple(one.number for one in of)
        made = _Result(x, len(self.results), sites, iteration, operands, values.size, np.array(numbers), is_part)
        self.results.append(replace(made, x=None))
        return made
