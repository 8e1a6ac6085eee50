"""A program under a strategy beside the same on one device: loss and every gradient, by their own scale and noise."""

from __future__ import annotations

import functools
import math
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

from .programs import Program

PACKAGE = Path(jp.__file__).parent
EQUAL, REFUSED, ROUNDED, CRASHED, WRONG = "equal", "refused", "rounded", "crashed", "wrong"
FAILURES = (CRASHED, WRONG)
TOLERANCE = {"float32": 2e-5, "float64": 1e-6}  # in float64 the programs' own casts to float32 are what is left
MARGIN = 64  # times the noise that two runs show: theirs is a sample
# What a leaf may be off by in units of the largest element of all gradients: a leaf whose true gradient is zero is
# rounding alone.
FLOOR = {"float32": 1e-6, "float64": 1e-9}


class Invalid(Exception):
    """What is no program: one device has no finite loss and gradients of it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a program under a strategy; `said` is the error, or the leaf that differs."""

    kind: str
    said: str = ""


def converted(arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, Any]:
    """Arrays with those of float32 in another dtype."""
    return {name: x.astype(dtype) if x.dtype == "float32" else x for name, x in arrays.items()}


def value(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> jax.Array:
    """The loss as one number."""
    found = loss(params, batch)
    found = found[0] if isinstance(found, tuple) else found
    return found.total / found.count if isinstance(found, jp.Mean) else found


class OneDevice:
    """The loss and gradients of a program by `jax.grad`, and how far they move when its numbers do by a rounding."""

    def __init__(self, program: Program, dtype: str = "float32"):
        self.program, self.dtype = program, dtype
        params, self.batch = program.params(), program.batch()
        if not params:
            raise Invalid("no parameters")
        with jax.enable_x64(dtype == "float64"):
            self.params, self.batch = converted(params, dtype), converted(self.batch, dtype)
            try:
                grad = jax.jit(jax.value_and_grad(functools.partial(value, program.loss())))
                runs = [jax.device_get(grad(*self._moved(i))) for i in range(3)]
            except Exception as error:
                raise Invalid(f"{type(error).__name__}: {error}") from error
        (self.loss, self.grads), *others = runs
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(runs)):
            raise Invalid("not finite")
        gap = lambda x, *moved: max(float(np.abs(x - y).max(initial=0)) for y in moved)
        self.noise = jax.tree.map(gap, (self.loss, self.grads), *others)

    def _moved(self, number: int) -> tuple[Any, Any]:
        """Parameters and batch, each number moved by at most a unit in the last place; as they are for number 0."""
        random, eps = np.random.default_rng(number), np.finfo(self.dtype).eps

        def moved(x: np.ndarray) -> np.ndarray:
            if not number or x.dtype != self.dtype:
                return x
            return (x * (1 + eps * random.choice([-1, 1], x.shape))).astype(x.dtype)

        batch = {k: moved(v) if k in ("x", "y") else v for k, v in self.batch.items()}
        return {k: moved(v) for k, v in self.params.items()}, batch

    def differs(self, loss: Any, grads: Any) -> str:
        """The first leaf that is further off than rounding explains, or the loss; "" where all agree."""
        largest = max((float(np.abs(g).max(initial=0)) for g in self.grads.values()), default=0.0)
        pairs = {name: (grads[name], self.grads[name], self.noise[1][name]) for name in self.grads}
        pairs["the loss"] = loss, self.loss, self.noise[0]
        for name, (ours, theirs, noise) in pairs.items():
            ours, theirs = np.asarray(ours, "float64"), np.asarray(theirs, "float64")
            if ours.shape != theirs.shape:
                return f"{name} has shape {ours.shape}, on one device {theirs.shape}"
            error, scale = np.abs(ours - theirs).max(initial=0), np.abs(theirs).max(initial=0)
            allowed = TOLERANCE[self.dtype] * scale + MARGIN * noise + FLOOR[self.dtype] * largest
            if not error <= max(allowed, 1e-30):
                return f"{name} is off by {error:.3g}, its largest element {scale:.3g}, allowed {allowed:.1g}"
        return ""


def refusal(error: BaseException) -> bool:
    """Whether jaxpar itself raised it, as a sentence for users, and did not pass on what JAX or Python said: `max` of
    nothing is a ValueError too, in a line of ours that raises none.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = (last.line or "").startswith("raise ")
    return isinstance(error, ValueError) and raised and Path(last.filename).is_relative_to(PACKAGE)


def category(said: str) -> str:
    """A message without the names, numbers and lines of one program; of couplings the first that is named."""
    said = said.split("\n- ")[1] if "couple" in said and "\n- " in said else said
    text = re.sub(r"(<program \w+>|\S+\.py)[:\d]*", "LINE", said)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^]]*\]|\([^)]*\)|[\d,]*\d[\d.e,-]*", "_", text)
    return " ".join(text.split())[:110]


def raw(error: BaseException) -> str:
    """An error that is no sentence for users: its kind, message, and jaxpar's last line under it."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(PACKAGE)]
    at = f" ({Path(ours[-1].filename).relative_to(PACKAGE.parent)}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}{at}: {' '.join(str(error).split())[:300]}"


def run(program: Program, strategy: str, devices: int, dtype: str = "float32") -> tuple[Any, Any]:
    """The loss and gradients of the program under a strategy."""
    with jax.enable_x64(dtype == "float64"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = jp.make_train_step(program.model(), optax.sgd(0.1), strategy, mesh=jax.devices()[:devices])
        params = jax.tree.map(jnp.asarray, converted(program.params(), dtype))
        state = step.init(jax.random.key(0), params=params)
        return jax.device_get(step.value_and_grad(state, converted(program.batch(), dtype)))


def outcome(program: Program, strategy: str, devices: int, one: OneDevice | None = None) -> Outcome:
    """What becomes of a program under a strategy. Raises `Invalid` for what is no program."""
    one = one or OneDevice(program)
    try:
        found = one.differs(*run(program, strategy, devices))
        if not found:
            return Outcome(EQUAL)
        # Where rounding decides (a sort's ties, a maximum), float32 may differ; numbers twice as long tell.
        exact = OneDevice(program, "float64").differs(*run(program, strategy, devices, "float64"))
        return Outcome(WRONG, exact) if exact else Outcome(ROUNDED, found)
    except Invalid:
        raise
    except Exception as error:
        # XLA's CPU runtime (jaxlib 0.10.2 to 0.12.0) fails a check of its own where it has laid out an FFT's operand in
        # another order than its dims, which it may of any program.
        if "xla/backends/cpu/runtime/fft_thunk.cc" in str(error):
            raise Invalid(raw(error)) from error
        return Outcome(REFUSED, str(error)) if refusal(error) else Outcome(CRASHED, raw(error))


# -- strategies, and how many devices each takes -----------------------------------------------------------------------

AXES = ("data", "fsdp", "tensor", "context", "expert", "pipe")


def devices(strategy: str) -> int:
    """How many devices its axes take."""
    sizes = dict(part.split("=") for part in strategy.split(","))
    return math.prod(int(size) for axis, size in sizes.items() if axis in AXES)


_TEXTS = """
    data=4 data=2,microbatches=2 data=2,server=true fsdp=4,zero=1 fsdp=4,zero=2 fsdp=4
    fsdp=2,microbatches=2,remat=layer data=2,fsdp=4 data=2,fsdp=2,zero=2,microbatches=2 tensor=2 tensor=4
    tensor=2,sequence=true tensor=4,sequence=true tensor=2,fsdp=2,remat=layer
    tensor=2,data=2,sequence=true,microbatches=2 context=2 context=4 context=2,attention=ring
    context=2,attention=ulysses context=2,fsdp=2 context=2,tensor=2 context=2,tensor=2,sequence=true,fsdp=2
    expert=2 expert=4 expert=2,tensor=2 expert=2,fsdp=2,microbatches=2 expert=2,context=2,data=2
    pipe=2,stages=cut,microbatches=2 pipe=4,stages=cut,microbatches=4
    pipe=2,stages=cut,microbatches=4,schedule=zb-h1 pipe=2,stages=cut,chunks=2,microbatches=2
    pipe=2,stages=cut,microbatches=2,data=2,tensor=2 pipe=2,stages=cut,microbatches=2,fsdp=2,zero=1
    pipe=2,stages=layers,microbatches=2 pipe=2,stages=layers,microbatches=4,fsdp=2,tensor=2
    pipe=2,stages=layers,microbatches=4,schedule=zb-h1 pipe=2,stages=layers,microbatches=2,context=2,remat=layer
    data=2,logits=4 tensor=2,logits=4 fsdp=2,logits=7,microbatches=2 fsdp=2,microbatches=2,prefetch=1
    fsdp=2,microbatches=4,concurrent=2,prefetch=1,remat=layer tensor=2,sequence=true,microbatches=2,concurrent=2
    expert=2,fsdp=2,microbatches=2,concurrent=2 fsdp=2,kernels=fused fsdp=2,microbatches=2,offload=activations
    tensor=2,fsdp=2,remat=auto,budget=1GB,offload=activations
    pipe=2,stages=layers,microbatches=4,fsdp=2,prefetch=1 data=2,fsdp=2,hpz=true,microbatches=2
"""
STRATEGIES: Sequence[tuple[str, int]] = [(text, devices(text)) for text in _TEXTS.split()]


def family(strategy: str) -> str:
    """Its row of the table: what in it is rarest."""
    order = ("server", "logits", "layers", "cut", "expert", "context", "sequence", "tensor", "fsdp", "data")
    name = next(name for name in order if name in strategy)
    composed = sum(f"{axis}=" in strategy for axis in AXES) > 1
    names = {"layers": "pipe", "cut": "pipe, cut", "server": "dp", "logits": "logits, in chunks", "data": "ddp"}
    return names.get(name, name) + ", composed" * composed
