"""A user's rules for `tensor`: their order, and what is said where they or the leaves do not fit."""

import re
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from test_tensor_dims import Leaves, leaves_of

import jaxpar as jp
from jaxpar.models import named
from jaxpar.parallel.tensor.dims import tensor_dims

FFN: Leaves = [("ffn/up/kernel", (3, 24, 42)), ("ffn/up/bias", (3, 42)), ("ffn/down/kernel", (3, 42, 24))]
SPLIT = {"ffn/up/kernel": 2, "ffn/up/bias": 1, "ffn/down/kernel": 1}
ORDER: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "the user's come first and add": ({"down/kernel": None, "up/kernel": 1}, None, {"ffn/up/kernel": 1}),
    "a bias that is named": ({"up/bias": None}, None, {"ffn/up/kernel": 2, "ffn/down/kernel": 1}),
    "none add nothing": ({}, None, SPLIT),
    "the model's table is complete": (None, {"down/kernel": 1}, {"ffn/down/kernel": 1}),
    "the user's beside the model's": ({"up/kernel": -1}, {"down/kernel": -2, "of another size": 0}, SPLIT),
    "a regular expression": ({"(up|down)/kernel": 1}, {}, {"ffn/up/kernel": 1, "ffn/down/kernel": 1}),
    "one dim said twice": ({"up/kernel": 2, "ffn/.*/kernel": -1}, {}, SPLIT | {"ffn/down/kernel": 2}),
}


@pytest.mark.parametrize(("rules", "model_rules", "expected"), ORDER.values(), ids=ORDER)
def test_order_of_rules(rules: Any, model_rules: Any, expected: dict[str, int]) -> None:
    assert tensor_dims(FFN, 2, rules, model_rules) == expected


def test_a_table_comes_before_annotations_which_add_to_it() -> None:
    names = {"ffn/up/kernel": (None, "embed", "mlp"), "ffn/down/kernel": (None, "mlp", "embed")}
    assert tensor_dims(FFN, 2, None, {"up/kernel": 1}, names) == {"ffn/up/kernel": 1, "ffn/down/kernel": 1}


def test_a_path_ends_at_components() -> None:
    leaves: Leaves = [("a/up/kernel", (4, 6)), ("a/sup/kernel", (4, 6)), ("up/kernel", (4, 6)), ("up/kernel/x", (4, 6))]
    assert tensor_dims(leaves, 2, {"up/kernel": 0}, {}) == {"a/up/kernel": 0, "up/kernel": 0}


def test_a_leaf_in_no_module_is_named_alone() -> None:
    leaves = [("bias", (6,)), ("shift/bias", (8,))]
    assert tensor_dims(leaves, 2, {"^bias": 0}) == {"bias": 0}
    assert tensor_dims(leaves, 2, {"bias": 0}) == {"bias": 0, "shift/bias": 0}


def test_a_rule_that_splits_what_a_pipeline_takes_apart() -> None:
    model = jp.Model(init=lambda key: {"up": jnp.zeros((4, 8, 16))}, loss=lambda params, batch, key: params["up"].sum())
    with pytest.raises(
        ValueError, match=r"dim 0 of up \[4, 8, 16\], whose layers pipe=2 takes apart; name another dim"
    ):
        jp.make_train_step(model, optax.sgd(0.1), "pipe=2,tensor=2,data=2,microbatches=2", rules={"up": 0})


def raises(message: str) -> Any:
    """Expect an error with these parts, between which anything may stand."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, message.split(" ... "))))


UP = "ffn/up/kernel [3, 24, 42]"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["up/kernel"], "rules: ['up/kernel'] is a list; use a dict such as {'ffn/up/kernel': -1}"),
        ({3: 1}, "rules: 3 is a int; use the end of a path: 'ffn/up/kernel'"),
        ({"up/kernel": "fsdp"}, "rules: 'up/kernel': 'fsdp' is no dim; use an int (-1 is the last), None"),
        ({"up/kernel": True}, "rules: 'up/kernel': True is no dim"),
        ({"up/kernel": 1.0}, "rules: 'up/kernel': 1.0 is no dim"),
        ({"mlp": "tensor"}, "rules: 'mlp': 'tensor' ... the model is not annotated ... {'ffn/up/kernel': -1}"),
        ({"up/(kernel": -1}, "rules: 'up/(kernel' is no regular expression ... themselves, use 'up/\\\\(kernel'"),
        ({"fnn/up/kernel": -1}, "rules: 'fnn/up/kernel' matches the end of no ... did you mean 'ffn/up/kernel'?"),
        ({"zzz": None}, f"rules: 'zzz' matches the end of no ... leaves are {UP}, ffn/down"),
        ({"up/.*": -3}, "rules: 'up/.*': -3 is no dim of ffn/up/bias [3, 42]; use -2 to 1, or None"),
        ({"up/kernel": 3}, f"rules: 'up/kernel': 3 is no dim of {UP}; use -3 to 2, or None"),
        ({"up/kernel": -1, ".*kernel": 1}, f"rules: 'up/kernel': -1 and '.*kernel': 1 disagree on {UP}; change one"),
        ({".*": None, "up/kernel": -1}, "rules: '.*': None and 'up/kernel': -1 disagree on ffn/up/kernel"),
        (
            {"up/kernel": 0},
            f"{UP} has 3 on dim 0, which tensor=2 does not divide; pad it to 4, or leave it ... whole: "
            "rules={'ffn/up/kernel': None}",
        ),
        (
            {"(up|down)/kernel": None},
            f"tensor=2 splits no parameter ... {UP}, ffn/down/kernel ... rules={{'ffn/up/kernel': -1}}",
        ),
    ],
)
def test_wrong_rules(rules: Any, message: str) -> None:
    with raises(message):
        tensor_dims(FFN, 2, rules)


ONE: Leaves = [("up", (4, 6))]


@pytest.mark.parametrize(
    ("leaves", "options", "message"),
    [
        (  # one message for all that does not divide
            [("layers/4/ffn/up/kernel", (24, 41)), ("layers/5/ffn/down/kernel", (41, 24)), ("head/kernel", (24, 8))],
            {"size": 4},
            "layers/4/ffn/up/kernel [24, 41] has 41 on dim 1, which tensor=4 does not divide; pad it to 44, or leave "
            "it whole: rules={'ffn/up/kernel': None, 'ffn/down/kernel': None}",
        ),
        (  # a bias follows its kernel in this, too
            [("up/bias", (41,)), ("up/kernel", (24, 41)), ("down/kernel", (4, 24))],
            {},
            "up/kernel [24, 41] has 41 on dim 1 ... leave it whole: rules={'up/kernel': None}",
        ),
        (
            [("embedding", (62, 24)), ("head/kernel", (24, 64))],
            {"size": 4, "rules": {"embedding": 0}},
            "pad it to 64, use tensor=2, or ... ': None}",
        ),
        (  # to leave the only one whole was advised, and refused: nothing was split
            [("up/kernel", (24, 41))],
            {},
            "up/kernel [24, 41] has 41 on dim 1 ... pad it to 42, or use data or fsdp instead of tensor",
        ),
        ([("x", ())], {"rules": {"x": 0}}, "'x': 0 is no dim of x []; it has none, use None"),
        (
            [("attn/c_attn/kernel", (24, 72))],
            {"model_rules": {}},
            "tensor=2 splits no parameter ... attn/c_attn/kernel: it holds several projections side by side ... "
            "make them separate ... rules={'attn/c_attn/kernel': -1}",
        ),
        (
            ONE,
            {"names": {"up": ("embed", "mlp")}, "rules": {"joined": "tensor"}},
            "rules: 'joined': 'tensor' is for a name of dims, and the model's are embed, mlp;",
        ),
        (
            ONE,
            {"names": {"up": ("embed", "mlp")}, "rules": {"mlp": -1}},
            "rules: 'mlp' is a name of dims and the end of no path; use rules={'mlp': 'tensor'}",
        ),
        (
            ONE,
            {"names": {"up": ("heads", "mlp")}},
            "up [4, 6] is annotated with ('heads', 'mlp'), which puts its dims [0, 1] on tensor; choose one: "
            "rules={'up': 0}",
        ),
        (
            ONE,
            {"names": {"up": ("layers", "embed", "mlp")}},
            "up [4, 6] is annotated with ('layers', 'embed', 'mlp'); give no more names than it has dims",
        ),
        (ONE, {"model_rules": [1]}, "the model's rules: [1] is a list; use a dict"),
        (ONE, {"model_rules": {"up": 2}}, "the model's rules: 'up': 2 is no dim of up [4, 6]"),
        (
            leaves_of(named("resnet-tiny").model),
            {"model_rules": {}},
            "tensor=2 splits no parameter ... branch/1/conv/kernel",
        ),
    ],
)
def test_what_does_not_fit(leaves: Leaves, options: dict[str, Any], message: str) -> None:
    with raises(message):
        tensor_dims(leaves, **{"size": 2, **options})


@pytest.mark.parametrize(
    ("leaves", "options", "message", "dims"),
    [
        (
            [("layers/0/w[0]/up/kernel", (4, 7)), ("layers/0/w[0]/down/kernel", (6, 4))],
            {},
            "does not divide",
            {"layers/0/w[0]/down/kernel": 0},
        ),
        # Equinox's weights are [out, in, window]: -1 was said, which is the window.
        ([("conv/weight", (32, 16, 3, 3))], {"model_rules": {}}, "splits no parameter", {"conv/weight": 0}),
    ],
)
def test_what_an_error_suggests_is_accepted(leaves: Leaves, options: Any, message: str, dims: dict[str, int]) -> None:
    """The rule in a message names the leaf that it is about, whatever its path."""
    with pytest.raises(ValueError, match=message) as error:
        tensor_dims(leaves, 2, **options)
    suggested = re.search(r"rules=({.*})", str(error.value))
    assert suggested is not None
    assert tensor_dims(leaves, 2, eval(suggested[1])) == dims
