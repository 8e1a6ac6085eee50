"""Find the layer stacks of a traced loss, and cut the loss into pieces (`pieces.py`).

The loss is computed for the rows of one microbatch on one replica. Its layer stacks are the `scan`s whose scanned
inputs are parameters. Between two stacks lies a segment.

A value that depends on parameters alone is computed where it is used, not where the model wrote it. So no whole weight
is kept from one piece to another. Such values are called *floating*.

`slice_program` cuts at the stacks. `cut_program` cuts into groups of equations that its caller chooses: the stages of a
pipeline over a flat program.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from ..program import jaxpr as jx
from ..program import primitives
from ..program.hoist import closure, split
from .pieces import Segment, Stack
from .program import Program
from .slices import Chain, Slice, find_reads
from .units import Unit


@dataclass(frozen=True)
class Slicing:
    """The slicer's options: a description of the parameters, which are the first inputs, and what to save.

    Attributes:
      params: shapes of the whole parameter leaves, abstract.
      sharded: for each leaf, the dim that is sharded at rest, along which no stack can slice it; None for no dim.
      staged: for each leaf, whether the stages of a pipeline divide its layers; empty without a pipeline. The stack
        that reads most elements of these leaves is cut into stages. It slices no other leaves, and no other stack
        slices these.
      axes: mesh axes that the program may name, name -> size.
      remat: "none" (the model's own), "layer", "twice", "dots" or a `jax.checkpoint` policy, for each layer of a stack;
        or "auto": `choices` decide.
      choices: for each stack, what becomes of the values that its layers save (`Residuals.kept`).
      default_choice: the same for all stacks, if `choices` is empty.
    """

    params: Sequence[Any]
    sharded: Sequence[int | None]
    staged: Sequence[bool] = ()
    axes: Mapping[str, int] = field(default_factory=dict)
    remat: Any = "none"
    choices: tuple[str, ...] = ()
    default_choice: str = "s"

    @property
    def policy(self) -> Any:
        """The `jax.checkpoint` policy of `remat`, as in `Unit`."""
        return self.remat if callable(self.remat) else _POLICIES[self.remat]


@dataclass(frozen=True)
class _Variables:
    """The roles of a program's variables.

    Attributes:
      leaves: the number of each parameter leaf.
      active: the variables that have a derivative by a leaf.
      floating: the equations that depend on leaves alone, by the variables that they define.
      constants: the variables of arrays that the program closed over.
    """

    leaves: dict[Any, int]
    active: set[Any]
    floating: dict[Any, Any]
    constants: set[Any]


Reads = dict[int, tuple[Slice, Chain]]  # what a scan reads of leaves, by the position among its scanned inputs


def slice_program(flat: jx.Flat, slicing: Slicing) -> Program:
    """Cut a program into segments and layer stacks."""
    # 1. Sort the variables, and find what each scan reads.
    eqns = jx.live(flat.eqns, flat.outvars)
    leaves = flat.invars[: len(slicing.params)]
    index = {v: i for i, v in enumerate(leaves)}
    # Floating equations are in no group: each piece that reads their results gets a copy of them.
    variables = _Variables(index, jx.active(eqns, leaves), _floating(eqns, leaves), set(flat.constvars))
    ordered = [e for e in eqns if not any(v in variables.floating for v in e.outvars)]
    reads_by_scan, main_scan = _find_stacks([e for e in ordered if e.primitive.name == "scan"], variables, slicing)

    # 2. Group the equations: segments have even numbers, stacks odd ones.
    groups: list[list[Any]] = [[]]
    for eqn in ordered:
        if reads_by_scan.get(id(eqn)):
            groups += [[eqn], []]
        else:
            groups[-1].append(eqn)

    # 3. Build the pieces from the last to the first, since a piece returns what later pieces read.
    pieces: list[Segment | Stack] = []
    main: Stack | None = None
    needed = dict.fromkeys(v for v in flat.outvars if not jx.is_literal(v))
    for number in reversed(range(len(groups))):
        piece: Segment | Stack | None
        if number % 2:
            eqn = groups[number][0]
            piece = _stack(eqn, reads_by_scan[id(eqn)], variables, slicing, number // 2)
            main = piece if eqn is main_scan else main
        else:
            defined = {v for e in groups[number] for v in e.outvars}
            # A floating value that a stack reads whole is computed by the segment before that stack.
            outputs = [v for v in needed if v in defined or v in index or v in variables.floating]
            is_epilogue = number > 0 and number == len(groups) - 1
            piece = _segment(groups[number], outputs, variables, is_epilogue)
        if piece is not None:
            needed = {v: None for v in needed if v not in set(piece.outputs)}
            needed.update((v, None) for v in piece.inputs if not jx.is_literal(v))
            pieces.insert(0, piece)
    return _program(flat, eqns, leaves, pieces, main=main)


def _program(
    flat: jx.Flat, eqns: Sequence[Any], leaves: Sequence[Any], pieces: Sequence[Segment | Stack], **options: Any
) -> Program:
    """Assemble the program of some pieces; `options` are further fields of `Program`."""
    uses = tuple(tuple(isinstance(p, Stack) for p in pieces if i in p.unit.leaf_indices) for i in range(len(leaves)))
    inputs = (*flat.constvars, *flat.invars[len(leaves) :])
    return Program(tuple(pieces), tuple(eqns), flat.consts, tuple(leaves), inputs, tuple(flat.outvars), uses, **options)


# Divides equations into groups, given the numbers of the leaves that each equation reads.
Groups = Callable[[Sequence[Any], Sequence[frozenset[int]]], list[list[Any]]]


def cut_program(flat: jx.Flat, slicing: Slicing, groups: Groups) -> Program:
    """Cut a program into one segment for each group of its equations.

    A value that follows from parameters alone, or cheaply from the program's other inputs alone, is computed in each
    segment that reads it. A segment whose results nobody reads has no outputs.

    Args:
      slicing: its parameters; `slicing.remat` applies to each segment as a whole.
      groups: `groups(equations, leaves that each reads)` returns the equations in groups, in order. It gets all
        equations except those of values that each segment computes itself.
    """
    # 1. Sort the variables. The model's own rematerialisation is removed where each segment has another one.
    flat = flat if slicing.remat == "none" else _without_remats(flat)
    eqns = jx.live(flat.eqns, flat.outvars)
    leaves = flat.invars[: len(slicing.params)]
    index = {v: i for i, v in enumerate(leaves)}
    inputs = [*flat.constvars, *flat.invars[len(leaves) :]]
    is_cheap = lambda eqn: eqn.primitive.name not in _EXPENSIVE
    floating = _floating(eqns, inputs, is_cheap) | _floating(eqns, leaves)
    variables = _Variables(index, jx.active(eqns, leaves), floating, set(flat.constvars))

    # 2. Find the leaves that each equation reads, directly or through floating values, and group the equations.
    leaves_of: dict[Any, frozenset[int]] = {v: frozenset([i]) for v, i in index.items()}
    ordered: list[tuple[Any, frozenset[int]]] = []
    for eqn in _replicate_early(eqns):
        leaves_read = frozenset[int]().union(*(leaves_of.get(v, ()) for v in eqn.invars if not jx.is_literal(v)))
        if any(v in floating for v in eqn.outvars):
            leaves_of.update((v, leaves_read) for v in eqn.outvars)
        else:
            ordered.append((eqn, leaves_read))
    # The caller chooses the stages by the equations, and by the parameters that they read.
    eqn_groups = groups([eqn for eqn, _ in ordered], [leaves_read for _, leaves_read in ordered])

    # 3. Build the segments from the last to the first.
    pieces: list[Segment | Stack] = []
    needed = dict.fromkeys(v for v in flat.outvars if not jx.is_literal(v))
    for number in reversed(range(len(eqn_groups))):
        defined = {v for e in eqn_groups[number] for v in e.outvars}
        is_last = number == len(eqn_groups) - 1
        # An output of the program that is a parameter, or follows from parameters alone, belongs to the last stage.
        outputs = [v for v in needed if v in defined or (is_last and (v in index or v in floating))]
        piece = _segment(eqn_groups[number], outputs, variables, False, slicing)
        assert piece is not None
        needed = {v: None for v in needed if v not in set(piece.outputs)}
        needed.update((v, None) for v in piece.inputs)
        pieces.insert(0, piece)
    return _program(flat, eqns, leaves, pieces, groups=tuple(map(tuple, eqn_groups)))


def _replicate_early(eqns: Sequence[Any]) -> list[Any]:
    """Move each equation that replicates a result over tensor ranks directly behind the equation that computed it.

    At the end of the program, the last stage of a pipeline would update the statistics of another stage's BatchNorm.
    """
    read = {v for eqn in eqns for v in eqn.invars if not jx.is_literal(v)}
    defined_by = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}

    def place(i: int) -> float:
        eqn = eqns[i]
        is_result = eqn.primitive.name == "tensor_all_gather_replicated" and not read.intersection(eqn.outvars)
        return defined_by.get(eqn.invars[0], -1) + 0.5 if is_result else i

    return [eqns[i] for i in sorted(range(len(eqns)), key=place)]


def _find_stacks(scans: Sequence[Any], variables: _Variables, slicing: Slicing) -> tuple[dict[int, Reads], Any]:
    """Return what each scan, by the id of its equation, reads of leaves; and the scan that a pipeline cuts."""
    staged = slicing.staged or [False] * len(slicing.params)
    reads_by_scan = {id(e): find_reads(e, variables.floating, variables.leaves) for e in scans}

    # 1. A leaf is sliced along one dim by all stacks: the first that is possible.
    slice_dims: dict[int, int] = {}
    for layer_slice, _ in (read for e in scans for read in reads_by_scan[id(e)].values()):
        leaf, dim = layer_slice.leaf, layer_slice.dim
        # Along a sharded dim, a layer would lie on one device, and not in parts on all. Stages have layers on dim 0.
        if dim != slicing.sharded[leaf] and (dim == 0 or not staged[leaf]):
            slice_dims.setdefault(leaf, dim)
    reads_by_scan = {
        scan: {p: read for p, read in reads.items() if slice_dims.get(read[0].leaf) == read[0].dim}
        for scan, reads in reads_by_scan.items()
    }
    if not any(staged):
        return reads_by_scan, None

    # 2. The pipeline cuts the scan that reads most of the staged leaves.
    elements = {}
    for e in scans:
        slices = {layer_slice for layer_slice, _ in reads_by_scan[id(e)].values()}
        elements[id(e)] = _staged_elements(slices, e.params["length"], slicing.params, staged)
    main = max(scans, key=lambda e: elements[id(e)], default=None) if any(elements.values()) else None

    # 3. The stages own layers of one stack, which slices no other leaves.
    reads_by_scan = {
        id(e): {p: read for p, read in reads_by_scan[id(e)].items() if staged[read[0].leaf] == (e is main)}
        for e in scans
    }
    return reads_by_scan, main


def _staged_elements(slices: set[Slice], length: int, params: Sequence[Any], staged: Sequence[bool]) -> int:
    """Return how many elements a stack reads of the `staged` leaves."""
    return sum(
        math.prod(params[s.leaf].shape) // params[s.leaf].shape[s.dim] * length for s in slices if staged[s.leaf]
    )


# Primitives that run once: their results are passed to later segments, and not computed again in each.
_EXPENSIVE = (*primitives.PRODUCTS, *primitives.having("nested"), "sort", "pure_callback")


def _floating(eqns: Sequence[Any], inputs: Sequence[Any], is_allowed: Callable[[Any], bool] = lambda eqn: True) -> Any:
    """Return the allowed equations that depend on some inputs (and literals) alone, by the variables they define."""
    variables = set(inputs)
    floating = {}
    for eqn in eqns:
        atoms = [v for v in eqn.invars if not jx.is_literal(v)]
        if all(v in variables for v in atoms) and not eqn.effects and is_allowed(eqn):
            variables.update(eqn.outvars)
            floating.update((v, eqn) for v in eqn.outvars)
    return floating


def _segment(
    eqns: list[Any], outputs: list[Any], variables: _Variables, keep: bool, stage: Slicing | None = None
) -> Segment | None:
    """Return the segment of some equations; None if nobody reads a result of it.

    Args:
      eqns: its equations, without floating ones.
      outputs: its variables that later pieces read.
      keep: whether the backward reuses the fetched parameters, as in `Segment`.
      stage: for a stage of `cut_program`, the options that say what it recomputes; a stage exists even without
        outputs. None for a segment between stacks.
    """
    index, active, floating = variables.leaves, variables.active, variables.floating
    if not outputs and stage is None:
        return None
    # 1. Drop dead equations, and add the floating ones that it reads.
    eqns = list(jx.live(eqns, [v for v in outputs if v not in floating])) if eqns else []
    eqns = [*closure([*jx.free(eqns), *outputs], floating), *eqns]
    # What it then reads is either a leaf, which it fetches, or a value of an earlier piece.
    free = jx.free(eqns, outputs)
    leaves = [v for v in free if v in index]
    inputs = [v for v in free if v not in index]
    # 2. Split off the computation of the weights.
    weights_of, compute, active_weights = split(eqns, leaves, inputs, outputs, variables.constants)
    shapes = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in leaves)
    active_outputs = tuple(v in active and _is_inexact(v) for v in outputs)
    options = {} if stage is None else {"twice": stage.remat == "twice", "policy": stage.policy, "stores_saved": True}
    unit = Unit(
        leaf_indices=tuple(index[v] for v in leaves),
        shapes=shapes,
        weights_of=weights_of,
        compute=compute,
        active_weights=active_weights,
        active_inputs=tuple(v in active and _is_inexact(v) for v in inputs),
        active=active_outputs,
        held=(True,) * len(inputs),  # the tape has them all
        **options,
    )
    return Segment(unit, tuple(inputs), tuple(outputs), keep)


def _stack(eqn: Any, reads: Reads, variables: _Variables, slicing: Slicing, number: int) -> Stack:
    """Return the stack of a scan.

    Args:
      reads: what it reads of leaves.
      slicing: the parameters, and what to do with residuals.
      number: the number of the stack in the program.
    """
    parts = jx.scan_parts(eqn)
    n, k = len(parts.consts), len(parts.carry)
    slices = tuple(dict.fromkeys(layer_slice for layer_slice, _ in reads.values()))  # one layer may be scanned twice
    leaf_indices = tuple(layer_slice.leaf for layer_slice in slices)
    flat, shapes = _trace_layer(parts, reads, slices, variables, slicing)

    # Find which inputs and outputs carry derivatives.
    inputs = (*parts.consts, *parts.carry, *(v for p, v in enumerate(parts.xs) if p not in reads))
    weight_vars, input_vars = flat.invars[: len(leaf_indices)], flat.invars[len(leaf_indices) :]
    active_inputs = [
        not jx.is_literal(v) and v in variables.active and _is_inexact(w)
        for v, w in zip(inputs, input_vars, strict=True)
    ]
    active_inputs, active_outputs = _propagate_active(flat, active_inputs, len(leaf_indices), slice(n, n + k))

    # Split off the computation of the weights. It may read the loop's constants that carry no derivative: the backward
    # has these too.
    fixed = {v for v, is_active in zip(input_vars[:n], active_inputs, strict=False) if not is_active}
    fixed |= set(flat.constvars)
    weights_of, compute, active_weights = split(
        flat.eqns, weight_vars, [*flat.constvars, *input_vars], flat.outvars, fixed
    )
    consts = list(flat.consts)
    unit = Unit(
        leaf_indices=leaf_indices,
        shapes=tuple(shapes),
        weights_of=lambda full, values: weights_of(full, [*consts, *values]),
        compute=lambda weights, values: compute(weights, [*consts, *values]),
        active_weights=active_weights,
        active_inputs=tuple(active_inputs),
        active=tuple(active_outputs),
        # The carry is not held: the backward reads `saved`.
        held=tuple(not n <= i < n + k for i in range(len(input_vars))),
        twice=slicing.remat == "twice",
        choice=slicing.choices[number] if slicing.choices else slicing.default_choice,
        policy=slicing.policy,
        stores_saved=True,
    )
    outputs = (*parts.carry_out, *parts.ys)
    return Stack(unit, slices, inputs, outputs, n, k, parts.length, parts.reverse)


def _trace_layer(
    parts: Any, reads: Reads, slices: Sequence[Slice], variables: _Variables, slicing: Slicing
) -> tuple[jx.Flat, list[jax.ShapeDtypeStruct]]:
    """Trace one layer of a scan.

    Args:
      reads: what it reads of leaves.
      slices: the slices in `reads`, each once.
      variables, slicing: as for `_stack`.

    Returns:
      The layer as a program of its slices of the leaves, and of consts + carry + the other scanned values; and the
      shapes of the slices.
    """
    n, k = len(parts.consts), len(parts.carry)
    leaf_vars = list(variables.leaves)
    body = jec.jaxpr_as_fun(parts.body)

    def layer(layer_values: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        # The layers that are fetched, and the values that the scan slices as before.
        value_of, other_xs = dict(zip(slices, layer_values, strict=True)), iter(values[n + k :])
        xs = []
        for position in range(len(parts.xs)):
            layer_slice, chain = reads.get(position, (None, ()))
            value = next(other_xs) if layer_slice is None else value_of[layer_slice]
            for step in chain:  # the cast or transpose between leaf and scan
                value = step(value)
            xs.append(value)
        return body(*values[: n + k], *xs)

    body_avals = [v.aval for v in jx.opened(parts.body)[0].invars]
    input_avals = [*body_avals[: n + k], *(a for p, a in enumerate(body_avals[n + k :]) if p not in reads)]
    stacked = [(leaf_vars[layer_slice.leaf].aval, layer_slice.dim) for layer_slice in slices]
    shapes = [jax.ShapeDtypeStruct((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype) for x, dim in stacked]
    input_shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in input_avals]
    flat, _ = jx.trace(layer, shapes, input_shapes, axes=dict(slicing.axes), remats=slicing.remat != "none")
    return flat, shapes


def _propagate_active(
    flat: jx.Flat, active_inputs: list[bool], num_weights: int, carry: slice
) -> tuple[list[bool], list[bool]]:
    """Find which inputs and outputs of a layer carry derivatives.

    A carry may come to depend on parameters only after a layer, so that this repeats until nothing changes.

    Args:
      flat: the layer; its first inputs are `num_weights` weights, its first outputs the carry.
      active_inputs: which other inputs carry derivatives in the first layer.
      carry: the positions of the carry in `active_inputs`.

    Returns:
      For each input except the weights, and for each output, whether it carries derivatives in any layer.
    """
    active_inputs, num_carry = list(active_inputs), carry.stop - carry.start
    weight_vars, input_vars = flat.invars[:num_weights], flat.invars[num_weights:]
    while True:
        # A carry is active if it is so at the start or after any layer: repeat until nothing changes.
        active_vars = [v for v, is_active in zip(input_vars, active_inputs, strict=True) if is_active]
        marked = jx.active(flat.eqns, [*weight_vars, *active_vars])
        active_outputs = [not jx.is_literal(v) and v in marked and _is_inexact(v) for v in flat.outvars]
        union = [a or b for a, b in zip(active_inputs[carry], active_outputs[:num_carry], strict=True)]
        if union == active_inputs[carry]:
            return active_inputs, [*union, *active_outputs[num_carry:]]
        active_inputs[carry] = union


def _saves_products(primitive: Any, *args: Any, **params: Any) -> Any:
    """Save products, as a `jax.checkpoint` policy; for a row-parallel product save the sum over ranks.

    Saving the partial product would repeat the collective in the backward. With a split sequence, the sum is also
    smaller by the number of ranks.
    """
    is_sum_over_ranks = primitive.name in ("tensor_leave", "tensor_reduce_scatter")
    return is_sum_over_ranks or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


_nothing = jax.checkpoint_policies.nothing_saveable
_POLICIES = {"none": None, "auto": None, "layer": _nothing, "twice": _nothing, "dots": _saves_products}


def _without_remats(flat: jx.Flat) -> jx.Flat:
    """Return a program without the model's own rematerialisation."""
    # Constants become inputs for the time of the flattening, so that they stay in order.
    closed = jx.build(flat.eqns, (*flat.constvars, *flat.invars), flat.outvars)
    inlined, n = jx.flatten(closed, remats=True), len(flat.constvars)
    return jx.Flat(inlined.invars[:n], flat.consts, inlined.invars[n:], inlined.outvars, inlined.eqns)


def _is_inexact(var: Any) -> bool:
    """Whether a variable is floating-point or complex."""
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)
