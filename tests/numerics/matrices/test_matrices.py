"""Which leaves are hidden matrices, by the loss's program and by names; and the optimizers that take others."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models import named


def hidden(found: Any) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Batch, in and out of each hidden matrix."""
    return {path: (x.batch, x.reduction, x.output) for path, x in found.leaves.items() if x.output}


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
EITHER = {
    "attn/query/kernel": ((), (0,), (1, 2)),
    "attn/key/kernel": ((), (0,), (1, 2)),
    "attn/value/kernel": ((), (0,), (1, 2)),
    "attn/out/kernel": ((), (0, 1), (2,)),
    "up/kernel": ((), (0,), (1,)),
    "down/kernel": ((), (0,), (1,)),
}


def test_blocks_of_a_loop() -> None:
    """Heads with a dim of their own; the last block's matrix is followed by the table that is the head too."""
    model = jp.from_nnx(lambda rngs: Tied(rngs), tied_loss)
    blocks = lambda kinds: {f"blocks/{i}/{path}": dims for i in (0, 1) for path, dims in kinds.items()}
    assert hidden(jp.matrices(model, TOKENS)) == blocks(EITHER | {"conv/kernel": ((), (0, 1), (2,))})
    assert hidden(jp.matrices(model)) == blocks(EITHER)
    why = {path: x.why for path, x in jp.matrices(model, TOKENS).leaves.items()}
    assert why["table/embedding"] == "its rows are looked up"
    assert why["blocks/0/depthwise/kernel"].startswith("depthwise")
    assert why["position"] == why["blocks/1/attn/query/bias"] == "it is in no product of a matrix with activations"
    assert "give a batch" in jp.matrices(model).leaves["blocks/0/conv/kernel"].why


def test_stacks_and_experts() -> None:
    for name in ("mixtral-tiny", "llama-tiny", "gpt-tiny"):
        model = named(name)
        found = hidden(jp.matrices(model.model, model.example(2, 8)))
        assert found == hidden(jp.matrices(model.model))
        assert not [path for path in found if path.startswith(("embedding", "head", "position")) or "norm" in path]
        assert all(dims == ((0,), (1,), (2,)) for path, dims in found.items() if "experts" not in path)
        assert {dims for path, dims in found.items() if "experts" in path} <= {((0, 1), (2,), (3,))}
    both = named("resnet-tiny")
    found = hidden(jp.matrices(both.model, both.example(2)))
    assert found
    assert all(dims == ((), (0, 1, 2), (3,)) for dims in found.values())
    assert not any("stem" in path or "head" in path for path in found)


def test_as_optax_takes_them() -> None:
    """Also where leaves are frozen; a tree of another model is refused by name."""
    model = named("llama-tiny")
    found = jp.matrices(model.model, model.example(2, 8))
    assert repr(found) == "Matrices(7 of 12 leaves; print it to see them)"
    params, _ = jax.eval_shape(model.model.create, jax.random.key(0))
    tx = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=found)
    for frozen in (False, True):
        if frozen:
            params["layers"]["ffn"]["up"]["kernel"] = None
        jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
    with pytest.raises(ValueError, match=r"w \[2\] is none of the model's"):
        found({"w": jnp.zeros(2)})


@pytest.mark.slow
def test_layers_are_not_multiplied_with_one_another() -> None:
    """Without dimension numbers Muon takes every leaf of two dims: on stacked layers norms' stacks, of all layers
    together, and the embedding, while every hidden matrix went to Adam, and nothing said so.
    """
    model = named("llama-tiny")
    with pytest.warns(UserWarning, match="multiplies layers of a stack with one another") as said:
        jp.make_train_step(model.model, optax.contrib.muon(1e-2), "fsdp").trace(model.example(8, 8))
    text = str(said[0].message)
    mixed, ends, missed = text.split("; ")
    assert "layers/attention_norm/scale [4, 128], layers/ffn_norm/scale [4, 128]" in mixed
    assert "embedding [256, 128], head/kernel [128, 256]" in ends
    assert "layers/attention/key/kernel [4, 128, 64]" in missed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=jp.matrices(model.model))
        for optimizer in (tx, optax.adafactor(1e-2, min_dim_size_to_factor=16), optax.lamb(1e-2)):
            jp.make_train_step(model.model, optimizer, "fsdp").trace(model.example(8, 8))


@pytest.mark.slow
def test_what_is_no_hidden_matrix_is_not_multiplied() -> None:
    """Of layers in a loop Muon took the embedding and biases of heads, and no kernel of theirs, and nothing said so.
    Optimizers that keep factors are meant for embeddings too.
    """
    model = jp.from_nnx(lambda rngs: Tied(rngs), tied_loss)
    with pytest.warns(UserWarning, match="what is no hidden matrix: blocks/0/attn/key/bias") as said:
        jp.make_train_step(model, optax.contrib.muon(1e-2), "fsdp=4", jax.devices()[:4]).trace(TOKENS)
    assert "nothing of blocks/0/attn/key/kernel [32, 4, 8]" in str(said[0].message)
    is_matrix = lambda x: x.ndim == 2

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        state = jax.tree.map(lambda g, s: s + g @ g.mT if is_matrix(g) else s, grads, state)
        return jax.tree.map(lambda g, s: s @ g if is_matrix(g) else g, grads, state), state

    start = lambda params: jax.tree.map(lambda x: jnp.eye(x.shape[0]) if is_matrix(x) else 0, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = optax.GradientTransformation(start, update)
        jp.make_train_step(model, tx, "fsdp=4", jax.devices()[:4]).trace(TOKENS)
