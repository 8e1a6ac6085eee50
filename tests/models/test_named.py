"""Named models have the published numbers of parameters and operations, and compute what their papers define."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models import NAMES, Named, gpt, named, resnet
from jaxpar.program import jaxpr as jx

# Published numbers of parameters: checkpoints of Meta, OpenAI, Mistral and Qwen, configurations of GaLore, and
# torchvision's documentation.
PUBLISHED = {
    "llama-60m": 58_073_600,
    "llama-130m": 134_105_856,
    "llama-350m": 367_969_280,
    "llama-1b": 1_339_082_752,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "resnet18": 11_689_512,
    "resnet18-small": 11_173_962,
    "resnet50": 25_557_032,
}


def count(model: Named) -> int:
    """Return the number of parameters that the model creates."""
    params, _ = jax.eval_shape(model.model.create, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_counted_and_as_published(name: str) -> None:
    model = named(name)
    assert model.parameters == count(model)
    assert model.parameters == PUBLISHED.get(name, model.parameters)
    assert name in PUBLISHED or model.parameters < 2e8  # our own


def test_changed_sizes_are_counted() -> None:
    """This is one test, so that a sample of the tests covers every family."""
    for model in (
        named("llama-tiny", tied=True, kv_heads=1, layers=3),
        named("gpt-tiny", layers=3, vocab=100),
        named("resnet-tiny", bottleneck=True, blocks=(1, 2), stem=7, channels=2),
        named("mlp-tiny", layers=3, classes=7, size=5),
    ):
        assert model.parameters == count(model), model.name


def test_the_largest_model_costs_nothing_to_name() -> None:
    # Holding the arrays keeps their ids from being reused.
    earlier_arrays = {id(x): x for x in jax.live_arrays()}
    model = named("llama3-405b")
    assert model.example(2, 8192) == {"tokens": jax.ShapeDtypeStruct((2, 8193), jnp.int32)}
    # Threads of other tests may create arrays of a few elements meanwhile.
    assert not [x for x in jax.live_arrays() if id(x) not in earlier_arrays and x.size > 10_000]


def test_names_and_sizes_that_are_not_there_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no model 'lama-tiny'; did you mean 'llama-tiny'\?"):
        named("lama-tiny")
    with pytest.raises(ValueError, match=r"no model 'xyz'; use one of llama-tiny, .*mlp-large"):
        named("xyz")
    with pytest.raises(ValueError, match=r"pass these apart: named\(\"llama-tiny\", layers=2,dim=8\)"):
        named("llama-tiny,layers=2,dim=8")
    with pytest.raises(ValueError, match=r"resnet18 has no size 'class'; did you mean 'classes'\?"):
        named("resnet18", **{"class": 10})


def macs(model: Named, rows: int, length: int, *, backward: bool) -> int:
    """Return the multiply-adds of matmuls and convolutions in the program that jax traces."""

    def loss(params: Any, variables: Any) -> jax.Array:
        return model.model.call(params, variables, model.example(rows, length) | batch, None)[0]["loss"].total

    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.example(rows, length))
    traced = jax.make_jaxpr(jax.grad(loss) if backward else loss)(
        *jax.eval_shape(model.model.create, jax.random.key(0))
    )
    return sum(flops for flops, _ in jx.matmuls(traced.jaxpr.eqns).values())


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny", "llama3.2-1b"])
def test_flops_of_text_are_those_of_the_program(name: str) -> None:
    model = named(name, layers=2)
    # The backward computes attention's scores again. The model's own count does not include that.
    scores = 3 * 64 * 64 * model.config.dim * 2
    assert model.flops(3, 64) == pytest.approx(2 * (macs(model, 3, 64, backward=True) - scores), rel=1e-9)


@pytest.mark.slow
def test_flops_of_images_are_those_of_the_program() -> None:
    # Count only the forward: the backward needs twice its products, but the program also multiplies by the zeros of
    # strided convolutions.
    for model in (named("resnet18", size=75), named("resnet50", size=9, blocks=(1, 2)), named("mlp-tiny")):
        assert model.flops(3) == 6 * macs(model, 3, 0, backward=False)
    # Multiply-adds from torchvision's documentation, in 10^9. Striding in a bottleneck's first convolution gives 3.8.
    assert named("resnet18").flops(1) / 6e9 == pytest.approx(1.81, abs=0.005)
    assert named("resnet50").flops(1) / 6e9 == pytest.approx(4.09, abs=0.005)


def image_batch(model: Named, rows: int = 16) -> dict[str, np.ndarray]:
    """Return rows of different brightness: statistics of one replica's rows differ much from those of all rows."""
    random, example = np.random.default_rng(0), model.example(rows)
    brightness = np.linspace(-1, 1, rows)[:, None, None, None]
    pixels = random.normal(size=example["image"].shape) + brightness
    return {"image": pixels.astype(np.float32), "label": np.arange(rows, dtype=np.int32) * 3 % model.config.classes}


def test_gpt_knows_no_position_beyond_its_context() -> None:
    model = named("gpt-tiny", context=12)
    weights = jax.eval_shape(model.model.create, jax.random.key(0))
    with pytest.raises(ValueError, match=r"length=13 is more than the 12 positions .* named\(\.\.\., context=13\)"):
        jax.eval_shape(model.model.loss, *weights, model.example(1, 13), None)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny", "resnet-tiny", "mlp-tiny"])
def test_models_compute_in_the_dtype_of_their_parameters(name: str) -> None:
    model = named(name)
    params, variables = jax.eval_shape(model.model.create, jax.random.key(0))
    low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    example = model.example(2, 8)
    traced = jax.make_jaxpr(lambda *args: model.model.call(*args, None)[0]["loss"].total)(low, variables, example)
    assert set(jx.matmuls(traced.jaxpr.eqns)) == {"bfloat16"}
    assert traced.out_avals[0].dtype == jnp.float32


def test_image_loss_counts_only_the_mask() -> None:
    model = named("mlp-tiny")
    params, variables = jax.jit(model.model.create)(jax.random.key(0))
    batch = image_batch(model, rows=6)
    unmasked, masked = (
        jax.jit(model.model.call)(params, variables, case, None)[0]
        for case in (jax.tree.map(lambda x: x[:3], batch), batch | {"mask": np.float32([1, 1, 1, 0, 0, 0])})
    )
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(masked[name].total / masked[name].count, unmasked[name].total, rtol=1e-5)
    assert masked["loss"].count == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: named("llama-tiny", dim=30), r"dim=30 .* heads=4 .* try dim=32"),
        (lambda: named("llama-tiny", kv_heads=3), r"kv_heads=3 does not divide heads=4; use one of \[1, 2, 4\]"),
        (lambda: named("llama-tiny", dropout=1.0), r"dropout=1.0 must lie in \[0, 1\); use 0"),
        (lambda: named("mixtral-tiny", chosen=9), "chosen=9 of experts=8"),
        (lambda: named("mixtral-tiny", head_dim=7), "head_dim=7 is odd"),
        (lambda: named("mixtral-tiny", balance=-1.0), "balance=-1.0"),
        (lambda: gpt.Config(dim=30, heads=4), r"dim=30 does not split into heads=4; try dim=32"),
        (lambda: gpt.Config(dropout=1), r"dropout=1 must lie in \[0, 1\)"),
        (lambda: resnet.Config(stem=5), r"stem=5: use 7, or 3"),
        (lambda: resnet.Config(blocks=(2, 0)), r"blocks=\(2, 0\): use whole numbers from 1, such as \(2, 2, 2, 2\)"),
        (lambda: named("mlp-tiny", classes=0), r"classes=0: use a whole number from 1, such as 10"),
        (lambda: named("llama-tiny", layers="two"), r"layers='two': use a whole number from 1, such as 4"),
        (lambda: named("llama-tiny", dropout="half"), r"dropout='half': use a number from 0, such as 0.0"),
        (lambda: named("llama3-8b", tied=1), r"tied=1: use True or False, such as False"),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
