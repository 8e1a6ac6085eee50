"""Programs with small trees of parameters: leaves of 0 to 4 dims, each of 1 to 6 elements, by the names that layouts
know and by others, in the order in which the loss reads them.

A layout is decided by names, shapes and order before any loss is seen. Here these are drawn, and the loss follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from . import parity
from .programs import Draw, Program, Shapes, Sizes

MODULES = ("", "up", "down", "query", "out", "dense", "conv", "norm", "layers", "blocks/0", "blocks/1", "head", "embed")
LEAVES = ("kernel", "kernel", "kernel", "w", "weight", "bias", "b", "scale", "alpha", "embedding", "table")
_MORE = ("tensor=2,fsdp=4", "tensor=2,fsdp=2,zero=1", "tensor=2,expert=2,context=2", "tensor=3")
STRATEGIES = (*parity.STRATEGIES, *((text, parity.devices(text)) for text in _MORE))

Line = Callable[[Draw, str, tuple[int, ...]], str]


def _fitted(size: int) -> str:
    """`x` [rows, T, ...] with so many features: its own, as often as they are needed."""
    return f"jnp.tile(x, (1, 1, -(-{size} // x.shape[-1])))[..., :{size}]"


def _scalar(g: Draw, p: str, shape: tuple[int, ...]) -> str:
    return g.pick(f"x = x * {p}", f"x = jnp.tanh(x + {p})", f"x = x * jnp.exp(-{p})", f"x = x / (1 + {p} ** 2)")


def _vector(g: Draw, p: str, shape: tuple[int, ...]) -> str:
    (n,) = shape
    x = _fitted(n)
    return g.pick(
        f"x = {x} + {p}",
        f"x = {x} * {p}",
        f"x = jnp.tanh((x[..., None] * {p}).sum(-1))",
        f"x = x + ({x} @ {p})[..., None]",
        f"x = x * jnp.square({p}).sum()",
        f"x = x[..., :1] * {p}",
    )


def _matrix(g: Draw, p: str, shape: tuple[int, ...]) -> str:
    a, b = shape
    return g.pick(
        f"x = jnp.tanh({_fitted(a)} @ {p})",
        f"x = {_fitted(a)} @ {p}",
        f"x = jnp.tanh({_fitted(b)} @ {p}.T)",
        f"x = x * jnp.sin({p}).mean()",
        f"x = {_fitted(b)} * {p}[{a - 1}] + {p}[0]",
        f"x = x + {p}[b['ids'] % {a}].sum(-1, keepdims=True)",
        f"for w in {p}: x = jnp.tanh({_fitted(b)} + w)",
        f"x, _ = lax.scan(lambda x, w: (jnp.tanh(x + w), None), {_fitted(b)}, {p})",
    )


def _cube(g: Draw, p: str, shape: tuple[int, ...]) -> str:
    a, b, c = shape
    ways = [
        f"x = jnp.tanh(jnp.einsum('rtd,dhe->rthe', {_fitted(a)}, {p})).reshape(*x.shape[:2], {b * c})",
        f"x = jnp.tanh(jnp.einsum('rtd,hde->rte', {_fitted(b)}, {p}))",
        f"x = jnp.einsum('rthe,hed->rtd', {_fitted(a * b)}.reshape(*x.shape[:2], {a}, {b}), {p})",
        f"x = jnp.tanh(lax.conv_general_dilated({_fitted(b)}, {p}, (1,), 'SAME', None, None, ('NWC', 'WIO', 'NWC')))",
        f"x = jnp.tanh({_fitted(b)} @ {p}[{a - 1}])",
        f"x = x * {p}.sum()",
    ]
    if b == c:
        ways += [f"x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), {_fitted(b)}, {p})"] * 3
        ways += [f"x = {_fitted(b)}\nfor w in {p}: x = x + jnp.tanh(x @ w)"]
    return g.pick(*ways)


def _larger(g: Draw, p: str, shape: tuple[int, ...]) -> str:
    a, b, c, d = shape
    ways = [
        f"x = jnp.tanh(jnp.einsum('rtd,lhde->rte', {_fitted(c)}, {p}))",
        f"x = jnp.tanh(jnp.einsum('rtd,dhef->rthef', {_fitted(a)}, {p})).mean((2, 3))",
        f"x = jnp.tanh({_fitted(c)} @ {p}[0, {b - 1}])",
        f"x = x * jnp.cos({p}).mean()",
    ]
    if c == d:
        each = "lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, v)[0]"
        ways += [f"x, _ = lax.scan(lambda x, v: ({each}, None), {_fitted(c)}, {p})"]
    ways += [
        f"y = {_fitted(c * 4)}.reshape(*x.shape[:2], 4, {c})\n"
        f"y = lax.conv_general_dilated(y, {p}, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))\n"
        "x = jnp.tanh(y).mean(2)"
    ]
    return g.pick(*ways)


_LINES: tuple[Line, ...] = (_scalar, _vector, _matrix, _cube, _larger)


def _drawn_shape(g: Draw, last: tuple[int, ...]) -> tuple[int, ...]:
    """A shape; often one that follows the last, as products do."""
    rank = g.pick(0, 0, 1, 1, 2, 2, 2, 2, 3, 4)
    shape = tuple(g.random.randint(1, 6) for _ in range(rank))
    if last and rank > 1 and g.chance(0.6):
        shape = (*shape[:-2], last[-1], shape[-1])
    if rank > 2 and g.chance(0.4):
        shape = (*shape[:-1], shape[-2])
    return shape


def tree(seed: int, number: int, count: int = 4) -> tuple[Program, list[tuple[str, int]]]:
    """A program, and so many strategies for it with their numbers of devices."""
    chosen = random.Random(f"tree {seed} {number}")
    g = Draw(chosen, Sizes(8, chosen.choice([4, 8]), chosen.choice([2, 4, 6]), chosen.choice([4, 6])))
    shapes: Shapes = {}
    lines = ['x = b["x"]']
    if chosen.random() < 0.3:
        shapes["embedding"] = (g.V, g.D)
        lines = ['x = p["embedding"][b["ids"]]']
    last: tuple[int, ...] = ()
    for number in range(chosen.choice([1, 2, 3, 3, 4, 5, 6])):
        module, leaf = g.pick(*MODULES), g.pick(*LEAVES)
        name = "/".join(filter(None, (module, leaf)))
        if name in shapes:
            name = "/".join(filter(None, (f"{module}{number}", leaf)))
        shapes[name] = _drawn_shape(g, last)
        last = shapes[name] or last
        lines += _LINES[len(shapes[name])](g, f'p["{name}"]', shapes[name]).split("\n")
    lines.append(
        g.pick("return jnp.square(x).mean()", "return (x * jnp.cos(x)).mean()", "return jnp.sin(x).sum(-1).mean()")
    )
    strategies = chosen.sample(STRATEGIES, count)
    return Program(tuple(lines), shapes, g.sizes, number, guessed=True), strategies
