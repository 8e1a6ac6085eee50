"""Microbatches side by side: the numbers of one device, a layer fetched once for all, and what cannot be so."""

import itertools
from types import ModuleType
from typing import Any

import context_cells
import expert_cells
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensor_cells
from tensor_cells import Cell
from zoo import ZOO

import jaxpar as jp
from jaxpar.inspect.expected import expected
from jaxpar.program import jaxpr as jx
from jaxpar.program.collectives import PRIMITIVES
from jaxpar.program.walk import visit

pytestmark = tensor_cells.SHARED_BATCH

CHOSEN_CELLS = [
    Cell("scanned", 2, "microbatches=2,concurrent=2", True, "layer"),
    Cell("linen", 2, "fsdp=2,microbatches=4,concurrent=2", True, "dots"),  # with dropout
    # One all-reduce in a layer, at its end: it looked like a collective for another iteration, of both microbatches.
    Cell("function", 2, "fsdp=2,microbatches=2,prefetch=1,concurrent=2", False, "none"),
]
CHOSEN_BESIDE = [
    (expert_cells, "dropless", "expert=2,fsdp=2,microbatches=2,concurrent=2"),
    (context_cells, "llama_gqa", "context=2,microbatches=2,concurrent=2,attention=ring"),
]


def all_cells() -> list[Any]:
    """Return the battery's cells of tensor parallelism with microbatches and no pipeline, two microbatches at once."""
    beside = "fsdp=2,microbatches=2,prefetch=1"
    cells = [cell._replace(beside=f"{beside},concurrent=2") for cell in tensor_cells.product() if cell.beside == beside]
    return [pytest.param(cell, marks=pytest.mark.battery) for cell in cells if cell not in CHOSEN_CELLS]


def all_experts_and_contexts() -> list[Any]:
    """Return every mixture, and every model with a context by every way of attention, two microbatches at once."""
    expert_axes = ("expert=4,fsdp=2,zero=1", "expert=2,fsdp=2,zero=2", "expert=2,tensor=2,remat=layer")
    cells: list[Any] = [(expert_cells, name, axes) for name in expert_cells.FORMS for axes in expert_axes]
    for name in context_cells.MODELS:
        ways = ("auto",) if name in context_cells.BY_AUTO else ("gather", "ulysses", "ring")
        cells += [(context_cells, name, f"context=2,fsdp=2,zero=2,attention={way}") for way in ways]
    return [
        pytest.param(module, name, f"{axes},microbatches=2,concurrent=2", marks=pytest.mark.battery)
        for module, name, axes in cells
    ]


@pytest.mark.parametrize("cell", [*CHOSEN_CELLS, *all_cells()], ids=lambda cell: "-".join(map(str, cell)))
def test_tensor_and_sequence(cell: Cell) -> None:
    tensor_cells.check_cell(cell)


@pytest.mark.slow
@pytest.mark.parametrize(("cells", "name", "text"), [*CHOSEN_BESIDE, *all_experts_and_contexts()])
def test_experts_and_contexts(cells: ModuleType, name: str, text: str) -> None:
    cells.check_cell(name, text)


@pytest.mark.battery
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "hsdp"])
@pytest.mark.parametrize("name", [name for name in ZOO if "resnet" not in name])  # statistics go from one to the next
def test_data_parallel(name: str, strategy: str) -> None:
    entry = ZOO[name]()
    assert jp.verify(entry.model, f"{strategy},microbatches=2,concurrent=2", entry.batch).ok


def test_a_layer_is_fetched_once_for_all() -> None:
    """As without microbatches; its gradient is given once as well."""
    entry = ZOO["function"]()
    of = lambda text: expected(jp.make_train_step(entry.model, optax.sgd(0.1), text), entry.batch)
    alone, both, apart = map(of, ("fsdp=8", "fsdp=8,microbatches=2,concurrent=2", "fsdp=8,microbatches=2"))
    for kind in ("all-gather", "reduce-scatter"):
        sent = lambda ledger, kind=kind: sum(n for (k, _), n in ledger.by("kind", "dtype").items() if k == kind)
        assert 0 < sent(alone) == sent(both) < sent(apart)


def test_groups_send_in_turns() -> None:
    """XLA made one gather of two groups', beside which neither computed: a tenth of a step of a 13B on 64 H100s. Now
    what one group sends follows from what the other one has sent; a sum and the gather of it go together.
    """
    model, rules = tensor_cells.built("scanned")
    text = "data=4,tensor=2,sequence=true,microbatches=2,concurrent=2"
    step = jp.make_train_step(model, optax.sgd(0.1), text, rules=rules)
    scans = [
        jx.opened(e.params["jaxpr"])[0]
        for e, _ in visit(step.trace(tensor_cells.batch_of(16)).eqns)
        if "jaxpr" in e.params
    ]
    sends = lambda body: [e for e in body.eqns if PRIMITIVES.get(e.primitive.name) in ("all-gather", "reduce-scatter")]
    forward = next(body for body in scans if len(sends(body)) == 8)
    turns = "".join(PRIMITIVES[e.primitive.name][4] for e in sends(forward))
    assert turns == "ggcgcgcc"  # gathers, scatters
    for one, other in itertools.pairwise(sends(forward)):
        assert not jx.depends(forward.eqns, one.outvars).isdisjoint(other.invars)


def test_evaluation_runs_them_so_too() -> None:
    entry = ZOO["function"]()
    of = lambda text: jp.make_train_step(entry.model, optax.sgd(0.1), text)
    one, two = of("data=2,fsdp=4"), of("data=2,fsdp=4,microbatches=2,concurrent=2")
    losses = [step.evaluate(step.init(jax.random.key(0)), entry.batch)["loss"] for step in (one, two)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fsdp=8,concurrent=2", r"does not divide microbatches=1; use microbatches=2"),
        ("pipe=2,data=4,microbatches=4,concurrent=2", r"and pipe=2 does so too; leave one out"),
        ("dp,microbatches=2,concurrent=2", r"server=True sends between steps; leave one out"),
        ("fsdp=8,microbatches=2,concurrent=0", r"concurrent=0 is not a count"),
    ],
)
def test_what_is_no_strategy(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        jp.Strategy.parse(text)


def test_statistics_that_go_from_one_to_the_next() -> None:
    entry = ZOO["resnet"]()
    step = jp.make_train_step(entry.model, optax.sgd(0.1), "ddp,microbatches=2,concurrent=2")
    with pytest.raises(ValueError, match=r"concurrent=2 runs 2 microbatches at once, and the loss passes variables"):
        step.trace(entry.batch)


def test_a_carry_of_weights_alone_beside_one_of_rows() -> None:
    """One call makes both: to the loop the first is then each microbatch's own too."""

    def loss(p: Any, b: Any, key: Any) -> jax.Array:
        both = jax.checkpoint(lambda x, c, w: (jnp.tanh(x @ w), c + jnp.sum(w) / 8))
        x, c = jax.lax.scan(lambda s, w: (both(*s, w), None), (b["x"], jnp.float32(0)), p["w"])[0]
        return jnp.mean(jnp.square(x)) + c**2

    random = np.random.default_rng(0)
    model = jp.Model(init=lambda key: {"w": jax.random.normal(key, (3, 8, 8))}, loss=loss)
    batch = {"x": random.normal(size=(16, 8)).astype("float32")}
    assert jp.verify(model, "fsdp=4,data=2,microbatches=2,concurrent=2", batch).ok
