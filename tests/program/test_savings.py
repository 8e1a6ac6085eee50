"""The bytes that rewritings save: what their marks say, and what compiled programs move without them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.hardware.compiled.cost import Costs
from jaxpar.hardware.devices import target
from jaxpar.models import named
from jaxpar.parallel.data import access
from jaxpar.program import jaxpr as jx
from jaxpar.program import trip_counts
from jaxpar.program.savings import KINDS, bytes_saved, marked, saving
from jaxpar.slicing import units

GPT, LLAMA = ("gpt2", {"layers": 2}, 16, 1024), ("llama-tiny", {"layers": 2, "dim": 4096, "heads": 32}, 4, 1024)


def add_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast each gradient to float32 where it is computed, and add it to the others there."""
    init = access.RuleAccess.__init__

    def with_sums(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.has_one_use = self.has_two_uses = [False] * len(self.has_one_use)

    monkeypatch.setattr(access.RuleAccess, "__init__", with_sums)


# For each rewriting: a model, and how to switch the rewriting off.
REWRITINGS: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], None]]] = {
    "lookups": (GPT, lambda patch: patch.setattr(units, "by_selects", lambda eqns, consts: eqns)),
    "tanh": (GPT, lambda patch: patch.setattr(units, "by_exponentials", lambda eqns: eqns)),
    "row_sums": (LLAMA, lambda patch: patch.setattr(units, "row_scales", lambda eqns: set())),
    "buffers": (GPT, lambda patch: patch.setattr(lax, "empty", jnp.zeros)),
    "gradients": (GPT, add_at_once),
}


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_programs_move_these_bytes_without_a_rewriting(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200, they move the bytes that `explain` says in addition."""
    (name, sizes, rows, length), remove = REWRITINGS[kind]
    model = named(name, **sizes)
    batch, devices = model.example(rows, length), target("1xH200").devices

    def step() -> Any:
        return jp.make_train_step(model.model, optax.sgd(0.1), "single,precision=bf16", mesh=devices)

    moved = lambda: Costs.from_hlo(step().compile(batch).as_text()).bytes
    said, with_rewriting = bytes_saved(step().trace(batch))[kind], moved()
    remove(monkeypatch)
    assert moved() - with_rewriting == pytest.approx(said, rel=0.02)
    assert said >= 0.001 * with_rewriting


def test_loops_branches_and_ranks() -> None:
    """A mark counts as often as its equation runs: on the rank with most, in the branch with most."""

    def work(x: jax.Array, num_bytes: int) -> jax.Array:
        with saving("tanh", num_bytes):
            return jnp.tanh(x)

    def loop(x: jax.Array, name: str) -> jax.Array:
        with jax.named_scope(name):
            return lax.while_loop(lambda x: x < 1, lambda x: work(x, 1000), x)

    def program(x: jax.Array) -> jax.Array:
        work(x, 10**9)  # dead
        x, _ = lax.scan(lambda x, _: (work(x, 1), None), x, length=5)
        x = lax.cond(x > 0, lambda x: work(x, 10), lambda x: work(work(x, 20), 20), x)
        # On each of two ranks, a loop that runs in a share of eight iterations.
        ranks = lambda x, _: (sum(loop(x, trip_counts.name_of(rank + 1, 0, 8, rank)) for rank in range(2)), None)
        x, _ = lax.scan(ranks, x, length=8)
        return loop(loop(x, trip_counts.overflow_name(3)), "no_name")

    assert bytes_saved(jax.make_jaxpr(program)(1.0)) == {"tanh": 5 * 1 + 2 * 20 + 8 * 2 / 8 * 1000 + 1000}


def test_marks_stay_in_derivatives_and_on_equations() -> None:
    """JAX writes the scopes of a derivative as `transpose(jvp(...))`, and a marked equation may run elsewhere."""

    def loss(x: jax.Array) -> jax.Array:
        with saving("lookups", 3):
            return jnp.sin(x)

    flat, _ = jx.trace(lambda x: jnp.cos(x) * 2, 1.0)
    eqns = [marked(eqn, "buffers", 7) if eqn.primitive.name == "cos" else eqn for eqn in flat.eqns]
    again = jax.checkpoint(jx.run(eqns, flat.invars, flat.outvars))
    saved = bytes_saved(jax.make_jaxpr(lambda x: (jax.grad(loss)(x), *again(x)))(1.0))
    # The derivative of sin is a cos and a product.
    assert saved == {"lookups": 6, "buffers": 7}
