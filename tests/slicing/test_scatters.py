"""Scatters of one element per row, which become selects: against JAX's own, under strategies, and in bytes."""

import re
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
from jaxpar.models import named
from jaxpar.program import jaxpr as jx
from jaxpar.program.savings import bytes_saved
from jaxpar.program.walk import visit
from jaxpar.slicing.scatters import by_selects

B, T, V = 3, 4, 6
# Labels within the row, from its end, and beyond both ends.
LABELS = np.array([[0, 5, 6, -1], [2, -6, -7, 100], [1, 1, 3, 5]], np.int32)
FLAT = LABELS.ravel()

FORMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "take_along_axis": lambda z: jnp.take_along_axis(z, LABELS[..., None], -1)[..., 0],
    "clipped": lambda z: jnp.take_along_axis(z, LABELS[..., None], -1, mode="clip")[..., 0],
    "optax": lambda z: optax.softmax_cross_entropy_with_integer_labels(z, jnp.asarray(LABELS)),
    "log_softmax": lambda z: jnp.take_along_axis(jax.nn.log_softmax(z), LABELS[..., None], -1)[..., 0],
    "one row": lambda z: jnp.take_along_axis(z[:1], LABELS[:1, :, None], -1)[..., 0],
    "one position": lambda z: jnp.take_along_axis(z[:, :1], LABELS[:, :1, None], -1)[..., 0],
    "one of all": lambda z: jnp.take_along_axis(z[:1, :1], LABELS[:1, :1, None], -1)[..., 0],
    "words first": lambda z: z.reshape(-1, V).T[FLAT, jnp.arange(B * T)].reshape(B, T),
    "two aranges": lambda z: z[jnp.arange(B)[:, None], jnp.arange(T)[None], LABELS],
    "NumPy's arange": lambda z: z.reshape(-1, V)[np.arange(B * T), FLAT].reshape(B, T),
    "filled": lambda z: z.reshape(-1, V).at[jnp.arange(B * T), FLAT].get(mode="fill", fill_value=3.0).reshape(B, T),
    "promised": lambda z: z.reshape(-1, V).at[jnp.arange(B * T), FLAT].get(mode="promise_in_bounds").reshape(B, T),
    "vmap": lambda z: jax.vmap(jax.vmap(lambda row, i: row[i]))(z, LABELS),
    "bytes": lambda z: jnp.take_along_axis(jnp.tile(z, 60), (LABELS % 256).astype(np.uint8)[..., None], -1)[..., 0],
    "a checkpoint": jax.checkpoint(lambda z: jnp.take_along_axis(z, LABELS[..., None], -1)[..., 0]),
    "a loop": lambda z: jax.lax.map(lambda x: jnp.take_along_axis(x[0], x[1][:, None], -1)[:, 0], (z, LABELS)),
}


def rewritten(gradient: Callable[..., Any], z: jax.Array) -> tuple[jx.Flat, list[Any], list[int]]:
    """Return the program of a gradient, its equations with selects, and the number of scatters with and without."""
    flat, _ = jx.trace(gradient, z)
    eqns = by_selects(flat.eqns, dict(zip(flat.constvars, flat.consts, strict=True)))
    return flat, eqns, [sum(e.primitive.name == "scatter-add" for e, _ in visit(es)) for es in (eqns, flat.eqns)]


def both(gradient: Callable[..., Any], z: jax.Array) -> tuple[jax.Array, jax.Array, list[int]]:
    """Return a gradient by selects and by JAX, and the number of scatters in each."""
    flat, eqns, counts = rewritten(gradient, z)
    run = lambda eqns: jx.run(eqns, (*flat.constvars, *flat.invars), flat.outvars)(*flat.consts, z)[0]
    return run(eqns), run(flat.eqns), counts


@pytest.mark.parametrize("over", ["one", "vmap"])
@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_the_scatter(name: str, over: str) -> None:
    """Whatever the indices: those out of range too, which JAX clips, or drops from the gradient."""
    random = np.random.default_rng(0)
    z = jnp.asarray(random.normal(size=(2, B, T, V)), jnp.float32)
    weights = jnp.asarray(random.normal(size=(B, T)), jnp.float32)
    gradient = jax.grad(lambda z: (FORMS[name](z) * weights).sum())
    new, old, counts = both(*((gradient, z[0]) if over == "one" else (jax.vmap(gradient), z)))
    assert counts[1] - counts[0] == 1
    np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(
    "fun",
    [
        lambda z: z[0][jnp.array([1, 2])],  # a table of which any row may be read, as an embedding
        lambda z: jnp.take_along_axis(z, LABELS[..., :2, None] % V, 1)[..., 0],  # two of each row, along another dim
        lambda z: jnp.take_along_axis(z, jnp.argsort(z, -1)[..., :2], -1),  # two of each row
        lambda z: jnp.take_along_axis(z[..., :1], LABELS[..., None], -1),  # of one element
        # A predicate that is a literal was a raw TypeError.
        lambda z: z.reshape(-1, V)[jax.lax.select(True, jnp.zeros(B * T, jnp.int32), jnp.arange(B * T)), FLAT],
    ],
)
def test_other_lookups_stay(fun: Any) -> None:
    assert both(jax.grad(lambda z: fun(z).sum()), jnp.ones((B, T, V)))[2] == [1, 1]


@pytest.mark.parametrize("operand", ["scalar", "zeros"])
def test_indices_from_an_equation_without_operands(operand: str) -> None:
    """An iota as index vectors raised an IndexError, and a scalar has no dim at all."""
    numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
    by_iota = lambda z: lax.gather(z.reshape(-1, V)[:V], lax.broadcasted_iota(jnp.int32, (V, 1), 0), numbers, (1, 1))
    scalar = lambda z: jnp.zeros(()).at[()].add(z.sum()) + z.sum()
    gradient = jax.grad(lambda z: {"zeros": by_iota, "scalar": scalar}[operand](z).sum())
    new, old, _ = both(gradient, jnp.ones((B, T, V)))
    np.testing.assert_array_equal(new, old)


def test_rows_of_a_callback_stay() -> None:
    """A callback is not called while a program is traced."""

    def rows(n: int) -> jax.Array:
        return jax.pure_callback(lambda: pytest.fail("called"), jax.ShapeDtypeStruct((n,), jnp.int32))

    gradient = jax.grad(lambda z: z.reshape(-1, V)[rows(B * T), FLAT].sum())
    assert rewritten(gradient, jnp.ones((B, T, V)))[2] == [1, 1]


def test_rows_in_another_order_stay() -> None:
    gradient = jax.grad(lambda z: z.reshape(-1, V)[jnp.arange(B * T)[::-1], FLAT].sum())
    assert both(gradient, jnp.ones((B, T, V)))[2] == [1, 1]


def test_a_scatter_into_values_stays() -> None:
    """A select would lose the values that a scatter adds to."""
    scatter = lambda z: z.reshape(-1, V).at[jnp.arange(B * T), FLAT].add(1)
    assert both(scatter, jnp.ones((B, T, V)))[2] == [1, 1]


WORDS, DIM = 16, 8


def decoder(key: jax.Array) -> Any:
    """Return the parameters of two scanned layers, an embedding and a head."""
    shapes = {"embedding": (WORDS, DIM), "up": (2, DIM, 32), "down": (2, 32, DIM), "head": (DIM, WORDS)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def by_arange(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(logits).reshape(-1, WORDS)
    return -log_p[jnp.arange(labels.size), labels.reshape(-1)].reshape(labels.shape)


def by_vmap(logits: jax.Array, labels: jax.Array) -> jax.Array:
    token = lambda row, label: jax.nn.logsumexp(row) - row[label]
    return jax.vmap(jax.vmap(token))(logits, labels)


def model(token_loss: Callable[..., jax.Array]) -> jp.Model:
    def loss(p: Any, batch: Any, key: Any) -> Any:
        layer = lambda x, w: (x + jax.nn.relu(x @ w[0]) @ w[1], None)
        hidden, _ = jax.lax.scan(layer, p["embedding"][batch["tokens"]], (p["up"], p["down"]))
        nats = token_loss((hidden @ p["head"]).astype(jnp.float32), batch["labels"])
        return jp.Mean((nats * batch["weights"]).sum(), batch["weights"].sum())

    return jp.Model(init=decoder, loss=loss, rules={"up|head": -1, "down": -2, "embedding": -2})


STRATEGIES = {
    "data=1": 1,
    "data=2": 2,
    "fsdp=2,microbatches=2,concurrent=2,remat=layer": 2,
    "fsdp=2,tensor=2": 4,
    "context=2,logits=8": 2,
    "pipe=2,microbatches=4": 2,
}
LOSSES = {"optax": optax.softmax_cross_entropy_with_integer_labels, "arange": by_arange, "vmap": by_vmap}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [*(pytest.param(x, marks=pytest.mark.battery) for x in ("optax", "vmap")), "arange"])
def test_under_strategies(name: str, strategy: str) -> None:
    """Labels are picked from each rank's part of rows, positions or words, and in each chunk of the logits."""
    random = np.random.default_rng(0)
    batch = {"tokens": random.integers(WORDS, size=(16, 12)), "labels": random.integers(WORDS, size=(16, 12))}
    batch["labels"][:, :2] -= WORDS  # counted from the end
    batch["weights"] = random.random((16, 12)).astype(np.float32)
    devices = jax.devices()[: STRATEGIES[strategy]]
    step = jp.make_train_step(model(LOSSES[name]), optax.sgd(0.1), strategy, mesh=devices)
    # The logits of a device's rows, positions and words, in float32, are neither written nor read once more. With
    # `tensor`, a lookup by `vmap` reads all words.
    num_parts = len(devices) // (2 if name == "vmap" and "tensor" in strategy else 1)
    assert bytes_saved(step.trace(batch))["lookups"] == 2 * 4 * batch["labels"].size * WORDS / num_parts
    assert jp.verify(model(LOSSES[name]), strategy, batch, mesh=devices, steps=1).ok


@pytest.mark.cuda_compiler
def test_no_gradient_of_logits_is_written_in_float32() -> None:
    """The scatter took a kernel that wrote float32 logits for it, and another one that cast them."""
    gpt, rows, length = named("gpt2", layers=1), 8, 1024
    step = jp.make_train_step(gpt.model, optax.sgd(0.1), "precision=bf16", mesh=target("1xH200").devices)
    batch = gpt.example(rows, length)
    logits = rows * length * gpt.config.vocab
    costs = Costs.from_hlo(step.compile(batch).as_text())
    kernels = [cost.kernel for cost in costs if not cost.kernel.products]
    # One kernel writes the gradient, in bfloat16.
    assert [kernel.written for kernel in kernels if kernel.written >= 2 * logits] == [2 * logits]
    assert re.search("lookup is a select, not a scatter +3.29 GB", str(step.explain(batch)))
