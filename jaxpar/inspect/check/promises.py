"""The promises of a strategy about a step: bytes of every array of the state, layers fetched one by one, collectives.

The promises follow from the strategy's rule (`parallel/`: `Promise`), the mesh and the shapes of leaves. They do not
follow from the specs that the step was built with, so a step that wrongly shards nothing breaks them.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...collectives.order import is_token, needed
from ...layout.leaves import PAD_FROM, Leaf
from ...model.paths import name_of
from ...parallel.data import rule_of
from ...program import jaxpr as jx
from ...program.collectives import PRIMITIVES, axes_of
from ...program.environment import through
from ...program.walk import propagate
from ...slicing.program import Program
from ..ledger import Collective
from ..step_view import StepView as Step

SCALARS = 1000  # bytes; smaller collectives are sums of scalars
LARGE = 1_000_000  # bytes per step; smaller unpromised collectives break no promise

# How a compiled program may differ from the closed form. Each difference was observed, on jax 0.10 or 0.12. None is
# allowed on a platform that is not named, or beyond what `bounds` says.
ALLOWED = {
    "norms": f"the optimizer adds up scalars: {SCALARS} B at most",
    "small": f"what the optimizer adds is less than {LARGE // 1_000_000} MB",
    "last message": "a loop of one tick is unrolled, and its message, which nobody reads, is not sent",
    "one layer": "a loop of one layer is unrolled, and what it would send twice is sent once",
    "widened": "the CPU compiler runs collectives of bfloat16 in float32",
    "merged": "the CPU compiler drops what keeps the gathers of one leaf apart, and gathers once for all its uses",
    "equal": "the CPU compiler reduces equal gradients once: those of two biases whose sum alone the model reads",
}


@dataclass(frozen=True)
class Holding:
    """The bytes that a device should store of one array of the state, with the array's kind and path."""

    kind: str
    path: str
    bytes: int


def expected_holdings(step: Step, state: Any) -> list[Holding]:
    """Return what a device should store of each array of an abstract state, in the order of its leaves.

    The rule's promise tells which trees `fsdp` shards (`Promise.holds`). Where a copy in low precision is stored, the
    float32 masters belong to the optimizer. `pipe` splits the layers, `tensor` the leaves that its rules name. A leaf
    that the layout reports as too small to be sharded is stored whole.
    """
    holds, sizes = rule_of(step.strategy).promise.holds, step.mesh.shape
    leaves, storage = step.layout.leaves, step.layout.storage
    optimizer_leaves = [leaf for leaf in (leaves if step.update.as_stacked else storage.models) if leaf.trainable]
    holdings = []
    trees = {
        "parameters": (state.params, "params" in holds or ("optimizer" in holds and state.copy is not None)),
        "copy of parameters": (state.copy, False),
    }
    for kind, (tree, is_sharded) in trees.items():
        # A tree that is absent, such as the copy, has no leaves.
        for leaf, array in zip(leaves, jax.tree.leaves(tree), strict=False):
            holdings.append(Holding(kind, leaf.path, _elements(leaf, sizes, is_sharded) * array.dtype.itemsize))
    owned_states = step.update.owners.states if step.update.owners is not None else {}
    for i, (path, array) in enumerate(jax.tree_util.tree_leaves_with_path(state.optimizer)):
        name = name_of(path)
        if i in owned_states:  # whole matrices, distributed over the ranks
            holdings.append(Holding("optimizer state", name, math.prod(owned_states[i].local) * array.dtype.itemsize))
            continue
        # The path of a momentum ends with its parameter's path. If several paths match, the longest is the parameter's.
        matching_leaves = [
            leaf
            for leaf in optimizer_leaves
            # A leaf's path may be a part of a longer one: compare whole components at the end.
            if f"/{name}".endswith(f"/{leaf.path}") and tuple(array.shape) in (leaf.shape, leaf.stored)
        ]
        leaf = max(matching_leaves, key=lambda leaf: len(leaf.path), default=None)
        elements = array.size if leaf is None else _elements(leaf, sizes, "optimizer" in holds)
        holdings.append(Holding("optimizer state", name, elements * array.dtype.itemsize))
    return holdings


def _elements(leaf: Leaf, sizes: Mapping[str, int], is_sharded: bool) -> int:
    """Return the elements of a leaf that a device should store."""
    num_parts = leaf.ranks * leaf.experts * (sizes["pipe"] if leaf.of_a_stage else 1)
    if not is_sharded:
        # Every device stores its part of the leaf, or all of it if no axis splits it.
        return math.prod(leaf.stored if leaf.spread else leaf.shape) // num_parts
    # Dims that `fsdp` may shard: no other axis splits them, and they are not the stack of layers.
    shardable_dims = [
        dim
        for dim in range(len(leaf.shape))
        if dim not in (leaf.tensor, leaf.expert) and (leaf.layers is None or dim > leaf.stage)
    ]
    is_small = math.prod(leaf.local.shape) < PAD_FROM or not shardable_dims
    if leaf.dim is None and leaf.note and is_small:
        return math.prod(leaf.shape) // num_parts
    # Sharding pads a dim to a multiple of the number of shards: round up.
    return -(-math.prod(leaf.stored) // (num_parts * math.prod(sizes[axis] for axis in leaf.shard)))


def not_by_layer(step: Step, program: Program) -> list[Leaf]:
    """Return leaves that a loop of the loss takes layer by layer, but that the program fetches whole.

    Leaves that are sharded along their layers are left out. A step with a pipeline returns none: its stages take only
    one stack.
    """
    if step.schedule is not None:
        return []
    leaf_index = {var: i for i, var in enumerate(program.leaves)}
    casts = {
        eqn.outvars[0]: eqn.invars[0] for eqn in program.eqns if eqn.primitive.name in ("convert_element_type", "copy")
    }
    scanned_leaves = set()
    for eqn in program.eqns:
        for var in jx.scan_parts(eqn).xs if eqn.primitive.name == "scan" else ():
            # A cast or a copy in front of the loop does not change which leaf is scanned.
            while not jx.is_literal(var) and var in casts:
                var = casts[var]
            if not jx.is_literal(var) and var in leaf_index:
                scanned_leaves.add(leaf_index[var])
    units = step.layout.storage.units
    return [units[i] for i in sorted(scanned_leaves) if units[i].dim != 0 and not any(program.uses[i])]


def gathered_weights(jaxpr: Any, leaves: int) -> dict[str, int]:
    """Return the bytes of all-gathers over `tensor` whose values depend on parameters alone, by source line.

    Ranks of `tensor` compute with their parts of the weights (Shoeybi et al. 2019, section 3), so there should be none.

    Args:
      leaves: the number of leaves. They are the first inputs of the first `shard_map`, after the token on CPU devices.

    Returns:
      Source line -> bytes of the largest gather on that line, of one execution.
    """
    # A closed jaxpr has its equations one level deeper.
    shard_map_eqn = next(
        (eqn for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns if eqn.primitive.name == "shard_map"), None
    )
    if shard_map_eqn is None:
        return {}
    body, _ = jx.opened(shard_map_eqn.params["jaxpr"])
    gathers: dict[tuple[int, ...], tuple[str, int]] = {}  # by the ids of its equation and those around it

    def visit_program(program: Any, depends_on_data: Sequence[bool], outer_eqns: tuple[int, ...] = ()) -> list[bool]:
        def visit_eqn(eqn: Any, input_dependencies: list[bool]) -> list[bool]:
            eqn_path, result_depends_on_data = (*outer_eqns, id(eqn)), any(input_dependencies) and not is_token(eqn)
            if PRIMITIVES.get(eqn.primitive.name) == "all-gather" and "tensor" in axes_of(eqn):
                num_bytes = sum(map(jx.nbytes, eqn.outvars))
                # A loop is visited until its carries settle. The last visit overwrites the earlier ones and is right.
                gathers[eqn_path] = jx.where(eqn), 0 if any(input_dependencies) else num_bytes
            output_dependencies = propagate(
                eqn,
                input_dependencies,
                lambda inner, inner_inputs, _: visit_program(inner, inner_inputs, eqn_path),
                operator.or_,
            )
            return [result_depends_on_data] * len(eqn.outvars) if output_dependencies is None else output_dependencies

        return through(program, depends_on_data, visit_eqn, False)

    # Inputs behind the leaves depend on data. A CPU mesh has a token in front, which orders its collectives.
    first_data_index = needed(shard_map_eqn.params["mesh"]) + leaves
    visit_program(body, [i >= first_data_index for i in range(len(body.invars))])
    bytes_by_line: dict[str, int] = {}
    for line, num_bytes in gathers.values():
        if num_bytes:
            bytes_by_line[line] = max(num_bytes, bytes_by_line.get(line, 0))
    return bytes_by_line


@dataclass(frozen=True)
class Bounds:
    """The bytes that a compiled program may send of one kind over some axes.

    Attributes:
      promised: bytes of the closed form.
      lowest, highest: the smallest and largest bytes that keep the promise.
      names: the keys of `ALLOWED` that these bounds allow for.
    """

    promised: int
    lowest: float
    highest: float
    names: tuple[str, ...]


def bounds(step: Step, kind: str, closed: Sequence[Collective], one_layer: bool = False) -> Bounds:
    """Return the allowed bytes for one kind and axes: the closed form's within 1%, widened by the cases of `ALLOWED`.

    Args:
      closed: the closed form's collectives of this kind and these axes.
      one_layer: whether the program has a loop of one layer. Compilers unroll it and merge what it would send twice.
    """
    strategy, schedule = step.strategy, step.schedule
    is_cpu = step.mesh.devices.flat[0].platform == "cpu"
    promised, names, lowest_share, extra_bytes = 0, [], 0.99, 0
    for collective in closed:
        # float32 has twice the bytes of bfloat16.
        is_widened = is_cpu and collective.dtype == "bfloat16"
        promised += collective.bytes * (2 if is_widened else 1)
        names += ["widened"] * is_widened
    if one_layer and not is_cpu:
        lowest_share, names = 0.49, [*names, "one layer"]
    if kind == "all-reduce":
        extra_bytes, names = SCALARS, [*names, "norms"]
    # Ranks send activations in every tick; without branches, only in the ticks that have forwards.
    ticks = 1 if schedule is None else schedule.ticks if schedule.branches else schedule.messages("F")
    if kind == "collective-permute" and schedule is not None:
        lowest_share, names = 0.99 - 1 / ticks, [*names, "last message"]
    if is_cpu and kind == "all-gather" and "params" in rule_of(strategy).promise.holds and step.layout.shards > 1:
        # One gather for a whole step, instead of two in every microbatch or tick.
        lowest_share, names = 0.49 / (strategy.turns if schedule is None else ticks), [*names, "merged"]
    if is_cpu and kind in ("all-reduce", "reduce-scatter"):
        lowest_share, names = 0.98, [*names, "equal"]
    return Bounds(promised, lowest_share * promised, 1.01 * promised + extra_bytes, tuple(dict.fromkeys(names)))
