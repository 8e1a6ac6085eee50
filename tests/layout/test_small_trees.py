"""Trees of few and small parameters, scalars among them, under every axis: they train as on one device, or are refused
in a sentence. The trees are drawn (`fuzz/trees.py`); those below ended in errors of Python.
"""

import ast
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fuzz import parity, trees
from fuzz.programs import Program

import jaxpar as jp
from jaxpar.parallel.expert.dims import apart, expert_dims
from jaxpar.parallel.tensor.dims import tensor_dims

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype("float32")}


def scalars() -> jp.Model:
    def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        return jnp.square(params["a"] * batch["x"] + params["b"]).mean()

    return jp.Model(lambda key: {"a": jnp.float32(1), "b": jnp.float32(2)}, loss)


def test_a_model_of_scalars_under_tensor() -> None:
    """The warning that nothing is split failed while it was composed: "max() arg is an empty sequence"."""
    with pytest.warns(UserWarning, match=r"splits no parameter.*a \[\], b \[\].*use data or fsdp instead of tensor"):
        report = jp.verify(scalars(), "tensor=2", BATCH, mesh=jax.devices()[:2])
    assert report.ok, report
    with pytest.raises(
        ValueError, match="No parameter has a dim that 2 divides"
    ):  # rules that split nothing are refused
        jp.make_train_step(scalars(), optax.sgd(0.1), "tensor=2", jax.devices()[:2], rules={"a": None})
    for instead in ("data=2", "fsdp=2"):
        assert jp.verify(scalars(), instead, BATCH, mesh=jax.devices()[:2]).ok


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp=8", "tensor=8", "expert=8", "context=8"])
def test_a_model_without_parameters_is_refused_alike(strategy: str) -> None:
    """`tensor` and `expert` spoke of what they split, or failed."""
    model = jp.Model(lambda key: {}, lambda params, batch, key: batch["x"].mean())
    with pytest.raises(ValueError, match=r"among 0 leaves \(none\); init has to return .* by jax\.jit"):
        jp.make_train_step(model, optax.sgd(0.1), strategy)


def test_a_scalar_between_paired_products() -> None:
    """A gate or a temperature, created between two products that are a pair, had a last dim looked up: "tuple index out
    of range".
    """
    shapes = {"a_in": (4, 8), "b_gate": (), "c_bias": (8,), "d_out": (8, 4)}

    def init(key: jax.Array) -> Any:
        return {name: jax.random.normal(jax.random.fold_in(key, len(name)), s) for name, s in shapes.items()}

    def loss(p: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        return jnp.square(jnp.tanh(batch["x"] @ p["a_in"] * p["b_gate"] + p["c_bias"]) @ p["d_out"]).mean()

    assert tensor_dims([*shapes.items()], 2) == {"a_in": 1, "c_bias": 0, "d_out": 0}
    assert jp.verify(jp.Model(init, loss), "tensor=2,fsdp=4", BATCH).ok


def suggested(error: BaseException) -> Any:
    """The rules that an error names."""
    text = str(error).partition("rules=")[2]
    return ast.literal_eval(text[: text.rindex("}") + 1])


def test_a_rule_for_experts_of_a_leaf_whose_path_ends_others() -> None:
    """No end of the path "kernel" is its own beside "layers/kernel": StopIteration. Nor was a path escaped."""
    for path in ("kernel", "k(1)/kernel"):
        leaves = [(path, (2, 1, 6)), ("layers/k/kernel" if "(" in path else "layers/kernel", (3,))]
        with pytest.raises(ValueError, match="is of 2 experts, say so") as error:
            expert_dims(leaves, 2, {}, {}, {})
        assert expert_dims(leaves, 2, apart(suggested(error.value))[0], {}, {}) == {path: 0}


def test_a_rule_for_tensor_of_a_leaf_whose_path_ends_others() -> None:
    """The rule that was named matched another leaf as well, which the ranks do not divide. And the largest leaf was
    named though the ranks divide none of its dims.
    """
    leaves = [("w", (6, 6)), ("x/w", (3, 3)), ("large", (9, 9))]
    with pytest.raises(ValueError, match="splits no parameter") as error:
        tensor_dims(leaves, 2, own={})
    assert tensor_dims(leaves, 2, suggested(error.value)) == {"w": 1}


def made(program: Program, strategy: str, devices: int) -> str | None:
    """What is wrong with the error of a layout, if it has one that is not jaxpar's own."""
    try:
        step = jp.make_train_step(program.model(), optax.adamw(0.1), strategy, mesh=jax.devices()[:devices])
    except ValueError as error:
        return None if parity.refusal(error) else parity.raw(error)
    return None if step.layout.bytes["params"] > 0 else str(step.layout)


@pytest.mark.parametrize("number", range(16))
def test_layouts_of_drawn_trees(number: int) -> None:
    """Each is made, and described, under a quarter of the generator's strategies."""
    program, _ = trees.tree(0, number)
    for strategy, devices in trees.STRATEGIES[number % 4 :: 4]:
        with warnings.catch_warnings(action="ignore"):
            assert (said := made(program, strategy, devices)) is None, (strategy, said)


@pytest.mark.parametrize("number", range(3))
def test_drawn_trees_train_as_on_one_device(number: int) -> None:
    program, strategies = trees.tree(1, number, 2)
    one = parity.OneDevice(program)
    for strategy, devices in strategies:
        found = parity.outcome(program, strategy, devices, one)
        assert found.kind not in parity.FAILURES, (strategy, found)
