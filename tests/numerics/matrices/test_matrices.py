"""`jp.matrices` finds the hidden matrices of a model by its program and by names; optimizers of other leaves warn."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models import named


def hidden(matrices: Any) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the (batch, input, output) dims of each hidden matrix, by path."""
    return {path: (x.batch, x.reduction, x.output) for path, x in matrices.leaves.items() if x.output}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attn = nnx.MultiHeadAttention(4, 32, rngs=rngs, decode=False)
        self.depthwise = nnx.Conv(32, 32, (3,), feature_group_count=32, rngs=rngs)
        self.conv = nnx.Conv(32, 32, (5,), rngs=rngs)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm(x))
        x = self.depthwise(x) + self.conv(x)
        return x + self.down(jax.nn.gelu(self.up(x)))


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table, self.position = nnx.Embed(50, 32, rngs=rngs), nnx.Param(jnp.zeros((8, 32)))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.table.attend(x)


def tied_loss(net: Tied, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(net(batch), batch).mean()


TOKENS = jax.ShapeDtypeStruct((4, 8), jnp.int32)
KERNELS = {
    "attn/query/kernel": ((), (0,), (1, 2)),
    "attn/key/kernel": ((), (0,), (1, 2)),
    "attn/value/kernel": ((), (0,), (1, 2)),
    "attn/out/kernel": ((), (0, 1), (2,)),
    "up/kernel": ((), (0,), (1,)),
    "down/kernel": ((), (0,), (1,)),
}


def test_blocks_of_a_loop() -> None:
    """Kernels have a dim of heads. After the last block comes the embedding table, which is the head too."""
    model = jp.from_nnx(lambda rngs: Tied(rngs), tied_loss)
    blocks = lambda kernels: {f"blocks/{i}/{path}": dims for i in (0, 1) for path, dims in kernels.items()}
    assert hidden(jp.matrices(model, TOKENS)) == blocks(KERNELS | {"conv/kernel": ((), (0, 1), (2,))})
    assert hidden(jp.matrices(model)) == blocks(KERNELS)
    reasons = {path: x.why for path, x in jp.matrices(model, TOKENS).leaves.items()}
    no_product = "it is in no product of a matrix with activations"
    assert reasons["table/embedding"] == "its rows are looked up"
    assert reasons["blocks/0/depthwise/kernel"].startswith("depthwise")
    assert reasons["position"] == reasons["blocks/1/attn/query/bias"] == no_product
    assert "give a batch" in jp.matrices(model).leaves["blocks/0/conv/kernel"].why


def test_stacks_and_experts() -> None:
    for name in ("mixtral-tiny", "llama-tiny", "gpt-tiny"):
        model = named(name)
        matrices = hidden(jp.matrices(model.model, model.example(2, 8)))
        assert matrices == hidden(jp.matrices(model.model))
        assert not [path for path in matrices if path.startswith(("embedding", "head", "position")) or "norm" in path]
        assert all(dims == ((0,), (1,), (2,)) for path, dims in matrices.items() if "experts" not in path)
        assert {dims for path, dims in matrices.items() if "experts" in path} <= {((0, 1), (2,), (3,))}
    resnet = named("resnet-tiny")
    matrices = hidden(jp.matrices(resnet.model, resnet.example(2)))
    assert matrices
    assert all(dims == ((), (0, 1, 2), (3,)) for dims in matrices.values())
    assert not any("stem" in path or "head" in path for path in matrices)


def test_as_optax_takes_them() -> None:
    """Optax accepts the record, with frozen leaves too; the tree of another model raises an error that names a leaf."""
    model = named("llama-tiny")
    matrices = jp.matrices(model.model, model.example(2, 8))
    assert repr(matrices) == "Matrices(7 of 12 leaves; print it to see them)"
    params, _ = jax.eval_shape(model.model.create, jax.random.key(0))
    tx = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=matrices)
    for frozen in (False, True):
        if frozen:
            params["layers"]["ffn"]["up"]["kernel"] = None
        jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
    with pytest.raises(ValueError, match=r"w \[2\] is no leaf of the model"):
        matrices({"w": jnp.zeros(2)})


@pytest.mark.slow
def test_layers_are_not_multiplied_with_one_another() -> None:
    """Without dimension numbers, Muon multiplies each leaf of two dims.

    In stacked layers these are the embedding and the stacks of norms. All hidden matrices went to Adam in silence.
    """
    model = named("llama-tiny")
    with pytest.warns(UserWarning, match="multiplies layers of a stack with one another") as warned:
        jp.make_train_step(model.model, optax.contrib.muon(1e-2), "fsdp").trace(model.example(8, 8))
    mixed, not_hidden, missed = str(warned[0].message).split("; ")
    assert "layers/attention_norm/scale [4, 128], layers/ffn_norm/scale [4, 128]" in mixed
    assert "embedding [256, 128], head/kernel [128, 256]" in not_hidden
    assert "layers/attention/key/kernel [4, 128, 64]" in missed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=jp.matrices(model.model))
        for optimizer in (tx, optax.adafactor(1e-2, min_dim_size_to_factor=16), optax.lamb(1e-2)):
            jp.make_train_step(model.model, optimizer, "fsdp").trace(model.example(8, 8))


@pytest.mark.slow
def test_what_is_no_hidden_matrix_is_not_multiplied() -> None:
    """In layers of a loop, Muon multiplied the embedding and the biases of heads, and no kernel of heads, in silence.

    Optimizers with factors are meant for embeddings too, and do not warn.
    """
    model = jp.from_nnx(lambda rngs: Tied(rngs), tied_loss)
    with pytest.warns(UserWarning, match="leaves that are no hidden matrices: blocks/0/attn/key/bias") as warned:
        jp.make_train_step(model, optax.contrib.muon(1e-2), "fsdp=4", jax.devices()[:4]).trace(TOKENS)
    assert "no dims of these hidden matrices: blocks/0/attn/key/kernel [32, 4, 8]" in str(warned[0].message)
    is_matrix = lambda x: x.ndim == 2

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        state = jax.tree.map(lambda g, s: s + g @ g.mT if is_matrix(g) else s, grads, state)
        return jax.tree.map(lambda g, s: s @ g if is_matrix(g) else g, grads, state), state

    init = lambda params: jax.tree.map(lambda x: jnp.eye(x.shape[0]) if is_matrix(x) else 0, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = optax.GradientTransformation(init, update)
        jp.make_train_step(model, tx, "fsdp=4", jax.devices()[:4]).trace(TOKENS)
