"""Faults that are planted in a model: each makes a NaN or an infinity at one line, which is marked, where row 11 of a
batch comes to it; and the strategies under which that line must be named.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp

ROWS, LENGTH, DIM, VOCAB, LAYERS, EXPERTS = 16, 8, 8, 24, 2, 4
ROW = 11
STRATEGIES = {  # 8 blocks of 2 rows each
    "ddp": "ddp",
    "fsdp": "data=2,fsdp=4",
    "tensor": "data=4,tensor=2,microbatches=2",
    "pipe zb-h1": "data=4,pipe=2,microbatches=2,schedule=zb-h1",
    "context": "data=4,context=2,microbatches=2",
    "expert": "data=2,expert=4",
}
Point = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # x [B, T, D], s [B, 1, 1] (0 in one row), w []
FAULTS: dict[str, tuple[str, Point]] = {}


def planted(where: str) -> Callable[[Point], Point]:
    """A fault in each layer ("layer") or after all ("head"); "batch" and "params" put it there."""

    def keep(fault: Point) -> Point:
        FAULTS[fault.__name__] = where, fault
        return fault

    return keep


def line_of(name: str) -> int:
    """The number of the line that is marked."""
    lines, first = inspect.getsourcelines(FAULTS[name][1])
    return next(first + at for at, line in enumerate(lines) if line.rstrip().endswith("# here"))


@planted("head")
def log_of_0(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.log(s)  # here


@planted("layer")
def derivative_of_sqrt_at_0(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    squares = jnp.square(x * s)
    return x + jnp.sqrt(squares)  # here


@planted("layer")
def overflow_in_f16(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    low = (x + 2 - s).astype(jnp.float16)
    wide = jnp.where(s > 0, low, 300) * jnp.where(s > 0, low, 300)  # here
    return x + wide.astype(x.dtype)


@planted("head")
def overflow_in_bf16(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    low = jnp.broadcast_to(1 + 99 * (1 - s), x.shape).astype(jnp.bfloat16)
    return x + jnp.exp(low).astype(x.dtype)  # here


@planted("head")
def masked_mean_of_nothing(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    mask = jnp.broadcast_to(s, x.shape)
    mean = (x * mask).sum(-1, keepdims=True) / mask.sum(-1, keepdims=True)  # here
    return x - mean


@planted("layer")
def softmax_of_all_masked(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    seen = jnp.where(s > 0, x, -jnp.inf)
    return x + jax.nn.softmax(seen)  # here


@jax.custom_vjp
def doubled(x: jax.Array, s: jax.Array) -> jax.Array:
    return 2 * x


def _bad_backward(s: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    return 2 * ct / s, jnp.zeros_like(s)


doubled.defvjp(lambda x, s: (2 * x, s), _bad_backward)


@planted("layer")
def bad_custom_vjp(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    return doubled(x, s)  # here


@planted("layer")
def scale_of_dropout(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    keep = 0.9 * s
    return jnp.where(x > 0, x / keep, x)  # here


@planted("layer")
def log_behind_where(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    y = jnp.square(x) * s
    return x + jnp.where(y > 0, jnp.log(y), 0)  # here


@planted("head")
def norm_of_zeros(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.linalg.norm(x * s, axis=-1, keepdims=True)  # here


@planted("layer")
def normalised_zeros(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    y = x * s
    return x + y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True))  # here


@planted("layer")
def power_of_a_negative(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    y = jnp.square(x) + 2 * s - 1e4 * (1 - s)
    return x + y**w  # here


@planted("head")
def overflow_of_exp(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.exp((1 - s) * 1e3 - jnp.square(x))  # here


@planted("layer")
def log1p_of_minus_1(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.log1p(s - 1)  # here


@planted("head")
def in_a_while_loop(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    def body(carry: Any) -> Any:
        number, y = carry
        return number + 1, y / jnp.maximum(s, number - 2)  # here

    return x + jax.lax.stop_gradient(jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1])


@planted("layer")
def under_remat(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    def inner(x: jax.Array, s: jax.Array) -> jax.Array:
        return jnp.tanh(x) / s  # here

    return jax.checkpoint(inner)(x, s)


@planted("layer")
def negative_variance(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    variance = jnp.square(x).mean(-1, keepdims=True) - (1 - s) * 1e6
    return x + jnp.sqrt(variance)  # here


@planted("layer")
def arccos_at_1(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    y = jnp.where(s > 0, jnp.tanh(x) / 2, x * 0 + 1)
    return x + jnp.arccos(y)  # here


# From bug reports, planted after the search was written.


@planted("head")
def one_hot_times_masked_logits(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(jnp.where((jnp.arange(DIM) < 4) | (s > 0), x, -jnp.inf))
    return x - jnp.where(jnp.arange(DIM) == 0, 1.0, 0.0) * logits  # here


@planted("layer")
def two_masks_of_the_lowest_number(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    causal = padding = jnp.where(s > 0, 0.0, jnp.finfo(x.dtype).min)
    return x + jax.nn.softmax(x + (causal + padding))  # here


@planted("layer")
def quotient_behind_nan_to_num(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.nan_to_num(x / s, posinf=0, neginf=0)  # here


@planted("batch")
def inf_in_a_row(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    return x * s  # here


@planted("params")
def nan_parameter(x: jax.Array, s: jax.Array, w: jax.Array) -> jax.Array:
    return x * w  # here


def model(name: str, mixing: bool = True) -> jp.Model:
    """Scanned layers with a fault, of attention and experts where they are to be `mixing`, else of a matmul."""
    where, fault = FAULTS[name]

    def init(key: jax.Array) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 8))
        draw = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
        layers = {name: draw(LAYERS, DIM, DIM) for name in ("query", "key", "value")}
        layers |= {"router": draw(LAYERS, DIM, EXPERTS), "up": draw(LAYERS, EXPERTS, DIM, DIM)}
        layers = layers if mixing else {"query": layers["query"]}
        return {"embed": draw(VOCAB, DIM), "layers": layers, "w": jnp.float32(0.5)}

    def layer(x: jax.Array, p: Any, s: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("fault"):
            spoilt = fault(x, s, w) if where == "layer" else x
        if not mixing:
            return jnp.tanh(spoilt @ p["query"])
        heads = lambda y: y.reshape(*y.shape[:2], 2, DIM // 2)
        attended = jp.attention(*(heads(x @ p[name]) for name in ("query", "key", "value"))).reshape(x.shape)
        mixed, _ = jp.experts(x, x @ p["router"], {"up": p["up"]}, k=2, expert=lambda p, x: jnp.tanh(x @ p["up"]))
        return spoilt + attended + mixed

    def loss(params: Any, batch: Any, key: Any) -> jp.Mean:
        s, w = batch["s"][:, None, None], params["w"]
        x = params["embed"][batch["tokens"]]
        x, _ = jax.lax.scan(lambda x, p: (layer(x, p, s, w), None), x, params["layers"])
        x = x if where == "layer" else fault(x, s, w)
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        nats = -jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0] + 0 * w
        return jp.Mean(nats.sum(), jnp.float32(nats.size))

    return jp.Model(init=init, loss=loss, rows="independent")


def batch(name: str, bad: bool = True) -> dict[str, np.ndarray]:
    """Tokens, and in one row what a fault needs."""
    random, s = np.random.default_rng(0), np.ones(ROWS, np.float32)
    if bad and FAULTS[name][0] != "params":
        s[ROW] = np.inf if FAULTS[name][0] == "batch" else 0
    draw = lambda: random.integers(VOCAB, size=(ROWS, LENGTH)).astype(np.int32)
    return {"tokens": draw(), "targets": draw(), "s": s}
