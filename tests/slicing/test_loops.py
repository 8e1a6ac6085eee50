"""Python loops over layers that real models have: each runs layer by layer, with the gradients of one device."""

import inspect
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import check_collectives

import jaxpar as jp
from jaxpar.layout.families import largest_stack
from jaxpar.parity.parity import TOLERANCE, differences
from jaxpar.step import loss_warnings

D, T, L = 6, 4, 6
BATCH = {"x": np.random.default_rng(0).normal(size=(8, T, D)).astype("float32")}
MASK = np.linspace(0.5, 1.5, L * T).reshape(L, T, 1).astype("float32")


def draw(key: jax.Array, *lists: str, n: int = L) -> Any:
    """Lists of `n` blocks, each a weight and a bias."""

    def block(at: int) -> Any:
        up, down = jax.random.split(jax.random.fold_in(key, at))
        return {"w": 0.4 * jax.random.normal(up, (D, D)), "b": 0.1 * jax.random.normal(down, (D,))}

    return {name: [block(100 * j + i) for i in range(n)] for j, name in enumerate(lists)}


def layer(x: jax.Array, block: Any) -> jax.Array:
    return x + jnp.tanh(x @ block["w"] + block["b"])


def skips(p: Any, x: jax.Array) -> jax.Array:
    """The second half of a list adds what the first half gave, in reverse: a U-Net in one list."""
    outs = []
    for number, block in enumerate(p["skips"]):
        x = layer(x if number < L // 2 else x + 0.5 * outs[L - 1 - number], block)
        outs.append(x)
    return x


def mixed(p: Any, x: jax.Array) -> jax.Array:
    """All hidden states, mixed: ELMo. The block's input skips the list as well."""
    outs, first = [], x
    for block in p["mixed"]:
        x = layer(x, block)
        outs.append(x)
    return first + jnp.einsum("l,lbtd->btd", jax.nn.softmax(p["mix"]), jnp.stack(outs))


def alternating(p: Any, x: jax.Array) -> jax.Array:
    """Rounds of four with masks that alternate, and two blocks that fill no round (Gemma 3)."""
    masks = [jnp.tril(jnp.ones((T, T))), jnp.eye(T)]
    for number, block in enumerate(p["alternating"]):
        x = jnp.einsum("st,btd->bsd", masks[number % 2], x)
        x = layer(jnp.cumsum(x, 1) if number % 4 == 3 else x, block)
    return x


def zipped(p: Any, x: jax.Array) -> jax.Array:
    """Two lists, rows of a constant and of a parameter, and the number of the layer."""
    for number, (a, b) in enumerate(zip(p["zipped"], p["beside"], strict=True)):
        x = layer(layer(x, a) * MASK[number] * p["gates"][number], b) / (number + 1) ** 0.5
    return x


def rows(p: Any, x: jax.Array) -> jax.Array:
    """No list: rows of one stacked parameter."""
    for number in range(L):
        x = layer(x, {"w": p["rows"]["w"][number], "b": p["rows"]["b"][:, number]})
    return x


def twice(p: Any, x: jax.Array) -> jax.Array:
    """One list on two batches (DPO, SimCLR, siamese nets), the second of which is not run to the end."""
    y = x[:, ::-1]
    for block in p["twice"]:
        x = layer(x, block)
    for block in p["twice"][:-2]:
        y = layer(y, block)
    return x - y


def backwards(p: Any, x: jax.Array) -> jax.Array:
    """From the last block to the first, beside rows of a constant that are read from the first, and all states."""
    outs = []
    for number, block in enumerate(reversed(p["backwards"])):
        x = layer(x * MASK[number], block)
        outs.append(x)
    return x + jnp.einsum("l,lbtd->btd", p["mix"], jnp.stack(outs))


def stacked(p: Any, x: jax.Array) -> jax.Array:
    """Blocks of a list, stacked within the loss and then scanned."""
    blocks = jax.tree.map(lambda *x: jnp.stack(x), *p["stacked"])
    return jax.lax.scan(lambda x, block: (layer(x, block), None), x, blocks)[0]


LOOPS = (skips, mixed, alternating, zipped, rows, twice, backwards)


def init(key: jax.Array) -> Any:
    lists = draw(key, "skips", "mixed", "zipped", "beside", "twice", "backwards")
    weights = {"w": 0.4 * jax.random.normal(key, (L, D, D)), "b": jnp.ones((D, L)) * jnp.arange(L) / L}
    return {
        **lists,
        **draw(key, "alternating", n=10),
        "rows": weights,
        "mix": jnp.linspace(0.0, 1.0, L),
        "gates": jnp.linspace(0.9, 1.1, L),
    }


def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
    weight = jnp.cos(jnp.arange(T * D)).reshape(T, D)
    return sum(((run(params, batch["x"]) * weight) ** 2).mean() for run in LOOPS)  # type: ignore[return-value]


def parity(model: jp.Model, strategy: str, devices: int = 2) -> Any:
    """Return a step, after checking that its gradients are those of one device."""
    step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[:devices])
    state = step.init(jax.random.key(0))
    params = jax.tree.map(np.asarray, step.params(state))
    _, grads = step.value_and_grad(state, BATCH)
    expected_grads = jax.jit(jax.grad(lambda p: model.loss(p, BATCH, None)))(params)
    worst = max(differences("gradient", grads, expected_grads), key=lambda d: d.error)
    assert worst.error <= TOLERANCE["f32"], worst
    check_collectives(step, BATCH)
    return step


def lengths(step: Any) -> list[int]:
    """Return the number of rounds of each stack of a step's program."""
    return [stack.length for stack in step.traced(BATCH).program.stacks]


@pytest.mark.slow
def test_loops_that_run_layer_by_layer() -> None:
    """All loops were one flat segment: the whole model was gathered at once, and `pipe` refused it."""
    step = parity(jp.Model(init, loss), "fsdp=2")
    assert sorted(lengths(step)) == sorted([3, 3, L, 2, 2, L, L, L, L - 2, L])
    loops = step.layout.loops
    assert loops["mixed/*"] == loops["backwards/*"] == f"{L} layers of a Python loop, one stack"
    assert "layers 0 to 7 scanned in 2 rounds of 4; layers 8 to 9 scanned" in loops["alternating/*"]
    assert "test_loops.py" in loops["skips/*"]
    assert "layers 0 to 2 scanned; layers 3 to 5 scanned" in loops["skips/*"]
    assert loops["skips/*"] in str(step.layout)


def chained(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
    """Run one list in rounds of two, with rows of a mask and of a parameter, and mix all hidden states."""
    x, outs = batch["x"], []
    for number, block in enumerate(params["layers"]):
        x = layer((jnp.cumsum(x, 1) if number % 2 else x) * MASK[number % 4] * params["gates"][number], block)
        outs.append(x)
    return (jnp.einsum("l,lbtd->btd", jax.nn.softmax(params["mix"]), jnp.stack(outs)) ** 2).mean()


def list_of(n: int) -> Any:
    return lambda key: {
        **draw(key, "layers", n=n),
        "gates": jnp.linspace(0.9, 1.1, n),
        "mix": jnp.linspace(0.0, 1.0, n),
    }


@pytest.mark.slow
def test_a_pipeline_spreads_rounds_of_blocks_that_alternate() -> None:
    """A pipeline refused blocks that alternate."""
    step = parity(jp.Model(list_of(4), chained), "pipe=2,microbatches=2")
    assert lengths(step)[0] == 2
    assert step.layout.loops["layers/*"].endswith("one stack: layers 0 to 3 scanned in 2 rounds of 2")
    with pytest.raises(ValueError, match=r"3 rounds of 2 blocks.*divides 3"):
        jp.make_train_step(
            jp.Model(list_of(6), chained), optax.sgd(0.1), "pipe=2,microbatches=2", mesh=jax.devices()[:2]
        ).trace(BATCH)


@pytest.mark.slow
def test_layers_that_split_one_key_after_another() -> None:
    """Equinox's BERT splits its key before each layer: `key, layer_key = split(key)`.

    The last layer does not use the first half, so that it differed. No such loop was a scan, and `pipe` refused it.
    Each layer computes its own mask.
    """

    def dropped(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        x, keys = batch["x"], jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(batch["x"])))
        for block in params["layers"]:
            keys, layer_keys = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
            mask = jnp.tril(jnp.ones((T, T)))
            dropout_mask = jax.vmap(lambda k: jax.random.bernoulli(jax.random.split(k)[1], 0.7, (T, D)))(layer_keys)
            x = layer(mask @ x, block) * dropout_mask / 0.7
        return (x**2).mean()

    model = jp.Model(lambda key: draw(key, "layers", n=4), dropped)
    for strategy, rounds in (("fsdp=2", 4), ("pipe=2,microbatches=2", 4)):
        step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[:2])
        assert lengths(step) == [rounds]
        assert step.layout.loops["layers/*"].endswith("one stack")
        check_collectives(step, BATCH)
    parity = jp.verify(model, "pipe=2,microbatches=2", BATCH, mesh=jax.devices()[:2])
    assert parity.ok, parity


@pytest.mark.slow
def test_a_pipeline_spreads_layers_that_the_loss_stacks() -> None:
    """A pipeline refused blocks that a loss stacks before it scans them."""
    model_of = lambda run: jp.Model(
        lambda key: draw(key, "stacked", n=4), lambda params, batch, key: (run(params, batch["x"]) ** 2).mean()
    )
    cast = lambda p, x: stacked({"stacked": jax.tree.map(lambda w: w.astype("bfloat16"), p["stacked"])}, x)
    strategy, devices = "pipe=2,microbatches=2", jax.devices()[:2]
    step = parity(model_of(stacked), strategy)
    assert lengths(step) == [4]
    assert step.layout.loops["stacked/*"] == "4 layers, scanned by the model: one stack"
    step = jp.make_train_step(model_of(cast), optax.sgd(0.1), strategy, mesh=devices)
    step.trace(BATCH)
    assert lengths(step) == [4]


def test_what_is_said_of_a_loop_from_the_end() -> None:
    """The message named no block and no line, only that no block is read after another."""

    def run_backwards(p: Any, x: jax.Array) -> jax.Array:
        for number, block in reversed([*enumerate(p["layers"])]):
            x = jnp.sin(layer(x, block)) if number == 3 else layer(x, block)  # here
        return x

    model = jp.Model(lambda key: draw(key, "layers"), lambda p, batch, key: (run_backwards(p, batch["x"]) ** 2).mean())
    step = jp.make_train_step(model, optax.sgd(0.1), "fsdp=2", mesh=jax.devices()[:2])
    step.trace(BATCH)
    lines, first = inspect.getsourcelines(test_what_is_said_of_a_loop_from_the_end)
    line = next(first + i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))
    assert "layers 2 to 0 scanned" in step.layout.loops["layers/*"]
    assert re.search(rf"block 3 has 1 more operation than block 5, at sin .*test_loops\.py:{line}\b", str(step.layout))


def test_a_pipeline_names_blocks_of_unequal_width() -> None:
    """The error spoke of a stack of 2 layers, though the model has 4."""

    def uneven(key: jax.Array) -> Any:
        shapes = [(D, 8), (D, 8), (D, 16), (D, 12)]
        return {"layers": [{"up": jnp.ones(s), "down": jnp.ones(s[::-1])} for s in shapes]}

    def run(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        x = batch["x"]
        for block in params["layers"]:
            x = x + jnp.tanh(x @ block["up"]) @ block["down"]
        return (x**2).mean()

    text = "pipe=4,microbatches=2,stages=layers"
    step = jp.make_train_step(jp.Model(uneven, run), optax.sgd(0.1), text, mesh=jax.devices()[:4])
    differs = r"layers/2/down is \[16, 6\] and layers/0/down is \[8, 6\]"
    assert "layers/2/down is [16, 6]" in str(step.layout)
    with pytest.raises(ValueError, match=f"2 layers; use at most 2 stages, or make its blocks alike: {differs}"):
        step.trace(BATCH)


class Block(nn.Module):
    """One layer of a scan, in bfloat16 if asked to."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        y = nn.Dense(4 * D, use_bias=False, dtype=jnp.bfloat16, name="up")(nn.LayerNorm(use_bias=False)(x))
        return x + nn.Dense(D, use_bias=False, name="down")(nn.gelu(y)), None


class Axis1(nn.Module):
    """Layers whose parameters are stacked on dim 1, as T5X does."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(Block, variable_axes={"params": 1}, split_rngs={"params": True}, length=4)
        return blocks(name="blocks")(x, None)[0]


@pytest.mark.slow
def test_layers_on_another_dim_than_the_first() -> None:
    """Such layers were no stack, and gathered at once; `pipe` refused them. If their number divided, it was sharded.

    A pipeline stores them along the first dim, and returns them as the model has them.
    """
    model = jp.from_linen(Axis1(), lambda apply, batch: (apply(batch["x"]) ** 2).mean(), example=BATCH)
    step = jp.make_train_step(model, optax.sgd(0.1), "fsdp=2", mesh=jax.devices()[:2])
    check_collectives(step, BATCH)
    assert lengths(step) == [4]
    assert {(leaf.path.partition("/")[0], leaf.dim) for leaf in step.layout.leaves} == {("blocks", 0)}

    strategy, devices = "pipe=2,fsdp=2,microbatches=2", jax.devices()[:4]
    assert jp.verify(model, strategy, BATCH, mesh=devices).ok
    step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=devices)
    check_collectives(step, BATCH)
    assert lengths(step) == [4]
    expected_params = jax.eval_shape(model.create, jax.random.key(0))[0]
    params = model.unwrap(step.params(step.init(jax.random.key(0))))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected_params)


def test_leaves_whose_first_dim_is_the_number_of_layers_by_chance() -> None:
    """[heads, head_dim] of a pooling head was taken for layers of its tower, and refused under `tensor`.

    VGG's classifier, a convolution [7, 7, in, out], was taken for 7 layers, and `pipe` refused its blocks.
    """
    block = {"norm/scale": (4, 64), "query/kernel": (4, 64, 4, 16), "query/bias": (4, 4, 16)}
    pool = {"query/kernel": (64, 4, 16), "query/bias": (4, 16), "out/kernel": (4, 16, 64), "out/bias": (64,)}
    blocks = [(f"img/blocks/{path}", shape, False) for path, shape in block.items()]
    pooling = [(f"img/pool/{path}", shape, False) for path, shape in pool.items()]
    assert largest_stack([*blocks, *pooling]) == {path for path, _, _ in blocks}
    blocks = [("conv2/*/kernel", (3, 3, 3, 16, 16), True), ("conv2/*/bias", (3, 16), True)]
    classifier = [("fc/kernel", (7, 7, 24, 480), False), ("fc/bias", (480,), False)]
    assert largest_stack([*classifier, *blocks]) == {path for path, _, _ in blocks}


def test_more_than_half_of_the_parameters_at_once_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that differ run one by one, and FSDP then needs the memory of DDP. There was no warning."""

    def run(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        x = batch["x"]
        for block, fun in zip(params["layers"], (jnp.tanh, jnp.sin, jnp.cos, jax.nn.relu), strict=True):
            x = x + fun(x @ block["w"] + block["b"])
        return (x**2).mean()

    monkeypatch.setattr(loss_warnings, "GATHERED_FROM", 0)
    model = jp.Model(list_of(4), run)
    step = jp.make_train_step(model, optax.sgd(0.1), "fsdp=2", mesh=jax.devices()[:2])
    with pytest.warns(UserWarning, match=r"zero=3 gathers 9\d% .*layers/\*: 4 layers.*tanh.*test_loops.py.*sin"):
        step.trace(BATCH)


@pytest.mark.slow
def test_layers_that_a_loop_looks_up_by_number() -> None:
    """`w[i]` in a scan over `arange`, in `fori_loop`, and within `jax.checkpoint`, as in AlphaFold's layer stack.

    The loop read the whole stack, which ZeRO-3 gathered at once, and `pipe` said to scan the layers.
    """

    def layer_at(p: Any, i: jax.Array) -> Any:
        return jax.tree.map(lambda w: w[i], p)

    def scanned(p: Any, x: jax.Array) -> jax.Array:
        row = lambda i: jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, 0, False), p)
        step = jax.checkpoint(jax.jit(lambda x, i: layer(x, row(i))))
        # A carry that ends as a constant is no count.
        return jax.lax.scan(lambda c, i: ((step(c[0], i), 1.0), None), (x, 0.0), jnp.arange(4))[0][0]

    def counted_up(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 4, lambda i, x: layer(x, layer_at(p, i)), x)

    def backwards(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, i: (layer(x, layer_at(p, i)), None), x, np.arange(4), reverse=True)[0]

    def neighbours(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, i: (layer(x, layer_at(p, (i + 1) % 4)), None), x, jnp.arange(4))[0]

    def model_of(run: Any) -> jp.Model:
        start = lambda key: {"w": 0.4 * jax.random.normal(key, (4, D, D)), "b": jnp.arange(4.0 * D).reshape(4, D) / 9}
        return jp.Model(start, lambda params, batch, key: (jax.nn.relu(run(params, batch["x"])) ** 2).mean())

    for run, strategy in (
        (scanned, "pipe=2,microbatches=2"),
        (counted_up, "pipe=2,microbatches=2"),
        (backwards, "fsdp=2"),
    ):
        assert lengths(parity(model_of(run), strategy)) == [4]
    for run, stacks in ((scanned, [4]), (counted_up, [4]), (neighbours, [])):  # another layer's row is not sliced
        assert lengths(jp.make_train_step(model_of(run), optax.sgd(0.1), "fsdp=2", jax.devices()[:2])) == stacks
