"""The expert axis trains mixtures that know nothing of it as one device does.

A cell compiles one step and checks gradients, three steps of SGD with momentum, bytes at rest, and the collectives.
"""

import ast
from pathlib import Path
from typing import Any

import context_cells
import expert_cells as cells
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, logical
from tensor_cells import SHARED_BATCH
from two_processes import check_two

import jaxpar as jp
from jaxpar.hardware.compiled.cost import Costs
from jaxpar.hardware.devices import target
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import named
from jaxpar.parallel.expert.dims import apart, expert_dims, looks_stacked
from jaxpar.parallel.expert.ops.rounds import most_rounds
from jaxpar.parity.parity import differences

pytestmark = SHARED_BATCH

FIRST = (
    ("capacity", "pipe=2,expert=4,microbatches=2"),  # "dropless" is beside context below, and in test_beside.py
    ("einsum", "expert=2,tensor=2"),
    ("capacity", "expert=2,tensor=2,sequence=true,microbatches=2"),
)
BESIDE = (
    "expert=2",
    "expert=4,data=2",
    "expert=8",
    "expert=4,fsdp=2,zero=1,microbatches=2",
    "expert=2,fsdp=2,zero=2,microbatches=2",
    "expert=2,fsdp=2,data=2,remat=layer",
    "expert=2,fsdp=2,tensor=2",
    "expert=4,tensor=2",
    "expert=2,fsdp=2,tensor=2,sequence=true,remat=layer",
    "pipe=2,expert=2,tensor=2,sequence=true,microbatches=2",
    "pipe=2,expert=2,microbatches=2",
    "pipe=2,expert=2,fsdp=2,microbatches=2",
    "pipe=2,expert=2,tensor=2,microbatches=4",
    "pipe=2,expert=4,microbatches=4,schedule=zb-h1",
    "pipe=2,expert=2,fsdp=2,microbatches=4,schedule=zb-h1,remat=layer",
)


FEWER = (  # of those forms that are others with a loss, or with other choices
    "expert=4,fsdp=2,zero=1,microbatches=2",
    "expert=2,fsdp=2,tensor=2",
    "pipe=2,expert=2,fsdp=2,microbatches=2",
    "pipe=2,expert=4,microbatches=4,schedule=zb-h1",
)
RESEMBLING = ("all_experts", "others_none", "skipped", "sequence", "global", "microbatch")
BESIDE_CONTEXT = ("expert=2,context=2,attention=gather", "pipe=2,expert=2,context=2,microbatches=2")
UNEVEN = (
    "expert=3",
    "expert=3,fsdp=2,microbatches=2,prefetch=1",
    "expert=3,tensor=2",
    "pipe=2,expert=3,microbatches=4",
)


def battery() -> list[tuple[str, str]]:
    # The slots of `einsum` are counted over the positions of all ranks of `context`.
    einsum = [("einsum", text) for text in BESIDE_CONTEXT]
    return einsum + [(name, text) for name in cells.FORMS for text in (FEWER if name in RESEMBLING else BESIDE)]


@pytest.mark.parametrize(
    ("name", "text"),
    [*FIRST, *(pytest.param(*cell, marks=pytest.mark.battery) for cell in battery() if cell not in FIRST)],
    ids=lambda value: value.replace(",", "-"),
)
def test_cell(name: str, text: str) -> None:
    cells.check_cell(name, text)


@pytest.mark.battery
@pytest.mark.parametrize("text", UNEVEN, ids=lambda text: text.replace(",", "-"))
@pytest.mark.parametrize("name", ["dropless", "capacity", "einsum", "grouped"])
def test_six_experts_and_seven_tokens(name: str, text: str) -> None:
    cells.check_cell(name, text, cells.ODD)


# -- what is sent ------------------------------------------------------------------------------------------------------


def traced(name: str, text: str) -> tuple[Any, Ledger]:
    step = jp.make_train_step(cells.built(name), optax.sgd(0.1), text)
    return step.traced(cells.batch_of()).notes, Ledger.from_jaxpr(step.trace(cells.batch_of()), step.mesh)


@pytest.mark.battery
def test_one_token_of_each_rank_in_float64() -> None:
    """In float32, three steps end 2.6e-5 from one device's. That is rounding: one device ends 1.8e-5 from its own where
    the embedding moves by one unit in the last place, and in float64 nothing is left but the loss's float32 seed.
    """
    sizes, optimizer = cells.Sizes(8, 8, 1), optax.sgd(0.1, momentum=0.9)
    with jax.enable_x64(True):
        batch = {key: x.astype("float64") if x.dtype == "float32" else x for key, x in cells.batch_of(sizes).items()}
        reference = OneDevice(model := cells.built("dropless"))
        _, expected = reference.train(optimizer, batch, 8, 3)
        step = jp.make_train_step(model, optimizer, "expert=8")
        state = step.init(jax.random.key(0), params=reference.first)
        for _ in range(3):
            state, _ = step(state, batch)
        errors = differences("parameter", model.unwrap(logical(step, state.params)), expected)
    assert max(leaf.error for leaf in errors) < 1e-7, errors


@pytest.mark.parametrize(("remat", "exchanges"), [("none", 4), ("layer", 6)])
def test_tokens_go_to_their_experts_and_back_forwards_and_backwards(remat: str, exchanges: int) -> None:
    _, ledger = traced("capacity", f"expert=4,fsdp=2,remat={remat}")
    rows, slots = 16 // 8, 2  # of an expert in a row: 6 tokens, 2 of 8 experts, capacity 1
    buffer = cells.EXPERTS * rows * slots * cells.DIM * 4
    assert ledger.total(kind="all-to-all") == exchanges * cells.LAYERS * buffer
    assert ledger.total("sent", kind="all-to-all") == exchanges * cells.LAYERS * buffer * 3 // 4


@pytest.mark.parametrize(("rows", "capacity"), [(4, 1.0), (8, 1.0), (4, 0.0)])
def test_ranks_of_tensor_exchange_parts_of_features(rows: int, capacity: float) -> None:
    """Each sent whole buffers, and summed them over `tensor`: a quarter of a step of Grok's sizes. One row of a
    microbatch keeps its positions split; of two rows the positions are gathered.
    """
    model = named("mixtral-tiny", capacity=capacity)
    step = jp.make_train_step(model.model, optax.sgd(0.1), "expert=4,tensor=2,sequence=true")
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (rows, 65)).astype(np.int32)}
    ledger, config = Ledger.from_jaxpr(step.trace(batch), step.mesh), model.config
    buffer = rows // 4 * 64 * 2 * 128 * 4  # two choices of each token, 128 features of 4 bytes
    if capacity:  # without one there are more slots, and tokens beyond them
        assert ledger.total(kind="all-to-all", axes=("expert",)) == 4 * config.layers * buffer // 2
    # No all-reduce over `tensor` is as large as a buffer of one layer.
    sums = [c for c in ledger if c.kind == "all-reduce" and c.axes == ("tensor",) and not c.conditional]
    assert sum(c.bytes for c in sums) < buffer
    assert jp.verify(model.model, "expert=4,tensor=2,sequence=true", batch).ok


def test_experts_that_drop_nothing_are_exchanged_too() -> None:
    """`overflow` returns leaves; these were once not recognised as leaves, and all experts were gathered."""
    model = named("mixtral-tiny")
    step = jp.make_train_step(model.model, optax.sgd(0.1), "expert=4,fsdp=2")
    assert step.traced(model.example(8, 128)).notes.experts_gathered == {}


def test_all_tokens_are_gathered_where_each_has_more_experts_than_there_are_ranks() -> None:
    notes, ledger = traced("all_experts", "expert=4,data=2")
    tokens, slots, features = 4 * 12, 12, 4 * cells.DIM  # of all ranks; of an expert, for the tokens of one; bytes
    assert {*notes.tokens_gathered.values()} == {(tokens * features, cells.EXPERTS * slots * features)}
    table, choices = cells.EXPERTS * slots * 4, tokens * cells.EXPERTS * 4
    gathered = ledger.total(kind="all-gather", axes=("expert",))
    assert gathered == cells.LAYERS * (2 * tokens * features + 3 * choices)
    assert ledger.total(kind="all-to-all") == cells.LAYERS * (2 * tokens * features + 4 * table)


@pytest.mark.slow
def test_grouped_matmuls_are_exchanged_where_that_is_fewer_bytes() -> None:
    notes, ledger = traced("grouped", "expert=4,data=2")
    assert notes.experts_fewer == {}
    assert not any("ragged_dot" in place for place in notes.experts_gathered)
    # To the experts 16 slots of 2 x 6 x 2 / 8 tokens in buffers of 8, features and a bias; features back. The rest is
    # what may overflow: as much again in each round, forward once, backward twice.
    first = cells.LAYERS * cells.EXPERTS * 8 * (2 * cells.DIM + cells.WIDE["grouped"]) * 4
    assert ledger.total(kind="all-to-all") > 2 * first
    notes, ledger = traced("ragged", "expert=4,data=2")
    assert ledger.total(kind="all-to-all") == 0
    tokens = cells.EXPERTS * 8 * (2 * cells.DIM + cells.FFN) * 4
    assert {*notes.experts_fewer.values()} == {tokens}
    assert {*notes.experts_fewer} <= {*notes.experts_gathered}
    assert tokens > 2 * cells.EXPERTS * cells.DIM * cells.FFN * 4
    assert any("ragged_dot" in place and "expert_cells.py" in place for place in notes.experts_gathered)
    assert ledger.total(kind="all-gather", axes=("expert",)) > 0
    notes, ledger = traced("einsum", "expert=4,data=2")
    assert notes.experts_gathered == {}
    assert ledger.total(kind="all-gather") == 0


def test_rounds_are_as_many_as_the_worst_routing_needs() -> None:
    assert most_rounds(tokens=8192, k=2, experts=8, ranks=8, slots=2560) == 3  # 8192 to one expert, 2560 of them done
    assert most_rounds(tokens=12, k=2, experts=8, ranks=2, slots=12) == 1
    assert most_rounds(tokens=4, k=1, experts=2, ranks=2, slots=4) == 0


# -- which leaves ------------------------------------------------------------------------------------------------------

LEAVES = (
    ("layers/moe/router/kernel", (3, 16, 8)),
    ("layers/moe/up", (3, 8, 16, 24)),
    ("layers/moe/up_bias", (3, 8, 24)),
    ("layers/moe/down", (3, 8, 24, 16)),
    ("layers/moe/gates", (3, 8, 2, 24, 16)),
    ("layers/moe/shared/up", (3, 16, 24)),
    ("layers/attention/query/kernel", (3, 16, 16)),
    ("head/kernel", (16, 8)),
)


def test_experts_are_the_leaves_beside_a_router() -> None:
    dims = expert_dims(LEAVES, 4, {}, {}, {})
    assert dims == {f"layers/moe/{name}": 1 for name in ("up", "up_bias", "down", "gates")}


def test_rules_and_annotations_come_first() -> None:
    expert_rules, tensor_rules = apart({"moe/(up|down)": {"expert": -3, "tensor": -1}, "query/kernel": -1})
    assert tensor_rules == {"moe/(up|down)": -1, "query/kernel": -1}
    assert expert_dims(LEAVES, 4, expert_rules, {}, {}) == {"layers/moe/up": 1, "layers/moe/down": 1}
    names = {"layers/moe/down": ("layers", "mine", "mlp", "embed")}
    assert expert_dims(LEAVES, 4, {"mine": "expert"}, {}, names) == {"layers/moe/down": 1}


APART = [(f"moe/expert_{i}/up", (16, 32)) for i in range(4)]


@pytest.mark.parametrize(
    ("leaves", "ranks", "rules", "says"),
    [
        (LEAVES, 3, {}, "8 experts on dim 1, which expert=3 does not divide"),
        (LEAVES, 2, {"moe/sideways": 0}, "matches the end of no parameter's path"),
        (LEAVES, 2, {"moe/up": 7}, "has no dim 7; use -4 to 3"),
        (LEAVES, 2, {"mine": "expert"}, "'expert' is for a name of dims"),
        (LEAVES, 2, {"moe/up": None}, "expert=2 splits no parameter"),
        ([("w", (4, 4))], 2, {}, "no leaf .* is in one module with a router; use fsdp or data instead"),
        # It was the embedding of positions that was named, whose dims are three.
        (
            [("positions", (1, 8, 16)), ("moe/router/kernel", (16, 4)), *APART],
            2,
            {},
            r"moe/expert_0/up \[16, 32\] holds a single expert: stack all",
        ),
        # A kernel of attention was named as if it were of experts.
        ([("query", (4, 2, 2))], 2, {}, r"; if query \[4, 2, 2\] holds 4 experts, say so: rules=\{'query'"),
    ],
)
def test_errors_name_what_is_wrong(leaves: Any, ranks: int, rules: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        expert_dims(leaves, ranks, rules, {}, {})


MIXTURE = (
    "expert=2,context=2,attention=ring",
    "expert=2,context=2,fsdp=2,attention=gather",
    "expert=4,context=2,attention=ulysses",
    "expert=2,context=2,tensor=2,attention=gather",
    "expert=2,context=2,fsdp=2,zero=1,microbatches=2",
    "pipe=2,expert=2,context=2,microbatches=2,attention=gather",
)


@pytest.mark.slow
@pytest.mark.parametrize("text", [MIXTURE[0], *(pytest.param(text, marks=pytest.mark.battery) for text in MIXTURE[1:])])
def test_context_beside_it(text: str) -> None:
    """Each rank has some tokens of its rows, and some experts."""
    context_cells.check_cell("mixture", text)


@pytest.mark.battery
@pytest.mark.parametrize("text", BESIDE_CONTEXT)
def test_tokens_sorted_by_expert_are_refused_beside_context(text: str) -> None:
    with pytest.raises(ValueError, match=r"sort at .*expert_cells.py.* mixes its positions"):
        cells.check_cell("grouped", text)


@pytest.mark.parametrize(("text", "dim"), [("pipe=2,expert=2,data=2", 1), ("pipe=2,data=4", None)])
def test_experts_of_blocks_in_a_loop_are_no_layers(text: str, dim: int | None) -> None:
    """The experts of vmoe, kernels and biases from `nn.vmap`, were once taken for a stack of layers, and refused."""
    kernel = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    block = {"router": {"kernel": kernel(16, 4)}, "experts": {"kernel": kernel(4, 16, 16), "bias": kernel(4, 16)}}
    init = lambda key: jax.tree.map(lambda x: jax.numpy.zeros(x.shape), {"block_0": block, "block_1": block})
    model = jp.Model(init=init, loss=lambda params, batch, key: jax.numpy.float32(0))
    with pytest.warns(UserWarning, match="one rank works at a time"):
        step = jp.make_train_step(model, optax.sgd(0.1), text)
    (stack,) = [leaf for leaf in step.layout.leaves if leaf.path == "block_*/experts/kernel"]
    assert (stack.layers, stack.expert) == (2, dim)


@pytest.mark.parametrize("layers", [4, 8])
def test_layers_beside_experts_are_no_experts(layers: int) -> None:
    """Vectors of stacked layers look like a router's, and their kernels then like experts'; also of 8 layers."""
    inner = {"scale": (16,), "bias": (8,), "router/kernel": (16, 8), "up": (8, 16, 32), "up_bias": (8, 32)}
    leaves = [(f"layers/moe/{name}", (layers, *shape)) for name, shape in (inner | {"dense/kernel": (16, 32)}).items()]
    assert set(looks_stacked(leaves).values()) == {1}
    assert looks_stacked([(path.replace("layers/", ""), shape[1:]) for path, shape in leaves]) == {
        "moe/up": 0,
        "moe/up_bias": 0,
    }


@pytest.mark.parametrize(
    ("leaves", "experts"),
    [
        ({"s/sel": (2, 8, 4), "s/up": (2, 4, 8, 16), "s/down": (2, 4, 16, 8), "in": (4, 8)}, {"s/up": 1, "s/down": 1}),
        (
            {
                f"blocks/{i}/{name}": s
                for i in "01"
                for name, s in {"pick": (8, 4), "w": (4, 8, 6), "v": (8, 8)}.items()
            },
            {"blocks/0/w": 0, "blocks/1/w": 0},
        ),
        ({"a/w": (8, 8, 8), "b/w": (8, 4), "b/up": (4, 8, 6)}, {"b/up": 0}),
        ({"conv": (3, 3, 8, 8), "other": (6, 8, 5), "pick": (4, 6)}, {"other": 0}),
    ],
)
def test_the_rule_that_an_error_names_works(leaves: dict[str, Any], experts: dict[str, int]) -> None:
    """For experts [L, E, a, b] of scanned layers and an unusual router name, the error once named the dim of layers."""
    with pytest.raises(ValueError, match=r"splits no parameter, .*; (say which dim|if other) .*, or use fsdp") as error:
        expert_dims([*leaves.items()], 2, {}, {}, {})
    rules = ast.literal_eval(str(error.value).partition("rules=")[2].partition(", or use")[0])
    assert expert_dims([*leaves.items()], 2, apart(rules)[0], {}, {}) == experts


def test_two_axes_do_not_split_one_dim() -> None:
    """It was a TypeError of JAX: a product's operands had other sizes. What the error writes is tried."""
    loss = lambda p, b, key: jnp.einsum("bhi,hio->bo", jnp.tanh(b["x"] @ p["in"]).reshape(-1, 2, 4), p["w"]).mean()
    init = lambda key: {"in": jax.random.normal(key, (4, 8)), "w": jax.random.normal(key, (2, 4, 6))}
    model_of = lambda rules: jp.Model(init=init, loss=loss, rules={"in": None} | rules)
    with pytest.raises(ValueError, match=r"both split dim 1 of w \[2, 4, 6\]; name another dim") as error:
        jp.make_train_step(model_of({"w": {"tensor": -2, "expert": -2}}), optax.sgd(0.1), "expert=2,tensor=2,data=2")
    rules = ast.literal_eval(str(error.value).partition("rules=")[2])
    batch = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype("float32")}
    assert jp.verify(model_of(rules), "expert=2,tensor=2,data=2", batch).ok


@pytest.mark.cuda_compiler
def test_no_gradient_of_experts_is_copied() -> None:
    """A conditional in a scan over all blocks copied it in every iteration, though balanced experts need no block."""
    mixtral = named("mixtral-tiny", layers=1)
    config, devices = mixtral.config, target("1xH200").devices
    step = jp.make_train_step(mixtral.model, optax.sgd(0.1), "single", mesh=devices)
    costs = Costs.from_hlo(step.compile(mixtral.example(8, 64)).as_text())
    copied = sum(cost.kernel.written * cost.executions for cost in costs if cost.kernel.name.startswith("copy"))
    one_leaf = 4 * config.experts * config.dim * config.ffn
    assert 0 < copied < one_leaf
    # The loop is a choice, as it rarely runs.
    assert any(cost.conditional and cost.kernel.products for cost in costs)


@pytest.mark.battery
@pytest.mark.parametrize("name", ["dropless", "grouped", "einsum"])
def test_gradients_of_two_processes_are_those_of_one(name: str, tmp_path: Path) -> None:
    check_two(tmp_path / "grads.npz", "expert_cells", name, "expert=2")
