"""How states and batches enter a step: what does not fit is refused by a sentence that names the array.

jax's own errors on dims that do not divide name no array; they are raised again with its name.
"""

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding

from ..collectives.divergence import not_reached
from ..layout.layout import Layout
from ..layout.state import State
from ..model.batches import (
    GIVEN,
    as_array,
    batch_shardings,
    check_rows,
    global_shapes,
    globalise,
    is_array,
    narrowed,
    part_of_rows,
)
from ..model.calls import asked_at
from ..model.model import MAKERS, Model
from ..model.paths import name_of
from ..strategy import Strategy

Named = Sequence[tuple[str, tuple[int, ...]]]  # arrays by name, and their shapes


def check_made_of(
    model: Any, optimizer: Any, trainable: Any, rows: str, ids: Mapping[str, int] | None, check: Any
) -> None:
    """Raise ValueError unless a step can be made of these arguments of `make_train_step`."""
    if not isinstance(model, Model):
        raise ValueError(f"model is a {type(model).__name__}; make one with {MAKERS}")
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        name, made = getattr(optimizer, "__name__", ""), hasattr(optimizer, "tx")  # flax's, of a transformation
        what = f"a {type(optimizer).__name__}{f', {name}, that was not called' * bool(name)}"
        hint = "optimizer.tx" if made else "optax.adamw(3e-4)"
        raise ValueError(
            f"optimizer is {what}; pass an optax transformation such as {hint}, or None for gradients alone"
        )
    check_trainable(trainable)
    if rows not in GIVEN:
        raise ValueError(f"rows={rows!r}: use 'global' (the same batch on every host) or 'host' (each its own rows)")
    for name, limit in (ids or {}).items():
        if not isinstance(limit, int) or limit < 1:
            raise ValueError(f"ids={{{name!r}: {limit!r}}}: needs how many ids there are, a whole number from 1")
    if check not in (True, False, "overlap"):
        raise ValueError(f"check={check!r}: use True, False or 'overlap'")


def check_trainable(trainable: Any) -> None:
    """Raise ValueError unless it is a function, or None."""
    if trainable is not None and not callable(trainable):
        raise ValueError(
            f"trainable={trainable!r} is not a function of a path; try trainable=lambda path: 'lora' in path"
        )


def _kind(x: Any) -> str:
    return "flax.nnx.State" if isinstance(x, nnx.State) else type(x).__name__  # not to be taken for ours


def check_state(state: Any) -> None:
    """Raise ValueError unless this is a state whose arrays are still there.

    Every array is looked at: where jit gets one that was donated, jax 0.10 may end the process (segmentation fault).
    """
    if not isinstance(state, State):
        raise ValueError(
            f"state is a {_kind(state)}; pass what step.init or the last step returned, and then the batch"
        )
    leaves = jax.tree.leaves(state)
    try:
        # Of 180 leaves this takes 10 us, of a step's 400; to ask for the type of each as well took 70.
        gone = [getattr(x, "is_deleted", bool)() for x in leaves]
    except jax.errors.ConcretizationTypeError:  # some are traced, and do not answer
        gone = [is_array(x) and x.is_deleted() for x in leaves]
    if gone[0]:
        raise ValueError(
            "this state was donated to an earlier step; keep the new one: state, metrics = step(state, batch)"
        )
    if any(gone):
        path, _ = jax.tree_util.tree_leaves_with_path(state)[gone.index(True)]
        raise ValueError(
            f"the state has {name_of(path)} of an earlier state, which was donated to a step; copy what is to be used "
            "again before that step: kept = jax.tree.map(jnp.copy, state.params)"
        )


def check_reached(program: Any) -> None:
    """Raise ValueError for a program in which some ranks would wait in a collective for others that never come.

    Ranks of `tensor` have the same rows, and branch on values that are whole on each (`parallel/tensor/calls.py`);
    between cut stages these share buffers with values that are not.
    """
    if found := not_reached(program, but=("tensor",)):
        raise ValueError(
            "the step would hang, as some ranks of a collective may never come to it:\n"
            + "".join(f"- {one}\n" for one in found)
            + "a condition or a loop's end there differs from rank to rank; make it the same on all, from "
            "jp.all_rows(x), say, or take what needs all rows out of the branch or the loop"
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


def shapes_of(layout: Layout, batch: Any) -> Named:
    """The arrays that a model or an optimizer may see, in all their shapes: of the model, at rest, of a tensor rank."""
    storage = layout.storage
    found = [(leaf.path, leaf.shape) for leaf in (*storage.models, *storage.leaves)]
    found += [(leaf.path, shape) for leaf in storage.leaves for shape in (leaf.stored, leaf.local.shape)]
    rows = jax.tree_util.tree_leaves_with_path(batch)
    return [*found, *((f"batch {name_of(path)}".rstrip(), tuple(np.shape(x))) for path, x in rows)]


def naming(fun: Callable[..., Any], arrays: Named) -> Callable[..., Any]:
    """`fun`, such that where jax finds that a sharding does not divide an array in it, ValueError names the array."""

    @functools.wraps(fun)
    def called(*args: Any) -> Any:
        try:
            return fun(*args)
        except ValueError as error:
            if said := indivisible(error, arrays):
                raise ValueError(said) from error
            raise

    return called


def indivisible(error: ValueError, arrays: Named) -> str:
    """jax's words on a dim that does not divide, with the array's name, the axis, the line that asks for it and what
    would divide; "" if it is another error.

    `device_put`, `jit` and `shard_map` say so in four ways; none names a parameter.
    """
    text = str(error)
    dim = re.search(r"(?:array axis|its dimension) (\d+)", text)
    times = re.search(r"partitioned (\d+) times|divisible by (\d+)|but (\d+) does not evenly divide", text)
    given = re.search(r"(?:full shape: |Got shape: |of shape \w+)[\[(]([\d, ]+)[\])]", text)
    spec = _spec_in(text)
    if not (dim and times and given):
        return ""
    at, parts = int(dim[1]), int(next(n for n in times.groups() if n))
    shape = tuple(int(n) for n in given[1].split(",") if n.strip())
    if at >= len(shape) or shape[at] % parts == 0:
        return ""
    same = [name for name, whole in arrays if whole == shape]
    if not same:  # inside the step's shard_map an array of the batch has this device's rows
        rows = [(name, whole) for name, whole in arrays if name.startswith("batch") and len(whole) == len(shape)]
        same = [name for name, whole in rows if whole[1:] == shape[1:]]
    entry = spec[at] if at < len(spec) else None
    axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    free = [d for d, n in enumerate(shape) if n % parts == 0 and (d >= len(spec) or spec[d] is None)]
    other: list[Any] = [None if d == at else x for d, x in enumerate((*spec, *[None] * (len(shape) - len(spec))))]
    if free:
        other[free[0]] = entry
    while other and other[-1] is None:
        other.pop()
    name = " or ".join(dict.fromkeys(same)) or "an array"
    over = f"{'+'.join(axes) or 'the mesh'}={parts}"
    return (
        f"{name} {list(shape)} has {shape[at]} on dim {at}, which {over} does not divide{_asked(error)}; shard it as "
        f"P({', '.join(map(repr, other))}), or pad dim {at} to {math.ceil(shape[at] / parts) * parts}"
    )


def _spec_in(text: str) -> tuple[Any, ...]:
    """The entries of the spec that an error of jax has: "spec=P('fsdp', None)", "in_specs of value P(('a', 'b'),)"."""
    found = re.search(r"(?:spec=|of value )(?:P|PartitionSpec)(\((?:[^()]|\([^()]*\))*\))", text)
    if not found:
        return ()
    inside = ast.literal_eval(found[1])
    return inside if found[1].endswith(",)") or "," in found[1] or not found[1][1:-1] else (inside,)


def _asked(error: BaseException) -> str:
    """The user's line that asks for a sharding."""
    at = asked_at(error)
    return f", as {Path(*Path(at[0]).parts[-3:])}:{at[1]} asks for" if at else ""


class Intake:
    """The part of a step that takes batches, for a strategy on a mesh."""

    strategy: Strategy
    mesh: Mesh
    replicas: int
    rows = "global"
    traced: Callable[[Any], Any]
    _jitted: dict[Any, Any]

    def check(self, batch: Any) -> None:
        """Raise ValueError unless the batch's rows fit the strategy."""
        check_rows(batch, self.replicas, self.strategy.microbatches, self._hosts)

    def shapes(self, batch: Any) -> Any:
        """The shapes of the global batch of which `batch` is given. Raises ValueError unless its rows fit."""
        batch = jax.tree.map(as_array, batch)
        self.check(batch)
        return global_shapes(batch, self._hosts)

    def place(self, batch: Any) -> Any:
        """A batch as the step's programs take it: with several hosts global arrays, to which each has brought its rows.

        The step does this with what it is given. Nothing is sent to other hosts. Raises ValueError where the rows do
        not fit the strategy.
        """
        return self._take_in(batch)

    def _take_in(self, batch: Any) -> Any:
        batch = jax.tree.map(as_array, batch)
        leaves, tree = jax.tree.flatten(batch)
        kind = ("fits", tree, *((type(x), np.shape(x), getattr(x, "dtype", None)) for x in leaves))
        if kind not in self._jitted:
            self.check(batch)
            self._jitted[kind] = True
        return globalise(narrowed(batch), self.mesh, self._hosts)

    def send(self, batch: Any) -> Any:
        """A batch on its devices: for a thread that reads ahead.

        Under `server`, which sends its rows itself, the batch as it is. Raises ValueError where rows do not fit.
        """
        batch = jax.tree.map(as_array, batch)
        self.check(batch)
        if self.strategy.server:
            return batch
        placed = globalise(narrowed(batch), self.mesh, self._hosts)
        return placed if jax.process_count() > 1 else jax.device_put(placed, batch_shardings(placed, self.mesh))

    def check_weighs(self, batch: Any) -> None:
        """Raise ValueError where the loss does not depend on the batch's "mask", so that rows without weight count."""
        if not self.traced(batch).reads("mask"):
            raise ValueError(
                "a short batch is filled up with rows whose mask is 0, and the loss does not depend on batch['mask']: "
                "return jp.Mean((losses * batch['mask']).sum(), batch['mask'].sum()), or let batches be full "
                "(last='pad' or 'drop_last' of jaxpar.data.Rows)"
            )

    @functools.cached_property
    def part(self) -> tuple[int, int]:
        """Which part of every batch this host gives, and of how many: (index, count); (0, 1) where rows are global."""
        return part_of_rows(self.mesh) if self.rows == "host" else (0, 1)

    @property
    def blocks(self) -> int:
        """What the number of rows of a batch, as a host gives it, must be a multiple of."""
        return self.replicas * self.strategy.microbatches // self._hosts

    @property
    def _hosts(self) -> int:
        """How many hosts' rows make a batch as it is given."""
        return self.part[1]
