"""Programs as text: blocks of lines, which compose a loss, its parameters and its batch.

Every block is lines of Python from `x` [rows, T, D] to another `x` of that shape, so that any block can be left out and
what is left is a program: that is how failures are made small. The same text is run here and printed.
"""

from __future__ import annotations

import linecache
import random
import re
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxpar as jp

Shapes = dict[str, tuple[int, ...]]
INSIDE, NAMES = "@", "@names"  # in a block's lines: the blocks inside it, and the names of their parameters


@dataclass(frozen=True)
class Sizes:
    """Rows of the batch, positions of a row, features of a position, words."""

    rows: int
    length: int
    dim: int
    words: int


@dataclass(frozen=True)
class Block:
    """Lines from `x` [rows, T, D] to `x`, which read parameters `p` and the batch `b`.

    Attributes:
      shapes: of the parameters that its own lines read.
      inner: blocks that stand where a line is "@".
      stacked: how many of each of their parameters there are: a dim before the others.
      listed: how many of each of their parameters there are: `name_0`, `name_1`, and so on.
    """

    name: str
    lines: tuple[str, ...]
    shapes: Shapes = field(default_factory=dict)
    inner: tuple[Block, ...] = ()
    stacked: int = 0
    listed: int = 0

    def all_shapes(self) -> Shapes:
        """Of all parameters, as those outside of the block see them."""
        inside = {name: shape for block in self.inner for name, shape in block.all_shapes().items()}
        if self.stacked:
            inside = {name: (self.stacked, *shape) for name, shape in inside.items()}
        if self.listed:
            inside = {f"{name}_{i}": shape for name, shape in inside.items() for i in range(self.listed)}
        return self.shapes | inside

    def text(self) -> Iterator[str]:
        """Its lines, with those of the blocks inside."""
        names = [name for block in self.inner for name in block.all_shapes()]
        for line in self.lines:
            if line.strip() == INSIDE:
                indent = line[: line.index(INSIDE)]
                yield from (indent + inside for block in self.inner for inside in block.text())
            else:
                yield line.replace(NAMES, repr(names))

    def within(self) -> Iterator[Block]:
        """The block, and all inside of it."""
        yield self
        for block in self.inner:
            yield from block.within()


class Draw:
    """Seeded choices, and the parameters and names that blocks ask for."""

    def __init__(self, chosen: random.Random, sizes: Sizes):
        self.random, self.sizes = chosen, sizes
        self.T, self.D, self.V = sizes.length, sizes.dim, sizes.words
        self.shapes: Shapes = {}
        self._count = 0

    def pick(self, *options: Any) -> Any:
        """One of them."""
        return self.random.choice(options)

    def chance(self, share: float) -> bool:
        """True so often."""
        return self.random.random() < share

    def name(self, start: str) -> str:
        """A name that nothing else has."""
        self._count += 1
        return f"{start}{self._count}"

    def param(self, *shape: int) -> str:
        """The expression of a new parameter."""
        name = self.name("w")
        self.shapes[name] = shape
        return f'p["{name}"]'

    def taken(self) -> Shapes:
        """The parameters since the last call."""
        shapes, self.shapes = self.shapes, {}
        return shapes


def draw_params(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Parameters: each has random numbers of its own, whatever else there is."""
    drawn = {}
    for name, shape in shapes.items():
        numbers = np.random.default_rng([seed, zlib.crc32(name.encode())])
        drawn[name] = (0.4 * numbers.normal(size=shape)).astype("float32")
    return drawn


def draw_batch(names: Sequence[str], sizes: tuple[int, int, int, int], seed: int) -> dict[str, np.ndarray]:
    """Leaves of a batch; rows, positions, features and words are `sizes`."""
    R, T, D, V = sizes
    r = np.random.default_rng(seed)
    batch = {
        "x": r.normal(size=(R, T, D)),  # frames
        "y": r.normal(size=(R, T, D)),  # targets, or cotangents
        "ids": r.integers(V, size=(R, T)),
        "labels": r.integers(V, size=(R, T)),
        "weight": r.uniform(0.5, 1.5, size=R),
        "mask": np.maximum(r.random((R, T)) < 0.7, np.arange(T) == 0),  # no row without a token
        "order": r.permuted(np.tile(np.arange(T), (R, 1)), axis=1),
        "segment": np.sort(r.integers(4, size=(R, T)), axis=1),
        "length": r.integers(1, T + 1, size=R),
        "row": np.arange(R),
        "flag": r.random(R) < 0.5,
    }
    kinds = {"i": "int32", "b": "float32", "f": "float32"}
    return {name: batch[name].astype(kinds[batch[name].dtype.kind]) for name in names}


@dataclass(frozen=True)
class Program:
    """A loss as text, with what it reads.

    Attributes:
      lines: of the body of `loss(p, b)`.
      shapes: of its parameters.
      tensor, expert: which dim of a parameter these axes split, for those of which they split one; counted from behind.
      guessed: no rules are given: jaxpar finds them.
    """

    lines: tuple[str, ...]
    shapes: Shapes
    sizes: Sizes
    seed: int
    tensor: Mapping[str, int] = field(default_factory=dict)
    expert: Mapping[str, int] = field(default_factory=dict)
    guessed: bool = False

    @property
    def source(self) -> str:
        """The function `loss`."""
        return "def loss(p, b):\n" + textwrap.indent("\n".join(self.lines), "    ") + "\n"

    @property
    def leaves(self) -> list[str]:
        """The leaves of the batch that it reads: at least one, whose rows are counted."""
        return sorted({*re.findall(r"""b\[["'](\w+)["']\]""", self.source)}) or ["x"]

    def loss(self) -> Callable[[Any, Any], Any]:
        """`loss(p, b)`; tracebacks and jaxpar's messages show its lines."""
        name = f"<program {zlib.crc32(self.source.encode()):08x}>"
        scope: dict[str, Any] = {"jax": jax, "jnp": jnp, "jp": jp, "lax": lax, "np": np}
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        exec(compile(self.source, name, "exec"), scope)
        return scope["loss"]

    def params(self) -> dict[str, np.ndarray]:
        """Its parameters, float32."""
        return draw_params(self.shapes, self.seed)

    def batch(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Its batch."""
        s = self.sizes
        return draw_batch(self.leaves, (s.rows, s.length, s.dim, s.words), self.seed + seed)

    def rules(self) -> dict[str, Any] | None:
        """For `jp.Model`."""
        if self.guessed:
            return None
        by = {name: {"tensor": self.tensor.get(name), "expert": self.expert.get(name)} for name in self.shapes}
        return {name: {axis: dim for axis, dim in dims.items() if dim is not None} or None for name, dims in by.items()}

    def model(self, **options: Any) -> jp.Model:
        """As jaxpar takes it."""
        loss, shapes = self.loss(), self.shapes
        zeros = lambda key: {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return jp.Model(zeros, lambda p, b, key: loss(p, b), rules=self.rules(), **options)

    def reading(self) -> Program:
        """Without the parameters that no line reads."""
        named = {*re.findall(r"""["'](\w+)["']""", self.source)}
        whole = "tree.leaves(p)" in self.source
        shapes = {n: shape for n, shape in self.shapes.items() if whole or not named.isdisjoint(_stems(n))}
        keep = lambda dims: {name: dim for name, dim in dims.items() if name in shapes}
        return replace(self, shapes=shapes, tensor=keep(self.tensor), expert=keep(self.expert))


def _stems(name: str) -> Iterator[str]:
    """A parameter's name, and those of the lists of layers that it is in."""
    while name:
        yield name
        name = name.rpartition("_")[0]


@dataclass(frozen=True)
class Recipe:
    """A program in blocks; what `Program` needs besides."""

    start: Block
    blocks: tuple[Block, ...]
    end: Block
    sizes: Sizes
    seed: int
    tensor: Mapping[str, int] = field(default_factory=dict)
    expert: Mapping[str, int] = field(default_factory=dict)
    guessed: bool = False

    def program(self) -> Program:
        """The program of these blocks."""
        blocks = (self.start, *self.blocks, self.end)
        shapes = {name: shape for block in blocks for name, shape in block.all_shapes().items()}
        lines = tuple(line for block in blocks for line in block.text())
        return Program(lines, shapes, self.sizes, self.seed, self.tensor, self.expert, self.guessed).reading()

    def names(self) -> list[str]:
        """The kinds of its blocks."""
        return [b.name for block in (self.start, *self.blocks, self.end) for b in block.within()]


def draw_rules(chosen: random.Random, shapes: Shapes, share: float) -> dict[str, int]:
    """Which dim of a parameter is split, for a share of those that have one that 4 divides, and at least one."""
    dims = {name: [d - len(shape) for d, n in enumerate(shape) if n % 4 == 0] for name, shape in shapes.items()}
    names = [name for name in dims if dims[name]]
    drawn = [name for name in names if chosen.random() < share] or names[:1]
    return {name: chosen.choice(dims[name]) for name in drawn}
