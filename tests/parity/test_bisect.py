"""`bisect` names the equation where two strategies part. Three former defects of this repository are put back."""

import __future__

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.parallel.tensor import primitives, sums
from jaxpar.parity import Bisected, sides
from jaxpar.parity.cut import CutLoss
from jaxpar.slicing import program
from jaxpar.step import tracing

TWO_DEVICES = jax.devices()[:2]


def put_back(patch: pytest.MonkeyPatch, module: Any, name: str, correct: str, defect: str) -> None:
    """Replace a function of a module by its version with a defect: `correct` becomes `defect` in its source."""
    text = textwrap.dedent(inspect.getsource(getattr(module, name)))
    assert text.count(correct) == 1, "the defect is to be put back elsewhere"
    namespace = dict(vars(module))
    code = compile(text.replace(correct, defect), f"{name} before", "exec", __future__.annotations.compiler_flag)
    exec(code, namespace)
    patch.setattr(module, name, namespace[name])


def line(function: Callable[..., Any], text: str) -> str:
    """Return the line of a function of this file that holds a text, as messages name it."""
    lines, first = inspect.getsourcelines(function)
    (line_number,) = (number for number, source_line in enumerate(lines, first) if text in source_line)
    return f"test_bisect.py:{line_number}:"


def first_three(params: Any, batch: Any, key: Any) -> jax.Array:
    x = batch["x"] @ params["w"]
    picked = x[jnp.arange(3)[None], batch["label"][:, None]]  # of the first three rows of this block
    return jnp.square(picked).mean()


RANDOM = np.random.default_rng(0)
LABEL = RANDOM.integers(0, 5, 8).astype(np.int32)
BATCH = {"x": RANDOM.normal(size=(8, 4)).astype(np.float32)}
LABELLED = BATCH | {"label": LABEL}


def init(key: jax.Array) -> Any:
    return {"w": jax.random.normal(key, (4, 5))}


SQUARES = jp.Model(init, lambda params, batch, key: ((batch["x"] @ params["w"]) ** 2).mean())


@pytest.mark.slow
def test_rows_that_a_loss_couples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row check took indices that count along another dim for the rows' own, and was silent."""
    monkeypatch.setattr(tracing, "check_coupling", lambda *_, **__: None)
    report = jp.verify(jp.Model(init, first_three), "ddp", LABELLED, steps=1, mesh=TWO_DEVICES)
    assert isinstance(difference := report.where, Bisected)
    assert (difference.primitive, difference.backward) == ("gather", False), str(difference)
    assert line(first_three, "picked = x[") in difference.line
    assert str(report).endswith(str(difference))
    assert "ddp and one device part at gather, its result, at " in str(difference)


def centred(params: Any, batch: Any, key: Any) -> jax.Array:
    h = jnp.tanh(batch["x"] @ params["w"])
    mean = h.mean(0)  # of the rows of this block
    return jnp.square(h - mean).mean()


@pytest.mark.slow
def test_what_sums_rows_is_named_and_not_what_reads_the_sum() -> None:
    model = jp.Model(init, centred, rows="independent")
    difference = jp.bisect(model, "ddp", None, BATCH, mesh=TWO_DEVICES)
    assert (difference.primitive, difference.backward) == ("reduce_sum", False), str(difference)
    assert line(centred, "mean = h.mean(0)") in difference.line


def test_what_agrees_has_no_equation() -> None:
    difference = jp.bisect(SQUARES, "ddp", None, BATCH, mesh=TWO_DEVICES)
    assert (difference.primitive, difference.programs) == ("", 1)
    assert str(difference) == "ddp and one device agree within 1e-05: there is no equation to name"
    broken = jp.Model(lambda key: {"w": -jnp.ones((4, 5))}, lambda p, b, key: jnp.log(p["w"]).mean() * b["x"].mean())
    with pytest.raises(ValueError, match=r"not finite on either side, and nothing .*; try step\.trace_nonfinite"):
        jp.bisect(broken, "ddp", None, BATCH, mesh=TWO_DEVICES)
    with pytest.raises(ValueError, match="compares one device with itself"):
        jp.bisect(SQUARES, None, None, BATCH)


def layers(start: Callable[..., Any], end: Callable[..., Any]) -> jp.Model:
    """Return three layers with `end` at the end of each but the last, and `start` at the start of the next."""

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x = jnp.tanh(batch["x"].astype(params["c"].dtype) @ params["a"])
        x, _ = jax.lax.scan(lambda x, w: (end(jnp.tanh(start(x) @ w)), None), end(x), params["b"])
        return jnp.square(start(x) @ params["c"]).mean()

    def init(key: jax.Array) -> Any:
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) / 2
        return {"a": draw(0, 4, 8), "b": draw(1, 3, 8, 8), "c": draw(2, 8, 1)}

    return jp.Model(init, loss)


PLANTED = {  # precision, functions before and after a layer, the primitive that bisect must name
    "overflow": ("f16", lambda x: x / 1e6, lambda x: x * 1e6, "mul"),
    "cancellation": ("bf16", lambda x: x - 512, lambda x: x + 512, "sub"),
}


@pytest.mark.battery
@pytest.mark.parametrize("fault", PLANTED)
def test_what_a_low_precision_does_beyond_its_rounding(fault: str) -> None:
    precision, start, end, primitive = PLANTED[fault]
    strategy = f"single,precision={precision}"
    difference = jp.bisect(layers(start, end), strategy, "single", BATCH, mesh=TWO_DEVICES[:1])
    assert (difference.primitive, difference.backward) == (primitive, False), str(difference)
    assert f"test_bisect.py:{start.__code__.co_firstlineno}:" in difference.line, str(difference)


@pytest.mark.slow
def test_a_value_and_its_cast_are_one() -> None:
    """In bfloat16, a value and its float32 cast were both alive after the square of a norm, and both counted."""

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x = jnp.tanh(batch["x"].astype(params["w"].dtype) @ params["w"])
        wide = x.astype(jnp.float32)
        return (x + (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True))).astype(x.dtype)).mean()

    model = jp.Model(lambda key: {"w": jax.random.normal(key, (8, 8))}, loss, rows="independent")
    batch, key = {"x": np.random.default_rng(0).normal(size=(4, 8)).astype("f")}, jax.random.key(0)
    cut = CutLoss(model, batch, key)
    in_float32, in_bfloat16 = (
        sides.UnderStrategy(cut, jp.Strategy.parse(text), jax.devices()[:1], key, batch)
        for text in ("single", "single,precision=bf16")
    )
    for index in cut.indices_with_rows(()):
        assert in_float32((index,))[0] == pytest.approx(in_bfloat16((index,))[0], rel=0.03)


def test_a_cut_loss_takes_no_more_memory_than_the_loss() -> None:
    """The residuals of a cut's number were stored for every layer: 1.94 times the temporaries of the gradients.

    That was with jax 0.10.2; now they are 1.00 times, and 1.16 times with 0.12.
    """

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jax.nn.gelu(x @ w), None), batch["x"], params)
        return jnp.square(x).mean()

    def temporaries(model: jp.Model) -> int:
        step = jp.make_train_step(model, optax.sgd(0.1), "single", TWO_DEVICES[:1])
        return step.compile(batch).memory_analysis().temp_size_in_bytes

    batch = {"x": np.ones((64, 32), np.float32)}
    cut = CutLoss(model := jp.Model(lambda key: jax.random.normal(key, (6, 32, 32)), loss), batch, jax.random.key(0))
    (scan,) = [index for index, eqn in enumerate(cut.eqns) if eqn.primitive.name == "scan"]
    middle = cut.indices_with_rows((scan,))[5]
    assert temporaries(cut.cut_at((scan, 3, middle))) <= 1.25 * temporaries(model)


def two_stacks(params: Any, batch: Any, key: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> Any:
        h = x @ w["up"] + w["bias"]
        return x + jnp.tanh(h) @ w["down"], None

    x = batch["x"]
    x, _ = jax.lax.scan(layer, x, params)
    x, _ = jax.lax.scan(layer, x, params)
    return (x**2).mean()


@pytest.mark.battery
def test_a_cotangent_of_a_stack_that_was_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cotangent of an array that two stacks read was passed on twice: the second stack's gradient counted twice."""
    put_back(monkeypatch, program, "backward", "cts.pop(v) if v in cts", "cts[v] if v in cts")

    def init(key: jax.Array) -> Any:
        draw = lambda i, *shape: 0.1 * jax.random.normal(jax.random.fold_in(key, i), shape)
        return {"up": draw(1, 4, 8, 41), "bias": draw(2, 4, 41), "down": draw(3, 4, 41, 8)}

    batch = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    report = jp.verify(jp.Model(init, two_stacks), "fsdp=2", batch, steps=1, mesh=TWO_DEVICES)
    assert isinstance(difference := report.where, Bisected), str(report)
    assert difference.backward
    assert difference.what == "the gradient of bias"
    assert line(two_stacks, 'h = x @ w["up"] + w["bias"]') in difference.line, str(difference)


def largest(params: Any, batch: Any, key: Any) -> jax.Array:
    h = batch["x"] @ params["up"]
    best = h.max(axis=-1, keepdims=True)
    return jnp.square(jnp.tanh(best) @ params["down"]).mean()


@pytest.mark.battery
def test_ties_on_several_tensor_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that tie for a maximum shared its gradient by ranks, not by elements."""
    # The replaced function registers itself in the table of rules.
    for name, rule in primitives.RULES.items():
        monkeypatch.setitem(primitives.RULES, name, rule)
    correct = 'if not (x.active and name in ("reduce_max", "reduce_min")):'
    put_back(monkeypatch, sums, "_reduce", correct, "if True:")

    def init(key: jax.Array) -> Any:
        up = 0.1 * jax.random.normal(key, (4, 8))
        # Two of the equal elements are on the first rank, one on the second.
        for column in (0, 1, 4):
            up = up.at[:, column].set(5 * up[:, 0] if column == 0 else up[:, 0])
        return {"up": up, "down": jnp.ones((1, 3))}

    model = dataclasses.replace(jp.Model(init, largest), rules={"up": 1})
    batch = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}
    # `jp.verify` takes this for rounding: the last bits of the parameters decide which element is largest.
    difference = jp.bisect(model, "tensor=2", None, batch, mesh=TWO_DEVICES)
    assert (difference.primitive, difference.backward, difference.what) == ("reduce_max", True, "the gradient of up")
    assert line(largest, "best = h.max(") in difference.line


def by_scan(params: Any, batch: Any, key: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> Any:
        scores = (x @ w["q"]) * 0.25
        return x + jax.nn.softmax(scores) * jnp.tanh(x @ w["v"]), None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["a"], {"q": params["q"], "v": params["v"]})
    logs = jax.nn.log_softmax(x @ params["c"])
    return -jnp.take_along_axis(logs, batch["label"][:, None], -1).mean()


def by_hand(scale: float = 0.25, shift: int = 0, stopped: bool = False) -> Callable[[Any, Any], jax.Array]:
    """Return a loss with the mathematics of `by_scan`, written differently; or almost, with other arguments."""

    def theirs(params: Any, batch: Any) -> jax.Array:
        x = jnp.dot(batch["x"], params["a"])
        for q, v in zip(params["q"], params["v"], strict=True):
            scores = jnp.einsum("bi,ij->bj", x, q) * scale
            weights = jnp.exp(scores) / jnp.exp(scores).sum(-1, keepdims=True)
            weights = jax.lax.stop_gradient(weights) if stopped else weights
            x = x + weights * jnp.tanh(x @ v)
        logits = x @ params["c"]
        chosen = jax.nn.one_hot((batch["label"] + shift) % 5, 5)
        return (jax.nn.logsumexp(logits, -1) - (logits * chosen).sum(-1)).mean()

    return theirs


def whole_step(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(by_hand())(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def draws(key: jax.Array) -> Any:
    draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) / 2
    return {"a": draw(0, 4, 6), "q": draw(1, 2, 6, 6), "v": draw(2, 2, 6, 6), "c": draw(3, 6, 5)}


@pytest.mark.slow
def test_a_loss_by_hand_in_other_words_parts_where_its_mathematics_does() -> None:
    model, batch = jp.Model(draws, by_scan), LABELLED
    assert jp.bisect(model, None, by_hand(), batch).primitive == ""
    scaled = jp.bisect(model, None, by_hand(scale=0.3), batch)
    assert (scaled.primitive, scaled.iteration, scaled.backward) == ("mul", 0, False), str(scaled)
    assert line(by_scan, "scores = (x @") in scaled.line
    assert "in theirs: mul at " in scaled.beside, str(scaled)
    assert line(by_hand, "scores = jnp.einsum") in scaled.beside, str(scaled)
    shifted = jp.bisect(model, None, by_hand(shift=1), batch)
    assert line(by_hand, "chosen = ") in shifted.beside, str(shifted)
    stopped = jp.bisect(model, None, by_hand(stopped=True), batch)
    assert stopped.backward, str(stopped)
    assert line(by_scan, "return x + jax.nn.softmax(scores)") in stopped.line, str(stopped)
    with pytest.raises(ValueError, match=r"bisect\(b=draws\) takes 1 arguments; use \(params, batch\)"):
        jp.bisect(model, None, draws, batch)
    with pytest.raises(ValueError, match=r"bisect\(b=whole_step\) returned a dict; return a scalar: it is taken for"):
        jp.bisect(model, None, whole_step, batch)
    with pytest.raises(KeyError, match="params") as error:
        jp.bisect(model, None, lambda state, batch: by_hand()(state["params"], batch), batch)
    assert "for a step, give the loss that it differentiates" in error.value.__notes__[0]


def test_two_devices_are_named() -> None:
    same = jp.bisect(SQUARES, None, None, BATCH, mesh=TWO_DEVICES[:1], mesh_b=TWO_DEVICES[1:])
    assert str(same).startswith("one device on device 0 and one device on device 1 agree within 1e-05"), str(same)


@pytest.mark.slow
def test_devices_in_another_order_show_the_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the second device are 5e-4 too large, or twice that if it has rank 1."""
    run = sides.UnderStrategy.__call__

    def wrong(self: Any, site: Any) -> Any:
        loss, grads = run(self, site)
        rank = [device.id for device in self.mesh].index(1)
        return loss, jax.tree.map(lambda x: x * (1 + 5e-4 * (rank + 1)), grads)

    monkeypatch.setattr(sides.UnderStrategy, "__call__", wrong)
    difference = jp.bisect(SQUARES, "ddp", "ddp", BATCH, mesh=TWO_DEVICES, mesh_b=TWO_DEVICES[::-1])
    assert (difference.primitive, difference.backward, difference.what) == ("dot_general", True, "the gradient of w")
    assert str(difference).startswith("ddp on devices 0, 1 and ddp on devices 1, 0 part at dot_general, its backward")


@pytest.mark.parametrize("a", ["ddp", None])
def test_a_path_is_refused_and_its_advice_works(a: str | None, tmp_path: Path) -> None:
    """Two processes met by a file, and each unpickled code of any process that had made the file first."""
    with pytest.raises(ValueError, match=r"was removed from jaxpar; each of two processes ran code that the") as error:
        jp.bisect(SQUARES, a, tmp_path / "meet", BATCH, mesh=TWO_DEVICES)
    assert not [*tmp_path.iterdir()]
    advice = "jp.bisect(model, 'fsdp', None, batch)"
    assert advice in str(error.value)
    assert eval(advice, {"jp": jp, "model": SQUARES, "batch": BATCH}).primitive == ""
