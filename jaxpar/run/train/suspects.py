"""The search for what in a batch may have made a step NaN, before a run advises another learning rate.

There are two kinds of suspects, each reported with its leaf, row and host: NaN or infinity in the batch, and ids that
the loss uses as indices and that are out of range.
"""

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
    """Return the faults in the rows of a batch, over all hosts, as one text; "" if there are none.

    With several hosts all must call it, for the batch of the same step: they exchange their findings.

    Args:
      batch: a pytree of arrays; each host checks the rows that it has.
      lookups: the arrays in which the loss looks up ids, by the path of the batch leaf that holds the ids.
    """
    local_findings = [*nonfinite_leaves(batch), *(text for _, text in out_of_range_leaves(batch, lookups))]
    findings_by_host = consistency.told("what is wrong with a batch", few(local_findings, 4))
    return "; ".join(dict.fromkeys(text for text in findings_by_host.values() if text))


def nonfinite_leaves(batch: Any) -> Iterator[str]:
    """Yield, for each leaf with a NaN or infinity on this host, where its first one is."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            continue
        for begin, part in parts(x):
            # NumPy has no `isfinite` for bfloat16 and narrower types; float32 holds their values exactly.
            values = part.astype(np.float32) if part.dtype.kind == "V" else part
            if not (is_finite := np.isfinite(values)).all():
                index = tuple(map(int, np.unravel_index(int(np.argmin(is_finite)), part.shape)))
                yield f"batch leaf {name_of(path) or 'batch'} holds {values[index]} at {row_of(index, begin)}{_rank()}"
                break


def out_of_range_leaves(batch: Any, lookups: Mapping[str, Lookup]) -> Iterator[tuple[str, str]]:
    """Yield the path of each leaf with an id out of range on this host, and a text about its first such id."""
    leaves = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(batch)}
    for name, (size, line) in lookups.items():
        for begin, part in parts(leaves[name]):
            if part.size and (first_outside := outside(part, size)) is not None:
                value, index = first_outside
                yield (
                    name,
                    (
                        f"batch leaf {name} holds {value} at {row_of(index, begin)}{_rank()}, and the loss looks it up "
                        f"among 0 to {size - 1} ({line}), where under jit it reads {_jit_result(value, size)}"
                    ),
                )
                break


def _jit_result(value: int, size: int) -> str:
    """Return what an index out of range reads under jit: negative ones count from the end, as in NumPy."""
    return str(value + size) if -size <= value < 0 else "NaN, or the nearest"


def _rank() -> str:
    """Return the rank and host of this process, to follow a row; "" if there is only one process."""
    return f" of rank {jax.process_index()} on {socket.gethostname()}" if jax.process_count() > 1 else ""
