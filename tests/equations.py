"""Example equations of JAX's primitives: of random shapes and parameters, traced from its public functions."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import linalg as private  # what JAX makes qr of
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.lax import linalg
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.program import jaxpr as jx

RANKS = 2  # of the axis "i", over which collectives go
SIZES = (6, 6, 12, 4, 3, 2, 1, 5)

Call = tuple[Any, ...]  # a function and its arguments
EXAMPLES: dict[str, Callable[["Draw", str], Call]] = {}


class Draw:
    """Random choices, by a seed."""

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def some(self, choices: Sequence[int]) -> list[int]:
        """Each of them or not, in their order."""
        return [c for c in choices if self.rng.integers(2)]

    def shuffled(self, values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in self.rng.permutation(len(values))]

    def sizes(self, low: int, high: int) -> list[int]:
        """Of so many dims, one of which can be cut into 2 and into 3 parts."""
        sizes = [self.one(*SIZES) for _ in range(self.rng.integers(low, high + 1))]
        if sizes and all(n % 6 for n in sizes):
            sizes[self.number(len(sizes))] = 6
        return sizes

    def number(self, high: int) -> int:
        """From 0 up to but not including `high`."""
        return int(self.rng.integers(high))

    def array(self, shape: Sequence[int], kind: str = "f", low: float = -0.9, high: float = 2) -> np.ndarray:
        """Of floats ("f"), complex numbers ("c"), integers ("i", "u") or booleans ("b")."""
        if kind == "b":
            return self.rng.integers(0, 2, shape).astype(bool)
        if kind in "iu":
            values = self.rng.integers(0 if kind == "u" else int(low), int(high) + 1, shape)
            return values.astype(np.int32 if kind == "i" else np.uint32)
        values = self.rng.uniform(low, high, shape).astype(np.float32)
        return (values + 1j * self.array(shape)).astype(np.complex64) if kind == "c" else values

    def tensor(self, low: int = 1, high: int = 3, kind: str = "f") -> np.ndarray:
        return self.array(self.sizes(low, high), kind)

    def alike(self, kinds: str, **options: Any) -> list[Any]:
        """Operands of an elementwise equation: of one shape, or with 1 in the place of some sizes, or a scalar."""
        shape = self.sizes(1, 3)
        shapes: list[Any] = [self.one(shape, shape, (), [self.one(n, n, 1) for n in shape]) for _ in kinds]
        shapes[self.number(len(kinds))] = shape
        return [self.array(s, kind, **options) for s, kind in zip(shapes, kinds, strict=True)]


def equations(name: str, count: int, seed: int = 0) -> list[tuple[Any, list[Any]]]:
    """Equations of a primitive, from so many examples, and the values of their operands."""
    found = []
    for number in range(count):
        fun, *args = EXAMPLES[name](Draw(zlib.crc32(name.encode()), seed, number), name)
        closed = jax.make_jaxpr(fun, axis_env=[("i", RANKS)])(*args)
        flat = jx.flatten(closed)
        inner = jx.opened(closed)[0]  # the constraints of shardings, which flat programs have not
        eqns, invars = (inner.eqns, inner.invars) if name == "sharding_constraint" else (flat.eqns, flat.invars)
        mine = [eqn for eqn in eqns if eqn.primitive.name == name]
        assert mine, f"the example of {name} traces to {[eqn.primitive.name for eqn in eqns]}"
        known = dict(zip(invars, args, strict=True)) | dict(zip(flat.constvars, flat.consts, strict=True))
        for eqn in mine:
            read = list(dict.fromkeys(v for v in eqn.invars if not jx.is_literal(v) and v not in known))
            if read:
                before = jx.needed(eqns, read)
                known.update(zip(read, jax.jit(jx.run(before, list(known), read))(*known.values()), strict=True))
            found.append((eqn, [np.asarray(v.val if jx.is_literal(v) else known[v]) for v in eqn.invars]))
    return found


def example(*names: str) -> Callable[[Any], Any]:
    """Registers the example of some primitives."""

    def register(fun: Any) -> Any:
        assert not {*names} & {*EXAMPLES}, names
        EXAMPLES.update(dict.fromkeys(names, fun))
        return fun

    return register


def function(name: str) -> Any:
    """JAX's function of an elementwise primitive, or where there is none, its `bind`."""
    others = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}
    known = (others | {"regularized_incomplete_beta": "betainc"}).get(name, name)
    return getattr(lax, known, None) or getattr(jec.primitives, f"{name}_p").bind


# -- element by element ------------------------------------------------------------------------------------------------


def by_name(kinds: dict[str, Any]) -> dict[str, Any]:
    """Each of the names before a kind, with the kind."""
    return {name: kind for names, kind in kinds.items() for name in names.split()}


OF_ONE = by_name({
    """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
    expm1 floor is_finite lgamma log log1p log2 logistic neg one_minus_square rsqrt sign sin sinh sqrt square
    stop_gradient tan tanh""": "f",
    "not population_count clz": "u",
    "real imag conj": "c",
})  # fmt: skip


@example(*OF_ONE)
def _of_one(draw: Draw, name: str) -> Call:
    return function(name), draw.tensor(kind=OF_ONE[name])


OF_MORE = by_name({
    "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub eq_to le_to lt_to complex": ("ff", {}),
    "igamma igammac igamma_grad_a zeta polygamma": ("ff", {"low": 1.1}),
    "regularized_incomplete_beta": ("fff", {"low": 0.1, "high": 0.9}),
    "and or xor shift_left shift_right_arithmetic shift_right_logical mulhi": ("ii", {"low": 0, "high": 9}),
})  # fmt: skip


@example(*OF_MORE)
def _of_more(draw: Draw, name: str) -> Call:
    kinds, bounds = OF_MORE[name]
    return function(name), *draw.alike(kinds, **bounds)


OPTIONS = {
    "integer_pow": (lax.integer_pow, (-2, 2, 3)),
    "convert_element_type": (lax.convert_element_type, (jnp.bfloat16, jnp.int32, jnp.bool_)),
    "round": (lax.round, (*lax.RoundingMethod,)),
    "name": (checkpoint_name, ("kept",)),
}


@example(*OPTIONS)
def _with_an_option(draw: Draw, name: str) -> Call:
    fun, options = OPTIONS[name]
    option = draw.one(*options)
    return lambda x: fun(x, option), draw.tensor()


@example("polynomial")
def _polynomial(draw: Draw, name: str) -> Call:
    return lambda x, *of: lax.polynomial(x, of), *draw.alike("fff")


@example("add_any")
def _cotangents(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    return ad.add_jaxvals, x, x[::-1].copy()


@example("clamp")
def _clamp(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    low, high = (draw.array(draw.one(x.shape, ()), low=a, high=a + 1) for a in (-1, 0))
    return lax.clamp, low, x, high


@example("select_n")
def _select(draw: Draw, name: str) -> Call:
    shape, cases = draw.sizes(1, 4), draw.one(2, 3)
    which = draw.array(draw.one(shape, ()), "b" if cases == 2 else "i", low=0, high=2)
    return lax.select_n, which, *(draw.array(shape) for _ in range(cases))


@example("bitcast_convert_type")
def _bitcast(draw: Draw, name: str) -> Call:
    """To elements of the same size, or of another one, which are a dim more or less."""
    x, dtype = draw.tensor(), draw.one(jnp.int32, jnp.int16, jnp.int8)
    bits = lax.bitcast_convert_type(x, dtype)
    return draw.one(
        (lambda x: lax.bitcast_convert_type(x, dtype), x), (lambda x: lax.bitcast_convert_type(x, jnp.float32), bits)
    )


@example("reduce_precision")
def _reduce_precision(draw: Draw, name: str) -> Call:
    return lambda x: lax.reduce_precision(x, 5, 7), draw.tensor()


@example("copy")
def _copy(draw: Draw, name: str) -> Call:
    return lambda x: jnp.array(x, copy=True), draw.tensor()


@example("sharding_constraint")
def _constraint(draw: Draw, name: str) -> Call:
    """Within a loop, where the constraint of a user's own mesh stays."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("mine",))
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec())), draw.tensor()


# -- shape -------------------------------------------------------------------------------------------------------------


@example("broadcast_in_dim")
def _broadcast(draw: Draw, name: str) -> Call:
    shape = draw.sizes(1, 4)
    dims = draw.some(range(len(shape)))
    x = draw.array([draw.one(shape[d], shape[d], 1) for d in dims])
    shape = [*shape, 6] if list(x.shape) == shape else shape
    return lambda x: lax.broadcast_in_dim(x, shape, dims), x


@example("reshape")
def _reshape(draw: Draw, name: str) -> Call:
    """Some neighbours merged, or what was merged apart again, or any other factorisation."""
    shape = draw.sizes(2, 4)
    merged: list[int] = []
    for n in shape:
        if merged and draw.number(2):
            merged[-1] *= n
        else:
            merged.append(n)
    other = draw.shuffled(shape) if merged == shape else merged
    if other == shape:
        other = [*shape, 1]
    before, after = draw.one((shape, other), (other, shape))
    return lambda x: lax.reshape(x, after), draw.array(before)


@example("transpose")
def _transpose(draw: Draw, name: str) -> Call:
    x = draw.tensor(2, 4)
    order = draw.shuffled(range(x.ndim))
    order = order[::-1] if order == [*range(x.ndim)] else order
    return lambda x: lax.transpose(x, order), x


@example("squeeze")
def _squeeze(draw: Draw, name: str) -> Call:
    shape = draw.sizes(1, 3)
    shape.insert(draw.number(len(shape) + 1), 1)
    gone = [d for d, n in enumerate(shape) if n == 1]
    return lambda x: lax.squeeze(x, gone), draw.array(shape)


@example("concatenate")
def _concatenate(draw: Draw, name: str) -> Call:
    shape = draw.sizes(1, 3)
    dim = draw.number(len(shape))
    parts = [draw.array([*shape[:dim], n, *shape[dim + 1 :]]) for n in draw.sizes(2, 3)]
    return lambda *xs: lax.concatenate(xs, dim), *parts


@example("stack")
def _stack(draw: Draw, name: str) -> Call:
    shape = draw.sizes(1, 3)
    axis = draw.number(len(shape) + 1)
    return lambda *xs: jnp.stack(xs, axis), draw.array(shape), draw.array(shape)


@example("unstack")
def _unstack(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    axis = draw.number(x.ndim)
    return lambda x: jnp.unstack(x, axis=axis), x


@example("tile")
def _tile(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    reps = [draw.one(1, 1, 2) for _ in x.shape]
    return lambda x: jnp.tile(x, reps if max(reps) > 1 else [2, *reps[1:]]), x


@example("split")
def _split(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    axis = draw.number(x.ndim)
    first = draw.number(x.shape[axis] + 1)
    return lambda x: lax.split(x, (first, x.shape[axis] - first), axis), x


@example("pad")
def _pad(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    config = [draw.one((0, 0, 0), (0, 0, 0), (1, 0, 0), (-1, 2, 0), (0, 0, 1)) for _ in x.shape]
    return lambda x, value: lax.pad(x, value, config), x, draw.array(())


@example("rev")
def _rev(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    dims = draw.some(range(x.ndim))
    return lambda x: lax.rev(x, dims), x


@example("slice")
def _slice(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    cut = [draw.one((0, n, 1), (0, n, 1), (n // 2, n, 1), (0, n, 2)) for n in x.shape]
    return lambda x: lax.slice(x, *zip(*cut, strict=True)), x


@example("dynamic_slice")
def _dynamic_slice(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    sizes = [draw.one(n, n, 1) for n in x.shape]
    starts = draw.array([x.ndim], "i", low=-1, high=3)
    return lambda x, *starts: lax.dynamic_slice(x, starts, sizes), x, *starts


@example("dynamic_update_slice")
def _dynamic_update_slice(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    update = draw.array([draw.one(n, n, 1) for n in x.shape])
    starts = draw.array([x.ndim], "i", low=-1, high=3)
    return lambda x, y, *starts: lax.dynamic_update_slice(x, y, starts), x, update, *starts


# -- along a dim -------------------------------------------------------------------------------------------------------


@example("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(draw: Draw, name: str) -> Call:
    x, back = draw.tensor(), bool(draw.number(2))
    axis = draw.number(x.ndim)
    return lambda x: function(name)(x, axis, reverse=back), x


@example("sort")
def _sort(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    dim, keys = draw.number(x.ndim), draw.one(1, 2)
    return lambda *xs: lax.sort(xs, dimension=dim, num_keys=keys), x.astype(np.int32), draw.array(x.shape)


@example("top_k")
def _top_k(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    return lambda x: lax.top_k(x, min(2, x.shape[-1])), x


@example("approx_top_k")
def _approx_top_k(draw: Draw, name: str) -> Call:
    x, best = draw.tensor(), draw.one(lax.approx_max_k, lax.approx_min_k)
    dim = draw.number(x.ndim)
    return lambda x: best(x, min(2, x.shape[dim]), reduction_dimension=dim), x


@example("argmax", "argmin")
def _arg(draw: Draw, name: str) -> Call:
    """With ties."""
    x = draw.tensor(kind=draw.one("f", "i"))
    axis = draw.number(x.ndim)
    return lambda x: function(name)(x, axis, jnp.int32), x


REDUCED = {"sum": (lax.add, 0, "f"), "prod": (lax.mul, 1, "f"), "max": (lax.max, -np.inf, "f"),
           "min": (lax.min, np.inf, "f"), "and": (lax.bitwise_and, True, "b"), "or": (lax.bitwise_or, False, "b"),
           "xor": (lax.bitwise_xor, 0, "i")}  # fmt: skip


@example(*(f"reduce_{how}" for how in REDUCED))
def _reduce(draw: Draw, name: str) -> Call:
    fun, start, kind = REDUCED[name.removeprefix("reduce_")]
    x = draw.tensor(kind=kind)
    dims = draw.some(range(x.ndim)) or [x.ndim - 1]
    return lambda x: lax.reduce(x, np.asarray(start, x.dtype), fun, dims), x


@example("reduce")
def _reduce_two(draw: Draw, name: str) -> Call:
    """By a function of its own, of two arrays at once."""
    x = draw.tensor(2, 3)
    dims = draw.some(range(x.ndim - 1)) or [x.ndim - 1]
    fun = lambda a, b: (a[0] + b[0] * b[1], a[1] * b[1])
    return lambda x, y: lax.reduce((x, y), (np.float32(0), np.float32(1)), fun, dims), x, draw.array(x.shape)


# -- windows -----------------------------------------------------------------------------------------------------------


def window(draw: Draw, x: np.ndarray) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Sizes, strides and padding of windows, which go along some dims alone."""
    none = (1, 1, (0, 0))
    along = (none, none, none, (2, 1, (0, 0)), (2, 2, (0, 0)), (2, 1, (1, 0)), (1, 2, (0, 0)))
    sizes, strides, padding = zip(*(draw.one(*along) if n > 1 else none for n in x.shape), strict=True)
    return list(sizes), list(strides), list(padding)


WINDOWS = {"reduce_window_sum": (lax.add, 0.0), "reduce_window_max": (lax.max, -np.inf),
           "reduce_window_min": (lax.min, np.inf), "reduce_window": (lambda a, b: a * b + a, 1.0)}  # fmt: skip


@example(*WINDOWS)
def _window(draw: Draw, name: str) -> Call:
    x, (fun, start) = draw.tensor(2, 3), WINDOWS[name]
    of = window(draw, x)
    return lambda x: lax.reduce_window(x, start, fun, *of), x


@example("select_and_scatter_add", "select_and_gather_add")
def _selected(draw: Draw, name: str) -> Call:
    """The derivatives of a maximum over windows."""
    x = draw.tensor(2, 3)
    of = window(draw, x)
    best = lambda x: lax.reduce_window(x, -np.inf, lax.max, *of)
    if name == "select_and_gather_add":
        return lambda x, t: jax.jvp(best, (x,), (t,)), x, draw.array(x.shape)
    return lambda x, t: jax.vjp(best, x)[1](t), x, draw.array(jax.eval_shape(best, x).shape)


# -- matrices ----------------------------------------------------------------------------------------------------------


def positive(draw: Draw, n: int | None = None) -> np.ndarray:
    """[..., n, n], symmetric and positive definite."""
    n = n or draw.one(2, 3)
    x = draw.array([*draw.sizes(0, 2), n, n])
    return x @ np.swapaxes(x, -1, -2) + 3 * np.eye(n, dtype=np.float32)


@example("fft")
def _fft(draw: Draw, name: str) -> Call:
    x = draw.array([*draw.sizes(0, 2), 4, 6])
    kind, dims = draw.one("FFT", "IFFT", "RFFT", "IRFFT"), draw.one(1, 2)
    sizes = (4, 6)[-dims:]
    x = x if kind == "RFFT" else x.astype(np.complex64)
    return lambda x: lax.fft(x[..., :4] if kind == "IRFFT" else x, kind, sizes), x


@example("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd")
def _decomposed(draw: Draw, name: str) -> Call:
    x = positive(draw)
    if name in ("lu", "qr", "svd"):
        x = draw.array([*x.shape[:-1], draw.one(2, 3)])
    options = {"qr": {"full_matrices": bool(draw.number(2))}, "svd": {"full_matrices": bool(draw.number(2))}}
    return lambda x: getattr(linalg, name)(x, **options.get(name, {})), x


@example("householder_product")
def _householder(draw: Draw, name: str) -> Call:
    x = positive(draw)
    return linalg.householder_product, x, draw.array(x.shape[:-1])


@example("geqrf", "geqp3", "hessenberg")
def _factored(draw: Draw, name: str) -> Call:
    x = positive(draw, 3)
    pivots = [np.zeros(x.shape[:-1], np.int32)] if name == "geqp3" else []
    return getattr(private, name), x, *pivots


@example("ormqr")
def _ormqr(draw: Draw, name: str) -> Call:
    x = positive(draw, 3)
    return linalg.ormqr, x, draw.array(x.shape[:-1]), draw.array([*x.shape[:-1], 4])


@example("symmetric_product")
def _symmetric_product(draw: Draw, name: str) -> Call:
    c = positive(draw, 3)
    return linalg.symmetric_product, draw.array([*c.shape[:-1], 2]), c


@example("lu_pivots_to_permutation")
def _pivots(draw: Draw, name: str) -> Call:
    pivots = draw.array([*draw.sizes(0, 2), 3], "i", low=0, high=2)
    return lambda x: linalg.lu_pivots_to_permutation(x, 4), pivots


@example("triangular_solve")
def _triangular_solve(draw: Draw, name: str) -> Call:
    x, left = positive(draw, 3), bool(draw.number(2))
    b = draw.array([*x.shape[:-2], 3, 6] if left else [*x.shape[:-2], 6, 3])
    return lambda a, b: linalg.triangular_solve(a, b, left_side=left, lower=True), x, b


@example("tridiagonal")
def _tridiagonal(draw: Draw, name: str) -> Call:
    return lambda x: linalg.tridiagonal(x, lower=True), positive(draw, 3)


@example("tridiagonal_solve")
def _tridiagonal_solve(draw: Draw, name: str) -> Call:
    rows = draw.sizes(0, 2)
    side, middle, b = draw.array([*rows, 4]), draw.array([*rows, 4], low=4, high=5), draw.array([*rows, 4, 6])
    return linalg.tridiagonal_solve, side, middle, side, b


# -- sums --------------------------------------------------------------------------------------------------------------


@example("dot_general")
def _dot(draw: Draw, name: str) -> Call:
    """Some dims summed, some of both operands alike, some of one alone, in any order."""
    summed, batch, left, right = (draw.sizes(0, 2) for _ in range(4))
    dims = [[*((k, i) for k, of in enumerate((summed, batch, mine)) for i in range(len(of)))] for mine in (left, right)]
    orders = [draw.shuffled(some) for some in dims]
    operands = [draw.array([(summed, batch, mine)[k][i] for k, i in order])
                for order, mine in zip(orders, (left, right), strict=True)]  # fmt: skip
    where = lambda kind, n: [[order.index((kind, i)) for i in range(n)] for order in orders]
    numbers = (where(0, len(summed)), where(1, len(batch)))
    return lambda x, y: lax.dot_general(x, y, numbers), *operands


@example("conv_general_dilated")
def _conv(draw: Draw, name: str) -> Call:
    spatial = draw.one(1, 2)
    letters = "HW"[:spatial]
    specs = tuple("".join(draw.shuffled([*letters, *pair])) for pair in ("NC", "IO", "NC"))
    by = draw.one("", "feature_group_count", "batch_group_count")
    groups = draw.one(2, 6) if by else 1
    size = {"N": 6 if by == "batch_group_count" else draw.one(2, 3, 6), "C": draw.one(6, 12), "H": 4, "W": 3}
    kernel = {"I": size["C"] // (groups if by == "feature_group_count" else 1), "O": 12, "H": draw.one(1, 2), "W": 2}
    options = {by: groups} if by else {}
    strides, dilation = ([draw.one(1, 2) for _ in letters] for _ in range(2))
    return (
        lambda x, y: lax.conv_general_dilated(
            x, y, strides, draw.one("SAME", "VALID"), rhs_dilation=dilation, dimension_numbers=specs, **options
        ),
        draw.array([size[c] for c in specs[0]]),
        draw.array([kernel[c] for c in specs[1]]),
    )


# -- lookups -----------------------------------------------------------------------------------------------------------


def places(draw: Draw, n: int, shape: Sequence[int]) -> np.ndarray:
    """Indices into a dim of size n, some of which are out of bounds or count from the end."""
    return draw.rng.integers(-n - 1, n + 2, shape).astype(np.int32)


def _indexed(draw: Draw, x: np.ndarray) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """What one of several spellings of `x[...]` is of x and its indices."""
    how, shape = draw.number(3), draw.sizes(1, 2)
    a, b = draw.shuffled(range(x.ndim))[:2] if x.ndim > 1 else (0, 0)
    if how == 0 or x.ndim == 1:
        return (lambda i: (slice(None),) * a + (i,)), [places(draw, x.shape[a], shape)]
    if how == 1:
        at = sorted((a, b))
        index = lambda i, j: tuple(i if d == at[0] else j if d == at[1] else slice(None) for d in range(x.ndim))
        return index, [places(draw, x.shape[d], shape) for d in at]
    return (lambda i: (..., i)), [places(draw, x.shape[-1], shape)]


@example("gather")
def _gather(draw: Draw, name: str) -> Call:
    x = draw.tensor()
    how = draw.number(3)
    if how == 0:  # a row of indices for each of some rows
        axis = draw.number(x.ndim)
        indices = places(draw, x.shape[axis], [*x.shape[:axis], 6, *x.shape[axis + 1 :]])
        return lambda x, i: jnp.take_along_axis(x, i, axis, mode="clip"), x, indices
    if how == 1 and x.ndim > 1:
        return jax.vmap(lambda x, i: jnp.take(x, i, 0)), x, places(draw, x.shape[1], [x.shape[0], *draw.sizes(0, 2)])
    index, indices = _indexed(draw, x)
    mode = draw.one("clip", "fill", "promise_in_bounds")
    return lambda x, *i: x.at[index(*i)].get(mode=mode), x, *indices


@example("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(draw: Draw, name: str) -> Call:
    x, how = draw.tensor(), {"scatter": "set", "scatter-sub": "subtract", "scatter-mul": "multiply"}
    put = how.get(name, name.removeprefix("scatter-"))
    options = {"unique_indices": True} if name == "scatter-mul" else {}
    write = lambda x, index, new: getattr(x.at[index], put)(new, mode="drop", **options)
    if x.ndim > 1 and draw.number(3) == 0:
        i = draw.shuffled(range(x.shape[1]))[:1] * np.ones([x.shape[0], 1], np.int32)
        return jax.vmap(lambda x, i, new: write(x, i, new)), x, i, draw.array([x.shape[0], 1, *x.shape[2:]])
    dim = draw.number(x.ndim)
    i = np.array(draw.shuffled(range(x.shape[dim]))[:2], np.int32)
    index = lambda i: (slice(None),) * dim + (i,)
    new = draw.array(x[index(i)].shape)
    return lambda x, i, new: write(x, index(i), new), x, i, new


# -- collectives over another axis -------------------------------------------------------------------------------------


@example("all_gather", "reduce_scatter", "all_to_all")
def _collective(draw: Draw, name: str) -> Call:
    shape = draw.sizes(1, 3)
    dim, other = draw.number(len(shape)), draw.number(len(shape))
    shape[dim] *= RANKS
    tiled = bool(draw.number(4))
    shape[dim] = shape[dim] if tiled or name == "all_gather" else RANKS
    fun = {
        "all_gather": lambda x: lax.all_gather(x, "i", axis=dim, tiled=tiled),
        "reduce_scatter": lambda x: lax.psum_scatter(x, "i", scatter_dimension=dim, tiled=tiled),
        "all_to_all": lambda x: lax.all_to_all(x, "i", dim, other, tiled=tiled),
    }[name]
    return fun, draw.array(shape)
