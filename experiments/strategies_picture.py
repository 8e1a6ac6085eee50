"""The picture of the home page, docs/assets/strategies.svg: what each of four devices holds and sends, by strategy.

Nothing in it is drawn by hand: shares are those of the layout, and what is sent those of the traced step, for a stack
of layers on 4 simulated devices, with Adam.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp
from jaxpar.inspect.explain.picture import COLLECTIVE_COLORS, MEMORY_COLORS
from jaxpar.inspect.ledger import Ledger

DEVICES, LAYERS, DIM, ROWS = 4, 4, 64, 16
PARAMETERS = LAYERS * DIM * 4 * DIM * 2
STRATEGIES = ("single", "dp", "ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "pp")
PARTS = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer state"}
# Pixels: of a device's memory, which is four times the parameters; between devices; of P on the wire.
MEMORY, APART, WIRE = 76, 8, 27
LEFT, TOP, ROW = 58, 78, 34
RIGHT = LEFT + DEVICES * (MEMORY + APART) + 10
STYLE = (
    "text{fill:#424a53;font:14px system-ui,sans-serif}.name{font-weight:600;text-anchor:end}.mid{text-anchor:middle}"
    ".room{fill:#818b98;fill-opacity:.16}@media(prefers-color-scheme:dark){text{fill:#c9d1d9}}"
)


@dataclass(frozen=True)
class Row:
    """One strategy: `held[device][part]` in parameters; `sent[kind]` likewise, by device 0, of `dp` to and from it.

    Of `activations` only the kind is told, since their bytes grow with the rows.
    """

    name: str
    held: list[dict[str, float]]
    sent: dict[str, float]
    activations: bool


def model() -> jp.Model:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (LAYERS, DIM, 4 * DIM)) / DIM**0.5,
            "down": jax.random.normal(down, (LAYERS, 4 * DIM, DIM)) / DIM,
        }

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        return jnp.square(jax.lax.scan(layer, batch["x"], params)[0]).mean()

    return jp.Model(init=init, loss=loss)


def row(name: str, batch: dict[str, jax.ShapeDtypeStruct]) -> Row:
    """What a strategy holds and sends, from its layout and its jaxpr."""
    devices = jax.devices()[: 1 if name == "single" else DEVICES]
    step = jp.make_train_step(model(), optax.adam(1e-3), name, mesh=devices)
    share = {part: step.layout.bytes[part] / (4 * PARAMETERS) for part in PARTS}
    if name == "dp":
        others = share | {"optimizer": 0.0}
        # Weights and gradients; the rows of a batch are small beside them, and grow with it.
        sent = {t.kind: t.found / (4 * PARAMETERS) for t in step.explain(batch).transfers if t.found > PARAMETERS}
        return Row(name, [share] + [others] * (DEVICES - 1), sent, False)
    ledger = Ledger.from_jaxpr(step.trace(batch), step.mesh)
    sent = {kind: value / (4 * PARAMETERS) for kind, value in ledger.by("kind", value="sent").items()}
    activations = name in ("tp", "pp")
    small = 0.0 if activations else 0.01  # scalars: the loss, the norm of the gradient
    held = [share] * len(devices) + [dict.fromkeys(PARTS, 0.0)] * (DEVICES - len(devices))
    return Row(name, held, {kind: value for kind, value in sent.items() if value > small}, activations)


def rows() -> list[Row]:
    batch = {"x": jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)}
    return [row(name, batch) for name in STRATEGIES]


def svg(table: list[Row]) -> str:
    """The picture: a line for each strategy, memory of each device on the left, what is sent on the right."""
    width, height = RIGHT + 6 * WIRE + 66, TOP + ROW * len(table)
    title = "What each of four devices holds, and what passes the wire of device 0 in a step, under each strategy"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title><style>{STYLE}</style>",
            *_legend(LEFT, 20, list(PARTS.values()), MEMORY_COLORS),
            *(f'<text class="mid" x="{_at(i) + MEMORY / 2:g}" y="66">device {i}</text>' for i in range(DEVICES)),
            f'<text x="{RIGHT}" y="66">on the wire of device 0</text>',
            *_legend(
                LEFT, 42, ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "gather"], COLLECTIVE_COLORS
            ),
            *(line for number, one in enumerate(table) for line in _line(one, TOP + ROW * number)),
            "</svg>\n",
        ]
    )


def _at(device: int) -> int:
    return LEFT + device * (MEMORY + APART)


def _legend(x: float, y: float, names: list[str], colors: dict[str, str]) -> Iterator[str]:
    for name in names:
        yield f'<rect x="{x:g}" y="{y - 11:g}" width="12" height="12" rx="2" fill="{colors[name]}"/>'
        yield f'<text x="{x + 17:g}" y="{y:g}">{name}</text>'
        x += 36 + 7.3 * len(name)


def _line(row: Row, y: int) -> Iterator[str]:
    yield f'<text class="name" x="{LEFT - 8}" y="{y + 17}">{row.name}</text>'
    ranks = {"hsdp": DEVICES // 2}.get(row.name, DEVICES)
    for device, held in enumerate(row.held):
        yield f'<rect class="room" x="{_at(device)}" y="{y}" width="{MEMORY}" height="24" rx="3"/>'
        start = float(_at(device))
        for part, share in held.items():
            room = MEMORY / 4 * (2 if part == "optimizer" else 1)
            wide = MEMORY / 4 * share
            # A shard stands where it is in the whole.
            offset = wide * (device % ranks) if wide < 0.99 * room else 0
            if wide:
                color = MEMORY_COLORS[PARTS[part]]
                yield f'<rect x="{start + offset:g}" y="{y}" width="{wide:.4g}" height="24" fill="{color}"/>'
            start += room
    x = float(RIGHT)
    if row.activations:
        what = {"all-reduce": "all-reduces of activations", "collective-permute": "messages between stages"}
        kind = max(row.sent, key=lambda kind: (kind == "collective-permute", row.sent[kind]))
        yield f'<rect x="{x}" y="{y}" width="6" height="24" fill="{COLLECTIVE_COLORS[kind]}"/>'
        yield f'<text x="{x + 13}" y="{y + 17}">{what[kind]}</text>'
        return
    for kind, value in row.sent.items():
        yield f'<rect x="{x:g}" y="{y}" width="{WIRE * value:.4g}" height="24" fill="{COLLECTIVE_COLORS[kind]}"/>'
        x += WIRE * value
    text = f"{sum(row.sent.values()):.3g} P" if row.sent else "nothing"
    yield f'<text x="{x + 7 * bool(row.sent):g}" y="{y + 17}">{text}</text>'


if __name__ == "__main__":
    jp.simulate(DEVICES)
    Path(__file__).parents[1].joinpath("docs", "assets", "strategies.svg").write_text(svg(rows()))
