"""What in a batch may have spoilt a step: looked at before a learning rate is blamed."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...backend.text import few
from ...hosts import consistency
from ...model.contents import outside, parts, row_of
from ...model.paths import name_of
from ...program.lookups import Lookup


def suspects(batch: Any, lookups: Mapping[str, Lookup]) -> str:
    """What is wrong with a batch, of all hosts' rows: numbers that are none, and what is looked up where it is not. ""
    where nothing is. With several hosts all must ask, with the batch of the same step.

    Args:
      batch: a pytree of arrays; each host sees its part.
      lookups: what the loss looks up, by the path of its leaf.
    """
    own = [*not_finite(batch), *(text for _, text in beyond(batch, lookups))]
    said = consistency.told("what is wrong with a batch", few(own, 4))
    return "; ".join(dict.fromkeys(text for text in said.values() if text))


def not_finite(batch: Any) -> Iterator[str]:
    """The first NaN or infinity of each leaf that this host has."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            continue
        for begin, part in parts(x):
            # NumPy knows no isfinite of bfloat16 and narrower, which are exact in float32.
            wide = part.astype(np.float32) if part.dtype.kind == "V" else part
            if not (fine := np.isfinite(wide)).all():
                place = tuple(map(int, np.unravel_index(int(np.argmin(fine)), part.shape)))
                yield f"batch leaf {name_of(path) or 'batch'} holds {wide[place]} at {row_of(place, begin)}{_here()}"
                break


def beyond(batch: Any, lookups: Mapping[str, Lookup]) -> Iterator[tuple[str, str]]:
    """The leaves with an element on this host that is looked up beyond what there is, and the first such element."""
    leaves = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(batch)}
    for name, (size, line) in lookups.items():
        for begin, part in parts(leaves[name]):
            if part.size and (wrong := outside(part, size)) is not None:
                value, place = wrong
                yield (
                    name,
                    (
                        f"batch leaf {name} holds {value} at {row_of(place, begin)}{_here()}, and the loss looks it up "
                        f"among 0 to {size - 1} ({line}), where under jit it reads {_read(value, size)}"
                    ),
                )
                break


def _read(value: int, size: int) -> str:
    return str(value + size) if -size <= value < 0 else "NaN, or the nearest"


def _here() -> str:
    return f" of rank {jax.process_index()} on {socket.gethostname()}" if jax.process_count() > 1 else ""
