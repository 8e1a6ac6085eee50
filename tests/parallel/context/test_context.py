"""Models that know nothing of the context axis train as on one device; unsupported operations are refused.

A cell compiles one step and checks gradients, three steps of SGD with momentum, bytes at rest, and the collectives.
"""

import functools
import math
import re
from typing import Any

import context_cells as cells
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import covering
from flax import linen as nn
from tensor_cells import SHARED_BATCH

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import named
from jaxpar.parallel.context.attention_mode import choose
from jaxpar.parallel.context.entry import WholeLoss, starts
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
    (
        "patches",
        "context=4,attention=ring",
    ),  # cut where the patches become one dim; of two ranks each has a row of them
    ("patches", "context=2,attention=ulysses"),
    ("patches_of_one_image", "context=4,data=2,attention=ring"),
    ("patches_by_reshape", "context=4,data=2,attention=ring"),
    ("class_token", "context=4,data=2,attention=ring"),
    ("bert", "context=4,attention=usp,tensor=2"),
    ("lengths", "context=2,data=4,attention=ulysses"),
    ("gpt2_of_odd_length", "context=4,data=2,attention=ring"),
    ("t5_translator", "context=4,fsdp=2,attention=ring"),
    ("states_by_number", "context=4,data=2,attention=ring"),
    ("decays", "context=4,data=2"),
    ("picked", "context=4,fsdp=2,zero=1"),
)
SCANNED = (
    "llama_gqa",
    "gpt2",
    "alibi",
    "t5",
    "window",
    "packed",
    "mixture",
    "packed_window",
    "spelled_out",
    "decays",
    "padded",
    "bert",
    "gpt2_of_odd_length",
    "lengths",
    "capped",
    "sinks",
)
EVERYWHERE = (
    *SCANNED[:6],
    "encoder_decoder",
    "translator",
)  # all that they go beside, by every way; the others in part
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
    chunks = ranks * (2 if ring else 1)
    if name not in SCANNED and ("remat" in text or "schedule=zb" in text or ("pipe" in text and ring)):
        return False  # no layers: a pipeline cuts the program, and its ranks run different operations
    if ring and "schedule=zb" in text:
        return False
    odd = name in ("lengths", "class_token") or (name == "gpt2_of_odd_length" and not ring)  # positions of a rank
    if (odd and "sequence" in text) or (name == "streams" and "pipe" in text):
        return False  # which tensor ranks do not divide; which go to others than the next rank
    heads, groups = (
        n // (2 if "tensor" in text else 1) for n in {"llama_gqa": (8, 4), "mixture": (4, 2)}.get(name, (4, 4))
    )
    if way == "ulysses" and heads % ranks:
        return False
    if way == "usp" and not 1 < math.gcd(ranks, heads, groups) < ranks:
        return False  # nothing to share, or nothing to pass on
    # Chunks of four positions in the first, two positions of the next chunk in the second, 40 slots of an expert.
    return chunks <= {"chunked": 4, "neighbours": 8, "mixture": 8, "patches": 8, "patches_of_one_image": 8}.get(
        name, chunks
    )


def battery() -> list[Any]:
    possible_cells = [
        (name, text, way)
        for name in cells.MODELS
        for text in BESIDE
        for way in (("gather", "ulysses", "ring", "usp") if name in cells.KERNELS else ("auto",))
        if possible(name, text, way)
    ]
    always_chosen = [cell for cell in possible_cells if cell[0] in EVERYWHERE]
    chosen = [*always_chosen, *covering(cell for cell in possible_cells if cell[0] not in EVERYWHERE)]
    stages = lambda name, text: ",stages=cut" if "pipe" in text and name not in SCANNED else ""
    return [(name, f"{text}{stages(name, text)},attention={way}") for name, text, way in chosen]


@pytest.mark.parametrize(
    ("name", "text"),
    [*FIRST, *(pytest.param(*cell, marks=pytest.mark.battery) for cell in battery() if cell not in FIRST)],
    ids=lambda value: value.replace(",", "-"),
)
def test_cell(name: str, text: str) -> None:
    cells.check_cell(name, text)


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


@pytest.mark.parametrize("way", ["gather", "ring"])
def test_layers_may_be_rematerialised(way: str) -> None:
    """Attention was one kernel in the trace. Inside a layer's backward, its own backward was taken for that kernel."""
    text = f"context=2,attention={way},remat=layer"
    step = jp.make_train_step(cells.built("llama_gqa"), cells.SGD, text, jax.devices()[:2])
    step.trace(cells.batch_of(4))


def test_zero_shards_over_fsdp_and_context() -> None:
    together, alone = (
        jp.make_train_step(cells.built("llama_gqa"), cells.SGD, text, jax.devices()[:8])
        for text in ("fsdp=2,context=4", "fsdp=8")
    )
    assert together.layout.bytes == alone.layout.bytes
    assert "context" in str(together.layout)


# -- which way ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "way", "why"),
    [
        ("llama_gqa", "context=4", "ulysses", "context=4 divides 8 query heads, .*ring 2.22 times as much"),
        ("llama_gqa", "context=4,tensor=2", "ulysses", "divides 4 query heads of a tensor rank .*usp 1.17 times"),
        ("alibi", "context=2", "ulysses", "context=2 divides 4 query heads, .*ring"),
        ("capped", "context=2", "ring", "causal scores that .* makes others of, it leaves out those of hidden keys"),
        (
            "llama_gqa",
            "context=2,tensor=2,pipe=2,microbatches=2,schedule=zb-h1",
            "ulysses",
            "divides 4 query heads of a tensor rank",
        ),
    ],
)
def test_auto_says_why(name: str, text: str, way: str, why: str) -> None:
    count = 8 if "tensor" in text else int(text[8])
    step = jp.make_train_step(cells.built(name), cells.SGD, text, jax.devices()[:count])
    mode = step.traced(cells.batch_of(4)).notes.attention_mode
    assert mode.name == way
    assert re.search(why, mode.why)


def test_ranks_that_branch_have_no_ring() -> None:
    x = jax.ShapeDtypeStruct((1, 12, 4, 8), jnp.float32)
    flat, _ = jx.trace(jp.attention, x, x, x)
    assert choose("auto", flat.eqns, 3, 1).name == "ring"
    mode = choose("auto", jx.trace(jp.attention, *[jax.ShapeDtypeStruct((1, 32, 4, 8), jnp.float32)] * 3)[0].eqns, 8, 1)
    assert (mode.name, mode.group) == ("usp", 4)
    assert "does not divide 4 query and 4 key heads, and it sends least (ring 3.14 times as much)" in mode.why
    mode = choose("auto", flat.eqns, 3, 1, "zb-h1")
    assert (mode.name, "not in one layer at one time" in mode.why) == ("gather", True)


def test_heads_that_tensor_does_not_divide_are_whole() -> None:
    """The reason named 2 and 0 heads of a tensor rank."""
    q, k = (jax.ShapeDtypeStruct((1, 16, heads, 8), jnp.float32) for heads in (8, 2))
    flat, _ = jx.trace(jp.attention, q, k, k)
    assert choose("auto", flat.eqns, 2, 4).why.startswith("context=2 divides 8 query heads, ")


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "window", "way", "order"),
    [
        (32, 32, 8, None, "ulysses", "plain"),
        (32, 8, 16, None, "ulysses", "plain"),  # of repeated key heads
        (32, 2, 2, None, "ring", "zigzag"),
        (32, 1, 4, 100, "ring", "plain"),  # whose keys go one hop, of three
        (6, 6, 4, 1000, "usp", "zigzag"),  # whose window is nearly all
    ],
)
def test_auto_sends_least(heads: int, key_heads: int, ranks: int, window: int | None, way: str, order: str) -> None:
    q, k = (jax.ShapeDtypeStruct((1, 1024, n, 8), jnp.bfloat16) for n in (heads, key_heads))
    attend = functools.partial(jp.attention, causal=True, window=window)
    mode = choose("auto", jx.trace(attend, q, k, k)[0].eqns, ranks, 1)
    assert (mode.name, mode.order) == (way, order)


def test_usp_of_one_group_is_ulysses() -> None:
    """A ring was taken, which sends less here, though usp had been asked for."""
    q, k = (jax.ShapeDtypeStruct((1, 1024, n, 8), jnp.bfloat16) for n in (32, 2))
    eqns = jx.trace(functools.partial(jp.attention, causal=True), q, k, k)[0].eqns
    assert choose("auto", eqns, 2, 1).name == "ring"
    assert choose("usp", eqns, 2, 1).name == "ulysses"
    assert "as usp, whose only group has all ranks" in choose("usp", eqns, 2, 1).why


@pytest.mark.parametrize(("causal", "order"), [(True, "zigzag"), (False, "plain")])
def test_a_ring_is_zigzag_where_attention_is_causal(causal: bool, order: str) -> None:
    x = jax.ShapeDtypeStruct((1, 12, 4, 8), jnp.float32)
    flat, _ = jx.trace(functools.partial(jp.attention, causal=causal), x, x, x)
    assert choose("ring", flat.eqns, 4, 1).order == order


STEPS: dict[str, tuple[Any, bool]] = {
    "a h + b": (lambda h, x: x * h + jnp.tanh(x), True),
    "where it begins anew": (lambda h, x: jnp.where(x > 0, h, 0) - x / 2, True),
    "with a product of all of h": (lambda h, x: h @ jnp.ones((3, 3)) + x, False),
    "a of h": (lambda h, x: h * jax.nn.sigmoid(h) + x, False),
    "to another place": (lambda h, x: h[::-1] + x, False),
    "through a tanh": (lambda h, x: jnp.tanh(h + x), False),
    "over h": (lambda h, x: x / h, False),
}


@pytest.mark.parametrize("recurrence", STEPS)
def test_states_that_may_be_found_in_chunks(recurrence: str) -> None:
    step, is_diagonal = STEPS[recurrence]
    x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    flat, _ = jx.trace(lambda x: jax.lax.scan(lambda h, x: (step(h, x), h), jnp.ones(3), x), x)
    (scan,) = (eqn for eqn in flat.eqns if eqn.primitive.name == "scan")
    assert diagonal(jx.scan_parts(scan)) == is_diagonal


def test_a_state_that_another_goes_into_is_no_diagonal_one() -> None:
    x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    swap = lambda h, x: ((h[1] * x, h[0] + x), x)
    flat, _ = jx.trace(lambda x: jax.lax.scan(swap, (jnp.ones(3), jnp.ones(3)), x), x)
    (scan,) = (eqn for eqn in flat.eqns if eqn.primitive.name == "scan")
    assert not diagonal(jx.scan_parts(scan))


def test_where_a_split_begins_is_held() -> None:
    """Rules of differentiation are rewritten after the trace. Sometimes a new equation had the id of a freed one."""
    table, ids = jax.ShapeDtypeStruct((5, 3), jnp.float32), jax.ShapeDtypeStruct((2, 4), jnp.int32)
    first_splits = starts(WholeLoss(jx.trace(lambda table, ids: table[ids].sum(), table, ids)[0], 1, [1], 1), 2, 2)
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
    "convolution with strides": (
        lambda x: nn.Conv(8, (3,), strides=(2,))(x).repeat(2, axis=1),
        "conv_general_dilated at",
    ),
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
    branching = "context=2,pipe=2,microbatches=2,schedule=zb-h1,stages=cut"
    with pytest.raises(ValueError, match=r"go to other ranks at rev at .*; use schedule='1f1b'"):
        jp.make_train_step(model, cells.SGD, branching, jax.devices()[:4]).traced(cells.batch_of(4))


@pytest.mark.parametrize("mix", REFUSED)
def test_what_mixes_positions_is_named(mix: str) -> None:
    mixes, message = REFUSED[mix]
    step = jp.make_train_step(reader(mixes), cells.SGD, "context=2", jax.devices()[:2])
    with pytest.raises(ValueError, match=r"context=2 splits dim [01] of") as error:
        step.traced(cells.batch_of(4))
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
    count = 4 if "pipe" in text or "tensor" in text else int(text[8])
    step = jp.make_train_step(cells.built(name), cells.SGD, text, jax.devices()[:count])
    with pytest.raises(ValueError, match=message):
        step.traced(cells.batch_of(4, length))


def test_windows_that_a_chunk_cuts_are_told_how_many_positions_fit() -> None:
    """The error named a missing rule, and advised jp.attention."""

    class Windows(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return nn.Dense(4)(nn.Conv(8, (4,), strides=(4,))(nn.Embed(16, 8)(tokens)))

    for length, fits in ((36, 40), (32, 0)):
        batch = {"tokens": np.zeros((4, length), np.int32)}
        model = jp.from_linen(Windows(), lambda apply, batch: jnp.square(apply(batch["tokens"])).mean(), batch)
        step = jp.make_train_step(model, cells.SGD, "context=2", jax.devices()[:2])
        if not fits:
            assert step.traced(batch).program.pieces
        else:
            with pytest.raises(ValueError, match=r"the 36 positions of .* want a multiple of 8; use 40 positions"):
                step.traced(batch)


def test_a_capacity_is_refused() -> None:
    """A capacity drops tokens depending on all tokens of their row."""
    model = named("mixtral-tiny", vocab=cells.VOCAB, dim=8, layers=1, capacity=0.8).model
    step = jp.make_train_step(model, cells.SGD, "context=2,attention=ring", jax.devices()[:2])
    with pytest.raises(ValueError, match=r"model\.py:\d+.*use capacity=None, which drops nothing"):
        step.traced(cells.batch_of(4))


def test_any_number_of_experts_has_slots_that_ranks_divide() -> None:
    """Each of 7 experts had 23 slots, which two ranks refused."""
    model = named("mixtral-tiny", vocab=cells.VOCAB, dim=8, layers=1, experts=7).model
    step = jp.make_train_step(model, cells.SGD, "context=2,attention=ring", jax.devices()[:2])
    assert step.traced(cells.batch_of(4)).program.pieces


def test_a_loss_without_a_sequence_is_refused() -> None:
    model = jp.Model(
        init=lambda key: {"w": jnp.ones((3, 1))},
        loss=lambda params, batch, key: jnp.square(batch["x"] @ params["w"]).mean(),
    )
    step = jp.make_train_step(model, cells.SGD, "context=2", jax.devices()[:2])
    with pytest.raises(ValueError, match=r"looks up no ids \[rows, positions\]"):
        step.traced({"x": np.ones((4, 3), np.float32)})


def test_attention_without_context_is_refused() -> None:
    with pytest.raises(ValueError, match="give context= a size"):
        jp.Strategy(attention="ring")


def test_a_fourier_transform_of_the_sequence_is_not_advised_longer_ones() -> None:
    """A convolution with a kernel as long as the sequence transforms 2 T - 1 positions."""
    length = lambda x: 2 * x.shape[1] - 1
    mixes = lambda x: jnp.fft.irfft(jnp.fft.rfft(x, length(x), axis=1), length(x), axis=1)[:, : x.shape[1]]
    step = jp.make_train_step(reader(mixes), cells.SGD, "context=2", jax.devices()[:2])
    with pytest.raises(ValueError, match=r"fft at .* or use tensor, fsdp or pipe for context") as error:
        step.traced(cells.batch_of(4))
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
    step = lambda mixes: jp.make_train_step(reader(mixes), cells.SGD, "context=2", jax.devices()[:2])
    with pytest.raises(ValueError, match=r"gather at .* give all of them and mask="):
        step(blocks).traced(cells.batch_of(4))
    step(masked).traced(cells.batch_of(4))


@pytest.mark.parametrize("hides", [lambda i, j: j > i, lambda i, j: abs(i - j) == 5], ids=["later", "some"])
def test_attention_over_positions_that_overlap(hides: Any) -> None:
    """Registers follow a sequence, and attention is spelled out. It runs as `jp.attention`, or as a function of scores.

    When positions were exchanged, its gradient was wrong; later it was refused.
    """

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x = batch["x"] @ params["enter"]
        x = jnp.concatenate([x, jnp.broadcast_to(params["registers"], (len(x), 4, 16))], 1)
        scores, places = x @ x.mT / 16, jnp.arange(20)
        x = x + jax.nn.softmax(jnp.where(hides(places[:, None], places), -1e9, scores)) @ x
        return jnp.square(jnp.tanh(x))[:, 3:17].mean()

    draw = lambda key, n: 0.3 * jax.random.normal(key, (n, 16))
    model = jp.Model(lambda key: {"enter": draw(key, 16), "registers": draw(key, 4)}, loss, rows="independent")
    batch = {"x": np.random.default_rng(0).normal(size=(4, 16, 16)).astype(np.float32)}
    assert jp.verify(model, "context=2,attention=ring", batch, mesh=jax.devices()[:2], equation=False).ok
