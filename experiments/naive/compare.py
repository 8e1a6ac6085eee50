"""The data, training on one device, and how a strategy compares with it."""

import functools
import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from model import B, N, T, Tree, V, init, layer_of, loss, outer_of, sgd

STEPS = 5
TOLERANCE = 1e-5  # of a leaf's largest value: rounding of float32


def data(step: int) -> np.ndarray:
    """Tokens [B, T + 1]: each is 5 times the one before, plus 1, but one in ten is random."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(V, size=(B, T + 1), dtype=np.int32)
    for t in range(T):
        tokens[:, t + 1] = np.where(rng.random(B) < 0.1, tokens[:, t + 1], (5 * tokens[:, t] + 1) % V)
    return tokens


@functools.cache
def first() -> Tree:
    """The parameters that all begin with."""
    return jax.jit(init)(jax.random.key(0))


def place(params: Tree, mesh: jax.sharding.Mesh, specs: Tree) -> tuple[Tree, Tree]:
    """Parameters, and zeros for their momentum, on the devices of a mesh; a spec may be that of a whole dict."""
    params = jax.tree.map(lambda spec, x: jax.device_put(x, jax.NamedSharding(mesh, spec)), specs, params)
    return params, jax.tree.map(jnp.zeros_like, params)


def unflatten(flat: Tree) -> Tree:
    """Flat parameters, sharded or not, as leaves."""
    flat = jax.device_get(flat)
    return {"outer": outer_of(flat["outer"]), "layers": jax.vmap(layer_of)(flat["layers"])}


@functools.cache
def one_device(loss: Callable) -> list[tuple[jax.Array, Tree, Tree]]:
    """Of every step: the loss before it, parameters and momentum after it."""
    params, states = first(), []
    momentum = jax.tree.map(jnp.zeros_like, params)
    value_and_grad, update = jax.jit(jax.value_and_grad(loss)), jax.jit(sgd)
    for number in range(STEPS):
        value, grads = value_and_grad(params, data(number))
        params, momentum = update(params, momentum, grads)
        states.append((value, params, momentum))
    return states


def difference(found: Tree, wanted: Tree) -> float:
    """The largest difference of two trees, each leaf in units of its own largest value."""
    errors = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max() / np.abs(b).max(), found, wanted)
    return float(max(jax.tree.leaves(errors)))


def compare(
    start: Callable, step: Callable, whole: Callable = lambda stored: stored, lower: Callable | None = None,
    loss: Callable = loss,
) -> tuple[list, float, str]:  # fmt: skip
    """Trains by a strategy, from the parameters and on the data of one device.

    Args:
      start: parameters -> parameters and momentum as the strategy stores them.
      step: (parameters, momentum, tokens) -> (loss, or what the devices add to it, parameters, momentum).
      whole: parameters or momentum as the strategy stores them -> as one device does.
      lower: lowers the program whose collectives count, if `step` is not one program.
      loss: (parameters, tokens) -> the loss of one device.

    Returns: the losses (one device, strategy) of every step; the largest difference of the gradients (the momentum
      after one step) and of parameters and momentum after the last; the text of the compiled program.
    """
    assert len(jax.devices()) == N, f"{len(jax.devices())} devices, not {N}: unset XLA_FLAGS"
    params, momentum = start(first())
    text = (lower or step.lower)(params, momentum, data(0)).compile().as_text()
    losses, worst = [], 0.0
    for number, (value, *wanted) in enumerate(one_device(loss)):
        parts, params, momentum = step(params, momentum, data(number))
        losses.append((float(value), float(parts.sum())))
        if number in (0, STEPS - 1):
            worst = max(worst, difference([whole(params), whole(momentum)], wanted))
    return losses, worst, text


def main(*strategy: Callable, **more: Callable) -> None:
    """Prints what `compare` finds. The exit status is 1 if the strategy is not equal to one device."""
    losses, worst, text = compare(*strategy, **more)
    print("step  one device  strategy")
    for number, (one, many) in enumerate(losses):
        print(f"{number:4}  {one:10.6f}  {many:8.6f}")
    print(f"largest difference {worst:.1e} of a leaf's largest value, allowed {TOLERANCE:.0e}")
    found = Counter(re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", text))
    print("collectives in the compiled program, one in a loop counted once:", dict(found) or "none")
    raise SystemExit(not worst <= TOLERANCE)
