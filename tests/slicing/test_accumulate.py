"""The gradients of layers accumulate over microbatches in place."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.models import named
from jaxpar.slicing.slices import Slice


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
