"""Attention as a program spells it out: scores of queries and keys, a softmax over keys, a product with values.

It is known by its dataflow, in whatever spelling. Where scores are but scaled, and keys hidden by their positions
(`hidden.py`) and ids (causal, a window behind the query, segments), `jp.attention` takes its place, so that it can go
round a ring, by Ulysses, or by a fused kernel. Whatever else becomes of scores is replayed for each block of them
(`replayed.py`), where a sequence is split. What hinders both is named with its line.

    product of queries and keys --> times a number, mask --> softmax --> product with values
    [B, T, K, G, h] [B, S, K, h]    [B, K, G, T, S]                      [B, S, K, h]

Dims: B rows, T query positions, S key positions, K key heads, G query heads of each, h head_dim.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np

from ....program import jaxpr as jx
from ....program import primitives
from ....program.walk import CALLS, CUSTOM, called
from .fused import attention, biased_attention
from .hidden import HIDING, Constant, Hindered, Scope, Table, describe, number_of
from .replayed import bias_of, replayed
from .softmax import Dim, Names, Weights, chain_to, moved, moves, scaled_by_dims, weighs_by_exp, weights_of


@dataclass(frozen=True)
class SpelledAttention:
    """One attention that a program spells out.

    Attributes:
      last: the equation of its product with values, whose result `run` computes.
      arrays: the variables of queries, keys, values, and of segment ids or what a function of scores reads.
      run: of their values, the result of `last`.
      what: which keys count, for people.
      scores: the type of its scores, which are kept no more.
    """

    last: Any
    arrays: tuple[Any, ...]
    run: Callable[..., jax.Array]
    what: str
    scores: Any


@dataclass(frozen=True)
class Spelled:
    """A program, and the attention that it spelled out.

    Attributes:
      flat: the program with `jp.attention` in place of what is taken; itself where nothing is.
      replay: whether functions of scores are taken as well.
      biases: whether, in place of these, biases that all rows share are.
      taken: which keys count, by the line of each that is taken.
      scores: the type of its scores, by the same lines.
      not_taken: what hinders it, by the line of each other.
    """

    flat: jx.Flat
    replay: bool = False
    biases: bool = False
    taken: dict[str, str] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    not_taken: dict[str, str] = field(default_factory=dict)


def spelled(
    flat: jx.Flat, axes: Mapping[str, int], replay: bool = False, biases: bool = False, take: bool = True
) -> Spelled:
    """What a program spells out, found and, with `take`, taken; `axes` are those of the mesh that it may name. With
    `replay` also what is no `jp.attention`, since of its scores others are made; with `biases` what a kernel of whole
    sequences adds to them.
    """
    noted = Spelled(flat, replay, biases)
    scope = Scope(flat, _constants(flat))
    if not _note(scope, noted) or not take:
        return noted
    new, _ = jx.trace(_taking(scope), *map(jx.type_of, flat.invars), axes=dict(axes))
    return replace(noted, flat=replace(new, eqns=jx.live(new.eqns, new.outvars)))


def _constants(flat: jx.Flat) -> dict[Any, Any]:
    return dict(zip(flat.constvars, flat.consts, strict=True))


def _note(scope: Scope, noted: Spelled) -> bool:
    """Whether something is taken in a program and those that it holds; what, and what is not, is noted."""
    for one in _in(scope, noted):
        for atom in one.arrays:
            scope.bring(atom)
        scope.found[id(one.last)] = one
        noted.taken[line := jx.where(one.last)], noted.scores[line] = one.what, one.scores
    for eqn in scope.eqns:
        if (held := _held(eqn)) is not None:
            body, constants = held
            flat = jx.flatten(body if hasattr(body, "consts") else jec.ClosedJaxpr(body, ()))
            outer = dict(zip(flat.invars[:constants], eqn.invars, strict=False))
            inner = Scope(flat, _constants(flat), scope, outer)
            if _note(inner, noted):
                scope.found[id(eqn)] = inner
    return bool(scope.found)


def _held(eqn: Any) -> tuple[Any, int] | None:
    """The program that an equation holds and that may be rewritten, the body of a scan or what is rematerialised, and
    how many of its first inputs are operands as they are.
    """
    if eqn.primitive.name in (*CALLS, *CUSTOM) or (body := called(eqn)) is None:
        return None
    return body, len(jx.scan_parts(eqn).consts if eqn.primitive.name == "scan" else eqn.invars)


def _taking(scope: Scope) -> Callable[..., list[Any]]:
    """A program with `jp.attention` in place of what it spells out; what that leaves unread is dead."""

    def run(*values: Any) -> list[Any]:
        env = jx.Environment({**scope.consts, **dict(zip((*scope.extra, *scope.flat.invars), values, strict=True))})

        def results(eqn: Any, operands: Sequence[Any]) -> list[Any]:
            found = scope.found.get(id(eqn))
            if isinstance(found, SpelledAttention):
                return [found.run(*env.read(found.arrays))]
            if found is not None:
                return _rewritten(eqn, found, [*env.read(found.extra), *operands])
            return jx.bind(eqn, operands)

        for eqn in scope.eqns:
            env.compute(eqn, results)
        return env.read(scope.flat.outvars)

    return run


def _rewritten(eqn: Any, inner: Scope, values: Sequence[Any]) -> list[Any]:
    """The results of an equation that holds a program, anew, from its inputs and what that takes beside them."""
    run = _taking(inner)
    if eqn.primitive.name != "scan":
        closed, consts = jx.opened(jax.make_jaxpr(run)(*values))
        assert not consts, "what is rematerialised closes over no array"
        return jx.bind(eqn, values, jaxpr=closed)
    n = len(inner.extra)
    return jx.rerun(eqn, values[n:], lambda _, found, state: (state, run(*values[:n], *found)))[1]


def _in(scope: Scope, noted: Spelled) -> list[SpelledAttention]:
    """Every attention of a program, not of those that it holds."""
    found = []
    for eqn in scope.eqns:
        if eqn.primitive.name != "dot_general" or scaled_by_dims(eqn):
            continue
        for side in (0, 1):
            try:
                if (weights := weights_of(eqn.invars[side], scope)) is not None:
                    found.append(_attention(eqn, side, weights, scope, noted))
                elif weighs_by_exp(eqn.invars[side], scope):
                    raise Hindered(eqn, "weighs values by an exponential of scores in no known form of a softmax")
            except Hindered as why:
                noted.not_taken[jx.where(eqn)] = str(why)
    return found


@dataclass
class _Scores:
    """What becomes of scores, `dots` at first, on the way to their softmax: the names of their dims, and by what they
    are scaled.
    """

    names: Names
    scope: Scope
    dots: Any
    scale: float = 1.0
    hidden: Table | None = None  # which keys are, as far as that is known
    hiding: list[float] = field(default_factory=list)  # what is added to scores of hidden keys, or put in their place
    replayed: Hindered | None = None  # the first that is no part of `jp.attention`
    others: bool = False  # whether what is replayed may hide keys that are seen
    affine: bool = True  # whether a scale and a bias are all that becomes of them

    def pass_through(self, eqn: Any, operand: int) -> None:
        """Raises Hindered where an equation changes more than scores, one by one."""
        if moves(eqn):
            self.names = moved(eqn, self.names)
            return
        try:
            self._scaled_or_hidden(eqn, operand)
        except Hindered as why:
            if not primitives.of(eqn).elementwise:
                raise
            self.replayed = self.replayed or why
            others = [x for i, x in enumerate(eqn.invars) if i != operand and not jx.is_literal(x) and x.aval.shape]
            self.others = self.others or bool(others)
            added = eqn.primitive.name in ("add", "sub") and not jx.depends(self.scope.eqns, [self.dots]) & {*others}
            self.affine &= added
            if not added or max(self.hiding, default=0) > -math.inf:
                self.hidden, self.hiding = None, []  # a bias that is added leaves what is hidden without end

    def options(self, t: int, s: int, eqn: Any, *others: Hindered) -> tuple[bool, int | None, tuple[Any, ...]]:
        """`causal`, `window` and the segment ids of `jp.attention` for t queries and s keys. Raises Hindered."""
        for why in (self.replayed, *others):
            if why is not None:
                raise why
        if any(by > HIDING for by in self.hiding):
            raise Hindered(eqn, f"hides keys by {max(self.hiding):g}, which is above {HIDING:g}")
        if self.hidden is None:
            return False, None, ()
        (apart, alike), ids = self.hidden.values, self.hidden.ids
        if not self.hidden.known.all() or (ids and not apart.all()):
            raise Hindered(eqn, "hides keys by what is no function of positions and no ids of queries and keys")
        away = np.arange(1 - s, t)[~alike].tolist()
        if not away or away[-1] - away[0] >= len(away):
            raise Hindered(eqn, "hides keys between others that a query sees")
        least, most = (-math.inf if away[0] == 1 - s else away[0]), (math.inf if away[-1] == t - 1 else away[-1])
        if least not in (-math.inf, 0) or (most < math.inf and least != 0):
            raise Hindered(eqn, f"lets query i see keys from i - {most:g} to i - {least:g}")
        if (ids or least == 0) and t != s:
            raise Hindered(eqn, f"hides keys of {t} queries and {s} keys")
        return least == 0, None if away[-1] == t - 1 else away[-1] + 1, tuple(x.atom for x in ids)

    def causal(self, t: int, s: int) -> bool:
        """Whether there are as many keys as queries, and a query's weights are the same without all later keys."""
        if self.hidden is None or t != s:
            return False
        own, most = self.hidden.values.shape[1] // 2, max(self.hiding)
        exactly = not self.others and self.hidden.known.all() and not self.hidden.values[1, own]
        later = (self.hidden.values & self.hidden.known)[:, :own].all()
        return bool(later and most <= HIDING and (exactly or most == -math.inf))

    def _scaled_or_hidden(self, eqn: Any, operand: int) -> None:
        name, other = eqn.primitive.name, eqn.invars[1 - operand] if len(eqn.invars) == 2 else None
        if name in ("mul", "div"):
            by = number_of(self._of(other, eqn), eqn)
            by = by if name == "mul" else 1 / by
            if by <= 0:
                raise Hindered(eqn, f"scales scores by {by:g}")
            self.scale, self.hiding = self.scale * float(by), [x * by for x in self.hiding]
        elif name in ("add", "sub"):
            match self._of(other, eqn):
                case Constant(_):  # a softmax takes no note of it
                    pass
                case Table(values, known, ids) if known.all():
                    values = values.astype(float) * (1 if name == "add" else -1)
                    hidden = values < values.max()
                    by = np.max(values - values.max(), where=hidden, initial=-math.inf)
                    if by > HIDING:
                        raise Hindered(eqn, "adds a bias to scores")
                    self._hide(Table(hidden, known, ids), by, eqn)
                case _:
                    raise Hindered(eqn, "adds a bias to scores")
        elif name == "select_n":
            match self._of(eqn.invars[0], eqn):
                case Table(values, known, ids):
                    by, hidden, own = self.put(eqn, operand), values != operand - 1, values.shape[1] // 2
                    # Of what is added, no query's weights may go to hidden keys alone.
                    self.affine &= bool(by <= HIDING and known[1, own] and not hidden[1, own])
                    self._hide(Table(hidden, known, ids), by, eqn)
                case _:
                    raise Hindered(eqn, "chooses scores by what is no function of positions or ids")
        else:
            raise Hindered(eqn, f"computes {name} of scores")

    def put(self, eqn: Any, operand: int) -> float:
        """What a choice between an operand and a number takes for that. Raises Hindered."""
        return number_of(self._of(eqn.invars[3 - operand], eqn), eqn)

    def _hide(self, keys: Table, by: float, eqn: Any) -> None:
        if self.hidden is not None:
            before, ids = self.hidden, self.hidden.ids | keys.ids
            if len(ids) > 1:
                raise Hindered(eqn, "compares two kinds of ids")
            values = (before.values & before.known) | (keys.values & keys.known)
            keys = Table(values, values | (before.known & keys.known), ids)
        self.hidden, self.hiding = keys, [*self.hiding, by]

    def _of(self, atom: Any, eqn: Any) -> Any:
        label = lambda dims: (dims[0].name if dims[0].name in ("t", "s") and len(dims) == 1 else "b") if dims else None
        labels = tuple(map(label, self.names))
        return describe(atom, labels if not jx.is_literal(atom) and atom.aval.shape else (), self.scope, eqn)


def _numbers(eqn: Any) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """The dims that each operand of a product sums, and those that both share, in their order."""
    summed, shared = ([[*map(int, dims)] for dims in pair] for pair in eqn.params["dimension_numbers"])
    return (summed[0], summed[1]), (shared[0], shared[1])


def _named(product: Any, at: int) -> tuple[Names, Names]:
    """The names of the dims of queries and of keys, which are operand `at` of their product. Raises Hindered.

    Of what both share, rows come before heads.
    """
    summed, shared = _numbers(product)
    query, key = (product.invars[i].aval.shape for i in (1 - at, at))
    free = lambda i, shape: [d for d, n in enumerate(shape) if n != 1 and d not in summed[i] + shared[i]]
    of_q, of_k = free(1 - at, query), free(at, key)
    if len(summed[0]) != 1 or len(of_k) != 1:
        raise Hindered(product, "has keys of more or fewer dims than rows, positions, heads and features")
    alike = of_q if len(of_q) == 1 else [d for d in of_q if query[d] == key[of_k[0]]]
    if len(shared[0]) > 2:  # of dims of one element, as `[None]` makes under vmap, there may be any number
        wide = [n for n, d in enumerate(shared[1 - at]) if query[d] != 1]
        shared = tuple([dims[n] for n in wide] for dims in shared)
    if len(alike) != 1 or len(of_q) > 2 or len(shared[0]) > 2:
        raise Hindered(
            product, f"has queries {list(query)} and keys {list(key)}, whose positions and heads do not show"
        )
    order = sorted(range(len(shared[0])), key=lambda n: shared[1 - at][n])
    name: list[dict[int, Any]] = [{}, {}]
    for i, positions in ((1 - at, {d: ("g", d) for d in of_q} | {alike[0]: "t"}), (at, {of_k[0]: "s"})):
        name[i] = positions | {summed[i][0]: "h"} | {shared[i][n]: ("b", rank) for rank, n in enumerate(order)}
    names = lambda i, shape: tuple((Dim(name[i][d], n),) if n != 1 else () for d, n in enumerate(shape))
    return names(1 - at, query), names(at, key)


def _of_product(eqn: Any, operands: Sequence[Names]) -> Names:
    """The names of a product's dims, from those of its operands."""
    summed, shared = _numbers(eqn)
    rest = lambda i: [x for d, x in enumerate(operands[i]) if d not in summed[i] + shared[i]]
    return (*(operands[0][d] for d in shared[0]), *rest(0), *rest(1))


def _attention(last: Any, side: int, weights: Weights, scope: Scope, noted: Spelled) -> SpelledAttention:
    """The attention that ends in a product, of weights that are operand `side` and of values. Raises Hindered."""
    if (behind := chain_to(weights.scores, scope)) is None:
        raise Hindered(last, "weighs values by a softmax of what is no product of two")
    product, chain = behind
    at = 0 if _is_keys(product, chain, weights) else 1
    of_q, of_k = _named(product, at)
    of_dots = _of_product(product, (of_k, of_q) if at == 0 else (of_q, of_k))
    scores = _Scores(of_dots, scope, product.outvars[0])
    for eqn, operand in chain:
        scores.pass_through(eqn, operand)
    of_p, made = scores.names, jx.depends(scope.eqns, [weights.result]) if weights.after else set()
    beside = [Hindered(last, "has a softmax of more than its keys")] if weights.sinks else []
    for eqn, operand in weights.after:
        if moves(eqn):
            of_p = moved(eqn, of_p)
        else:
            others = [x for i, x in enumerate(eqn.invars) if i != operand and not jx.is_literal(x)]
            if made.intersection(others) or (eqn.primitive.name, operand) in (("div", 1), ("select_n", 0)):
                raise Hindered(eqn, f"computes {eqn.primitive.name} of weights, which is not linear")
            if eqn.primitive.name == "select_n" and replace(scores, names=of_p).put(eqn, operand) != 0:
                raise Hindered(eqn, "takes other numbers than 0 for some weights")
            if scaled_by_dims(eqn):
                _, shared = _numbers(eqn)
                rest = [dims for d, dims in enumerate(of_p) if d not in shared[operand]]
                of_p = (*(of_p[d] for d in shared[operand]), *rest)
                if _is_one(eqn.invars[1 - operand], scope, eqn):
                    continue
            beside.append(Hindered(eqn, f"computes {eqn.primitive.name} of weights, as dropout does"))

    query, key, value = product.invars[1 - at], product.invars[at], last.invars[1 - side]
    summed, shared = _numbers(last)
    there = dict(zip((*shared[1 - side], *summed[1 - side]), (*shared[side], *summed[side]), strict=True))
    of_v: Names = tuple(
        (of_p[there[d]] if d in there else (Dim("h", n),)) if n != 1 else () for d, n in enumerate(value.aval.shape)
    )
    wanted = [*itertools.chain(*_of_product(last, (of_p, of_v) if side == 0 else (of_v, of_p)))]
    own = {*itertools.chain(*of_q)}
    over = [dim.name for dim in scores.names[weights.dim]]
    if over != ["s"] or [dim.name for d in summed[side] for dim in of_p[d]] != ["s"] or {*of_v} != {*of_k}:
        raise Hindered(last, "weighs values that do not go with the keys, head by head")
    if {*wanted} != own or len(wanted) != len(own):
        raise Hindered(last, "has a result with other dims than its queries")
    sizes = {dim.name: dim.size for dim in (*own, *itertools.chain(*of_k))}
    groups = [name for name in sizes if name[0] == "g"]
    rows, heads = ([name for name in sizes if name == ("b", n)] for n in range(2))
    result = last.outvars[0].aval
    try:
        causal, window, read = scores.options(sizes["t"], sizes["s"], last, *beside)
        which = [*["causal"] * causal, *[f"window={window}"] * bool(window), *["segments"] * bool(read)]
        options = {"causal": causal, "window": window, "scale": scores.scale}

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
            every = [jnp.broadcast_to(x.reshape(-1, sizes["t"]), q.shape[:2]) for x in ids]
            return attention(q, k, v, segment_ids=next(iter(every), None), **options)

    except Hindered:
        biased = noted.biases and scores.replayed and scores.affine and not beside and sizes["t"] == sizes["s"]
        if not (noted.replay or biased):
            raise
        order = {name: sizes[name] for name in (*rows, *heads, *groups, "t", "s")}
        ends = (product.outvars[0], of_dots), (weights.scores, scores.names)
        after = (
            ((weights.result, scores.names), (last.invars[side], of_p)) if len(beside) > bool(weights.sinks) else None
        )
        causal = scores.causal(sizes["t"], sizes["s"])
        if biased:
            read, bias = bias_of(ends, order, scope, last)
            among = functools.partial(biased_attention, causal=causal, scale=scores.scale)
            attend, what = (lambda q, k, v, *read: among(q, k, v, bias(q, k, *read))), "with a bias"
        else:
            read, attend, what = replayed(ends, after, weights.sinks, order, scope, last, causal)
        which = [*["causal"] * causal, what]

    def laid(x: jax.Array, names: Names, *order: Sequence[Any]) -> jax.Array:
        """[B, positions, heads, h]: dims of these names, in each of the four."""
        at = {dims[0].name: d for d, dims in enumerate(names) if dims}
        flat = [at[name] for dims in order for name in dims]
        rest = [d for d in range(x.ndim) if d not in flat]
        return jnp.transpose(x, (*rest, *flat)).reshape([math.prod(sizes[name] for name in dims) for dims in order])

    def run(query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array) -> jax.Array:
        v = laid(value, of_v, rows, ["s"], heads, ["h"])
        q = laid(query, of_q, rows, ["t"], heads + groups, ["h"]).astype(v.dtype)
        out = attend(q, laid(key, of_k, rows, ["s"], heads, ["h"]).astype(v.dtype), v, *more)
        mine = [*rows, "t", *heads, *groups, "h"]
        out = jnp.transpose(out.reshape([sizes[x] for x in mine]), [mine.index(dim.name) for dim in wanted])
        return out.reshape(result.shape).astype(result.dtype)

    return SpelledAttention(last, (query, key, value, *read), run, ", ".join(which) or "all keys", weights.scores.aval)


def _is_one(atom: Any, scope: Scope, reader: Any) -> bool:
    """Whether all numbers of an array are 1, as those of a mask of heads that nobody gave."""
    try:
        return number_of(describe(atom, tuple("b" for _ in atom.aval.shape), scope, reader), reader) == 1
    except Hindered:
        return False


def _is_keys(product: Any, chain: Sequence[tuple[Any, int]], weights: Weights) -> bool:
    """Whether the first operand of a product is the keys: whether the softmax is over a dim of it. Raises Hindered."""
    mark = lambda i: tuple((Dim(i, n),) if n != 1 else () for n in product.invars[i].aval.shape)
    names = _of_product(product, (mark(0), mark(1)))
    for eqn, _ in chain:
        names = moved(eqn, names) if moves(eqn) else names
    return [dim.name for dim in names[weights.dim]] == [0]
