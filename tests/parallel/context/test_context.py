"""Models that know nothing of the context axis train as on one device; unsupported operations are refused.

A cell compiles one step and checks gradients, three steps of SGD with momentum, bytes at rest, and the collectives.
"""

import functools
import math
import re
from pathlib import Path
from typing import Any

import context_cells as cells
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import covering
from flax import linen as nn
from tensor_cells import SHARED_BATCH
from two_processes import check_two

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import named
from jaxpar.parallel.context.attention_mode import choose
from jaxpar.parallel.context.entry import WholeLoss, find_first_splits
from jaxpar.parallel.context.ops import gather_bytes, halo_bytes, ring_bytes, ulysses_bytes, usp_bytes
from jaxpar.parallel.context.recurrences import diagonal
from jaxpar.program import jaxpr as jx

pytestmark = SHARED_BATCH

# All three ways, every other axis, dropout, shifted targets, a product with the keys on its left, logits in chunks.
FIRST = (
    ("llama_gqa", "context=2,tensor=2,sequence=true,attention=ring,remat=layer,logits=8"),
    ("gpt2", "pipe=2,context=2,fsdp=2,microbatches=2,schedule=zb-h1,logits=16"),
    ("alibi", "context=4,data=2,attention=gather"),
    ("flattened_shifted", "context=4,data=2,attention=ring"),
    ("neighbours", "context=4,attention=ring"),
    ("streams", "context=4,attention=ring"),
    ("patches", "context=4,attention=ring"),  # cut where the patches become one dim
    ("patches", "context=2,attention=ulysses"),  # each rank has a row of patches
    ("class_token", "context=4,data=2,attention=ring"),
    ("bert", "context=4,attention=usp,tensor=2"),
    ("t5_translator", "context=4,fsdp=2,attention=ring"),
    ("states_by_number", "context=4,data=2,attention=ring"),
    ("decays", "context=4,data=2"),
    ("picked", "context=4,fsdp=2,zero=1"),
)
# Attention that is spelled out, beside other axes and by fused kernels.
SPELLED = (
    ("loop", "context=4,data=2,attention=ring"),
    ("alibi", "context=2,tensor=2,attention=ulysses"),
    ("listener", "context=4,attention=ring"),
    ("t5", "tensor=2,data=2,kernels=fused"),
    ("spelled_out", "fsdp=4,microbatches=2,kernels=fused"),
)
BATTERY = (
    ("alibi", "context=2,tensor=2,attention=ring"),
    ("alibi", "fsdp=4,kernels=fused"),
    ("spelled_out", "context=2,tensor=2,sequence=true,attention=ring,remat=layer"),
    ("spelled_out", "context=8,attention=usp"),
    ("listener", "context=2,tensor=2,attention=ulysses"),
    ("encoder_decoder", "context=4,attention=ring"),
    ("encoder_decoder", "context=4,attention=usp"),
)
SCANNED = ("llama_gqa", "gpt2", "alibi", "t5", "window", "packed", "mixture", "spelled_out", "decays", "bert")
# These go beside all others by every way, the others in part.
EVERYWHERE = (*SCANNED[:6], "encoder_decoder", "translator")
BESIDE = (
    "context=2",
    "context=4,data=2",
    "context=8",
    "context=4,fsdp=2,zero=1",
    "context=2,fsdp=2,zero=2,microbatches=2",
    "context=4,fsdp=2,zero=3,prefetch=1",
    "context=2,fsdp=2,data=2,zero=3,remat=layer",
    "context=4,tensor=2",
    "context=2,tensor=2,sequence=true,fsdp=2",
    "pipe=2,context=4,microbatches=3,schedule=1f1b",
    "pipe=2,context=2,data=2,microbatches=4,schedule=zb-h1",
)


def possible(name: str, text: str, way: str) -> bool:
    """Return whether a cell is possible. The impossible ones are refused, each in a test below."""
    ranks = int(text.partition("context=")[2][0])
    ring = way in ("ring", "usp")
    if name not in SCANNED and ("remat" in text or "schedule=zb" in text or ("pipe" in text and ring)):
        return False  # no layers: a pipeline cuts the program, and its ranks run different operations
    if ring and "schedule=zb" in text:
        return False
    if (name in ("class_token", "listener") and "sequence" in text) or (name == "streams" and "pipe" in text):
        return False  # positions that tensor ranks do not divide, or that go to others than the next rank
    if name == "class_token" and "pipe" in text and ranks == 4:
        return False  # the first position shifts all others, from rank to rank
    tensor = 2 if "tensor" in text else 1
    heads, groups = (n // tensor for n in {"llama_gqa": (8, 4), "mixture": (4, 2)}.get(name, (4, 4)))
    if way == "ulysses" and heads % ranks:
        return False
    if way == "usp" and not 1 < math.gcd(ranks, heads, groups) < ranks:
        return False  # nothing to share, or nothing to pass on
    # Chunks of four positions in the first, two positions of the next chunk in the second, 40 slots of an expert.
    most = {"chunked": 4, "neighbours": 8, "mixture": 8, "patches": 8}
    return ranks * (2 if ring else 1) <= most.get(name, 16)


def battery() -> list[Any]:
    possible_cells = [
        (name, text, way)
        for name in cells.MODELS
        for text in BESIDE
        for way in (("auto",) if name in cells.BY_AUTO else ("gather", "ulysses", "ring", "usp"))
        if possible(name, text, way)
    ]
    always_chosen = [cell for cell in possible_cells if cell[0] in EVERYWHERE]
    chosen = [*always_chosen, *covering(cell for cell in possible_cells if cell[0] not in EVERYWHERE)]
    stages = lambda name, text: ",stages=cut" if "pipe" in text and name not in SCANNED else ""
    every = (*BATTERY, *((name, f"{text}{stages(name, text)},attention={way}") for name, text, way in chosen))
    return [
        pytest.param(*cell, marks=pytest.mark.battery) for cell in dict.fromkeys(every) if cell not in FIRST + SPELLED
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [*FIRST, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SPELLED), *battery()],
    ids=lambda value: value.replace(",", "-"),
)
def test_cell(name: str, text: str) -> None:
    cells.check_cell(name, text)


@pytest.mark.battery
def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    """By a ring, with logits in chunks."""
    check_two(tmp_path / "grads.npz", "context_cells", "llama_gqa", "context=2,attention=ring,logits=8", 4)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "kinds", "closed"),
    [
        ("gather", ("all-gather", "reduce-scatter"), lambda _, *sizes: gather_bytes(*sizes)),
        ("ulysses", ("all-to-all",), ulysses_bytes),
        ("ring", ("collective-permute",), lambda _, *sizes: ring_bytes(*sizes)),
        ("usp", ("collective-permute", "all-to-all"), lambda queries, keys, c, e: usp_bytes(queries, keys, c, 4, e)),
    ],
)
def test_a_layer_sends_the_closed_form(way: str, kinds: tuple[str, ...], closed: Any) -> None:
    c = 8 if way == "usp" else 4  # of 8, groups of 4 share the 4 key heads
    step = jp.make_train_step(cells.built("llama_gqa"), cells.SGD, f"context={c},attention={way}", jax.devices()[:c])
    written = Ledger.from_jaxpr(step.trace(cells.batch_of(4)), step.mesh)
    sent = sum(row.sent for row in written if row.axes in (("context",), ("4 of context",)) and row.kind in kinds)
    layers, queries, keys = 2, (4, cells.LENGTH, 8, cells.DIM // 8), (4, cells.LENGTH, 4, cells.DIM // 8)
    assert sent == layers * sum(closed(queries, keys, c, 4))
    assert step.traced(cells.batch_of(4)).notes.attention_mode.name == way


def test_zero_shards_over_fsdp_and_context() -> None:
    together, alone = (
        jp.make_train_step(cells.built("llama_gqa"), cells.SGD, text, jax.devices()[:8])
        for text in ("fsdp=2,context=4", "fsdp=8")
    )
    assert together.layout.bytes == alone.layout.bytes
    assert "context" in str(together.layout)


# -- which way ---------------------------------------------------------------------------------------------------------


def traced(model: jp.Model | str, text: str, batch: Any = None) -> Any:
    model = cells.built(model) if isinstance(model, str) else model
    ranks = math.prod(map(int, re.findall(r"(?:context|pipe|tensor)=(\d)", text)))
    step = jp.make_train_step(model, cells.SGD, text, jax.devices()[:ranks])
    return step.traced(cells.batch_of(4) if batch is None else batch)


def test_auto_counts_the_heads_of_a_tensor_rank_and_says_why() -> None:
    text = "context=2,tensor=2,pipe=2,microbatches=2,schedule=zb-h1"
    mode = traced("llama_gqa", text).notes.attention_mode
    assert mode.name == "ulysses"
    assert "divides 4 query heads of a tensor rank" in mode.why


@pytest.mark.parametrize(
    ("asked", "heads", "ranks", "options", "mode", "why"),
    [
        ("auto", (32, 32), 8, {}, ("ulysses", "plain", 1), "context=8 divides 32 query heads"),
        ("auto", (32, 8), 16, {}, ("ulysses", "plain", 1), "divides 32"),  # of repeated key heads
        ("auto", (8, 4), 4, {}, ("ulysses", "plain", 1), "context=4 divides 8 query heads, .*ring 3.11 times as much"),
        ("auto", (8, 4), 4, {"tensor": 2}, ("ulysses", "plain", 1), "4 query heads of a tensor rank .*usp 1.50 times"),
        ("auto", (32, 2), 2, {}, ("ring", "zigzag", 1), "it sends least"),
        ("auto", (32, 1), 4, {"window": 100}, ("ring", "plain", 1), "it sends least"),  # keys go one hop, of three
        ("auto", (6, 6), 4, {"window": 1000}, ("usp", "zigzag", 2), "does not divide 6"),  # whose window is nearly all
        ("auto", (4, 4), 3, {}, ("ring", "zigzag", 1), ""),
        ("auto", (4, 4), 8, {}, ("usp", "zigzag", 4), "not divide 4 query and 4 key heads, .* least .ring 3.33 times"),
        ("auto", (4, 4), 3, {"schedule": "zb-h1"}, ("gather", "plain", 1), "not in one layer at one time"),
        # The reason named 2 and 0 heads of a tensor rank: heads that it does not divide are whole.
        ("auto", (8, 2), 2, {"tensor": 4}, ("ulysses", "plain", 1), "^context=2 divides 8 query heads, "),
        # A ring was taken, which sends less here, though usp had been asked for.
        ("usp", (32, 2), 2, {}, ("ulysses", "plain", 1), "as usp, whose only group has all ranks"),
        ("ring", (4, 4), 4, {}, ("ring", "zigzag", 1), ""),
        ("ring", (4, 4), 4, {"causal": False}, ("ring", "plain", 1), ""),
    ],
)
def test_a_mode_is_possible_and_sends_least_or_was_asked_for(
    asked: str, heads: tuple[int, int], ranks: int, options: dict[str, Any], mode: tuple[str, str, int], why: str
) -> None:
    attend = functools.partial(jp.attention, **{x: options[x] for x in ("causal", "window") if x in options})
    q, k = (jax.ShapeDtypeStruct((1, 1024, n, 8), jnp.bfloat16) for n in heads)
    eqns = jx.trace(attend, q, k, k)[0].eqns
    chosen = choose(asked, eqns, ranks, options.get("tensor", 1), options.get("schedule", ""))
    assert (chosen.name, chosen.order, chosen.group) == mode
    assert re.search(why, chosen.why)


STEPS: dict[str, tuple[Any, bool]] = {
    "a h + b": (lambda h, x: x * h + jnp.tanh(x), True),
    "where it begins anew": (lambda h, x: jnp.where(x > 0, h, 0) - x / 2, True),
    "with a product of all of h": (lambda h, x: h @ jnp.ones((3, 3)) + x, False),
    "a of h": (lambda h, x: h * jax.nn.sigmoid(h) + x, False),
    "to another place": (lambda h, x: h[::-1] + x, False),
    "through a tanh": (lambda h, x: jnp.tanh(h + x), False),
    "over h": (lambda h, x: x / h, False),
    "of two states, each from the other": (lambda h, x: (h[1] * x, h[0] + x), False),
}


@pytest.mark.parametrize("recurrence", STEPS)
def test_states_that_may_be_found_in_chunks(recurrence: str) -> None:
    step, is_diagonal = STEPS[recurrence]
    h, x = jnp.ones(3), jax.ShapeDtypeStruct((4, 3), jnp.float32)
    state = (h, h) if "two" in recurrence else h
    flat, _ = jx.trace(lambda x: jax.lax.scan(lambda h, x: (step(h, x), h), state, x), x)
    (scan,) = (eqn for eqn in flat.eqns if eqn.primitive.name == "scan")
    assert diagonal(jx.scan_parts(scan)) == is_diagonal


def test_where_a_split_begins_is_held() -> None:
    """Rules of differentiation are rewritten after the trace. Sometimes a new equation had the id of a freed one."""
    table, ids = jax.ShapeDtypeStruct((5, 3), jnp.float32), jax.ShapeDtypeStruct((2, 4), jnp.int32)
    first_splits = find_first_splits(
        WholeLoss(jx.trace(lambda table, ids: table[ids].sum(), table, ids)[0], 1, [1], 1), 2, 2
    )
    assert [(key, start.eqn.primitive.name) for key, start in first_splits.items()] == [
        (id(start.eqn), "gather") for start in first_splits.values()
    ]


# -- refusals ----------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """An embedding, something that mixes positions, and a head."""

    mixes: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Dense(cells.VOCAB)(self.mixes(nn.Embed(cells.VOCAB, 8)(tokens)))


def reader(mixes: Any) -> jp.Model:
    return jp.from_linen(Reader(mixes), cells.next_token, example=cells.batch_of(2))


def decaying(x: jax.Array) -> jax.Array:
    """h <- sigmoid(x) h + x over the positions."""
    step = lambda h, x: (jax.nn.sigmoid(x) * h + x,) * 2
    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def other_places(x: jax.Array) -> jax.Array:
    """Look up each position, except for the first five, which look up position 0."""
    places = jnp.arange(len(x))
    return x[jnp.where(places < 5, 0, places), 0]


REFUSED = {
    "recurrence": (lambda x: nn.RNN(nn.SimpleCell(8))(x), "scan at"),
    "strides": (lambda x: nn.Conv(8, (3,), strides=(2,))(x).repeat(2, axis=1), "conv_general_dilated at"),
    "order": (lambda x: jnp.sort(x, axis=1), "sort at"),
    "order of merged rows": (lambda x: jnp.cumsum(x.reshape(-1, 8), axis=0).reshape(x.shape), "cumsum at"),
    "other places": (lambda x: x + other_places(x.reshape(-1, 8)).reshape(*x.shape[:2], 1), "gather at"),
    "distant": (lambda x: nn.Conv(8, (3,), padding=[(12, 0)], kernel_dilation=6)(x), "reaches 12 further"),
}


@pytest.mark.parametrize(
    ("mixes", "sent"),
    [
        (lambda x: nn.Conv(8, (3,), padding="CAUSAL")(x), halo_bytes(4 * 8, 2, 0, 4, 4)),
        (lambda x: jnp.cumsum(x, axis=1), (3 * 4 * 8 * 4, 3 * 4 * 8 * 4)),
        # Each chunk maps a state [4, 8] linearly: a factor for its decay, and the part that it adds.
        (decaying, (2 * 3 * 4 * 8 * 4, 2 * 3 * 4 * 8 * 4)),
    ],
    ids=["convolution", "cumsum", "states"],
)
def test_neighbours_send_the_closed_form(mixes: Any, sent: tuple[int, int]) -> None:
    step = jp.make_train_step(reader(mixes), cells.SGD, "context=4", jax.devices()[:4])
    written = Ledger.from_jaxpr(step.trace(cells.batch_of(4)), step.mesh)
    kinds = ("all-gather", "reduce-scatter")
    assert tuple(sum(row.sent for row in written if row.kind == kind) for kind in kinds) == sent


def test_positions_that_go_elsewhere_are_sent_once() -> None:
    """A reversed sequence sends four positions of eight features in four rows, and their gradient back."""
    model = reader(lambda x: x[:, ::-1])
    step = jp.make_train_step(model, cells.SGD, "context=4", jax.devices()[:4])
    written = Ledger.from_jaxpr(step.trace(cells.batch_of(4)), step.mesh)
    assert sum(row.sent for row in written if row.kind == "collective-permute") == 2 * 4 * 4 * 8 * 4
    with pytest.raises(ValueError, match=r"sends positions to other ranks at rev at .*; use schedule='1f1b'"):
        traced(model, "context=2,pipe=2,microbatches=2,schedule=zb-h1,stages=cut")


@pytest.mark.parametrize("mix", REFUSED)
def test_what_mixes_positions_is_named(mix: str) -> None:
    mixes, message = REFUSED[mix]
    with pytest.raises(ValueError, match=r"context=2 splits dim [01] of") as error:
        traced(reader(mixes), "context=2")
    assert message in str(error.value)
    assert "test_context.py" in str(error.value)
    assert {"distant": "use a smaller context="}.get(mix, "attend by jp.attention") in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "length", "message"),
    [
        ("gpt2", "context=8,attention=ulysses", 16, "does not divide 4 query heads"),
        ("chunked", "context=8,attention=gather", 16, "into 8 parts, and reshape at .* by a chunk= 8 times as large"),
        ("states", "context=2,attention=gather", 15, "splits the 15 positions of scan at .*; use 16 positions, or"),
        ("mixture", "context=2,tensor=2,attention=usp", 16, "no divisor of it divides 2 query and 1 key heads of a"),
        # In a collective-permute of XLA all devices meet, and of zb-h1 some are in other layers: it hung.
        ("llama_gqa", "context=2,pipe=2,microbatches=2,schedule=zb-h1,attention=ring", 16, "use attention='gather'"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, text: str, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        traced(name, text, cells.batch_of(4, length))


def test_windows_that_a_chunk_cuts_are_told_how_many_positions_fit() -> None:
    """The error named a missing rule, and advised jp.attention."""

    class Windows(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return nn.Dense(4)(nn.Conv(8, (4,), strides=(4,))(nn.Embed(16, 8)(tokens)))

    batch = lambda length: {"tokens": np.zeros((4, length), np.int32)}
    loss = lambda apply, batch: jnp.square(apply(batch["tokens"])).mean()
    model = jp.from_linen(Windows(), loss, batch(32))
    assert traced(model, "context=2", batch(32)).program.pieces
    with pytest.raises(ValueError, match=r"the 36 positions of .* need a multiple of 8; use 40 positions"):
        traced(model, "context=2", batch(36))


def mixtral(**options: Any) -> jp.Model:
    return named("mixtral-tiny", vocab=cells.VOCAB, dim=8, layers=1, **options).model


def test_a_capacity_is_refused() -> None:
    """A capacity drops tokens depending on all tokens of their row."""
    with pytest.raises(ValueError, match=r"model\.py:\d+.*use capacity=None, which drops nothing"):
        traced(mixtral(capacity=0.8), "context=2,attention=ring")


def test_any_number_of_experts_has_slots_that_ranks_divide() -> None:
    """Each of 7 experts had 23 slots, which two ranks refused."""
    assert traced(mixtral(experts=7), "context=2,attention=ring").program.pieces


def test_a_loss_without_a_sequence_is_refused() -> None:
    model = jp.Model(
        init=lambda key: {"w": jnp.ones((3, 1))},
        loss=lambda params, batch, key: jnp.square(batch["x"] @ params["w"]).mean(),
    )
    with pytest.raises(ValueError, match=r"looks up no ids \[rows, positions\]"):
        traced(model, "context=2", {"x": np.ones((4, 3), np.float32)})


def test_attention_without_context_is_refused() -> None:
    with pytest.raises(ValueError, match="give context= a size"):
        jp.Strategy(attention="ring")


def test_a_fourier_transform_of_the_sequence_is_not_advised_longer_ones() -> None:
    """A convolution with a kernel as long as the sequence transforms 2 T - 1 positions."""
    length = lambda x: 2 * x.shape[1] - 1
    mixes = lambda x: jnp.fft.irfft(jnp.fft.rfft(x, length(x), axis=1), length(x), axis=1)[:, : x.shape[1]]
    with pytest.raises(ValueError, match=r"fft at .* or use tensor, fsdp or pipe instead of context") as error:
        traced(reader(mixes), "context=2")
    assert "longer sequences" not in str(error.value)


def test_blocks_that_are_picked_are_advised_a_mask_which_is_taken() -> None:
    """Test the advice for BigBird's random blocks. It was jp.attention, which has no such mask."""
    picked = np.array([[1, 3], [0, 2], [3, 1], [2, 0]])  # of 4 blocks of positions, which two each attends to

    def blocks(x: jax.Array) -> jax.Array:
        b = x.reshape(x.shape[0], 4, -1, 8)
        drawn = picked + (0 * x[0, 0, 0]).astype(int)  # known when the program runs
        keys = jnp.concatenate([b[:, drawn[:, 0]], b[:, drawn[:, 1]]], 2)
        scores = jax.nn.softmax(jnp.einsum("nibd,nijd->nibj", b, keys), axis=-1)
        return jnp.einsum("nibj,nijd->nibd", scores, keys).reshape(x.shape)

    def masked(x: jax.Array) -> jax.Array:
        block_of = np.arange(x.shape[1]) // (x.shape[1] // 4)
        mask = jnp.asarray((picked[block_of][:, :, None] == block_of).any(1))
        return jax.nn.dot_product_attention(*(x[:, :, None],) * 3, mask=mask[None, None], scale=1.0)[:, :, 0]

    x = jax.random.normal(jax.random.key(0), (2, 16, 8))
    np.testing.assert_allclose(blocks(x), masked(x), atol=1e-5)
    with pytest.raises(ValueError, match=r"gather at .* give all of them and mask="):
        traced(reader(blocks), "context=2")
    traced(reader(masked), "context=2")


def test_attention_over_positions_that_overlap() -> None:
    """Registers follow a sequence, and attention is spelled out. It runs as `jp.attention`, then as a function of
    scores.

    When positions were exchanged, its gradient was wrong; later it was refused.
    """

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x = batch["x"] @ params["enter"]
        x = jnp.concatenate([x, jnp.broadcast_to(params["registers"], (len(x), 4, 16))], 1)
        i, j = jnp.ogrid[:20, :20]
        for hidden in (j > i, abs(i - j) == 5):
            x = x + jax.nn.softmax(jnp.where(hidden, -1e9, x @ x.mT / 16)) @ x
        return jnp.square(jnp.tanh(x))[:, 3:17].mean()

    draw = lambda key, n: 0.3 * jax.random.normal(key, (n, 16))
    model = jp.Model(lambda key: {"enter": draw(key, 16), "registers": draw(key, 4)}, loss, rows="independent")
    batch = {"x": np.random.default_rng(0).normal(size=(4, 16, 16)).astype(np.float32)}
    assert jp.verify(model, "context=2,attention=ring", batch, mesh=jax.devices()[:2], equation=False).ok
