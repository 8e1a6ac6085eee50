"""FP8: products equal a reference, every strategy computes the numbers of one device, and kernels run in FP8."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import check as check_cell
from cells import initial
from flax import nnx
from jax.sharding import Mesh

import jaxpar as jp
from jaxpar.collectives.compiling import compiler_options
from jaxpar.hardware import target
from jaxpar.hardware.compiled.cost import Costs
from jaxpar.inspect.check import check
from jaxpar.inspect.explain import explain
from jaxpar.inspect.ledger import Ledger
from jaxpar.layout import precision
from jaxpar.layout.precision import quantised
from jaxpar.models import llama, mixtral
from jaxpar.numerics.fp8.product import ScaledProduct, product
from jaxpar.parallel.data import eight_bits

SGD = optax.sgd(0.05, momentum=0.9)
STEPS = 2
# Different orders of float32 sums differ in the last bits. One of about 10^6 values then rounds to another FP8 number,
# and from there on one token of 32 differs by FP8's rounding. All other tokens differ by 4e-7.
ROUNDING_TOLERANCE = 0.02


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float32 except for FP8 products, and these in e5m2.

    Rounding to bfloat16 would hide differences. The range of e5m2 is so large that a part of a row underflows no more
    elements than the whole row.
    """
    monkeypatch.setitem(precision._DTYPES, "fp8", jnp.float32)
    for module in (precision, eight_bits):  # both name the dtype: one quantises, the other reads what was gathered
        monkeypatch.setattr(module, "F8", jnp.float8_e5m2)
    monkeypatch.setattr(precision, "_F8_MAX", float(jnp.finfo(jnp.float8_e5m2).max))


def _rounded(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Return x rounded to FP8 with one scale along `dims`; the powers of two are computed by logarithms."""
    amax = jnp.abs(x).max(dims, keepdims=True)
    factor = 2.0 ** jnp.floor(jnp.log2(448 / amax))
    return (x * factor).astype(jnp.float8_e4m3fn).astype(jnp.float32) / factor


@pytest.mark.parametrize(
    ("spec", "a", "b", "weight"),
    [
        ("btd,df->btf", (2, 3, 24), (24, 16), 1),
        ("bthk,hkd->btd", (2, 3, 4, 6), (4, 6, 16), 1),
        ("btd,dhk->bthk", (2, 3, 24), (24, 4, 6), 1),
        ("bhtk,khd->btd", (2, 4, 3, 6), (6, 4, 16), 1),  # dims of the weight in another order than the activation's
        ("df,btd->fbt", (24, 16), (2, 3, 24), 0),
        ("ecd,edf->ecf", (3, 5, 24), (3, 24, 16), 1),
    ],
)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_a_product_and_its_gradients_are_the_plain_ones(
    spec: str, a: tuple[int, ...], b: tuple[int, ...], weight: int, scaling: str
) -> None:
    # 1. Translate the einsum to `dot_general`: each operand is a string with a letter for each dim.
    inputs, result_dims = spec.split("->")
    operands = inputs.split(",")
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = (jax.random.normal(key, shape) for key, shape in zip(keys, (a, b), strict=False))
    shared = [c for c in operands[0] if c in operands[1]]
    sums, batch = [c for c in shared if c not in result_dims], [c for c in shared if c in result_dims]
    numbers: Any = tuple(
        tuple(tuple(operand.index(c) for c in letters) for operand in operands) for letters in (sums, batch)
    )
    config = ScaledProduct(numbers, jnp.dtype("float32"), weight, "w", scaling)
    order = "".join([*batch, *(c for operand in operands for c in operand if c not in shared)])
    assert order == result_dims  # the order in which dot_general returns dims
    scaled = lambda operand, letters: letters if scaling == "row" else [c for c in operand if c not in batch]
    dims = lambda operand, letters: tuple(operand.index(c) for c in scaled(operand, letters))
    w, activation = operands[weight], operands[1 - weight]
    free_of_w = [c for c in w if c not in shared]  # summed in the gradient of the activation

    # 2. Compare the product and its gradients with einsums of rounded operands.
    @jax.jit
    def results_and_expected(x: jax.Array, y: jax.Array) -> Any:
        result, vjp = jax.vjp(functools.partial(product, config), x, y)
        expected = jnp.einsum(spec, _rounded(x, dims(operands[0], sums)), _rounded(y, dims(operands[1], sums)))
        g = jax.random.normal(keys[2], expected.shape)
        rounded_g, rounded_w = _rounded(g, dims(result_dims, free_of_w)), _rounded((x, y)[weight], dims(w, free_of_w))
        activation_grad = jnp.einsum(f"{result_dims},{w}->{activation}", rounded_g, rounded_w)
        w_grad = jnp.einsum(f"{result_dims},{activation}->{w}", g, (x, y)[1 - weight])
        grads = (activation_grad, w_grad) if weight else (w_grad, activation_grad)
        return (result, *vjp(g)), (expected, *grads)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, *results_and_expected(x, y))


def test_scales_are_powers_of_two_and_each_row_is_its_own() -> None:
    x = jnp.array([[3.0, -500.0], [0.0, 0.0], [1e-38, 1e-39], [jnp.nan, 1.0], [jnp.inf, 1.0], [448.0, 1.0]])
    low, scale = quantised(x.astype(jnp.bfloat16), (1,))
    assert low.dtype == jnp.float8_e4m3fn
    assert np.isfinite(scale[:3]).all()
    assert (np.frexp(np.asarray(scale, np.float32)[[0, 1, 2, 5]])[0] == 0.5).all()
    with np.errstate(invalid="ignore"):
        dequantised = np.asarray(low, np.float32) * np.asarray(scale, np.float32)
    np.testing.assert_array_equal(dequantised[0], [3.0, -512.0])  # 4 bits: 500 is between 480 and 512
    np.testing.assert_array_equal(dequantised[1], [0, 0])
    np.testing.assert_array_equal(dequantised[5], [448, 1])
    assert np.isnan(dequantised[3]).any()
    assert np.isnan(dequantised[4]).any()
    assert np.isfinite(dequantised[[0, 1, 2, 5]]).all()


def test_a_part_of_a_row_rounds_as_the_whole() -> None:
    """Scales are powers of two, so that tensor ranks need not use the same ones."""
    x = jax.random.normal(jax.random.key(0), (6, 32)) * 2.0 ** jnp.linspace(0, 6, 32)
    low, scale = quantised(x, (1,))
    parts = [quantised(part, (1,)) for part in jnp.split(x, 4, 1)]
    assert len({float(part_scale[0, 0]) for _, part_scale in parts}) > 1
    values = jnp.concatenate([part.astype(jnp.float32) * part_scale for part, part_scale in parts], 1)
    np.testing.assert_array_equal(values, low.astype(jnp.float32) * scale)


class Block(nnx.Module):
    """A block with two products in FP8, and one product for each reason to stay in the compute dtype."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wide, self.narrow = nnx.Linear(128, 160, rngs=rngs), nnx.Linear(160, 128, rngs=rngs)
        self.small, self.odd = nnx.Linear(128, 16, rngs=rngs), nnx.Linear(128, 130, rngs=rngs)
        self.precise = nnx.Linear(128, 128, rngs=rngs, dtype=jnp.float32)
        self.custom = nnx.Param(jnp.eye(128))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.narrow(jax.nn.relu(self.wide(x))) + _mean(self.small(x)) + _mean(self.odd(x))
        return (x + self.precise(x) + _custom_product(x, self.custom[...])).astype(x.dtype)


def _mean(x: jax.Array) -> jax.Array:
    return x.mean(-1, keepdims=True)


@jax.custom_vjp
def _custom_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


_custom_product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda residuals, g: (g @ residuals[1].T, residuals[0].T @ g),
)


class Blocks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.head = nnx.Linear(128, 128, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.head(x)


@pytest.mark.parametrize("strategy", ["single", "pipe=2,stages=cut,microbatches=2"])
def test_products_that_stay_say_why(strategy: str) -> None:
    model = jp.from_nnx(Blocks, lambda net, batch: jnp.square(net(batch["x"].astype(net.head.kernel.dtype))).mean())
    step = jp.make_train_step(model, SGD, f"{strategy},precision=fp8", mesh=jax.devices()[: 1 + ("pipe" in strategy)])
    traced = _traced(step, {"x": np.zeros((8, 128), np.float32)})
    reasons = {path.replace("*", "0"): reason for path, reason in traced.items()}
    fp8_paths = {path for path, reason in reasons.items() if not reason}
    assert fp8_paths >= {"blocks/0/wide/kernel", "blocks/0/narrow/kernel"}
    assert {path.split("/")[2] for path in fp8_paths} == {"wide", "narrow"}
    assert reasons["blocks/0/small/kernel"] == "128 x 16 features: FP8 needs multiples of 16, from 128"
    assert reasons["blocks/0/odd/kernel"] == "128 x 130 features: FP8 needs multiples of 16, from 128"
    assert reasons["blocks/0/precise/kernel"] == "the model computes them in float32"
    assert reasons["blocks/0/custom"] == "within a function with its own derivative"
    assert reasons["head/kernel"] == "of no layer of a stack or list"


def test_paths_that_are_excepted_stay() -> None:
    model, text = _models()["llama"], _text()
    reasons_of = lambda parts: _traced(jp.make_train_step(model, SGD, f"single,precision=fp8,fp8_except={parts}"), text)
    for parts in ("ffn/down:attention", "*/down:atten*"):
        reasons = reasons_of(parts)
        fp8_paths = [path for path, reason in reasons.items() if not reason]
        assert fp8_paths == ["layers/ffn/gate/kernel", "layers/ffn/up/kernel"]
        assert reasons["layers/ffn/down/kernel"] == f"fp8_except={parts.partition(':')[0]}"
    with pytest.raises(ValueError, match=r"fp8_except='ffn/dow': ffn/dow is in .* no leaf.*a part of layers/attention"):
        reasons_of("ffn/dow")
    for options, message in (
        ("fp8,server=true", r"server=True with precision='fp8'.*use ddp, or precision='bf16'"),
        ("bf16,fp8_except=ffn", r"precision='bf16' in .*fp8_except=ffn: .* use precision='fp8'"),
        ("fp8,fp8_scaling=block", r"fp8_scaling='block' is unknown; .* row, tensor \(XLA has no kernel for blocks"),
        ("mxfp8", r"precision='mxfp8' is unknown; .*\(mxfp8 and nvfp4 have kernels for B200 alone, .*precision.md\)"),
        ("bf16,fp8_scaling=tensor", r"precision='bf16' in .*fp8_scaling=tensor: .* use precision='fp8'"),
    ):
        with pytest.raises(ValueError, match=message):
            jp.Strategy.parse(f"ddp,precision={options}")


CONFIG = llama.Config(vocab=64, dim=128, layers=2, heads=4, kv_heads=4, ffn=128)


def _text(rows: int = 8, length: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 64, (rows, length + 1)).astype(np.int32)
    return {"tokens": tokens, "mask": rng.uniform(0.1, 2.0, (rows, length)).astype(np.float32)}


@functools.cache
def _models() -> dict[str, Any]:
    moe = mixtral.Config(vocab=64, dim=128, layers=2, heads=4, kv_heads=2, ffn=128, experts=4)
    return {
        "llama": jp.from_nnx(lambda rngs: llama.Llama(CONFIG, rngs=rngs), llama.loss),
        "mixtral": jp.from_nnx(lambda rngs: mixtral.Mixtral(moe, rngs=rngs), mixtral.loss, rows="independent"),
    }


@pytest.mark.parametrize("strategy", ["tensor=2", "expert=2"])
def test_no_layout_chooses_other_products(strategy: str) -> None:
    """A weight that tensor ranks cut was not followed, so that its products stayed in bfloat16."""
    model, text = _models()["mixtral"], _text()
    one = jp.make_train_step(model, SGD, "single,precision=fp8")
    step = jp.make_train_step(model, SGD, f"{strategy},precision=fp8", mesh=jax.devices()[:2])
    assert _traced(step, text) == _traced(one, text)
    assert not _traced(step, text)["layers/ffn/experts/down"]


@functools.cache
def _one_device(name: str, scaling: str) -> tuple[Any, Any, Any]:
    """Return the initial parameters, the gradients of the first step, and the trained parameters; call it in `wide`."""
    model = _models()[name]
    step = jp.make_train_step(model, SGD, f"single,precision=fp8,fp8_scaling={scaling}")
    assert not all(_traced(step, _text()).values())
    initial_params, momentum = initial(model), None
    state = step.init(jax.random.key(0), params=initial_params)
    for _ in range(STEPS):
        state, _ = step(state, _text())
        # The momentum after one step is the first gradient.
        momentum = jax.device_get(state.optimizer[0].trace) if momentum is None else momentum
    return initial_params, model.unwrap(momentum), model.unwrap(jax.device_get(step.params(state)))


def _traced(step: Any, batch: Any) -> Any:
    return step.traced(step.shapes(batch)).notes.fp8


@pytest.mark.battery
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        *(
            (strategy, "llama")
            for strategy in (
                "ddp",
                "fsdp=4,zero=2,microbatches=2",
                "fsdp=4,remat=layer",
                "fsdp=2,prefetch=1,microbatches=2",
                "fsdp=4,gather=fp8,remat=layer",
                "fsdp=2,tensor=2,gather=fp8,prefetch=1,microbatches=2",
                "pipe=2,fsdp=2,gather=fp8,microbatches=4,schedule=zb-h1",
                "tensor=2,remat=dots",
                "tensor=2,sequence=true,fsdp=2,microbatches=2",
                "tensor=2,data=2,concurrent=2,microbatches=2",
                "pipe=2,microbatches=4",
                "pipe=2,microbatches=4,schedule=zb-h1,tensor=2",
                "pipe=2,microbatches=4,schedule=zb-h1,remat=twice",
                "pipe=2,microbatches=2,stages=cut",
                "context=2,tensor=2",
                "context=2,attention=ring,remat=layer",
                "ddp,fp8_scaling=tensor",
                "fsdp=4,zero=2,microbatches=2,fp8_scaling=tensor",
                "fsdp=4,remat=layer,fp8_scaling=tensor",
                "fsdp=2,tensor=2,microbatches=2,fp8_scaling=tensor",
                "tensor=2,sequence=true,fp8_scaling=tensor",
                "pipe=2,microbatches=4,fp8_scaling=tensor",
                "pipe=2,microbatches=4,schedule=zb-h1,fp8_scaling=tensor",
                "context=2,attention=ring,fp8_scaling=tensor",
            )
        ),
        ("expert=2,fsdp=2", "mixtral"),
        ("expert=2,tensor=2", "mixtral"),
        ("expert=2,fsdp=2,fp8_scaling=tensor", "mixtral"),
    ],
)
def test_gradients_are_one_devices(strategy: str, name: str) -> None:
    model = _models()[name]
    initial_params, grads, params = _one_device(name, "tensor" if "fp8_scaling=tensor" in strategy else "row")
    sizes = re.findall(r"(?:data|fsdp|tensor|pipe|context|expert)=(\d)", strategy)
    mesh = jax.devices()[: math.prod(map(int, sizes))] if sizes else None
    step = jp.make_train_step(model, SGD, f"{strategy},precision=fp8", mesh=mesh)
    check_cell(step, model, initial_params, _text(), STEPS, grads, params, ROUNDING_TOLERANCE)


@pytest.mark.battery
@pytest.mark.parametrize("strategy", ["fsdp=2", "tensor=2"])
def test_verify_has_the_same_products_on_one_device(strategy: str) -> None:
    batch = {"tokens": _text()["tokens"]}
    report = jp.verify(_models()["llama"], f"{strategy},precision=fp8", batch, steps=1, mesh=jax.devices()[:2])
    assert report.ok, report
    assert report.tolerance == 0.25


def _compiled(devices: str, strategy: str) -> Any:
    step = jp.make_train_step(_models()["llama"], SGD, strategy, mesh=target(devices).devices)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 129), jnp.int32)}
    return step, batch, step.compile(batch)


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.parametrize(
    "strategy",
    [
        "tensor=2",
        *(
            pytest.param(strategy, marks=pytest.mark.battery)
            for strategy in ("fsdp=2,remat=layer,gather=fp8", "tensor=2,fp8_scaling=tensor")
        ),
    ],
)
def test_promised_products_are_fp8_kernels(strategy: str) -> None:
    step, batch, compiled = _compiled("2xH100", f"{strategy},precision=fp8")
    proof = check(step, batch, compiled)
    assert proof.ok, proof
    (finding,) = [finding for finding in proof.findings if finding.part == "products"]
    assert finding.promised == finding.found
    calls = re.findall(r"custom-call\(([^)]*)\), custom_call_target=\"__cublas\$lt\$matmul\$f8", compiled.as_text())
    # Only a scale for a whole tensor is applied by the kernel itself.
    kernel_scales = ["constant" not in call.split(", ")[2] for call in calls]
    assert kernel_scales
    assert any(kernel_scales) == ("fp8_scaling=tensor" in strategy)
    ledger = Ledger.from_hlo(compiled.as_text(), step.mesh)
    assert any(sent.dtype == "uint8" for sent in ledger) == ("gather" in strategy)
    flops = Costs.from_hlo(compiled.as_text()).flops
    layer = 4 * CONFIG.dim**2 + 3 * CONFIG.dim * CONFIG.ffn
    recomputed = layer - CONFIG.dim * CONFIG.ffn if "remat" in strategy else 0  # the last product is not recomputed
    assert flops["float8_e4m3fn"] == 2 * (2 * layer + recomputed) * CONFIG.layers * 8 * 128 // 2
    page = " ".join(str(explain(step, batch, compiled)).split())
    assert re.search(r"are in FP8( with a scale for each tensor)?, but for those of the gradients of weights", page)
    assert "Products of head/kernel stay in bfloat16: of no layer" in page


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_products_that_fall_back_are_named() -> None:
    step, batch, compiled = _compiled("2xA100-80GB", "fsdp=2,precision=fp8")
    broken = [finding for finding in check(step, batch, compiled).broken if finding.part == "products"]
    assert broken
    assert all(finding.verdict == "MISSING" for finding in broken)
    assert any("layers.ffn.down.kernel: no FP8 kernel for this device" in finding.note for finding in broken)


@pytest.mark.cuda_compiler
def test_the_compilers_option_is_there_for_fp8_alone() -> None:
    option = {"xla_gpu_enable_triton_gemm": False}
    for devices in (1, 2):
        mesh = Mesh(np.array(target(f"{devices}xH100").devices), ("fsdp",))
        assert option.items() <= (compiler_options(mesh, ("fsdp",), fp8=True) or {}).items()
        assert not option.keys() & (compiler_options(mesh, ("fsdp",)) or {}).keys()
