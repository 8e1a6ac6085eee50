"""Checks of everything that enters a step: arguments, states and batches. Errors name the array that does not fit."""

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
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding

from ..backend.counts import is_count
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

Named = Sequence[tuple[str, tuple[int, ...]]]  # the name and shape of each array


def check_made_of(
    model: Any, optimizer: Any, trainable: Any, rows: str, ids: Mapping[str, int] | None, check: Any
) -> None:
    """Raise ValueError unless these arguments of `make_train_step` have the right types and values."""
    if not isinstance(model, Model):
        raise ValueError(f"model is a {type(model).__name__}; make one with {MAKERS}")
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        # A function has a name, such as `optax.adamw` without its call; an optimizer of Flax has a transformation `tx`.
        name, is_flax = getattr(optimizer, "__name__", ""), hasattr(optimizer, "tx")
        description = f"a {type(optimizer).__name__}{f', {name}, that was not called' * bool(name)}"
        hint = "optimizer.tx" if is_flax else "optax.adamw(3e-4)"
        raise ValueError(
            f"optimizer is {description}; pass an optax transformation such as {hint}, or None for gradients alone"
        )
    check_trainable(trainable)
    if rows not in GIVEN:
        raise ValueError(f"rows={rows!r}: use 'global' (the same batch on every host) or 'host' (each its own rows)")
    for name, limit in (ids or {}).items():
        if not is_count(limit):
            raise ValueError(f"ids={{{name!r}: {limit!r}}}: give the number of ids, a whole number from 1")
    if check not in (True, False, "overlap"):
        raise ValueError(f"check={check!r}: use True, False or 'overlap'")


def check_trainable(trainable: Any) -> None:
    """Raise ValueError unless `trainable` is a function, or None."""
    if trainable is not None and not callable(trainable):
        raise ValueError(
            f"trainable={trainable!r} is not a function of a path; try trainable=lambda path: 'lora' in path"
        )


def _type_name(x: Any) -> str:
    """Return the name of a value's type; `flax.nnx.State` in full, so that nobody takes it for jaxpar's `State`."""
    return "flax.nnx.State" if isinstance(x, nnx.State) else type(x).__name__


def is_traced(*trees: Any) -> bool:
    """Return whether a caller's program, such as a `jit` of the user's, traces any of these arrays."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(trees))


def check_state(state: Any) -> None:
    """Raise ValueError unless this is a state whose arrays still exist.

    Every array is checked: if jit receives one that was donated, jax 0.10 may end the process (segmentation fault).
    """
    if not isinstance(state, State):
        raise ValueError(
            f"state is a {_type_name(state)}; pass what step.init or the last step returned, and then the batch"
        )
    leaves = jax.tree.leaves(state)
    try:
        # This takes 10 us for 180 leaves, of a step's 400; asking for the type of each as well took 70.
        is_deleted = [getattr(x, "is_deleted", bool)() for x in leaves]
    except jax.errors.ConcretizationTypeError:  # for arrays that are traced
        is_deleted = [is_array(x) and x.is_deleted() for x in leaves]
    # The first leaf is the step's number: without it the state as a whole was donated.
    if is_deleted[0]:
        raise ValueError(
            "this state was donated to an earlier step; keep the new one: state, metrics = step(state, batch)"
        )
    if any(is_deleted):
        path, _ = jax.tree_util.tree_leaves_with_path(state)[is_deleted.index(True)]
        raise ValueError(
            f"the state has {name_of(path)} of an earlier state, which was donated to a step; before that step, "
            "copy arrays that you use again: kept = jax.tree.map(jnp.copy, state.params)"
        )


def check_reached(program: Any) -> None:
    """Raise ValueError for a program in which some ranks would wait in a collective for ranks that never reach it."""
    # Ranks of `tensor` have the same rows, and branch on values that are equal on all of them
    # (`parallel/tensor/calls.py`). Between cut stages such values share buffers with others, so that the analysis would
    # take them for different.
    if unreached := not_reached(program, but=("tensor",)):
        raise ValueError(
            "the step would hang, since some ranks may never reach a collective:\n"
            + "".join(f"- {collective}\n" for collective in unreached)
            + "a branch or a loop around it depends on values that differ from rank to rank; compute these from "
            "jp.all_rows(x), so that all ranks have the same, or move what needs all rows out of the branch or the loop"
        )


def misfit(state: Any, expected: Any) -> str:
    """Return what is wrong with a state, as the text of an error; "" if nothing is.

    Args:
      expected: `step.abstract_state()`, with shardings.
    """
    # By path, since trees of other structure cannot be compared leaf by leaf.
    present, needed = (
        {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)} for tree in (state, expected)
    )
    # 1. Arrays that only one of the two has.
    for name in (*needed, *present):
        if (name in present) != (name in needed):
            relation = f"lacks {name}" if name in needed else f"has {name}, and the step has none"
            return (
                f"the state {relation}: it is of another model, optimizer or precision; take its weights alone, "
                "step.init(key, params=other.params(state))"
            )
    # 2. Arrays of another shape, or on other devices.
    for name, x in needed.items():
        array = present[name]
        if tuple(np.shape(array)) != tuple(x.shape):
            return (
                f"the state has {name} of shape {list(np.shape(array))}, the step keeps {list(x.shape)}: it is of "
                "another model or strategy; take its weights alone, step.init(key, params=other.params(state))"
            )
        # jit moves an array that is not committed to its sharding by itself.
        if is_array(array) and array.committed and not array.sharding.is_equivalent_to(x.sharding, x.ndim):
            return (
                f"the state has {name} {list(x.shape)} as {_describe(array.sharding)}, the step keeps it as "
                f"{_describe(x.sharding)}: it is of another strategy; move it, "
                "jax.device_put(state, jax.tree.map(lambda x: x.sharding, step.abstract_state()))"
            )
    return ""


def _describe(sharding: Sharding) -> str:
    """Return a sharding in words: its spec, and the axes that have several devices."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    axes = ",".join(f"{axis}={n}" for axis, n in sharding.mesh.shape.items() if n > 1)
    return f"{sharding.spec} over {axes or 'one device'}".replace("PartitionSpec", "P")


def shapes_of(layout: Layout, batch: Any) -> Named:
    """Return the arrays that a step may see, in all their shapes: the model's own, at rest, on a tensor rank."""
    storage = layout.storage
    arrays = [(leaf.path, leaf.shape) for leaf in (*storage.models, *storage.leaves)]
    # Padded shapes and the parts of tensor ranks appear in errors too.
    arrays += [(leaf.path, shape) for leaf in storage.leaves for shape in (leaf.stored, leaf.local.shape)]
    rows = jax.tree_util.tree_leaves_with_path(batch)
    return [*arrays, *((f"batch {name_of(path)}".rstrip(), tuple(np.shape(x))) for path, x in rows)]


def naming(fun: Callable[..., Any], arrays: Named) -> Callable[..., Any]:
    """Wrap a function that jax traces: if a sharding does not divide an array in it, ValueError names the array.

    Args:
      arrays: the arrays that it may see; the error names those of the shape in jax's error.
    """

    @functools.wraps(fun)
    def wrapped(*args: Any) -> Any:
        try:
            # jax raises while it traces, so that its error passes through here.
            return fun(*args)
        except ValueError as error:
            if text := indivisible(error, arrays):
                raise ValueError(text) from error
            raise

    return wrapped


def indivisible(error: ValueError, arrays: Named) -> str:
    """Return a better text for jax's error about a dim that does not divide; "" for any other error.

    It names the array, the axis, the line that asks for the sharding, and a sharding or a size that would divide.
    `device_put`, `jit` and `shard_map` have four texts for this error, and none of them names a parameter.

    Args:
      error: the error of jax.
      arrays: the arrays that the traced function may see.
    """
    # 1. Read dim, number of parts, shape and spec from jax's text.
    text = str(error)
    dim_match = re.search(r"(?:array axis|its dimension) (\d+)", text)
    parts_match = re.search(r"partitioned (\d+) times|divisible by (\d+)|but (\d+) does not evenly divide", text)
    shape_match = re.search(r"(?:full shape: |Got shape: |of shape \w+)[\[(]([\d, ]+)[\])]", text)
    spec = _spec_in(text)
    if not (dim_match and parts_match and shape_match):
        return ""
    dim, parts = int(dim_match[1]), int(next(n for n in parts_match.groups() if n))
    shape = tuple(int(n) for n in shape_match[1].split(",") if n.strip())
    # The numbers do not fit the shape, so that the text was another error's.
    if dim >= len(shape) or shape[dim] % parts == 0:
        return ""

    # 2. Find the arrays of this shape.
    names = [name for name, full_shape in arrays if full_shape == shape]
    if not names:
        # Inside the step's `shard_map` an array of the batch has this device's rows.
        rows = [(name, x) for name, x in arrays if name.startswith("batch") and len(x) == len(shape)]
        names = [name for name, full_shape in rows if full_shape[1:] == shape[1:]]

    # 3. Propose to shard another dim that divides, and is not sharded yet; else to shard none.
    entry = spec[dim] if dim < len(spec) else None
    axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    free_dims = [d for d, n in enumerate(shape) if n % parts == 0 and (d >= len(spec) or spec[d] is None)]
    padded_spec = (*spec, *[None] * (len(shape) - len(spec)))
    proposal: list[Any] = [None if d == dim else x for d, x in enumerate(padded_spec)]
    if free_dims:
        proposal[free_dims[0]] = entry
    # P() says the same as P(None, None).
    while proposal and proposal[-1] is None:
        proposal.pop()
    name = " or ".join(dict.fromkeys(names)) or "an array"
    axis_size = f"{'+'.join(axes) or 'the mesh'}={parts}"
    return (
        f"{name} {list(shape)} has {shape[dim]} on dim {dim}, which {axis_size} does not divide{_asking_line(error)}; "
        f"shard it as P({', '.join(map(repr, proposal))}), or pad dim {dim} to {math.ceil(shape[dim] / parts) * parts}"
    )


def _spec_in(text: str) -> tuple[Any, ...]:
    """Return the entries of the spec in an error of jax: "spec=P('fsdp', None)", "in_specs of value P(('a', 'b'),)"."""
    match = re.search(r"(?:spec=|of value )(?:P|PartitionSpec)(\((?:[^()]|\([^()]*\))*\))", text)
    if not match:
        return ()
    # The text is Python, as jax prints it.
    entries = ast.literal_eval(match[1])
    # A spec of one entry may be printed without the comma that makes it a tuple.
    return entries if match[1].endswith(",)") or "," in match[1] or not match[1][1:-1] else (entries,)


def _asking_line(error: BaseException) -> str:
    """Return the user's line that asks for a sharding, as a clause of an error; "" if it is unknown."""
    place = asked_at(error)
    return f", as {Path(*Path(place[0]).parts[-3:])}:{place[1]} asks for" if place else ""


class Intake:
    """The part of a step that takes batches.

    Attributes:
      strategy, mesh: the step's.
      replicas: the number of devices, or groups of devices, among which rows are divided.
      rows: whose rows a batch holds with several hosts: "global" or "host".
      traced: returns the traced loss for a batch (`Step.traced`).
    """

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
        """Return the shapes of the global batch; raises ValueError unless the batch's rows fit the strategy."""
        batch = jax.tree.map(as_array, batch)
        self.check(batch)
        return global_shapes(batch, self._hosts)

    def place(self, batch: Any) -> Any:
        """Return a batch as the step's programs take it: with several hosts, as global arrays.

        Each host contributes its rows, and nothing is sent to other hosts. The step calls this itself. Raises
        ValueError if the rows do not fit the strategy.
        """
        return self._take_in(batch)

    def _take_in(self, batch: Any) -> Any:
        """Check a batch, once for each kind, and place it."""
        batch = jax.tree.map(as_array, batch)
        leaves, tree = jax.tree.flatten(batch)
        # A batch of a known kind needs no second check: its tree, types, shapes and dtypes decide.
        kind = ("fits", tree, *((type(x), np.shape(x), getattr(x, "dtype", None)) for x in leaves))
        if kind not in self._jitted:
            self.check(batch)
            self._jitted[kind] = True
        return globalise(narrowed(batch), self.mesh, self._hosts)

    def send(self, batch: Any) -> Any:
        """Put a batch on its devices ahead of its step, for a thread that reads ahead.

        Under `dp`, whose server sends its rows itself, the batch is returned unchanged. Raises ValueError if the rows
        do not fit the strategy.
        """
        batch = jax.tree.map(as_array, batch)
        self.check(batch)
        # A server moves rows itself, as one of its exchanges.
        if self.strategy.server:
            return batch
        placed = globalise(narrowed(batch), self.mesh, self._hosts)
        # With several hosts, global arrays lie on their devices already.
        return placed if jax.process_count() > 1 else jax.device_put(placed, batch_shardings(placed, self.mesh))

    def check_weighs(self, batch: Any) -> None:
        """Raise ValueError if the loss does not depend on the batch's "mask", so that rows of padding would count."""
        if not self.traced(batch).reads("mask"):
            raise ValueError(
                "a short batch is padded with rows whose mask is 0, and the loss does not depend on batch['mask']: "
                "return jp.Mean((losses * batch['mask']).sum(), batch['mask'].sum()), or make all batches full "
                "(last='pad' or 'drop_last' of jaxpar.data.Rows)"
            )

    @functools.cached_property
    def part(self) -> tuple[int, int]:
        """The part of every batch that this host gives, as (index, number of parts); (0, 1) if rows are global."""
        return part_of_rows(self.mesh) if self.rows == "host" else (0, 1)

    @property
    def blocks(self) -> int:
        """The number of blocks of rows in a batch as one host gives it; its number of rows must be a multiple."""
        return self.replicas * self.strategy.microbatches // self._hosts

    @property
    def _hosts(self) -> int:
        """The number of hosts whose rows make up a batch."""
        return self.part[1]
