"""Covering arrays, and what a cell of a battery checks of a step."""

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
import optax
from rendezvous import unordered

from jaxpar.inspect.expected import expected
from jaxpar.inspect.ledger import Ledger
from jaxpar.parity.parity import TOLERANCE, differences
from jaxpar.step.blocks import block_key

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "lamb": lambda: optax.lamb(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clip-adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
}


def pairs_of(cell: tuple[Any, ...]) -> set[Any]:
    """Of the choices that a cell is."""
    return {*itertools.combinations(enumerate(cell), 2)}


def covering(product: Iterable[Any], pairs_of: Callable[[Any], set[Any]] = pairs_of) -> list[Any]:
    """Cells (tuples of choices) in which every pair of choices that some cell has occurs, found greedily."""
    every = list(product)
    random.Random(0).shuffle(every)
    pairs = {cell: pairs_of(cell) for cell in every}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(every, key=lambda cell: len(pairs[cell] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


@dataclass
class Compiled:
    """A compiled step, its text, memory and ledger, for the tests that look at programs."""

    step: Any
    batch: Any
    text: str
    memory: Any
    ledger: Ledger
    program: Any

    @classmethod
    def of(cls, step: Any, batch: Any) -> Self:
        program = step.compile(batch)
        text = program.as_text()
        return cls(step, batch, text, program.memory_analysis(), Ledger.from_hlo(text, step.mesh), program)


def logical(step: Any, stored: Any) -> Any:
    """A tree like the kept parameters as the model's own; not in one program: most operations are compiled already."""
    return step.layout.to_logical(jax.tree.map(np.asarray, stored))


class OneDevice:
    """One device that takes a batch block after block, each with its key, and sums: compiled once for all numbers of
    blocks of as many rows. For models whose loss leaves its variables as they are.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        params, self.variables = jax.jit(model.create)(jax.random.key(0))
        self.first = jax.device_get(params)
        self._block = jax.jit(jax.value_and_grad(self._total, has_aux=True))

    def _total(self, params: Any, variables: Any, rows: Any, key: jax.Array, step: int, block: int) -> Any:
        loss = self.model.call(params, variables, rows, block_key(key, step, block))[0]["loss"]
        return loss.total, loss.count

    def _grads(self, params: Any, batch: Any, blocks: int, step: int) -> Any:
        key, count, total = jax.random.fold_in(jax.random.key(0), 1), 0.0, None
        for block in range(blocks):
            rows = jax.tree.map(lambda x, b=block: x.reshape(blocks, -1, *x.shape[1:])[b], batch)
            (_, some), grads = jax.device_get(self._block(params, self.variables, rows, key, step, block))
            count, total = count + some, grads if total is None else jax.tree.map(np.add, total, grads)
        return jax.tree.map(lambda g: g / count, total)

    def train(self, optimizer: Any, batch: Any, blocks: int, steps: int) -> tuple[Any, Any]:
        """As `descended`."""
        return descended(lambda params, step: self._grads(params, batch, blocks, step), self.first, optimizer, steps)


def descended(gradient: Callable[[Any, int], Any], params: Any, optimizer: Any, steps: int) -> tuple[Any, Any]:
    """Gradients of the first step, and parameters after some, on one device; `gradient(params, step)` has a step's."""
    state, update, found = jax.jit(optimizer.init)(params), jax.jit(optimizer.update), []
    for step in range(steps):
        found.append(jax.device_get(gradient(params, step)))
        changes, state = update(found[-1], state, params)
        params = jax.tree.map(np.add, params, jax.device_get(changes))
    return found[0], params


def initial(model: Any) -> Any:
    """The parameters of key 0, on the host: drawing them would be half of a cell's compilation."""
    return jax.tree.map(np.asarray, jax.jit(model.create)(jax.random.key(0))[0])


def check(
    step: Any,
    model: Any,
    first: Any,
    batch: Any,
    steps: int,
    grads: Any,
    params: Any,
    tolerance: float = TOLERANCE["f32"],
) -> None:
    """From the parameters `first`: the step's gradients (the momentum after the first of SGD's steps) and parameters
    after some steps against one device's; bytes at rest; the order of the compiled program's collectives; collectives
    of the jaxpr, by kind, axes, dtype, count, bytes.
    """
    state = step.init(jax.random.key(0), params=first)
    here = [x for x in jax.tree.leaves(state.params) if x.sharding.memory_kind != "pinned_host"]
    stored = sum(x.addressable_shards[0].data.nbytes for x in here)
    assert stored == step.layout.bytes["params"]

    compiled = step.compile(batch)
    assert unordered(compiled.as_text()) == []
    state, _ = compiled(state, batch)
    momentum = model.unwrap(logical(step, state.optimizer[0].trace))
    for _ in range(steps - 1):
        state, _ = compiled(state, batch)
    found = differences("gradient", momentum, grads)
    found += differences("parameter", model.unwrap(logical(step, state.params)), params)
    worst = max(found, key=lambda d: d.error)
    assert worst.error <= tolerance, worst

    check_collectives(step, batch)


def check_collectives(step: Any, batch: Any) -> Ledger:
    """Check that the jaxpr has the closed form's collectives, by kind, axes, dtype, count and bytes; return these."""
    closed, written = expected(step, batch), Ledger.from_jaxpr(step.trace(batch), step.mesh)
    for value in ("count", "bytes"):
        assert written.by("kind", "axes", "dtype", value=value) == closed.by("kind", "axes", "dtype", value=value)
    return closed
