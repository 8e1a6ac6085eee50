"""What a strategy promises of a step: the bytes of every array of the state, layers one at a time, collectives.

It follows from what the strategy's rule says of itself (`parallel/`: `Promise`), the mesh and the shapes of leaves, not
from the specs that the step was built with: a step that shards nothing does not change what was promised.
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
from ...program.walk import propagate, through
from ...slicing.program import Program
from ..ledger import Collective
from ..step_view import StepView as Step

SCALARS = 1000  # bytes; collectives of less are sums of scalars
LARGE = 1_000_000  # bytes a step; less beside what is promised is no broken promise

# Where a compiled program may differ from the closed form. Each was met, on jax 0.10 or 0.12; on other platforms than
# those named, and beyond what `bounds` says, none is allowed.
ALLOWED = {
    "norms": f"the optimizer adds up scalars: {SCALARS} B at most",
    "small": f"what the optimizer adds is less than {LARGE // 1_000_000} MB",
    "last message": "a loop of one tick is unrolled, and its message, which nobody reads, not sent",
    "one layer": "a loop of one layer is unrolled, and what it would send twice is sent once",
    "widened": "the CPU compiler has collectives of bfloat16 in float32",
    "merged": "the CPU compiler drops what keeps the gathers of one leaf apart, and gathers once for all its uses",
    "equal": "the CPU compiler reduces equal gradients once: of two biases of which the model reads the sum alone",
}


@dataclass(frozen=True)
class Holding:
    """What a device should hold of one array of the state: `bytes`; of what `kind`, and where in the state: `path`."""

    kind: str
    path: str
    bytes: int


def shares(step: Step, state: Any) -> list[Holding]:
    """A share for each array of an abstract state: parameters, their copy, the optimizer's.

    `fsdp` shares out the trees that the rule `holds` in shards; where a copy in low precision is stored, the float32
    masters live with the optimizer. `pipe` shares out the layers, `tensor` the leaves that rules name. What the layout
    reports as too small to be sharded is whole.
    """
    holds, sizes = rule_of(step.strategy).promise.holds, step.mesh.shape
    leaves, storage = step.layout.leaves, step.layout.storage
    seen = [leaf for leaf in (leaves if step.update.as_stacked else storage.models) if leaf.trainable]
    found = []
    parts = {
        "parameters": (state.params, "params" in holds or ("optimizer" in holds and state.copy is not None)),
        "copy of parameters": (state.copy, False),
    }
    for kind, (tree, sharded) in parts.items():
        for leaf, x in zip(leaves, jax.tree.leaves(tree), strict=False):
            found.append(Holding(kind, leaf.path, _elements(leaf, sizes, sharded) * x.dtype.itemsize))
    owned = step.update.owners.states if step.update.owners is not None else {}
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(state.optimizer)):
        name = name_of(path)
        if i in owned:  # of whole matrices: a part for each of the ranks that deal them out
            found.append(Holding("optimizer state", name, math.prod(owned[i].local) * x.dtype.itemsize))
            continue
        # The parameter that an array is like: a momentum's path ends with the parameter's.
        like = [f for f in seen if f"/{name}".endswith(f"/{f.path}") and tuple(x.shape) in (f.shape, f.stored)]
        leaf = max(like, key=lambda f: len(f.path), default=None)
        elements = x.size if leaf is None else _elements(leaf, sizes, "optimizer" in holds)
        found.append(Holding("optimizer state", name, elements * x.dtype.itemsize))
    return found


def _elements(leaf: Leaf, sizes: Mapping[str, int], sharded: bool) -> int:
    """What a device should hold of a leaf."""
    parts = leaf.ranks * leaf.experts * (sizes["pipe"] if leaf.of_a_stage else 1)
    if not sharded:
        return math.prod(leaf.stored if leaf.spread else leaf.shape) // parts
    free = [
        d
        for d in range(len(leaf.shape))
        if d not in (leaf.tensor, leaf.expert) and (leaf.layers is None or d > leaf.stage)
    ]
    small = math.prod(leaf.local.shape) < PAD_FROM or not free
    if leaf.dim is None and leaf.note and small:
        return math.prod(leaf.shape) // parts
    return -(-math.prod(leaf.stored) // (parts * math.prod(sizes[axis] for axis in leaf.shard)))


def not_by_layer(step: Step, program: Program) -> list[Leaf]:
    """Leaves whose layers a loop of the loss takes one by one, and which the program fetches whole all the same.

    Not those that are sharded along their layers, nor beside a pipeline, whose stages take one stack alone.
    """
    if step.schedule is not None:
        return []
    index = {v: i for i, v in enumerate(program.leaves)}
    casts = {e.outvars[0]: e.invars[0] for e in program.eqns if e.primitive.name in ("convert_element_type", "copy")}
    scanned = set()
    for eqn in program.eqns:
        for v in jx.scan_parts(eqn).xs if eqn.primitive.name == "scan" else ():
            while not jx.is_literal(v) and v in casts:
                v = casts[v]
            if not jx.is_literal(v) and v in index:
                scanned.add(index[v])
    units = step.layout.storage.units
    return [units[i] for i in sorted(scanned) if units[i].dim != 0 and not any(program.uses[i])]


def gathered_weights(jaxpr: Any, leaves: int, axis: str = "tensor") -> dict[str, int]:
    """What is gathered over an axis that depends on parameters alone: where, and bytes of one execution.

    `jaxpr` is a step's; the first inputs of its first `shard_map` are the `leaves`, on CPU devices behind the token.
    Ranks of `tensor` compute with their parts of the weights (Shoeybi et al. 2019, section 3): none should be here.
    """
    mapped = next((eqn for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns if eqn.primitive.name == "shard_map"), None)
    if mapped is None:
        return {}
    body, _ = jx.opened(mapped.params["jaxpr"])
    gathers: dict[tuple[int, ...], tuple[str, int]] = {}  # by its equation and those around it

    def run(program: Any, of_data: Sequence[bool], around: tuple[int, ...] = ()) -> list[bool]:
        def equation(eqn: Any, inputs: list[bool]) -> list[bool]:
            here, moves = (*around, id(eqn)), any(inputs) and not is_token(eqn)
            if PRIMITIVES.get(eqn.primitive.name) == "all-gather" and axis in axes_of(eqn):
                size = sum(map(jx.nbytes, eqn.outvars))
                gathers[here] = jx.where(eqn), 0 if any(inputs) else size  # in a loop the last time it was looked at
            outs = propagate(eqn, inputs, lambda inner, ins, _: run(inner, ins, here), operator.or_)
            return [moves] * len(eqn.outvars) if outs is None else outs

        return through(program, of_data, equation, False)

    data = needed(mapped.params["mesh"]) + leaves
    run(body, [i >= data for i in range(len(body.invars))])
    found: dict[str, int] = {}
    for where, size in gathers.values():
        if size:
            found[where] = max(size, found.get(where, 0))
    return found


@dataclass(frozen=True)
class Bounds:
    """What a compiled program may send of one kind over some axes, in bytes; `names` are those of `ALLOWED`."""

    promised: int
    least: float
    most: float
    names: tuple[str, ...]


def bounds(step: Step, kind: str, closed: Sequence[Collective], one_layer: bool = False) -> Bounds:
    """Those of one kind and axes, from what the closed form has of them: 1% about it, and what `ALLOWED` says.
    `one_layer`: whether the program has a loop of one layer, which sends what it would send twice at least once.
    """
    strategy, schedule = step.strategy, step.schedule
    cpu = step.mesh.devices.flat[0].platform == "cpu"
    promised, names, least, extra = 0, [], 0.99, 0
    for one in closed:
        wide = cpu and one.dtype == "bfloat16"
        promised += one.bytes * (2 if wide else 1)
        names += ["widened"] * wide
    if one_layer and not cpu:
        least, names = 0.49, [*names, "one layer"]
    if kind == "all-reduce":
        extra, names = SCALARS, [*names, "norms"]
    ticks = 1 if schedule is None else schedule.ticks if schedule.branches else schedule.messages("F")
    if kind == "collective-permute" and schedule is not None:
        least, names = 0.99 - 1 / ticks, [*names, "last message"]
    if cpu and kind == "all-gather" and "params" in rule_of(strategy).promise.holds and step.layout.shards > 1:
        # Once, in place of twice in every microbatch or tick.
        least, names = 0.49 / (strategy.turns if schedule is None else ticks), [*names, "merged"]
    if cpu and kind in ("all-reduce", "reduce-scatter"):
        least, names = 0.98, [*names, "equal"]
    return Bounds(promised, least * promised, 1.01 * promised + extra, tuple(dict.fromkeys(names)))
