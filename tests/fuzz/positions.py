"""Blocks that mix the positions of a row: attention, convolutions, scans, shifts, sorts, lookups, segments."""

from __future__ import annotations

from .features import product
from .programs import Draw
from .registry import POSITIONS, kind


def heads(g: Draw, H: int) -> str:
    """q, k, v as [rows, T, heads, features of a head]."""
    D, T, d = g.D, g.T, g.D // H
    split = g.pick(
        f".reshape(-1, {T}, {H}, {d})",
        f".reshape(x.shape[0], {T}, {H}, {d})",
        f".reshape(*x.shape[:2], {H}, -1)",
        f".reshape(-1, {T}, {d}, {H}).swapaxes(2, 3)",
    )
    each = "\n".join(f"{n} = ({product(g, 'x', D, D)}){split}" for n in "qkv")
    merged = product(g, "x", D, 3 * D)
    by_einsum = "\n".join(f'{n} = jnp.einsum("btc,chd->bthd", x, {g.param(D, H, d)})' for n in "qkv")
    by_head = "\n".join(f'{n} = jnp.einsum("btc,hcd->bthd", x, {g.param(H, D, d)})' for n in "qkv")
    three = g.param(3, D, H, d)
    return g.pick(
        each,
        each,
        by_einsum,
        by_head,
        f"q, k, v = (m{split} for m in jnp.split({merged}, 3, -1))",
        f"q, k, v = jnp.unstack(({merged}).reshape(-1, {T}, 3, {H}, {d}), axis=2)",
        f"q, k, v = jnp.moveaxis(({merged}).reshape(-1, {T}, {H}, 3, {d}), 3, 0)",
        f"q, k, v = jnp.split(({merged}).reshape(-1, {T}, {H}, {3 * d}), 3, axis=-1)",
        f'q, k, v = jnp.einsum("btc,nchd->nbthd", x, {three})',
        f"q, k, v = jax.vmap(lambda w: jnp.tensordot(x, w, 1))({three})",
    )


def rotated(g: Draw, n: str, d: int) -> str:
    """A head's features turned by their positions."""
    T, half = g.T, d // 2
    angle = f"angle = jnp.arange({T})[:, None, None] * 2.0 ** -jnp.arange({half})"
    c = "jnp.cos(angle)"
    s = "jnp.sin(angle)"
    return g.pick(
        f"{angle}\nu, w = jnp.split({n}, 2, -1)\n{n} = jnp.concatenate([u * {c} - w * {s}, u * {s} + w * {c}], -1)",
        f"{angle}\nu, w = {n}[..., ::2], {n}[..., 1::2]\n{n} = jnp.stack([u * {c} - w * {s}, u * {s} + w * {c}], -1).reshape({n}.shape)",
        f"{angle}\nu = lax.complex({n}[..., ::2], {n}[..., 1::2]) * jnp.exp(1j * angle)\n{n} = jnp.stack([u.real, u.imag], -1).reshape({n}.shape)",
        f"{angle}\n{n} = {n} * jnp.concatenate([{c}, {c}], -1) + jnp.concatenate([-{n}[..., {half}:], {n}[..., :{half}]], -1) * jnp.concatenate([{s}, {s}], -1)",
        f"{angle}\nu, w = {n}[..., ::2], {n}[..., 1::2]\n{n} = {n}.at[..., ::2].set(u * {c} - w * {s}).at[..., 1::2].set(u * {s} + w * {c})",
    )


def masked(g: Draw, T: int, form: str) -> str:
    """Scores s, whose last dims are queries and keys, with a mask; `form` has "b" where it has rows."""
    pad = "b['mask'].astype(bool)[:, None, None, :]" if form == "bhqk" else "b['mask'].astype(bool)[None, :, None, :]"
    causal = g.pick(
        f"jnp.tril(jnp.ones(({T}, {T}), bool))",
        f"(jnp.arange({T})[:, None] >= jnp.arange({T}))",
        f"~jnp.triu(jnp.ones(({T}, {T}), bool), 1)",
        f"(lax.broadcasted_iota('int32', ({T}, {T}), 0) >= lax.broadcasted_iota('int32', ({T}, {T}), 1))",
        f"jnp.tri({T}, dtype=bool)",
        f"(abs(jnp.arange({T})[:, None] - jnp.arange({T})) <= 2)",
    )
    low = g.pick("-1e9", "-1e30", "jnp.finfo(s.dtype).min")
    return g.pick(
        "",
        f"s = jnp.where({causal}, s, {low})",
        f"s = s + jnp.where({causal}, 0.0, -1e9)",
        f"s = lax.select(jnp.broadcast_to({causal}, s.shape), s, jnp.full_like(s, -1e9))",
        f"s = jnp.where({pad}, s, {low})",
        f"s = jnp.where({causal} & {pad}, s, {low})",
        f"s = s - 0.3 * jnp.abs(jnp.arange({T})[:, None] - jnp.arange({T}))",
        f"s = s + {g.param(2 * T - 1)}[jnp.arange({T})[:, None] - jnp.arange({T}) + {T - 1}]",
        f"s = s + {g.param(T, T)}",
        f"s = jnp.where((b['segment'][:, :, None] == b['segment'][:, None]){'[:, None]' if form == 'bhqk' else '[None]'}, s, {low})",
        f"s = jnp.where((jnp.arange({T}) < b['length'][:, None]){'[:, None, None]' if form == 'bhqk' else '[None, :, None]'}, s, {low})",
        f"s = 3 * jnp.tanh(s / 3) + jnp.where({causal}, 0, -1e9)",
    )


def weighed(g: Draw) -> str:
    """Scores s to weights a over the last dim."""
    return g.pick(
        "a = jax.nn.softmax(s)",
        "a = jax.nn.softmax(s, axis=-1)",
        "e = jnp.exp(s - s.max(-1, keepdims=True))\na = e / e.sum(-1, keepdims=True)",
        "e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))\na = e / (e.sum(-1)[..., None] + 1e-6)",
        "a = jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True))",
        "a = jnp.exp(jax.nn.log_softmax(s, -1))",
        "a = jnp.swapaxes(jax.nn.softmax(s.mT, axis=-2), -1, -2)",
        "e = jnp.exp(s - jnp.maximum(s.max(-1, keepdims=True), 0))\na = e / (e.sum(-1, keepdims=True) + jnp.exp(-jnp.maximum(s.max(-1, keepdims=True), 0)))",
        "a = jax.nn.sigmoid(s) / s.shape[-1]",
        "a = jax.nn.relu(s) / s.shape[-1]",
        "a = jax.nn.softmax(s, where=s > -1e8, axis=-1)",
    )


@kind(POSITIONS)
def attention(g: Draw) -> str:
    D, T = g.D, g.T
    H = g.pick(2, 4)
    d = D // H
    lines = [heads(g, H)]
    if g.chance(0.3):
        lines += [rotated(g, "q", d), rotated(g, "k", d)]
    if g.chance(0.2):
        lines.append("q, k = (m / (jnp.linalg.norm(m, axis=-1, keepdims=True) + 0.1) for m in (q, k))")
    ready = g.pick("", "", "", "jax.nn", "jp", "linear", "grouped", "rows")
    if ready == "jax.nn":
        mask = g.pick(
            "",
            ", is_causal=True",
            ", mask=b['mask'].astype(bool)[:, None, None]",
            ", key_value_seq_lengths=b['length'], query_seq_lengths=b['length']" if g.chance(0.3) else "",
        )
        lines.append(f"o = jax.nn.dot_product_attention(q, k, v{mask})")
    elif ready == "jp":
        lines.append(f"o = jp.attention(q, k, v{g.pick('', ', causal=True')})")
    elif ready == "linear":
        lines.append("q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1")
        lines.append(
            g.pick(
                "o = jnp.einsum('bqhd,bhde->bqhe', q, jnp.einsum('bkhd,bkhe->bhde', k, v)) / jnp.einsum('bqhd,bhd->bqh', q, k.sum(1))[..., None]",
                "kv = jnp.cumsum(jnp.einsum('bkhd,bkhe->bkhde', k, v), 1)\no = jnp.einsum('bqhd,bqhde->bqhe', q, kv) / (0.1 + jnp.einsum('bqhd,bqhd->bqh', q, jnp.cumsum(k, 1))[..., None])",
                "def one(s, kv):\n    s = 0.9 * s + kv[0][..., None] * kv[1][..., None, :]\n    return s, jnp.einsum('bhd,bhde->bhe', kv[2], s)\n"
                f"o = lax.scan(one, jnp.zeros((x.shape[0], {H}, {d}, {d}), x.dtype), tuple(m.swapaxes(0, 1) for m in (k, v, q)))[1].swapaxes(0, 1)",
            )
        )
    elif ready == "grouped":
        lines.append(f"k, v = k[:, :, :{H // 2}], v[:, :, ::2]")
        lines.append(
            g.pick(
                "k, v = (jnp.repeat(m, 2, axis=2) for m in (k, v))\ns = jnp.einsum('bqhd,bkhd->bhqk', q, k)",
                f"k, v = (jnp.broadcast_to(m[:, :, :, None], (m.shape[0], {T}, {H // 2}, 2, {d})).reshape(q.shape) for m in (k, v))\ns = jnp.einsum('bqhd,bkhd->bhqk', q, k)",
                f"s = jnp.einsum('bqgnd,bkgd->bgnqk', q.reshape(-1, {T}, {H // 2}, 2, {d}), k).reshape(-1, {H}, {T}, {T})\nv = jnp.repeat(v, 2, 2)",
                f"s = jnp.einsum('bqngd,bkgd->bngqk', q.reshape(-1, {T}, 2, {H // 2}, {d}), k).reshape(-1, {H}, {T}, {T})\nv = jnp.tile(v, (1, 1, 2, 1))",
            )
        )
        lines += [f"s = s * {d} ** -0.5", masked(g, T, "bhqk"), weighed(g), "o = jnp.einsum('bhqk,bkhd->bqhd', a, v)"]
    elif ready == "rows":
        lines.append(
            "def one(q, k, v):\n"
            f"    s = jnp.einsum('qd,kd->qk', q, k) / {d} ** 0.5\n"
            f"    return jax.nn.softmax(jnp.where(jnp.tri({T}, dtype=bool), s, -1e9)) @ v\n"
            + g.pick(
                "o = jax.vmap(jax.vmap(one, 1, 1))(q, k, v)",
                "o = jax.vmap(jax.vmap(one), 2, 2)(q, k, v)",
                f"o = jnp.stack([jax.vmap(one)(q[:, :, h], k[:, :, h], v[:, :, h]) for h in range({H})], 2)",
                "o = lax.map(lambda m: jax.vmap(one, 1, 1)(*m), (q, k, v))",
            )
        )
    else:
        form, score = g.pick(
            ("bhqk", "s = jnp.einsum('bqhd,bkhd->bhqk', q, k)"),
            ("bhqk", "s = q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1)"),
            ("bhqk", "s = lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2))))"),
            ("bhqk", "s = jnp.matmul(q.swapaxes(1, 2), k.swapaxes(1, 2).mT)"),
            (
                "bhqk",
                f"s = sum(q.swapaxes(1, 2)[..., :, None, i] * k.swapaxes(1, 2)[..., None, :, i] for i in range({d}))",
            ),
            ("hbqk", "s = jnp.einsum('bqhd,bkhd->hbqk', q, k)"),
            ("hbqk", "s = lax.dot_general(q, k, (((3,), (3,)), ((2, 0), (2, 0))))"),
        )
        lines += [
            score,
            g.pick(f"s = s / {d} ** 0.5", f"s *= {d} ** -0.5", f"s = s / jnp.sqrt({d}.0)"),
            masked(g, T, form),
            weighed(g),
        ]
        lines.append(
            g.pick(
                f"o = jnp.einsum('{form},bkhd->bqhd', a, v)",
                f"o = jnp.einsum('bkhd,{form}->bhqd', v, a).swapaxes(1, 2)",
                "o = (a @ v.swapaxes(1, 2)).transpose(0, 2, 1, 3)"
                if form[0] == "b"
                else "o = (a @ v.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)",
            )
        )
    lines.append(
        g.pick(
            f"y = {product(g, f'o.reshape(-1, {T}, {D})', D, D)}",
            f"y = {product(g, 'lax.collapse(o, 2, 4)', D, D)}",
            f"y = jnp.einsum('bthd,hdc->btc', o, {g.param(H, d, D)})",
            f"y = jnp.einsum('bthd,chd->btc', o, {g.param(D, H, d)})",
            f"y = jnp.tensordot(o, {g.param(H, d, D)}, 2)",
            f"y = lax.dot_general(o, {g.param(H, d, D)}, (((2, 3), (0, 1)), ((), ())))",
        )
    )
    return "\n".join(lines)


@kind(POSITIONS)
def crossed(g: Draw) -> str:
    """Attention to learned places, and pooling by learned queries."""
    D, T, M = g.D, g.T, g.pick(3, 4)
    memory, keys = g.param(M, D), g.param(M, D)
    return g.pick(
        f"y = jax.nn.softmax({product(g, 'x', D, D)} @ {memory}.T) @ {keys}",
        f"a = jax.nn.softmax(jnp.einsum('md,btd->bmt', {memory}, x), -1)\ny = jnp.einsum('bmt,btd,me->bte', a, x, {g.param(M, D)}) / 2",
        f"a = jax.nn.softmax(jnp.einsum('md,btd->btm', {memory}, x), axis=1)\ns = jnp.einsum('btm,btd->bmd', a, x)\ny = jnp.einsum('btm,bmd->btd', a, s) @ {g.param(D, D)}",
        f"s = jnp.concatenate([x, jnp.broadcast_to({memory}, (x.shape[0], {M}, {D}))], 1)\ns = s + jax.nn.softmax(s @ s.mT / {D}) @ s\ny = s[:, :{T}]",
        f"s = jnp.concatenate([jnp.tile({memory}[None], (x.shape[0], 1, 1)), x], axis=1)\ny = (jax.nn.softmax(x @ s.swapaxes(1, 2) / {D}) @ s) @ {g.param(D, D)}",
    )


@kind(POSITIONS)
def accumulated(g: Draw) -> str:
    """Running sums, products, extremes, and recurrences from position to position."""
    D, T = g.D, g.T
    w, u = g.param(D, D), g.param(D)
    gate = f"jax.nn.sigmoid(x * {u})"
    turn = g.pick("x.swapaxes(0, 1)", "jnp.moveaxis(x, 1, 0)", "x.transpose(1, 0, 2)")
    zero = g.pick("jnp.zeros_like(x[:, 0])", "jnp.zeros((x.shape[0], x.shape[2]), x.dtype)", "0 * x[:, 0]")
    return g.pick(
        "y = jnp.cumsum(x, axis=1) / (1 + jnp.arange(x.shape[1]))[:, None]",
        f"y = lax.cumsum(x, axis=1, reverse=True) / {T}",
        "y = jnp.cumprod(1 + 0.1 * jnp.tanh(x), axis=1)",
        "y = lax.cummax(x, axis=1)",
        "y = lax.cummin(x, axis=1)",
        "y = lax.cumlogsumexp(x, axis=1)",
        "y = lax.associative_scan(jnp.add, x, axis=1) / 3",
        "y = lax.associative_scan(jnp.maximum, x, axis=1, reverse=True)",
        f"y = lax.associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), ({gate}, x), axis=1)[1]",
        f"y = lax.scan(lambda c, v: (0.8 * c + 0.2 * v,) * 2, {zero}, {turn})[1].swapaxes(0, 1)",
        f"y = lax.scan(lambda c, v: (jnp.tanh(c @ {w} + v),) * 2, {zero}, {turn})[1].swapaxes(0, 1)",
        f"y = lax.scan(lambda c, v: (jnp.tanh(c @ {w} + v),) * 2, {zero}, {turn}, reverse=True, unroll=2)[1].swapaxes(0, 1)",
        f"y = lax.scan(lambda c, v: (v[0] * c + (1 - v[0]) * v[1],) * 2, {zero}, ({gate}.swapaxes(0, 1), {turn}))[1].swapaxes(0, 1)",
        f"y = jax.vmap(lambda r: lax.scan(lambda c, v: (jnp.tanh(c * {u} + v),) * 2, jnp.zeros_like(r[0]), r)[1])(x)",
        f"h, s = {zero}, []\nfor t in range({T}):\n    h = jnp.tanh(0.5 * h + x[:, t])\n    s.append(h)\ny = jnp.stack(s, axis=1)",
        f"y = lax.fori_loop(0, {T}, lambda t, v: v.at[:, t].add(0.3 * v[:, t - 1]), x)",
        f"y = lax.fori_loop(1, {T}, lambda t, v: lax.dynamic_update_index_in_dim(v, v[:, t] + 0.3 * jnp.sin(lax.dynamic_index_in_dim(v, t - 1, 1, False)), t, 1), x)",
        f"y = jnp.einsum('ts,bsd->btd', jnp.tri({T}) / {T}, x)",
        f"y = jnp.tril(jnp.ones(({T}, {T}))) @ x / {T}",
        f"y = jnp.einsum('bts,bsd->btd', jnp.exp(jnp.cumsum(-0.1 * jnp.square(x[..., 0]), 1)[:, :, None] - jnp.cumsum(-0.1 * jnp.square(x[..., 0]), 1)[:, None]) * jnp.tri({T}), x)",
        f"y = x - jnp.cumsum(x, axis=1)[:, -1:] / {T}",
        "y = jnp.cumulative_sum(x, axis=1) / 4",
        "y = jnp.nancumsum(x, 1) / 4",
    )


@kind(POSITIONS)
def shifted(g: Draw) -> str:
    D, T, k = g.D, g.T, g.pick(1, 2, 3)
    return g.pick(
        f"y = jnp.roll(x, {g.pick(1, -1, 2)}, axis=1)",
        f"y = jnp.pad(x, ((0, 0), ({k}, 0), (0, 0)))[:, :{T}]",
        f"y = jnp.pad(x[:, {k}:], ((0, 0), (0, {k}), (0, 0)), mode='{g.pick('constant', 'edge', 'reflect', 'wrap', 'symmetric')}')",
        f"y = jnp.concatenate([jnp.zeros_like(x[:, :{k}]), x[:, :-{k}]], 1)",
        "y = jnp.concatenate([x[:, -1:], x[:, :-1]], axis=1)",
        f"y = lax.pad(x, 0.0, ((0, 0, 0), ({k}, -{k}, 0), (0, 0, 0)))",
        "y = lax.pad(x[:, ::2], 0.0, ((0, 0, 0), (0, 1, 1), (0, 0, 0)))",
        "y = x[:, ::-1]",
        "y = jnp.flip(x, axis=1)",
        "y = jnp.diff(x, axis=1, prepend=x[:, :1])",
        "y = jnp.gradient(x, axis=1)",
        f"y = jnp.where(jnp.arange({T})[:, None] == 0, {g.param(D)}, jnp.roll(x, 1, 1))",
        f"y = lax.dynamic_slice_in_dim(jnp.pad(x, ((0, 0), (2, 2), (0, 0))), {k}, {T}, axis=1)",
        f"y = lax.dynamic_update_slice(x, x[:, :2] * 0.5, (0, {k}, 0))",
        f"y = x.at[:, {k}:].add(0.5 * x[:, :-{k}])",
        f"y = x.at[:, 0].set({g.param(D)})",
        "y = x.at[:, ::2].multiply(0.3)",
        "y = jnp.repeat(x[:, ::2], 2, axis=1)",
        f"y = jnp.repeat(x.reshape(-1, {T // 2}, 2, {D}).mean(2), 2, axis=1)",
        f"y = jnp.tile(x[:, :{T // 2}], (1, 2, 1))",
        f"y = x.reshape(-1, {T // 2}, 2, {D}).swapaxes(1, 2).reshape(x.shape)",
        f"y = (x.reshape(-1, {T // 2}, 2 * {D}) @ {g.param(2 * D, 2 * D)}).reshape(x.shape)",
        f"y = x.reshape(x.shape[0], {D}, {T}).swapaxes(1, 2)",
        f"y = jnp.stack([x[:, 1::2], x[:, ::2]], 2).reshape(-1, {T}, {D})",
        f"y = (x.reshape(-1, {T * D}) @ {g.param(T * D, D)})[:, None] * x",
        f"y = jnp.insert(x, {k}, 0.5, axis=1)[:, :{T}]",
        f"y = jnp.delete(jnp.append(x, x[:, :1], axis=1), {k}, axis=1)",
        "y = jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1)",
        "y = jnp.concatenate([0.5 * v for v in jnp.array_split(x, 3, axis=1)], 1)",
    )


@kind(POSITIONS)
def convolved(g: Draw) -> str:
    D, T, k = g.D, g.T, g.pick(2, 3)
    w, deep, dims = g.param(k, D, D), g.param(k, 1, D), "dimension_numbers=('NWC', 'WIO', 'NWC')"
    return g.pick(
        f"y = lax.conv_general_dilated(x, {w}, (1,), 'SAME', {dims})",
        f"y = lax.conv_general_dilated(x, {w}, (1,), [({k - 1}, 0)], {dims})",
        f"y = lax.conv_general_dilated(x, {deep}, (1,), 'SAME', feature_group_count={D}, {dims})",
        f"y = lax.conv_general_dilated(x, {g.param(k, D // 2, D)}, (1,), 'SAME', feature_group_count=2, {dims})",
        f"y = lax.conv_general_dilated(x, {w}, (1,), [({2 * (k - 1)}, 0)], rhs_dilation=(2,), {dims})",
        f"y = jnp.repeat(lax.conv_general_dilated(x, {g.param(2, D, D)}, (2,), 'VALID', {dims}), 2, 1)",
        f"y = lax.conv_general_dilated(x[:, ::2], {g.param(2, D, D)}, (1,), [(1, 1)], lhs_dilation=(2,), {dims})",
        f"y = lax.conv_transpose(x, {w}, (1,), 'SAME', {dims})",
        f"y = lax.conv(x.swapaxes(1, 2), {g.param(D, D, k)}, (1,), 'SAME').swapaxes(1, 2)",
        f"y = sum(jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, :{T}] @ {w}[i] for i in range({k}))",
        f"y = sum({g.param(k, D)}[i] * jnp.roll(x, i, 1) for i in range({k}))",
        f"y = jax.vmap(lambda r: jax.vmap(lambda s, v: jnp.convolve(s, v, mode='same'), 1, 1)(r, {g.param(k, D)}))(x)",
        f"y = jax.vmap(jax.vmap(lambda s: jnp.convolve(s, {g.param(k)})[:{T}], 1, 1))(x)",
        f"y = jax.vmap(lambda r: jax.scipy.signal.convolve2d(r, {g.param(3, 3)}, mode='same'))(x)",
        "y = lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 1, 1), 'SAME') / 3",
        f"y = lax.reduce_window(x, -jnp.inf, lax.max, (1, {k}, 1), (1, 1, 1), [(0, 0), ({k - 1}, 0), (0, 0)])",
        "y = jnp.repeat(lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 2, 1), 'VALID'), 2, axis=1)",
        f"y = lax.conv_general_dilated_patches(x.swapaxes(1, 2), ({k},), (1,), 'SAME').swapaxes(1, 2) @ {g.param(k * D, D)}",
        f"y = lax.conv_general_dilated(x[..., None], {g.param(3, 3, 1, 2)}, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')).sum(-1)",
        f"y = jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * {g.param(T // 2 + 1, D)}, n={T}, axis=1)",
        "y = jnp.fft.fft(x, axis=1).real / 3",
        "y = jnp.fft.fft2(x, axes=(1, 2)).real / x.shape[1]",
        f"y = jnp.fft.ifft(jnp.fft.fft(x, axis=1) * jnp.fft.fft({g.param(T, D)}, axis=0), axis=1).real",
        "y = jnp.fft.fftshift(x, axes=1)",
    )


@kind(POSITIONS)
def mixed(g: Draw) -> str:
    """Learned mixtures and statistics of the positions."""
    D, T = g.D, g.T
    w = g.param(T, T)
    return g.pick(
        f"y = jnp.einsum('ts,bsd->btd', {w}, x)",
        f"y = {w} @ x",
        f"y = jnp.swapaxes(jnp.swapaxes(x, 1, 2) @ {w}, 1, 2)",
        f"y = jnp.tensordot({w}, x, axes=[[1], [1]]).swapaxes(0, 1)",
        f"y = jax.nn.softmax({w}, -1) @ x",
        f"y = jnp.einsum('ts,bsd,de->bte', jnp.tril({w}), x, {g.param(D, D)})",
        f"y = jnp.einsum('bsd,sdte->bte', x, {g.param(T, D, T, D)} / {D})",
        f"y = x + {g.param(T, D)}",
        f"y = x * {g.param(T, 1)}",
        "y = jnp.broadcast_to(x.mean(1, keepdims=True), x.shape)",
        "y = x - jnp.mean(x, axis=1)[:, None]",
        "y = x - x.max(axis=1, keepdims=True)",
        "y = x / (1 + jnp.linalg.norm(x, axis=1, keepdims=True))",
        f"y = x * x[:, -1:] + x[:, {T // 2}][:, None]",
        "y = x * jax.nn.logsumexp(x, 1, keepdims=True) / 3",
        "y = jnp.where(x == x.max(1, keepdims=True), x, 0.1 * x)",
        "m = b['mask'][..., None]\ny = x - (x * m).sum(1, keepdims=True) / m.sum(1, keepdims=True)",
        f"m = (jnp.arange({T}) < b['length'][:, None])[..., None]\ny = jnp.where(m, x, 0).sum(1, keepdims=True) / b['length'][:, None, None] * x",
        f"y = jax.nn.softmax(x, axis=1) * {T}",
        "y = x @ (x.mT @ x) / x.shape[1] / x.shape[2]",
        f"y = jnp.linalg.norm(x, axis=(1, 2))[:, None, None] * x / {T}",
        "y = x / (0.5 + x.std((1, 2), ddof=1)[:, None, None])",
        f"y = x - jnp.einsum('btd->bd', x)[:, None] / {T}",
        f"q = jax.vmap(lambda r: jnp.linalg.cholesky(r.T @ r / {T} + jnp.eye({D})))(x)\ny = x @ q",
        f"y = jax.vmap(lambda r: jnp.linalg.solve(r.T @ r / {T} + jnp.eye({D}), r.T).T)(x)",
        "y = jax.vmap(lambda r: r - jnp.cov(r.T)[0])(x)",
        f"y = jnp.einsum('btd,bsd->bts', x, x).sum(-1, keepdims=True) / {T * D} * {g.param(D)}",
    )


@kind(POSITIONS)
def ordered(g: Draw) -> str:
    """Sorting, choosing and looking up positions."""
    T, k = g.T, g.pick(1, 2, 3)
    return g.pick(
        "y = jnp.sort(x, axis=1)",
        "y = jnp.take_along_axis(x, jnp.argsort(x[..., 0], axis=1)[..., None], axis=1)",
        "y = jnp.take_along_axis(x, b['order'][..., None], 1)",
        "y = jax.vmap(lambda r, i: r[i])(x, b['order'])",
        "y = jax.vmap(lambda r, i: jnp.zeros_like(r).at[i].set(r))(x, b['order'])",
        "y = jax.vmap(lambda r, i: jnp.take(r, i, axis=0))(x, b['order'])",
        f"y = jnp.einsum('bst,btd->bsd', jax.nn.one_hot(b['order'], {T}), x)",
        "y = x[jnp.arange(x.shape[0])[:, None], b['order']]",
        "y = jnp.put_along_axis(x, b['order'][:, :1, None], 0.5, axis=1, inplace=False)",
        f"y = jnp.take(x, jnp.array({g.random.sample(range(T), T)}), axis=1)",
        f"y = x[:, jnp.array({g.random.choices(range(T), k=T)})]",
        f"v, i = lax.top_k(x.swapaxes(1, 2), {k})\ny = x * v.mean(-1)[:, None]",
        f"v, i = lax.top_k(x[..., 0], {k})\ny = jax.vmap(lambda r, i: r.at[i].multiply(0.5))(x, i)",
        "y = x * jax.nn.one_hot(jnp.argmax(x[..., 0], 1), x.shape[1])[..., None]",
        "y = x - jnp.take_along_axis(x, jnp.argmin(x, 1, keepdims=True), axis=1)",
        "y = x - jnp.median(x, axis=1, keepdims=True)",
        "y = x - jnp.quantile(x, 0.25, axis=1)[:, None]",
        "y = x - x[jnp.arange(x.shape[0]), b['length'] - 1][:, None]",
        "y = x - jnp.take_along_axis(x, (b['length'] - 1)[:, None, None], 1)",
        "y = x - jax.vmap(lambda r, n: lax.dynamic_index_in_dim(r, n - 1, keepdims=False))(x, b['length'])[:, None]",
        "y = jax.vmap(lambda r, n: jnp.roll(r, n, axis=0))(x, b['length'])",
        "y = jax.vmap(lambda r, n: lax.dynamic_slice_in_dim(jnp.concatenate([r, r]), n, r.shape[0]))(x, b['length'])",
        "y = jax.vmap(lambda r, n: lax.dynamic_update_slice(r, 0.1 * r[:1], (n - 1, 0)))(x, b['length'])",
        "s = lax.sort((x[..., 0], x[..., 1]), dimension=1, num_keys=1)[1]\ny = x * s[..., None]",
        "y = jnp.take_along_axis(x, jnp.lexsort((x[..., 1], x[..., 0]), axis=1)[..., None], 1)",
        f"y = jnp.where(jnp.isin(jnp.arange({T}), jnp.array([0, 2]))[:, None], x, 0.2 * x)",
    )


@kind(POSITIONS)
def segmented(g: Draw) -> str:
    """Sums over segments of a row."""
    D, T, table = g.D, g.T, g.param(4, g.D)
    return g.pick(
        "y = jax.vmap(lambda r, s: jax.ops.segment_sum(r, s, 4)[s])(x, b['segment']) / 3",
        "y = jax.vmap(lambda r, s: jax.ops.segment_max(r, s, 4)[s])(x, b['segment'])",
        "y = jax.vmap(lambda r, s: jnp.zeros((4, r.shape[1]), r.dtype).at[s].add(r)[s] / 3)(x, b['segment'])",
        "m = jax.nn.one_hot(b['segment'], 4)\ny = jnp.einsum('bts,bsd->btd', m, jnp.einsum('bts,btd->bsd', m, x)) / 3",
        "m = (b['segment'][:, :, None] == b['segment'][:, None]).astype(x.dtype)\ny = m @ x / m.sum(-1, keepdims=True)",
        f"y = x + {table}[b['segment']]",
        f"y = x * jnp.take({table}, b['segment'], axis=0)",
        f"y = x + jax.nn.one_hot(b['segment'], 4) @ {table}",
        f"y = jax.vmap(lambda r, s: r - (jnp.zeros((4, {D}), r.dtype).at[s].max(r) + {table})[s])(x, b['segment'])",
        f"c = jax.vmap(lambda s: jnp.bincount(s, length=4))(b['segment'])\ny = x * jnp.take_along_axis(c, b['segment'], 1)[..., None] / {T}",
        f"s = jnp.zeros((x.shape[0], 4, {D}), x.dtype).at[jnp.arange(x.shape[0])[:, None], b['segment']].add(x)\ny = x + (s.sum(1) @ {g.param(D, D)})[:, None] / {T}",
        "new = jnp.diff(b['segment'], axis=1, prepend=0) > 0\ny = x * jnp.cumsum(new, 1)[..., None] / 3",
        "i = b['segment'] + 4 * jnp.arange(x.shape[0])[:, None]\ny = jax.ops.segment_sum(x.reshape(-1, x.shape[2]), i.reshape(-1), 4 * x.shape[0])[i] / 3",
    )


@kind(POSITIONS)
def words(g: Draw) -> str:
    """Lookups of the batch's ids, and arithmetic on them."""
    V, D, table = g.V, g.D, g.param(g.V, g.D)
    ids = g.pick(
        "b['ids']", f"(b['ids'] * 7 + 3) % {V}", f"jnp.remainder(b['ids'] + 1, {V})", "jnp.bitwise_xor(b['ids'], 1)",
        "jnp.right_shift(b['ids'], 1)", f"jnp.minimum(b['ids'], {V // 2})", "jnp.where(b['mask'] > 0, b['ids'], 0)",
        f"jnp.clip(b['ids'] - b['labels'], 0, {V - 1})", f"lax.rem(b['ids'] * b['ids'], {V})",
        "jnp.roll(b['ids'], 1, axis=1)", "jnp.pad(b['ids'], ((0, 0), (1, 0)))[:, :-1]", "jnp.sort(b['ids'], 1)",
        "jnp.gcd(b['ids'], 6)", "jnp.floor_divide(b['ids'], 2)", "b['ids'].astype('uint8')",
    )  # fmt: skip
    return g.pick(
        f"y = x + {table}[{ids}]",
        f"y = x + jnp.take({table}, {ids}, axis=0)",
        f"y = x * jnp.take({table}, {ids}, axis=0, mode='clip')",
        f"y = x + jnp.take({g.param(D, V)}, {ids}, axis=1).transpose(1, 2, 0)",
        f"y = x + jax.nn.one_hot({ids}, {V}) @ {table}",
        f"y = x + ({ids}[..., None] == jnp.arange({V})).astype(x.dtype) @ {table}",
        f"y = x + jax.vmap(lambda i: {table}[i])({ids})",
        f"y = x + jax.vmap(jax.vmap(lambda i: lax.dynamic_index_in_dim({table}, i, keepdims=False)))({ids})",
        f"y = x + {table}.at[{ids}].get(mode='fill', fill_value=0)",
        f"y = x * ({ids} % 2)[..., None] + {table}[0]",
        f"y = x + lax.map(lambda i: {table}[i], {ids})",
        f"y = x + jnp.choose({ids} % 2, [{g.param()}, 0.3], mode='clip')[..., None]",
        f"y = x + {g.param(V)}[{ids}][..., None]",
        f"i = {ids}\ny = x + jnp.concatenate([{table}, {g.param(V, D)}])[i + {V} * (i % 2)]",
        f"y = x + (jnp.eye({V})[{ids}] @ {table})",
    )


@kind(POSITIONS)
def searched(g: Draw) -> str:
    """Loops that end by what they find, on values without gradients."""
    w = g.param(g.D, g.D)
    return g.pick(
        f"f = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, 0.5 * jnp.tanh(s[1] @ lax.stop_gradient({w}))), (0, lax.stop_gradient(x)))[1]\ny = x + f",
        f"f = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, 0.5 * s[1]), (0, lax.stop_gradient(x)))[1]\ny = x @ {w} * f",
        f"f = jax.vmap(lambda r: lax.while_loop(lambda v: jnp.abs(v).max() > 0.1, lambda v: 0.5 * v, r))(lax.stop_gradient(x))\ny = x * f + x @ {w}",
        f"f = lax.fori_loop(0, 3, lambda i, v: 0.5 * jnp.sin(v) + v / (i + 2), x)\ny = f @ {w}",
        f"y = lax.scan(lambda v, i: (0.5 * jnp.sin(v @ {w}) + i * v, None), x, jnp.arange(3) / 3)[0]",
        f"y = lax.scan(lambda v, _: (jnp.tanh(v @ {w}), v.mean(1)), x, length=2)[1].sum(0)[:, None] + x",
        f"n = lax.while_loop(lambda s: s < 5, lambda s: s * 2, 1)\ny = x @ {w} / n",
    )
