"""Find the layer stacks of a traced loss, and cut it into pieces.

The loss is that of the rows of one microbatch of one replica. Its `scan`s whose scanned inputs are parameters
(`nnx.scan`, `nn.scan`, `lax.scan` give them) are the layer stacks; between two stacks lies a segment:

    segment | stack | segment | stack | ... | segment        (prologue | layers | epilogue for one stack)

What depends on parameters alone is computed not where the model wrote it but where it is used, so that no whole weight
is kept from one piece to another.
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
from .slices import Chain, Slice, sliced
from .units import Unit


@dataclass(frozen=True)
class Slicing:
    """What the slicer is told of a program's parameters, which are its first inputs, and of what to keep.

    Attributes:
      params: shapes of the whole parameter leaves, abstract.
      sharded: for each leaf, the dim that is sharded at rest, along which no stack can slice it; None for no dim.
      own: for each leaf, whether the stages of a pipeline own its layers; empty without a pipeline. The stack with most
        of them is cut into stages, and slices no others; no other stack slices them.
      axes: mesh axes that the program may name, name -> size.
      remat: "none" (the model's own), "layer", "twice", "dots" or a `jax.checkpoint` policy, for each layer of a stack;
        or "auto", what `choices` say.
      choices: of each stack what becomes of what its layers save (`Residuals.kept`); `otherwise` where there are none.
    """

    params: Sequence[Any]
    sharded: Sequence[int | None]
    own: Sequence[bool] = ()
    axes: Mapping[str, int] = field(default_factory=dict)
    remat: Any = "none"
    choices: tuple[str, ...] = ()
    otherwise: str = "s"

    @property
    def policy(self) -> Any:
        """See `Unit`."""
        return self.remat if callable(self.remat) else _POLICIES[self.remat]


@dataclass(frozen=True)
class _Known:
    """What is known of a program's variables: the numbers of the leaves, which others depend on them, the equations of
    those that depend on nothing else, and which are constants.
    """

    leaves: dict[Any, int]
    active: set[Any]
    floating: dict[Any, Any]
    constants: set[Any]


Reads = dict[int, tuple[Slice, Chain]]  # of a scan: what it reads of leaves, by the position among what it scans


def slice_program(flat: jx.Flat, how: Slicing) -> Program:
    """Cut a program into segments and layer stacks."""
    eqns = jx.live(flat.eqns, flat.outvars)
    leaves = flat.invars[: len(how.params)]
    index = {v: i for i, v in enumerate(leaves)}
    known = _Known(index, jx.active(eqns, leaves), _floating(eqns, leaves), set(flat.constvars))
    ordered = [e for e in eqns if not any(v in known.floating for v in e.outvars)]
    found, main = _scanned([e for e in ordered if e.primitive.name == "scan"], known, how)

    groups: list[list[Any]] = [[]]
    for eqn in ordered:
        if found.get(id(eqn)):
            groups += [[eqn], []]
        else:
            groups[-1].append(eqn)

    pieces: list[Segment | Stack] = []
    cut: Stack | None = None
    wanted = dict.fromkeys(v for v in flat.outvars if not jx.is_literal(v))
    for number in reversed(range(len(groups))):
        piece: Segment | Stack | None
        if number % 2:
            eqn = groups[number][0]
            piece = _stack(eqn, found[id(eqn)], known, how, number // 2)
            cut = piece if eqn is main else cut
        else:
            defined = {v for e in groups[number] for v in e.outvars}
            # What comes from parameters alone and a stack reads whole is computed by the segment before that stack.
            outputs = [v for v in wanted if v in defined or v in index or v in known.floating]
            epilogue = number > 0 and number == len(groups) - 1
            piece = _segment(groups[number], outputs, known, epilogue)
        if piece is not None:
            wanted = {v: None for v in wanted if v not in set(piece.outputs)}
            wanted.update((v, None) for v in piece.inputs if not jx.is_literal(v))
            pieces.insert(0, piece)
    return _program(flat, eqns, leaves, pieces, cut)


def _program(
    flat: jx.Flat, eqns: Sequence[Any], leaves: Sequence[Any], pieces: Sequence[Segment | Stack], *cut: Any
) -> Program:
    uses = tuple(tuple(isinstance(p, Stack) for p in pieces if i in p.unit.leaves) for i in range(len(leaves)))
    inputs = (*flat.constvars, *flat.invars[len(leaves) :])
    return Program(tuple(pieces), tuple(eqns), flat.consts, tuple(leaves), inputs, tuple(flat.outvars), uses, *cut)


Groups = Callable[[Sequence[Any], Sequence[frozenset[int]]], list[list[Any]]]


def cut_program(flat: jx.Flat, how: Slicing, groups: Groups) -> Program:
    """Cut a program into one segment for each of the groups into which `groups` divides its equations, in order.

    What follows from parameters alone, or cheaply from the program's other inputs alone, is computed in each segment
    that reads it; `groups` gets the other equations, and the numbers of the parameters that each reads. A segment of
    which nobody reads anything has no outputs. `how.remat` is that of each segment as a whole.
    """
    flat = flat if how.remat == "none" else _without_remats(flat)
    eqns = jx.live(flat.eqns, flat.outvars)
    leaves = flat.invars[: len(how.params)]
    index = {v: i for i, v in enumerate(leaves)}
    given = [*flat.constvars, *flat.invars[len(leaves) :]]
    floating = _floating(eqns, given, lambda eqn: eqn.primitive.name not in _DEAR) | _floating(eqns, leaves)
    known = _Known(index, jx.active(eqns, leaves), floating, set(flat.constvars))
    through: dict[Any, frozenset[int]] = {v: frozenset([i]) for v, i in index.items()}
    ordered: list[tuple[Any, frozenset[int]]] = []
    for eqn in _made_whole_early(eqns):
        read = frozenset[int]().union(*(through.get(v, ()) for v in eqn.invars if not jx.is_literal(v)))
        if any(v in floating for v in eqn.outvars):
            through.update((v, read) for v in eqn.outvars)
        else:
            ordered.append((eqn, read))
    parts = groups([eqn for eqn, _ in ordered], [read for _, read in ordered])
    pieces: list[Segment | Stack] = []
    wanted = dict.fromkeys(v for v in flat.outvars if not jx.is_literal(v))
    for number in reversed(range(len(parts))):
        defined = {v for e in parts[number] for v in e.outvars}
        last = number == len(parts) - 1
        outputs = [v for v in wanted if v in defined or (last and (v in index or v in floating))]
        piece = _segment(parts[number], outputs, known, False, how)
        assert piece is not None
        wanted = {v: None for v in wanted if v not in set(piece.outputs)}
        wanted.update((v, None) for v in piece.inputs)
        pieces.insert(0, piece)
    uses = tuple(tuple(False for p in pieces if i in p.unit.leaves) for i in range(len(leaves)))
    inputs = (*flat.constvars, *flat.invars[len(leaves) :])
    cut = tuple(map(tuple, parts))
    return Program(tuple(pieces), tuple(eqns), flat.consts, leaves, inputs, tuple(flat.outvars), uses, groups=cut)


def _made_whole_early(eqns: Sequence[Any]) -> list[Any]:
    """What makes a result whole on each tensor rank stands behind what made its parts: at the end of the program, new
    statistics of BatchNorm would be changed in the last stage, and not in their own.
    """
    read = {v for eqn in eqns for v in eqn.invars if not jx.is_literal(v)}
    made = {v: at for at, eqn in enumerate(eqns) for v in eqn.outvars}

    def place(at: int) -> float:
        eqn = eqns[at]
        last = eqn.primitive.name == "tensor_all_gather_replicated" and not read.intersection(eqn.outvars)
        return made.get(eqn.invars[0], -1) + 0.5 if last else at

    return [eqns[at] for at in sorted(range(len(eqns)), key=place)]


def _scanned(scans: Sequence[Any], known: _Known, how: Slicing) -> tuple[dict[int, Reads], Any]:
    """What each scan, by the id of its equation, reads of leaves; and the scan whose layers are a pipeline's."""
    own = how.own or [False] * len(how.params)
    found = {id(e): sliced(e, known.floating, known.leaves) for e in scans}
    dims: dict[int, int] = {}  # the dim along which all stacks slice a leaf
    for one, _ in (x for e in scans for x in found[id(e)].values()):
        if one.dim != how.sharded[one.leaf] and (one.dim == 0 or not own[one.leaf]):
            dims.setdefault(one.leaf, one.dim)
    found = {key: {p: x for p, x in xs.items() if dims.get(x[0].leaf) == x[0].dim} for key, xs in found.items()}
    if not any(own):
        return found, None
    weight = {id(e): _weight({s for s, _ in found[id(e)].values()}, e.params["length"], how.params, own) for e in scans}
    main = max(scans, key=lambda e: weight[id(e)], default=None) if any(weight.values()) else None
    # The stages own layers of one stack, which slices no others.
    return {id(e): {p: x for p, x in found[id(e)].items() if own[x[0].leaf] == (e is main)} for e in scans}, main


def _weight(slices: set[Slice], length: int, params: Sequence[Any], own: Sequence[bool]) -> int:
    """Elements that a stack reads of the leaves that the stages of a pipeline own."""
    return sum(math.prod(params[s.leaf].shape) // params[s.leaf].shape[s.dim] * length for s in slices if own[s.leaf])


_DEAR = (*primitives.PRODUCTS, *primitives.having("nested"), "sort", "pure_callback")


def _floating(eqns: Sequence[Any], leaves: Sequence[Any], may: Callable[[Any], bool] = lambda eqn: True) -> Any:
    """The equations that `may` and need parameters (and literals) alone, by the variables that they define."""
    known = set(leaves)
    floating = {}
    for eqn in eqns:
        if all(v in known for v in eqn.invars if not jx.is_literal(v)) and not eqn.effects and may(eqn):
            known.update(eqn.outvars)
            floating.update((v, eqn) for v in eqn.outvars)
    return floating


def _segment(
    eqns: list[Any], outputs: list[Any], known: _Known, keep: bool, stage: Slicing | None = None
) -> Segment | None:
    """None where nobody reads anything of it, unless it is a `stage`, which keeps what that says."""
    index, active, floating = known.leaves, known.active, known.floating
    if not outputs and stage is None:
        return None
    eqns = list(jx.live(eqns, [v for v in outputs if v not in floating])) if eqns else []
    eqns = [*closure([*jx.free(eqns), *outputs], floating), *eqns]
    free = jx.free(eqns, outputs)
    leaves = [v for v in free if v in index]
    inputs = [v for v in free if v not in index]
    pre, rest, moving = split(eqns, leaves, inputs, outputs, known.constants)
    linear = tuple(v in active and _inexact(v) for v in inputs)
    shapes = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in leaves)
    given = tuple(v in active and _inexact(v) for v in outputs)
    keeps = {} if stage is None else {"twice": stage.remat == "twice", "policy": stage.policy, "gathers_again": True}
    held = (True,) * len(inputs)
    unit = Unit(tuple(index[v] for v in leaves), shapes, pre, rest, moving, linear, given, held, **keeps)
    return Segment(unit, tuple(inputs), tuple(outputs), keep)


def _stack(eqn: Any, found: Reads, known: _Known, how: Slicing, number: int) -> Stack:
    active = known.active
    parts = jx.scan_parts(eqn)
    n, k = len(parts.consts), len(parts.carry)
    read = tuple(dict.fromkeys(one for one, _ in found.values()))  # one layer may be scanned twice
    leaves = tuple(one.leaf for one in read)
    variables = list(known.leaves)
    body = jec.jaxpr_as_fun(parts.body)

    def layer(slices: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        mine, others = dict(zip(read, slices, strict=True)), iter(values[n + k :])
        xs = []
        for position in range(len(parts.xs)):
            one, chain = found.get(position, (None, ()))
            value = next(others) if one is None else mine[one]
            for step in chain:
                value = step(value)
            xs.append(value)
        return body(*values[: n + k], *xs)

    inner = [v.aval for v in jx.opened(parts.body)[0].invars]
    values = [*inner[: n + k], *(a for p, a in enumerate(inner[n + k :]) if p not in found)]
    whole = [(variables[one.leaf].aval, one.dim) for one in read]
    slices = [jax.ShapeDtypeStruct((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype) for x, dim in whole]
    values = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in values]
    flat, _ = jx.trace(layer, slices, values, axes=dict(how.axes), remats=how.remat != "none")

    outer = (*parts.consts, *parts.carry, *(v for p, v in enumerate(parts.xs) if p not in found))
    mine, ours = flat.invars[: len(leaves)], flat.invars[len(leaves) :]
    linear = [not jx.is_literal(v) and v in active and _inexact(w) for v, w in zip(outer, ours, strict=True)]
    while True:  # a carry may come to depend on parameters only after a layer
        marked = jx.active(flat.eqns, [*mine, *(v for v, on in zip(ours, linear, strict=True) if on)])
        outs = [not jx.is_literal(v) and v in marked and _inexact(v) for v in flat.outvars]
        if not any(new and not old for new, old in zip(outs[:k], linear[n : n + k], strict=True)):
            break
        linear[n : n + k] = [a or b for a, b in zip(linear[n : n + k], outs[:k], strict=True)]
    outs[:k] = linear[n : n + k]

    fixed = {v for v, on in zip(ours[:n], linear, strict=False) if not on} | set(flat.constvars)
    pre, rest, moving = split(flat.eqns, mine, [*flat.constvars, *ours], flat.outvars, fixed)
    consts = list(flat.consts)
    unit = Unit(
        leaves,
        tuple(slices),
        lambda full, values: pre(full, [*consts, *values]),
        lambda weights, values: rest(weights, [*consts, *values]),
        moving,
        tuple(linear),
        tuple(outs),
        tuple(not n <= i < n + k for i in range(len(ours))),  # of the carry the backward has what is saved
        how.remat == "twice",
        how.choices[number] if how.choices else how.otherwise,
        how.policy,
        True,
    )
    outputs = (*parts.carry_out, *parts.ys)
    return Stack(unit, read, outer, outputs, n, k, parts.length, parts.reverse)


def _saves_products(primitive: Any, *args: Any, **params: Any) -> Any:
    """A policy of rematerialisation: of a row-parallel product its sum over ranks in place of the partial sum, so that
    the backward does not repeat the collective; with a sequence that is split it is smaller by the number of ranks.
    """
    of_ranks = primitive.name in ("tensor_leave", "tensor_scatter")
    return of_ranks or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


_nothing = jax.checkpoint_policies.nothing_saveable
_POLICIES = {"none": None, "auto": None, "layer": _nothing, "twice": _nothing, "dots": _saves_products}


def _without_remats(flat: jx.Flat) -> jx.Flat:
    """A program without the model's own rematerialisation."""
    closed = jx.build(flat.eqns, (*flat.constvars, *flat.invars), flat.outvars)
    found, n = jx.flatten(closed, remats=True), len(flat.constvars)
    return jx.Flat(found.invars[:n], flat.consts, found.invars[n:], found.outvars, found.eqns)


def _inexact(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)
