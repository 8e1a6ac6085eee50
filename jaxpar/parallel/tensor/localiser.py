"""Rewrite a traced loss into the program of one tensor rank.

Of a loss on whole arrays, and the dim along which each parameter is split over the ranks of `tensor`, comes the loss
that each rank runs on its parts, with Megatron-LM's collectives in it (Shoeybi et al. 2019, section 3). Every value is
whole on each rank or split along one dim; a rule for each primitive (`primitives.py`, `sums.py`,
`calls.py`) says what its equation becomes. Whole values that split computation reads pass an edge
(`edges.py`) whose transpose is an all-reduce, once for all readers: the query, key and value of attention
share it. A sum over a split dim is followed by an all-reduce; with `sequence`, that of a matmul with a parameter by a
reduce-scatter along dim 1 instead, so that what follows up to the next matmul is split along the sequence (Korthikanti
et al. 2022, section 4.2.2). An equation without a rule gets whole values: the mathematics stays, at the price of
gathering them, which is noted.

All of it is linear in what it moves, so that the rewritten loss is differentiated like any other.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ...program import jaxpr as jx
from ...program import primitives
from . import edges


@dataclass
class LocalValue:
    """A value as one tensor rank has it.

    Attributes:
      value: the rank's array.
      dim: the dim along which it is split; None if whole.
      shape: the shape of the whole.
      active: whether it has a cotangent.
      weight: whether it comes from parameters alone; where two splits conflict, weights keep theirs.
      origin: the parameter, or the step, that it is split because of; empty if nobody asked for it.
      broadcast: where it is a broadcast of a whole value, that value and the dims that it has in this one.
      partial: whether the sum over ranks is meant; for context ranks, those of tensor sum at once.
      made: the equation and the inputs that a whole value was made of, where its parts can be made of theirs; of one
        that is split, what was joined to it.
    """

    value: Any
    dim: int | None
    shape: tuple[int, ...]
    active: bool = False
    weight: bool = False
    origin: str = ""
    broadcast: "tuple[LocalValue, tuple[int, ...]] | None" = None
    partial: bool = False
    made: "tuple[Any, Sequence[LocalValue]] | None" = field(default=None, repr=False)
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, what: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned the first time: an edge is crossed once for all readers."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]


Found = list[tuple[Any, int | None]]  # of each output: the rank's value, and the dim along which it is split
BY_FACTORS = ""  # in a table of rules, the name of all primitives that have factors and no rule of their own
PrimitiveRule = Callable[["Localiser", Any, Sequence[LocalValue]], Found | None]


@dataclass
class Localiser:
    """One rewriting for `ranks` ranks; `gathered` notes what had no rule: where, and bytes of the whole."""

    ranks: int
    sequence: bool
    rules: Mapping[str, PrimitiveRule | None]
    gathered: dict[str, int] = field(default_factory=dict)
    always = ()  # primitives whose rule is asked whether or not an input is split

    def whole(self, x: LocalValue) -> jax.Array:
        """For computation that every rank repeats."""
        if (dim := x.dim) is None:
            return x.value
        return x.once("whole", lambda: edges.all_gather_replicated(x.value, dim, self.ranks))

    def entered(self, x: LocalValue) -> jax.Array:
        """All of it, for split computation."""
        if (dim := x.dim) is not None:
            return x.once("entered", lambda: edges.gather(x.value, dim, self.ranks))
        if not x.active:
            return x.value
        return x.once("entered", lambda: edges.enter(x.value, self.ranks))

    def part(self, x: LocalValue, dim: int) -> jax.Array:
        """This rank's part along a dim."""
        if x.dim == dim:
            return x.value
        return x.once(("part", dim), lambda: self._part(x, dim))

    def _part(self, x: LocalValue, dim: int) -> jax.Array:
        if x.broadcast is not None:
            inner, dims = x.broadcast
            at = dims.index(dim) if dim in dims else -1
            alike = at < 0 or inner.shape[at] == 1
            small = self.entered(inner) if alike else self.part(inner, at)
            return jax.lax.broadcast_in_dim(small, self.local(x.shape, dim), dims)
        return self.take(self.whole(x), dim)

    def take(self, value: jax.Array, dim: int) -> jax.Array:
        """This rank's part of a value that it has whole."""
        assert value.shape[dim] % self.ranks == 0, (value.shape, dim)
        return edges.take(value, dim, self.ranks)

    def kept(self, x: LocalValue, nothing: Any = 0) -> jax.Array:
        """The part of a split value, with `nothing` in the place of what other ranks have as well."""
        return x.value

    def total(self, value: jax.Array) -> jax.Array:
        """The sum of what ranks have."""
        return edges.leave(value, self.ranks)

    def of_all(self, value: jax.Array) -> jax.Array:
        """What every rank has, [ranks, ...]."""
        return edges.all_gather_replicated(value[None], 0, self.ranks)

    def alike(self, x: LocalValue) -> bool:
        """Whether the whole of a value is the same on all ranks."""
        return True

    def cotangent(self, value: Any, out: LocalValue, shape: tuple[int, ...]) -> LocalValue:
        """What a function's own derivative is given for one of its outputs."""
        return LocalValue(value, out.dim, shape)

    def input_cotangent(self, x: LocalValue, dim: int | None) -> jax.Array:
        """What a function's own derivative returns for one of its inputs, which is split along `dim`, or whole."""
        return self.whole(x) if dim is None else self.part(x, dim)

    def local(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """The shape of a rank's part."""
        return tuple(n // self.ranks if d == dim else n for d, n in enumerate(shape))

    def summed(self, value: jax.Array, shape: Sequence[int], residual: bool, eqn: Any) -> tuple[jax.Array, int | None]:
        """A partial sum made whole or, where it joins a residual stream [rows, sequence, ...], split along dim 1."""
        if not (self.sequence and residual and len(shape) > 2 and shape[1] > 1):
            return edges.leave(value, self.ranks), None
        if shape[1] % self.ranks:
            near = -(-shape[1] // self.ranks) * self.ranks
            if eqn.primitive.name == "gather":  # the embedding: all that follows would stay whole
                raise ValueError(
                    f"sequence=True splits the {shape[1]} positions of {list(shape)} ({jx.where(eqn)}) over tensor="
                    f"{self.ranks}, which does not divide them; use {near} positions, or sequence=False"
                )
            warnings.warn(
                f"sequence=True: {list(shape)} at {jx.where(eqn)} stays whole on each rank, since tensor={self.ranks} "
                f"does not divide its dim 1; make it {near}",
                stacklevel=2,
            )
            return edges.leave(value, self.ranks), None
        return edges.scatter(value, 1, self.ranks), 1

    def run(self, flat: jx.Flat, args: Sequence[LocalValue], linear: bool = False) -> list[LocalValue]:
        """The outputs of a flat program; `linear` where it is that of cotangents."""
        env = jx.Environment.of(flat, args, self.literal, self.constant)
        self.through(flat, env)
        return env.read(flat.outvars)

    def through(self, flat: jx.Flat, env: jx.Environment[LocalValue]) -> None:
        """All equations of a flat program, in the values `env` of its variables."""
        for eqn in flat.eqns:
            env.compute(eqn, self.equation)

    def literal(self, atom: Any) -> LocalValue:
        """The value of a literal."""
        return self.constant(atom.val)

    def constant(self, value: Any) -> LocalValue:
        """A literal, or an array that the program closes over: whole."""
        return LocalValue(value, None, jnp.shape(value))

    def arguments(
        self, flat: jx.Flat, values: Sequence[Any], dims: Sequence[int | None], names: Sequence[str] = ()
    ) -> list[LocalValue]:
        """The inputs of a flat program: parameters first, split along `dims` because of rules for `names`."""
        args = [LocalValue(x, None, v.aval.shape) for v, x in zip(flat.invars, values, strict=True)]
        for x, dim, name in zip(args, dims, names or [""] * len(dims), strict=False):
            x.dim, x.origin, x.weight = dim, name, True
            x.active = jnp.issubdtype(jnp.result_type(x.value), jnp.inexact)
        return args

    def note(self, eqn: Any, x: LocalValue) -> None:
        """An operand that is gathered, if it is split: where, and bytes of the whole."""
        if x.dim is not None:
            inner = x if x.broadcast is None else x.broadcast[0]
            size = math.prod(inner.shape) * jnp.result_type(x.value).itemsize
            self.gathered[place(eqn)] = max(size, self.gathered.get(place(eqn), 0))

    def equation(self, eqn: Any, inputs: Sequence[LocalValue]) -> list[LocalValue]:
        """What becomes of one equation: what its rule says, or else the default rule."""
        asked = eqn.primitive.name in self.always or any(x.dim is not None for x in inputs)
        rule = self.rule_of(eqn) if asked else None
        found = rule(self, eqn, inputs) if rule else None
        return self.results(eqn, inputs, self.on_whole(eqn, inputs) if found is None else found)

    def rule_of(self, eqn: Any) -> PrimitiveRule | None:
        """The rule of an equation's primitive: one for this name, or else `BY_FACTORS` if its factors are known."""
        return self.rules.get(eqn.primitive.name, self.rules.get(BY_FACTORS) if primitives.of(eqn).factors else None)

    def on_whole(self, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
        """The default rule: every rank computes the equation on whole values. `note` hears of each operand."""
        for x in inputs:
            self.note(eqn, x)
        return [(value, None) for value in jx.bind(eqn, [self.whole(x) for x in inputs])]

    def results(self, eqn: Any, inputs: Sequence[LocalValue], found: Found) -> list[LocalValue]:
        """The results of an equation, with what is known of them from its inputs."""
        atoms = [x for v, x in zip(eqn.invars, inputs, strict=True) if not jx.is_literal(v)]
        active, weight = any(x.active for x in atoms), bool(atoms) and all(x.weight for x in atoms)
        origin = next((x.origin for x in inputs if x.dim is not None), "")
        outs = [
            LocalValue(value, dim, v.aval.shape, active and jnp.issubdtype(v.aval.dtype, jnp.inexact), weight, origin)
            for v, (value, dim) in zip(eqn.outvars, found, strict=True)
        ]
        if eqn.primitive.name == "broadcast_in_dim" and outs[0].dim is None:
            outs[0].broadcast = inputs[0], eqn.params["broadcast_dimensions"]
        return outs


def place(eqn: Any) -> str:
    """An equation and its line, for people."""
    return f"{eqn.primitive.name} at {jx.where(eqn) or 'a function of JAX'}"


def localise(
    flat: jx.Flat,
    dims: Sequence[int | None],
    names: Sequence[str],
    ranks: int,
    sequence: bool,
    rules: Mapping[str, PrimitiveRule],
) -> tuple[Callable[..., list[Any]], dict[str, int]]:
    """The program of one rank, a function of its parts of the parameters (the first inputs) and of the other inputs.

    Args:
      dims: for each parameter, the dim that is split.
      names: their paths, for errors; empty where a split that does not work out is to be gathered instead.

    Returns the function, whose results are whole, and what it gathers for want of a rule (place -> bytes), which is
    filled when the function is traced. Raises ValueError where a split dim is reshaped to one that does not divide.
    """
    work = Localiser(ranks, sequence, rules)

    def fun(*values: Any) -> list[Any]:
        work.gathered.clear()
        return [work.whole(x) for x in work.run(flat, work.arguments(flat, values, dims, names))]

    return fun, work.gathered
