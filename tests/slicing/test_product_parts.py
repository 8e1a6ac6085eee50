"""Products in parts alongside collectives over `tensor`: the same numbers, in an order that lets both run at once."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensor_cells
from jax.sharding import Mesh, PartitionSpec
from tensor_cells import Cell

import jaxpar as jp
from jaxpar.hardware.devices import gpu_topology
from jaxpar.hardware.hardware import KINDS
from jaxpar.inspect.predict.prediction import predict
from jaxpar.models import named
from jaxpar.parallel.tensor import edges
from jaxpar.program import jaxpr as jx
from jaxpar.slicing import product_parts
from jaxpar.slicing.product_parts import _Split, overlap_products

pytestmark = tensor_cells.SHARED_BATCH
RANKS = 2


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut collectives of any size, whatever the joins of their products' results cost."""
    monkeypatch.setattr(product_parts, "_MIN_PART_BYTES", 1)
    monkeypatch.setattr(product_parts, "_JOINED_BYTES_PER_SENT_BYTE", float("inf"))


@pytest.mark.parametrize(("dim", "ranges"), [(0, 1), (1, 1), (1, 3), (2, 2)])
def test_parts_join_to_the_array(dim: int, ranges: int) -> None:
    x = np.random.default_rng(0).normal(size=(4, 12, 8)).astype("float32")
    split = _Split(dim, ranges, 4 if ranges == 1 or dim == 1 else 2)
    parts = split.parts(jnp.asarray(x))
    assert len(parts) == split.num_parts
    np.testing.assert_array_equal(split.join(parts), x)
    # A part has the same share of each rank's range.
    size = x.shape[dim] // ranges
    of_first = np.concatenate([np.arange(r * size, r * size + size // split.num_parts) for r in range(ranges)])
    np.testing.assert_array_equal(parts[0], np.take(x, of_first, axis=dim))


def layer(carry: Any, iteration: Any, weights: Any) -> Any:
    """Two products behind an all-gather, and one in front of a reduce-scatter."""
    x = edges.all_gather(jnp.tanh(carry), 1, RANKS)
    hidden = (x @ weights["a"]) * (x @ weights["b"])
    return carry + edges.reduce_scatter(hidden @ weights["c"], 1, RANKS), hidden.sum()


def values(rows: int, positions: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return draw(rows, positions, 8), {"a": draw(8, 6), "b": draw(8, 6), "c": draw(6, 8)}


def eqns_of(body: Any, rows: int, positions: int) -> list[Any]:
    carry, weights = values(rows, positions)
    return jax.make_jaxpr(body, axis_env=[("tensor", RANKS)])(carry, 0, weights).eqns


@pytest.mark.parametrize("rows", [4, 2, 3])  # parts of one row, else of a position of each rank
def test_results_are_the_same(small_parts: None, rows: int) -> None:
    carry, weights = values(rows, 8)
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("tensor",))
    spec = PartitionSpec(None, "tensor")

    def run(body: Any) -> Any:
        on_a_rank = lambda carry: tuple(x[None] if x.ndim == 0 else x for x in body(carry, 0, weights))
        # As in a step. With `check_vma`, each weight would get a `pvary` behind the gather.
        mapped = jax.shard_map(
            on_a_rank, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec("tensor")), check_vma=False
        )
        return str(jax.make_jaxpr(mapped)(carry)).count("tensor_all_gather["), jax.jit(mapped)(carry)

    (gathers, whole), (gathers_of_parts, in_parts) = run(layer), run(overlap_products(layer))
    assert (gathers, gathers_of_parts) == (1, 4)
    for due, got in zip(whole, in_parts, strict=True):
        np.testing.assert_allclose(got, due, rtol=1e-6, atol=1e-6 * np.abs(due).max())


def test_a_part_is_sent_while_another_is_computed(small_parts: None) -> None:
    """Between two collectives lies a product that needs neither, and each collective waits for the one before."""
    eqns = eqns_of(overlap_products(layer), 4, 8)
    names = {"tensor_all_gather": "g", "tensor_reduce_scatter": "s", "dot_general": "."}
    order = "".join(names.get(eqn.primitive.name, "") for eqn in eqns)
    assert order == "gg..g..g...." + ".s.s.s.s"
    sends = [eqn for eqn in eqns if names.get(eqn.primitive.name) in ("g", "s")]
    for one, other in itertools.pairwise(sends):
        assert not jx.depends(eqns, one.outvars).isdisjoint(other.invars)
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    for send, meanwhile in [
        *zip(sends[1:4], products[0:6:2], strict=True),
        *zip(sends[4:7], products[9:], strict=True),
    ]:
        assert jx.depends(eqns, send.outvars).isdisjoint(meanwhile.invars)
        assert jx.depends(eqns, meanwhile.outvars).isdisjoint(send.invars)


@pytest.mark.parametrize(("num_bytes", "size", "count"), [
    (1 << 27, 8, 4), (1 << 27, 6, 2), (1 << 27, 7, 1), (1 << 26, 8, 2), (1 << 25, 8, 1),
])  # fmt: skip
def test_parts_are_large(num_bytes: int, size: int, count: int) -> None:
    """Llama-3-8B under `tensor=8` takes less time with parts of 32 MiB, and more with parts of 8 or 16."""
    assert product_parts._num_parts(num_bytes, size) == count


def test_a_gather_stays_whole_if_joining_the_results_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3-8B under `fsdp=4,tensor=2,sequence=true` took 1.4% longer with its wide gathers in parts."""
    monkeypatch.setattr(product_parts, "_MIN_PART_BYTES", 1)

    def num_gathers(width: int) -> int:
        def body(carry: Any, iteration: Any, weights: Any) -> Any:
            first, second = jnp.ones((8, width // 2)), jnp.ones((8, width - width // 2))
            x = edges.all_gather(carry, 1, RANKS)
            return carry, (x @ first, x @ second)

        names = [eqn.primitive.name for eqn in eqns_of(overlap_products(body), 4, 8)]
        return names.count("tensor_all_gather")

    # On average, 4 of a row's 8 floats come from the other rank, 3 of these during a product. To join the results, a
    # kernel reads and writes `width` floats per row, and 2 x 4 < 3 x 3 < 2 x 5.
    assert (num_gathers(4), num_gathers(5)) == (4, 1)


def test_a_program_of_small_collectives_is_unchanged() -> None:
    names = lambda body: [eqn.primitive.name for eqn in eqns_of(body, 4, 8)]
    assert names(overlap_products(layer)) == names(layer)


@pytest.mark.parametrize(
    "change", ["another reader", "a later weight", "a product with itself", "a sum of parts", "a shared batch dim"]
)
def test_what_cannot_be_cut_stays_whole(small_parts: None, change: str) -> None:
    def body(carry: Any, iteration: Any, weights: Any) -> Any:
        x = edges.all_gather(carry, 1, RANKS)
        if change == "another reader":
            return carry, (x @ weights["a"], x + 1)
        if change == "a later weight":
            return carry, x @ (weights["a"] * x.sum())
        if change == "a product with itself":
            return carry, jnp.einsum("btd,bsd->bts", x, x)
        if change == "a sum of parts":  # over rows and positions
            return carry, jnp.einsum("btd,bte->de", x, weights["y"])
        return carry, jnp.einsum("btd,bdt->bt", x, weights["z"])

    carry, weights = values(4, 8)
    weights |= {"y": jnp.ones((4, 16, 8)), "z": jnp.ones((4, 8, 16))}
    of = lambda body: jax.make_jaxpr(body, axis_env=[("tensor", RANKS)])(carry, 0, weights).eqns
    names = lambda body: [eqn.primitive.name for eqn in of(body)]
    assert names(overlap_products(body)) == names(body)


def test_what_an_equation_prints_stays(small_parts: None) -> None:
    """An equation without results looked as if it had run."""

    def body(carry: Any, iteration: Any, weights: Any) -> Any:
        jax.debug.print("iteration {}", iteration)
        return layer(carry, iteration, weights)

    names = [eqn.primitive.name for eqn in eqns_of(overlap_products(body), 4, 8)]
    assert names.count("tensor_all_gather") == 4
    assert sum("debug" in name for name in names) == 1


def test_a_product_between_a_gather_and_a_scatter_is_computed_once(small_parts: None) -> None:
    def body(carry: Any, iteration: Any, weights: Any) -> Any:
        w = weights["a"] @ weights["c"]
        return edges.reduce_scatter(edges.all_gather(carry, 1, RANKS) @ w, 1, RANKS), None

    names = [eqn.primitive.name for eqn in eqns_of(overlap_products(body), 4, 8)]
    counts = (names.count(name) for name in ("tensor_all_gather", "dot_general", "tensor_reduce_scatter"))
    assert tuple(counts) == (4, 1 + 4, 1)


CHOSEN_CELLS = [
    Cell("scanned", 2, "", True, "none"),  # four parts of one row
    Cell("loop", 4, "pipe=2,microbatches=3", True, "layer"),  # with biases; ticks with forwards alone
    Cell("linen", 2, "data=2,fsdp=2,zero=1", True, "dots"),  # three rows: parts of positions
]


def all_cells() -> list[Any]:
    cells = [cell for cell in tensor_cells.product() if cell.sequence]
    return [pytest.param(cell, marks=pytest.mark.battery) for cell in cells if cell not in CHOSEN_CELLS]


@pytest.mark.parametrize("cell", [*CHOSEN_CELLS, *all_cells()], ids=lambda cell: "-".join(map(str, cell)))
def test_gradients_and_parameters_of_one_device(small_parts: None, cell: Cell) -> None:
    tensor_cells.check_cell(cell)


@pytest.mark.slow
def test_steps_have_parts(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards of a training step; in a pipeline, those of ticks without a backward."""

    def num_scatters(text: str) -> int:
        model, rules = tensor_cells.built("scanned")
        step = jp.make_train_step(model, optax.sgd(0.1), text, mesh=jax.devices()[:4], rules=rules)
        return str(step.trace(tensor_cells.batch_of(16))).count("tensor_reduce_scatter[")

    texts = "data=2,tensor=2,sequence=true", "pipe=2,tensor=2,sequence=true,microbatches=4"
    in_parts = [num_scatters(text) for text in texts]
    monkeypatch.setattr(product_parts, "_MIN_PART_BYTES", 1 << 40)
    whole = [num_scatters(text) for text in texts]
    # Two scatters of a forward layer become eight; in a pipeline, in one of the three phases.
    assert [a - b for a, b in zip(in_parts, whole, strict=True)] == [6, 6]


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_an_h100_waits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA makes the parts' collectives asynchronous, and `predict` finds products alongside them."""
    model = named("llama3-8b", layers=4)
    batch = model.example(4, 4096)

    def predicted() -> Any:
        text = "tensor=8,sequence=true,precision=bf16"
        step = jp.make_train_step(model.model, optax.adamw(3e-4), text, gpu_topology("8xH100"))
        return predict(step.compile(batch), step, batch, KINDS["H100"])

    in_parts = predicted()
    monkeypatch.setattr(product_parts, "_MIN_PART_BYTES", 1 << 40)
    whole = predicted()
    assert in_parts.exposed < 0.75 * whole.exposed
    assert in_parts.seconds < 0.98 * whole.seconds
