"""A scan over layers that has not run yet, so that another may run beside it, layer by layer.

Compilers schedule the body of one loop at a time: only what stands in one body is computed while a collective of the
other loop is under way. XLA's estimates do not know what an all-to-all or a kernel takes (jax 0.10.2), and two equal
layers side by side would both compute and then both wait. So they take turns:

    other     C0          C1            C2           C0: what needs no all-to-all, C1: what needs the results of the
    one             C0            C1           C2    first ones, C2: what needs those that need these
    sent         other's   one's    other's  one's   each while the next computes

Of one loop that gathers and reduces for other iterations (`InFlight`), each of these stands between two of its own
collectives, where most is multiplied: XLA starts them where its last collective ends, with nothing left to hide them.

    a mixture    C0  tokens to experts  C1  tokens back  C2          forwards, whose experts are C1
    sent                                gather                       its experts' weights of the next layer

Of copies from the host XLA has two under way at most and takes them for short: it starts all at once, and kernels wait.
So those for the next layer start one beside each product, the largest beside the largest.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program import jaxpr as jx
from ..program.buffers import HOST
from ..program.collectives import KINDS, PRIMITIVES, axes_of
from ..program.primitives import PRODUCTS

_EXCHANGES = KINDS["all-to-all"]
_AHEAD = ("reduce-scatter", "all-gather", "all-reduce")


@dataclass(frozen=True)
class LayerLoop:
    """The arguments of a `lax.scan`, whose `body(carry, number, x)` is told the iteration's number besides, and
    `result(carry, ys)`: what its caller wants of what it returns. `ahead`: it gathers or reduces for other iterations;
    `copies`: it brings weights from the host for them.
    """

    body: Callable[[Any, Any, Any], tuple[Any, Any]]
    init: Any
    xs: Any
    length: int
    reverse: bool
    result: Callable[[Any, Any], Any]
    ahead: bool = False
    copies: bool = False

    def then(self, fun: Callable[[Any], Any]) -> "LayerLoop":
        """This loop with `fun` applied to its result."""
        return dataclasses.replace(self, result=lambda carry, ys: fun(self.result(carry, ys)))

    def run(self) -> Any:
        """The result."""
        body = _in_windows(self.body) if self.ahead else _spread(self.body) if self.copies else self.body
        return self.result(*_numbered(body, self.init, self.xs, self.length, self.reverse))

    def beside(self, other: "LayerLoop") -> tuple[Any, Any]:
        """The results of two independent loops, run as one; the other's all-to-alls come first."""
        assert self.length == other.length
        turned = self.reverse != other.reverse
        # Where they are: a reversed copy of what is scanned would be as large as all its layers.
        at = lambda xs, number: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), xs)

        def body(carry: Any, number: Any, mine: Any) -> Any:
            its = other.length - 1 - number if turned else number
            (first, out), (second, others) = _in_turn(
                _Iteration(self.body, carry[0], number, mine), _Iteration(other.body, carry[1], its, at(other.xs, its))
            )
            return (first, second), (out, others)

        init = self.init, other.init
        (first, second), (out, others) = _numbered(body, init, self.xs, self.length, self.reverse)
        others = jax.tree.map(lambda y: jnp.flip(y, 0), others) if turned else others
        return self.result(first, out), other.result(second, others)


def _numbered(body: Callable[[Any, Any, Any], Any], init: Any, xs: Any, length: int, reverse: bool) -> tuple[Any, Any]:
    """`lax.scan` of `body(carry, number, x)`. The number is read from an array: if it were counted, XLA's collective
    pipeliner would see that iterations write layer after layer, and move what is meant for this one to the next.
    """
    return lax.scan(lambda carry, x: body(carry, *x), init, (jnp.arange(length), xs), length=length, reverse=reverse)


class _Iteration:
    """One iteration of a loop, which computes what it can before it needs the result of the next all-to-all."""

    def __init__(self, body: Callable[[Any, Any, Any], Any], state: Any, number: Any, x: Any, remats: Any = False):
        flat, out = jx.trace(body, state, number, x, remats=remats)
        self._outs, self._tree = flat.outvars, jax.tree.structure(out)
        self._todo = jx.live(flat.eqns, flat.outvars)
        self.env = jx.Environment.of(flat, jax.tree.leaves((state, number, x)))
        self.arrived = list(flat.invars[: len(jax.tree.leaves(state))])
        self._sends: list[Any] = []
        self._exchanges: Callable[[Any], bool] = lambda eqn: eqn.primitive.name in _EXCHANGES

    def windows(self) -> list[list[list[Any]]]:
        """Takes out the collectives that serve other iterations: those of one kind and axes together, for each window
        before, between and behind all its other collectives, by which it then computes.

        The largest are in the window in which most is multiplied, and no two in one as long as another has products:
        XLA's scheduler has one collective under way at a time (jax 0.10.2), of two the second would wait. All-reduces
        come last: they sum what was scattered. Where the body sends nothing else and has all three kinds, each gets a
        third of the multiply-adds to itself; left to XLA, all but the last would wait.
        """
        level, exchanges, ahead = self._levels()
        if cut := not exchanges and len({kind for _, kind, _ in ahead}) == len(_AHEAD):
            level, exchanges, ahead = self._levels(self._cuts(len(_AHEAD)))
        taken = {id(eqn) for eqns in ahead.values() for eqn in eqns}
        self._todo, self.arrived = [eqn for eqn in self._todo if id(eqn) not in taken], []
        self._exchanges = lambda eqn: id(eqn) in exchanges
        windows: list[list[list[Any]]] = [[] for _ in range(max(level.values(), default=0) + 1)]
        products = _products([e for e in self._todo if not level.keys().isdisjoint(e.outvars)], level, exchanges)
        size = lambda eqns: sum(jx.nbytes(v) for e in eqns for v in (*e.invars, *e.outvars))
        rank = lambda at: (products[at] > 0 and not windows[at], products[at], at)
        for (last, kind, _), eqns in sorted(ahead.items(), key=lambda one: (one[0][0], -size(one[1]))):
            first = max((at for at, those in enumerate(windows) if those), default=0) if last else 0
            at = max(range(first, len(windows)), key=rank)
            windows[min(_AHEAD.index(kind), len(windows) - 1) if cut else at].append(eqns)
        return windows

    def _levels(self, cuts: Container[int] = ()) -> tuple[dict[Any, int], dict[int, int], dict[Any, list[Any]]]:
        """Three tables: how many collectives of this iteration (or equations of `cuts`) each of its values is behind;
        how many each of these is behind itself; the collectives for other iterations, by whether they come last, kind
        and axes.
        """
        inputs = lambda eqn: [v for v in eqn.invars if not jx.is_literal(v)]
        needed = self._needed()
        level: dict[Any, int] = {}
        sent: set[Any] = set()  # by what is for other iterations, and what follows from it
        ahead: dict[Any, list[Any]] = {}
        exchanges: dict[int, int] = {}
        for eqn in self._todo:
            at = max((level.get(v, 0) for v in inputs(eqn)), default=0)
            kind, follows = PRIMITIVES.get(eqn.primitive.name), not sent.isdisjoint(inputs(eqn))
            if (follows and kind in _AHEAD) or (not at and kind in _AHEAD and needed.isdisjoint(eqn.outvars)):
                ahead.setdefault((follows or kind == _AHEAD[-1], kind, axes_of(eqn)), []).append(eqn)
                sent.update(eqn.outvars)
            elif follows:
                sent.update(eqn.outvars)
            else:
                if id(eqn) in cuts or jx.communicates([eqn], PRIMITIVES):
                    exchanges[id(eqn)] = at
                    at += 1
                level.update(dict.fromkeys(eqn.outvars, at))
        return level, exchanges, ahead

    def _needed(self) -> set[Any]:
        """What is needed for a product."""
        needed: set[Any] = set()
        for eqn in reversed(self._todo):
            if eqn.primitive.name in PRODUCTS or not needed.isdisjoint(eqn.outvars):
                needed.update(v for v in eqn.invars if not jx.is_literal(v))
        return needed

    def _cuts(self, windows: int) -> set[int]:
        """Where so many windows of about as many multiply-adds begin: at the equations that read the last product of
        the window before, if later products are made of it.
        """
        flops = [sum(count for count, _ in jx.matmuls([eqn]).values()) for eqn in self._todo]
        done = list(itertools.accumulate(flops))
        after, cuts = self._needed(), set[int]()
        for k in range(1, windows):
            ends = [at for at, eqn in enumerate(self._todo) if flops[at] and not after.isdisjoint(eqn.outvars)]
            if ends:
                best = min(ends, key=lambda at, part=k / windows: abs(done[at] - part * done[-1]))
                made, rest = self._todo[best].outvars, self._todo[best + 1 :]
                cuts.update(id(eqn) for eqn in rest if any(v in made for v in eqn.invars))
                after &= jx.depends(rest, made)
        return cuts

    @property
    def unfinished(self) -> bool:
        """Whether there is something left to compute or to send."""
        return bool(self._todo or self._sends)

    @property
    def leaving(self) -> list[Any]:
        """The operands of the all-to-alls that can start."""
        return [v for eqn in self._sends for v in eqn.invars if not jx.is_literal(v)]

    def compute(self) -> None:
        """All that needs no all-to-all but those that have arrived."""
        later = []
        for eqn in self._todo:
            if not all(jx.is_literal(v) or v in self.env for v in eqn.invars):
                later.append(eqn)
            elif self._exchanges(eqn):
                self._sends.append(eqn)
            else:
                self.env.compute(eqn)
        self._todo = later

    def send_ahead(self, eqns: Sequence[Any]) -> None:
        """Runs some collectives, after the exchanges that have arrived and before those that can start."""
        hold(self.env, [v for eqn in eqns for v in eqn.invars], self.env, self.arrived)
        for eqn in eqns:
            self.env.compute(eqn)
        hold(self.env, self.leaving, self.env, [v for eqn in eqns for v in eqn.outvars])

    def send(self) -> None:
        """Runs the all-to-alls that can start."""
        for eqn in self._sends:
            self.env.compute(eqn)
        self.arrived = [v for eqn in self._sends for v in eqn.outvars]
        self._sends = []

    def compute_beside_copies(self) -> None:
        """All of it, copies from the host that nothing here reads spread over its products."""
        copying = [
            eqn for eqn in self._todo if any(v.aval.memory_space == HOST for v in eqn.invars if not jx.is_literal(v))
        ]
        read = {v for eqn in self._todo if eqn not in copying for v in eqn.invars if not jx.is_literal(v)}
        ends = [v for eqn in copying for v in eqn.outvars if v.aval.memory_space != HOST and v not in read]
        ends = sorted(ends, key=jx.nbytes, reverse=True)
        chains = [(jx.needed(copying, [v]), jx.nbytes(v)) for v in ends]
        scalars = lambda eqns: [v for one in eqns for v in one.invars if not jx.is_literal(v) and not v.aval.shape]
        numbers = jx.needed(self._todo, [v for eqns, _ in chains for v in scalars(eqns)])
        for eqn in numbers:
            self.env.compute(eqn)
        taken = {id(eqn) for eqns in (numbers, *(eqns for eqns, _ in chains)) for eqn in eqns}
        rest = [eqn for eqn in self._todo if id(eqn) not in taken]
        flops = [sum(count for count, _ in jx.matmuls([eqn]).values()) for eqn in rest]
        left, total = sum(flops), sum(map(jx.nbytes, ends))
        room = 0.0
        for eqn, count in zip(rest, flops, strict=True):
            left -= count
            room += 1.5 * total * count / max(1, sum(flops))  # a half more, so that none is left for the last product
            fitting = [chain for chain in chains if chain[1] <= room][:1] if left else chains
            for chain in fitting if count else ():
                hold(self.env, scalars(chain[0]), self.env, [v for v in eqn.invars if not jx.is_literal(v)])
                for one in chain[0]:
                    self.env.compute(one)
                chains.remove(chain)
                room -= chain[1]
            self.env.compute(eqn)
        for one in (one for eqns, _ in chains for one in eqns):
            self.env.compute(one)

    def result(self) -> Any:
        """What the body returns."""
        return jax.tree.unflatten(self._tree, self.env.read(self._outs))


def _products(eqns: Sequence[Any], level: Mapping[Any, int], exchanges: Mapping[int, int]) -> collections.Counter[int]:
    """Multiply-adds by window: of a product in each from its operands' to that at whose end it is sent on."""
    products: collections.Counter[int] = collections.Counter()
    last: dict[Any, int] = {}
    for eqn in reversed(eqns):
        at = exchanges.get(id(eqn), min((last[v] for v in eqn.outvars if v in last), default=None))
        if at is not None:
            last.update((v, min(at, last.get(v, at))) for v in eqn.invars if not jx.is_literal(v))
        if (size := sum(count for count, _ in jx.matmuls([eqn]).values())) and id(eqn) not in exchanges:
            first = max(level[v] for v in eqn.outvars)
            products.update(dict.fromkeys(range(first, max(first, at or 0) + 1), size))
    return products


def _in_windows(body: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """A body whose collectives for other iterations run each between two of its own."""

    def run(state: Any, number: Any, x: Any) -> Any:
        # What is computed again in a backward's own loop is not what its forward has computed: XLA cannot merge them.
        one = _Iteration(body, state, number, x, remats=lambda eqn: not eqn.params["prevent_cse"])
        for window in one.windows():
            one.compute()
            for eqns in window:
                one.send_ahead(eqns)
                one.compute()  # what is between a reduce-scatter and an all-reduce of its results
            one.send()
        one.compute()
        return one.result()

    return run


def _spread(body: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """A body whose copies from the host, for other iterations, start one after the other."""

    def run(state: Any, number: Any, x: Any) -> Any:
        one = _Iteration(body, state, number, x)
        one.compute_beside_copies()
        return one.result()

    return run


def _in_turn(one: _Iteration, other: _Iteration) -> tuple[Any, Any]:
    """What both return. Of what has arrived nothing is computed before the other's all-to-alls can start."""
    computing, waiting = one, other
    waiting.compute()
    while one.unfinished or other.unfinished:
        hold(computing.env, computing.arrived, waiting.env, waiting.leaving)
        waiting.send()
        computing.compute()
        computing, waiting = waiting, computing
    return one.result(), other.result()


def hold(one: dict[Any, Any], held: Iterable[Any], other: dict[Any, Any], until: Iterable[Any]) -> None:
    """Holds variables of one environment until those of another are there."""
    held, until = list(held), list(until)
    if held and until:
        here, there = lax.optimization_barrier(([one[v] for v in held], [other[v] for v in until]))
        one.update(zip(held, here, strict=True))
        other.update(zip(until, there, strict=True))
