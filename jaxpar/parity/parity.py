"""verify: the same mathematics as one device, shown leaf by leaf."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from ..layout.state import State
from ..make import make_train_step
from ..model.model import MAKERS, Model
from ..step.core import Step
from ..step.update import taking_value
from ..strategy import Strategy, as_strategy
from .bisected import Bisected
from .bisection import bisect
from .differences import EPSILON, MARGIN, TOLERANCE, Difference, differences, dtypes_of
from .reference import Reference

_OF = {
    "leaf": "its largest element",
    "tree": "a thousandth of the largest element of all leaves",
    "terms": "the terms that cancel in it",
}


@dataclass(frozen=True)
class Report:
    """The result of `verify`. `ok` is whether the loss and every leaf agree to `tolerance`; `worst` is the leaf
    furthest off; `idle`, whether every gradient is zero on one device, which proves little; `where`, the equation at
    which a difference begins (`jp.bisect`), or why none can be named.

    Attributes:
      expected_loss: of one device that runs the strategy's microbatches, as `ok` and all differences are.
      uncut_loss: with several microbatches, the loss of one device that takes the whole batch at once; another than
        `expected_loss` where the loss takes all rows of a microbatch (`jp.all_rows`, BatchNorm).
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
        """The leaf whose error is largest: among the gradients, if one is wrong, since parameters only follow them."""
        wrong = [d for d in self.differences if d.kind == "gradient" and d.error > self.tolerance]
        return max(wrong or self.differences, key=lambda d: d.error)

    def __repr__(self) -> str:
        w = self.worst
        return f"Report(ok={self.ok}, worst {w.kind} {w.path} {w.error:.2g} of {self.tolerance:.0e}; print it)"

    def __str__(self) -> str:
        w = self.worst
        verdict = "same as one device" if self.ok else "DIFFERS from one device"
        lines = [f"{verdict}: loss {self.loss:.7g}, one device {self.expected_loss:.7g}"]
        line = f"worst {w.kind} {w.path}: error {w.error:.2g} of {_OF[w.scale]} (allowed {self.tolerance:.0e})"
        lines.append(f"{line}, ratio {w.ratio:.4g}" + (f": {w.hint}" if w.hint and w.error > self.tolerance else ""))
        if self.uncut_loss is not None and not _close(self.uncut_loss, self.expected_loss, self.tolerance):
            lines.append(
                "one device was given the same microbatches, and the loss depends on which rows share one: the loss of "
                f"the whole batch at once is {self.uncut_loss:.7g}; microbatches=1 has it"
            )
        if self.idle:
            lines.append("every gradient is zero, on one device too: the loss does not depend on what is trained")
        if by_terms := [f"{d.kind} {d.path}" for d in self.differences if d.scale == "terms"]:
            some = ", ".join(by_terms[:4]) + (f" and {len(by_terms) - 4} more" if len(by_terms) > 4 else "")
            lines.append(f"judged by the terms that cancel in it: {some}")
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
    """Compare a strategy with one device: loss, every gradient leaf, and parameters after some steps.

    The one device sees the same global batch, plainly: no jaxpar machinery beyond the model; where the loss draws
    random numbers, block by block with the blocks' keys. It runs the strategy's microbatches. The loss of the whole
    batch at once is computed too, and the report says so where that is another number.

    Args:
      model, strategy, batch, mesh: as for `make_train_step`; the batch may be NumPy arrays.
      steps: number of steps, from 1.
      key: the key of the initial values; `jax.random.key(0)` if None.
      optimizer: what takes the steps; SGD with momentum if None. (Adam would hide a wrong scale of the gradients in
        the parameters; the gradients are compared beside them, whatever the optimizer.)
      equation: where they differ, find the equation (`jp.bisect`), with which the report ends: some twenty programs.
      progress: whether to show on standard error what runs; None: if that is a terminal.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"verify(steps={steps!r}): use a whole number from 1, such as 3")
    if not isinstance(model, Model):
        raise ValueError(f"model is a {type(model).__name__}; make one with {MAKERS}: verify(model, strategy, batch)")
    if isinstance(strategy, Step) or isinstance(batch, State):
        given = [type(x).__name__ for x in (strategy, batch)]
        raise ValueError(
            f"verify(model, {', '.join(given)}): it makes a step and a state of its own; give what the step is made of "
            "and a batch: verify(model, step.strategy, batch, mesh=step.mesh)"
        )
    key = jax.random.key(0) if key is None else key
    name, strategy = str(strategy), as_strategy(strategy)
    optimizer = optax.sgd(0.1, momentum=0.9) if optimizer is None else optimizer
    model = dataclasses.replace(model, optimizer=None)  # every leaf by the one that is given
    step = make_train_step(model, _remembering(optimizer), strategy, mesh=mesh)
    with _Shown(progress) as shown:
        shown(f"{name}: initial values")
        state = step.init(key)
        shown(f"{name}: step 1 of {steps}")
        state, loss = _first(step, state, batch)
        grads = _gradients(step, state)
        for number in range(1, steps):
            shown(f"{name}: step {number + 1} of {steps}")
            state, _ = step(state, batch)
        reference = Reference(model, step.strategy, step.replicas)
        shown("one device: gradients")
        expected_loss, expected_grads = reference.value_and_grad(key, batch)
        shown(f"one device: {steps} steps")
        expected = reference.train(optimizer, key, batch, steps)
        uncut: float | None = None
        if step.strategy.microbatches > 1:
            shown("one device: the whole batch at once")
            uncut = float(reference.uncut_loss(key, batch))

        low = [*dtypes_of(strategy), *reference.low(batch)]
        tolerance = max(TOLERANCE[dtype] for dtype in low)
        if strategy.reduce == "compute":
            tolerance *= step.replicas
        pairs = (
            ("gradient", grads, expected_grads),
            ("parameter", model.unwrap(step.params(state)), expected),
        )
        found = [d for kind, a, b in pairs for d in differences(kind, a, b, [0.0] * len(jax.tree.leaves(b)))]
        if any(d.error > tolerance for d in found):  # they may be what is left where large terms cancel
            shown("one device: its rounding, where terms cancel")
            epsilon = max(EPSILON[dtype] for dtype in low)
            runs = (
                lambda *nudge: reference.value_and_grad(key, batch, *nudge)[1],
                lambda *nudge: reference.train(optimizer, key, batch, steps, *nudge),
            )
            terms = [[MARGIN * x / tolerance for x in reference.rounding(run, epsilon)] for run in runs]
            again = [d for (kind, a, b), t in zip(pairs, terms, strict=True) for d in differences(kind, a, b, t)]
            found = [by_terms if d.error > tolerance else d for d, by_terms in zip(found, again, strict=True)]
        close = bool(np.isfinite(loss)) and _close(float(loss), float(expected_loss), tolerance)
        ok = close and all(d.error <= tolerance for d in found)
        where: Bisected | str | None = None
        if equation and not ok:
            shown(f"{name}: which equation differs")
            try:
                where = bisect(model, name, None, batch, mesh, key)
            except ValueError as error:  # the report is of the difference, whether or not its equation can be had
                where = f"its equation is not known: {error}"
    idle = not any(np.any(leaf) for leaf in jax.tree.leaves(expected_grads))
    return Report(ok, tolerance, float(loss), float(expected_loss), tuple(found), idle, where, uncut)


def _close(one: float, other: float, tolerance: float) -> bool:
    return bool(np.isclose(one, other, rtol=tolerance, atol=tolerance))


def _remembering(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation, with the gradients that it last saw in its state: the step that trains is also the one whose
    gradients are compared, and no second program is compiled for them.
    """
    inner = taking_value(optimizer)

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params), inner.init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        changes, after = inner.update(updates, state[1], params, **extra)
        return changes, (updates, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _first(step: Any, state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """The state after the first step that is taken, and its loss: float16 skips some, until its scale fits."""
    while True:
        scale = 0.0 if state.scale is None else float(state.scale.scale)
        state, metrics = step(state, batch)
        if state.scale is None or float(state.scale.scale) >= scale:
            return state, metrics["loss"]
        state = dataclasses.replace(state, step=state.step - 1)  # whose number is that of its random keys


def _gradients(step: Any, state: Any) -> Any:
    """What the optimizer last saw, in the model's tree; None where nothing is trained."""
    seen, _ = step.layout.to_logical(jax.tree.map(np.asarray, state.optimizer), "optimizer")
    return step.layout.to_logical(seen) if step.update.as_stacked else seen


class _Shown:
    """One line on standard error that says what runs: compiling a pipeline and its steps may take minutes."""

    def __init__(self, progress: bool | None):
        console = Console(stderr=True, highlight=False)
        self._terminal = console.is_terminal
        self._on = self._terminal if progress is None else progress
        self._console, self._status = console, console.status("verify")

    def __enter__(self) -> "_Shown":
        if self._on and self._terminal:
            self._status.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._status.stop()

    def __call__(self, what: str) -> None:
        if self._on and self._terminal:
            self._status.update(Text(f"verify: {what}"))
        elif self._on:
            self._console.print(Text(f"verify: {what}"), soft_wrap=True)
