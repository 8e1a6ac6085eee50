"""What equations that move dims about make of rows and of sums over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..program import factors
from .elementwise import FROM_ALL, together
from .reader import WHOLE, Reader, rule, shape_of, shapes
from .values import GATHER, Note, Value, combine, coupled, reshaped, spread

_SAME = """
device_put from_edtype layout_constraint mesh_cast optimization_barrier pvary random_wrap reduced_vary_cast relayout
reshard sharding_constraint to_edtype with_memory_space_constraint
""".split()


def along(eqn: Any, x: Value, to: Sequence[int | None]) -> Value:
    """A value whose dims have other numbers: of the dims that are gone, none has rows."""
    if x.kind == "sum":
        return x
    if x.kind == "whole":
        counts = None if x.counts is None else to[x.counts]
        return replace(x, varies=frozenset(n for d in x.varies if (n := to[d]) is not None), counts=counts)
    if (moved := x.moved(to)) is not None:
        return moved
    if x.first is not None and x.first >= 0:
        return coupled([x], Note.at(eqn, f"takes some of the rows; {FROM_ALL}"))
    return coupled([x], Note.at(eqn, f"{eqn.primitive.name} may tear rows apart", certain=False))


def shape_rule(*names: str) -> Any:
    """Registers a rule for whole values, too."""
    return lambda fun: rule(*names, table=WHOLE)(rule(*names)(fun))


@shape_rule("broadcast_in_dim")
def _broadcast(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    x, to = ins[0], list(eqn.params["broadcast_dimensions"])
    found = along(eqn, x, to)
    if x.counts is not None and shape_of(eqn)[-1:] == (1,) and to[x.counts] != len(shape_of(eqn)) - 1:
        found = replace(found, columns=frozenset([0]))
    return replace(found, columns=frozenset()) if x.kind == "rows" else found


@shape_rule("reshape")
def _reshape(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    x, (old, *_), new = ins[0], shapes(eqn), shape_of(eqn)
    if x.kind == "sum":
        return x
    if x.kind == "whole":
        return replace(x, varies=spread(x.varies, old, new), counts=None)
    if not x.span:
        return x
    if eqn.params["dimensions"] is not None or not new:
        return coupled([x], Note.at(eqn, "reshape takes the one row of a block"))
    found = reshaped(x, old, new)
    last = found.dim + found.span
    if r.exact and twin is not None and last < len(new):
        # Where sizes leave it open which of two dims has the rows, it is the one that grows with them.
        grown = [b > a for a, b in zip(new, shape_of(twin), strict=True)]
        found = replace(found, span=found.span + (grown[last] and not any(grown[d] for d in found.dims)))
    return found


@shape_rule("transpose", "squeeze", "unstack")
def _moved(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    if eqn.primitive.name == "unstack" and ins[0].kind == "rows" and eqn.params["axis"] in ins[0].dims:
        return coupled(ins, Note.at(eqn, f"takes rows one by one; {FROM_ALL}"))
    to = {f.ins[0]: f.outs[0] for f in factors.of(eqn)}
    return along(eqn, ins[0], [to.get(d) for d in range(len(shapes(eqn)[0]))])


@shape_rule("expand_dims")
def _expand(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    gone = [d % len(shape_of(eqn)) for d in eqn.params["dimensions"]]
    return along(eqn, ins[0], [d for d in range(len(shape_of(eqn))) if d not in gone])


def without(ndim: int, gone: Sequence[int]) -> list[int | None]:
    """What dims are called when some are gone."""
    return [None if d in gone else d - sum(g < d for g in gone) for d in range(ndim)]


@shape_rule(*_SAME)
def _each(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    return list(ins)


@shape_rule("random_bits", "random_split", "random_unwrap")
def _random(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    """Keys of rows give numbers of rows; a key gives numbers that are alike for all."""
    return replace(ins[0], varies=frozenset(), counts=None)


@rule("random_fold_in", "random_seed", "random_gamma", "rng_bit_generator", "threefry2x32", table=WHOLE)
def _random_whole(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    return Value()


@rule("iota", table=WHOLE)
def _iota(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    dim = eqn.params["dimension"]
    return Value(varies=frozenset([dim]), counts=dim)


@shape_rule("concatenate", "stack", "pad")
def _concatenate(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    name, dim = eqn.primitive.name, eqn.params.get("dimension", eqn.params.get("axis"))
    sizes = [s[dim] for s in shapes(eqn)] if name == "concatenate" else []
    if name == "stack":
        n = len(shapes(eqn)[0])
        ins = [along(eqn, x, [d + (d >= dim) for d in range(n)]) for x in ins]
    if name == "pad":
        padded = {d for d, config in enumerate(eqn.params["padding_config"]) if tuple(config) != (0, 0, 0)}
        ins = [ins[0], replace(ins[1], varies=frozenset())]
    else:
        padded = {dim}
    rows = [x for x in ins if x.kind == "rows"]
    if all(x.kind == "whole" for x in ins):
        found = combine(eqn, ins)
        last = name == "concatenate" and dim == len(shape_of(eqn)) - 1
        counts = next((x.counts for x in ins if x.columns), None) if last and 1 in sizes else None
        columns = _columns(ins, sizes, counts)
        return replace(found, varies=found.varies | padded, scalar=None, columns=columns, counts=counts)
    if rows and padded & set(rows[0].dims):
        return _joined(r, eqn, ins, sizes, dim) if name == "concatenate" else None
    if rows and not any(x.kind == "sum" for x in ins):
        # Columns of indices that count rows: the lookup says whether they meet the rows that they count.
        found = together(eqn, [replace(x, varies=frozenset()) if x.columns and x.kind == "whole" else x for x in ins])
        power = found.power if len({x.power for x in ins if not x.zero}) == 1 else None
        last = name == "concatenate" and dim == len(shape_of(eqn)) - 1 and found.kind == "rows"
        columns = _columns(ins, sizes, found.dim) if last else frozenset()
        return replace(found, columns=columns, power=power)
    return combine(eqn, ins)


def _columns(ins: Sequence[Value], sizes: Sequence[int], dim: int | None) -> frozenset[int]:
    """Which columns of joined indices count along a dim: of `x[jnp.arange(3)[None], labels[:, None]]` none does along
    the rows of the labels.
    """
    if dim is None:
        return frozenset()
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    counting = [x.kind == "rows" or x.counts == dim for x in ins]
    parts = zip(ins, starts, counting, strict=True)
    return frozenset(start + c for x, start, counts in parts if counts for c in x.columns)


def _joined(r: Reader, eqn: Any, ins: Sequence[Value], sizes: Sequence[int], dim: int) -> Value | None:
    """Rows laid after rows: the same ones again, or pieces of them in their order."""
    if any(x.kind != "rows" or x.span != 1 or x.dim != dim or x.plus != ins[0].plus for x in ins):
        return None
    inner = {size // (x.outer * x.count) for x, size in zip(ins, sizes, strict=True)}
    if len(inner) == 1 and len({(x.count, x.first) for x in ins}) == 1:
        return replace(
            ins[0], outer=sum(x.outer for x in ins), power=combine(eqn, [replace(x, outer=1) for x in ins]).power
        )
    firsts = [x.first or 0 for x in ins]
    ends = [f + x.count for f, x in zip(firsts, ins, strict=True)]
    if len(inner) == 1 and all(x.outer == 1 for x in ins) and firsts[1:] == ends[:-1]:
        count = ends[-1] - firsts[0]
        return replace(ins[0], count=count, first=None if count == r.rows else firsts[0])
    return coupled(ins, Note.at(eqn, f"puts rows into another order; {GATHER}"))
