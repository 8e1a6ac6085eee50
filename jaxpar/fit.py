"""Whether a state is one, and fits a step; if not the first array that does not, in words that name it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from .batches import is_array
from .leaves import name_of
from .state import State


def check_state(state: Any) -> None:
    """Raise ValueError unless this is a state whose arrays are still there."""
    if not isinstance(state, State):
        raise ValueError(
            f"state is a {type(state).__name__}; pass what step.init or the last step returned, and then the batch"
        )
    if isinstance(state.step, jax.Array) and not isinstance(state.step, Tracer) and state.step.is_deleted():
        raise ValueError(
            "this state was donated to an earlier step; keep the new one: state, metrics = step(state, batch)"
        )


def misfit(state: Any, wanted: Any) -> str:
    """What is wrong with a state, "" if nothing is; `wanted` is `step.abstract_state()`, with shardings."""
    given, needed = (
        {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)} for tree in (state, wanted)
    )
    for name in (*needed, *given):
        if (name in given) != (name in needed):
            which = "lacks" if name in needed else "has, and the step has not,"
            return (
                f"the state {which} {name}: it is of another model, optimizer or precision; take its weights alone, "
                "step.init(key, params=other.params(state))"
            )
    for name, x in needed.items():
        have = given[name]
        if tuple(np.shape(have)) != tuple(x.shape):
            return (
                f"the state has {name} of shape {list(np.shape(have))}, the step keeps {list(x.shape)}: it is of "
                "another model or strategy; take its weights alone, step.init(key, params=other.params(state))"
            )
        if is_array(have) and have.committed and not have.sharding.is_equivalent_to(x.sharding, x.ndim):
            return (
                f"the state has {name} {list(x.shape)} as {_described(have.sharding)}, the step keeps it as "
                f"{_described(x.sharding)}: it is of another strategy; move it, "
                "jax.device_put(state, jax.tree.map(lambda x: x.sharding, step.abstract_state()))"
            )
    return ""


def _described(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    axes = ",".join(f"{axis}={n}" for axis, n in sharding.mesh.shape.items() if n > 1)
    return f"{sharding.spec} over {axes or 'one device'}".replace("PartitionSpec", "P")
