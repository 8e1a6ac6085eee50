"""Four pictures of what strategies do, docs/assets/{ring,fsdp,tensor,exchanges}.svg, drawn from programs that run it.

python experiments/mechanisms_picture.py

ring        what each rank gets in each step of `collectives.ring_all_reduce`, run on values that name their ranks
fsdp        gathers, products and scatters of the traced step of ZeRO-3, loops written out, in the order of the program
tensor      which part of two weights each rank of `tensor` has, by the layout, and the sums of the traced step
exchanges   what `explain` rehearses of the server's step, beside the one collective of `ddp`
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from strategies_picture import STYLE, model

import jaxpar as jp
from jaxpar.collectives import ring
from jaxpar.inspect.explain.picture import SENT
from jaxpar.inspect.ledger import Ledger
from jaxpar.program import jaxpr as jx

RANKS, INK = 4, "#10151c"
COLORS = ("#4c8dd6", "#e0902f", "#3fa05a", "#b46bc8")  # of ranks
BATCH = {"x": jax.ShapeDtypeStruct((16, 64), jnp.float32)}


def svg(title: str, width: float, height: float, lines: Iterator[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    return "\n".join([head, f"<title>{title}</title><style>{STYLE}</style>", *lines, "</svg>\n"])


def box(x: float, y: float, wide: float, high: float, color: str, text: str = "") -> str:
    middle = f'<text class="mid" x="{x + wide / 2:g}" y="{y + high / 2 + 5:g}" style="fill:{INK}">{text}</text>'
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="2" fill="{color}"/>' + middle * bool(text)


def label(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} x="{x:g}" y="{y:g}">{text}</text>'


def step_of(strategy: str, **options: Any) -> Any:
    return jp.make_train_step(model(), optax.adam(1e-3), strategy, mesh=jax.devices()[:RANKS], **options)


def ring_steps() -> list[list[int]]:
    """Of every step, what each rank gets: a bit for each rank whose values are in it."""
    seen: dict[int, list[int]] = {}
    sent = ring.lax.ppermute

    def ppermute(x: jax.Array, *args: Any) -> jax.Array:
        y = sent(x, *args)
        jax.debug.callback(lambda r, v: seen.setdefault(int(r), []).append(int(v[0])), jax.lax.axis_index("d"), y)
        return y

    ring.lax.ppermute = ppermute
    try:
        values = jnp.repeat(2 ** jnp.arange(RANKS)[:, None], RANKS, 1)
        jax.block_until_ready(jax.vmap(lambda x: ring.ring_all_reduce(x, "d"), axis_name="d")(values))
        jax.effects_barrier()
    finally:
        ring.lax.ppermute = sent
    return [list(step) for step in zip(*(seen[r] for r in range(RANKS)), strict=True)]


def draw_ring() -> str:
    steps, cell = ring_steps(), 132

    def lines() -> Iterator[str]:
        for rank in range(RANKS):
            yield label(96 + rank * cell + 50, 24, f"rank {rank}", "mid")
        for number, got in enumerate(steps):
            y = 38 + number * 34
            yield label(88, y + 18, f"step {number + 1}", "name")
            for rank, bits in enumerate(got):
                for part in range(RANKS):
                    there = bits >> part & 1
                    yield box(96 + rank * cell + 25 * part, y, 24, 24, COLORS[part] if there else "#818b9829")
        yield label(96, 58 + len(steps) * 34, "a colour: the values of that rank are in the chunk that arrives")

    title = f"A ring all-reduce of {RANKS} ranks in {len(steps)} steps"
    return svg(title, 96 + RANKS * cell, 70 + len(steps) * 34, lines())


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
    names = {"gather": ("all-gather", SENT["all-gather"]), "use": ("products", COLORS[0])}
    names["scatter"] = "reduce-scatter", SENT["reduce-scatter"]

    def lines() -> Iterator[str]:
        x = 104.0
        for number, lane in enumerate(("network", "compute", "whole layer")):
            yield label(96, 54 + 34 * number, lane, "name")
        for kind in merged:
            wide = 34 if kind == "use" else 22
            yield box(x, 38 + 34 * (kind == "use"), wide, 24, names[kind][1])
            if kind == "use":  # from its gather to here, and no longer
                yield box(x - 22, 106, wide + 22, 24, "#818b98")
            x += wide + 2
        at = 104.0
        for text, color in names.values():
            yield box(at, 8, 12, 12, color)
            yield label(at + 17, 19, text)
            at += 40 + 7.5 * len(text)

    wide = 120 + sum(36 if kind == "use" else 24 for kind in merged)
    title = "A step of ZeRO-3: a layer is gathered, used and discarded; its gradient is scattered"
    return svg(title, max(wide, 420), 140, lines())


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
        yield label(12, y + 18, "ddp: one, in pieces behind the backward")
        for rank in range(RANKS):
            yield box(12 + 76 * rank, y + 32, 70, 24, COLORS[rank], f"device {rank}")
        yield label(326, y + 49, f"{kind} of gradients")

    return svg("Five exchanges of a central server beside one of DDP", 660, 130 + 34 * len(transfers), lines())


DRAWN: dict[str, Callable[[], str]] = {
    "ring": draw_ring,
    "fsdp": draw_fsdp,
    "tensor": draw_tensor,
    "exchanges": draw_exchanges,
}

if __name__ == "__main__":
    jp.simulate(RANKS)
    for name, drawn in DRAWN.items():
        Path(__file__).parents[1].joinpath("docs", "assets", f"{name}.svg").write_text(drawn())
