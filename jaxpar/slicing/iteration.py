"""One iteration of a loop over layers, whose equations run in another order than the program's (`loop.py`)."""

import collections
import itertools
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from ..program import jaxpr as jx
from ..program.buffers import HOST
from ..program.collectives import PRIMITIVES, axes_of
from ..program.primitives import PRODUCTS

# Exchanges of activations: all-to-alls over these axes, and other kinds over `tensor`. Over the other axes, which shard
# parameters too, these kinds gather weights and reduce gradients.
_EXCHANGE_AXES = ("tensor", "context", "expert")
_TENSOR_KINDS = ("all-gather", "all-reduce", "reduce-scatter")
_AHEAD_KINDS = ("reduce-scatter", "all-gather", "all-reduce")  # kinds of collectives for other iterations
_AHEAD_PRIMITIVES = [name for name, kind in PRIMITIVES.items() if kind in _AHEAD_KINDS]

Body = Callable[[Any, Any, Any], tuple[Any, Any]]  # `body(carry, iteration, x)` returns the carry and a y


class Iteration:
    """One iteration of a loop as equations, run in the order that its caller chooses.

    `compute` runs everything that does not wait for an exchange, and `send` runs the exchanges that can start. An
    exchange is an all-to-all or, after `windows`, any collective of this iteration.

    Attributes:
      env: the values of the variables that are computed.
      arrived: the variables that the last exchanges, or the previous iteration, returned.
    """

    def __init__(self, body: Body, carry: Any, iteration: Any, x: Any, remats: Any = False):
        flat, results = jx.trace(body, carry, iteration, x, remats=remats)
        self._outvars, self._tree = flat.outvars, jax.tree.structure(results)
        self._todo = jx.live(flat.eqns, flat.outvars)
        self.env = jx.Environment.of(flat, jax.tree.leaves((carry, iteration, x)))
        # Values from the iteration before have arrived already.
        self.arrived = list(flat.invars[: len(jax.tree.leaves(carry))])
        self._ready_exchanges: list[Any] = []
        self._is_exchange: Callable[[Any], bool] = exchanges_activations

    # ------------------------------------------------------------------------------------------------------------------
    # Collectives for other iterations.

    def windows(self) -> list[list[list[Any]]]:
        """Remove the collectives for other iterations, and return them by the window in which they should run.

        A window lies before, between or after the iteration's own collectives (exchanges), at which `compute` now
        stops. Collectives of one kind and axes stay together.

        XLA's scheduler has one collective under way at a time (jax 0.10.2); the second of two in one window would wait.
        So the largest collectives get the window with most products, and a window gets a second one only if no other
        has products. All-reduces come last, since they sum what was scattered. A body with all three kinds and no
        exchanges is cut into three windows of equal multiply-adds; left to XLA, all but the last kind would wait.
        """
        # 1. Find the windows.
        level, exchanges, ahead = self._levels()
        if is_cut := not exchanges and len({kind for _, kind, _ in ahead}) == len(_AHEAD_KINDS):
            level, exchanges, ahead = self._levels(self._cuts(len(_AHEAD_KINDS)))
        ahead_ids = {id(eqn) for eqns in ahead.values() for eqn in eqns}
        self._todo, self.arrived = [eqn for eqn in self._todo if id(eqn) not in ahead_ids], []
        self._is_exchange = lambda eqn: id(eqn) in exchanges
        windows: list[list[list[Any]]] = [[] for _ in range(max(level.values(), default=0) + 1)]

        # 2. Place the collectives: turn after turn, and the largest of a turn first.
        flops = _flops_by_window([e for e in self._todo if not level.keys().isdisjoint(e.outvars)], level, exchanges)
        size = lambda eqns: sum(jx.nbytes(v) for e in eqns for v in (*e.invars, *e.outvars))
        # Empty windows with products come first, then windows with more of them, then later ones.
        preference = lambda i: (flops[i] > 0 and not windows[i], flops[i], i)
        for (turn, kind, _), eqns in sorted(ahead.items(), key=lambda item: (item[0][0], -size(item[1]))):
            first = max((i for i, window in enumerate(windows) if window), default=0) if turn else 0
            best = max(range(first, len(windows)), key=preference)
            windows[min(_AHEAD_KINDS.index(kind), len(windows) - 1) if is_cut else best].append(eqns)
        return windows

    def _levels(self, cuts: Container[int] = ()) -> tuple[dict[Any, int], dict[int, int], dict[Any, list[Any]]]:
        """Sort the equations by the exchanges that they wait for.

        Args:
          cuts: equations, by id, that count as exchanges too.

        Returns:
          The level of each value of this iteration, which is the number of exchanges that it waits for; the level at
          which each exchange, by id, starts; and the collectives for other iterations, by turn, kind and axes. The
          collectives of a turn may need results of earlier turns.
        """
        inputs = lambda eqn: [v for v in eqn.invars if not jx.is_literal(v)]
        needed = self._needed_for_products()
        level: dict[Any, int] = {}
        # The turn after the collectives for other iterations on which a value depends.
        next_turn: dict[Any, int] = {}
        ahead: dict[Any, list[Any]] = {}
        exchanges: dict[int, int] = {}
        for eqn in self._todo:
            eqn_level = max((level.get(v, 0) for v in inputs(eqn)), default=0)
            kind = PRIMITIVES.get(eqn.primitive.name)
            turn = max((next_turn.get(v, 0) for v in inputs(eqn)), default=0)
            # A collective serves another iteration if it waits for no exchange and no product here needs it.
            is_unneeded = not eqn_level and kind in _AHEAD_KINDS and needed.isdisjoint(eqn.outvars)
            # So does a collective of such a collective's result: an all-reduce behind a reduce-scatter.
            if (turn and kind in _AHEAD_KINDS) or is_unneeded:
                turn = max(turn, int(kind == _AHEAD_KINDS[-1]))
                ahead.setdefault((turn, kind, axes_of(eqn)), []).append(eqn)
                next_turn.update(dict.fromkeys(eqn.outvars, turn + 1))
            elif turn:
                next_turn.update(dict.fromkeys(eqn.outvars, turn))
            else:
                if id(eqn) in cuts or jx.communicates([eqn], PRIMITIVES):
                    exchanges[id(eqn)] = eqn_level
                    eqn_level += 1
                level.update(dict.fromkeys(eqn.outvars, eqn_level))
        return level, exchanges, ahead

    def _needed_for_products(self) -> set[Any]:
        """Return the variables on which a product depends."""
        needed: set[Any] = set()
        for eqn in reversed(self._todo):
            if eqn.primitive.name in PRODUCTS or not needed.isdisjoint(eqn.outvars):
                needed.update(v for v in eqn.invars if not jx.is_literal(v))
        return needed

    def _cuts(self, num_windows: int) -> set[int]:
        """Return, by id, the equations at which windows of about equal multiply-adds begin.

        A window ends with a product on which later products depend; the next one begins where its result is read.
        """
        flops = [_flops([eqn]) for eqn in self._todo]
        flops_so_far = list(itertools.accumulate(flops))
        candidates, cuts = self._needed_for_products(), set[int]()
        for k in range(1, num_windows):
            ends = [i for i, eqn in enumerate(self._todo) if flops[i] and not candidates.isdisjoint(eqn.outvars)]
            if ends:
                share = k / num_windows
                best = min(ends, key=lambda i, share=share: abs(flops_so_far[i] - share * flops_so_far[-1]))
                results, remaining = self._todo[best].outvars, self._todo[best + 1 :]
                cuts.update(id(eqn) for eqn in remaining if any(v in results for v in eqn.invars))
                candidates &= jx.depends(remaining, results)  # the next cut must lie behind this one
        return cuts

    # ------------------------------------------------------------------------------------------------------------------
    # Running.

    @property
    def is_unfinished(self) -> bool:
        """Whether anything remains to be computed or sent."""
        return bool(self._todo or self._ready_exchanges)

    @property
    def leaving(self) -> list[Any]:
        """The operands of the exchanges that can start."""
        return [v for eqn in self._ready_exchanges for v in eqn.invars if not jx.is_literal(v)]

    def compute(self, only: Collection[int] | None = None) -> None:
        """Run the equations that need no exchange except those that have arrived.

        Args:
          only: the equations, by id, that may run; by default all.
        """
        blocked = []
        # In program order, so that one pass finds all that can run.
        for eqn in self._todo:
            if not self.env.keys() >= set(_inputs(eqn)) or (only is not None and id(eqn) not in only):
                blocked.append(eqn)
            elif self._is_exchange(eqn):
                self._ready_exchanges.append(eqn)
            else:
                self.env.compute(eqn)
        self._todo = blocked

    def send_ahead(self, eqns: Sequence[Any]) -> None:
        """Run collectives for other iterations, after the exchanges that arrived and before those that can start."""
        hold(self.env, [v for eqn in eqns for v in eqn.invars], self.env, self.arrived)
        for eqn in eqns:
            self.env.compute(eqn)
        hold(self.env, self.leaving, self.env, [v for eqn in eqns for v in eqn.outvars])

    def send(self) -> None:
        """Run the exchanges that can start."""
        for eqn in self._ready_exchanges:
            self.env.compute(eqn)
        self.arrived = [v for eqn in self._ready_exchanges for v in eqn.outvars]
        self._ready_exchanges = []

    # ------------------------------------------------------------------------------------------------------------------
    # Exchanges that overlap with other equations.

    def send_beside(self, other: "Iteration", eqns: Sequence[Any]) -> None:
        """Run a chain of exchanges while other equations run.

        The chain has the exchanges that can start, and those behind them without a product in between: for example a
        reduce-scatter, a norm, and an all-gather. Each exchange of the chain overlaps with a share of the products.

        Args:
          other: the iteration of `eqns`; it may be this one.
          eqns: the equations that run meanwhile.
        """
        *shares, last_share = _shares(eqns, self._chain_length())
        for share in shares:
            self.send()
            hold(self.env, self.arrived, other.env, other.run(share))
            self.compute({id(eqn) for eqn in self._next_in_chain()})
        self.send()
        results = other.run(last_share)
        # Another iteration's caller delays what has arrived until that iteration's next exchanges.
        if other is self:
            hold(self.env, self.arrived, self.env, results)

    def fillers(self) -> list[Any]:
        """Return the equations that can run and that no exchange needs; none if they have no product."""
        needed = self.before_exchanges
        fillers = [eqn for eqn in self.ready() if id(eqn) not in needed]
        return fillers if jx.communicates(fillers, PRODUCTS) else []

    def ready(self) -> list[Any]:
        """Return the equations that need no exchange except those that have arrived."""
        available, ready = set(self.env), list[Any]()
        for eqn in self._todo:
            if not self._is_exchange(eqn) and available.issuperset(_inputs(eqn)):
                ready.append(eqn)
                available.update(eqn.outvars)
        return ready

    def run(self, eqns: Sequence[Any]) -> list[Any]:
        """Run equations that can run; return the last results of their products before any other collective.

        A gradient is such a result before it is reduced over `fsdp`: nothing here has to wait for the reduction.
        """
        collectives = [eqn for eqn in eqns if jx.communicates([eqn], PRIMITIVES)]
        reduced = {v for eqn in collectives for v in eqn.outvars}
        reduced |= jx.depends(eqns, reduced)
        computes = [eqn for eqn in eqns if reduced.isdisjoint(eqn.outvars)]
        products = [v for eqn in computes if jx.communicates([eqn], PRODUCTS) for v in eqn.outvars]
        after_products, read = jx.depends(computes, products), {v for eqn in computes for v in _inputs(eqn)}

        ids = {id(eqn) for eqn in eqns}
        self._todo = [eqn for eqn in self._todo if id(eqn) not in ids]
        for eqn in eqns:
            self.env.compute(eqn)
        return [v for eqn in computes for v in eqn.outvars if v in after_products and v not in read]

    @property
    def gains_from_fillers(self) -> bool:
        """Whether fillers should be computed alongside the exchanges.

        If the iteration also gathers weights or reduces gradients, these collectives would lose the compute that they
        overlap with: a 405B with ZeRO-2 in a pipeline took 2% longer by `predict`. All-to-alls gain nevertheless: a
        step of a mixture took 5% less.
        """
        kinds = {PRIMITIVES.get(eqn.primitive.name) for eqn in self._todo if self._is_exchange(eqn)}
        shards_params = any(
            jx.communicates([eqn], _AHEAD_PRIMITIVES) and not self._is_exchange(eqn) for eqn in self._todo
        )
        return "all-to-all" in kinds or not shards_params

    @property
    def before_exchanges(self) -> set[int]:
        """The ids of the exchanges, and of the equations that they need."""
        exchanges = [eqn for eqn in self._todo if self._is_exchange(eqn)]
        operands = [v for eqn in exchanges for v in _inputs(eqn)]
        return {id(eqn) for eqn in (*exchanges, *jx.needed(self._todo, operands, self.env))}

    @property
    def start(self) -> tuple[int, int]:
        """The multiply-adds that the first exchanges need, and the bytes of their results."""
        ready = self.ready()
        available = {*self.env, *(v for eqn in ready for v in eqn.outvars)}
        first_exchanges = [eqn for eqn in self._todo if self._is_exchange(eqn) and available.issuperset(_inputs(eqn))]
        before = jx.needed(ready, [v for eqn in first_exchanges for v in _inputs(eqn)], self.env)
        return _flops(before), sum(jx.nbytes(v) for eqn in first_exchanges for v in eqn.outvars)

    def _chain_length(self) -> int:
        """Return how many times exchanges start without a product in between."""
        arrived = {v for eqn in self._ready_exchanges for v in eqn.outvars}
        length = 1
        while eqns := self._next_in_chain(arrived):
            arrived.update(v for eqn in eqns for v in eqn.outvars)
            length += 1
        return length

    def _next_in_chain(self, arrived: Collection[Any] = ()) -> list[Any]:
        """Return the exchanges that no product precedes, and the equations that they need.

        Args:
          arrived: variables that count as computed.
        """
        start = {*self.env, *arrived}
        available, exchanges, plain_eqns = set(start), list[Any](), list[Any]()
        for eqn in self._todo:
            if available.issuperset(_inputs(eqn)) and not start.issuperset(eqn.outvars):
                if self._is_exchange(eqn):
                    exchanges.append(eqn)
                elif not jx.communicates([eqn], PRODUCTS):
                    plain_eqns.append(eqn)
                    available.update(eqn.outvars)
        return [*jx.needed(plain_eqns, [v for eqn in exchanges for v in _inputs(eqn)], start), *exchanges]

    # ------------------------------------------------------------------------------------------------------------------
    # Copies from the host.

    def compute_beside_copies(self) -> None:
        """Run everything, with the copies from the host for other iterations spread over the products."""
        # 1. Find the copies whose results nothing in this iteration reads, largest first. A chain is one copy with the
        # equations that select its operand.
        on_host = lambda v: v.aval.memory_space == HOST
        copying = [eqn for eqn in self._todo if any(on_host(v) for v in eqn.invars if not jx.is_literal(v))]
        read = {v for eqn in self._todo if eqn not in copying for v in eqn.invars if not jx.is_literal(v)}
        ends = [v for eqn in copying for v in eqn.outvars if not on_host(v) and v not in read]
        ends = sorted(ends, key=jx.nbytes, reverse=True)
        chains = [(jx.needed(copying, [v]), jx.nbytes(v)) for v in ends]

        # 2. Compute the layer numbers by which the chains index.
        scalars = lambda eqns: [v for eqn in eqns for v in eqn.invars if not jx.is_literal(v) and not v.aval.shape]
        index_eqns = jx.needed(self._todo, [v for eqns, _ in chains for v in scalars(eqns)])
        for eqn in index_eqns:
            self.env.compute(eqn)

        # 3. Run the other equations. Each product makes room for bytes in proportion to its multiply-adds, and the
        # largest copy that fits starts when the product's operands exist.
        early_ids = {id(eqn) for eqns in (index_eqns, *(eqns for eqns, _ in chains)) for eqn in eqns}
        compute_eqns = [eqn for eqn in self._todo if id(eqn) not in early_ids]
        flops = [_flops([eqn]) for eqn in compute_eqns]
        remaining_flops, total_bytes = sum(flops), sum(map(jx.nbytes, ends))
        room = 0.0
        for eqn, count in zip(compute_eqns, flops, strict=True):
            remaining_flops -= count
            room += 1.5 * total_bytes * count / max(1, sum(flops))  # half more, so that none waits for the last product
            fitting = [chain for chain in chains if chain[1] <= room][:1] if remaining_flops else [*chains]
            for chain in fitting if count else ():
                hold(self.env, scalars(chain[0]), self.env, [v for v in eqn.invars if not jx.is_literal(v)])
                for copy_eqn in chain[0]:
                    self.env.compute(copy_eqn)
                chains.remove(chain)
                room -= chain[1]
            self.env.compute(eqn)

        # Without products, copies remain.
        for copy_eqn in (eqn for eqns, _ in chains for eqn in eqns):
            self.env.compute(copy_eqn)

    def result(self) -> Any:
        """Return the carry and the y of the body."""
        return jax.tree.unflatten(self._tree, self.env.read(self._outvars))


def _inputs(eqn: Any) -> list[Any]:
    """Return the variables that an equation reads."""
    return [v for v in eqn.invars if not jx.is_literal(v)]


def _flops(eqns: Sequence[Any]) -> int:
    """Return the multiply-adds of equations."""
    return sum(count for eqn in eqns for count, _ in jx.matmuls([eqn]).values())


def _shares(eqns: Sequence[Any], count: int) -> list[list[Any]]:
    """Split equations, in order, into `count` shares of about equal multiply-adds."""
    total, done = max(1, _flops(eqns)), 0
    shares: list[list[Any]] = [[] for _ in range(count)]
    for eqn in eqns:
        shares[min(count - 1, done * count // total)].append(eqn)
        done += _flops([eqn])
    return shares


def _flops_by_window(
    eqns: Sequence[Any], level: Mapping[Any, int], exchanges: Mapping[int, int]
) -> collections.Counter[int]:
    """Count the multiply-adds that can run in each window.

    A product counts in every window from the one in which its operands arrive to the one that ends when its result is
    sent.
    """
    flops: collections.Counter[int] = collections.Counter()
    last_window: dict[Any, int] = {}  # the window at whose end an exchange needs the variable
    for eqn in reversed(eqns):
        last = exchanges.get(id(eqn), min((last_window[v] for v in eqn.outvars if v in last_window), default=None))
        if last is not None:
            operands = (v for v in eqn.invars if not jx.is_literal(v))
            last_window.update((v, min(last, last_window.get(v, last))) for v in operands)
        if (count := _flops([eqn])) and id(eqn) not in exchanges:
            first = max(level[v] for v in eqn.outvars)
            flops.update(dict.fromkeys(range(first, max(first, last or 0) + 1), count))
    return flops


def exchanges_activations(eqn: Any) -> bool:
    """Return whether an equation is an exchange of activations."""
    kind = PRIMITIVES.get(eqn.primitive.name)
    return kind == "all-to-all" or (kind in _TENSOR_KINDS and axes_of(eqn) == ("tensor",))


def may_exchange() -> bool:
    """Return whether layers may exchange activations: whether one of the axes is bound here and has several ranks."""

    def size(axis: str) -> int:
        try:
            return lax.axis_size(axis)
        except NameError:
            return 1

    return any(size(axis) > 1 for axis in _EXCHANGE_AXES)


def hold(env: dict[Any, Any], delayed: Iterable[Any], until_env: dict[Any, Any], until: Iterable[Any]) -> None:
    """Delay the variables `delayed` of one environment until the variables `until` of another are computed."""
    delayed, until = list(delayed), list(until)
    if delayed and until:
        # One barrier returns both: XLA cannot use any of its results before all of its operands exist.
        held_values, until_values = lax.optimization_barrier(([env[v] for v in delayed], [until_env[v] for v in until]))
        env.update(zip(delayed, held_values, strict=True))
        until_env.update(zip(until, until_values, strict=True))
