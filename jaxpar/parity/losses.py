"""Compare a loss that a user wrote by hand with the model's own loss: two programs with different equations.

Both losses, with their gradients, are evaluated on one device, equation by equation and loop iteration by iteration.
Each result is reduced to a fingerprint of three numbers: its norm and two weighted sums. A result is *aligned* if the
other program has a result of the same size and fingerprint, whatever its place and whatever computed it.

    x = b @ w          aligned
    y = x * 0.25       not aligned, all operands aligned:  the programs part here
    z = softmax(y)     not aligned, because y is not

The search goes back from the loss, or from the gradient that differs most, through results that are not aligned, to
such an equation.
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
from ..step.blocks import block_key
from ..strategy import as_strategy
from .bisected import Bisected
from .differences import TOLERANCE, largest_difference
from .reference import Reference

_USAGE = (
    "a loss of (params, batch); for a step, give the loss that it differentiates: if that agrees, the optimizers differ"
)


def bisect_losses(model: Model, loss: Callable[..., Any], batch: Any, key: jax.Array) -> Bisected:
    """Find the equation at which a user's loss parts from the model's own, on one device, in the model's dtypes.

    Compiles both gradients. If they differ, evaluates both without `jit`: every result is copied to the host once, and
    the device holds one unfused gradient.

    Args:
      loss: `loss(params, batch)` or `(params, batch, key)`; for a stateful model also
        `(params, variables, batch, key)`. It returns a scalar, a `jp.Mean`, or a tuple that begins with either.
        `params` is the tree of `step.params`; `key` is the key of the first block of rows in the first step.

    Raises:
      ValueError: `loss` takes or returns something else; or the losses differ only as XLA compiles them.
    """
    name = getattr(loss, "__name__", repr(loss))
    model_loss, user_loss = _model_loss(model), _user_loss(loss, name, model)
    # The keys are those of a step: 1 for its random numbers, then the step's number, then the block's.
    args = jax.tree.map(jnp.asarray, (*model.create(key), batch, block_key(jax.random.fold_in(key, 1), 0, 0)))
    tolerance = max(TOLERANCE[dtype] for dtype in Reference(model, as_strategy("single"), 1).model_dtypes(batch))

    # 1. Compare the compiled gradients.
    model_result, user_result = [_value_and_grad(program, args) for program in (model_loss, user_loss)]
    difference = largest_difference(user_result, model_result, tolerance)
    names = "the model's own loss", name
    if difference.error <= difference.allowed:
        return Bisected(*names, "", "", "", None, False, "", 0.0, tolerance, 1)

    # 2. Evaluate both, and search back from the output that differs most. Output 0 is the loss; the gradients follow,
    #    also for integer parameters, which `largest_difference` leaves out.
    float_outputs = [i for i, x in enumerate(jax.tree.leaves(args[0]), 1) if jnp.issubdtype(x.dtype, jnp.inexact)]
    output = 0 if difference.leaf is None else float_outputs[difference.leaf]
    model_results, user_results = (_Results(program, args) for program in (model_loss, user_loss))
    in_model = model_results.first_unaligned(user_results, output, tolerance)
    in_user = user_results.first_unaligned(model_results, output, tolerance)
    if (first := in_model or in_user) is None:
        raise ValueError(
            f"{name} and the model's own loss differ as compiled, {difference.what} by {difference.error:.2g}, and "
            "agree equation by equation: XLA computes one of them wrong; compare it on two devices (mesh_b=), or call "
            "this again in a process with another release of jax"
        )

    # 3. Report the equation in the model's loss, and the corresponding one in the user's.
    if in_model and in_user:
        counterpart = f"in {name}: {in_user}"
    else:
        counterpart = f"this equation is of {name if in_user else names[0]}, which has every result of the other loss"
    num_aligned, num_results = sum(user_results.are_aligned(model_results, tolerance)), len(user_results.results)
    overlap = (
        f"{num_aligned} of {num_results} results of {name} are, by value, among the model's own "
        f"{len(model_results.results)}"
    )
    return Bisected(
        *names, first.sites[-1].primitive.name, line_of(first.sites), scope_of(first.sites), first.iteration,
        output > 0, difference.what, difference.error, tolerance, 1, f"{counterpart}\n  {overlap}",
    )  # fmt: skip


def _user_loss(loss: Callable[..., Any], name: str, model: Model) -> Callable[..., jax.Array]:
    """Return a user's loss as a function of parameters, variables, batch and key, which returns a scalar."""
    num_args = len(inspect.signature(loss).parameters)
    # A comparison of two booleans: four arguments are for a stateful model alone.
    if num_args not in (2, 3, 4) or (num_args == 4) > model.stateful:
        raise ValueError(f"bisect(b={name}) takes {num_args} arguments; use (params, batch) or (params, batch, key)")

    def value(params: Any, variables: Any, batch: Any, key: Any) -> jax.Array:
        batch = jax.tree.map(lambda x: x.value if is_replicated(x) else x, batch, is_leaf=is_replicated)
        args = (variables, batch, key) if num_args == 4 else (batch, key)[: num_args - 1]
        try:
            result = loss(model.wrap(params), *args)
        except Exception as error:
            error.add_note(f"bisect(b={name}) calls it as {_USAGE}")
            raise
        result = result[0] if isinstance(result, tuple) else result
        result = result.total / result.count if isinstance(result, Mean) else result
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(result)) or jnp.shape(result):
            is_array = hasattr(result, "shape")
            description = f"an array of shape {jnp.shape(result)}" if is_array else f"a {type(result).__name__}"
            raise ValueError(f"bisect(b={name}) returned {description}; return a scalar: it is taken for {_USAGE}")
        return jnp.asarray(result)

    return value


def _model_loss(model: Model) -> Callable[..., jax.Array]:
    """Return the model's loss as a function of parameters, variables, batch and key, which returns a scalar."""

    def value(params: Any, variables: Any, batch: Any, key: Any) -> jax.Array:
        mean = model.call(params, variables, batch, key)[0]["loss"]
        return mean.total / mean.count

    return value


def _value_and_grad(loss: Callable[..., jax.Array], args: Sequence[Any]) -> tuple[float, Any]:
    """Return a loss and its gradients as NumPy arrays; None for integer parameters."""
    value, grads = jax.jit(jax.value_and_grad(loss, allow_int=True), compiler_options=cpu_options())(*args)
    floats = lambda x: np.asarray(x) if jnp.issubdtype(x.dtype, jnp.inexact) else None
    return float(value), jax.tree.map(floats, grads)


@dataclass(frozen=True)
class _Result:
    """A value that a program computes.

    Attributes:
      x: the array, until the program's last use of it; None in the list of all results.
      index: its index among the results of the program.
      sites: the equation that computed it, after those that contain it, outermost first. Empty for an input.
      iteration: the iteration of the innermost loop. None outside loops.
      operands: the indices of the results that it was computed from.
      size: the number of its elements.
      fingerprint: its norm and two weighted sums.
      is_part: whether it is the part of its first operand that an iteration of a scan reads.
    """

    x: Any
    index: int
    sites: tuple[Any, ...]
    iteration: int | None
    operands: tuple[int, ...]
    size: int
    fingerprint: np.ndarray
    is_part: bool = False

    def __str__(self) -> str:
        equation = f"{self.sites[-1].primitive.name} at {line_of(self.sites) or 'no line of the program'}"
        return equation if self.iteration is None else f"{equation}, iteration {self.iteration} of the loop"


class _Results(Evaluation):
    """Evaluates value and gradients of a loss, and keeps a fingerprint of every result.

    Attributes:
      results: all results, in the order in which they are computed.
      outputs: the results of the program: the value, then the gradients.
    """

    def __init__(self, loss: Callable[..., jax.Array], args: Sequence[Any]):
        super().__init__(lambda outs: True)
        self.results: list[_Result] = []
        self.outputs = self.of(jax.value_and_grad(loss, allow_int=True), [""] * len(jax.tree.leaves(args)), *args)

    def given(self, x: Any, name: str) -> _Result:
        """Record an input, a constant or a literal."""
        return self._record(x, (), ())

    def made(self, x: Any, at: int | None, ins: Sequence[_Result], within: Sequence[_Result] = ()) -> _Result:
        """Record a result of the current equation, or, if `at` is None, the part of an operand that an iteration reads.

        The operands of a loop's result are the results of its iterations, `within`.
        """
        return self._record(x, self.sites, within or ins, is_part=at is None)

    def first_unaligned(self, counterpart: _Results, output: int, tolerance: float) -> _Result | None:
        """Return the first result before an output that is not aligned, though all its operands are.

        `output` is the output's index. If it is aligned itself, return None.
        """
        aligned = self.are_aligned(counterpart, tolerance, forward_agrees=output > 0)
        # For each result: the index of the first unaligned result that it follows from. None if it is aligned.
        origins: list[int | None] = []
        for result, is_aligned in zip(self.results, aligned, strict=True):
            # The first of the unaligned results that the operands follow from, or else this result.
            operand_origins = [origin for i in result.operands if (origin := origins[i]) is not None]
            origins.append(None if is_aligned else min(operand_origins, default=result.index))
        return None if (origin := origins[self.outputs[output].index]) is None else self.results[origin]

    def are_aligned(self, counterpart: _Results, tolerance: float, forward_agrees: bool = False) -> list[bool]:
        """Return for each result whether it is aligned with a result of the other program.

        Inputs are aligned, as are the parts of aligned results. If the losses agree (`forward_agrees`), so are all
        results of the forward.
        """
        fingerprints: dict[int, list[np.ndarray]] = {}
        for result in counterpart.results:
            fingerprints.setdefault(result.size, []).append(result.fingerprint)
        stacked = {size: np.stack(numbers) for size, numbers in fingerprints.items()}
        aligned: list[bool] = []
        for result in self.results:
            # Without a result of this size, none is near.
            candidates = stacked.get(result.size, np.full((1, 3), np.inf))
            # The norm is the scale of all three numbers: the terms of weighted sums may cancel.
            is_near = np.abs(candidates - result.fingerprint) <= 3 * tolerance * max(result.fingerprint[0], 1e-30)
            in_forward = forward_agrees and not is_backward(result.sites)
            is_aligned = not result.sites or in_forward or bool(is_near.all(1).any())
            aligned.append(is_aligned or (result.is_part and aligned[result.operands[0]]))
        return aligned

    def _record(self, x: Any, sites: tuple[Any, ...], operands: Sequence[_Result], is_part: bool = False) -> _Result:
        """Record a result with its fingerprint, which does not depend on its shape."""
        is_key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
        values = np.asarray(jax.random.key_data(x) if is_key else x).ravel()
        # An infinity, as in a mask, would hide all other values in the sums.
        values = np.where(np.isfinite(values), values, 1e4).astype(np.float64)
        i = np.arange(values.size)
        # Weights without a period, so that permuted or shifted values have other sums.
        fingerprint = [np.sqrt((values**2).sum()), values @ np.cos(i + 1), values @ np.cos(0.37 * i**1.5)]
        iteration = self.loops[-1][1] if self.loops else None
        indices = tuple(operand.index for operand in operands)
        result = _Result(x, len(self.results), sites, iteration, indices, values.size, np.array(fingerprint), is_part)
        # Keep no array here: the evaluation holds it until its last use, and frees it then.
        self.results.append(replace(result, x=None))
        return result
