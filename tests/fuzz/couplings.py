"""Losses that couple rows, and losses that do not though they look like it: blocks, and ends.

`h` [rows, D] is what a row has come to; a block's `y` of that shape goes back into `x`. Nothing here is believed to couple
or not to: what the loss of a batch is, put together from blocks of its rows, says that.
"""

from __future__ import annotations

from .programs import Block, Draw
from .registry import COUPLING, INNOCENT, kind

COUPLED_ENDS: dict[str, tuple[str, ...]] = {}
INNOCENT_ENDS: dict[str, tuple[str, ...]] = {}
FAR_FETCHED = "far_fetched"  # innocent, and written by nobody: whether it is refused is counted, and no more


def back(g: Draw, text: str) -> str:
    """`h` from `x`, the text, and its `y` [rows, D] back into `x`."""
    pool = g.pick(
        "h = x.mean(1)",
        "h = x[:, 0]",
        "h = jnp.einsum('btd->bd', x) / 4",
        "h = x.max(1)",
        f"h = x.reshape(-1, {g.T * g.D}) @ {g.param(g.T * g.D, g.D)} / 4",
    )
    put = g.pick("x = x + jnp.tanh(y)[:, None]", "x = x * (1 + jnp.sin(y))[:, None]", "x = jnp.sin(x + y[:, None, :])")
    return f"{pool}\n{text.strip()}\n{put}"


# -- rows that meet ----------------------------------------------------------------------------------------------------


@kind(COUPLING)
def statistics(g: Draw) -> str:
    mean = g.pick(
        "h.mean(0)", "jnp.mean(h, axis=0, keepdims=True)", "h.sum(0) / h.shape[0]", "jnp.ones(len(h)) @ h / len(h)",
        "jnp.einsum('nd->d', h) / len(h)", "jnp.average(h, 0)", "jnp.average(h, axis=0, weights=b['weight'])",
        "jnp.nanmean(h, 0)", "jax.vmap(lambda r: lax.pmean(r, 'n'), axis_name='n')(h)", "jnp.median(h, axis=0)",
        "lax.reduce(h, 0.0, lax.add, (0,)) / len(h)", "lax.scan(lambda c, r: (c + r, None), jnp.zeros_like(h[0]), h)[0] / len(h)",
        "lax.stop_gradient(h.mean(0))", "jnp.cumsum(h, 0)[-1] / len(h)", "jnp.quantile(h, 0.4, axis=0)", "h.mean()",
        "jnp.trapezoid(h, axis=0) / len(h)", "lax.fori_loop(0, len(h), lambda i, c: c + h[i], jnp.zeros_like(h[0])) / len(h)",
        "jax.nn.logmeanexp(h, axis=0)", "jnp.fft.fft(h, axis=0)[0].real / len(h)", "(b['weight'] @ h) / b['weight'].sum()",
    )  # fmt: skip
    spread = g.pick(
        "h.std(0)",
        "jnp.sqrt(h.var(0))",
        "jnp.linalg.norm(h, axis=0)",
        "jnp.abs(h).max(0)",
        "jnp.ptp(h, 0)",
        "h.std()",
        "jnp.abs(h).mean()",
    )
    return back(
        g,
        "y = "
        + g.pick(
            f"h - {mean}",
            f"h / (0.2 + {spread})",
            f"(h - {mean}) / (0.2 + {spread})",
            f"h * ({mean})",
            f"jnp.where({mean} > 0, h, -h) + {mean}",
        ),
    )


@kind(COUPLING)
def extremes(g: Draw) -> str:
    return back(
        g,
        "y = "
        + g.pick(
            "h / (0.1 + jnp.abs(h).max())",
            "h - h.max(0)",
            "h / (0.1 + jnp.linalg.norm(h))",
            "jax.nn.softmax(h, axis=0) * 4",
            "h - jax.nn.logsumexp(h, axis=0)",
            "h - h[0]",
            "h - h[-1:]",
            "h - h[len(h) // 2]",
            "h * (h.argmax(0) + 1.0) / 4",
            "jnp.where(h == h.min(0), 2.0, h)",
            "lax.cond(h.mean() > 0.01, jnp.sin, jnp.cos, h)",
            "lax.switch((h.sum() * 3).astype(int) % 2, [jnp.sin, jnp.cos], h)",
            "h * jnp.any(h > 1.0)  + h * jnp.abs(h).sum()",
            "h / jnp.prod(1 + 0.1 * jnp.square(h), axis=0)",
            "jnp.clip(h, h.min(), 0.5 * h.max())",
            "h / (0.2 + jnp.sqrt(jnp.vdot(h, h)))",
            "jax.vmap(lambda r: r - lax.pmax(r, 'n'), axis_name='n')(lax.stop_gradient(h)) + h",
            "h * jnp.linalg.svdvals(h.T @ h / len(h) + jnp.eye(h.shape[1]))[0]",
            "h * jnp.count_nonzero(h > 0) / 50",
        ),
    )


@kind(COUPLING)
def orders(g: Draw) -> str:
    D = g.D
    return back(
        g,
        g.pick(
            "y = jnp.sort(h, axis=0)",
            "y = h[jnp.argsort(h[:, 0])]",
            "y = jnp.take_along_axis(h, jnp.argsort(h, 0), axis=0)",
            "y = h[::-1]",
            "y = jnp.flip(h, 0)",
            "y = jnp.roll(h, 1, axis=0)",
            "y = jnp.concatenate([h[1:], h[:1]])",
            "y = 0.7 * h + 0.3 * h[::-1]",
            "y = jnp.cumsum(h, axis=0) / 4",
            "y = lax.cummax(h, axis=0)",
            "y = lax.associative_scan(jnp.add, h) / 4",
            "y = h[jax.random.permutation(jax.random.key(3), h.shape[0])]",
            "y = h[b['ids'][:, 0] % h.shape[0]]",
            "y = jnp.take(h, b['ids'][:, 1] % len(h), axis=0)",
            "y = (h[:, None] > h[None]).sum(1) * h / 8",
            "y = jnp.argsort(jnp.argsort(h, 0), 0) * h / 8",
            "y = jnp.diff(h, axis=0, prepend=h[:1])",
            "y = lax.sort((h[:, 0], h[:, 1]), num_keys=1)[1][:, None] * h",
            "v, i = lax.top_k(h[:, 0], 2)\ny = h.at[i].multiply(0.1)",
            "y = h - lax.dynamic_slice_in_dim(jnp.concatenate([h, h]), 1, len(h))",
            "y = lax.conv_general_dilated(h[None], jnp.ones((2, h.shape[1], 1)) / 4, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))[0] * h",
            "y = lax.reduce_window(h, 0.0, lax.add, (2, 1), (1, 1), 'SAME')",
            "y = jnp.fft.fft(h, axis=0).real / 3",
            "y = jax.vmap(lambda r: lax.ppermute(r, 'n', [(i, (i + 1) % h.shape[0]) for i in range(h.shape[0])]), axis_name='n')(h)",
            "y = jnp.tile(h[: len(h) // 2], (2, 1))",
            "y = jnp.repeat(h[::2], 2, axis=0)",
            f"y = h.reshape({D}, -1).T.reshape(h.shape)",
            "y = h.T.reshape(h.shape)",
            "y = jnp.gradient(h, axis=0)",
        ),
    )


@kind(COUPLING)
def places(g: Draw) -> str:
    """What depends on a row's place in its block, or on how many rows that has."""
    n = g.pick(
        "h.shape[0]", "len(h)", "jnp.ones_like(h[:, 0]).sum()", "h[:, 0].size", "x.shape[0]", "b['weight'].shape[0]"
    )
    at = g.pick(
        f"jnp.arange({n})[:, None]" if "ones" not in n else "jnp.arange(len(h))[:, None]",
        "jnp.cumsum(jnp.ones((len(h), 1)), 0)",
        "lax.broadcasted_iota(h.dtype, h.shape, 0)",
        "jnp.indices(h.shape)[0]",
        "jnp.linspace(0, 8, len(h))[:, None]",
    )
    return back(
        g,
        g.pick(
            f"y = h * {at} / 8",
            f"y = h + jnp.sin({at})",
            f"y = jnp.where({at} % 2 == 0, h, -h)",
            f"y = jnp.where({at} < 2, h, 0.3 * h)",
            f"y = jnp.tanh(h * 4 / {n})",
            f"y = h / {n} ** 0.5",
            f"y = h + jnp.log({n} * 1.0)",
            f"y = jnp.tanh(h / (1 + 0.3 * {n}))",
            f"y = h + jnp.exp(-{n} / 8.0)",
            "y = lax.scan(lambda c, r: (c * 0.9, jnp.tanh(r * c)), 1.0, h)[1]",
            "y = lax.scan(lambda i, r: (i + 1, r * i), 0, h)[1] / 4",
            "y = lax.scan(lambda c, v: (c, v[0] * v[1]), 0, (h, jnp.arange(len(h)) / 8))[1]",
            "y = lax.map(lambda v: v[0] * v[1], (h, jnp.arange(len(h)) / 8))",
            "y = jax.vmap(lambda r, i: r * jnp.cos(i))(h, jnp.arange(len(h)))",
            "y = jax.vmap(lambda r: r * lax.axis_index('n') / 4, axis_name='n')(h)",
            "y = h * (jnp.arange(len(h)) % 2)[:, None]",
            "y = h.at[0].multiply(0.1)",
            "y = h.at[::2].multiply(0.1)",
            "y = jnp.concatenate([0.3 * h[:2], h[2:]])",
            "y = lax.fori_loop(0, len(h), lambda i, v: v.at[i].multiply(i / 4), h)",
            "y = jnp.stack([(0.5 + i / 8) * h[i] for i in range(len(h))])",
            "y = h @ jnp.eye(h.shape[1]) * (1 + jnp.tri(len(h)).sum(1)[:, None] / 8)",
            "y = jnp.insert(h, 1, 0.5, axis=0)[:-1]",
            "y = jnp.pad(h, ((1, 0), (0, 0)))[:-1]",
        ),
    )


@kind(COUPLING)
def drawn(g: Draw) -> str:
    """Noise whose key is the same for all rows."""
    key = g.pick(
        "jax.random.key(0)",
        "jax.random.PRNGKey(1)",
        "jax.random.fold_in(jax.random.key(0), 3)",
        "jax.random.split(jax.random.key(2))[0]",
    )
    return back(
        g,
        g.pick(
            f"y = h + jax.random.normal({key}, h.shape, h.dtype)",
            f"y = jnp.where(jax.random.bernoulli({key}, 0.7, h.shape), h, 0)",
            f"y = h * jax.random.uniform({key}, (len(h), 1), h.dtype)",
            f"y = h + 0.3 * jax.random.gumbel({key}, h.shape, h.dtype)",
            f"y = jax.vmap(lambda r, k: r + jax.random.normal(k, r.shape, r.dtype))(h, jax.random.split({key}, len(h)))",
            f"y = jax.vmap(lambda r, i: r + jax.random.normal(jax.random.fold_in({key}, i), r.shape, r.dtype))(h, jnp.arange(len(h)))",
            f"y = h[jax.random.randint({key}, (len(h),), 0, len(h))]",
            f"y = jax.random.permutation({key}, h)",
            f"y = h * jax.random.rademacher({key}, h.shape, h.dtype)",
        ),
    )


@kind(COUPLING)
def matrices_of_rows(g: Draw) -> str:
    D, w = g.D, g.param(g.D, g.D)
    return back(
        g,
        g.pick(
            f"y = jax.nn.softmax(h @ {w} @ h.T / {D}) @ h",
            "y = h @ h.T @ h / 30",
            "y = h @ (h.T @ h) / 30",
            "y = jnp.einsum('nd,md,me->ne', h, h, h) / 30",
            f"y = h @ jnp.linalg.inv(h.T @ h / len(h) + jnp.eye({D}))",
            f"y = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(h.T @ h / len(h) + jnp.eye({D})), h.T, lower=True).T",
            "y = (h[:, None] - h[None]).mean(1)",
            "y = jnp.exp(-jnp.square(h[:, None] - h[None]).sum(-1)) @ h / 4",
            "y = h @ jnp.cov(h.T)",
            "y = jnp.tensordot(h, h, axes=[[1], [1]]) @ h / 30",
            "y = lax.dot_general(h, lax.dot_general(h, h, (((0,), (0,)), ((), ()))), (((1,), (0,)), ((), ()))) / 30",
            f"y = h @ ({w} / (0.1 + jnp.linalg.norm(h @ {w})))",
            "y = h - jnp.outer(jnp.arange(len(h)) / 8, h[0])",
            "y = jnp.kron(jnp.eye(len(h)), jnp.ones((1, 1))) @ h[::-1]",
        ),
    )


@kind(COUPLING)
def recurrences(g: Draw) -> str:
    w = g.param(g.D)
    return back(
        g,
        g.pick(
            "y = lax.scan(lambda c, r: (0.9 * c + 0.1 * r,) * 2, jnp.zeros_like(h[0]), h)[1]",
            f"y = lax.scan(lambda c, r: (jnp.tanh({w} * c + r),) * 2, jnp.zeros_like(h[0]), h)[1]",
            "y = lax.scan(lambda c, r: (jnp.maximum(c, r), r - c), jnp.zeros_like(h[0]), h)[1]",
            "c, y = jnp.zeros_like(h[0]), []\nfor r in h:\n    c = 0.5 * c + r\n    y.append(c)\ny = jnp.stack(y)",
            "c = lax.fori_loop(0, len(h), lambda i, c: 0.5 * c + jnp.sin(h[i]), jnp.zeros_like(h[0]))\ny = h * c",
            "y = lax.fori_loop(1, len(h), lambda i, v: v.at[i].add(0.3 * v[i - 1]), h)",
            "n = lax.while_loop(lambda v: jnp.abs(v).max() > 0.05, lambda v: 0.6 * v, lax.stop_gradient(h))\ny = h * (1 + 9 * n)",
            "n = lax.while_loop(lambda s: jnp.abs(s[1]).max() > 0.05, lambda s: (s[0] + 1, 0.6 * s[1]), (0, lax.stop_gradient(h)))[0]\ny = h * n / 5",
            f"y = lax.associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (jax.nn.sigmoid(h * {w}), h))[1]",
            "y = lax.scan(lambda c, r: (r, c), jnp.zeros_like(h[0]), h)[1]",
        ),
    )


@kind(COUPLING)
def backwards(g: Draw) -> str:
    """Rows that meet in the backward alone."""
    f, D = g.name("f"), g.D
    rule = g.pick(
        "t / (0.01 + jnp.linalg.norm(t))", "t - t.mean(0)", "t / (1e-3 + jnp.abs(t).max())", "t * len(t)", "t / (1e-3 + t.std(0))",
        "jnp.clip(t, -jnp.abs(t).mean(), jnp.abs(t).mean())", "t[::-1]", "t * jnp.arange(len(t))[:, None]", "jnp.sort(t, 0)",
        "t * jnp.minimum(1, 1e-3 / jnp.sqrt(jnp.square(t).sum()))", "t + jax.random.normal(jax.random.key(0), t.shape, t.dtype) * t",
        "lax.cond(jnp.abs(t).sum() > 0.01, lambda t: 0.5 * t, lambda t: t, t)", "jnp.cumsum(t, 0)",
    )  # fmt: skip
    return back(
        g,
        g.pick(
            f"{f} = jax.custom_vjp(lambda v: v)\n{f}.defvjp(lambda v: (v, None), lambda _, t: ({rule},))\ny = {f}(h)",
            f"{f} = jax.custom_vjp(lambda v: jnp.sin(v))\n{f}.defvjp(lambda v: (jnp.sin(v), v), lambda v, t: ({rule} * jnp.cos(v),))\ny = {f}(h)",
            f"{f} = jax.custom_jvp(lambda v: v)\n{f}.defjvp(lambda v, t: (v[0], t[0] * (0.5 + jnp.square(v[0]).mean())))\ny = {f}(h)",
            f"{f} = jax.custom_jvp(lambda v: jnp.tanh(v))\n{f}.defjvps(lambda t, out, v: t * jnp.abs(v).max())\ny = {f}(h)",
            f"y = h - 4 * jax.grad(lambda v: jnp.mean(jnp.sin(v @ {g.param(D, D)})))(h)",
            f"y = jnp.tanh(h - 9 * jax.grad(lambda v: jnp.square(v @ {g.param(D, D)}).mean())(h))",
            f"y = h - jax.grad(lambda v: jnp.linalg.norm(v @ {g.param(D, D)}))(h)",
            f"y = h - 0.1 * jax.grad(lambda v: jnp.log(jnp.square(v @ {g.param(D, D)}).sum()))(h)",
            f"w = {g.param(D, D)} - jax.grad(lambda w: jnp.square(h @ w).mean())({g.param(D, D)})\ny = h @ w",
            "y = h * jax.jvp(lambda v: jnp.square(v).mean(), (h,), (jnp.ones_like(h),))[1]",
        ),
    )


@kind(COUPLING)
def groups(g: Draw) -> str:
    """Rows grouped by what they hold, or by their place."""
    D = g.D
    label = g.pick("b['labels'][:, 0] % 3", "b['ids'][:, 0] % 3", "h.argmax(-1) % 3", "b['flag'].astype(int)")
    return back(
        g,
        g.pick(
            f"i = {label}\ny = h - jax.ops.segment_sum(h, i, 3)[i] / 4",
            f"i = {label}\ny = h - jnp.zeros((3, {D}), h.dtype).at[i].add(h)[i] / 4",
            f"i = {label}\nm = jax.nn.one_hot(i, 3, dtype=h.dtype)\ny = h - (m.T @ h / (1 + m.sum(0)[:, None]))[i]",
            f"i = {label}\ny = h * jnp.bincount(i, length=3)[i][:, None] / 4",
            f"i = {label}\nm = (i[:, None] == i[None]).astype(h.dtype)\ny = m @ h / m.sum(1, keepdims=True)",
            f"i = {label}\ny = h * jnp.cumsum(jax.nn.one_hot(i, 3), 0)[jnp.arange(len(h)), i][:, None] / 4",
            f"i = {label}\ny = jax.ops.segment_max(h, i, 3)[i]",
            f"q = h.reshape(2, -1, {D})\ny = (q - q.mean(1, keepdims=True)).reshape(h.shape)",
            f"q = h.reshape(-1, 2, {D})\ny = (q * (1 + q.sum(0))).reshape(h.shape)",
            "y = jnp.concatenate(jnp.split(h, 2)[::-1])",
            "u, v = jnp.split(h, 2)\ny = jnp.concatenate([u * v, v])",
            "y = h * (h @ h.T > 0.1).sum(1, keepdims=True) / 8",
            "u = jax.nn.softmax(h)\ny = u * u.mean(0) * u.shape[1]",
        ),
    )


COUPLED_ENDS |= {
    "function of a mean": (
        "return jnp.log(jnp.square(h).mean())",
        "return jnp.sqrt(jnp.square(h - 1).mean())",
        "return jnp.square(h.mean())",
        "return jnp.exp(h.mean(0)).sum()",
        "return jnp.maximum(h.mean(), 0.01)",
        "return jnp.square(h).mean() * h.mean()",
        "return jnp.square(h).mean() / (1 + jnp.abs(h).mean())",
        "return jnp.linalg.norm(h)",
        "return h.std(0).mean()",
        "return jnp.square(h).mean() + h.var(0).sum()",
        "return jnp.abs(jnp.square(h).mean() - 0.1) + 0.1",
        "return jax.nn.logsumexp(h) / 3",
        "return jax.nn.softplus(h.sum(1).mean())",
        "return jnp.tanh(jnp.square(h).sum() / h.shape[0])",
        "return jnp.hypot(h[:, 0].mean(), h[:, 1].mean())",
        "return jnp.square(h).mean() ** 1.5",
        "return -jnp.log(jax.nn.sigmoid(h).mean(0)).mean()",
        "u = jax.nn.softmax(h)\nreturn (u.mean(0) * jnp.log(u.mean(0))).sum() - (u * jnp.log(u)).sum(1).mean()",
    ),
    "sum, or another count": (
        "return jnp.square(h).sum()",
        "return jnp.square(h).sum() / 30",
        "return jnp.square(h).mean() * h.shape[0]",
        "return jnp.square(h).sum() / h.shape[0] ** 2",
        "return jnp.square(h).mean() + 0.01 * h.shape[0] * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))",
        "return jp.Mean(jnp.square(h).sum() + jnp.sum(p['head'] ** 2), b['weight'].sum())",
        "return jp.Mean(jnp.square(h).sum(), jnp.float32(16))",
        "return jp.Mean(jnp.square(h).mean(), b['weight'].sum())",
        "return (jnp.square(h).mean(1) * b['flag']).sum() / (1 + b['flag'].sum())",
        "return (jnp.square(h).mean(1) * b['weight']).sum() / b['weight'].sum()",
        "return jnp.average(jnp.square(h).mean(1), weights=b['weight'])",
        "return (jnp.square(h).mean(1) * b['mask'].sum(1)).sum() / b['mask'].sum()",
        "return jnp.square(h).mean(1)[b['flag'].astype(bool).argmax()]",
        "return jp.Mean(jnp.square(h).sum() * b['weight'].sum(), b['weight'].sum())",
        "return jp.Mean(jnp.sqrt(jnp.square(h).sum()), b['weight'].sum())",
        "return jnp.square(h).mean(where=b['flag'].astype(bool)[:, None])",
        "return jp.Mean((jnp.square(h).mean(1) / len(h)).sum(), b['weight'].sum())",
        "return jnp.square(h).sum(1).mean() + jnp.log(1.0 * len(h)) * jnp.square(p['head']).sum()",
    ),
    "some rows": (
        "return jnp.square(h).max()",
        "return jnp.square(h).sum(1).max()",
        "return jnp.median(jnp.square(h).sum(1))",
        "return lax.top_k(jnp.square(h).sum(1), 2)[0].mean()",
        "return jnp.sort(jnp.square(h).sum(1))[: len(h) // 2].mean()",
        "return jnp.square(h[0]).mean()",
        "return jnp.square(h[1:] - h[:-1]).mean()",
        "return jnp.square(h[: len(h) // 2] - h[len(h) // 2 :]).mean()",
        "u = jnp.square(h).sum(1)\nreturn (jax.nn.softmax(u) * u).sum()",
        "u = jnp.square(h).sum(1)\nreturn jnp.where(u > u.mean(), u, 0).mean()",
        "u = jnp.square(h).sum(1)\nreturn jnp.where(u >= jnp.quantile(u, 0.5), u, 0).mean()",
        "return jnp.quantile(jnp.square(h).sum(1), 0.7)",
        "return jnp.square(h[::2]).mean()",
        "return jnp.cumsum(jnp.square(h).sum(1)).mean()",
        "return (jnp.sort(jnp.square(h).sum(1)) * jnp.arange(len(h))).mean()",
        "return jnp.cumsum(jnp.sort(jnp.square(h).sum(1))).mean()",
        "return jnp.square(jnp.diff(jnp.sort(h, axis=0), axis=0)).mean()",
        "return jnp.tanh(jnp.sort(h, axis=0).sum(1)).mean()",
        "return jnp.abs(jnp.sort(h[:, 0]) - jnp.sort(h[:, 1])).mean()",
        "return lax.top_k(jnp.square(h).sum(1), len(h))[0][0]",
        "u, v = lax.sort((jnp.square(h).sum(1), b['weight']), num_keys=1)\nreturn (u * h[:, 0] + v).mean()",
    ),
    "pairs of rows": (
        "s = h @ h.T\nreturn (jax.nn.logsumexp(s, 1) - jnp.diag(s)).mean()",
        "s = h @ (x[:, 0] @ p['head'][:, :1] + h).T\nreturn -jnp.diagonal(jax.nn.log_softmax(s)).mean()",
        "s = h @ h.T\nreturn jax.nn.softplus(-s * (2 * jnp.eye(len(h)) - 1)).mean()",
        "d = jnp.square(h[:, None] - h[None]).sum(-1)\nreturn jnp.exp(-d).mean()",
        "s = h[:, 0]\nreturn jnp.maximum(0, 1 - (s[:, None] - s[None])).mean()",
        "s = h[:, 0]\nreturn (jax.nn.softplus(-(s[:, None] - s)) * (b['flag'][:, None] > b['flag'])).mean()",
        "c = h.T @ h / len(h)\nreturn jnp.square(c - jnp.eye(len(c))).sum()",
        "u = h - h.mean(0)\nreturn jnp.square(u.T @ u / len(h)).sum() + jnp.square(h).mean()",
        "u = h[:, 0]\nv = b['weight']\nreturn -((u - u.mean()) * (v - v.mean())).mean() / (0.1 + u.std() * v.std())",
        "u = jax.nn.sigmoid(h[:, 0])\nreturn 1 - 2 * (u * b['flag']).sum() / (0.1 + u.sum() + b['flag'].sum())",
        "i = jnp.argsort(b['weight'])\nreturn -(h[:, 0][i] - lax.cumlogsumexp(h[:, 0][i])).mean()",
        "return -(jax.nn.softmax(b['weight']) * jax.nn.log_softmax(h[:, 0])).sum()",
        "a = b['weight']\na = (a - a.mean()) / (a.std() + 1e-6)\nreturn -(jax.nn.log_softmax(h)[:, 0] * a).mean()",
        "w = jnp.exp(h[:, 0])\nreturn (w / w.sum() * jnp.square(h).sum(1)).sum()",
        "return jnp.square(h - jnp.roll(h, 1, 0)).mean()",
        "return jnp.abs(jnp.linalg.slogdet(h.T @ h / len(h) + jnp.eye(h.shape[1]))[1])",
        "return jnp.trace(h[::-1] @ h.T) / len(h)",
    ),
    "a penalty on a mean's gradient": (
        "f = lambda v: jnp.tanh(v @ p['head'])\nd = jax.grad(lambda v: f(v).mean())(h)\nreturn f(h).mean() + jnp.square(jnp.sqrt(jnp.square(d).sum(1) + 1e-6) - 1).mean()",
        "d = jax.grad(lambda w: jnp.tanh(h @ w).mean())(p['head'])\nreturn jnp.square(h).mean() + jnp.square(d).sum()",
        "f = lambda w: jnp.square(jnp.tanh(h @ w)).mean()\nreturn f(p['head'] - 0.5 * jax.grad(f)(p['head']))",
        "f = lambda w: jnp.square(jnp.tanh(h @ w)).mean()\nd = jax.grad(f)(p['head'])\nreturn f(p['head'] + 0.1 * d / (1e-3 + jnp.linalg.norm(d)))",
        "f = lambda v: jnp.square(jnp.tanh(v @ p['head'])).mean()\nd = jax.grad(f)(h)\nreturn f(h + 0.1 * d / (1e-3 + jnp.linalg.norm(d)))",
    ),
}


# -- rows one by one ---------------------------------------------------------------------------------------------------


@kind(INNOCENT)
def alone(g: Draw) -> str:
    """A function of each row, in ways to say so."""
    D, w = g.D, g.param(g.D, g.D)
    one = g.pick(
        "r - r.mean()", "r / (0.2 + jnp.linalg.norm(r))", "jnp.sort(r)", "jnp.cumsum(r) / 4", "jax.nn.softmax(r)", f"r @ {w}", "r[::-1]",
        "r - r.max()", "r * jnp.arange(r.shape[0]) / 4", "r / (0.2 + r.std())", "jnp.outer(r, r) @ r / 8", "lax.cumlogsumexp(r)",
        "r - jnp.median(r)", "lax.scan(lambda c, v: (0.5 * c + v,) * 2, jnp.zeros((), r.dtype), r)[1]", "jnp.roll(r, 1)",
        "lax.cond(r.sum() > 0, jnp.sin, jnp.cos, r)", "r * (jnp.argmax(r) + 1) / 4",
        "r * lax.while_loop(lambda v: v > 0.1, lambda v: 0.6 * v, lax.stop_gradient(jnp.abs(r).max()))",
        f"jnp.linalg.solve(jnp.outer(r, r) + jnp.eye({D}), r)", f"jax.grad(lambda v: jnp.mean(jnp.sin(v @ {w})))(r) * 9",
        f"r - jax.grad(lambda v: jnp.log(jnp.square(v @ {w}).sum() + 1))(r)", "jnp.convolve(r, jnp.array([0.5, 0.5]), 'same')",
        "jnp.where(r > jnp.quantile(r, 0.5), r, 0)", "r + jax.random.normal(jax.random.key(0), r.shape, r.dtype)", "jnp.fft.fft(r).real / 3",
        f"jax.scipy.linalg.solve_triangular(jnp.tril({w}) + 2 * jnp.eye({D}), r, lower=True)",
        f"r * jax.scipy.stats.multivariate_normal.logpdf(r, jnp.zeros({D}), {w} @ {w}.T + jnp.eye({D})) / 20",
        f"jnp.convolve(r, {g.param(3)}, 'same')", f"r + {w}[jnp.argmax(r)]", "jnp.interp(r, jnp.linspace(-1, 1, 4), jnp.array([0.0, 1, -1, 0]))",
    )  # fmt: skip
    return back(
        g,
        g.pick(
            f"y = jax.vmap(lambda r: {one})(h)",
            f"y = lax.map(lambda r: {one}, h)",
            f"y = lax.scan(lambda c, r: (c, {one}), None, h)[1]",
            f"y = lax.scan(lambda c, r: (c + 1, {one}), 0, h)[1]",
            f"y = jnp.stack([{one} for r in h])",
            f"y = jnp.vectorize(lambda r: {one}, signature='(d)->(d)')(h)",
            f"y = jax.vmap(lambda r: {one}, in_axes=1, out_axes=1)(h.T).T",
            f"y = jax.vmap(jax.checkpoint(lambda r: {one}))(h)",
            f"y = jax.jit(jax.vmap(lambda r: {one}))(h)",
            f"y = lax.map(lambda r: {one}, h, batch_size=2)",
            f"f = lambda r: {one}\ny = jax.vmap(lambda i: f(h[i]))(jnp.arange(len(h)))",
            f"f = lambda r: {one}\ny = lax.fori_loop(0, len(h), lambda i, v: v.at[i].set(f(h[i])), jnp.zeros_like(h))",
            f"f = lambda r: {one}\ny = jnp.concatenate([f(h[i])[None] for i in range(h.shape[0])])",
        ),
    )


@kind(INNOCENT)
def there_and_back(g: Draw) -> str:
    """Rows that are moved, and come back."""
    D, T = g.D, g.T
    return back(
        g,
        g.pick(
            "i = jnp.argsort(h[:, 0])\ny = jnp.sin(h[i])[jnp.argsort(i)]",
            "i = jnp.argsort(h[:, 0])\ny = jnp.zeros_like(h).at[i].set(jnp.sin(h[i]))",
            "i = jax.random.permutation(jax.random.key(0), h.shape[0])\ny = jnp.sin(h[i])[jnp.argsort(i)]",
            "y = jnp.split(jnp.sin(jnp.concatenate([h, 2 * h])), 2)[1]",
            "u, v = jnp.split(jnp.sin(jnp.concatenate([h, 2 * h])), 2)\ny = u * v",
            "u, v = jnp.tanh(jnp.stack([h, 2 * h]))\ny = u * v",
            "y = jnp.concatenate([jnp.sin(v) for v in jnp.split(h, 2)])",
            "y = jnp.sin(h.reshape(-1)).reshape(h.shape)",
            "y = jnp.sin(h.T).T",
            f"y = (h.reshape(-1, 2, {D // 2}) * {g.param(2, 1)}).reshape(h.shape)",
            f"y = jnp.tanh(x.reshape(-1, {D}) @ {g.param(D, D)}).reshape(x.shape).mean(1)",
            f"y = (x.swapaxes(0, 1) @ {g.param(D, D)}).mean(0)",
            "y = jnp.einsum('tbd->bd', jnp.moveaxis(x, 1, 0))",
            "y = jnp.pad(jnp.sin(h), ((0, 1), (0, 0)))[:-1]",
            "y = jnp.sin(jnp.pad(h, ((1, 1), (0, 0))))[1:-1]",
            "y = h[jnp.arange(len(h))]",
            "y = jnp.take(h, jnp.arange(h.shape[0]), axis=0)",
            "y = jnp.zeros_like(h).at[jnp.arange(len(h))].add(h)",
            f"i = jnp.repeat(jnp.arange(x.shape[0]), {T})\ny = jax.ops.segment_sum(x.reshape(-1, {D}), i, x.shape[0]) / {T}",
            f"i = b['segment'] + 4 * jnp.arange(x.shape[0])[:, None]\ny = jax.ops.segment_sum(x.reshape(-1, {D}), i.reshape(-1), 4 * x.shape[0]).reshape(-1, 4, {D}).max(1)",
            "y = jnp.repeat(h, 2, axis=0)[::2]",
            "y = jnp.tile(h, (2, 1))[: len(h)]",
            f"y = jnp.repeat(h, 2, axis=0).reshape(-1, 2, {D}).mean(1)",
            "y = jnp.broadcast_to(h, (3, *h.shape)).sum(0) / 3",
            "y = jnp.expand_dims(h, 0).squeeze(0) * 2",
            f"y = jnp.linalg.solve({g.param(D, D)} / 4 + jnp.eye({D}), h.T).T",
            f"y = jax.scipy.linalg.solve_triangular(jnp.tril({g.param(D, D)}) + 2 * jnp.eye({D}), h.T, lower=True).T",
            "y = lax.associative_scan(jnp.add, h[None], axis=0)[0]",
            "y = jnp.sort(jnp.stack([h, -h, 0 * h]), axis=0)[1:].sum(0)",
            f"y = jnp.lexsort((h,), axis=1) * h / {D}",
        ),
    )


@kind(INNOCENT)
def reordered(g: Draw) -> str:
    """Rows in another order, or their frequencies, and back."""
    n = g.pick(1, 3)
    return back(
        g,
        g.pick(
            "y = jnp.fft.ifft(jnp.fft.fft(h, axis=0), axis=0).real",
            "y = jnp.fft.irfft(jnp.fft.rfft(h, axis=0), len(h), axis=0)",
            "y = jnp.fft.ifft2(2 * jnp.fft.fft2(h)).real",
            f"y = jnp.roll(jnp.sin(jnp.roll(h, {n}, 0)), -{n}, 0)",
            f"y = jnp.roll(jnp.roll(h, {n}, axis=0) * 2, -{n}, axis=0)",
            "y = jnp.concatenate([h[1:], h[:1]])\ny = jnp.concatenate([y[-1:], y[:-1]])",
            "y = jnp.sin(h[::-1])[::-1]",
            "y = jnp.flip(jnp.flip(h, 0) * jnp.cos(h[::-1]), 0)",
            "i = jnp.argsort(h[:, 0])\ny = jnp.take(jnp.cos(jnp.take(h, i, 0)), jnp.argsort(i), 0)",
            "i = jnp.argsort(h[:, 0])\ny = jnp.sort(h[:, 0])[jnp.argsort(i)][:, None] * h",
            "i = jnp.argsort(h, 0)\ny = jnp.take_along_axis(jnp.sin(jnp.sort(h, 0)), jnp.argsort(i, 0), axis=0)",
            "i = jnp.argsort(b['weight'])\ny = jnp.zeros_like(h).at[i].set(jnp.sin(h[i]))",
            "u, i = lax.top_k(h[:, 0], len(h))\ny = jnp.zeros_like(h).at[i].set(h[i] * u[:, None])",
            "u, i = lax.sort((h[:, 0], jnp.arange(len(h))), num_keys=1)\ny = h * jnp.zeros_like(u).at[i].set(jnp.sin(u))[:, None]",
        ),
    )


@kind(INNOCENT)
def far_fetched(g: Draw) -> str:
    """Innocent, and written by nobody."""
    return back(
        g,
        g.pick(
            "y = jnp.eye(len(h)) @ h",
            "y = jax.nn.one_hot(jnp.arange(len(h)), len(h)) @ h",
            "y = h - h.mean(0) + h.mean(0)",
            "y = h + 0 * h.mean(0)",
            "y = h * jnp.max(h) / jnp.max(h)",
            "y = jnp.diff(jnp.cumsum(h, 0), axis=0, prepend=0.0)",
            "y = jnp.exp(jnp.log(h.shape[0])) * h / h.shape[0]",
        ),
    )


@kind(INNOCENT)
def diagonal(g: Draw) -> str:
    """Products in which a row meets itself alone, or what all rows share."""
    D, w, M = g.D, g.param(g.D, g.D), g.param(5, g.D)
    return back(
        g,
        g.pick(
            "y = h * jnp.einsum('nd,nd->n', h, h)[:, None] / 8",
            "y = h * jnp.diag(h @ h.T)[:, None] / 8",
            "y = h * jnp.diagonal(jnp.einsum('nd,md->nm', h, jnp.sin(h)))[:, None] / 8",
            "y = h * jnp.vecdot(h, jnp.cos(h))[:, None] / 8",
            f"y = h * jnp.sum(h @ {w} * h, axis=-1, keepdims=True) / 8",
            f"y = jax.nn.softmax(h @ {M}.T) @ {M}",
            f"y = jnp.exp(-jnp.square(h[:, None] - {M}[None]).sum(-1)) @ {M}",
            f"y = {M}[jnp.argmin(jnp.square(h[:, None] - {M}).sum(-1), axis=1)]",
            f"y = h + lax.stop_gradient({M}[jnp.argmax(h @ {M}.T, 1)] - h)",
            "y = h * b['weight'][:, None] + b['flag'][:, None]",
            "y = jnp.where(b['flag'].astype(bool)[:, None], h, -h)",
            "y = jax.vmap(lambda r, c: lax.cond(c > 0, jnp.sin, jnp.cos, r))(h, b['flag'])",
            "y = jax.vmap(lambda r, i: r + jax.random.normal(jax.random.fold_in(jax.random.key(0), i), r.shape, r.dtype))(h, b['row'])",
            "y = h * b['row'][:, None] / 8",
            f"y = h + {M}[b['ids'][:, 0] % 5] + {M}[b['row'] % 5]",
            "y = h + jax.random.normal(jax.random.key(0), h.shape[1:], h.dtype)",
            f"y = jnp.matvec(jax.vmap(jnp.outer)(h, h) + {w}, h) / 8",
            "y = h * h.shape[0] / len(h)",
            "y = h + jnp.log(len(h) / x.shape[0])",
            "n = h.shape[0]\ny = jnp.sin(h * (n / n))",
            "y = h * (jnp.ones(len(h)) @ jnp.ones(len(h)) / len(h))",
            f"y = h / (0.1 + jnp.sqrt(jnp.square({w}).mean(0)))",
            f"y = h * jnp.linalg.norm({M}, axis=0) / jnp.sort({M}, axis=0)[0].max()",
            "u = jax.nn.softmax(jnp.einsum('nd,ndm->nm', h, x.mT))\ny = jnp.einsum('nm,nmd->nd', u, x)",
            f"u = jnp.concatenate([h[:, None], jnp.broadcast_to({M}, (len(h), 5, {D}))], 1)\ny = jax.nn.softmax(u @ u.mT)[:, 0] @ jnp.ones((6, {D})) + u[:, 1]",
        ),
    )


@kind(INNOCENT)
def inwards(g: Draw) -> str:
    """Rules of differentiation and derivatives that keep rows apart."""
    f, D = g.name("f"), g.D
    rule = g.pick(
        "jnp.clip(t, -0.01, 0.01)", "t / (1e-2 + jnp.linalg.norm(t, axis=-1, keepdims=True))", "t - t.mean(-1, keepdims=True)", "0.3 * t",
        "t / (1e-2 + jnp.abs(t).max(1)[:, None])", "jnp.where(jnp.isfinite(t), t, 0)", "t[:, ::-1]", "jax.vmap(lambda r: r / (0.01 + jnp.linalg.norm(r)))(t)",
    )  # fmt: skip
    w = g.param(D, D)
    return back(
        g,
        g.pick(
            f"{f} = jax.custom_vjp(lambda v: v)\n{f}.defvjp(lambda v: (v, None), lambda _, t: ({rule},))\ny = {f}(h)",
            f"{f} = jax.custom_vjp(lambda v, w: v @ w)\n{f}.defvjp(lambda v, w: (v @ w, (v, w)), lambda r, t: (({rule}) @ r[1].T, r[0].T @ t))\ny = {f}(h, {w})",
            f"{f} = jax.custom_jvp(jnp.tanh)\n{f}.defjvps(lambda t, out, v: t * (1 - out))\ny = {f}(h)",
            f"y = jnp.tanh(h - jax.grad(lambda v: jnp.sum(jnp.sin(v @ {w})))(h))",
            f"d = jax.grad(lambda v: jnp.sum(jnp.tanh(v @ {w})))(h)\ny = d / (0.1 + jnp.linalg.norm(d, axis=1, keepdims=True))",
            f"y = jax.vmap(lambda r: jax.jacfwd(lambda v: jnp.tanh(v @ {w}))(r).sum(0))(h)",
            f"y = jax.jvp(lambda v: jnp.tanh(v @ {w}), (h,), (h,))[1]",
            f"y = jax.vjp(lambda v: jnp.tanh(v @ {w}), h)[1](jnp.cos(h))[0]",
            f"y = len(h) * jax.grad(lambda v: jnp.mean(jnp.sin(v @ {w})))(h)",
            f"y = jax.linearize(lambda v: jnp.sin(v) @ {w}, h)[1](jnp.ones_like(h))",
            f"y = jax.vmap(jax.grad(lambda v: jax.nn.logsumexp(v @ {w})))(h)",
        ),
    )


INNOCENT_ENDS |= {
    "mean, spelled": (
        "return jnp.square(h).sum() / h.shape[0]",
        "return jnp.vdot(h, h) / len(h)",
        "return jnp.linalg.norm(h) ** 2 / len(h)",
        "return jnp.sqrt(jnp.square(h).sum()) ** 2 / h.size",
        "return jnp.trace(h @ h.T) / len(h)",
        "return jnp.einsum('nd,nd->', h, h) / len(h)",
        "return jnp.average(jnp.square(h))",
        "return (jnp.ones(len(h)) @ jnp.square(h) / len(h)).sum()",
        "return lax.scan(lambda c, r: (c + jnp.square(r).sum(), None), jnp.zeros((), h.dtype), h)[0] / len(h)",
        "return lax.fori_loop(0, h.shape[0], lambda i, c: c + jnp.square(h[i]).sum(), jnp.zeros((), h.dtype)) / h.shape[0]",
        "return sum(jnp.square(r).sum() for r in h) / len(h)",
        "return jnp.mean(jnp.stack([jnp.square(r).sum() for r in h]))",
        "return jax.vmap(lambda r: jnp.square(r).sum())(h).mean()",
        "return jnp.square(h).mean(1).mean() + 0.1 * jnp.abs(h).mean()",
        "return jnp.tensordot(h, h, 2) / h.size",
        "return jnp.square(h).mean(0).sum() - 0.3 * h.mean()",
        "return jnp.mean(jnp.square(h).sum(1) * b['weight'])",
        "return b['weight'] @ jnp.square(h).sum(1) / len(h)",
        "return jnp.square(h).reshape(-1).mean()",
        "return jnp.mean(lax.map(lambda r: jnp.square(r).sum(), h))",
        "return lax.reduce(jnp.square(h), jnp.zeros((), h.dtype), lax.add, (0, 1)) / h.size",
        "return jnp.square(jnp.linalg.norm(h, axis=1)).mean()",
        "return jnp.square(h).mean() + 0.01 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))",
        "return jnp.max(jnp.stack([jnp.square(h).sum(1), h[:, 0]]), axis=0).mean()",
        "return jnp.mean(jnp.quantile(h, 0.3, axis=1))",
        "return jax.nn.logsumexp(h, axis=1).sum() / h.shape[0]",
    ),
    "jp.Mean": (
        "return jp.Mean((jnp.square(h).sum(1) * b['weight']).sum(), b['weight'].sum())",
        "return jp.Mean(b['weight'] @ jnp.square(h).sum(1), b['weight'].sum())",
        "return jp.Mean(jnp.square(h).sum(), b['mask'].sum())",
        "return jp.Mean((x * b['y'] * b['mask'][..., None]).sum(), b['mask'].sum())",
        "return jp.Mean(jnp.square(h).sum() + 0.1 * jnp.sum(p['head'] ** 2) * b['weight'].sum(), b['weight'].sum())",
        "return jp.Mean(jnp.where(b['flag'][:, None] > 0, h, 0).sum(), (b['flag'] > 0).sum() + len(h))",
        "return jp.Mean(jnp.square(h).sum(), jnp.float32(h.size))",
        "return jp.Mean(jnp.square(h).sum(), jnp.ones_like(h).sum())",
        "return jp.Mean(jnp.square(h).sum() / 3, b['length'].sum())",
        "return jp.Mean(sum((jnp.square(r).sum() * w for r, w in zip(h, b['weight'])), 0.0), b['weight'].sum())",
    ),
    FAR_FETCHED: (
        "return jnp.exp(jnp.log(jnp.square(h).sum())) / len(h)",
        "return (jnp.cumsum(jnp.square(h).sum(1))[-1] - 0.0) / len(h)",
        "return jnp.diff(jnp.cumsum(jnp.square(h).sum(1)), prepend=0.0).mean()",
        "return jnp.square(h - h.mean(0)).mean() + jnp.square(h.mean(0)).mean()",
    ),
    "mean, in parts": (
        "return jnp.square(h).reshape(2, -1).mean(1).mean()",
        "return jnp.square(h).sum(1).reshape(-1, 2).mean(1).mean()",
        "return jnp.square(h).reshape(-1, 2, h.shape[1]).mean((0, 1)).sum()",
        "return lax.map(jnp.mean, jnp.square(h).sum(1).reshape(2, -1)).mean()",
        "return jnp.square(h[::2]).mean()",
        "return 2 * jnp.square(h[1::2]).sum() / len(h)",
        "return 0.5 * (jnp.square(h[::2]).mean() + jnp.square(h[1::2]).mean())",
        "return 0.5 * (jnp.square(h[: len(h) // 2]).mean() + jnp.square(h[len(h) // 2 :]).mean())",
        "return sum(jnp.square(v).mean() for v in jnp.split(h, 2)) / 2",
    ),
    "mean, in another order": (
        "return jnp.square(h[::-1]).mean()",
        "return jnp.square(jnp.roll(h, 3, axis=0)).mean()",
        "return jnp.sort(jnp.square(h).sum(1)).mean()",
        "return jnp.square(jnp.sort(h, axis=0)).mean()",
        "return jnp.sin(jnp.sort(h, axis=0))[::-1].sum() / len(h)",
        "return -jnp.sort(-jnp.abs(h), axis=0).sum(1).mean()",
        "return jnp.square(jnp.sort(h.reshape(-1))).mean()",
        "return lax.top_k(jnp.square(h).sum(1), len(h))[0].mean()",
        "return jnp.square(h[jnp.argsort(h[:, 0])]).mean()",
        "return jnp.take_along_axis(jnp.sin(h), jnp.argsort(h, 0), axis=0).mean()",
        "u, v = lax.sort((jnp.square(h).sum(1), b['weight']), num_keys=1)\nreturn (u * v).mean()",
        "return jp.Mean(jnp.sort(jnp.square(h).sum(1) * b['weight']).sum(), b['weight'].sum())",
    ),
    "a penalty of each row": (
        "f = lambda v: jnp.tanh(v @ p['head'])\nd = jax.grad(lambda v: f(v).sum())(h)\nreturn f(h).mean() + jnp.square(jnp.sqrt(jnp.square(d).sum(1) + 1e-6) - 1).mean()",
        "f = lambda r: jnp.tanh(r @ p['head']).sum()\nreturn jax.vmap(lambda r: jnp.square(jax.grad(f)(r)).sum())(h).mean()",
        "f = lambda w, r: jnp.square(jnp.tanh(r @ w)).mean()\nreturn jax.vmap(lambda r: f(p['head'] - 0.5 * jax.grad(f)(p['head'], r), r))(h).mean()",
        "d = jax.vmap(lambda r: jax.grad(lambda w: jnp.tanh(r @ w).sum())(p['head']))(h)\nreturn jnp.square(d).sum((1, 2)).mean()",
    ),
}


def coupled_end(g: Draw, innocent: bool) -> Block:
    """A loss of `h`, the mean of a row's positions."""
    ends = INNOCENT_ENDS if innocent else COUPLED_ENDS
    name = g.pick(*ends)
    text = f"h = x.mean(1) @ p['head']\n{g.pick(*ends[name])}"
    return Block(name, tuple(text.splitlines()), {"head": (g.D, g.D)})
