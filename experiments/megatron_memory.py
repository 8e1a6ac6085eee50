"""What a transformer layer keeps for its backward, from compiled programs, beside Megatron-LM's sums.

python experiments/megatron_memory.py
python experiments/megatron_memory.py --arrays
python experiments/megatron_memory.py --quick

Korthikanti et al. 2022, arXiv:2205.05198, table 2: bytes of activations per layer of a GPT under tensor and sequence
parallelism, with selective and with full recomputation. Here they are the temporaries of a training step compiled for
H100s (no GPU is needed), those of a model with more layers less those of one with fewer, so that what does not belong
to a layer cancels; the layers' gradients, which the layout knows, are taken off. Beside that: the arrays that the
traced step hands from a layer's forward to its backward, and the sum that is expected of our layer. Nothing runs.

s positions, b rows, h features, a heads, t tensor ranks. All sizes are multiples of s b h bytes.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for H100s wants it said before jax starts

import jax
import optax
import tyro
from flax import nnx
from kept import kept
from megatron_sums import Setting, Term, terms, total
from memory_picture import Line, Panel, pictures
from rich import box
from rich.console import Console
from rich.table import Table

import jaxpar as jp
from jaxpar.hardware.devices import gpu_topology
from jaxpar.models import gpt
from jaxpar.models.parts.stack import stack
from jaxpar.step.core import Step

VOCAB = 512  # small: the head is no part of a layer


@dataclass(frozen=True)
class Options:
    """Compares the activations that a layer keeps with Megatron-LM's sums."""

    dim: int = 1024
    """h"""
    heads: int = 8
    """a"""
    length: int = 1024
    """s"""
    rows: int = 4
    """b"""
    layers: tuple[int, int] = (12, 36)
    """of the two models whose difference is taken: far apart, since buffers leave gaps between them"""
    tensor: tuple[int, ...] = (1, 2, 8)
    """t, without and with sequence parallelism"""
    arrays: bool = False
    """list the arrays that a layer keeps without recomputation, and where they come from"""
    quick: bool = False
    """compile nothing: the traced step only"""
    out: Path = Path("runs/megatron_memory")
    """where megatron_memory.json, megatron_memory.svg, megatron_memory.png and their dark twins go"""


# -- the step ----------------------------------------------------------------------------------------------------------


class PlainAttention(gpt.Attention):
    """Attention as most models write it: its scores are kept."""

    def __call__(self, x_BTD: jax.Array, *_: Any) -> jax.Array:
        return super().__call__(x_BTD, _plain)


def _plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")


class PlainLayer(gpt.Layer):
    """A layer with it."""

    def __init__(self, config: gpt.Config, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.attention = PlainAttention(config, rngs=rngs)


class Plain(gpt.GPT):
    """A GPT of such layers."""

    def __init__(self, config: gpt.Config, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.layers = stack(lambda rngs: PlainLayer(config, rngs=rngs), config.layers, rngs)


def step_of(setting: Setting, options: Options, layers: int, devices: Sequence[jax.Device]) -> tuple[Step, Any]:
    """The training step and its batch."""
    config = gpt.Config(VOCAB, options.length, options.dim, layers, options.heads, setting.dropout)
    module = Plain if setting.plain else gpt.GPT
    model = jp.from_nnx(lambda rngs: module(config, rngs=rngs), gpt.loss, gpt.RULES)
    step = jp.make_train_step(model, optax.sgd(1e-3), setting.strategy, mesh=devices[: setting.tensor])
    return step, config.example(options.rows, options.length)


@dataclass(frozen=True)
class Row:
    """One setting: bytes per layer and rank over s b h, by the paper, as expected of us, as traced, and as compiled."""

    setting: Setting
    paper: float | None
    expected: float
    traced: float
    compiled: float | None


def measure(setting: Setting, options: Options, devices: Sequence[jax.Device]) -> Row:
    unit = options.length * options.rows * options.dim
    few, many = options.layers
    made = [step_of(setting, options, layers, devices) for layers in options.layers]
    traced = sum(one.bytes for one in kept(*made[0], few))
    compiled = None
    if not options.quick:
        sizes = [s.compile(batch).memory_analysis().temp_size_in_bytes - s.layout.bytes["grads"] for s, batch in made]
        compiled = (sizes[1] - sizes[0]) / (many - few) / unit
    config = gpt.Config(VOCAB, options.length, options.dim, few, options.heads)
    places = terms(setting, config, options.length)
    expected = total(places, setting, ours=True)
    assert expected is not None
    return Row(setting, total(places, setting, ours=False), expected, traced / unit, compiled)


def settings(tensor: Sequence[int]) -> list[Setting]:
    """Without and with sequence parallelism, nothing to everything recomputed; dropout where nothing is split."""
    variants = (True, "none"), (False, "none"), (False, "dots"), (False, "layer")
    chosen = [
        Setting(t, sequence, plain, remat)
        for sequence, t, (plain, remat) in itertools.product((False, True), tensor, variants)
        if t > 1 or not sequence
    ]
    return [*chosen, Setting(1, False, False, "none", dropout=0.1)]


# -- what is shown -----------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False, header_style="bold")
    for head in ("t", "sequence", "recomputed"):
        grid.add_column(head, justify="right" if head == "t" else "left", no_wrap=True)
    for head in ("paper", "expected", "traced", "compiled", "compiled /\nexpected"):
        grid.add_column(head, justify="right", no_wrap=True)
    for row, after in itertools.zip_longest(rows, rows[1:]):
        here = row.setting
        last = after is None or (after.setting.tensor, after.setting.sequence) != (here.tensor, here.sequence)
        sizes = ("" if size is None else f"{size:.2f}" for size in (row.paper, row.expected, row.traced, row.compiled))
        ratio = "" if row.compiled is None else f"{row.compiled / row.expected:.3f}"
        split = "split" if here.sequence else ""
        grid.add_row(str(here.tensor), split, here.recomputed, *sizes, ratio, end_section=last)
    return grid


def sums(places: Sequence[Term]) -> Table:
    """Place by place, on one device."""
    grid = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False, header_style="bold")
    for head in ("kept of a layer", "paper", "expected", "split over t"):
        grid.add_column(head, justify="right" if head in ("paper", "expected") else "left", no_wrap=True)
    for term in places:
        paper = "" if term.paper is None else f"{term.paper:.2f}"
        split = {"always": "always", "sequence": "with sequence"}[term.split]
        grid.add_row(term.what, paper, f"{term.ours:.2f}", split)
    return grid


def panels(rows: Sequence[Row], tensor: Sequence[int]) -> list[Panel]:
    """Without and with sequence parallelism; one rank is the same for both."""
    found = []
    for sequence in (False, True):
        mine = [r for r in rows if not r.setting.dropout and (r.setting.tensor == 1 or r.setting.sequence == sequence)]
        lines = {}
        for name in dict.fromkeys(r.setting.recomputed for r in mine):
            some = [r for r in mine if r.setting.recomputed == name]
            paper = [r.paper for r in some if r.paper is not None]
            sizes = [r.traced if r.compiled is None else r.compiled for r in some]
            lines[f"recomputed: {name}"] = Line(sizes, paper or None)
        split = "with sequence parallelism" if sequence else "tensor parallelism"
        found.append(Panel(f"bytes per layer / (s b h), {split}", "t", sorted(tensor), lines))
    return found


def main(options: Options) -> list[Row]:
    """Measures, prints the tables, writes the files."""
    console = Console(width=max(80, min(100, Console().width)), highlight=False)
    if options.quick:
        jp.simulate(max(options.tensor))
    devices = jax.devices() if options.quick else gpu_topology(f"{max(options.tensor)}xH100")
    rows = []
    for setting in settings(options.tensor):
        with console.status(setting.strategy):
            rows.append(measure(setting, options, devices))
    config = gpt.Config(VOCAB, options.length, options.dim, options.layers[0], options.heads)
    size = f"h={options.dim}, a={options.heads}, s={options.length}, b={options.rows}"
    title = f"GPT, {size}; bf16; bytes per layer and rank / (s b h)"
    options.out.mkdir(parents=True, exist_ok=True)
    plain = [dataclasses.asdict(row) for row in rows]
    record = {"title": title, "jax": jax.__version__, "rows": plain}
    (options.out / "megatron_memory.json").write_text(json.dumps(record, indent=1))
    pictures(panels(rows, options.tensor), options.out / "megatron_memory")
    console.print(title)
    console.print(table(rows))
    for setting in (
        Setting(1, False, True, "none", 0.1),
        Setting(1, False, False, "none"),
        Setting(2, True, False, "dots"),
    ):
        console.print(f"\nrecomputed: {setting.recomputed}")
        console.print(sums(terms(setting, config, options.length)))
    if options.arrays:
        for one in kept(*step_of(Setting(1, False, False, "none"), options, 3, devices), 3):
            console.print(f"{one.bytes / 1e6:8.3f} MB {one.type:24} {one.source}", soft_wrap=True)
    console.print(f"{options.out}/megatron_memory.json, .svg, .png, and -dark.svg, -dark.png")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Options))
