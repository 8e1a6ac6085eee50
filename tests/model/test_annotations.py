"""Annotations of parameters and activations are names for rules, and never constraints inside a step's program."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp

KERNEL = nn.initializers.lecun_normal()
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 3, 8)).astype(np.float32)}
STRATEGIES = ["ddp", "zero2,microbatches=2", "fsdp", "tensor=2,fsdp=4", "pipe=2,data=4,microbatches=2"]
RULES = {"query/kernel": -2, "query/bias": 0, "out/kernel": 0}


class Block(nn.Module):
    """Attention's projections, annotated or not."""

    wrap: Any
    names: tuple[Any, ...]

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        embed, heads, kv = self.names
        annotated = lambda *names: self.wrap(KERNEL, names) if self.wrap else KERNEL
        # DenseGeneral makes its kernel flat, and unboxes it in every call to give it its shape.
        query = nn.DenseGeneral((2, 4), kernel_init=annotated(embed, heads, kv), name="query")(x)
        query = nn.with_logical_constraint(query, ("batch", None, heads, kv))
        out = nn.DenseGeneral(8, axis=(-2, -1), kernel_init=annotated(heads, kv, embed), use_bias=False, name="out")
        return x + nn.tanh(out(query)), None


class Layers(nn.Module):
    """Scanned blocks, whose annotations get one more name."""

    wrap: Any = None
    names: tuple[Any, ...] = (None, None, None)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers(self.wrap, self.names, name="layers")(x)[0]


def linen(module: nn.Module) -> jp.Model:
    return jp.from_linen(module, lambda apply, batch: ((apply(batch["x"]) - batch["x"]) ** 2).mean(), example=BATCH)


def programs(model: jp.Model, strategies: list[str], rules: Any = ()) -> list[str]:
    """Return each strategy's step as JAX traces it; for the last one also within its mesh, with its initialisation."""
    traces = []
    for strategy in strategies:
        step = jp.make_train_step(model, optax.sgd(0.1, momentum=0.9), strategy, rules=RULES)
        with nn.logical_axis_rules(rules):
            traces.append(str(step.trace(BATCH)))
    with jax.set_mesh(step.mesh), nn.logical_axis_rules(rules):
        step = jp.make_train_step(model, optax.sgd(0.1, momentum=0.9), strategies[-1], rules=RULES)
        traces += [str(step.trace(BATCH)), str(jax.make_jaxpr(step._create)(jax.random.key(0)))]
    return traces


@pytest.mark.parametrize(
    ("wrap", "names", "rules"),
    [
        # Names that no mesh has: "Resource axis: embed of P('embed', 'heads', 'kv') is not found in mesh".
        (nn.with_partitioning, ("embed", "heads", "kv"), ()),
        # Names of our own axes: "with_sharding_constraint arguments is incompatible with its sharding annotation".
        (nn.with_partitioning, ("fsdp", "tensor", None), ()),
        (nn.with_partitioning, (("data", "fsdp"), "pipe", None), ()),
        (nn.with_logical_partitioning, ("embed", "heads", "kv"), ()),
        (nn.with_logical_partitioning, ("embed", "heads", "kv"), (("embed", "fsdp"), ("heads", "tensor"))),
        (nn.with_logical_partitioning, ("embed", "heads", "kv"), (("batch", "x"), ("heads", "y"))),
    ],
)
def test_an_annotated_linen_module_makes_the_program_of_a_plain_one(wrap: Any, names: Any, rules: Any) -> None:
    """Inside a step Flax found the step's own mesh, and made constraints of the names."""
    strategies = STRATEGIES if names[0] == "fsdp" else ["fsdp"]
    assert programs(linen(Layers(wrap, names)), strategies, rules) == programs(linen(Layers()), strategies)


@pytest.mark.parametrize(("key", "eager"), [("out_sharding", True), ("sharding_names", False)])
@pytest.mark.filterwarnings("ignore:.*is deprecated, use 'out_sharding' instead:DeprecationWarning")
def test_an_annotated_nnx_module_makes_the_program_of_a_plain_one(key: str, eager: bool) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, names: Any = None):
            init = nnx.with_partitioning(KERNEL, names) if names else KERNEL
            self.query = nnx.Linear(8, 6, kernel_init=init, rngs=rngs)
            self.out = nnx.Linear(6, 8, kernel_metadata={key: names} if names else {}, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(nnx.tanh(self.query(x)))

    loss = lambda module, batch: ((module(batch["x"]) - batch["x"]) ** 2).mean()
    rules = {"query/kernel": 1, "query/bias": 0, "out/kernel": 0}

    def traces(names: Any) -> list[str]:
        with nnx.use_eager_sharding(eager):
            model = jp.from_nnx(lambda rngs: Net(rngs, names), loss)
            steps = [jp.make_train_step(model, optax.sgd(0.1), s, rules=rules) for s in ("fsdp", "tensor=2,fsdp=4")]
            for step in steps:
                with jax.set_mesh(step.mesh):
                    step.trace(BATCH)
            return [str(step.trace(BATCH)) for step in steps]

    plain = traces(None)
    assert traces(("fsdp", "tensor")) == plain
    assert traces(("embed", "mlp")) == plain


@pytest.mark.parametrize(
    "spell",
    [
        lambda x, w, spec: jax.lax.with_sharding_constraint(x @ w, spec),
        lambda x, w, spec: jax.numpy.einsum("btd,de->bte", x, w, out_sharding=spec),  # as Flax's Gemma does
    ],
)
def test_a_spec_without_a_mesh_is_told_that_there_is_none(spell: Any) -> None:
    """jax asked for a mesh around the call, which a model does not see."""
    spec = jax.sharding.PartitionSpec("fsdp")
    loss = lambda params, batch, key: (spell(batch["x"], params["w"], spec) ** 2).mean()
    model = jp.Model(lambda key: {"w": jax.random.normal(key, (8, 8))}, loss)
    step = jp.make_train_step(model, optax.sgd(0.1), "fsdp")
    words = r"the loss places a value on a mesh by a PartitionSpec at .*test_annotations.py:\d+, `.*; leave it out"
    with jax.set_mesh(step.mesh), pytest.raises(ValueError, match=words):
        step.trace(BATCH)


def test_constraints_of_the_users_own_mesh_are_left_out_within_loops_and_branches_too() -> None:
    """They named a mesh that is not the step's: "Mesh for all inputs should be equal"; loops kept them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))

    def traced(constrain: Any) -> str:
        def body(x: jax.Array, w: jax.Array) -> Any:
            x = constrain(x @ w)
            return jax.lax.cond(x.sum() > 9, lambda y: constrain(2 * y), lambda y: y, x), None

        def loss(params: Any, batch: Any, key: Any) -> jax.Array:
            x, _ = jax.lax.scan(lambda x, w: (jax.nn.tanh(x @ w), None), constrain(batch["x"]), params["w"])
            return (jax.lax.scan(jax.checkpoint(body), x, params["w"])[0] ** 2).mean()

        model = jp.Model(lambda key: {"w": jax.random.normal(key, (3, 8, 8))}, loss, rows="independent")
        return str(jp.make_train_step(model, optax.sgd(0.1), "fsdp").trace(BATCH))

    assert traced(lambda x: jax.lax.with_sharding_constraint(x, rows)) == traced(lambda x: x)
