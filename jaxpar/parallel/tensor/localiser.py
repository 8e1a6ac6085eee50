"""Rewrite a traced loss into the program of one tensor rank, with the collectives of Megatron-LM.

The inputs are a loss on whole arrays, and the dim along which each parameter is split over the ranks of `tensor`. The
result is the loss that each rank runs on its parts (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3):

                  rank 0   A[:, :F/2]  -->  h [B, F/2]  --gelu-->  B[:F/2, :]  -->  partial y
    x  --enter-->                                                                              --leave-->  y [B, D]
                  rank 1   A[:, F/2:]  -->  h [B, F/2]  --gelu-->  B[F/2:, :]  -->  partial y
          (f)              column-parallel                         row-parallel                   (g)

    y = gelu(x A) B = sum over ranks of gelu(x A[:, part]) B[part]
    forward:  f is the identity, g an all-reduce    backward:  f is an all-reduce, g the identity

Every value is whole on each rank or split along one dim. For each primitive, a rule (`primitives.py`, `sums.py`,
`calls.py`) returns what its equation becomes. Whole values that split computation reads pass an edge (`edges.py`) whose
transpose is an all-reduce. All readers share one edge: the query, key and value of attention need a single all-reduce.
An all-reduce follows a sum over a split dim. With `sequence`, a matmul with a parameter is followed by a reduce-scatter
along dim 1 instead. The computation up to the next matmul is then split along the sequence (Korthikanti et al. 2022,
section 4.2.2). An equation without a rule receives whole values. The result is the same, at the price of gathering its
inputs, which `note` records.

All these conversions are linear, so the rewritten loss is differentiated like any other function.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ...model import permutations
from ...program import jaxpr as jx
from ...program import primitives
from . import edges


@dataclass
class LocalValue:
    """A value of the program, in the layout that one tensor rank holds.

    Attributes:
      value: the rank's array.
      dim: the dim along which it is split; None if whole.
      shape: the shape of the whole value.
      active: whether it has a cotangent.
      weight: whether it comes from parameters alone. Where two splits conflict, weights keep theirs.
      origin: the path of the parameter whose rule caused the split; empty if no rule did.
      broadcast: for a broadcast of a whole value, that value and the dims that it has in this one; else None.
      partial: whether the value is a partial sum over ranks. Context ranks have these; tensor ranks sum immediately.
      made: the equation that computed it, and its inputs. Context ranks note this for whole values, whose parts may be
        computed from parts of the inputs, and for concatenations.
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
    _conversions: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Any, convert: Callable[[], Any]) -> Any:
        """Return the conversion of this value under `key`, computed once, so that all its readers share one edge."""
        if key not in self._conversions:
            self._conversions[key] = convert()
        return self._conversions[key]

    def has(self, key: Any) -> bool:
        """Return whether the conversion under `key` has been computed."""
        return key in self._conversions


Found = list[tuple[Any, int | None]]  # for each output: the rank's value, and the dim along which it is split
BY_FACTORS = ""  # in a table of rules, the key of all primitives that have factors and no separate rule
PrimitiveRule = Callable[["Localiser", Any, Sequence[LocalValue]], Found | None]


@dataclass
class Localiser:
    """The rewriting of one program for `ranks` ranks.

    Attributes:
      ranks: the number of ranks.
      sequence: whether the residual stream is split along the sequence between matmuls.
      rules: the rule of each primitive.
      gathered: the equations without a rule that needed gathered inputs, and the bytes of the largest whole input.
      always: primitives whose rule applies whether or not an input is split.
    """

    ranks: int
    sequence: bool
    rules: Mapping[str, PrimitiveRule | None]
    gathered: dict[str, int] = field(default_factory=dict)
    always = ()

    def whole(self, x: LocalValue) -> jax.Array:
        """Return the whole value, for computation that every rank repeats."""
        if (dim := x.dim) is None:
            return x.value
        # Its cotangent is the same on all ranks, so that each takes its part of it.
        return x.once("whole", lambda: edges.all_gather_replicated(x.value, dim, self.ranks))

    def entered(self, x: LocalValue) -> jax.Array:
        """Return the whole value, for split computation: its cotangent is summed over the ranks."""
        if (dim := x.dim) is not None:
            # Each rank's cotangent is partial: the transpose reduce-scatters them.
            return x.once("entered", lambda: edges.all_gather(x.value, dim, self.ranks))
        # A value without a cotangent needs no edge: there is nothing to all-reduce in the backward.
        if not x.active:
            return x.value
        return x.once("entered", lambda: edges.enter(x.value, self.ranks))

    def part(self, x: LocalValue, dim: int) -> jax.Array:
        """Return this rank's part along a dim."""
        if x.dim == dim:
            return x.value
        return x.once(("part", dim), lambda: self._part(x, dim))

    def _part(self, x: LocalValue, dim: int) -> jax.Array:
        """Broadcast the operand's part where possible, since it is smaller; else slice the whole value."""
        if x.broadcast is not None:
            operand, dims = x.broadcast
            operand_dim = dims.index(dim) if dim in dims else -1
            # A dim that the broadcast adds or stretches has equal parts: the operand is read whole.
            is_constant_along = operand_dim < 0 or operand.shape[operand_dim] == 1
            operand_value = self.entered(operand) if is_constant_along else self.part(operand, operand_dim)
            return jax.lax.broadcast_in_dim(operand_value, self.local(x.shape, dim), dims)
        return self.take(self.whole(x), dim)

    def take(self, value: jax.Array, dim: int) -> jax.Array:
        """Slice this rank's part out of a whole value."""
        assert value.shape[dim] % self.ranks == 0, (value.shape, dim)
        return edges.take(value, dim, self.ranks)

    def masked_part(self, x: LocalValue, fill: Any = 0) -> jax.Array:
        """Return the part of a split value, with `fill` at elements that another rank holds as well."""
        return x.value

    def total(self, value: jax.Array) -> jax.Array:
        """Return the sum of the ranks' values."""
        return edges.leave(value, self.ranks)

    def of_all(self, value: jax.Array) -> jax.Array:
        """All-gather the ranks' values, [ranks, ...]."""
        return edges.all_gather_replicated(value[None], 0, self.ranks)

    def is_equal_on_ranks(self, x: LocalValue) -> bool:
        """Return whether the whole value is the same on all ranks."""
        return True

    def cotangent(self, value: Any, out: LocalValue, shape: tuple[int, ...]) -> LocalValue:
        """Describe the cotangent that a function's own derivative receives for one of its outputs."""
        return LocalValue(value, out.dim, shape)

    def input_cotangent(self, x: LocalValue, dim: int | None) -> jax.Array:
        """Return the cotangent of an input that is split along `dim`, or whole, from a function's own derivative."""
        return self.whole(x) if dim is None else self.part(x, dim)

    def local(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        return tuple(n // self.ranks if d == dim else n for d, n in enumerate(shape))

    def summed(self, value: jax.Array, shape: Sequence[int], residual: bool, eqn: Any) -> tuple[jax.Array, int | None]:
        """Sum a partial sum over ranks.

        Args:
          residual: whether it joins a residual stream [rows, sequence, ...].
          eqn: the equation that computed it.

        Returns:
          The sum, and its dim: whole and None after an all-reduce; with `sequence`, for a residual stream, split along
          dim 1 after a reduce-scatter.

        Raises:
          ValueError: if `ranks` does not divide the positions of an embedding.

        Warns:
          UserWarning: if `ranks` does not divide the positions of another sum, which is then whole on each rank.
        """
        if not (self.sequence and residual and len(shape) > 2 and shape[1] > 1):
            return edges.leave(value, self.ranks), None
        if shape[1] % self.ranks:
            padded_length = -(-shape[1] // self.ranks) * self.ranks
            if eqn.primitive.name == "gather":  # the embedding: all computation after it would stay whole
                raise ValueError(
                    f"sequence=True splits the {shape[1]} positions of {list(shape)} ({jx.where(eqn)}) over tensor="
                    f"{self.ranks}, which does not divide them; use {padded_length} positions, or sequence=False"
                )
            warnings.warn(
                f"sequence=True: {list(shape)} at {jx.where(eqn)} stays whole on each rank, since tensor={self.ranks} "
                f"does not divide its dim 1; make it {padded_length}",
                stacklevel=2,
            )
            return edges.leave(value, self.ranks), None
        return edges.reduce_scatter(value, 1, self.ranks), 1

    def run(self, flat: jx.Flat, args: Sequence[LocalValue], linear: bool = False) -> list[LocalValue]:
        """Return the outputs of a flat program; `linear` tells that it maps cotangents to cotangents."""
        env = jx.Environment.of(flat, args, self.literal, self.constant)
        self.through(flat, env)
        return env.read(flat.outvars)

    def through(self, flat: jx.Flat, env: jx.Environment[LocalValue]) -> None:
        """Compute all equations of a flat program, and store their results in the environment `env`."""
        for eqn in flat.eqns:
            env.compute(eqn, self.equation)

    def literal(self, atom: Any) -> LocalValue:
        """Return the value of a literal."""
        return self.constant(atom.val)

    def constant(self, value: Any) -> LocalValue:
        """Return a literal, or an array that the program closes over, as a whole value."""
        return LocalValue(value, None, jnp.shape(value))

    def arguments(
        self, flat: jx.Flat, values: Sequence[Any], dims: Sequence[int | None], names: Sequence[str] = ()
    ) -> list[LocalValue]:
        """Return the inputs of a flat program.

        Args:
          values: the rank's arrays, parameters first.
          dims: the split dim of each parameter.
          names: the path of each parameter whose split a rule asked for; empty strings for the other parameters.
        """
        args = [LocalValue(x, None, v.aval.shape) for v, x in zip(flat.invars, values, strict=True)]
        # The inputs after the parameters have neither dims nor names.
        for x, dim, name in zip(args, dims, names or [""] * len(dims), strict=False):
            x.dim, x.origin, x.weight = dim, name, True
            # Integer parameters, such as seeds, have no cotangent.
            x.active = jnp.issubdtype(jnp.result_type(x.value), jnp.inexact)
        return args

    def note(self, eqn: Any, x: LocalValue) -> None:
        """Record an operand that is gathered, if it is split: the equation's place, and the bytes of the whole."""
        if x.dim is not None:
            # A broadcast is gathered as its operand, which is smaller.
            operand = x if x.broadcast is None else x.broadcast[0]
            size = math.prod(operand.shape) * jnp.result_type(x.value).itemsize
            # The same line may run several times, in a loop or for each layer; its largest operand counts.
            self.gathered[place(eqn)] = max(size, self.gathered.get(place(eqn), 0))

    def equation(self, eqn: Any, inputs: Sequence[LocalValue]) -> list[LocalValue]:
        """Compute one equation by its rule, or by the default rule if there is none or it returns None."""
        is_affected = eqn.primitive.name in self.always or any(x.dim is not None for x in inputs)
        rule = self.rule_of(eqn) if is_affected else None
        local_outputs = rule(self, eqn, inputs) if rule else None
        return self.results(eqn, inputs, self.on_whole(eqn, inputs) if local_outputs is None else local_outputs)

    def rule_of(self, eqn: Any) -> PrimitiveRule | None:
        """Return the rule for the primitive's name, or else the rule `BY_FACTORS` if its factors are known."""
        return self.rules.get(eqn.primitive.name, self.rules.get(BY_FACTORS) if primitives.of(eqn).factors else None)

    def on_whole(self, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
        """Compute the equation on whole values on every rank (the default rule); `note` records each operand."""
        for x in inputs:
            self.note(eqn, x)
        return [(value, None) for value in jx.bind(eqn, [self.whole(x) for x in inputs])]

    def results(self, eqn: Any, inputs: Sequence[LocalValue], local_outputs: Found) -> list[LocalValue]:
        """Describe the results of an equation, with the properties that follow from its inputs."""
        variables = [x for v, x in zip(eqn.invars, inputs, strict=True) if not jx.is_literal(v)]
        # A result depends on parameters alone only if there is a variable at all: literals are no weights.
        active, weight = any(x.active for x in variables), bool(variables) and all(x.weight for x in variables)
        origin = next((x.origin for x in inputs if x.dim is not None), "")
        outs = [
            LocalValue(value, dim, v.aval.shape, active and jnp.issubdtype(v.aval.dtype, jnp.inexact), weight, origin)
            for v, (value, dim) in zip(eqn.outvars, local_outputs, strict=True)
        ]
        if eqn.primitive.name == "broadcast_in_dim" and outs[0].dim is None:
            outs[0].broadcast = inputs[0], eqn.params["broadcast_dimensions"]
        return outs


class TensorLocaliser(Localiser):
    """The rewriting for the ranks of `tensor`, which exchange parts along one dim for parts along another."""

    always = ("all_to_all",)  # of a whole value, each rank sends a part

    def _part(self, x: LocalValue, dim: int) -> jax.Array:
        """Exchange a value that is split along another dim, unless it has been gathered before."""
        if x.dim is None or x.has("whole"):
            return super()._part(x, dim)
        return edges.exchange(x.value, x.dim, dim, self.ranks)

    def results(self, eqn: Any, inputs: Sequence[LocalValue], local_outputs: Found) -> list[LocalValue]:
        """Describe the results of an equation; leaves that `overflow` takes beside tokens, and returns, stay leaves."""
        outs = super().results(eqn, inputs, local_outputs)
        if (route := permutations.of(eqn)) is not None:
            for i, x in enumerate(outs):
                x.weight |= route.outs[min(i, len(route.outs) - 1)] == "whole"
        return outs


def place(eqn: Any) -> str:
    """Describe an equation and its line in the user's code, for messages."""
    return f"{eqn.primitive.name} at {jx.where(eqn) or 'a function of JAX'}"


def localise(
    flat: jx.Flat,
    dims: Sequence[int | None],
    names: Sequence[str],
    ranks: int,
    sequence: bool,
    rules: Mapping[str, PrimitiveRule],
) -> tuple[Callable[..., list[Any]], dict[str, int]]:
    """Build the program of one of `ranks` tensor ranks, a function of its parts of the parameters and of other inputs.

    Args:
      flat: the program on whole arrays. Its first inputs are the parameters.
      dims: the split dim of each parameter, or None.
      names: the parameters' paths, for errors. With an empty path, a split that does not divide is gathered instead.
      sequence: whether the residual stream is split along the sequence (`Localiser.summed`).

    Returns:
      The function, whose results are whole, and the inputs that it gathers for lack of a rule (place -> bytes). The
      second is filled when the function is traced.

    Raises:
      ValueError: when the function is traced, if a split dim is reshaped to one that `ranks` does not divide; with
        `sequence`, also if `ranks` does not divide the positions of an embedding.
    """
    localiser = TensorLocaliser(ranks, sequence, rules)

    def local_program(*values: Any) -> list[Any]:
        # JAX may trace the function several times; each trace reports anew.
        localiser.gathered.clear()
        return [localiser.whole(x) for x in localiser.run(flat, localiser.arguments(flat, values, dims, names))]

    return local_program, localiser.gathered
