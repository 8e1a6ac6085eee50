"""How the gradients of layers accumulate over microbatches: where products write them, and that sums are in place."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.models import named
from jaxpar.program import jaxpr as jx
from jaxpar.program.walk import visit
from jaxpar.slicing.slices import Slice
from jaxpar.slicing.units import widened


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_add_adds_to_one_layer(dim: int) -> None:
    stack, layer = jnp.arange(60.0).reshape(3, 4, 5), 2
    one = jnp.moveaxis(stack, dim, 0)[1] * 7
    result = jax.jit(Slice(0, start=1, stride=1, dim=dim).add)(stack, one, layer - 1)
    expected = jnp.moveaxis(jnp.moveaxis(stack, dim, 0).at[layer].add(one), 0, dim)
    assert (result == expected).all()


@pytest.mark.cuda_compiler
def test_a_layer_of_a_chunk_is_added_in_place() -> None:
    """Its number is looked up in the schedule. XLA wrote the sum to another buffer, and then copied it: 18 bytes for
    each element instead of 10.
    """
    model = named("llama-tiny", layers=8)
    step = jp.make_train_step(
        model.model, optax.sgd(0.1), "pipe=2,chunks=2,microbatches=4,precision=bf16", mesh=target("2xH100").devices
    )
    text = step.compile(model.example(8, 64)).as_text() or ""
    gate = f"{model.config.dim},{model.config.ffn}]"
    kernels = [
        kernel
        for kernel in re.split(r"\n(?=%|ENTRY)", text)
        if re.search(re.escape(f"f32[4,{gate}") + r"\S* dynamic-update-slice\(", kernel) and "ENTRY" not in kernel
    ]
    assert kernels
    assert all(re.search(re.escape(f"f32[1,{gate}") + r"\S* dynamic-slice\(", kernel) for kernel in kernels)


@pytest.mark.parametrize(
    ("strategy", "products"), [("fsdp=2", 7), ("fsdp=2,reduce=compute", 0), ("data=2", 0), ("fsdp=2,prefetch=1", 0)]
)
def test_products_return_the_dtype_in_which_gradients_are_summed(strategy: str, products: int) -> None:
    """A cast of every gradient from bf16 was 1% of a step. Where ranks do not sum in the loop, bf16 is fewer bytes."""
    model = named("llama-tiny")
    text = f"{strategy},precision=bf16,microbatches=2"
    step = jp.make_train_step(model.model, optax.sgd(0.1), text, mesh=jax.devices()[:2])
    dots = [e for e, _ in visit(step.trace(model.example(4, 16)).jaxpr.eqns) if e.primitive.name == "dot_general"]
    wide = [e for e in dots if (e.invars[0].aval.dtype, e.outvars[0].aval.dtype) == (jnp.bfloat16, jnp.float32)]
    # Two more are the model's own: the logits, and their cotangent's product.
    assert len(wide) == products + 2


def test_only_results_are_widened() -> None:
    def fun(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        product, shared = a @ b, a @ (b + 1)
        return product.astype(jnp.float32), shared.astype(jnp.float32), shared

    x = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    flat, _ = jx.trace(fun, x, x)
    eqns = jx.live(widened(flat.eqns, flat.outvars), flat.outvars)
    dtypes = [e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "dot_general"]
    assert sorted(map(str, dtypes)) == ["bfloat16", "float32"]
