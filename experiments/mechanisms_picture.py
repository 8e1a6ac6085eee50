"""Five pictures of what strategies do, docs/assets/, drawn from programs that do it.

python experiments/mechanisms_picture.py

collectives  the buffers of four ranks before and after each collective, run on values that name rank and chunk
ring         the chunks of each rank after each step of `collectives.ring_all_reduce`, run on such values
fsdp         gathers, products and scatters of the traced step of ZeRO-3, loops written out, in the order of the program
tensor       which part of two weights each rank of `tensor` has, by the layout, and the sums of the traced step
exchanges    what `explain` rehearses of the server's step, beside the one collective of `ddp`
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from strategies_picture import LAYERS, STYLE, model

import jaxpar as jp
from jaxpar import collectives
from jaxpar.collectives import ring
from jaxpar.inspect.explain.picture import COLLECTIVE_COLORS
from jaxpar.inspect.ledger import Ledger
from jaxpar.program import jaxpr as jx

RANKS, INK = 4, "#10151c"
FRAME = f".ink{{fill:{INK}}}.frame{{fill:none;stroke:#424a53;stroke-width:2}}"
FRAME += "@media(prefers-color-scheme:dark){.frame{stroke:#c9d1d9}}"
COLORS = ("#4c8dd6", "#e0902f", "#3fa05a", "#b46bc8")  # of ranks
BATCH = {"x": jax.ShapeDtypeStruct((16, 64), jnp.float32)}


def svg(title: str, width: float, height: float, lines: Iterator[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    return "\n".join([head, f"<title>{title}</title><style>{STYLE}{FRAME}</style>", *lines, "</svg>\n"])


def box(x: float, y: float, wide: float, high: float, color: str, text: str = "") -> str:
    middle = f'<text class="mid" x="{x + wide / 2:g}" y="{y + high / 2 + 5:g}" style="fill:{INK}">{text}</text>'
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="2" fill="{color}"/>' + middle * bool(text)


def label(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} x="{x:g}" y="{y:g}">{text}</text>'


def step_of(strategy: str, **options: Any) -> Any:
    return jp.make_train_step(model(), optax.adam(1e-3), strategy, mesh=jax.devices()[:RANKS], **options)


def named_values() -> jax.Array:
    """Return values [rank, chunk] whose sums show their terms: a bit for each rank, a group of bits for each chunk."""
    return 1 << (RANKS * jnp.arange(RANKS)[None] + jnp.arange(RANKS)[:, None])


def terms(value: int) -> tuple[int, set[int]]:
    """Return the chunk of a sum of named values, and the ranks whose values are in it."""
    bits = [i for i in range(RANKS * RANKS) if value >> i & 1]
    (chunk,) = {bit // RANKS for bit in bits}
    return chunk, {bit % RANKS for bit in bits}


def chunk_cell(
    x: float, y: float, size: float, chunk: int | None, ranks: set[int], changed: bool = False
) -> Iterator[str]:
    """Draw a chunk with a stripe for each rank whose values it holds; if it changed, with a frame."""
    yield box(x, y, size, size, "#818b9829")
    for number, rank in enumerate(sorted(ranks)):
        wide = size / len(ranks)
        yield box(x + number * wide, y, wide, size, COLORS[rank])
    if changed:
        yield f'<rect class="frame" x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" rx="2"/>'
    yield label(x + size / 2, y + size / 2 + 5, "abcd"[chunk], "mid ink")


def ring_steps() -> list[list[tuple[int, set[int]]]]:
    """Return, for every step of a ring all-reduce, the chunk that each rank receives, and whose values are in it."""
    received: dict[int, list[int]] = {}
    ppermute = ring.lax.ppermute

    def recording(x: jax.Array, *args: Any) -> jax.Array:
        y = ppermute(x, *args)
        record = lambda rank, value: received.setdefault(int(rank), []).append(int(value[0]))
        jax.debug.callback(record, jax.lax.axis_index("d"), y)
        return y

    ring.lax.ppermute = recording
    try:
        jax.block_until_ready(jax.vmap(lambda x: ring.ring_all_reduce(x, "d"), axis_name="d")(named_values()))
        jax.effects_barrier()
    finally:
        ring.lax.ppermute = ppermute
    return [[terms(value) for value in step] for step in zip(*(received[rank] for rank in range(RANKS)), strict=True)]


def draw_ring() -> str:
    steps, size, apart, left = ring_steps(), 26, 146, 104
    state = [[{rank} for _ in range(RANKS)] for rank in range(RANKS)]

    def line(y: float, name: str, changed: list[int | None]) -> Iterator[str]:
        yield label(left - 8, y + 18, name, "name")
        for rank, chunks in enumerate(state):
            for chunk, ranks in enumerate(chunks):
                yield from chunk_cell(left + rank * apart + 28 * chunk, y, size, chunk, ranks, chunk == changed[rank])

    def lines() -> Iterator[str]:
        for rank in range(RANKS):
            yield label(left + rank * apart + 55, 22, f"rank {rank}", "mid")
            yield label(left + rank * apart + 129, 22, "&#8594;", "mid")
        yield from line(34, "before", [None] * RANKS)
        for number, step in enumerate(steps):
            for rank, (chunk, ranks) in enumerate(step):
                state[rank][chunk] = ranks | {rank}
            is_gather = number >= RANKS - 1
            y = 74 + number * 34 + 18 * is_gather
            yield from line(y, f"step {number + 1}", [chunk for chunk, _ in step])
            if number in (0, RANKS - 1):
                yield label(left + RANKS * apart, y + 18, "all-gather" if is_gather else "reduce-scatter")
        assert all(ranks == set(range(RANKS)) for chunks in state for ranks in chunks)
        y = 114 + len(steps) * 34
        yield label(left, y, "a to d: chunks. Colours: whose values are in the sum. Frame: received in this step.")

    title = f"A ring all-reduce of {RANKS} ranks in {len(steps)} steps: partial sums go round, then complete ones"
    return svg(title, left + RANKS * apart + 110, 128 + len(steps) * 34, lines())


def draw_collectives() -> str:
    all_chunks = named_values()
    calls: dict[str, tuple[jax.Array, Callable[[jax.Array], jax.Array]]] = {
        "broadcast": (all_chunks, lambda x: collectives.broadcast(x, "d")),
        "reduce": (all_chunks, lambda x: collectives.reduce(x, "d")),
        "scatter": (all_chunks, lambda x: collectives.scatter(x, "d")),
        "gather": (jnp.diagonal(all_chunks)[:, None], lambda x: collectives.gather(x, "d")),
        "all-reduce": (all_chunks, lambda x: collectives.all_reduce(x, "d")),
        "all-gather": (jnp.diagonal(all_chunks)[:, None], lambda x: collectives.all_gather(x, "d")),
        "reduce-scatter": (all_chunks, lambda x: collectives.reduce_scatter(x, "d")),
        "all-to-all": (all_chunks, lambda x: collectives.all_to_all(x, "d")),
    }
    size, wide, high = 22, 306, 150

    def buffers(x: float, y: float, values: jax.Array) -> Iterator[str]:
        for rank, row in enumerate(values.tolist()):
            for number, value in enumerate(row):
                if value:
                    yield from chunk_cell(x + 24 * number, y + 26 * rank, size, *terms(value))

    def lines() -> Iterator[str]:
        for number, (name, (values, call)) in enumerate(calls.items()):
            x, y = 60 + number % 2 * wide, 40 + number // 2 * high
            yield label(x, y - 14, name)
            for rank in range(RANKS):
                yield label(x - 8, y + 17 + 26 * rank, f"rank {rank}", "name")
            yield from buffers(x, y, values)
            yield label(x + 112, y + 56, "&#8594;", "mid")
            yield from buffers(x + 128, y, jax.vmap(call, axis_name="d")(values))

    return svg("Buffers of four ranks before and after each collective", 2 * wide, len(calls) // 2 * high + 20, lines())


def events(jaxpr: Any) -> Iterator[str]:
    """Gathers, products and scatters of a program in its order, loops written out."""
    kinds = {"all_gather": "gather", "dot_general": "use", "reduce_scatter": "scatter"}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in kinds:
            yield kinds[eqn.primitive.name]
        is_program = lambda x: hasattr(x, "eqns")
        for one in filter(is_program, jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program)):
            for _ in range(eqn.params["length"] if eqn.primitive.name == "scan" else 1):
                yield from events(jx.opened(one)[0])


def draw_fsdp() -> str:
    merged = [kind for kind, _ in itertools.groupby(events(step_of("zero3").trace(BATCH).jaxpr))]
    assert merged.count("use") == 2 * LAYERS
    names = {"gather": ("all-gather", COLLECTIVE_COLORS["all-gather"]), "use": ("products", COLORS[0])}
    names["scatter"] = "reduce-scatter", COLLECTIVE_COLORS["reduce-scatter"]

    def lines() -> Iterator[str]:
        x, uses, turn = 124.0, 0, 0.0
        for number, lane in enumerate(("network", "compute", "gathered")):
            yield label(116, 80 + 34 * number, lane, "name")
        for kind in merged:
            wide = 38 if kind == "use" else 26
            uses += kind == "use"
            # A gather is for the next use, a scatter for the last one.
            number = uses + (kind == "gather")
            layer = number if number <= LAYERS else 2 * LAYERS + 1 - number
            if number == LAYERS + 1 and not turn:
                turn = x - 2
            yield box(x, 64 + 34 * (kind == "use"), wide, 24, names[kind][1], str(layer))
            if kind == "use":  # gathered from its gather to here, and no longer
                yield box(x - 28, 132, wide + 28, 24, "#818b98", f"layer {layer}")
            x += wide + 2
        yield label((124 + turn) / 2, 52, "forward", "mid")
        yield label((turn + x) / 2, 52, "backward", "mid")
        yield f'<line class="frame" x1="{turn:g}" y1="40" x2="{turn:g}" y2="156"/>'
        at = 124.0
        for text, color in names.values():
            yield box(at, 8, 12, 12, color)
            yield label(at + 17, 19, text)
            at += 40 + 7.5 * len(text)

    wide = 140 + sum(40 if kind == "use" else 28 for kind in merged)
    title = f"A step of ZeRO-3 with {LAYERS} layers: each is gathered, used and dropped, twice"
    return svg(title, max(wide, 420), 168, lines())


def draw_tensor() -> str:
    step = step_of(f"tensor={RANKS}", rules={"up": -1, "down": -2})
    dims = {leaf.path: leaf.tensor - len(leaf.shape) for leaf in step.layout.leaves}
    sent = Ledger.from_jaxpr(step.trace(BATCH), step.mesh).by("kind", value="sent")

    def weight(x: float, name: str, wide: float, high: float) -> Iterator[str]:
        for rank in range(RANKS):
            if dims[name] == -1:
                yield box(x + rank * wide / RANKS, 40, wide / RANKS - 1, high, COLORS[rank], str(rank))
            else:
                yield box(x, 40 + rank * high / RANKS, wide, high / RANKS - 1, COLORS[rank], str(rank))
        yield label(x + wide / 2, 60 + high, name, "mid")

    def lines() -> Iterator[str]:
        yield box(10, 40, 56, 40, "#818b98", "x")
        yield label(78, 66, "@")
        yield from weight(98, "up", 152, 56)
        yield label(262, 66, "=")
        for rank in range(RANKS):
            yield box(282 + rank * 38, 40, 37, 40, COLORS[rank], str(rank))
        yield label(448, 66, "@")
        yield from weight(468, "down", 56, 152)
        yield label(536, 66, "=")
        for rank in range(RANKS):
            yield box(556, 40 + rank * 38, 56, 36, COLORS[rank], f"sum {rank}")
        yield label(622, 112, max(sent, key=lambda kind: sent[kind]))
        yield label(10, 24, "whole on all ranks")
        yield label(282, 24, "a part on each")
        yield label(556, 24, "partial sums")

    return svg(
        "Two matmuls on four ranks of tensor: columns of the first, rows of the second, one sum", 710, 220, lines()
    )


def draw_exchanges() -> str:
    transfers, ddp = step_of("dp").explain(BATCH).transfers, step_of("ddp")
    (kind,) = Ledger.from_jaxpr(ddp.trace(BATCH), ddp.mesh).by("kind")  # one, and no other

    def lines() -> Iterator[str]:
        yield label(12, 24, "dp: through the server, each waits for the one before")
        for number, one in enumerate(transfers):
            out, y = one.kind in ("scatter", "broadcast"), 40 + 34 * number
            yield box(12, y, 70, 24, COLORS[0], "server")
            for rank in range(1, RANKS):
                yield box(260 + 76 * (rank - 1), y, 70, 24, COLORS[rank], f"device {rank}")
            yield label(170, y + 17, f"{'' if out else '&#8592; '}{one.kind}{' &#8594;' if out else ''}", "mid")
            yield label(496, y + 17, one.what)
        y = 52 + 34 * len(transfers)
        yield label(12, y + 18, "ddp: one, in pieces that overlap with the backward")
        for rank in range(RANKS):
            yield box(12 + 76 * rank, y + 32, 70, 24, COLORS[rank], f"device {rank}")
        yield label(326, y + 49, f"{kind} of gradients")

    return svg("Five exchanges of a central server beside one of DDP", 660, 130 + 34 * len(transfers), lines())


DRAWN: dict[str, Callable[[], str]] = {
    "collectives": draw_collectives,
    "ring": draw_ring,
    "fsdp": draw_fsdp,
    "tensor": draw_tensor,
    "exchanges": draw_exchanges,
}

if __name__ == "__main__":
    jp.simulate(RANKS)
    for name, drawn in DRAWN.items():
        Path(__file__).parents[1].joinpath("docs", "assets", f"{name}.svg").write_text(drawn())
