"""A failing program as a file that anyone can run."""

from __future__ import annotations

import inspect

from .programs import Program, draw_batch, draw_params

_HEAD = """\
# {title}
import os

os.environ |= {{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}}

import warnings
import zlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxpar as jp


{source}

{draws}

params = draw_params({shapes!r}, {seed})
batch = draw_batch({leaves!r}, {sizes!r}, {seed})
model = jp.Model(lambda key: jax.tree.map(jnp.asarray, params), lambda p, b, key: loss(p, b), rules={rules!r})


def value(p, b):
    found = loss(p, b)
    found = found[0] if isinstance(found, tuple) else found
    return found.total / found.count if isinstance(found, jp.Mean) else found


expected, gradients = jax.jit(jax.value_and_grad(value))(params, batch)
step = jp.make_train_step(model, optax.sgd(0.1), {strategy!r}, mesh=jax.devices()[:{devices}])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found, ours = step.value_and_grad(step.init(jax.random.key(0), params=params), batch)
print(*[str(w.message)[:300] for w in caught], sep="\\n")
print(f"loss {{float(found):.7f}}, one device {{float(expected):.7f}}")
for name, theirs in gradients.items():
    error = np.abs(np.asarray(ours[name]) - np.asarray(theirs)).max()
    print(f"{{name}}: off by {{error:.3g}}, largest element {{np.abs(np.asarray(theirs)).max():.3g}}")
"""


def runnable(program: Program, title: str, strategy: str, devices: int) -> str:
    """The text of a program that shows loss and gradients under a strategy beside those of one device."""
    s = program.sizes
    return _HEAD.format(
        title=title,
        source=program.source,
        draws="\n\n".join(inspect.getsource(f) for f in (draw_params, draw_batch)),
        shapes=program.shapes,
        leaves=program.leaves,
        sizes=(s.rows, s.length, s.dim, s.words),
        seed=program.seed,
        rules=program.rules(),
        strategy=strategy,
        devices=devices,
    )
