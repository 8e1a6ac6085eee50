"""remat="auto": every choice for every value has the gradients of one device; a budget is met as compiled; what cannot
fit is refused with what holds the memory.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, check, initial
from expert_cells import check_cell
from jax import lax
from tensor_cells import SHARED_BATCH, batch_of, built

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.inspect.memory import of_step
from jaxpar.inspect.predict.prediction import predict
from jaxpar.inspect.remat import cheapest, stacks_of
from jaxpar.models import named
from jaxpar.parity.parity import Reference
from jaxpar.program import jaxpr as jx
from jaxpar.program.residuals import Residuals
from jaxpar.slicing.access import WholeAccess
from jaxpar.slicing.slicer import Slicing, slice_program

pytestmark = SHARED_BATCH

LAYERS, DIM, ROWS = 3, 6, 5


def loss(leaves: list[jax.Array], x: jax.Array, keys: jax.Array) -> jax.Array:
    """Sum squares of layers with two products, a softmax and dropout; only its first product reads a layer's input."""
    up, down = leaves

    def layer(carry: jax.Array, layer_inputs: Any) -> tuple[jax.Array, None]:
        dropout_mask = jax.random.bernoulli(layer_inputs[2], 0.7, (ROWS, DIM))
        return jnp.where(dropout_mask, jax.nn.softmax(jnp.sin(carry @ layer_inputs[0])), 0) @ layer_inputs[1], None

    y, _ = lax.scan(layer, x, (up, down, keys))
    return jnp.sum(y**2)


def arguments() -> tuple[Any, ...]:
    first, second, third, fourth = jax.random.split(jax.random.key(0), 4)
    leaves = [jax.random.normal(key, (LAYERS, DIM, DIM)) for key in (first, second)]
    return leaves, jax.random.normal(third, (ROWS, DIM)), jax.random.split(fourth, LAYERS)


def residuals(choice: str) -> tuple[Residuals, Any]:
    """Return the residuals of the stack's layers, and the function of the leaves' gradients, with this choice."""
    leaves, x, keys = arguments()
    how = Slicing(leaves, [None] * 2, remat="auto", choices=(choice,))
    program = slice_program(jx.trace(loss, leaves, x, keys)[0], how)
    stack_residuals = []

    def run(leaves: list[jax.Array]) -> Any:
        _, tape = program.forward(WholeAccess(), leaves, [x, keys], True)
        stack_residuals.extend(saved.forward.residuals for _, saved in tape if hasattr(saved, "forward"))
        return program.backward(WholeAccess(), leaves, tape, {0: jnp.ones(())}, [None] * 2)

    jax.eval_shape(run, leaves)
    return stack_residuals[0], run


VALUES = len(residuals("s")[0].values)


@pytest.mark.parametrize("choice", ["r", "h", *("".join("srh"[(i + n) % 3] for i in range(VALUES)) for n in range(3))])
def test_gradients_of_every_choice(choice: str) -> None:
    """In three of the choices together, every value is once saved, once recomputed and once on the host."""
    leaves, x, keys = arguments()
    grads = jax.jit(residuals(choice)[1])(leaves)
    for grad, expected_grad in zip(grads, jax.grad(loss)(leaves, x, keys), strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-6)


def test_what_is_kept() -> None:
    """A layer that recomputes everything keeps only its input; a layer on the host sends every value."""
    stack_residuals = residuals("s")[0]
    (kept_value,) = stack_residuals.kept("r").values
    assert kept_value in stack_residuals.inputs
    assert kept_value.aval.shape == (ROWS, DIM)
    on_host = stack_residuals.kept("h")
    assert on_host.host == [value in stack_residuals.values for value in on_host.values]
    assert VALUES >= 3


MODEL, BATCH = built("scanned")[0], batch_of(8)
SGD = optax.sgd(0.05, momentum=0.9)


FORCED = (
    "linen: data=2,fsdp=2,tensor=2,sequence=true,microbatches=2",
    "linen: pipe=2,fsdp=2,tensor=2,microbatches=2",
    "linen: pipe=2,fsdp=4,microbatches=2,schedule=zb-h1",
    "scanned: pipe=2,fsdp=4,zero=2,microbatches=2,chunks=2",
    "scanned: fsdp=4,context=2,microbatches=2",
    "capacity: expert=2,fsdp=4",
    "capacity: pipe=2,expert=2,fsdp=2,microbatches=2",
)


@functools.cache
def one_device_result(name: str, blocks: int) -> Any:
    """Return one device's gradients, and its parameters after three steps."""
    return OneDevice(built(name)[0]).train(SGD, BATCH, blocks, 3)


@pytest.mark.battery
@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("cell", FORCED)
def test_every_choice_beside_every_axis(cell: str, shift: int) -> None:
    """Each value is once saved, once recomputed and, without a pipeline, once on the host.

    "linen" has dropout, whose keys must equal one device's.
    """
    name, strategy = f"{cell},remat=auto,budget=1TB".split(": ")
    letters = "sr" if "pipe" in strategy else "srh"

    def forced(step: Any, batch: Any) -> Any:
        counts = [len(stack.residuals.values) for stack in stacks_of(step, batch)]
        assert sum(counts) > 3
        step.settle = None
        return step.choosing(tuple("".join(letters[(i + shift) % len(letters)] for i in range(n)) for n in counts))

    if name == "capacity":
        check_cell(name, strategy, also=forced)
        return
    model, rules = built(name)
    step = jp.make_train_step(model, SGD, strategy, rules=rules if "tensor" in strategy else None)
    blocks = step.replicas * step.strategy.microbatches
    check(forced(step, BATCH), model, initial(model), BATCH, 3, *one_device_result(name, blocks))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["fsdp=4,tensor=2", pytest.param("pipe=2,fsdp=4,microbatches=2,schedule=zb-h1", marks=pytest.mark.battery)],
)
def test_a_budget_is_met_and_training_is_as_on_one_device(strategy: str) -> None:
    compiled = jp.make_train_step(MODEL, SGD, strategy)
    budget = int(0.95 * of_step(compiled, BATCH, compiled.compile(BATCH))["each device"].total)
    step = jp.make_train_step(MODEL, SGD, f"{strategy},remat=auto,budget={budget}B")
    one_device, key = Reference(MODEL, jp.Strategy(single=True), 8), jax.random.key(0)
    grads, params = one_device.value_and_grad(key, BATCH)[1], one_device.train(SGD, key, BATCH, 2)
    check(step, MODEL, initial(MODEL), BATCH, 2, grads, params)
    explanation = step.explain(BATCH)
    assert explanation.memory["each device"].total <= budget
    assert {value.choice for value in explanation.values} == {"save", "recompute"}
    text = str(explanation)
    assert "layers leave" in text
    assert "recompute" in text


@pytest.mark.slow
def test_rows_are_checked_with_the_choices_for_their_batch() -> None:
    """The program that deals rows gets their order too, and choices were asked for both together as one batch."""
    step = jp.make_train_step(MODEL, SGD, "fsdp=2,remat=auto,budget=1GB", jax.devices()[:2])
    assert step.check_rows(step.init(jax.random.key(0)), BATCH).ok


def test_an_evaluation_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves nothing for a backward. On a batch of another shape than the step's, it compiled training programs."""
    step = jp.make_train_step(MODEL, SGD, "fsdp=2,remat=auto,budget=1GB", jax.devices()[:2])
    state = step.init(jax.random.key(0))
    monkeypatch.setattr(step, "settle", lambda batch: pytest.fail("it asked for choices"))
    loss = step.evaluate(state, BATCH)["loss"]
    expected = Reference(MODEL, jp.Strategy(single=True), 8).value_and_grad(jax.random.key(0), BATCH)[0]
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_host_has_room_for_what_is_sent_there() -> None:
    """With 70B parameters on 256 devices, 8 devices sent 403 GB each to a host of 2 TB."""
    (stack,) = stacks_of(jp.make_train_step(MODEL, SGD, "fsdp=2,remat=auto,budget=1TB", jax.devices()[:2]), BATCH)
    room = 0.5 * stack.cost(stack.uniform_choice("s")).device
    (choice,) = cheapest([stack], room, math.inf, "srh")
    sent = stack.cost(choice).host
    assert sent > 0
    (choice,) = cheapest([stack], room, 0.5 * sent, "srh")
    assert stack.cost(choice).host <= 0.5 * sent
    assert stack.cost(choice).device <= room


@pytest.mark.slow
def test_what_cannot_fit_says_what_holds_it() -> None:
    step = jp.make_train_step(MODEL, SGD, "fsdp=2,remat=auto,budget=1kB", jax.devices()[:2])
    with pytest.raises(
        ValueError, match=r"budget=1.00 kB is too small: .* needs at least .*, .* more: .* fits is budget='\d+MB'"
    ):
        step.compile(BATCH)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="budget='70GB' with remat='layer'"):
        jp.Strategy(budget="70GB", remat="layer")
    with pytest.raises(ValueError, match="'much' is no amount above 0"):
        jp.Strategy(budget="much", remat="auto")
    with pytest.raises(ValueError, match=r"remat='auto' with data=2,server=true: .* use remat='layer' or 'dots'"):
        jp.Strategy(data=2, server=True, remat="auto")
    with pytest.raises(ValueError, match="the memory of a cpu is not known; give budget='70GB'"):
        jp.make_train_step(MODEL, SGD, "fsdp=8,remat=auto").compile(BATCH)


@pytest.mark.battery
@pytest.mark.cuda_compiler
def test_between_all_and_nothing_it_is_faster_than_recomputing_layers() -> None:
    model, devices = named("llama3-8b", layers=8, dim=1024, heads=8, kv_heads=4, ffn=4096, vocab=2048), target("2xH100")
    batch = model.example(2, 8192)

    def bytes_and_seconds(text: str) -> tuple[int, float]:
        step = jp.make_train_step(model.model, SGD, f"fsdp=2,precision=bf16,{text}", devices.devices)
        compiled = step.compile(batch)
        seconds = predict(compiled, step, batch, devices.hardware).seconds
        return of_step(step, batch, compiled)["each device"].total, seconds

    largest, fastest = bytes_and_seconds("remat=none")
    smallest, slowest = bytes_and_seconds("remat=layer")
    used, seconds = bytes_and_seconds(f"remat=auto,budget={(largest + smallest) // 2}B")
    assert smallest < used <= (largest + smallest) // 2
    assert fastest < seconds < slowest
