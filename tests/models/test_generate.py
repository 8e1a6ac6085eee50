"""`generate` continues text token by token, on the devices of the parameters, with and without the cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models import gpt, named, text
from jaxpar.models.llama import Config, Llama


class Sums(nnx.Module):
    """A causal model that gives all probability to one token: after a, b, c that is (1 a + 2 b + 3 c) modulo 31."""

    def __init__(self) -> None:
        self.config = Config(vocab=31, context=9)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        weights = 1 + jnp.arange(tokens_BT.shape[1])
        return jax.nn.one_hot(jnp.cumsum(tokens_BT * weights, axis=1) % 31, 31)


@pytest.mark.parametrize("window", [2, 4, 9, None])
def test_generation_is_the_most_probable_token_after_token(window: int | None) -> None:
    prompt = np.asarray([[3, 1, 4], [1, 5, 9]])
    expected = prompt.tolist()
    for row in expected:
        for _ in range(8):
            row.append(sum(i * token for i, token in enumerate(row[-(window or 9) :], 1)) % 31)
    generated = text.generate(Sums(), prompt, 8, jax.random.key(0), temperature=0, window=window)
    assert generated.dtype == jnp.int32
    assert generated.tolist() == expected


@pytest.mark.slow
def test_generation_on_eight_devices_is_that_of_one_and_traces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = named("llama-tiny", dim=64, layers=2, dropout=0.5)
    step = jp.make_train_step(model.model, optax.sgd(0.1), "zero3,precision=bf16")
    state = step.init(jax.random.key(0))
    module, prompt, key = step.model(state), np.asarray([[1, 2, 3]]), jax.random.key(1)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(nnx.state(module)))
    generated = model.generate(module, prompt, 6, key)

    def never(self: Llama, tokens_BT: jax.Array) -> jax.Array:
        raise AssertionError("traced again")

    with monkeypatch.context() as patch:
        patch.setattr(Llama, "__call__", never)
        np.testing.assert_array_equal(model.generate(step.model(state), prompt, 6, key), generated)
        assert not np.array_equal(model.generate(module, prompt, 6, jax.random.key(2)), generated)
    module.eval()  # `generate` ran it without dropout
    nnx.update(module, jax.device_put(nnx.state(module), jax.devices()[0]))
    np.testing.assert_array_equal(model.generate(module, prompt, 6, key), generated)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_what_is_cached_is_what_a_whole_pass_sees(name: str) -> None:
    """Logits are those of one pass over all positions, and tokens the most probable ones of such passes, while the
    window grows and after it has begun to slide.
    """
    model = named(name, dim=32, heads=4, layers=3, context=12)
    weights = jax.jit(model.model.create)(jax.random.key(0))

    def eval_module() -> Any:
        module = model.model.bind(*weights)
        module.eval()
        return module

    module, run = eval_module(), jax.jit(lambda tokens: eval_module()(tokens))
    extend = jax.jit(lambda *args: eval_module().extend(*args))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    uncached_logits = run(tokens)
    cache, cached_logits = module.empty(2, 12), []
    for part in (slice(0, 5), slice(5, 6), slice(6, 9), slice(9, 12)):
        logits, cache = extend(tokens[:, part], cache, jnp.int32(part.start))
        cached_logits.append(logits)
    atol = 2e-5 * float(jnp.abs(uncached_logits).max())
    np.testing.assert_allclose(jnp.concatenate(cached_logits, axis=1), uncached_logits, rtol=2e-5, atol=atol)

    expected, prompt = np.asarray(tokens[:, :4]), np.asarray(tokens[:, :4])
    for _ in range(12):
        window = expected[:, -12:]
        last = window.shape[1] - 1  # attention does not see the padding after it
        logits = run(np.pad(window, ((0, 0), (0, 11 - last))))
        expected = np.concatenate([expected, logits[:, last : last + 1].argmax(-1)], axis=1)
    np.testing.assert_array_equal(jp.generate(module, prompt, 12, jax.random.key(2), temperature=0), expected)


@pytest.mark.parametrize(
    "strategy",
    ["pipe=2,fsdp=4,microbatches=2", pytest.param("tensor=2,fsdp=4", marks=pytest.mark.battery)],
)
def test_generation_is_the_same_under_every_strategy(strategy: str) -> None:
    model, prompt = named("llama-tiny", dim=64, layers=2), np.asarray([[1, 2, 3], [4, 5, 6]])
    step = jp.make_train_step(model.model, optax.sgd(0.1), strategy)
    module = step.model(step.init(jax.random.key(0)))
    generated = jp.generate(module, prompt, 9, jax.random.key(1), window=8)
    assert generated.sharding.is_fully_replicated
    single_device_module = model.model.bind(*jax.jit(model.model.create)(jax.random.key(0)))
    np.testing.assert_array_equal(generated, jp.generate(single_device_module, prompt, 9, jax.random.key(1), window=8))


def test_generation_draws_from_the_softmax_at_a_temperature() -> None:
    class Fixed(nnx.Module):
        def __init__(self) -> None:
            self.config, self.odds = Config(vocab=3), nnx.Param(jnp.log(jnp.asarray([1.0, 4.0, 16.0])))

        def __call__(self, tokens_BT: jax.Array) -> jax.Array:
            return jnp.broadcast_to(self.odds[...], (*tokens_BT.shape, 3))

    prompt = np.zeros((4000, 1))
    for temperature, weights in ((1.0, [1, 4, 16]), (2.0, [1, 2, 4])):
        tokens = text.generate(Fixed(), prompt, 2, jax.random.key(0), temperature)[:, 1:]
        frequencies = np.bincount(np.ravel(tokens), minlength=3) / tokens.size
        np.testing.assert_allclose(frequencies, np.asarray(weights) / sum(weights), atol=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": [1, 2]}, r"prompt has shape \[2\], needs \[rows, tokens\]"),
        ({"prompt": [[]]}, r"prompt has shape \[1, 0\], needs \[rows, tokens\] with one token or more"),
        ({"prompt": [[1], [1, 2]]}, r"prompt has rows of 1 to 2 tokens; give one length"),
        ({"count": 0}, r"count=0 adds nothing; use 1 or more"),
        ({"window": 13}, r"window=13 must lie in 1 to 12, the model's context"),
    ],
)
def test_generation_says_what_it_needs(change: dict[str, Any], message: str) -> None:
    config = gpt.Config(vocab=61, dim=30, heads=3, layers=3, context=12)
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        text.generate(model, **({"prompt": [[1]], "count": 1, "key": jax.random.key(0)} | change))
    with pytest.raises(ValueError, match="module is a Linear, which is no Llama or GPT"):
        text.generate(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [[1]], 1, jax.random.key(0))


@pytest.mark.parametrize("window", [4, None])
def test_a_row_ends_at_a_stop_token_and_the_call_with_its_last_row(window: int | None) -> None:
    """Behind the end of a row stands the first stop token; other rows go on as if it were alone."""
    prompt = np.asarray([[3, 1, 4], [1, 5, 9]])
    run = lambda **options: np.asarray(
        text.generate(Sums(), prompt, 6, jax.random.key(0), temperature=0, window=window, **options)
    )
    whole = run()
    first, second = int(whole[0, 4]), int(whole[1, 6])
    stopped = run(stop=[second, first])
    for row, expected in zip(stopped, whole, strict=True):
        ends = [i for i in range(3, 9) if expected[i] in (first, second)]
        end = ends[0] + 1 if ends else 9
        assert row[:end].tolist() == expected[:end].tolist()
        assert {*row[end:].tolist()} <= {second}
    assert (run(stop=first)[0, 5:] == first).all()
    unused = min({*range(31)} - {*whole.ravel().tolist()})
    np.testing.assert_array_equal(run(stop=unused), whole)
    with pytest.raises(ValueError, match=r"stop=\[-1\] are no token ids; needs one from 0"):
        run(stop=[-1])


def test_cached_rows_stop_too() -> None:
    """A `Llama` keeps a cache, whose loop ends with the last row."""
    model = named("llama-tiny", dim=32, heads=4, layers=1, context=16)
    module, prompt = model.model.bind(*jax.jit(model.model.create)(jax.random.key(0))), np.asarray([[1, 2], [3, 4]])
    whole = np.asarray(jp.generate(module, prompt, 8, jax.random.key(1)))
    stop = int(whole[0, 4])
    stopped = np.asarray(jp.generate(module, prompt, 8, jax.random.key(1), stop=stop))
    for row, expected in zip(stopped, whole, strict=True):
        end = 2 + [*expected[2:].tolist(), stop].index(stop) + 1
        assert row[:end].tolist() == expected[:end].tolist()
        assert (row[end:] == stop).all()
    assert (stopped[0, 5:] == stop).all()
