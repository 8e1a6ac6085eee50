"""Rules of equations that mix positions with those next to them, or with all before them: slices and paddings that move
positions along, convolutions, cumulative sums, and scans of a diagonal linear recurrence.

A rank gets what is next to its chunks from their neighbours (`ops/halo.py`), or of every chunk what it adds to those
behind it.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...program import jaxpr as jx
from ...program import primitives
from ..tensor import RULES as TENSOR
from ..tensor.localiser import Found, LocalValue, place
from ..tensor.primitives import follow, shape_of
from ..tensor.sums import identity
from .attention_mode import AXIS
from .entry import side_by_side
from .localiser import ContextLocaliser
from .ops import from_chunks, order_of, with_neighbours
from .places import constant, placed, written
from .rules import rule
from .split import PARTIAL, Split


def overlap(work: ContextLocaliser, n: int, chunk: int) -> int | None:
    """That of n positions in chunks of a given length; None where it would be more than a chunk."""
    parts = work.mode.parts(work.ranks)
    if -(-n // parts) == chunk:
        return 0
    return n - chunk * parts if abs(n - chunk * parts) <= chunk else None


def refuse(work: ContextLocaliser, eqn: Any, x: LocalValue, by: int) -> None:
    """Raises ValueError where more than the next chunk would be asked for, unless all of it may be gathered."""
    assert x.dim is not None
    if math.prod(x.shape) > work.cheap:
        dim = work.split(x.dim)
        n = x.shape[dim] // dim.rows
        all_of_it = "data, fsdp, tensor or pipe in place of context, as that is all of the sequence, however long it is"
        raise ValueError(
            f"context={work.ranks} splits dim {int(dim)} of {list(x.shape)} into chunks of "
            f"{work.chunk(n, dim.overlap)} positions, and {place(eqn)} reaches {by} further; use "
            f"{'a smaller context=, or longer sequences' if by < n - 1 else all_of_it}"
        )


def windows(
    work: ContextLocaliser, x: LocalValue, start: int, width: int, fill: jax.Array | None = None
) -> list[jax.Array] | None:
    """Of each of this rank's chunks, which begin at some position t, the positions from t + start on, `width` of them;
    `fill` in the place of those that are not there. None where they are not all next to it.
    """
    assert x.dim is not None
    dim = work.split(x.dim)
    if dim.rows > 1:
        return None
    n, at = x.shape[dim], int(dim)
    chunk = work.chunk(n, dim.overlap)
    before, after = max(-start, 0), max(start + width - chunk, 0)
    if dim.overlap > 0 and start >= 0 and start + width <= chunk + dim.overlap:
        found = [lax.slice_in_dim(y, start, start + width, axis=at) for y in jnp.split(x.value, work.mode.parts(1), at)]
    elif dim.overlap > 0 or max(before, after) > chunk:
        return None
    else:
        each = with_neighbours(x.value, before, after, AXIS, work.mode.order, at)
        found = [lax.slice_in_dim(y, start + before, start + before + width, axis=at) for y in each]
    if fill is None:
        return found
    out = []
    for first, y in zip(work.chunks(), found, strict=True):
        place = first * chunk + start + jnp.arange(width)
        there = jnp.expand_dims((place >= 0) & (place < n), [d for d in range(y.ndim) if d != at])
        out.append(jnp.where(there, y, fill))
    return out


def moved(
    work: ContextLocaliser, x: LocalValue, start: int, length: int, fill: jax.Array | None = None
) -> Found | None:
    """x[start : start + length] along its split dim, in the chunks of x; `fill` where there is nothing."""
    assert x.dim is not None
    dim = work.split(x.dim)
    chunk = work.chunk(x.shape[dim] // dim.rows, dim.overlap)
    more = overlap(work, length, chunk)
    if start == 0 == more and dim.overlap <= 0 and fill is None:
        return [(x.value, Split(int(dim), dim.rows))] if dim.rows == 1 else None
    if more is None or (found := windows(work, x, start, chunk + max(more, 0), fill)) is None:
        return None
    return [(jnp.concatenate(found, int(dim)), Split(int(dim), 1, more))]


@rule("slice")
def _slice(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """All positions, all but some of the first and last, or no more than a rank has: these are whole on every rank."""
    (x,) = inputs
    assert x.dim is not None
    dim = work.split(x.dim)
    starts, limits = [*eqn.params["start_indices"]], [*eqn.params["limit_indices"]]
    strides = [*(eqn.params["strides"] or [1] * len(starts))]
    start, limit, step, n = starts[dim], limits[dim], strides[dim], x.shape[dim] // dim.rows
    starts[dim], limits[dim], strides[dim] = 0, x.value.shape[dim], 1
    every = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": tuple(strides)}
    (value,) = jx.bind(eqn, [x.value], **every)
    if limit - start == x.shape[dim] and step == 1:
        return [(value, dim)]
    if start == limit:  # `associative_scan` takes none of the last positions
        return [(lax.slice_in_dim(value, 0, 0, axis=int(dim)), None)]
    shape = tuple(m if d == dim else k for d, (m, k) in enumerate(zip(x.shape, shape_of(eqn), strict=True)))
    rest = LocalValue(value, dim, shape)
    found = moved(work, rest, start, limit - start) if limit - start > 1 == step else None
    if found is None and limit - start <= work.chunk(n, dim.overlap) and step == 1:
        return [(picked(work, rest, start, limit), PARTIAL)]
    return found or placed(work, eqn, [rest], int(dim), np.arange(start, limit, step))


def picked(work: ContextLocaliser, x: LocalValue, start: int, limit: int) -> jax.Array:
    """x[start : limit] along its split dim as a partial sum: what a rank has of it, and zeros."""
    assert x.dim is not None
    dim, held = work.split(x.dim), order_of(work.ranks, work.mode.order)
    n = x.shape[dim] // dim.rows
    chunk = work.chunk(n, dim.overlap)
    found = []
    while start < limit:
        row, place = divmod(start, n)
        number = min(place // chunk, len(held) - 1)  # the last chunk has what follows it as well
        owner, slot = divmod(held.index(number), work.mode.parts(1))
        end = n if number == len(held) - 1 else (number + 1) * chunk
        length = min(limit - start, end - place)
        at = row * work.size(n, dim.overlap) + slot * (chunk + max(dim.overlap, 0)) + place - number * chunk
        some = lax.slice_in_dim(x.value, at, at + length, axis=int(dim))
        found.append(jnp.where(lax.axis_index(AXIS) == owner, some, jnp.zeros_like(some)))
        start += length
    return jnp.concatenate(found, int(dim))


@rule("pad")
def _pad(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    x, fill = inputs
    if x.dim is None:
        return None
    if (found := follow(work, eqn, inputs)) is not None:
        return found
    config = list(eqn.params["padding_config"])
    low, high, between = config[x.dim]
    config[x.dim] = (0, 0, 0)
    (value,) = jx.bind(eqn, [x.value, fill.value], padding_config=tuple(config))
    n, shape = x.shape[x.dim], tuple(x.shape[d] if d == x.dim else k for d, k in enumerate(shape_of(eqn)))
    rest = LocalValue(value, x.dim, shape)
    if not between and (found := moved(work, rest, -low, n + low + high, fill.value)) is not None:
        return found
    at = np.arange(-low, shape_of(eqn)[x.dim] - low)
    at = np.where((at >= 0) & (at % (between + 1) == 0) & (at // (between + 1) < n), at // (between + 1), -1)
    return placed(work, eqn, [rest], int(x.dim), at, fill.value)


@rule("concatenate")
def _concatenate(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Whole values, such as zeros, before and after a split one: its positions move along. Several split ones, as two
    streams of tokens, are dealt out anew; where ranks cannot meet, all but the longest are made whole, if a rank has as
    much.
    """
    at, lengths = eqn.params["dimension"], [y.shape[eqn.params["dimension"]] for y in inputs]
    split = {i: work.split(x.dim) for i, x in enumerate(inputs) if x.dim is not None}
    if any(dim != at for dim in split.values()):
        alike = len({dim.how[1:] for dim in split.values()}) == 1
        return follow(work, eqn, inputs) if alike else None
    most = max(split, key=lambda i: lengths[i])
    x, dim = inputs[most], split[most]
    firsts, others = [sum(lengths[:i]) for i in range(len(inputs))], [lengths[i] for i in split if i != most]
    short = dim.rows == 1 and all(n <= work.chunk(lengths[most], dim.overlap) for n in others)
    if not short or (others and work.together) or (found := moved(work, x, -firsts[most], sum(lengths))) is None:
        return placed(work, eqn, inputs, at, np.arange(sum(lengths)))
    ((value, dim),) = found
    assert isinstance(dim, Split)
    places = work.positions(sum(lengths), dim)
    over = lambda mask: jnp.expand_dims(mask, [d for d in range(value.ndim) if d != at])
    for i, (y, first, n) in enumerate(zip(inputs, firsts, lengths, strict=True)):
        if i != most and n:
            own = jnp.take(work.whole(y), jnp.clip(places - first, 0, n - 1), axis=at)
            value = jnp.where(over((places >= first) & (places < first + n)), own, value)
    return [(value, dim)]


@rule("rev")
def _reverse(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """The last position first."""
    (x,) = inputs
    assert x.dim is not None
    dims = {int(d) for d in eqn.params["dimensions"]}
    (value,) = jx.bind(eqn, [x.value], dimensions=tuple(dims - {int(x.dim)}))
    turned = LocalValue(value, x.dim, x.shape)
    return (
        placed(work, eqn, [turned], int(x.dim), np.arange(x.shape[x.dim])[::-1]) if x.dim in dims else [(value, x.dim)]
    )


_JOINS = {"": lambda _, y: y, "-add": jnp.add, "-mul": jnp.multiply, "-min": jnp.minimum, "-max": jnp.maximum}


@rule(*(f"scatter{name}" for name in _JOINS))
def _scatter(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """`x.at[:, 1:].add(y)`: at positions that are known, each once."""
    (x, indices, y), numbers, name = inputs, eqn.params["dimension_numbers"], eqn.primitive.name
    into, inserted, places = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims, constant(indices)
    of_window = [d for d in range(len(x.shape)) if d not in (*inserted, *numbers.operand_batching_dims)]
    by_window = dict(zip(numbers.update_window_dims, of_window, strict=True))  # dims of y -> of x
    if {x.dim, by_window.get(y.dim)}.isdisjoint(into) and (x.dim is not None or y.dim in by_window):
        return follow(work, eqn, inputs)
    if len(into) != 1 or inserted not in ((), into) or numbers.operand_batching_dims or places is None:
        return None
    (dim,) = into
    if inserted:  # y has its positions where it has no window, if it has more than one
        y, at = _with_dim(work, y, dim, numbers.update_window_dims), places.reshape(-1)
    else:
        at = places.reshape(-1) + np.arange(y.shape[dim])
    others = [d for d in range(len(x.shape)) if d != dim]
    known = len(np.unique(at)) == len(at) == y.shape[dim] and at.min() >= 0 and at.max() < x.shape[dim]
    if not known or any(x.shape[d] != y.shape[d] for d in others):
        return None
    of = np.full(x.shape[dim], -1)
    of[at] = np.arange(len(at))
    return written(work, eqn, x, y, dim, of, _JOINS[name.removeprefix("scatter")])


def _with_dim(work: ContextLocaliser, y: LocalValue, dim: int, window: Sequence[int]) -> LocalValue:
    """What is written at single positions, which become this dim of it; other dims stay in their order."""
    (at,) = [d for d in range(len(y.shape)) if d not in window] or [len(y.shape)]  # of one position there is no dim
    value, shape = (y.value, y.shape) if at < len(y.shape) else (y.value[..., None], (*y.shape, 1))
    order = [d for d in range(len(shape)) if d != at]
    order.insert(dim, at)
    to = None if y.dim is None else Split(order.index(int(y.dim)), *work.split(y.dim).how[1:])
    return LocalValue(jnp.transpose(value, order), to, tuple(shape[d] for d in order))


@rule("conv_general_dilated")
def _convolution(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Along positions by those of the neighbours that the kernel reaches; along anything else each by itself."""
    x, kernel = inputs
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    if x.dim is None or kernel.dim is not None:
        return None
    if x.dim == numbers.lhs_spec[0] and params["batch_group_count"] == 1:
        return [(jx.bind(eqn, [x.value, kernel.value])[0], numbers.out_spec[0])]
    if x.dim not in numbers.lhs_spec[2:]:
        return None
    along = numbers.lhs_spec.index(x.dim) - 2
    out, step, size = numbers.out_spec[2 + along], params["window_strides"][along], x.value.shape[x.dim]
    if step > 1 and side_by_side(eqn, [x.dim]) and work.rows == 1:
        multiple, n = step * work.mode.parts(work.ranks), x.shape[x.dim]
        if n % multiple and math.prod(x.shape) > work.cheap:
            raise ValueError(
                f"context={work.ranks} splits the {n} positions of {place(eqn)}, whose windows of {step} want a "
                f"multiple of {multiple}; use {n + -n % multiple} positions, or tensor, fsdp or pipe for context"
            )
        cut = work.overlap or n % multiple or size * work.ranks != n
        return None if cut else [(jx.bind(eqn, [x.value, kernel.value])[0], Split(out))]
    if work.rows > 1 or params["window_strides"][along] != 1 or params["lhs_dilation"][along] != 1:
        return None
    dim = work.split(x.dim)
    low, high = params["padding"][along]
    reach = (kernel.shape[numbers.rhs_spec[2 + along]] - 1) * params["rhs_dilation"][along]
    chunk, length = work.chunk(x.shape[dim] // dim.rows, dim.overlap), x.shape[dim] + low + high - reach
    if (more := overlap(work, length, chunk)) is None:
        return refuse(work, eqn, x, reach)
    zero = jnp.zeros((), x.value.dtype)
    if (parts := windows(work, x, -low, chunk + max(more, 0) + reach, zero)) is None:
        return refuse(work, eqn, x, reach)
    padding = tuple((0, 0) if d == along else pair for d, pair in enumerate(params["padding"]))
    done = [jx.bind(eqn, [part, kernel.value], padding=padding)[0] for part in parts]
    return [(jnp.concatenate(done, out), Split(out, 1, more))]


_JOINED = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}


@rule(*_JOINED)
def _cumulative(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Each chunk by itself, and what the chunks before it come to: of each a number for every row and feature, which
    are gathered, (c - 1) p of them sent, p being the chunks of a rank.
    """
    (x,) = inputs
    assert x.dim is not None
    dim, n = work.split(x.dim), x.shape[x.dim]
    if x.dim != eqn.params["axis"]:
        return follow(work, eqn, inputs)
    chunk, after, back = work.chunk(n, dim.overlap), max(dim.overlap, 0), eqn.params["reverse"]
    if dim.rows > 1 or (back and after):
        return None
    join = _JOINED[eqn.primitive.name]
    nothing = jnp.asarray(identity(eqn), x.value.dtype)
    value = x.value
    if chunk * work.mode.parts(work.ranks) + after != n:
        held = jnp.concatenate([at * chunk + jnp.arange(chunk + after) for at in work.chunks()])
        there = jnp.expand_dims(held < n, [d for d in range(len(x.shape)) if d != dim])
        value = jnp.where(there, value, nothing)
    each = [jx.bind(eqn, [part])[0] for part in jnp.split(value, work.mode.parts(1), dim)]
    end = 0 if back else chunk - 1
    totals = from_chunks(
        jnp.stack([lax.slice_in_dim(y, end, end + 1, axis=int(dim)) for y in each]), AXIS, work.mode.order
    )
    before = [jnp.full_like(totals[0], nothing)]
    for total in (totals[::-1] if back else totals)[:-1]:
        before.append(join(before[-1], total))
    known = jnp.stack(before[::-1] if back else before)
    return [(jnp.concatenate([join(known[at], y) for at, y in zip(work.chunks(), each, strict=True)], int(dim)), dim)]


@rule("scan")
def _scan(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Layer by layer, each with its positions; or position by position, where a state decays and grows by itself."""
    parts = jx.scan_parts(eqn)
    steps = inputs[len(parts.consts) + len(parts.carry) :]
    if (found := _picking(work, eqn, inputs)) is not None:
        return found
    if not any(x.dim == 0 and math.prod(x.shape) > work.cheap for x in steps):
        return TENSOR["scan"](work, eqn, inputs)
    return _recurrence(work, eqn, inputs) if diagonal(parts) else None


def _picking(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """A scan over step numbers, whose body picks a position by them, `a[:, i]`, as a scan over these positions; None
    where that is not all that becomes of what is split.
    """
    parts, flat = jx.scan_parts(eqn), jx.flatten(jx.scan_parts(eqn).body)
    n, k, every = len(parts.consts), len(parts.carry), np.arange(parts.length)
    known = zip(flat.invars[n + k :], map(constant, inputs[n + k :]), strict=True)
    numbers = [v for v, at in known if at is not None and np.array_equal(every, at)]
    split = {v: (i, x.dim) for i, (v, x) in enumerate(zip(flat.invars, inputs, strict=True)) if x.dim is not None}
    picks = [one for one in flat.eqns if any(not jx.is_literal(v) and v in split for v in one.invars)]

    def by_number(one: Any) -> bool:
        if one.primitive.name != "dynamic_slice" or one.invars[0] not in split:
            return False
        dim, sizes = split[one.invars[0]][1], one.params["slice_sizes"]
        cut = [d for d, m in enumerate(one.invars[0].aval.shape) if sizes[d] != m]
        made = jx.needed(flat.eqns, [at := one.invars[1 + dim]])
        if cut != [dim] or sizes[dim] != 1 or jx.free(made, [at]) != numbers[:1]:
            return False
        with jax.ensure_compile_time_eval():
            return np.array_equal(every, jax.vmap(jx.run(made, numbers[:1], [at]))(jnp.asarray(every))[0])

    if not numbers or not picks or not all(map(by_number, picks)):
        return None
    rest = [one for one in flat.eqns if one not in picks]
    body = jx.run(rest, (*flat.invars, *(one.outvars[0] for one in picks)), flat.outvars)

    def anew(*values: jax.Array) -> list[jax.Array]:
        def step(carry: Any, xs: Any) -> Any:
            steps, picked = xs
            outs = body(*values[:n], *carry, *steps, *picked)
            return outs[:k], outs[k:]

        along = [split[one.invars[0]] for one in picks]
        picked = [jnp.expand_dims(jnp.moveaxis(values[i], dim, 0), dim + 1) for i, dim in along]
        options = {name: eqn.params[name] for name in ("reverse", "unroll")}
        last, ys = lax.scan(step, list(values[n : n + k]), (list(values[n + k :]), picked), **options)
        return [*last, *ys]

    return [(x.value, x.dim) for x in work.run(jx.trace(anew, *map(jx.type_of, eqn.invars))[0], inputs)]


def _recurrence(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """h <- a h + b, element by element, in chunks (Blelloch 1990, Prefix Sums and Their Applications, section 1.4).

    Over a chunk, h becomes A h + B. Each rank finds A and B of its chunks, all gather them, and each runs its chunks
    again from the h with which they begin. Of chunks a rank has p; for each it sends A and B, 2 (c - 1) times an h.
    """
    parts = jx.scan_parts(eqn)
    n, k = len(parts.consts), len(parts.carry)
    consts, init, steps = inputs[:n], inputs[n : n + k], inputs[n + k :]
    if any(x.dim is not None for x in (*consts, *init)) or any(x.dim not in (None, 0) for x in steps):
        return None
    if work.overlap or work.rows > 1 or not all(jnp.issubdtype(x.value.dtype, jnp.inexact) for x in init):
        return None
    if (fits := work.size(parts.length) * work.ranks) != parts.length:
        raise ValueError(
            f"context={work.ranks} splits the {parts.length} positions of {place(eqn)}, whose states want a multiple "
            f"of {work.mode.parts(work.ranks)}; use {fits} positions, or tensor, fsdp or pipe for context"
        )
    body = jec.jaxpr_as_fun(jec.ClosedJaxpr(*jx.opened(parts.body)))
    options = {name: eqn.params[name] for name in ("reverse", "unroll") if name in eqn.params}

    def run(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        def step(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            out = body(*(x.value for x in consts), *carry, *xs)
            return out[:k], out[k:]

        return lax.scan(step, carry, xs, length=work.chunk(parts.length), **options)

    slots = work.mode.parts(1)
    each = [[jnp.split(work.part(x, 0), slots)[slot] for x in steps] for slot in range(slots)]
    start = [x.value for x in init]
    ones, zeros = (jax.tree.map(fill, start) for fill in (jnp.ones_like, jnp.zeros_like))
    found = [jax.jvp(lambda carry, xs=xs: run(carry, xs)[0], (zeros,), (ones,)) for xs in each]
    gathered = [
        [from_chunks(jnp.stack([one[side][i] for one in found]), AXIS, work.mode.order) for side in (0, 1)]
        for i in range(k)
    ]
    chunks = range(work.mode.parts(work.ranks))
    begins: list[list[jax.Array]] = [start]
    for chunk in reversed(chunks) if parts.reverse else chunks:
        begins.append([grown[chunk] + decay[chunk] * h for (grown, decay), h in zip(gathered, begins[-1], strict=True)])
    *begins, last = begins
    known = [jnp.stack(hs) for hs in zip(*(begins[::-1] if parts.reverse else begins), strict=True)]
    done = [run([h[at] for h in known], xs)[1] for at, xs in zip(work.chunks(), each, strict=True)]
    return [*((h, None) for h in last), *((jnp.concatenate(ys), Split(0)) for ys in zip(*done, strict=True))]


def diagonal(parts: jx.Scan) -> bool:
    """Whether every carry becomes a h + b, element by element, where a and b depend on no carry."""
    flat = jx.flatten(parts.body)
    n, k = len(parts.consts), len(parts.carry)
    of: dict[Any, int | None] = {v: i for i, v in enumerate(flat.invars[n : n + k])}  # None: of carries in another way
    carried = lambda atom: not jx.is_literal(atom) and atom in of
    for eqn in flat.eqns:
        mine = [v for v in eqn.invars if carried(v)]
        if not mine:
            continue
        from_ = {of[v] for v in mine}
        among = [carried(v) for v in eqn.invars]
        linear = primitives.of(eqn).elementwise and primitives.linear(eqn, among, affine=True)
        same = all(v.aval.shape == eqn.outvars[0].aval.shape and jnp.issubdtype(v.aval.dtype, jnp.inexact)
                   for v in (*mine, *eqn.outvars))  # fmt: skip
        of.update((v, from_.pop() if linear and same and len(from_) == 1 else None) for v in eqn.outvars)
    return all(not carried(v) or of[v] == i for i, v in enumerate(flat.outvars[:k]))
