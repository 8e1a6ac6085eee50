"""Blocks that work on the features of each position: products, norms, gates, functions, dtypes, matrices, experts."""

from __future__ import annotations

from .programs import Draw
from .registry import FEATURES, kind


def product(g: Draw, x: str, n: int, m: int) -> str:
    """An expression: `x` [rows, T, n] by a new parameter, [rows, T, m]."""
    if g.chance(0.45):
        w = g.param(n, m)
        b, t, i, o = g.random.sample("abcdefghijkl", 4)
        return g.pick(
            f"{x} @ {w}",
            f"jnp.dot({x}, {w})",
            f"jnp.matmul({x}, {w})",
            f'jnp.einsum("{b}{t}{i},{i}{o}->{b}{t}{o}", {x}, {w})',
            f'jnp.einsum("{i}{o},{b}{t}{i}->{b}{t}{o}", {w}, {x})',
            f'jnp.einsum("...{i},{i}{o}->...{o}", {x}, {w})',
            f"jnp.tensordot({x}, {w}, axes=1)",
            f"jnp.tensordot({x}, {w}, axes=[[2], [0]])",
            f"lax.dot_general({x}, {w}, (((2,), (0,)), ((), ())))",
            f"jax.vmap(lambda r: r @ {w})({x})",
            f"jax.vmap(jax.vmap(lambda r: r @ {w}))({x})",
            f"jax.vmap(lambda r: r @ {w}, in_axes=1, out_axes=1)({x})",
            f"({x}[..., None] * {w}).sum(-2)",
            f"({x}.reshape(-1, {n}) @ {w}).reshape(-1, {g.T}, {m})",
            f"({x}.reshape({x}.shape[0] * {g.T}, {n}) @ {w}).reshape({x}.shape[0], {g.T}, {m})",
            f"jnp.swapaxes(jnp.swapaxes({x}, 0, 1) @ {w}, 0, 1)",
            f"lax.map(lambda r: r @ {w}, {x})",
            f"jnp.vecmat({x}, {w})",
            f"sum({x}[..., k, None] * {w}[k] for k in range({n}))",
            f"lax.batch_matmul({x}, jnp.broadcast_to({w}, ({x}.shape[0], {n}, {m})))",
            f"jnp.apply_along_axis(lambda r: r @ {w}, 2, {x})",
            f"jnp.linalg.multi_dot([{x}.reshape(-1, {n}), {w}, jnp.eye({m})]).reshape({x}.shape[0], {g.T}, {m})",
            f"lax.conv_general_dilated({x}, {w}[None], (1,), 'VALID', dimension_numbers=('NWC', 'WIO', 'NWC'))",
        )
    if g.chance(0.5):
        w = g.param(m, n)
        return g.pick(
            f"{x} @ {w}.T",
            f"jnp.inner({x}, {w})",
            f'jnp.einsum("bti,oi->bto", {x}, {w})',
            f"lax.dot_general({x}, {w}, (((2,), (1,)), ((), ())))",
            f"jnp.moveaxis(jnp.tensordot({w}, {x}, axes=[[1], [2]]), 0, -1)",
            f"jnp.transpose({w} @ jnp.transpose({x}, (0, 2, 1)), (0, 2, 1))",
            f"lax.dot_general({w}, {x}, (((1,), (2,)), ((), ()))).transpose(1, 2, 0)",
            f"jnp.matvec({w}, {x})",
            f"jnp.vecdot({x}[..., None, :], {w})",
            f"jnp.stack([jnp.vecdot({x}, {w}[k]) for k in range({m})], -1)",
            f"jnp.concatenate([{x} @ {w}[:{m // 2}].T, {x} @ {w}[{m // 2}:].T], -1)",
            f"jax.vmap(lambda v: {x} @ v, out_axes=-1)({w})",
            f"jnp.einsum('bit,oi->bto', {x}.mT, {w})",
            f"lax.scan(lambda c, v: (c, {x} @ v), 0.0, {w})[1].transpose(1, 2, 0)",
        )
    h = 2 if n % 2 == 0 and m % 2 == 0 else 1
    if g.chance(0.5):
        w = g.param(n, h, m // h)
        return g.pick(
            f'jnp.einsum("bti,ihd->bthd", {x}, {w}).reshape(-1, {g.T}, {m})',
            f'jnp.einsum("bti,ihd->bthd", {x}, {w}).reshape({x}.shape[0], {g.T}, {m})',
            f"jnp.tensordot({x}, {w}, 1).reshape(*{x}.shape[:2], -1)",
            f"{x} @ {w}.reshape({n}, {m})",
            f"lax.collapse(lax.dot_general({x}, {w}, (((2,), (0,)), ((), ()))), 2)",
            f'jnp.concatenate([jnp.einsum("bti,id->btd", {x}, {w}[:, k]) for k in range({h})], -1)',
        )
    w = g.param(h, n // h, m)
    return g.pick(
        f'jnp.einsum("bthi,hio->bto", {x}.reshape(-1, {g.T}, {h}, {n // h}), {w})',
        f"jnp.tensordot({x}.reshape({x}.shape[0], {g.T}, {h}, {n // h}), {w}, 2)",
        f"lax.dot_general(jnp.reshape({x}, (-1, {g.T}, {h}, {n // h})), {w}, (((2, 3), (0, 1)), ((), ())))",
        f'sum(jnp.einsum("bti,io->bto", k, v) for k, v in zip(jnp.split({x}, {h}, -1), {w}))',
        f"sum(k @ v for k, v in zip(jnp.unstack({x}.reshape(-1, {g.T}, {h}, {n // h}), axis=2), jnp.unstack({w})))",
    )


def smooth(g: Draw, x: str) -> str:
    """An expression: a function of each element, finite for all."""
    small, positive = f"0.9 * jnp.tanh({x})", f"(0.5 + jnp.square({x}))"
    plain = [
        f"jnp.tanh({x})", f"jnp.sin({x})", f"lax.cos({x})", f"jnp.arctan({x})", f"jnp.arcsinh({x})",
        f"jnp.expm1({small})", f"jnp.exp(-jnp.square({x}))", f"jnp.log1p(jnp.square({x}))",
        f"jnp.square({small})", f"jnp.sqrt({positive})", f"jnp.cbrt({positive})", f"lax.rsqrt({positive})",
        f"jax.scipy.special.erf({x})", f"lax.erfc({x})", f"lax.logistic({x})", f"jnp.sinh({small})",
        f"jnp.cosh({small})", f"jnp.tan({small})", f"jnp.sinc({x})", f"lax.lgamma({positive})",
        f"lax.digamma({positive})", f"lax.bessel_i0e({x})", f"lax.bessel_i1e({x})", f"jnp.arccos({small})",
        f"jnp.arcsin({small})", f"jnp.arctanh({small})", f"jnp.arccosh(1 + {positive})", f"jnp.exp2({small})",
        f"jnp.log2({positive})", f"jnp.log10({positive})", f"lax.erf_inv({small})", f"jnp.reciprocal({positive})",
        f"jnp.deg2rad({x}) + jnp.rad2deg(0.01 * {x})",
    ]  # fmt: skip
    nets = "relu gelu silu softplus elu celu selu mish hard_tanh hard_sigmoid hard_swish leaky_relu log_sigmoid relu6 "
    nets += "soft_sign sparse_plus sparse_sigmoid squareplus sigmoid swish hard_silu identity"
    two = [
        f"jnp.logaddexp({x}, 0.3)",
        f"jnp.logaddexp2({x}, jnp.flip({x}, -1))",
        f"jnp.arctan2({x}, {positive})",
        f"jnp.hypot({x}, 1.0)",
        f"jnp.power({positive}, 0.7)",
        f"{small} ** 3",
        f"lax.integer_pow({small}, 3)",
        f"jnp.float_power({positive}, {small})",
        f"jnp.maximum({x}, 0.1 * {x})",
        f"jnp.minimum({x}, {x}[..., ::-1])",
        f"jnp.clip({x}, -0.7, 0.8)",
        f"lax.clamp(-0.5, {x}, 0.9)",
        f"jnp.where({x} > 0, {x}, 0.2 * jnp.sin({x}))",
        f"jnp.select([{x} > 1, {x} > 0], [jnp.log1p(jnp.abs({x})), {x} ** 2], -0.1 * {x})",
        f"jnp.piecewise({x}, [{x} < 0, {x} >= 0], [lambda v: 0.1 * v, lambda v: v / (1 + v)])",
        f"jnp.copysign({positive}, jnp.cos({x}))",
        f"jnp.fmod({x}, 0.7)",
        f"jnp.remainder({x}, 0.9)",
        f"jnp.heaviside({x}, 0.5) * {x}",
        f"jnp.nan_to_num(jnp.sqrt(jnp.abs({x}) + 0.1))",
        f"jnp.interp({x}, jnp.linspace(-2, 2, 5), jnp.array([-1.0, 0.0, 2.0, 1.0, 0.5]))",
        f"jnp.polyval(jnp.array([0.1, -0.2, 0.3]), {small})",
        f"lax.select_n({x} > 0, {x}, jnp.exp(-jnp.abs({x})))",
        f"lax.igamma({positive}, {positive} + 0.1 * jnp.cos({x}))"
        if g.chance(0.2)
        else f"lax.zeta(1.5 + lax.stop_gradient({positive}), 1.5) * {x}",
        f"lax.reduce_precision({x}, 8, 18)",
        f"jax.nn.logmeanexp(jnp.stack([{x}, 0.5 * {x}]), axis=0)",
        f"lax.polygamma(1.0, {positive})",
        f"jax.scipy.special.xlogy({positive}, {positive})",
        f"jax.scipy.special.entr(jax.nn.sigmoid({x}))",
        f"jax.scipy.stats.norm.logpdf({x})",
        f"jax.scipy.special.log_ndtr({x})",
        f"jnp.abs({x}) * jnp.sign({x})",
        f"jnp.positive(jnp.negative({x}))",
        f"jnp.subtract({x}, jnp.floor({x}))",
        f"{x} - lax.stop_gradient(jnp.round({x}, 1))",
        f"jnp.ldexp({x}, -1)",
        f"jnp.true_divide({x}, 2 + jnp.sin({x}))",
        f"jnp.divmod({x}, 0.8)[1]",
        f"jnp.modf({x})[0]",
        f"jnp.fmax({x}, jnp.roll({x}, 1, -1))",
    ]
    return g.pick(
        g.pick(*plain),
        f"jax.nn.{g.pick(*nets.split())}({x})",
        f"jax.nn.gelu({x}, approximate=False)",
        g.pick(*two),
    )


@kind(FEATURES)
def dense(g: Draw) -> str:
    bias = f" + {g.param(g.D)}" if g.chance(0.4) else ""
    return f"y = {product(g, 'x', g.D, g.D)}{bias}"


@kind(FEATURES)
def feed_forward(g: Draw) -> str:
    width = g.pick(2, 4) * g.D
    return f"h = {product(g, 'x', g.D, width)}\nh = {smooth(g, 'h')}\ny = {product(g, 'h', width, g.D)}"


@kind(FEATURES)
def gated(g: Draw) -> str:
    D, T = g.D, g.T
    halves = g.pick(
        "u, v = jnp.split(h, 2, axis=-1)",
        f"u, v = h[..., :{D}], h[..., {D}:]",
        "u, v = h[..., ::2], h[..., 1::2]",
        f"u, v = jnp.unstack(h.reshape(-1, {T}, 2, {D}), axis=2)",
        f"u, v = jnp.moveaxis(h.reshape(h.shape[0], {T}, {D}, 2), -1, 0)",
        "u, v = jnp.array_split(h, 2, 2)",
        f"u, v = (lax.slice_in_dim(h, k, k + {D}, axis=2) for k in (0, {D}))",
        f"u, v = (lax.dynamic_slice_in_dim(h, k, {D}, 2) for k in (0, {D}))",
        f"u, v = jnp.take(h, jnp.arange({D}), axis=-1), jnp.take(h, jnp.arange({D}, {2 * D}), -1)",
        f"u, v = (lax.slice(h, (0, 0, k), (h.shape[0], {T}, {2 * D}), (1, 1, 2)) for k in (0, 1))",
    )
    gate = g.pick(
        "jax.nn.sigmoid(u) * v", "jax.nn.silu(u) * v", "u * jax.nn.gelu(v)", "jax.nn.glu(jnp.concatenate([u, v], -1))"
    )
    return f"h = {product(g, 'x', D, 2 * D)}\n{halves}\ny = {product(g, f'({gate})', D, D)}"


@kind(FEATURES)
def normalised(g: Draw) -> str:
    D, T = g.D, g.T
    how = g.pick(
        "y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-2)",
        "y = (x - jnp.mean(x, 2, keepdims=True)) * lax.rsqrt(jnp.var(x, 2, keepdims=True) + 1e-2)",
        "m = x.mean(-1)[..., None]\ny = (x - m) * lax.rsqrt(jnp.square(x).mean(-1)[..., None] - m**2 + 1e-2)",
        "y = jax.nn.standardize(x, axis=-1, epsilon=1e-2)",
        "y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-2)",
        "y = x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 0.1)",
        "y = x / jnp.sqrt(jnp.einsum('btd,btd->bt', x, x) + 0.1)[..., None]",
        f"v = x.reshape(-1, {T}, 2, {D // 2})\ny = ((v - v.mean(3, keepdims=True)) / (v.std(3, keepdims=True) + 0.1)).reshape(x.shape)",
        f"y = x / (1e-2 + x @ jnp.ones(({D}, {D})) / {D}) ** 2"
        if g.chance(0.05)
        else "y = x / (0.2 + jnp.abs(x).max(-1, keepdims=True))",
        "y = x - jnp.median(x, axis=-1, keepdims=True)",
        "y = x - jnp.average(x, axis=-1, weights=jnp.arange(x.shape[-1]) + 1.0, keepdims=True)",
        "y = x / (1 + jnp.vecdot(x, x)[:, :, None])",
        "y = x - lax.reduce(x, 0.0, lax.add, (2,))[..., None] / x.shape[2]",
        "y = x / (0.5 + jnp.ptp(x, axis=-1, keepdims=True))",
        "y = (x - x.mean((1, 2), keepdims=True)) / (x.std((1, 2), keepdims=True) + 0.1)",
        "y = (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 0.1)",
        "y = x - jnp.nanmean(x, -1, keepdims=True)",
        "y = x / (0.3 + jnp.nanstd(x, axis=2, keepdims=True))",
        "y = jax.nn.softmax(x, -1)",
        "y = jax.nn.log_softmax(x)",
        "y = x - jax.nn.logsumexp(x, axis=-1, keepdims=True)",
        "y = jnp.cumsum(jax.nn.softmax(x), -1)",
        "y = x / (0.2 + jnp.linalg.vector_norm(x, axis=-1, keepdims=True, ord=3))",
    )
    scale = f"y = y * (1 + {g.param(D)})" if g.chance(0.6) else ""
    return f"{how}\n{scale}" + (f"\ny = y + {g.param(D)}" if g.chance(0.3) else "")


@kind(FEATURES)
def elementwise(g: Draw) -> str:
    scale = g.param(*g.pick((g.D,), (1, g.D), (1, 1, g.D), (g.T, g.D), (g.T, 1), ()))
    return f"y = {smooth(g, f'({scale} * x)')} * {smooth(g, 'x')}"


@kind(FEATURES)
def permuted(g: Draw) -> str:
    """Features in another order, repeated, padded, cut, put into groups."""
    D, T, h = g.D, g.T, 2
    order = g.random.sample(range(D), D)
    return g.pick(
        f"y = x[..., jnp.array({order})]",
        f"y = jnp.take(x, jnp.array({order}), axis=-1)",
        f"y = jnp.take(x, np.array({order}), axis=2, mode='clip')",
        "y = x[..., ::-1]",
        "y = jnp.flip(x, 2)",
        "y = lax.rev(x, (2,))",
        f"y = jnp.roll(x, {g.pick(1, 2, -3)}, axis=-1)",
        f"y = x.reshape(-1, {T}, {h}, {D // h}).swapaxes(2, 3).reshape(-1, {T}, {D})",
        f"y = jnp.concatenate([x[..., {D // 2}:], x[..., :{D // 2}]], axis=-1)",
        "y = jnp.concatenate([-x[..., 1::2], x[..., ::2]], -1)",
        "y = jnp.stack([x[..., ::2], -x[..., 1::2]], -1).reshape(x.shape)",
        "y = jnp.repeat(x[..., ::2], 2, axis=-1)",
        f"y = jnp.tile(x[..., :{D // 2}], (1, 1, 2))",
        f"y = jnp.pad(x[..., 1:-1], ((0, 0), (0, 0), (1, 1)), mode='{g.pick('constant', 'edge', 'wrap', 'reflect')}')",
        "y = lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 0), (-1, 1, 0)))",
        f"y = lax.pad(x[..., :{D // 2}], 0.5, ((0, 0, 0), (0, 0, 0), (1, 0, 1)))",
        "y = x.at[..., ::2].set(0.3 * x[..., 1::2])",
        "y = x.at[..., 0].add(x[..., 1]).at[:, :, 2].mul(0.5)",
        f"y = jnp.insert(x, 1, 0.3, axis=2)[..., :{D}]",
        "y = jnp.delete(jnp.concatenate([x, x[..., :1]], 2), 2, axis=2)",
        "y = jnp.append(x[..., 1:], x[..., :1] ** 2, axis=-1)",
        "y = jnp.stack(jnp.unstack(x, axis=-1)[::-1], -1)",
        f"y = lax.concatenate([lax.slice_in_dim(x, 1, {D}, axis=2), lax.slice_in_dim(x, 0, 1, axis=2)], 2)",
        f"y = jnp.rot90(x.reshape(-1, {T}, {h}, {D // h}), axes=(2, 3)).reshape(x.shape)",
        f"y = jnp.kron(x[..., :{D // 2}].reshape(-1, {D // 2}), jnp.ones(2)).reshape(x.shape)"
        if g.chance(0.2)
        else "y = -x",
        f"y = jnp.swapaxes(jnp.broadcast_to(x.mean(-1), ({D}, *x.shape[:2])), 0, 1).swapaxes(1, 2)",
        "y = lax.dynamic_update_slice_in_dim(x, 0.5 * x[..., :2], 3, axis=2)",
        "y = lax.dynamic_update_index_in_dim(x, x[..., 0] ** 2, 1, axis=2)",
        "y = jnp.diff(x, axis=-1, append=x[..., :1])",
        "y = jnp.gradient(x, axis=2)",
        f"y = jnp.matrix_transpose(x.reshape(-1, {T}, {D // h}, {h})).reshape(x.shape)",
        "y = jnp.atleast_3d(x[..., 0]) * x",
        f"y = jnp.dstack([x[..., {D // 2}:], x[..., :{D // 2}]])",
        f"y = jnp.triu(x.reshape(-1, {T}, {h}, {D // h})).reshape(x.shape)",
        "y = jnp.concatenate([jnp.trapezoid(x, axis=-1)[..., None], x[..., 1:]], -1)",
    )


@kind(FEATURES)
def over_features(g: Draw) -> str:
    """Sorting, searching, accumulating, transforming features of one position."""
    D, k = g.D, g.pick(1, 2, 3)
    return g.pick(
        "y = jnp.sort(x, -1)",
        "y = -jnp.sort(-x, axis=2)",
        "y = jnp.take_along_axis(x, jnp.argsort(x, -1), -1)",
        "y = lax.sort_key_val(x, x * 0.5, dimension=2)[1]",
        f"v, i = lax.top_k(x, {k})\ny = jnp.zeros_like(x) + (v * (i + 1.0)).sum(-1, keepdims=True) / {D}",
        f"v, i = lax.top_k(x, {k})\ny = (jax.nn.one_hot(i, {D}) * v[..., None]).sum(-2)",
        f"y = jnp.where(x >= lax.top_k(x, {k})[0][..., -1:], x, 0.0)",
        f"y = x - lax.approx_max_k(x, {k})[0].mean(-1, keepdims=True)",
        f"y = x * jax.nn.one_hot(x.argmax(-1), {D})",
        "y = jnp.cumsum(x, -1) / 3",
        "y = jnp.cumprod(1 + 0.1 * jnp.tanh(x), axis=-1)",
        "y = lax.cummax(x, axis=2)",
        "y = lax.cummin(x, axis=2, reverse=True)",
        "y = lax.cumlogsumexp(x, axis=2)",
        "y = lax.associative_scan(jnp.add, x, axis=2) / 3",
        "y = jnp.fft.fft(x, axis=-1).real / 3",
        f"y = jnp.fft.irfft(jnp.fft.rfft(x, axis=-1) * {g.param(D // 2 + 1)}, n={D}, axis=-1)",
        "y = jnp.fft.ifft(jnp.fft.fft(x) * jnp.fft.fft(jnp.sin(x))).real",
        "y = jnp.concatenate([x.max(-1, keepdims=True), x[..., 1:]], -1) - x.min(-1, keepdims=True)",
        "y = x * (x.argmin(-1)[..., None] + 1.0) / x.shape[-1]",
        "y = x - jnp.quantile(x, 0.3, axis=-1, keepdims=True)",
        "y = x - jnp.percentile(x, 40, axis=2)[..., None]",
        "y = x / (0.5 + jnp.prod(jnp.abs(jnp.cos(x)) + 0.3, -1, keepdims=True))",
        "y = jnp.where(jnp.any(x > 1, -1, keepdims=True), x, -x)",
        "y = jnp.where(jnp.all(x > -1.0, axis=2, keepdims=True), x, 0.5 * x)",
        "y = x * jnp.count_nonzero(x > 0, axis=-1, keepdims=True) / x.shape[-1]",
        "y = jnp.partition(x, 2, axis=-1)",
        "y = jnp.outer(x, jnp.arange(1.0, 3.0)).reshape(*x.shape, 2).mean(-1)",
        "y = jnp.searchsorted(jnp.linspace(-2, 2, 7), lax.stop_gradient(x)) / 7 * x",
        "y = jnp.digitize(lax.stop_gradient(x), jnp.array([-1.0, 0.0, 1.0])) * x / 3",
        f"y = {g.param(4)}[jnp.digitize(x, jnp.array([-1.0, 0.0, 1.0]))]",
        "y = jnp.vectorize(lambda v: v - jnp.sort(v), signature='(d)->(d)')(x)",
        "y = jnp.ediff1d(jnp.arange(3.0))[0] * x",
        "y = jnp.einsum('btd,bte->btde', x, x).diagonal(axis1=2, axis2=3)",
        f"y = jnp.einsum('bti,btj->bt', x, jnp.cos(x))[..., None] * x / {D}",
        f"y = jnp.trace(x[..., None] * x[..., None, :], axis1=2, axis2=3)[..., None] * x / {D}",
    )


@kind(FEATURES)
def matrices(g: Draw) -> str:
    """Linear algebra of small matrices: of each position, or of parameters."""
    D, w = g.D, g.param(g.D, g.D)
    gram = f"({w} @ {w}.T / {D} + jnp.eye({D}))"
    own = f"(0.1 * jnp.einsum('bti,btj->btij', jnp.sin(x), jnp.sin(x)) + jnp.eye({D}))"
    return g.pick(
        f"y = jnp.linalg.solve({gram}, x.swapaxes(1, 2)).swapaxes(1, 2)",
        f"y = x @ jnp.linalg.inv({gram})",
        f"y = x @ jnp.linalg.cholesky({gram})",
        f"y = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky({gram}), x.reshape(-1, {D}).T, lower=True).T.reshape(x.shape)",
        f"y = jax.vmap(jax.vmap(lambda v: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky({gram}), True), v)))(x)",
        f"y = x @ jnp.linalg.matrix_power({w} / 3, 3)",
        f"y = x @ jax.scipy.linalg.expm(0.1 * {w})",
        f"y = jnp.linalg.solve({own}, (x @ {w})[..., None])[..., 0]",
        f"y = x * jnp.linalg.det({own})[..., None] @ {w}",
        f"y = x * jnp.linalg.slogdet({own})[1][..., None] @ {w}",
        f"y = jnp.einsum('btij,btj->bti', jnp.linalg.cholesky({own}), x @ {w})",
        f"y = x @ jnp.linalg.qr({w} + 2 * jnp.eye({D}))[0]",
        f"y = x * jnp.linalg.eigvalsh({gram})",
        f"y = x @ ({w} / jnp.linalg.norm({w}))",
        f"y = x @ ({w} / (jnp.linalg.norm({w}, axis=0, keepdims=True) + 0.1))",
        f"y = x @ ({w} / (jnp.linalg.svdvals({gram})[0]))",
        f"y = lax.linalg.triangular_solve(jnp.tril({w}) + 3 * jnp.eye({D}), x.reshape(-1, {D}), left_side=False, lower=True).reshape(x.shape)",
        f"y = lax.map(lambda r: jnp.linalg.solve({gram} + jnp.outer(r[0], r[0]), r.T).T, x)",
        f"y = x @ jnp.tril({w}) + x @ jnp.triu({w}, 1)",
        f"y = x @ jnp.diag({w}[0]) + jnp.diagonal({w})",
        f"y = x @ jnp.block([[{w}[: {D // 2}], ], [jnp.flip({w}[{D // 2} :])]])",
        f"y = x @ jnp.where(jnp.tri({D}), {w}, 0.0)",
        f"y = x @ jax.scipy.linalg.block_diag({w}[:{D // 2}, :{D // 2}], {w}[{D // 2}:, {D // 2}:])",
        f"y = jax.vmap(lambda r: r @ {w} + jax.scipy.stats.multivariate_normal.logpdf(r, jnp.zeros({D}), {gram})[:, None] / 30)(x)",
    )


@kind(FEATURES)
def cast(g: Draw) -> str:
    D = g.D
    return g.pick(
        f"y = x.astype(jnp.bfloat16).astype(x.dtype) @ {g.param(D, D)}"
        if g.chance(0.3)
        else f"y = (x.astype(complex) * (1 + 2j)).real @ {g.param(D, D)}",
        f"y = jnp.abs(lax.complex(x, x @ {g.param(D, D)}) + 0.1)",
        f"c = lax.complex(x[..., ::2], x[..., 1::2]) * jnp.exp(1j * {g.param(D // 2)})\ny = jnp.concatenate([c.real, c.imag], -1)",
        f"c = lax.complex(jnp.sin(x), jnp.cos(x))\ny = jnp.imag(c * jnp.conj(jnp.roll(c, 1, -1))) * {g.param(D)}",
        "y = jnp.angle(lax.complex(1.5 + jnp.tanh(x), x))",
        f"y = (x + lax.stop_gradient(jnp.round(x) - x)) @ {g.param(D, D)}",
        f"y = (x + lax.stop_gradient((x > 0).astype(x.dtype) - x)) * {g.param(D)}",
        f"y = jnp.where((lax.stop_gradient(x) * 8).astype(int) % 2 == 0, x, {g.param(D)})",
        f"y = ((x > 0) ^ (x > 0.5)) * x + (x > 0).astype('int8').sum(-1, keepdims=True) / {D}",
        "y = x * (jnp.bitwise_and((lax.stop_gradient(x) * 9).astype(jnp.int32), 3) / 3)",
        "y = x * lax.population_count((jnp.abs(x) * 50).astype(jnp.uint32)).astype(x.dtype) / 5",
        "y = x * jnp.right_shift((jnp.abs(x) * 50).astype(jnp.uint8), 2) / 8",
        f"y = jnp.asarray(x, 'float32') @ {g.param(D, D)}",
        "y = jnp.array(x, copy=True) - jnp.zeros_like(x) + jnp.full_like(x, 0.2)",
        "y = x * jnp.isfinite(x) + jnp.isnan(x)",
        "y = x * jnp.signbit(x) + jnp.logical_and(x > 0, x < 1)",
        "y = x * (1 - lax.clz((jnp.abs(x) * 99).astype(jnp.int32)) / 32)",
        f"y = x @ lax.optimization_barrier({g.param(D, D)})",
        f"y = jax.nn.identity(x) * jnp.float32({g.param()})",
        "y = x * lax.nextafter(jnp.float32(1), jnp.float32(2)).astype(x.dtype)",
    )


@kind(FEATURES)
def rule_of_its_own(g: Draw) -> str:
    """Functions with custom rules of differentiation, and derivatives inside a loss."""
    f, w = g.name("f"), g.param(g.D, g.D)
    return g.pick(
        f"""
{f} = jax.custom_vjp(lambda v: v)
{f}.defvjp(lambda v: (v, None), lambda _, t: (jnp.clip(t, -0.01, 0.01),))
y = {f}(x @ {w})""",
        f"""
{f} = jax.custom_vjp(lambda v, w: v @ w)
{f}.defvjp(lambda v, w: (v @ w, (v, w)), lambda r, t: (t @ r[1].T, jnp.einsum("btd,bte->de", r[0], t)))
y = {f}(x, {w})""",
        f"""
{f} = jax.custom_vjp(lambda v: jnp.sign(v))
{f}.defvjp(lambda v: (jnp.sign(v), v), lambda v, t: (t * (jnp.abs(v) < 1),))
y = {f}(x @ {w})""",
        f"""
@jax.custom_vjp
def {f}(v, w):
    return jax.nn.softmax(v @ w, -1)
def {f}_forward(v, w):
    out = {f}(v, w)
    return out, (v, w, out)
def {f}_backward(kept, t):
    v, w, out = kept
    inside = out * (t - (t * out).sum(-1, keepdims=True))
    return inside @ w.T, jnp.tensordot(v, inside, axes=[[0, 1], [0, 1]])
{f}.defvjp({f}_forward, {f}_backward)
y = {f}(x, {w})""",
        f"""
@jax.custom_jvp
def {f}(v):
    return jnp.log1p(jnp.exp(v))
{f}.defjvps(lambda t, out, v: t * jax.nn.sigmoid(v))
y = {f}(x @ {w})""",
        f"""
{f} = jax.custom_jvp(lambda v, w: jnp.sin(v) @ w)
{f}.defjvp(lambda values, t: ({f}(*values), (jnp.cos(values[0]) * t[0]) @ values[1] + jnp.sin(values[0]) @ t[1]))
y = {f}(x, {w})""",
        f"y = jax.jvp(lambda v: jnp.tanh(v @ {w}), (x,), (jnp.cos(x),))[1]",
        f"y = jax.grad(lambda v: jnp.sum(jnp.sin(v @ {w})))(x)",
        f"y = jax.vjp(lambda v: jnp.tanh(v @ {w}), x)[1](jnp.sin(x))[0]",
        f"y = jax.linearize(lambda v: jnp.tanh(v @ {w}), x)[1](jnp.ones_like(x))",
        f"y = jax.vmap(jax.vmap(jax.grad(lambda v: jax.nn.logsumexp(v @ {w}))))(x)",
        f"y = jax.vmap(jax.vmap(jax.jacfwd(lambda v: jnp.tanh(v @ {w}))))(x).sum(-1)",
        f"y = jax.vmap(jax.jacrev(lambda v: jnp.sin(v @ {w}).sum()))(x)",
        f"y = jax.checkpoint(lambda v: jnp.sin(jnp.cos(v @ {w})) @ {w})(x)",
        f"y = jax.checkpoint(lambda v: jnp.tanh(v @ {w}) @ {w}.T, policy=jax.checkpoint_policies.dots_saveable)(x)",
        f"y = jax.jit(lambda v, w: jnp.tanh(v @ w))(x, {w})",
        f"y = jax.jit(lambda v: jnp.tanh(v @ {w}), inline=True)(x)",
        f"y = jax.hessian(lambda s: jnp.tanh(s * x @ {w}))(1.0)"
        if g.chance(0.3)
        else f"y = jax.jvp(jax.grad(lambda v: jnp.sin(v @ {w}).sum()), (x,), (x,))[1]",
        f"y = lax.custom_root(lambda v: v + 0.3 * jnp.tanh(v) - x @ {w}, x, lambda f, v: lax.fori_loop(0, 20, lambda i, v: v - 0.7 * f(v), v), lambda f, t: t / (f(jnp.ones_like(t))))",
    )


@kind(FEATURES)
def experts(g: Draw) -> str:
    """Mixtures of experts, as people write them by hand."""
    D, T, E, F = g.D, g.T, 4, g.pick(4, g.D)
    router, up, down = g.param(D, E), g.param(E, D, F), g.param(E, F, D)
    weigh = f"gates = jax.nn.softmax(2 * x @ {router}, -1)"
    best = "i = jnp.argmax(gates, -1)\ngate = jnp.take_along_axis(gates, i[..., None], -1)"
    two = "v, i = lax.top_k(gates, 2)\nv = v / v.sum(-1, keepdims=True)"
    return g.pick(
        f"{weigh}\nh = jax.nn.relu(jnp.einsum('btd,edf->btef', x, {up}))\ny = jnp.einsum('btef,efd,bte->btd', h, {down}, gates)",
        f"{weigh}\ny = sum(gates[..., k, None] * (jax.nn.silu(x @ {up}[k]) @ {down}[k]) for k in range({E}))",
        f"{weigh}\n{best}\nm = jax.nn.one_hot(i, {E})\nh = jnp.tanh(jnp.einsum('btd,bte,edf->btf', x, m, {up}))\ny = gate * jnp.einsum('btf,bte,efd->btd', h, m, {down})",
        f"{weigh}\n{two}\nm = (jax.nn.one_hot(i, {E}) * v[..., None]).sum(2)\nh = jax.nn.relu(jnp.einsum('btd,edf->ebtf', x, {up}))\ny = jnp.einsum('ebtf,efd,bte->btd', h, {down}, m)",
        f"""
{weigh}
{best}
m = jax.nn.one_hot(i, {E})
at = (jnp.cumsum(m, 1) * m - 1)
m = m[..., None] * jax.nn.one_hot(at, 3)
h = jnp.einsum('btec,btd->ebcd', m, x)
h = jnp.einsum('ebcf,efd->ebcd', jax.nn.relu(jnp.einsum('ebcd,edf->ebcf', h, {up})), {down})
y = jnp.einsum('btec,ebcd->btd', m * gate[..., None], h)""",
        f"""
{weigh}
{best}
flat, e = x.reshape(-1, {D}), i.reshape(-1)
order = jnp.argsort(e)
sizes = jnp.bincount(e, length={E})
h = jax.nn.silu(lax.ragged_dot(flat[order], {up}, sizes))
h = lax.ragged_dot(h, {down}, sizes)
y = h[jnp.argsort(order)].reshape(x.shape) * gate""",
        f"""
{weigh}
{two}
e = i.reshape(-1)
order = jnp.argsort(e, stable=True)
rows = x.reshape(-1, {D})[order // 2]
sizes = (e[:, None] == jnp.arange({E})).sum(0)
h = lax.ragged_dot(jax.nn.gelu(lax.ragged_dot(rows, {up}, sizes)), {down}, sizes)
y = (jnp.zeros_like(h).at[order].set(h).reshape(-1, {T}, 2, {D}) * v[..., None]).sum(2)""",
        f"{weigh}\nu = jnp.take({up}, jnp.argmax(gates, -1), axis=0)\ny = jnp.einsum('btf,btd->btd', jnp.einsum('btd,btdf->btf', x, u), x) * gates.max(-1, keepdims=True) + 0 * {down}.sum()",
        f"""
{weigh}
def one(total, e):
    up, down, gate = e
    return total + gate[..., None] * (jax.nn.relu(x @ up) @ down), None
y, _ = lax.scan(one, jnp.zeros_like(x), ({up}, {down}, jnp.moveaxis(gates, -1, 0)))""",
        f"y, _ = jp.experts(x, 2 * x @ {router}, {{'up': {up}, 'down': {down}}}, k={g.pick(1, 2)}, expert=lambda w, v: jax.nn.relu(v @ w['up']) @ w['down'])",
        f"y, _ = jp.experts(x, 2 * x @ {router}, {{'up': {up}, 'down': {down}}}, k=2, capacity=1.5, expert=lambda w, v: jax.nn.relu(v @ w['up']) @ w['down'])",
        f"{weigh}\nh = jax.vmap(lambda u, d: jnp.tanh(x @ u) @ d, out_axes=2)({up}, {down})\ny = (gates[..., None] * h).sum(2)",
    )
