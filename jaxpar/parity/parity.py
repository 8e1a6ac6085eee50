"""`verify`: show that a strategy computes what one device computes, leaf by leaf.

The strategy's step trains for some steps, and so does `Reference`, plain JAX on one device. Loss, gradients and
parameters must agree to within rounding. Where they do not, `bisect` names the equation that differs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from ..backend.counts import is_count
from ..backend.text import few
from ..layout.state import State
from ..make import make_train_step
from ..model.batches import as_array
from ..model.model import MAKERS, Model
from ..step.core import Step
from ..step.update import taking_value
from ..strategy import Strategy, as_strategy
from .bisected import Bisected
from .bisection import bisect
from .differences import EPSILON, MARGIN, TOLERANCE, Difference, differences, dtypes_of
from .reference import Reference

_SCALE_TEXTS = {  # `Difference.scale` -> how it prints
    "leaf": "its largest element",
    "tree": "1/1000 of the largest element of all leaves, because this leaf is almost zero",
    "terms": "the terms that cancel in it",
}


@dataclass(frozen=True)
class Report:
    """The result of `verify`. Print it.

    Attributes:
      ok: whether the loss and every leaf agree to within `tolerance`.
      tolerance: the error that is allowed.
      loss: the loss of the strategy's first step.
      expected_loss: the loss of one device that runs the strategy's microbatches. `ok` and all differences are relative
        to such a device.
      differences: one difference per gradient leaf and per parameter leaf.
      idle: whether every gradient is zero on one device. Agreement then proves little.
      where: if the sides differ, the equation that differs first (`jp.bisect`), or why none can be named.
      uncut_loss: with several microbatches, the loss of one device that takes the whole batch at once. It differs from
        `expected_loss` if the loss couples the rows of a microbatch (`jp.all_rows`, BatchNorm).
    """

    ok: bool
    tolerance: float
    loss: float
    expected_loss: float
    differences: tuple[Difference, ...]
    idle: bool = False
    where: Bisected | str | None = None
    uncut_loss: float | None = None

    @property
    def worst(self) -> Difference:
        """Return the difference with the largest error: a gradient's, if one is wrong, since parameters follow them."""
        wrong = [d for d in self.differences if d.kind == "gradient" and d.error > self.tolerance]
        return max(wrong or self.differences, key=lambda d: d.error)

    def __repr__(self) -> str:
        w = self.worst
        return f"Report(ok={self.ok}, worst {w.kind} {w.path} {w.error:.2g} of {self.tolerance:.0e}; print it)"

    def __str__(self) -> str:
        w = self.worst
        verdict = "same as one device" if self.ok else "DIFFERS from one device"
        lines = [f"{verdict}: loss {self.loss:.7g}, one device {self.expected_loss:.7g}"]
        line = f"worst {w.kind} {w.path}: error {w.error:.2g} of {_SCALE_TEXTS[w.scale]} (allowed {self.tolerance:.0e})"
        if w.error > self.tolerance:
            line += f", ratio {w.ratio:.4g}" + f": {w.hint}" * bool(w.hint)
        lines.append(line)
        if self.uncut_loss is not None and not _is_close(self.uncut_loss, self.expected_loss, self.tolerance):
            lines.append(
                "one device was given the same microbatches, and the loss depends on which rows share one: the loss of "
                f"the whole batch at once is {self.uncut_loss:.7g}; microbatches=1 has it"
            )
        if self.idle:
            lines.append("every gradient is zero, on one device too: the loss depends on no trained parameter")
        if by_terms := [f"{d.kind} {d.path}" for d in self.differences if d.scale == "terms"]:
            lines.append(f"zero in exact arithmetic, so compared with their rounding: {few(by_terms, 4)}")
        return "\n".join([*lines, *([str(self.where)] if self.where is not None else [])])


def verify(
    model: Model,
    strategy: Strategy | str,
    batch: Any,
    steps: int = 3,
    key: jax.Array | None = None,
    mesh: Mesh | Sequence[jax.Device] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    progress: bool | None = None,
    equation: bool = True,
) -> Report:
    """Compare a strategy with one device: the loss, every gradient, and the parameters after some steps.

    The one device runs the model without jaxpar, on the same global batch. It runs the strategy's microbatches, and, if
    the loss draws random numbers, the same blocks of rows with the same keys. If the loss of the whole batch at once is
    another number, the report says so.

    Args:
      model, strategy, batch, mesh: as for `make_train_step`; the batch may be NumPy arrays.
      steps: the number of steps, from 1.
      key: the key of the initial values; `jax.random.key(0)` if None.
      optimizer: takes the steps; SGD with momentum if None. Adam would hide a wrong scale of the gradients in the
        parameters; the gradients are compared too, whatever the optimizer.
      equation: if the sides differ, find the equation by `jp.bisect`, which runs some twenty programs.
      progress: whether to show progress on standard error; None: if that is a terminal.

    Raises:
      ValueError: an argument is invalid, or `make_train_step` refuses the strategy.
    """
    _check_arguments(model, strategy, batch, steps)
    key = jax.random.key(0) if key is None else key
    batch = jax.tree.map(as_array, batch)
    name, strategy = str(strategy), as_strategy(strategy)
    optimizer = optax.sgd(0.1, momentum=0.9) if optimizer is None else optimizer
    model = dataclasses.replace(model, optimizer=None)  # the given optimizer updates every leaf
    step = make_train_step(model, _recording_gradients(optimizer), strategy, mesh=mesh)
    with _Progress(progress) as show:
        # 1. The strategy.
        state, loss, grads = _train(step, name, key, batch, steps, show)

        # 2. One device.
        reference = Reference(model, step.strategy, step.replicas)
        show("one device: gradients")
        expected_loss, expected_grads = reference.value_and_grad(key, batch)
        show(f"one device: {steps} steps")
        expected_params = reference.train(optimizer, key, batch, steps)
        # Only with several microbatches can the two losses of one device differ.
        uncut_loss: float | None = None
        if step.strategy.microbatches > 1:
            show("one device: the whole batch at once")
            uncut_loss = float(reference.uncut_loss(key, batch))

        # 3. Compare them leaf by leaf.
        dtypes = [*dtypes_of(strategy), *reference.model_dtypes(batch)]
        tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
        if strategy.reduce == "compute":
            tolerance *= step.replicas  # a sum over n ranks in low precision rounds up to n times

        def cancelling_terms() -> list[list[float]]:
            show("one device: its rounding, where terms cancel")
            epsilon = max(EPSILON[dtype] for dtype in dtypes)
            runs = (
                lambda *nudge: reference.value_and_grad(key, batch, *nudge)[1],
                lambda *nudge: reference.train(optimizer, key, batch, steps, *nudge),
            )
            return [[MARGIN * x / tolerance for x in reference.rounding(run, epsilon)] for run in runs]

        params = model.unwrap(step.params(state))
        pairs = ("gradient", grads, expected_grads), ("parameter", params, expected_params)
        compared = _compare(pairs, tolerance, cancelling_terms)
        is_close = bool(np.isfinite(loss)) and _is_close(float(loss), float(expected_loss), tolerance)
        ok = is_close and all(d.error <= tolerance for d in compared)

        # 4. Find the equation.
        where: Bisected | str | None = None
        if equation and not ok:
            show(f"{name}: which equation differs")
            where = _differing_equation(model, name, batch, mesh, key)
    is_idle = not any(np.any(leaf) for leaf in jax.tree.leaves(expected_grads))
    return Report(ok, tolerance, float(loss), float(expected_loss), tuple(compared), is_idle, where, uncut_loss)


def _check_arguments(model: Any, strategy: Any, batch: Any, steps: Any) -> None:
    """Raise ValueError for arguments of `verify` that are often confused with others."""
    if not is_count(steps):
        raise ValueError(f"verify(steps={steps!r}): use a whole number from 1, such as 3")
    if not isinstance(model, Model):
        raise ValueError(f"model is a {type(model).__name__}; make one with {MAKERS}: verify(model, strategy, batch)")
    if isinstance(strategy, Step) or isinstance(batch, State):
        types = [type(x).__name__ for x in (strategy, batch)]
        raise ValueError(
            f"verify(model, {', '.join(types)}): it makes its own step and state; give what the step is made of and a "
            "batch: verify(model, step.strategy, batch, mesh=step.mesh)"
        )


def _train(
    step: Step, name: str, key: jax.Array, batch: Any, steps: int, show: Callable[[str], None]
) -> tuple[Any, jax.Array, Any]:
    """Train from initial values. Return the last state, and loss and gradients of the first step."""
    show(f"{name}: initial values")
    state = step.init(key)
    show(f"{name}: step 1 of {steps}")
    state, loss = _first_step(step, state, batch)
    grads = _recorded_gradients(step, state)
    for number in range(1, steps):
        show(f"{name}: step {number + 1} of {steps}")
        state, _ = step(state, batch)
    return state, loss, grads


def _compare(
    pairs: Sequence[tuple[str, Any, Any]], tolerance: float, cancelling_terms: Callable[[], list[list[float]]]
) -> list[Difference]:
    """Compare pairs of trees (their kind, the strategy's, one device's) leaf by leaf.

    Where large terms cancel, a difference may be their rounding. If a leaf differs, `cancelling_terms` measures it: it
    returns the size of such terms for each leaf of each pair.
    """
    # First without cancelling terms: measuring them takes several more runs.
    compared = [d for kind, a, b in pairs for d in differences(kind, a, b, [0.0] * len(jax.tree.leaves(b)))]
    if not any(d.error > tolerance for d in compared):
        return compared
    terms = zip(pairs, cancelling_terms(), strict=True)
    by_terms = [d for (kind, a, b), leaf_terms in terms for d in differences(kind, a, b, leaf_terms)]
    return [lenient if d.error > tolerance else d for d, lenient in zip(compared, by_terms, strict=True)]


def _differing_equation(model: Model, name: str, batch: Any, mesh: Any, key: jax.Array) -> Bisected | str:
    """Return the equation at which a strategy differs from one device, or a sentence on why it is not known."""
    try:
        return bisect(model, name, None, batch, mesh, key)
    except ValueError as error:
        # The report is about the difference, with or without its equation.
        return f"its equation is not known: {error}"


def _is_close(a: float, b: float, tolerance: float) -> bool:
    """Return whether two losses agree, relatively or, near zero, absolutely."""
    return bool(np.isclose(a, b, rtol=tolerance, atol=tolerance))


def _recording_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimizer, with the last gradients in its state.

    `verify` then compares the gradients of the very step that trains, and compiles no second program for them.
    """
    inner = taking_value(optimizer)

    def init(params: Any) -> Any:
        # (gradients, inner state): the layout stores the gradients as it stores a moment.
        return jax.tree.map(jnp.zeros_like, params), inner.init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        changes, inner_state = inner.update(updates, state[1], params, **extra)
        return changes, (updates, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _first_step(step: Any, state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """Return the state and the loss of the first step that is not skipped.

    float16 skips steps until its loss scale does not overflow; a skipped step lowers the scale.
    """
    while True:
        scale = 0.0 if state.scale is None else float(state.scale.scale)
        state, metrics = step(state, batch)
        if state.scale is None or float(state.scale.scale) >= scale:
            return state, metrics["loss"]
        state = dataclasses.replace(state, step=state.step - 1)  # random keys follow from the step's number


def _recorded_gradients(step: Any, state: Any) -> Any:
    """Return the gradients that the optimizer saw last, in the model's tree; None for frozen parameters."""
    # From the shards to the optimizer's view, and from there to the model's tree if the optimizer sees stacks.
    grads, _ = step.layout.to_logical(jax.tree.map(np.asarray, state.optimizer), "optimizer")
    return step.layout.to_logical(grads) if step.update.as_stacked else grads


class _Progress:
    """One line on standard error that says what runs. Compiling a pipeline and its steps may take minutes.

    Args:
      progress: whether to show it; None: if standard error is a terminal.
    """

    def __init__(self, progress: bool | None):
        console = Console(stderr=True, highlight=False)
        self._terminal = console.is_terminal
        self._is_on = self._terminal if progress is None else progress
        self._console, self._status = console, console.status("verify")

    def __enter__(self) -> "_Progress":
        if self._is_on and self._terminal:
            self._status.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._status.stop()

    def __call__(self, message: str) -> None:
        """Show a message: on a terminal in one line, which it replaces; else as a new line."""
        if self._is_on and self._terminal:
            self._status.update(Text(f"verify: {message}"))
        elif self._is_on:
            self._console.print(Text(f"verify: {message}"), soft_wrap=True)
