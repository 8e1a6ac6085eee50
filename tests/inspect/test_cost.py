"""FLOPs and bytes of compiled programs equal closed forms, matmul by matmul, from the CPU's and the H100's compiler."""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.hardware.compiled.cost import Costs
from jaxpar.hardware.compiled.hlo import Module, nbytes
from jaxpar.hardware.compiled.kernels import Executable, Start, While, traffic
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import named

X = jnp.ones(8 * 24)


def text_of(function: Any, *arguments: Any) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def flops_by_size(costs: Costs) -> Counter:
    """Return the FLOPs of products by their three sizes, in any order, as compilers transpose them."""
    flops: Counter = Counter()
    for product, num_runs in costs.products:
        flops[tuple(sorted((product.batch * product.m, product.n, product.k)))] += num_runs * product.flops
    return flops


# -- a step of Llama ---------------------------------------------------------------------------------------------------


def weights(config: Any) -> Counter:
    """Return (in, out) of every weight that multiplies, and how often. The embedding is looked up, not multiplied."""
    heads, groups = (n * config.head_dim for n in (config.heads, config.kv_heads))
    layer = [(config.dim, n) for n in (heads, groups, groups, config.ffn, config.ffn)]
    layer += [(heads, config.dim), (config.ffn, config.dim)]
    return Counter(config.layers * layer) + Counter([(config.dim, config.vocab)])


def recomputed(config: Any) -> int:
    """Return the elements of weights that multiply again under remat="layer": all but the unread `down`."""
    layer_elements = config.dim * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    return config.layers * (layer_elements + 2 * config.dim * config.ffn)


@pytest.mark.parametrize(
    "strategy", ["fsdp=8", pytest.param("data=4,fsdp=2,microbatches=2", marks=pytest.mark.battery)]
)
def test_flops_of_llama_matmul_by_matmul(strategy: str) -> None:
    model = named("llama-tiny", layers=2, vocab=300, ffn=352)
    step = jp.make_train_step(model.model, optax.sgd(1e-3), strategy)
    rows, length, config = 16, 23, model.config
    costs = Costs.from_hlo(step.compile(model.example(rows, length)).as_text())
    num_microbatches = step.strategy.microbatches
    tokens = rows * length // 8 // num_microbatches  # in one matmul, of one device
    expected: Counter = Counter()
    for (a, b), num_runs in weights(config).items():
        expected[tuple(sorted((tokens, a, b)))] += 3 * num_runs * num_microbatches * 2 * tokens * a * b
    remaining = flops_by_size(costs)
    for size, flops in expected.items():
        assert remaining.pop(size) == flops, size
    # The remaining products are attention as XLA computes it: scores twice, values once, and four products backward.
    assert sum(remaining.values()) == 7 * (rows // 8) * scores(config, length)


@pytest.mark.slow
def test_flops_of_recomputed_layers() -> None:
    model = named("llama-tiny", layers=2, vocab=300, ffn=352)
    rows, length, config = 8, 23, model.config
    step = jp.make_train_step(model.model, optax.sgd(1e-3), "fsdp=8,remat=layer")
    flops = Costs.from_hlo(step.compile(model.example(rows, length)).as_text()).flops
    elements = sum(a * b * num_runs for (a, b), num_runs in weights(config).items())
    attention = flops["float32"] - 2 * length * (3 * elements + recomputed(config))
    # Forward, recomputation and backward: 2 + 2 + 4. Attention recomputes the scores, unless XLA has them already.
    assert attention in (8 * scores(config, length), 9 * scores(config, length))


def scores(config: Any, length: int) -> int:
    """Return the FLOPs of one of attention's products, for one row, in all layers."""
    return 2 * config.layers * config.heads * length**2 * config.head_dim


# -- convolutions ------------------------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "plain": {},
    "valid": {"padding": "VALID"},
    "strided": {"window_strides": (2, 3)},
    "dilated": {"rhs_dilation": (2, 1)},
    "holes": {"lhs_dilation": (2, 2), "padding": [(1, 2), (0, 1)]},
    "grouped": {"feature_group_count": 3},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=list(CONVOLUTIONS))
def test_flops_of_convolutions(options: dict[str, Any]) -> None:
    """Forward and both gradients have as many multiply-adds each as the sum of a convolution of ones."""
    groups = options.get("feature_group_count", 1)
    x, w = jnp.ones((5, 11, 9, 6)), jnp.ones((3, 5, 6 // groups, 12))

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, **{"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": dims} | options
        )

    text = text_of(lambda x, w: jax.value_and_grad(lambda *xw: (convolve(*xw) ** 2).sum(), (0, 1))(x, w), x, w)
    adds = int(convolve(x, w).sum())
    assert Costs.from_hlo(text).flops == {"float32": 3 * 2 * adds}


# -- loops and branches ------------------------------------------------------------------------------------------------


def test_loops_count_by_their_trips() -> None:
    def outer(x: jax.Array, w: jax.Array) -> jax.Array:
        inner = lambda x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return lax.fori_loop(0, 5, lambda _, x: inner(x), x)

    costs = Costs.from_hlo(text_of(outer, jnp.ones((3, 7)), jnp.ones((11, 7, 7))))
    assert costs.flops == {"float32": 5 * 11 * 2 * 3 * 7 * 7}
    (cost,) = [cost for cost in costs if cost.kernel.products]
    assert (cost.executions, cost.conditional, cost.kernel.kind) == (55, False, "matmul")


def test_a_loop_of_unknown_length_has_no_sum() -> None:
    text = text_of(lambda x: lax.while_loop(lambda x: x.sum() < 1000, lambda x: x @ x, x), 2.0 * jnp.eye(7))
    costs = Costs.from_hlo(text)
    assert [cost.executions for cost in costs if cost.kernel.products] == [None]
    with pytest.raises(ValueError, match=r"unknown length and cannot be summed; use lax.scan"):
        _ = costs.flops


def test_of_branches_the_one_that_computes_most_counts() -> None:
    def function(which: jax.Array, x: jax.Array) -> jax.Array:
        return lax.switch(which, [lambda x: x @ x, lambda x: x @ x @ x @ x, lambda x: x + 1], x)

    costs = Costs.from_hlo(text_of(function, jnp.int32(0), jnp.ones((7, 7))))
    assert costs.flops == {"float32": 3 * 2 * 7**3}
    assert all(cost.conditional for cost in costs if cost.kernel.products)


# -- libraries' kernels, as the GPU compiler writes them ---------------------------------------------------------------

HEAD = "HloModule m, is_scheduled=true\n\n"
GEMM = (
    HEAD + """ENTRY %main (a: bf16[5,40,96], b: bf16[5,56,96]) -> bf16[5,40,56] {
  %a = bf16[5,40,96]{2,1,0} parameter(0)
  %b = bf16[5,56,96]{2,1,0} parameter(1)
  %gemm = (bf16[5,40,56]{2,1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", """
    """metadata={op_name="jit(f)/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":"""
    """{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"],"""
    """"rhs_batch_dimensions":["0"]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}
  ROOT %out = bf16[5,40,56]{2,1,0} get-tuple-element(%gemm), index=0
}
"""
)


def attention_text(window: int = 0, mask: str = "CAUSAL", backward: bool = False) -> str:
    """Return HLO of attention: 3 rows, 6 heads on 2 of keys and values, 128 queries and keys, head_dim 32."""
    q, kv = "bf16[3,128,6,32]{3,2,1,0}", "bf16[3,128,2,32]{3,2,1,0}"
    operands = {"q": q, "k": kv, "v": kv} | ({"s": "f32[3,6,128]{2,1,0}", "g": q, "o": q} if backward else {})
    lines = [f"  %{name} = {shape} parameter({number})" for number, (name, shape) in enumerate(operands.items())]
    target_ = "__cudnn$fmhaSoftmax" + "Backward" * backward
    config = (
        '{"cudnn_fmha_backend_config": {"fmha_scale": 0.1, "intermediate_tensor_shape": {"element_type": "BF16", '
        f'"dimensions": ["3", "6", "128", "128"]}}, "mask_type": "{mask}", "sliding_window_length": {window}}}}}'
    )
    names = ", ".join(f"%{name}" for name in operands)
    return (
        f"{HEAD}ENTRY %main () -> {q} {{\n"
        + "\n".join(lines)
        + f'\n  %fmha = ({q}, f32[3,6,128]{{2,1,0}}, u8[0]{{0}}) custom-call({names}), custom_call_target="{target_}", '
        f"backend_config={config}\n  ROOT %out = {q} get-tuple-element(%fmha), index=0\n}}\n"
    )


def test_calls_of_cublas() -> None:
    (cost,) = Costs.from_hlo(GEMM)
    (product,) = cost.kernel.products
    assert (product.batch, product.m, product.n, product.k) == (5, 40, 56, 96)
    assert product.flops == 2 * 5 * 40 * 56 * 96
    assert not product.precise
    assert (cost.kernel.label, cost.kernel.source) == ("__cublas$lt$matmul", "jit(f)/dot_general")
    assert cost.kernel.read == 2 * 5 * 96 * (40 + 56)
    exact = Costs.from_hlo(GEMM.replace('["DEFAULT","DEFAULT"]', '["HIGHEST","HIGHEST"]'))
    assert exact[0].kernel.products[0].precise


@pytest.mark.parametrize(("backward", "products"), [(False, 2), (True, 5)])
def test_calls_of_cudnn_attention(backward: bool, products: int) -> None:
    full = products * 2 * 3 * 6 * 128 * 128 * 32
    for mask, window, seen in [("NO_MASK", 0, 1), ("CAUSAL", 0, 1 / 2), ("CAUSAL", 32, (32 * 224) / (2 * 128 * 128))]:
        (cost,) = Costs.from_hlo(attention_text(window, mask, backward))
        (product,) = cost.kernel.products
        assert (product.batch, product.m, product.n, product.k) == (18, 128, 128, 32)
        assert (product.flops, product.full_flops) == (full * seen, full)
        assert product.causal == (mask == "CAUSAL")
        assert cost.kernel.kind == "attention" + " backward" * backward


# -- bytes -------------------------------------------------------------------------------------------------------------

STACK = (
    HEAD
    + """%slice_of_layer (p: f32[40,8,16], i: s32[], q: bf16[40,8,16]) -> (bf16[1,8,16], bf16[40,8,16]) {
  %p = f32[40,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %layer = f32[1,8,16]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,8,16}
  %cast = bf16[1,8,16]{2,1,0} convert(%layer)
  %q = bf16[40,8,16]{2,1,0} parameter(2)
  %into = bf16[40,8,16]{2,1,0} dynamic-update-slice(%q, %cast, %i, %zero, %zero)
  ROOT %both = (bf16[1,8,16]{2,1,0}, bf16[40,8,16]{2,1,0}) tuple(%cast, %into)
}

%rows (table: bf16[900,64], ids: s32[7,1]) -> bf16[7,64] {
  %table = bf16[900,64]{1,0} parameter(0)
  %ids = s32[7,1]{1,0} parameter(1)
  ROOT %found = bf16[7,64]{1,0} gather(%table, %ids), offset_dims={1}, slice_sizes={1,64}
}

%cast_rows (wide: f32[900,64], ids: s32[7,1]) -> bf16[7,64] {
  %wide = f32[900,64]{1,0} parameter(0)
  %ids = s32[7,1]{1,0} parameter(1)
  %narrow = bf16[900,64]{1,0} convert(%wide)
  ROOT %found = bf16[7,64]{1,0} gather(%narrow, %ids), offset_dims={1}, slice_sizes={1,64}
}

%cast_all (wide: f32[900,64]) -> (bf16[57600], f32[900,64]) {
  %wide = f32[900,64]{1,0} parameter(0)
  %narrow = bf16[900,64]{1,0} convert(%wide)
  %flat = bf16[57600]{0} bitcast(%narrow)
  ROOT %both = (bf16[57600]{0}, f32[900,64]{1,0}) tuple(%flat, %wide)
}

%part_of_sum (a: f32[900,64], b: f32[900,64]) -> f32[7,64] {
  %a = f32[900,64]{1,0} parameter(0)
  %b = f32[900,64]{1,0} parameter(1)
  %exp = f32[900,64]{1,0} exponential(%a)
  %product = f32[900,64]{1,0} multiply(%a, %exp)
  %total = f32[900,64]{1,0} add(%product, %b)
  ROOT %part = f32[7,64]{1,0} slice(%total), slice={[0:7], [0:64]}
}

%sum_and_part (a: f32[900,64], b: f32[900,64]) -> (f32[7,64], f32[57600]) {
  %a = f32[900,64]{1,0} parameter(0)
  %b = f32[900,64]{1,0} parameter(1)
  %total = f32[900,64]{1,0} add(%a, %b)
  %flat = f32[57600]{0} bitcast(%total)
  %part = f32[7,64]{1,0} slice(%total), slice={[0:7], [0:64]}
  ROOT %both = (f32[7,64]{1,0}, f32[57600]{0}) tuple(%part, %flat)
}

%cast_update (p: f32[40,8,16], i: s32[], layer: f32[1,8,16]) -> bf16[40,8,16] {
  %p = f32[40,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %layer = f32[1,8,16]{2,1,0} parameter(2)
  %updated = f32[40,8,16]{2,1,0} dynamic-update-slice(%p, %layer, %i, %i, %i)
  ROOT %cast = bf16[40,8,16]{2,1,0} convert(%updated)
}

%update_of_cast (p: f32[40,8,16], i: s32[], layer: bf16[1,8,16]) -> bf16[40,8,16] {
  %p = f32[40,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %layer = bf16[1,8,16]{2,1,0} parameter(2)
  %cast = bf16[40,8,16]{2,1,0} convert(%p)
  ROOT %updated = bf16[40,8,16]{2,1,0} dynamic-update-slice(%cast, %layer, %i, %i, %i)
}

%added (grads: f32[900,64], ids: s32[7,1], new: f32[7,64]) -> f32[900,64] {
  %grads = f32[900,64]{1,0} parameter(0)
  %ids = s32[7,1]{1,0} parameter(1)
  %new = f32[7,64]{1,0} parameter(2)
  ROOT %sum = f32[900,64]{1,0} scatter(%grads, %ids, %new), update_window_dims={1}, to_apply=%add
}

ENTRY %main (p: f32[40,8,16], i: s32[], q: bf16[40,8,16]) -> bf16[40,8,16] {
  %p = f32[40,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %q = bf16[40,8,16]{2,1,0} parameter(2)
  %table = bf16[900,64]{1,0} parameter(3)
  %ids = s32[7,1]{1,0} parameter(4)
  %grads = f32[900,64]{1,0} parameter(5)
  %new = f32[7,64]{1,0} parameter(6)
  %layer = bf16[1,8,16]{2,1,0} parameter(7)
  %step = (bf16[1,8,16]{2,1,0}, bf16[40,8,16]{2,1,0}) fusion(%p, %i, %q), kind=kLoop, calls=%slice_of_layer
  %looked = bf16[7,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%rows
  %cast = bf16[7,64]{1,0} fusion(%grads, %ids), kind=kLoop, calls=%cast_rows
  %all = (bf16[57600]{0}, f32[900,64]{1,0}) fusion(%grads), kind=kLoop, calls=%cast_all
  %part = f32[7,64]{1,0} fusion(%grads, %grads), kind=kLoop, calls=%part_of_sum
  %part_too = (f32[7,64]{1,0}, f32[57600]{0}) fusion(%grads, %grads), kind=kLoop, calls=%sum_and_part
  %new_layer = f32[1,8,16]{2,1,0} convert(%layer)
  %update_cast = bf16[40,8,16]{2,1,0} fusion(%p, %i, %new_layer), kind=kLoop, calls=%cast_update
  %cast_updated = bf16[40,8,16]{2,1,0} fusion(%p, %i, %layer), kind=kLoop, calls=%update_of_cast
  %summed = f32[900,64]{1,0} fusion(%grads, %ids, %new), kind=kInput, calls=%added
  %apart = ((bf16[900,64], s32[7,1]), bf16[7,64]{1,0}, u32[]) fusion-start(%table, %ids), kind=kLoop, calls=%rows
  %back = bf16[7,64]{1,0} fusion-done(%apart)
  %copy = f32[40,8,16]{2,1,0} copy(%p)
  %bare = bf16[40,8,16]{2,1,0} dynamic-update-slice(%q, %layer, %i, %i, %i)
  %pair = (f32[900,64], f32[900,64]) scatter(%grads, %grads, %ids, %new, %new), to_apply=%add
  ROOT %out = bf16[40,8,16]{2,1,0} get-tuple-element(%step), index=1
}
"""
)


def test_slices_count_and_not_what_they_are_cut_from() -> None:
    layer, row = 8 * 16, 64
    read_and_written = {cost.kernel.name: (cost.kernel.read, cost.kernel.written) for cost in Costs.from_hlo(STACK)}
    assert read_and_written == {
        "step": (4 * layer + 4, 2 * 2 * layer),
        "looked": (2 * 7 * row + 4 * 7, 2 * 7 * row),
        "cast": (4 * 7 * row + 4 * 7, 2 * 7 * row),  # of the table that it casts, no more than the rows that it takes
        "all": (4 * 900 * row, 2 * 900 * row),  # a cast of the whole table reads all of it; it counted as no read
        "part": (2 * 4 * 7 * row, 4 * 7 * row),  # of elementwise results; their operands counted as read whole
        "part_too": (2 * 4 * 900 * row, 4 * (7 + 900) * row),
        "new_layer": (2 * layer, 4 * layer),
        "update_cast": (4 * 40 * layer + 4 + 4 * layer, 2 * 40 * layer),  # the updated array counted as not read
        "cast_updated": (4 * 40 * layer + 4 + 2 * layer, 2 * 40 * layer),  # its update alone counted as written
        "apart": (2 * 7 * row + 4 * 7, 2 * 7 * row),  # on a stream of its own, as jax 0.12 launches them
        "summed": (2 * 4 * 7 * row + 4 * 7, 4 * 7 * row),
        "copy": (4 * 40 * layer, 4 * 40 * layer),
        "bare": (2 * layer + 3 * 4, 2 * layer),  # the update counted twice
        "pair": (2 * 2 * 4 * 7 * row + 4 * 7, 2 * 4 * 7 * row),  # the second target counted as the update
    }
    assert Costs.from_hlo(STACK).bytes == sum(map(sum, read_and_written.values()))


def test_a_loop_over_a_stack_reads_it_once() -> None:
    """The sizes of the operands alone would count it in every iteration."""
    layers, width = 50, 33
    stack = jnp.ones((layers, width, width))
    text = text_of(lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x + w), None), x, w)[0], stack[0], stack)
    read = sum(cost.kernel.read * cost.executions for cost in Costs.from_hlo(text))
    assert stack.nbytes < read < 5 * stack.nbytes


def test_sizes_of_shapes() -> None:
    assert nbytes("(f8e4m3fn[3,5]{1,0}, s4[7]{0}, pred[3], c64[2]{0}, token[])") == 15 + 4 + 3 + 16
    module = Module(GEMM, ())
    (gemm,) = [i for i in module.computations[module.entry] if i.opcode == "custom-call"]
    shapes = {i.name: i.shape for i in module.computations[module.entry]}
    assert traffic(module, gemm, shapes)[1] == 2 * 5 * 40 * 56 + 4096


# -- programs ----------------------------------------------------------------------------------------------------------


def test_a_program_has_the_collectives_of_its_ledger() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def local(x: jax.Array) -> jax.Array:
        gathered = lambda x: lax.all_gather(x, "fsdp", tiled=True).reshape(4, -1).sum(0)
        x = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(gathered(x)), x)
        return lax.psum(x, ("data", "fsdp")) + lax.ppermute(x, "data", [(0, 1), (1, 0)])

    text = text_of(jax.shard_map(local, mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=P(("data", "fsdp"))), X)
    bytes_by_kind: Counter = Counter()

    def walk(operations: Any, times: int) -> None:
        for operation in operations:
            if isinstance(operation, Start):
                bytes_by_kind[operation.kind, operation.axes] += times * operation.bytes
                group_size = math.prod(mesh.shape[axis] for axis in operation.axes)
                assert {len(group) for group in operation.groups} == {group_size}
                assert operation.waits  # the CPU's collectives are synchronous
            elif isinstance(operation, While):
                walk(operation.body, times * (operation.trips or 1))

    walk(Executable(text, mesh).operations, 1)
    assert bytes_by_kind == Ledger.from_hlo(text, mesh).by("kind", "axes")
    assert bytes_by_kind["all-gather", ("fsdp",)] == 3 * X.nbytes // 2


# -- loops of unknown length -------------------------------------------------------------------------------------------

# As the TPU compiler writes loops: with no known trip count, and a counter that is copied.
LOOP = """HloModule loop, is_scheduled=true

%body (b: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %b = (s32[], f32[8,8]{1,0}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%b), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%b), index=1
  %one = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%at, %one)
  %product = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[8,8]{1,0}) tuple(%next, %product)
}

%condition (c: (s32[], f32[8,8])) -> pred[] {
  %c = (s32[], f32[8,8]{1,0}) parameter(0)
  %most = s32[]{:T(128)} constant(7)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %most), direction=LT
}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %zero = s32[]{:T(128)} constant(2)
  %start = s32[]{:T(128)} copy(%zero)
  %init = (s32[], f32[8,8]{1,0}) tuple(%start, %p)
  %while = (s32[], f32[8,8]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %result = f32[8,8]{1,0} get-tuple-element(%while), index=1
}
"""


def test_loops_count_by_their_condition_where_the_compiler_says_nothing() -> None:
    """Loops of TPU programs were counted once, and `check` called entire strategies broken."""
    assert Costs.from_hlo(LOOP.replace("STEP", "1")).flops == {"float32": 5 * 2 * 8**3}
    unknown = Costs.from_hlo(LOOP.replace("STEP", "2"))
    assert [cost.executions for cost in unknown if cost.kernel.products] == [None]
