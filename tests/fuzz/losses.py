"""How a program begins, and what its loss is."""

from __future__ import annotations

from .features import product
from .programs import Block, Draw, Sizes

PLAIN_ENDS = (
    Block("square", ("return jnp.square(x).mean()",)),
    Block("cotangent", ('return (x * b["y"]).mean()',)),
    Block("weighted", ('return (x * b["y"] * b["weight"][:, None, None]).mean()',)),
)


def plain_start(sizes: Sizes) -> Block:
    """Frames by a matrix."""
    return Block("plain", ('x = b["x"] @ p["enter"]',), {"enter": (sizes.dim, sizes.dim)})


def start(g: Draw) -> Block:
    """Ids or frames, as features."""
    V, D, T = g.V, g.D, g.T
    if g.chance(0.4):
        text = f"x = {product(g, g.pick('b[' + chr(34) + 'x' + chr(34) + ']'), D, D)}"
        return Block("frames", (text,), g.taken())
    text = g.pick(
        'x = p["embed"][b["ids"]]',
        'x = jnp.take(p["embed"], b["ids"], axis=0)',
        f'x = jax.nn.one_hot(b["ids"], {V}) @ p["embed"]',
        f'x = p["embed"][b["ids"]] * {D} ** 0.5 + p["places"]',
        f'x = p["embed"][b["ids"]] + p["places"][jnp.arange({T})]',
        f'x = p["embed"][b["ids"]] + p["places"][None, :{T}]',
        'x = jax.vmap(lambda i: p["embed"][i] + p["places"])(b["ids"])',
        'x = p["embed"].at[b["ids"]].get(mode="clip")',
        'x = jnp.take(p["embed"].T, b["ids"], axis=1).transpose(1, 2, 0)',
    )
    return Block("lookup", (text,), {"embed": (V, D), "places": (T, D)})


def end(g: Draw, words: bool) -> Block:
    """The loss of `x`; `words`: there is an embedding, which the head may share."""
    V, D, T = g.V, g.D, g.T
    kind = g.pick("entropy", "entropy", "entropy", "regression", "pooled", "projected")
    mean = g.pick(
        "return nats.mean()",
        "return nats.sum(1).mean()",
        "return nats.mean(0).mean()",
        "return jnp.mean(jnp.mean(nats, axis=1))",
        'return jp.Mean((nats * b["mask"]).sum(), b["mask"].sum())',
        'return jp.Mean(jnp.sum(nats * b["mask"]), jnp.maximum(jnp.sum(b["mask"]), 1))',
        'return jp.Mean(jnp.where(b["mask"] > 0, nats, 0).sum(), (b["mask"] > 0).sum())',
        'return (nats.mean(1) * b["weight"]).mean()',
        'return jp.Mean((nats.sum(1) * b["weight"]).sum(), b["weight"].sum())',
        'return ((nats * b["mask"]).sum(1) / b["mask"].sum(1)).mean()',
        f'return jp.Mean((nats * (jnp.arange({T}) < b["length"][:, None])).sum(), b["length"].sum())',
        'return jp.Mean(jnp.vdot(nats, b["mask"]), b["mask"].sum())',
        "return nats.sum() / nats.size",
        "return nats.reshape(-1).sum() / nats.shape[0]",
        'return (nats @ p["along"]).mean()',
        "return jnp.einsum('bt->', nats) / nats.size",
        'return jnp.dot(nats.mean(1), b["weight"]) / nats.shape[0]',
        "return nats.mean() + 0.01 * sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(p))",
        'return jp.Mean((nats * b["mask"]).sum() + 0.1 * jnp.square(x).mean() * b["mask"].sum(), b["mask"].sum())',
        "return jnp.mean(nats[:, 1:]) + nats[:, 0].mean()",
        'return nats.mean(), {"second": jp.Mean((nats * b["mask"]).sum(), b["mask"].sum())}',
    )  # fmt: skip
    if kind == "entropy":
        head = 'p["embed"].T' if words and g.chance(0.4) else ""
        logits = f"logits = x @ {head}" if head else f"logits = {product(g, 'x', D, V)}"
        nats = g.pick(
            'nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), b["labels"][..., None], -1)[..., 0]',
            f'nats = -(jax.nn.log_softmax(logits) * jax.nn.one_hot(b["labels"], {V})).sum(-1)',
            'nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, b["labels"][..., None], axis=2).squeeze(-1)',
            'm = lax.stop_gradient(logits.max(-1, keepdims=True))\nnats = jnp.log(jnp.exp(logits - m).sum(-1)) + (m - jnp.take_along_axis(logits, b["labels"][..., None], -1))[..., 0]',
            f'nats = jnp.log(jnp.exp(logits).sum(-1)) - jnp.where(b["labels"][..., None] == jnp.arange({V}), logits, 0).sum(-1)',
            'nats = -jax.vmap(jax.vmap(lambda l, i: jax.nn.log_softmax(l)[i]))(logits, b["labels"])',
            f'nats = (jax.nn.logsumexp(logits.reshape(-1, {V}), 1) - logits.reshape(-1, {V})[jnp.arange(logits.shape[0] * {T}), b["labels"].reshape(-1)]).reshape(-1, {T})',
            f'q = 0.9 * jax.nn.one_hot(b["labels"], {V}) + 0.1 / {V}\nnats = -jnp.einsum("btv,btv->bt", q, jax.nn.log_softmax(logits, -1))',
            'nats = -jnp.log(jnp.take_along_axis(jax.nn.softmax(logits, -1), b["labels"][..., None], -1)[..., 0] + 1e-6)',
            'z = jax.nn.logsumexp(logits, -1)\nnats = z + 1e-2 * z**2 - jnp.take_along_axis(logits, b["labels"][..., None], -1)[..., 0]',
            'logits = 5 * jnp.tanh(logits / 5)\nnats = -jnp.take_along_axis(jax.nn.log_softmax(logits), b["labels"][..., None], -1)[..., 0]',
            f'nats = jax.nn.softplus(logits).sum(-1) - logits[..., {V // 2}]',
            'nats = jnp.maximum(0, 1 + logits - jnp.take_along_axis(logits, b["labels"][..., None], -1)).mean(-1)',
        )  # fmt: skip
        if not head and g.chance(0.15):
            logits = f"logits = lax.map(lambda r: {product(g, 'r[None]', D, V)}[0], x)"
        text = f"{logits}\n{nats}\n{mean}"
    elif kind == "regression":
        nats = g.pick(
            'nats = jnp.square(x - b["y"]).mean(-1)',
            'nats = jnp.abs(x - b["y"]).sum(2) / 3',
            'd = x - b["y"]\nnats = jnp.where(jnp.abs(d) < 1, 0.5 * d**2, jnp.abs(d) - 0.5).mean(-1)',
            'nats = jnp.linalg.norm(x - b["y"] + 0.01, axis=-1)',
            'nats = 1 - (x * b["y"]).sum(-1) / (0.1 + jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(b["y"], axis=-1))',
            'nats = jnp.log(jnp.cosh(x - b["y"])).mean(-1)',
            'nats = jnp.einsum("btd,btd->bt", x, b["y"])',
            'nats = (x * b["y"]).sum(-1)',
            'nats = -jax.scipy.stats.norm.logpdf(x, b["y"], 1.5).mean(-1)',
        )
        text = f"{nats}\n{mean}"
    elif kind == "pooled":
        pooled = g.pick(
            "x.mean(1)",
            "x[:, 0]",
            "x[:, -1]",
            "x.max(1)",
            'x[jnp.arange(x.shape[0]), b["length"] - 1]',
            'jnp.einsum("btd,bt->bd", x, b["mask"])',
        )
        text = f'h = {pooled} @ p["head"]\n' + g.pick(
            'return -jnp.take_along_axis(jax.nn.log_softmax(h), b["labels"][:, :1], 1).mean()',
            'return jnp.mean(jax.nn.logsumexp(h, -1) - h[jnp.arange(h.shape[0]), b["labels"][:, 0]])',
            'return jnp.mean(b["weight"] * jnp.square(h).sum(-1))',
            'return jnp.sum(h * b["y"][:, 0, :1]) / h.shape[0]',
            'return jp.Mean(jnp.sum(jax.nn.softplus(h[:, 0]) * b["flag"]), jnp.sum(b["flag"]) + jnp.sum(b["weight"]))',
            "return jax.vmap(lambda r: jnp.square(r).sum())(h).mean()",
        )
    else:
        text = g.pick(
            'return (x * b["y"]).mean()',
            'return jnp.vdot(x, b["y"]) / x.shape[0]',
            'return jnp.tensordot(x, b["y"], 3) / x.size',
            'return jnp.mean(x * b["y"] * b["weight"][:, None, None])',
            'return jnp.einsum("btd,btd,b->", x, b["y"], b["weight"]) / len(x)',
            'return jp.Mean(jnp.sum(x * b["y"]), jnp.array(x.size, "float32"))',
        )
    shapes = g.taken() | {"along": (T,), "head": (D, V), "embed": (V, D)}
    return Block(kind, tuple(text.splitlines()), shapes)
