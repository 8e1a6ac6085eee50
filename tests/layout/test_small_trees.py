"""Trees of few and small parameters train as on one device under every axis, or are refused in a sentence.

`fuzz/trees.py` draws random trees. The trees below once ended in Python's own errors.
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
    for strategy in ("data=2", "fsdp=2"):
        assert jp.verify(scalars(), strategy, BATCH, mesh=jax.devices()[:2]).ok


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
    """Return the rules that an error suggests."""
    text = str(error).partition("rules=")[2]
    return ast.literal_eval(text[: text.rindex("}") + 1])


def test_a_rule_for_experts_of_a_leaf_whose_path_ends_others() -> None:
    """Every suffix of "kernel" matches "layers/kernel" too, which ended in StopIteration. And no path was escaped."""
    for path in ("kernel", "k(1)/kernel"):
        leaves = [(path, (2, 1, 6)), ("layers/k/kernel" if "(" in path else "layers/kernel", (3,))]
        with pytest.raises(ValueError, match="holds 2 experts, say so") as error:
            expert_dims(leaves, 2, {}, {}, {})
        assert expert_dims(leaves, 2, apart(suggested(error.value))[0], {}, {}) == {path: 0}


def test_a_rule_for_tensor_of_a_leaf_whose_path_ends_others() -> None:
    """The suggested rule matched a second leaf, which the ranks do not divide. It named the largest leaf even so."""
    leaves = [("w", (6, 6)), ("x/w", (3, 3)), ("large", (9, 9))]
    with pytest.raises(ValueError, match="splits no parameter") as error:
        tensor_dims(leaves, 2, model_rules={})
    assert tensor_dims(leaves, 2, suggested(error.value)) == {"w": 1}


def layout_error(program: Program, strategy: str, devices: int) -> str | None:
    """Return the error with which a layout fails, unless it is a refusal of jaxpar; None if all is well."""
    try:
        step = jp.make_train_step(program.model(), optax.adamw(0.1), strategy, mesh=jax.devices()[:devices])
    except ValueError as error:
        return None if parity.refusal(error) else parity.raw(error)
    return None if step.layout.bytes["params"] > 0 else str(step.layout)


@pytest.mark.parametrize("number", range(16))
def test_layouts_of_drawn_trees(number: int) -> None:
    """A layout is made and described for each tree, under a quarter of the generator's strategies."""
    program, _ = trees.tree(0, number)
    for strategy, devices in trees.STRATEGIES[number % 4 :: 4]:
        with warnings.catch_warnings(action="ignore"):
            assert (error := layout_error(program, strategy, devices)) is None, (strategy, error)


@pytest.mark.parametrize("number", range(3))
def test_drawn_trees_train_as_on_one_device(number: int) -> None:
    program, strategies = trees.tree(1, number, 2)
    reference = parity.OneDevice(program)
    for strategy, devices in strategies:
        outcome = parity.outcome(program, strategy, devices, reference)
        assert outcome.kind not in parity.FAILURES, (strategy, outcome)
