"""The bytes that rewritings save: what their marks say, and what compiled programs move without them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.hardware.compiled.cost import Costs
from jaxpar.hardware.devices import target
from jaxpar.inspect.memory import forward
from jaxpar.models import named
from jaxpar.parallel.data import access
from jaxpar.program import jaxpr as jx
from jaxpar.program import trip_counts
from jaxpar.program.savings import KINDS, bytes_saved, marked, saving
from jaxpar.slicing import units

GPT, LLAMA = ("gpt2", {"layers": 2}, 16, 1024), ("llama-tiny", {"layers": 2, "dim": 4096, "heads": 32}, 4, 1024)


def save_all(eqns: Any, residuals: Any, known_vars: Any, *_: Any) -> tuple[list[Any], list[Any]]:
    """Save every value that a backward reads."""
    return [v for v in dict.fromkeys(residuals) if not jx.is_literal(v) and v not in known_vars], []


def add_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast each gradient to float32 where it is computed, and add it to the others there."""
    init = access.RuleAccess.__init__

    def with_sums(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.has_one_use = self.has_two_uses = [False] * len(self.has_one_use)

    monkeypatch.setattr(access.RuleAccess, "__init__", with_sums)


# For each rewriting: a model, how to switch the rewriting off, and the largest ratio of the bytes that it then moves in
# addition to those that its marks say. XLA copies values that a loop saves once more.
REWRITINGS: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], None], float]] = {
    "recomputation": (GPT, lambda patch: patch.setattr(units, "residuals_to_save", save_all), 2),
    "lookups": (GPT, lambda patch: patch.setattr(units, "by_selects", lambda eqns, consts: eqns), 1.02),
    "tanh": (GPT, lambda patch: patch.setattr(units, "by_exponentials", lambda eqns: eqns), 1.02),
    "row_sums": (LLAMA, lambda patch: patch.setattr(units, "row_scales", lambda eqns: set()), 1.02),
    "buffers": (GPT, lambda patch: patch.setattr(lax, "empty", jnp.zeros), 1.02),
    "gradients": (GPT, add_at_once, 1.02),
}


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_programs_move_these_bytes_without_a_rewriting(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200, at least those that `explain` says, and not many more."""
    (name, sizes, rows, length), remove, most = REWRITINGS[kind]
    model = named(name, **sizes)
    batch, devices = model.example(rows, length), target("1xH200").devices

    def step() -> Any:
        return jp.make_train_step(model.model, optax.sgd(0.1), "single,precision=bf16", mesh=devices)

    moved = lambda: Costs.from_hlo(step().compile(batch).as_text()).bytes
    said, with_rewriting = bytes_saved(step().trace(batch))[kind], moved()
    remove(monkeypatch)
    assert 0.98 <= (moved() - with_rewriting) / said <= most
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


STRATEGIES = ["single", "data=2", "fsdp=2,prefetch=1", "tensor=2,sequence=true", "context=2", "pipe=2,microbatches=4"]


@pytest.mark.parametrize("strategy", [*STRATEGIES, "pipe=2,microbatches=4,schedule=zb-h1", "fsdp=2,remat=layer"])
def test_layers_share_what_they_store(strategy: str) -> None:
    """All devices together, layers store the same values under any strategy, unless they store none."""
    llama = named("llama-tiny", layers=2)
    batch = {"tokens": np.zeros((8, 17), np.int32)}
    saved = {}
    for name in ("single", strategy):
        devices = jax.devices()[: 1 if name == "single" else 2]
        step = jp.make_train_step(llama.model, optax.sgd(0.1), f"{name},precision=bf16", mesh=devices)
        saved[name] = len(devices) * bytes_saved(step.trace(batch)).get("recomputation", 0)
    assert saved[strategy] == (0 if "remat" in strategy else pytest.approx(saved["single"], rel=0.3))


N, D, L = 32, 16, 4

LAYERS: dict[str, Callable[..., jax.Array]] = {
    "gate": lambda y, keep: jnp.tanh(jax.nn.silu(y) * y),
    # The backward does not read the result of the last product: a mark on it was dropped.
    "softplus": lambda y, keep: jax.nn.softplus(jax.nn.silu(y) * y),
    # Masks are the same in all layers. They counted as values that each layer would store.
    "mask": lambda y, keep: jnp.where(keep, jax.nn.silu(y) * y, 0),
    "causal mask": lambda y, keep: jnp.where(jnp.tril(jnp.ones((N, D), bool)), jax.nn.silu(y) * y, 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_recomputation_saves_what_jax_would_stack(name: str) -> None:
    """Each value is written by the forward's scan, and read by the backward's."""

    def loss(params: Any, batch: Any, key: Any = None) -> jax.Array:
        keep = batch["length"][:, None] > jnp.arange(D)
        layer = lambda x, w: (LAYERS[name](x @ w, keep), None)
        return jnp.square(lax.scan(layer, batch["x"], params["w"])[0]).mean()

    model = jp.Model(init=lambda key: {"w": jax.random.normal(key, (L, D, D))}, loss=loss)
    step = jp.make_train_step(model, optax.sgd(0.1), "single", mesh=jax.devices()[:1])
    batch = {"x": np.ones((N, D), np.float32), "length": np.ones(N, np.int32)}
    plain, _ = jx.trace(jax.grad(loss), {"w": jnp.zeros((L, D, D))}, batch)
    forward_scan = next(eqn for eqn in plain.eqns if eqn.primitive.name == "scan")
    stacked = sum(map(jx.nbytes, jx.scan_parts(forward_scan).ys))
    saved = bytes_saved(step.trace(batch))["recomputation"]
    assert saved == 2 * (stacked - forward(step, batch).saved_by_layers) > 0
