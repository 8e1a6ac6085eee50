"""Collectives against NumPy: every operation, dtype and number of ranks, inside shard_map and outside; their errors,
gradients and bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import (
    OPS,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    on,
    reduce,
    reduce_scatter,
    ring_all_reduce,
    scatter,
    send_recv,
    shift,
)
from jaxpar.collectives.reductions import DTYPES
from jaxpar.hardware.devices import gpu_topology
from jaxpar.inspect.ledger import Ledger

Reference = Callable[[np.ndarray], np.ndarray]
MOVED = (*DTYPES, "complex64", "complex128")


def mesh_of(n: int, *inner_sizes: int) -> Mesh:
    """Return a mesh with axes a, b, ... over the first devices."""
    sizes = (n, *inner_sizes)
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple("abc"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


def data(n: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return [n, *shape]: integers that overflow when summed, floats that round; 8-bit values have exact sums."""
    random = np.random.default_rng(len(dtype) + n)
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.integer):
        info = jnp.iinfo(kind)
        return random.integers(info.min, info.max, (n, *shape), kind, endpoint=True)
    if kind.itemsize == 1:
        return random.choice([0, 1] if dtype == "bool" else [-1, 1], (n, *shape)).astype(kind)
    values = random.normal(size=(n, *shape))
    return (values + 1j * random.normal(size=values.shape) if kind.kind == "c" else values).astype(kind)


def reduced(op: str, x: np.ndarray) -> np.ndarray:
    """Reduce [n, ...] to [...] with NumPy: floats in double precision, integers wrapping."""
    wide = x if x.dtype.kind in "iub" else x.astype(complex if x.dtype.kind == "c" else float)
    if op in ("min", "max"):
        return getattr(wide, op)(0).astype(x.dtype)
    total = (wide.prod if op == "prod" else wide.sum)(0, dtype=wide.dtype)
    if op == "avg":
        total = np.trunc(total / np.float128(len(x))) if x.dtype.kind in "iu" else total / len(x)
    return total.astype(x.dtype)


def padded(x: np.ndarray, n: int) -> np.ndarray:
    return np.pad(x, [(0, -len(x) % n), *[(0, 0)] * (x.ndim - 1)])


def everywhere(y: np.ndarray, n: int) -> np.ndarray:
    return np.stack([y] * n)


def zeros_except(root: int, y: np.ndarray, n: int) -> np.ndarray:
    return np.stack([y if i == root else np.zeros_like(y) for i in range(n)])


def parts(y: np.ndarray, n: int) -> np.ndarray:
    """Stack the parts of y along its first dim; row i is rank i's."""
    return np.stack(np.split(padded(y, n), n))


def moving_cases(n: int) -> dict[str, tuple[Callable[..., jax.Array], tuple[int, ...], Reference]]:
    """Return name -> (collective that moves data, shape of a buffer, its result on n buffers in NumPy)."""
    last, even, odd = n - 1, (2 * n, 3), (7, 2)
    next_rank = [(i, (i + 1) % n) for i in range(n)]
    return {
        "broadcast": (partial(broadcast, root=last), odd, lambda x: everywhere(x[last], n)),
        "all_gather": (all_gather, odd, lambda x: everywhere(np.concatenate(x), n)),
        "all_gather dim 1": (partial(all_gather, dim=-1), odd, lambda x: everywhere(np.concatenate(x, 1), n)),
        "gather": (partial(gather, root=last), odd, lambda x: zeros_except(last, np.concatenate(x), n)),
        "scatter": (partial(scatter, root=last), even, lambda x: parts(x[last], n)),
        "scatter padded": (partial(scatter, pad=True), odd, lambda x: parts(x[0], n)),
        "all_to_all": (all_to_all, even, lambda x: np.stack([np.split(y, n) for y in x]).swapaxes(0, 1)),
        "all_to_all padded": (
            partial(all_to_all, pad=True),
            odd,
            lambda x: np.stack([parts(y, n) for y in x]).swapaxes(0, 1),
        ),
        "all_to_all into another dim": (
            partial(all_to_all, into=1),
            even,
            lambda x: np.stack([np.concatenate(p, 1) for p in zip(*(np.split(y, n) for y in x), strict=True)]),
        ),
        "send_recv": (partial(send_recv, pairs=next_rank), odd, lambda x: np.roll(x, 1, axis=0)),
        "send_recv to one": (partial(send_recv, pairs=[(last, 0)]), odd, lambda x: zeros_except(0, x[last], n)),
        "shift": (partial(shift, by=1), odd, lambda x: np.roll(x, 1, axis=0)),
        "shift back": (partial(shift, by=-2), odd, lambda x: np.roll(x, -2, axis=0)),
        "barrier": (barrier, odd, lambda x: x),
    }


def reducing_cases(n: int, op: str) -> dict[str, tuple[Callable[..., jax.Array], tuple[int, ...], Reference]]:
    last, odd, r = n - 1, (7, 2), partial(reduced, op)
    table = {
        "all_reduce": (all_reduce, odd, lambda x: everywhere(r(x), n)),
        "ring": (ring_all_reduce, odd, lambda x: everywhere(r(x), n)),
        "reduce_scatter": (partial(reduce_scatter, pad=True), odd, lambda x: parts(r(x), n)),
    }
    if op in ("sum", "min"):  # an all_reduce for every op
        table["reduce"] = (partial(reduce, root=last), odd, lambda x: zeros_except(last, r(x), n))
    if op in ("avg", "max"):  # one of XLA's reductions, and one by all_to_all
        along = lambda x: np.stack(np.split(r(x), n, 1))
        table["reduce_scatter dim 1"] = (partial(reduce_scatter, dim=1), (3, 2 * n), along)
    return {f"{name} {op}": (partial(f, op=op), shape, reference) for name, (f, shape, reference) in table.items()}


def is_defined(op: str, dtype: str) -> bool:
    return {"bool": op in ("min", "max"), "c": op not in ("min", "max")}.get(
        dtype[0] if dtype[0] == "c" else dtype, True
    )


def cases(n: int, dtype: str) -> dict[str, tuple[Callable[..., jax.Array], tuple[int, ...], Reference]]:
    ops = [op for op in OPS if is_defined(op, dtype)]
    return moving_cases(n) | {name: case for op in ops for name, case in reducing_cases(n, op).items()}


def check(n: int, place: str, is_chosen: Callable[[int, int], bool]) -> None:
    """Check the cases for which `is_chosen(number of the dtype, number of the case)`, in one program."""
    mesh = mesh_of(n)
    table = {
        (dtype, name): case
        for i, dtype in enumerate(MOVED)
        for j, (name, case) in enumerate(cases(n, dtype).items())
        if is_chosen(i, j)
    }

    def program(xs: dict[Any, Any]) -> dict[Any, jax.Array]:
        axes = on(mesh) if place == "outside" else "a"
        return {key: f(xs[key[0], shape], axes) for key, (f, shape, _) in table.items()}

    def inside(xs: dict[Any, Any]) -> dict[Any, jax.Array]:
        return jax.tree.map(lambda y: y[None], program(jax.tree.map(lambda x: x[0], xs)))

    mapped = jax.shard_map(inside, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    with jax.enable_x64(True):
        xs = {(dtype, shape): data(n, shape, dtype) for (dtype, _), (_, shape, _) in table.items()}
        rows = NamedSharding(mesh, P("a"))
        results = jax.jit(program if place == "outside" else mapped, in_shardings=rows, out_shardings=rows)(xs)
    for (dtype, name), (_, shape, reference) in table.items():
        x, y = xs[dtype, shape], np.asarray(results[dtype, name])
        exact = x.dtype.itemsize == 1 or x.dtype.kind in "iub" or not any(op in name.split() for op in OPS)
        rounding = 0 if exact else 3 * n * float(jnp.finfo(x.dtype).eps)
        wide = complex if x.dtype.kind == "c" else float if rounding else x.dtype
        assert y.dtype == x.dtype
        expected = reference(x).reshape(y.shape).astype(wide)
        np.testing.assert_allclose(y.astype(wide), expected, rounding, rounding, err_msg=f"{name} {dtype}")


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_equal_to_numpy(n: int, place: str) -> None:
    """Every collective on every n, inside and outside, with one or two dtypes each; with every dtype on some n."""
    turn = (n - 2) % 7 + 7 * (place == "outside")
    check(n, place, lambda dtype, case: (dtype + case) % 14 == turn)


@pytest.mark.battery
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_equal_to_numpy_in_full(n: int, place: str) -> None:
    check(n, place, lambda dtype, case: True)


def ledger_of(f: Callable[..., jax.Array], mesh: Mesh, shape: tuple[int, ...], dtype: Any = "float32") -> Ledger:
    """Return the ledger of f(x, axes) on every rank's x."""
    x = jax.ShapeDtypeStruct((mesh.size, *shape), dtype)
    return Ledger.from_jaxpr(jax.make_jaxpr(lambda x: f(x, on(mesh)))(x), mesh)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_costs_are_those_documented(n: int) -> None:
    """Checks bytes of the buffers. A ring sends (n-1)/n of them, an all-reduce twice that; x is 4 * 40 n bytes."""
    mesh, s = mesh_of(n), 160 * n
    through_shards = {"all-to-all": s, "all-gather": s}
    expected = {
        all_reduce: {"all-reduce": s},
        partial(all_reduce, op="max"): {"all-reduce": s},
        partial(all_reduce, op="prod"): through_shards,
        broadcast: through_shards,
        reduce: {"all-reduce": s},
        all_gather: {"all-gather": n * s},
        reduce_scatter: {"reduce-scatter": s},
        partial(reduce_scatter, op="min"): {"all-to-all": s},
        scatter: {"all-to-all": s},
        gather: {"all-gather": n * s},
        all_to_all: {"all-to-all": s},
        partial(send_recv, pairs=[(0, n - 1)]): {"collective-permute": s},
        barrier: {"all-reduce": 4},
        ring_all_reduce: {"collective-permute": 2 * (n - 1) * s // n},
    }
    for f, costs in expected.items():
        assert ledger_of(f, mesh, (40 * n,)).by("kind") == (costs if n > 1 else {}), f


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (8, 8), ()])
def test_ring_sends_2_n_minus_1_chunks(shape: tuple[int, ...]) -> None:
    ledger = ledger_of(ring_all_reduce, mesh_of(8), shape)
    (entry,) = ledger
    chunk = -(-int(np.prod(shape)) // 8)
    assert (entry.kind, entry.count, entry.bytes) == ("collective-permute", 14, 14 * 4 * chunk)


def test_ring_gives_all_ranks_the_same_bits_and_the_compiled_program_is_a_ring() -> None:
    mesh = mesh_of(8)
    x = data(8, (1001,), "float32")
    ring = jax.jit(lambda x: ring_all_reduce(x, on(mesh)))
    y = np.asarray(ring(x))
    assert (y == y[0]).all()
    assert Ledger.from_hlo(ring.lower(x).compile().as_text(), mesh).by("kind") == {"collective-permute": 14 * 4 * 126}


def test_broadcast_moves_bits() -> None:
    """Negative zeros, NaNs and subnormals arrive as they are; a masked sum would lose them."""
    bits = np.array([0x80000000, 0x7FC00123, 0x00000001, 0xFF800000], "uint32")
    x = np.stack([np.full(4, 7, "float32"), bits.view("float32")])
    y = np.asarray(broadcast(x, on(mesh_of(2)), root=1))
    assert (y.view("uint32") == bits).all()


def test_what_is_linear_has_its_transpose_for_gradient() -> None:
    """<w, f(x)> = <f'(w), x>, and f'(w) does not depend on x."""
    n = 4
    mesh = mesh_of(n)
    linear = moving_cases(n) | reducing_cases(n, "sum") | reducing_cases(n, "avg")
    w, x = ({k: data(n + i, shape, "float32")[:n] for k, (_, shape, _) in linear.items()} for i in (0, 1))

    @jax.jit
    def forward_and_transpose(x: Any, w: Any) -> tuple[Any, Any]:
        y, transpose = jax.vjp(lambda x: {k: f(x[k], on(mesh)) for k, (f, _, _) in linear.items()}, x)
        w = {k: jnp.resize(w[k], y[k].shape) for k in y}
        return {k: jnp.vdot(w[k], y[k]) for k in y}, transpose(w)[0]

    forward, gradient = forward_and_transpose(x, w)
    _, gradient_elsewhere = forward_and_transpose(jax.tree.map(lambda x: -2 * x, x), w)
    for k in linear:
        np.testing.assert_allclose(forward[k], np.vdot(gradient[k], x[k]), rtol=1e-4, atol=1e-4, err_msg=k)
        np.testing.assert_array_equal(gradient[k], gradient_elsewhere[k])


def test_some_axes_of_a_mesh() -> None:
    """Runs over b of a mesh (a, b): groups of 3. Outside, the result is replicated over a."""
    mesh = mesh_of(2, 3)
    x = data(6, (3, 2), "int32")
    groups = jax.shard_map(
        lambda x: jnp.stack([all_reduce(x[0], "b"), ring_all_reduce(x[0], ["b"])])[None],
        mesh=mesh,
        in_specs=P(("a", "b")),
        out_specs=P(("a", "b")),
        check_vma=False,
    )
    by_group = x.reshape(2, 3, 1, 3, 2).sum(1, keepdims=True, dtype=x.dtype)
    np.testing.assert_array_equal(jax.jit(groups)(x).reshape(2, 3, 2, 3, 2), np.broadcast_to(by_group, (2, 3, 2, 3, 2)))
    y = reduce_scatter(x[:3], on(mesh, "b"))
    np.testing.assert_array_equal(y, reduced("sum", x[:3]).reshape(3, 1, 2))
    assert y.sharding.shard_shape(y.shape) == (1, 1, 2)
    gathered = all_gather(x, on(mesh))  # ranks over both axes count as the rows of the mesh do
    np.testing.assert_array_equal(gathered, everywhere(np.concatenate(x), 6))


def test_under_check_vma() -> None:
    """This is JAX's default for shard_map, which uses other primitives."""
    mesh = mesh_of(4)
    table = moving_cases(4) | reducing_cases(4, "sum") | reducing_cases(4, "prod")
    xs = {k: jax.ShapeDtypeStruct((4, *shape), "float32") for k, (_, shape, _) in table.items()}
    f = lambda xs: {k: f(xs[k][0], "a")[None] for k, (f, _, _) in table.items()}
    shapes = jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a")), xs)
    assert shapes["all_gather"].shape == (4, 28, 2)


def test_outside_compiles_once() -> None:
    mesh = mesh_of(2)
    f = lambda x: send_recv(x, on(mesh), pairs=[[0, 1]])
    f(np.zeros((2, 3), "float32"))
    with jax.no_tracing():
        f(np.ones((2, 3), "float32"))


@pytest.mark.parametrize("value", [np.arange(4.0, dtype="float32"), [1.0, 2.0, 3.0, 4.0]], ids=["numpy", "list"])
def test_scalars_of_each_rank(value: Any) -> None:
    assert all_reduce(value, on(mesh_of(4)), op="max").tolist() == [max(value)] * 4


X = np.zeros((8, 16), "float32")
WRONG = {
    "axis": (lambda m: all_reduce(X, on(m, "fdsp")), r"no axis 'fdsp'; use 'a'"),
    "axis_nearest": (lambda m: on(Mesh(m.devices, ("fsdp",)), "fdsp"), r"did you mean 'fsdp'\?"),
    "mesh": (lambda m: on("a"), r"on\('a'\) takes a jax.sharding.Mesh; give one, such as"),
    "no_shard_map": (lambda m: all_reduce(X, "a"), r"over the axis 'a'; call it in a jax.shard_map, or"),
    "mesh_as_axes": (
        lambda m: all_reduce(X, m),
        r"axes is a mesh; give on\(mesh\) outside shard_map, and inside names of 'a'",
    ),
    "rows": (lambda m: all_reduce(X[:6], on(m)), r"x \[6, 16\] must stack the buffers of 8 ranks .* \[8, ...\]"),
    "scalar": (lambda m: all_reduce(np.float32(1), on(m)), r"x \[\] must stack"),
    "op": (lambda m: all_reduce(X, on(m), op="mean"), r"op='mean' is unknown; use one of sum, prod, min"),
    "op_nearest": (lambda m: reduce(X, on(m), op="summ"), r"did you mean 'sum'\?"),
    "root": (lambda m: broadcast(X, on(m), root=8), r"root=8 is not a rank; give one from 0 to 7"),
    "divide": (
        lambda m: reduce_scatter(X[:, :13], on(m)),
        r"dim 0 of x \[13\] does not divide into 8 parts; make it 16, or pad it with zeros: pad=True",
    ),
    "dim": (lambda m: all_gather(X, on(m), dim=1), r"x \[16\] has no dim 1; use 0 to 0"),
    "dim_into": (lambda m: all_to_all(X, on(m), into=-2), r"x \[16\] has no dim -2"),
    "dim_scalar": (lambda m: all_gather(X[:, 0], on(m)), r"x \[\] has no dim 0; give a scalar as x\[None\]"),
    "source_twice": (lambda m: send_recv(X, on(m), [(0, 1), (0, 2)]), r"rank 0 is the source of two pairs"),
    "destination_twice": (lambda m: send_recv(X, on(m), [(0, 3), (1, 3)]), r"rank 3 is the destination of two"),
    "pairs": (lambda m: send_recv(X, on(m), (0, 1)), r"pairs=\(0, 1\) is not a list of pairs; .*\[\(0, 1\)\]"),
    "axes_none": (lambda m: all_reduce(X, None), r"axes=None names no mesh axes; give 'data'"),
    "dim_none": (lambda m: all_gather(X, on(m), dim=None), r"x \[16\] has no dim None; use 0 to 0"),
    "root_traced": (
        lambda m: jax.jit(lambda root: broadcast(X, on(m), root))(2),
        r"must be known when the program is traced; give Python values",
    ),
    "source": (lambda m: send_recv(X, on(m), [(8, 0)]), r"source=8 is not a rank"),
    "bool_sum": (lambda m: all_reduce(X > 0, on(m)), r"op='sum' is not for bool; cast to int32 to count, or"),
    "complex_max": (lambda m: ring_all_reduce(X * 1j, on(m), op="max"), r"complex.*no order; reduce jnp.abs"),
    "root_bool": (lambda m: broadcast(X, on(m), root=True), r"root=True is not a rank"),
    "op_dict": (lambda m: all_reduce(X, on(m), op={"a": 1}), r"\{'a': 1\} is a dict; root, dim, op and pairs"),
    "by": (lambda m: shift(X, on(m), 1.5), r"by=1.5 is not a number of ranks; use a whole number"),
    "dtype": (lambda m: all_reduce(X.astype(ml_dtypes.int4), on(m)), r"int4 cannot be reduced; cast to one of"),
}


def test_buffers_without_elements_and_options_as_arrays() -> None:
    """XLA's verifier refuses an all-gather or a reduce-scatter along a dim of size 0."""
    ranks, empty = on(mesh_of(8)), np.zeros((8, 0, 3), np.float32)
    for f in (all_gather, gather, reduce_scatter, broadcast):
        assert f(empty, ranks).shape == empty.shape
    assert all_reduce(empty, ranks, op="prod").shape == empty.shape
    assert broadcast(X, ranks, root=jnp.int32(2))[7].tolist() == X[2].tolist()
    assert send_recv(X, ranks, np.array([[2, 0]]))[0].tolist() == X[2].tolist()


def test_options_that_are_equal_are_not_the_same() -> None:
    # 1.0 was accepted after 1: their programs had the same key in the cache.
    ranks = on(mesh_of(8))
    assert broadcast(X, ranks, root=1).shape == X.shape
    with pytest.raises(ValueError, match=r"root=1\.0 is not a rank"):
        broadcast(X, ranks, root=1.0)  # type: ignore[arg-type]


def test_meshes_with_explicit_axes() -> None:
    # jax.make_mesh, which the error of `on` recommends, makes such meshes. There shard_map refused other shardings.
    mesh = jax.make_mesh((8,), ("a",))
    x = np.arange(16.0, dtype="float32").reshape(8, 2)
    for array in (x, jax.device_put(x, NamedSharding(mesh, P("a"))), jax.device_put(x, NamedSharding(mesh, P()))):
        assert all_reduce(array, on(mesh)).tolist() == [x.sum(0).tolist()] * 8
    assert shift(x, on(mesh), 3).tolist() == np.roll(x, 3, axis=0).tolist()


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    f, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        f(mesh_of(8))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("dta", r"no shard_map around this call runs over the axis 'dta'; use .*did you mean 'data'"),
        (("fsdp", "data"), r"out of the mesh's order; use 'data', 'fsdp'"),
        (("data", "data"), r"'data', 'data' are repeated or out of the mesh's order; use 'data'"),
        ("tensor", r"runs over the axis 'tensor'"),
    ],
)
def test_errors_in_axes(axes: Any, message: str) -> None:
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    f = lambda x: all_reduce(x, axes)
    inside = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False, axis_names={"data", "fsdp"})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(inside, X)


@pytest.mark.cuda_compiler
def test_on_gpus() -> None:
    """NCCL's own broadcast is used, 8-bit floats are sent as such, and the unread sum of a barrier is not dropped."""
    mesh = Mesh(np.array(gpu_topology("8xH100")), ("a",), axis_types=(AxisType.Auto,))
    x = lambda dtype: jax.ShapeDtypeStruct((8, 800), dtype, sharding=NamedSharding(mesh, P("a")))

    def program(a: jax.Array, b: jax.Array, c: jax.Array) -> list[jax.Array]:
        ranks = on(mesh)
        return [broadcast(a, ranks), all_reduce(b, ranks), barrier(c, ranks), ring_all_reduce(a, ranks)]

    lowered = jax.jit(program).trace(x("float32"), x("float8_e5m2"), x("uint8")).lower(lowering_platforms=("cuda",))
    assert Ledger.from_hlo(lowered.compile().as_text(), mesh).by("kind", "dtype") == {
        ("collective-broadcast", "float32"): 3200,
        ("all-reduce", "float8_e5m2"): 800,
        ("all-reduce", "int32"): 4,
        ("collective-permute", "float32"): 14 * 400,
    }
