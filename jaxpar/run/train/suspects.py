"""The search for faults in a batch.

There are two kinds of faults, reported with leaf, row and host: NaN or infinity, and ids that are out of range.

    suspects             both, after a step was not finite, before the run advises another learning rate
    warn_of_lookups      ids that the loss uses as indices and that are out of range, for every new batch
    without_id_shares    an error for ids beyond the limits that the user has given
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...backend.text import few
from ...hosts import consistency
from ...model.contents import OUTSIDE, check_ids, outside, parts, row_of
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
    # At most four, because a batch that is all NaN would have every leaf here.
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
                # `argmin` of booleans is the position of the first False.
                index = tuple(map(int, np.unravel_index(int(np.argmin(is_finite)), part.shape)))
                yield f"batch leaf {name_of(path) or 'batch'} holds {values[index]} at {row_of(index, begin)}{_rank()}"
                break


def out_of_range_leaves(batch: Any, lookups: Mapping[str, Lookup]) -> Iterator[tuple[str, str]]:
    """Yield the path of each leaf with an id out of range on this host, and a text about its first such id."""
    leaves = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(batch)}
    for name, (size, line) in lookups.items():
        # The ids are checked on the host: on the devices an id that is out of range raises no error.
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


def warn_of_lookups(batch: Any, lookups: Mapping[str, Lookup], number: int) -> set[str]:
    """Warn of each leaf of a batch whose ids are out of range, and return the paths of these leaves.

    Under jit such an id raises no error: JAX reads another entry. `number` is the step that trains on the batch;
    `lookups` are as for `suspects`.
    """
    warned_leaves = set[str]()
    for name, text in out_of_range_leaves(batch, lookups):
        warned_leaves.add(name)
        warnings.warn(
            f"step {number}: {text}; use ids within that range. If other ids mark padding, look up "
            f"jnp.where({name} < 0, 0, {name}), and give the padding no weight",
            stacklevel=2,
        )
    return warned_leaves


def without_id_shares(values: dict[str, float], batch: Any, ids: Mapping[str, int], origin: str) -> dict[str, float]:
    """Return the metrics of a batch without the shares of ids that are beyond their limits, which must be 0.

    Args:
      values: the metrics.
      batch: searched for the first bad id, which the error names.
      ids: the limit of the ids in each leaf, by its path.
      origin: where the batch comes from, for the error: "step 3".

    Raises:
      ValueError: if some ids are beyond their limits.
    """
    shares = {name: share for name, share in values.items() if name.startswith(OUTSIDE)}
    for name, share in shares.items():
        if share:
            try:
                check_ids(batch, ids)
            except ValueError as error:
                raise ValueError(f"{origin}: {error}") from error
            # The rows of this host are fine.
            message = f"{origin}: {share:.2g} of the ids in {name.removeprefix(OUTSIDE)} are beyond their limit"
            raise ValueError(f"{message}; the error of another host names one")
    return {name: value for name, value in values.items() if name not in shares}


def _jit_result(value: int, size: int) -> str:
    """Return what an index out of range reads under jit: negative ones count from the end, as in NumPy."""
    return str(value + size) if -size <= value < 0 else "NaN, or the nearest"


def _rank() -> str:
    """Return the rank and host of this process, to follow a row; "" if there is only one process."""
    return f" of rank {jax.process_index()} on {socket.gethostname()}" if jax.process_count() > 1 else ""
