"""The ledger against hand-computed counts and bytes: from jaxprs, from the CPU's HLO, from a GPU's HLO."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.hardware.compiled.entry import buffer_bytes
from jaxpar.inspect.ledger import Collective, Ledger

SIZES, AXES = (1, 2, 4, 1), ("pipe", "data", "fsdp", "tensor")
ROWS = P(("data", "fsdp"))
RING = [(i, (i + 1) % 4) for i in range(4)]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 4)


def mapped(f: Callable[..., Any], mesh: Mesh, vma: bool = False) -> Callable[..., Any]:
    """`f` of one [8, 6] block per device; any outputs, stacked by rows."""
    return jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=vma)


def from_jaxpr(f: Callable[..., Any], mesh: Mesh, dtype: Any = jnp.float32, vma: bool = False) -> Ledger:
    return Ledger.from_jaxpr(jax.make_jaxpr(mapped(f, mesh, vma))(jnp.ones((64, 6), dtype)), mesh)


def from_cpu(f: Callable[..., Any], mesh: Mesh) -> Ledger:
    return Ledger.from_hlo(jax.jit(mapped(f, mesh)).lower(jnp.ones((64, 6))).compile().as_text(), mesh)


# A block [8, 6] of float32 is 192 bytes.
KINDS = {
    "psum": (lambda x: lax.psum(x, ("fsdp", "data")), "all-reduce", ("data", "fsdp"), 192),
    "pmean": (lambda x: lax.pmean(x, "data"), "all-reduce", ("data",), 192),
    "pmax": (lambda x: lax.pmax(x, "fsdp"), "all-reduce", ("fsdp",), 192),
    "pmin": (lambda x: lax.pmin(x, "fsdp"), "all-reduce", ("fsdp",), 192),
    "all_gather": (lambda x: lax.all_gather(x, "fsdp", axis=0, tiled=True), "all-gather", ("fsdp",), 768),
    "all_gather_untiled": (lambda x: lax.all_gather(x, "data", axis=1), "all-gather", ("data",), 384),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "fsdp", tiled=True), "reduce-scatter", ("fsdp",), 192),
    "all_to_all": (lambda x: lax.all_to_all(x, "fsdp", 0, 0, tiled=True), "all-to-all", ("fsdp",), 192),
    "ppermute": (lambda x: lax.ppermute(x, "fsdp", RING), "collective-permute", ("fsdp",), 192),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_from_jaxpr_and_from_hlo(name: str, mesh: Mesh) -> None:
    f, kind, axes, nbytes = KINDS[name]
    assert from_jaxpr(f, mesh) == (Collective(kind, axes, "float32", 1, nbytes),)
    assert from_jaxpr(f, mesh, jnp.bfloat16) == (Collective(kind, axes, "bfloat16", 1, nbytes // 2),)
    assert from_cpu(f, mesh).by("kind", "axes", "dtype") == {(kind, axes, "float32"): nbytes}


@pytest.mark.parametrize("name", ["psum", "pmax", "all_gather", "psum_scatter", "ppermute"])
def test_names_of_primitives_under_check_vma(name: str, mesh: Mesh) -> None:
    """With check_vma the primitives are others: psum_invariant, all_gather_invariant."""
    f, kind, axes, nbytes = KINDS[name]
    ledger = from_jaxpr(lambda x: f(x).sum() + x, mesh, vma=True)
    assert ledger.by("kind", "axes") == {(kind, axes): nbytes}


def stack(x: jax.Array) -> jax.Array:
    """Three times a gather, and in each five times a reduction; remat and jit in between."""

    @jax.jit
    def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(lax.pmean(c, "data")), None

    @jax.checkpoint
    def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        gathered = lax.all_gather(c, "fsdp", axis=0, tiled=True)
        return lax.scan(inner, jnp.cos(gathered)[:8], None, length=5)[0], None

    return lax.scan(outer, x, None, length=3)[0]


def test_nested_scans_remat_and_jit(mesh: Mesh) -> None:
    expected = (
        Collective("all-reduce", ("data",), "float32", 15, 15 * 192, in_loop=True),
        Collective("all-gather", ("fsdp",), "float32", 3, 3 * 768, in_loop=True),
    )
    assert from_jaxpr(stack, mesh) == expected == from_cpu(stack, mesh)


def test_gradient_recomputes_and_transposes(mesh: Mesh) -> None:
    """Backward under remat: the gather and the reductions again, a scatter for each gather, a psum for each psum."""
    ledger = from_jaxpr(jax.grad(lambda x: stack(x).sum()), mesh)
    assert ledger.by("kind", "axes", value="count") == {
        ("all-reduce", ("data",)): 15 * 3,
        ("all-gather", ("fsdp",)): 3 * 2,
        ("reduce-scatter", ("fsdp",)): 3,
    }
    assert ledger.total(kind="reduce-scatter", dtype="float32") == 3 * 768
    assert ledger.total(kind="all-to-all") == 0


def test_custom_derivatives_are_walked(mesh: Mesh) -> None:
    @jax.custom_vjp
    def reduce_backward(x: jax.Array) -> jax.Array:
        return x * 1

    reduce_backward.defvjp(lambda x: (x * 1, None), lambda _, ct: (lax.psum(ct, "data"),))
    assert from_jaxpr(reduce_backward, mesh) == ()
    assert from_jaxpr(jax.grad(lambda x: reduce_backward(x).sum()), mesh).by("kind") == {"all-reduce": 192}


def test_what_nobody_reads_is_left_out(mesh: Mesh) -> None:
    """The derivative of a maximum over tensor ranks counted ties by an all-reduce, which compilers drop where it is
    stopped, as in a softmax: the closed form of tensor=8 was half as large again as what was sent in float32.
    """

    def f(x: jax.Array) -> jax.Array:
        lax.psum(x, "data")
        return lax.psum(x, "fsdp")

    assert from_jaxpr(f, mesh) == from_cpu(f, mesh) == (Collective("all-reduce", ("fsdp",), "float32", 1, 192),)


def test_branches(mesh: Mesh) -> None:
    def alike(x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda: lax.psum(x, "data"), lambda: lax.psum(x * 2, "data"))

    def unlike(x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda: lax.psum(x, "data"), lambda: x)

    assert from_jaxpr(alike, mesh) == (Collective("all-reduce", ("data",), "float32", 1, 192),)
    assert from_jaxpr(unlike, mesh) == (Collective("all-reduce", ("data",), "float32", 1, 192, conditional=True),)
    assert from_cpu(unlike, mesh) == from_jaxpr(unlike, mesh)


def test_loop_of_unknown_length_has_no_total(mesh: Mesh) -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c[0, 0] < 100, lambda c: lax.psum(c, "data") + 1, x)

    for ledger in (from_jaxpr(f, mesh), from_cpu(f, mesh)):
        assert ledger == (Collective("all-reduce", ("data",), "float32", None, 192, in_loop=True),)
        assert "?" in str(ledger)
        with pytest.raises(ValueError, match=r"all-reduce over .*data.* in a while loop of unknown length.*lax.scan"):
            ledger.total()


@pytest.mark.parametrize(
    ("reduce", "axes"),
    [
        (lambda x: lax.psum(x, "fsdp", axis_index_groups=[[0, 1], [2, 3]]), "2 of fsdp"),
        (lambda x: lax.psum(x, ("pipe", "data", "tensor")) + lax.psum(x, "pipe"), "data"),  # without axes of size one
    ],
)
def test_groups_and_axes_of_size_one_are_not_taken_for_an_axis(reduce: Any, axes: str, mesh: Mesh) -> None:
    assert from_jaxpr(reduce, mesh).by("axes") == from_cpu(reduce, mesh).by("axes") == {(axes,): 192}


def hlo(groups: str, opcode: str = "all-reduce", dtype: str = "f32") -> str:
    return f"""HloModule m, is_scheduled=true, num_partitions=8
ENTRY %main (p: {dtype}[4]) -> {dtype}[4] {{
  %p = {dtype}[4]{{0}} parameter(0)
  ROOT %r = {dtype}[4]{{0}} {opcode}(%p), channel_id=1, {groups}, use_global_device_ids=true
}}
"""


# Devices 0, 4, 1, 5, 2, 6, 3, 7 in the mesh's order: its axis_1 is our fsdp, its axis_3 our data.
NAMED = "mesh['axis_0'=1,'axis_1'=4,'axis_2'=1,'axis_3'=2], device_ids=([2,4]T(1,0))"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("fsdp",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups={{4,0},{1,5},{6,2},{3,7}}", ("data",)),
        ("replica_groups={}", ("data", "fsdp")),
        ("replica_groups=[2,4]<=[8]", ("fsdp",)),
        ("replica_groups=[1,8]<=[8]", ("data", "fsdp")),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups=[4,2]<=[8]", ("2 of fsdp",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("4 of data+fsdp",)),
        ("replica_groups=mesh['pipe'=1,'data'=2,'fsdp'=4,'tensor'=1] {'fsdp'}", ("fsdp",)),
        ("replica_groups=mesh['pipe'=1,'data'=2,'fsdp'=4,'tensor'=1] {'data','fsdp'}", ("data", "fsdp")),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", ("fsdp",)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}", ("data",)),
        (f"replica_groups={NAMED} {{'axis_1'}}", ("fsdp",)),
        (f"replica_groups={NAMED} {{'axis_3'}}", ("data",)),
        (f"replica_groups={NAMED} {{'axis_1','axis_3'}}", ("data", "fsdp")),
        (f"replica_groups={NAMED} {{'axis_1':(1)2}}", ("2 of fsdp",)),
        ("replica_groups=[8,1]<=[8]", ()),  # a group of one sends nothing
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
    ],
)
def test_forms_of_replica_groups(groups: str, axes: tuple[str, ...]) -> None:
    assert Ledger.from_hlo(hlo(groups), AbstractMesh(SIZES, AXES)).by("axes") == ({axes: 16} if axes else {})


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}", ("fsdp",)),
        ("{0,4},{1,5},{2,6},{3,7}", ("data",)),
        ("{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}", ("data", "fsdp")),
    ],
)
def test_pairs_of_permutes(pairs: str, axes: tuple[str, ...]) -> None:
    text = hlo(f"source_target_pairs={{{pairs}}}", "collective-permute", "bf16")
    assert Ledger.from_hlo(text, AbstractMesh(SIZES, AXES)).by("kind", "axes") == {("collective-permute", axes): 8}


# What the H100 compiler prints, trimmed: a combined gather with a matrix product before its done, a scatter in the
# general form with only a cast before its done, an all-reduce that the compiler runs synchronously, a loop.
GPU = """HloModule jit_f, is_scheduled=true, num_partitions=8

%gemm_fusion_dot_computation (a: bf16[256,256], b: bf16[256,256]) -> bf16[256,256] {
  %a = bf16[256,256]{1,0} parameter(0)
  %b = bf16[256,256]{1,0} parameter(1)
  ROOT %dot = bf16[256,256]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%wrapped_convert_computation (c: bf16[256,256]) -> f32[256,256] {
  %c = bf16[256,256]{1,0} parameter(0)
  ROOT %convert = f32[256,256]{1,0} convert(%c)
}

%async_computation.2 (d: f32[256,256]) -> f32[64,256] {
  %d = f32[256,256]{1,0} parameter(0)
  ROOT %reduce_scatter.70.1 = f32[64,256]{1,0} reduce-scatter(%d), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%region_23.23
}

%region_23.23 (e: f32[], f: f32[]) -> f32[] {
  %e = f32[] parameter(0)
  %f = f32[] parameter(1)
  ROOT %add = f32[] add(%e, %f)
}

%body (p: (s32[], bf16[256,256], f32[64,256], bf16[64,256])) -> (s32[], bf16[256,256], f32[64,256], bf16[64,256]) {
  %p = (s32[], bf16[256,256]{1,0}, /*index=2*/f32[64,256]{1,0}, bf16[64,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[256,256]{1,0} get-tuple-element(%p), index=1
  %w = bf16[64,256]{1,0} get-tuple-element(%p), index=3
  %all-gather-start = ((bf16[64,256]{1,0}, bf16[64,256]{1,0}), (bf16[256,256]{1,0}, bf16[256,256]{1,0})) \
all-gather-start(%w, %w), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, \
use_global_device_ids=true, backend_config={"collective_backend_config":{"is_sync":false,"is_pipelined":false}}
  %gemm_fusion_dot = bf16[256,256]{1,0} fusion(%x, %x), kind=kCustom, calls=%gemm_fusion_dot_computation
  %all-gather-done = (bf16[256,256]{1,0}, bf16[256,256]{1,0}) all-gather-done(%all-gather-start)
  %g = f32[256,256]{1,0} fusion(%gemm_fusion_dot), kind=kLoop, calls=%wrapped_convert_computation
  %reduce-scatter-start = ((f32[256,256]{1,0}), f32[64,256]{1,0}) async-start(%g), calls=%async_computation.2, \
backend_config={"collective_backend_config":{"is_sync":false,"is_pipelined":false}}
  %h = f32[256,256]{1,0} fusion(%gemm_fusion_dot), kind=kLoop, calls=%wrapped_convert_computation
  %reduce-scatter-done = f32[64,256]{1,0} async-done(%reduce-scatter-start)
  ROOT %t = (s32[], bf16[256,256]{1,0}, f32[64,256]{1,0}, bf16[64,256]{1,0}) \
tuple(%i, %gemm_fusion_dot, %reduce-scatter-done, %w)
}

%condition (q: (s32[], bf16[256,256], f32[64,256], bf16[64,256])) -> pred[] {
  %q = (s32[], bf16[256,256]{1,0}, f32[64,256]{1,0}, bf16[64,256]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (s: (s32[], bf16[256,256], f32[64,256], bf16[64,256])) -> f32[] {
  %s = (s32[], bf16[256,256]{1,0}, f32[64,256]{1,0}, bf16[64,256]{1,0}) parameter(0)
  %while = (s32[], bf16[256,256]{1,0}, f32[64,256]{1,0}, bf16[64,256]{1,0}) while(%s), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"4"},"known_init_step":{"init":"0","step":"1"}}
  %loss = f32[] constant(1)
  %all-reduce-start = f32[] all-reduce-start(%loss), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, \
use_global_device_ids=true, to_apply=%region_23.23, backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %all-reduce-done = f32[] all-reduce-done(%all-reduce-start)
}
"""


def test_asynchronous_forms_of_the_gpu() -> None:
    assert Ledger.from_hlo(GPU, AbstractMesh(SIZES, AXES)) == (
        Collective("all-reduce", ("data", "fsdp"), "float32", 1, 4),
        Collective("all-gather", ("fsdp",), "bfloat16", 4, 4 * 2 * 131072, True, True, True),
        Collective("reduce-scatter", ("fsdp",), "float32", 4, 4 * 262144, True, False, True),
    )


def test_the_buffer_of_an_all_gather_is_its_output() -> None:
    buffers = [("float32", 8), ("float32", 4), ("int32", 4)]
    assert buffer_bytes("all-gather", 4, buffers) == {"float32": 48, "int32": 16}
    assert buffer_bytes("all-reduce", 4, buffers) == {"float32": 12, "int32": 4}
    assert buffer_bytes("all-reduce", 1, buffers) == {}


def test_sums_and_table() -> None:
    ledger = Ledger(
        [
            Collective("all-gather", ("fsdp",), "bfloat16", 2, 2_000_000, True, True, True, ranks=4),
            Collective("all-reduce", ("data",), "float32", 1, 64, ranks=2),
            Collective("all-gather", ("fsdp",), "bfloat16", 1, 1_000_000, True, True, True, ranks=4),
        ]
    )
    assert len(ledger) == 2
    assert ledger.by("kind") == {"all-reduce": 64, "all-gather": 3_000_000}
    assert ledger.by("kind", "in_loop", value="count") == {("all-reduce", False): 1, ("all-gather", True): 3}
    assert ledger.total() == 3_000_064
    assert ledger.total("count", axes=("fsdp",)) == 3
    assert ledger.by("kind", value="sent") == {"all-reduce": 64, "all-gather": 2_250_000}
    with pytest.raises(ValueError, match="ranks"):
        _ = Collective("all-reduce", ("data",), "float32", 1, 64).sent
    assert str(ledger).splitlines() == [
        "kind        axes  dtype     count      bytes       sent",
        "all-reduce  data  float32       1         64         64",
        "all-gather  fsdp  bfloat16      3  3,000,000  2,250,000  asynchronous overlapped in_loop",
    ]


def test_errors(mesh: Mesh) -> None:
    abstract = AbstractMesh(SIZES, AXES)
    with pytest.raises(ValueError, match="mesh has 8 devices, the program 4; give the mesh"):
        Ledger.from_hlo(hlo("replica_groups={}").replace("num_partitions=8", "num_partitions=4"), abstract)
    with pytest.raises(ValueError, match=r"the form of replica_groups is not known: 'ring\(8\)"):
        Ledger.from_hlo(hlo("replica_groups=ring(8)"), abstract)
    with pytest.raises(ValueError, match="HLO dtype 'q7' of a collective is not known"):
        Ledger.from_hlo(hlo("replica_groups={}", dtype="q7"), abstract)
    jaxpr = jax.make_jaxpr(mapped(lambda x: lax.psum(x, "fsdp"), mesh))(jnp.ones((64, 6)))
    with pytest.raises(ValueError, match=r"psum runs over \['fsdp'\], mesh has \('data',\); give the mesh of the shar"):
        Ledger.from_jaxpr(jaxpr, AbstractMesh((8,), ("data",)))
    with pytest.raises(ValueError, match=r"a collective has no \['axis'\]; use kind, axes, dtype, count, bytes"):
        Ledger().by("axis")
    with pytest.raises(ValueError, match="value='kind' cannot be summed; use 'bytes', 'sent' or 'count'"):
        Ledger().by("axes", value="kind")
    with pytest.raises(ValueError, match=r"axes='fsdp' is no tuple of axes; use for example axes=\('fsdp',\)"):
        Ledger().total(axes="fsdp")
    with pytest.raises(ValueError, match="kind='allgather' is no collective; use all-reduce, all-gather"):
        Ledger().total(kind="allgather")
