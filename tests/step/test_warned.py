"""Warnings about a loss that runs but does not do what its user means, and errors about values of traced arrays."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.data import Rows
from jaxpar.program import jaxpr as jx

BATCH = {"x": np.ones((16, 8), np.float32), "y": np.zeros((16, 4), np.float32)}


def square(module: Any, batch: Any) -> jax.Array:
    return jnp.square(module(batch["x"]) - batch["y"]).mean()


def step_of(make: Any, loss: Any, strategy: str = "fsdp", **options: Any) -> Any:
    return jp.make_train_step(jp.from_nnx(make, loss), optax.sgd(0.1), strategy, **options)


def linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(8, 4, rngs=rngs)


def test_a_loss_that_reads_no_parameter() -> None:
    """It reads a module that it closes over: nothing was trained, without a warning, and `verify` passed."""
    outside = linear(nnx.Rngs(0))
    captured = lambda module, batch: square(outside, batch)
    with pytest.warns(UserWarning, match="reads no parameter that is trained: every gradient is zero"):
        step_of(linear, captured).trace(BATCH)
    with pytest.warns(UserWarning, match="reads no parameter"):
        report = jp.verify(jp.from_nnx(linear, captured), "fsdp", BATCH, steps=1)
    assert report.idle
    assert "every gradient is zero, on one device too" in str(report)
    trained = {"trainable": lambda path: "bias" in path}
    frozen = lambda module, batch: jnp.square(batch["x"] @ module.kernel[...] - batch["y"]).mean()
    with pytest.warns(UserWarning, match="reads no parameter that is trained"):
        step_of(linear, frozen, **trained).trace(BATCH)
    step_of(linear, square, **trained).trace(BATCH)


def test_leaves_of_a_batch_that_nothing_reads() -> None:
    """A Llama without `segment_ids` was given some with its tokens, and documents in one row saw each other."""
    reads_x = lambda module, batch: jnp.square(module(batch["x"])).mean()
    nested = {"x": BATCH["x"], "more": {"segment_ids": np.zeros((16, 8), np.int32), "labels": [BATCH["y"]] * 2}}
    for strategy in ("fsdp", "ddp,microbatches=2"):
        step = step_of(linear, reads_x, strategy)
        with pytest.warns(UserWarning, match=r"does not read batch leaf y, so no result depends on it"):
            step.trace(BATCH)
        step.trace({name: np.concatenate([x, x]) for name, x in BATCH.items()})  # no second warning
        with pytest.warns(UserWarning, match="leaves more/labels/0, more/labels/1, more/segment_ids, so no result"):
            step.trace(nested)
        step.trace({"x": BATCH["x"]})  # the advice


def test_a_mask_that_nothing_reads_can_be_left_out_of_rows() -> None:
    """`Rows` adds a mask even if all batches are full; the advice was to leave it out, and no option did so."""
    step = step_of(linear, square, "fsdp")
    rows = lambda **options: next(Rows(BATCH, **options).batches(16, 0))
    with pytest.warns(UserWarning, match=r"batch leaf mask.*leave it out of the batch \(jaxpar.data.Rows adds mask"):
        step.trace(rows())
    for last in ("pad", "drop_last"):
        step.trace(rows(last=last))  # the advice


def test_leaves_of_a_batch_that_something_reads() -> None:
    """No warning names a leaf that a metric, a variable, or `evaluate` alone reads, nor a replicated leaf."""

    def in_a_metric(module: Any, batch: Any) -> Any:
        return jnp.square(module(batch["x"])).mean(), {"bias": batch["y"].mean()}

    def in_evaluate(params: Any, batch: Any, key: jax.Array | None) -> Any:
        y = batch["x"] @ params
        return (jnp.square(y).mean(), {"error": jnp.abs(y - batch["y"]).mean()} if key is None else {})

    def in_a_step(params: Any, batch: Any, key: jax.Array | None) -> Any:
        y = batch["x"] @ params
        return jnp.square(y).mean() if key is None else jnp.square(y - batch["y"]).mean()

    def with_its_key(params: Any, batch: Any, key: jax.Array) -> Any:
        return jnp.square(batch["x"] @ params + jax.random.normal(key, (4,)) - batch["y"]).mean()

    class Seen(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear, self.mean = nnx.Linear(8, 4, rngs=rngs), nnx.BatchStat(jnp.zeros(4))

    def in_a_variable(module: Seen, batch: Any) -> jax.Array:
        module.mean[...] = jp.all_rows(batch["y"]).mean(0)
        return jnp.square(module.linear(batch["x"])).mean()

    step_of(linear, in_a_metric).trace(BATCH)
    step_of(Seen, in_a_variable).trace(BATCH)
    marked = BATCH | {"y": jp.Replicated(BATCH["y"])}
    step_of(linear, lambda module, batch: jnp.square(module(batch["x"])).mean()).trace(marked)
    for loss in (in_evaluate, in_a_step, with_its_key):
        model = jp.Model(init=lambda key: jnp.ones((8, 4)), loss=loss)
        step = jp.make_train_step(model, optax.sgd(0.1), "fsdp")
        step.trace(BATCH)
        if loss is not with_its_key:
            step.evaluate(step.init(jax.random.key(0)), BATCH)


class Tokens(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        self.embed, self.head = nnx.Embed(64, 32, rngs=rngs, **options), nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.embed(tokens))  # the line that the warning names


TOKENS = {"tokens": np.zeros((8, 8), np.int32)}


def logits(module: Tokens, batch: Any) -> jax.Array:
    return module(batch["tokens"]).astype(jnp.float32).mean()


def attended(module: Tokens, batch: Any) -> jax.Array:
    return module.embed.attend(module.embed(batch["tokens"])).astype(jnp.float32).mean()


@pytest.mark.parametrize("loss", [logits, attended])
@pytest.mark.parametrize("precision", ["bf16", "f16", "f32"])
def test_an_embedding_computes_in_the_dtype_of_the_strategy(loss: Any, precision: str) -> None:
    """`nnx.Embed` casts to the dtype that its table was made with, float32: under precision="bf16" every product after
    it was in float32, and a warning said so once.
    """
    dtype = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}[precision]
    model = jp.from_nnx(lambda rngs: Tokens(rngs), loss)
    params, variables = jax.eval_shape(model.create, jax.random.key(0))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)
    flat, _ = jx.trace(lambda *args: model.call(*args, jax.random.key(0)), params, variables, TOKENS)
    assert [*jx.matmuls(flat.eqns)] == [jnp.dtype(dtype).name]
    step_of(Tokens, loss, f"ddp,precision={precision}").trace(TOKENS)  # a warning would be an error


def test_an_embedding_that_is_told_to_compute_in_float32_is_named() -> None:
    float32_module = lambda rngs: Tokens(rngs, dtype=jnp.float32)
    with pytest.warns(UserWarning, match=r"bfloat16 becomes float32 at .*test_warned.py:\d+:25 \(Tokens.__call__\)"):
        step_of(float32_module, logits, "ddp,precision=bf16").trace(TOKENS)

    def cast(module: Tokens, batch: Any) -> jax.Array:  # the advice
        x = module.embed(batch["tokens"]).astype(module.head.kernel.dtype)
        return module.head(x).astype(jnp.float32).mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(float32_module, cast, "ddp,precision=bf16").trace(TOKENS)


class Rates(nnx.Module):
    """Drop-path rates, as ports of timm's models have them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rates = [float(rate) for rate in jnp.linspace(0, 0.1, 3)]
        self.linear = nnx.Linear(8, 4, rngs=rngs)


class Widened(nnx.Module):
    """Its third layer adds a bias of another width."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.bias = nnx.Linear(8, 8, rngs=rngs), nnx.Param(jnp.zeros(9))

    def __call__(self, x: jax.Array, last: bool) -> jax.Array:
        return self.linear(x) + self.bias if last else self.linear(x)


class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Widened(rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for number, layer in enumerate(self.layers):
            x = layer(x, number == 2)
        return x


class Unfitting(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = jnp.zeros((2, 3)) @ jnp.zeros((2, 3))


def notes_of(call: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    return "\n".join(error.value.__notes__)


def test_what_a_model_raises_says_at_which_line_of_which_layer() -> None:
    line = r"test_warned.py:\d+, `return self.linear\(x\) \+ self.bias if last else self.linear\(x\)`"
    notes = notes_of(lambda: step_of(Deep, lambda module, batch: module(batch["x"]).mean()).trace(BATCH))
    assert re.search(rf"^in the loss at .*{line}, in layers/2 \(Widened\)$", notes, re.MULTILINE)
    assert "the batch, a block of its rows: a dict of" in notes
    notes = notes_of(lambda: jp.from_nnx(Unfitting, square))
    assert re.search(r"^in make\(rngs\) at .*test_warned.py:\d+, `self.table = .*`, in Unfitting$", notes, re.MULTILINE)
    assert "init" not in notes  # each place is named once

    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(4)(x) + jnp.zeros(5)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Dense(name="head")(x)

    def linen() -> Any:
        model = jp.from_linen(Net(), lambda apply, batch: apply(batch["x"]).mean(), {"x": BATCH["x"]})
        return jp.make_train_step(model, optax.sgd(0.1), "single")

    assert re.search(
        r"`return nn.Dense\(4\)\(x\) \+ jnp.zeros\(5\)`, in head \(Dense\)$", notes_of(linen), re.MULTILINE
    )
    plain = jp.Model(lambda key: {"w": jnp.zeros((3, 3))}, lambda p, b, key: (b["x"] @ p["w"]).mean())
    notes = notes_of(lambda: jp.make_train_step(plain, optax.sgd(0.1), "single").trace(BATCH))
    assert re.search(r"^in the loss at .*test_warned.py:\d+, `plain = .*`$", notes, re.MULTILINE)


def test_numbers_of_traced_arrays() -> None:
    """JAX said which equation made the tracer, and not that the constructor is traced, or what to write."""
    with pytest.raises(ValueError, match=r"make\(rngs\) asks for the value of an array at .*test_warned.py:\d+, `self"):
        jp.from_nnx(Rates, square)

    def init(key: jax.Array) -> Any:
        return {"w": jnp.zeros(int(jnp.sum(jnp.array([3, 5]))))}

    loss = lambda params, batch, key: (batch["x"] @ params["w"]).mean()
    with pytest.raises(ValueError, match=r"init asks for the value .*, `return \{.*np\.linspace"):
        jp.make_train_step(jp.Model(init, loss), optax.sgd(0.1), "fsdp")

    @jax.jit
    def floated(module: Any, batch: Any) -> jax.Array:
        value = square(module, batch)
        print(float(value))
        return value

    def branching(module: Any, batch: Any) -> jax.Array:
        return square(module, batch) if batch["y"][0, 0] > 0 else square(module, batch) * 2

    def through_numpy(module: Any, batch: Any) -> jax.Array:
        return jnp.asarray(np.asarray(square(module, batch)))

    for faulty_loss, line in (
        (floated, r"print\(float\(value\)\)"),
        (branching, "return square.*if batch"),
        (through_numpy, "return jnp.asarray"),
    ):
        with pytest.raises(ValueError, match=rf"the loss asks for the value of an array at .*, `{line}.*as a metric"):
            step_of(linear, faulty_loss).trace(BATCH)
