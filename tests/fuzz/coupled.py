"""Whether a loss couples rows: what blocks of its rows add up to says so, beside what jaxpar says."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import optax

import jaxpar as jp

from .parity import CRASHED, REFUSED, Invalid, Outcome, converted, raw, refusal
from .programs import Program

WARNED, SILENT, FALSE_ALARM, UNFELT = "warned", "silent", "refused, innocent", "unfelt"
BLOCKS = (1, 2, 4)
APART = 1e-5  # float64: relative to the largest element; casts to float32 in a program leave 1e-7
DRAWS = 2


def couples(program: Program) -> bool:
    """Whether the loss or a gradient of a batch is another than that of its blocks of rows together."""
    if not program.shapes:
        raise Invalid("no parameters")
    with jax.enable_x64(True):
        loss = program.loss()

        def part(params: Any, rows: Any, every: Any) -> tuple[Any, Any]:
            """A block's part of the loss, of whose rows (or counts) all blocks have `every`; and its own."""
            found = loss(params, rows)
            found = found[0] if isinstance(found, tuple) else found
            n = len(next(iter(rows.values())))
            total, count = (found.total, found.count) if isinstance(found, jp.Mean) else (found * n, 1.0 * n)
            return total / every, count

        def together(params: Any, batch: Any) -> list[Any]:
            results = []
            for n in BLOCKS:
                blocks = [jax.tree.map(lambda x, n=n, k=k: x.reshape(n, -1, *x.shape[1:])[k], batch) for k in range(n)]
                # What a derivative of the loss's own does with a cotangent may not be linear: it is that of all blocks.
                every = sum(grad(params, rows, 1.0)[0][1] for rows in blocks)
                parts = [(value, by) for (value, _), by in (grad(params, rows, every) for rows in blocks)]
                results.append(jax.tree.leaves(jax.tree.map(lambda *xs: np.asarray(sum(xs)), *parts)))
            return results

        grad = jax.jit(jax.value_and_grad(part, has_aux=True))
        worst = 0.0
        try:
            for draw in range(DRAWS):
                params, batch = (converted(arrays, "float64") for arrays in (program.params(), program.batch(draw)))
                whole, *others = together(params, batch)
                largest = max(float(np.abs(x).max(initial=0)) for x in whole[1:]) if len(whole) > 1 else 0.0
                if not all(np.isfinite(x).all() for x in whole) or not largest < 1e12:
                    raise Invalid("not finite")
                for parts in others:
                    for x, y in zip(whole, parts, strict=True):
                        scale = max(float(np.abs(x).max(initial=0)), 1e-4 * largest, 1e-12)
                        worst = max(worst, float(np.abs(x - y).max(initial=0)) / scale)
        except Invalid:
            raise
        except Exception as error:
            raise Invalid(f"{type(error).__name__}: {error}") from error
    return not worst <= APART


def said(program: Program, strategy: str, devices: int) -> Outcome:
    """What jaxpar says of the loss before anything runs: refused, warned or silent."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step = jp.make_train_step(program.model(), optax.sgd(0.1), strategy, mesh=jax.devices()[:devices])
            step.traced(program.batch())
        except Exception as error:
            return Outcome(REFUSED, str(error)) if refusal(error) else Outcome(CRASHED, raw(error))
    of_rows = [str(w.message) for w in caught if "couple" in str(w.message)]
    return Outcome(WARNED, of_rows[0]) if of_rows else Outcome(SILENT)


def verdict(program: Program, strategy: str, devices: int) -> tuple[bool, Outcome]:
    """Whether rows are coupled, and what jaxpar says. Raises `Invalid` for what is no program."""
    return couples(program), said(program, strategy, devices)
