"""Blocks around other blocks: layers in loops, branches, recomputation, maps over rows."""

from __future__ import annotations

from .programs import Block, Draw
from .registry import AROUND, FEATURES, POSITIONS, kind, spelled

STACKED, LISTED = "stacked", "listed"


@kind(AROUND)
def scanned(g: Draw) -> str:
    f = g.name("layer")
    how = g.pick(
        f"x, _ = lax.scan({f}, x, {{k: p[k] for k in @names}}, length=@count)",
        f"x = lax.scan({f}, x, {{k: p[k] for k in @names}}, length=@count, unroll=2)[0]",
        f"x, _ = lax.scan(jax.checkpoint({f}), x, {{k: p[k] for k in @names}}, length=@count)",
        f"x = lax.scan(lambda x, q: {f}(x, q), x, {{k: p[k] for k in @names}}, @count)[0]",
        f"x, _ = lax.scan({f}, x, {{k: p[k] for k in @names}}, length=@count, reverse=True)",
    )
    return f"def {f}(x, p):\n    @\n    return x, None\n{how}"


@kind(AROUND)
def indexed(g: Draw) -> str:
    """Stacked layers in a Python loop, or one that looks its layer up."""
    f = g.name("layer")
    how = g.pick(
        f"for i in range(@count):\n    x = {f}(x, {{k: p[k][i] for k in @names}})",
        f"x = lax.fori_loop(0, @count, lambda i, x: {f}(x, {{k: p[k][i] for k in @names}}), x)",
        f"for layer in zip(*[list(p[k]) for k in @names]):\n    x = {f}(x, dict(zip(@names, layer)))",
    )
    return f"def {f}(x, p):\n    @\n    return x\n{how}"


@kind(AROUND)
def listed(g: Draw) -> str:
    f = g.name("layer")
    how = g.pick(f, f"jax.checkpoint({f})", f"jax.jit({f})")
    return f'def {f}(x, p):\n    @\n    return x\nfor i in range(@count):\n    x = {how}(x, {{k: p[f"{{k}}_{{i}}"] for k in @names}})'


@kind(AROUND)
def recomputed(g: Draw) -> str:
    f = g.name("f")
    policy = g.pick(
        "",
        "",
        ", policy=jax.checkpoint_policies.dots_saveable",
        ", policy=jax.checkpoint_policies.nothing_saveable",
        ", prevent_cse=False",
    )
    return f"def {f}(x):\n    @\n    return x\nx = jax.checkpoint({f}{policy})(x)"


@kind(AROUND)
def called(g: Draw) -> str:
    f = g.name("f")
    how = g.pick(
        f"jax.jit({f})(x)",
        f"jax.named_call({f}, name='part')(x)",
        f"jax.jit(jax.checkpoint({f}))(x)",
        f"{f}(x) + 0 * {f}(x)" if g.chance(0.2) else f"{f}(x)",
    )
    return f"def {f}(x):\n    @\n    return x\nx = {how}"


@kind(AROUND)
def branched(g: Draw) -> str:
    f, s = g.name("f"), g.param()
    how = g.pick(
        f"x = lax.cond({s} > 0, {f}, lambda x: 0.5 * x, x)",
        f"x = lax.cond(jnp.sum(jnp.square({s})) >= 0, {f}, jnp.sin, x)",
        f"x = lax.switch((lax.stop_gradient({s}) > 0).astype(int), [{f}, jnp.tanh, lambda x: x], x)",
        f"x = jnp.where(b['flag'].astype(bool)[:, None, None], {f}(x), x)",
        f"x = lax.select(jnp.broadcast_to(b['mask'][..., None] > 0, x.shape), {f}(x), x)",
        f"x = jax.vmap(lambda c, u, v: lax.cond(c, lambda: u, lambda: 0.3 * v))(b['flag'] > 0, {f}(x), x)",
        f"x = lax.platform_dependent(x, default={f})",
        f"x = x + b['weight'][:, None, None] * {f}(x)",
        f"x = {s} * {f}(x) + (1 - {s}) * {f}(jnp.sin(x))",
        f"x = {f}(x) if x.ndim == 3 else x",
        f"u, x = x, {f}(x)\nx = u + {f}(x)",
    )
    return f"def {f}(x):\n    @\n    return x\n{how}"


@kind(AROUND)
def row_by_row(g: Draw) -> str:
    f = g.name("f")
    one = f"lambda x, b: {f}(x[None], {{k: v[None] for k, v in b.items()}})[0]"
    how = g.pick(
        f"x = jax.vmap({one})(x, b)",
        f"x = lax.map(lambda v: ({one})(*v), (x, b))",
        f"x = lax.scan(lambda c, v: (c, ({one})(*v)), None, (x, b))[1]",
        f"x = lax.map(lambda v: ({one})(*v), (x, b), batch_size=2)",
        f"x = jnp.stack([({one})(x[i], {{k: v[i] for k, v in b.items()}}) for i in range(x.shape[0])])",
        f"x = jnp.concatenate([{f}(x[i:i + 1], {{k: v[i:i + 1] for k, v in b.items()}}) for i in range(x.shape[0])])",
    )
    return f"def {f}(x, b):\n    @\n    return x\n{how}"


@kind(AROUND)
def differentiated(g: Draw) -> str:
    """The derivative of blocks with respect to their input, as a step of descent or a direction."""
    f, D = g.name("f"), g.D
    how = g.pick(
        f"x = x - 0.3 * jax.grad(lambda x: jnp.sum({f}(x) * {g.param(D)}))(x)",
        f"x = jnp.tanh(jax.jvp({f}, (x,), (jnp.cos(x),))[1])",
        f"x = jnp.tanh(jax.vjp({f}, x)[1](x)[0])",
        f"x = {f}(x) + lax.stop_gradient(jnp.sin({f}(x)))",
    )
    return f"def {f}(x):\n    @\n    return x\n{how}"


def around(g: Draw, name: str, inner: tuple[Block, ...]) -> Block:
    """A block of a kind around others."""
    text = AROUND[name](g)
    count = g.pick(2, 2, 3, 4) if name in ("scanned", "indexed", "listed") else 0
    lines = tuple(text.replace("@count", str(count)).splitlines())
    stacked, listed = (count, 0) if name in ("scanned", "indexed") else (0, count)
    return Block(name, lines, g.taken(), inner, stacked, listed)


def blocks(g: Draw, count: int, depth: int = 2) -> tuple[Block, ...]:
    """So many blocks, some around others, however deep."""
    found = []
    for _ in range(count):
        if depth and g.chance(0.35):
            inner = blocks(g, g.pick(1, 1, 2), depth - 1)
            found.append(around(g, g.pick(*AROUND, "scanned", "scanned", "listed"), inner))
        else:
            found.append(spelled(g, g.pick(FEATURES, FEATURES, POSITIONS, POSITIONS)))
    return tuple(found)
