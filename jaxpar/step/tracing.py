"""A model's loss as one device runs it: traced, rolled, localised, sliced, and checked against its strategy.

The loss is that of one microbatch of one replica (a block of rows). It is traced once for batches of one shape, before
anything runs, and every part of a step works on the program that comes out.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from ..layout.layout import Layout
from ..layout.leaves import Leaf
from ..model.batches import one_block, rows_of
from ..model.model import Mean, Model, couplings
from ..model.paths import below, name_of
from ..numerics.fp8 import in_fp8, of_blocks
from ..numerics.logits import Logits, chunked
from ..parallel.context import RULES as CONTEXT_RULES
from ..parallel.context import AttentionMode, calls, choose, split_sequence
from ..parallel.context.attention import spelled
from ..parallel.expert import RULES as EXPERT_RULES
from ..parallel.expert import exchange_tokens
from ..parallel.pipeline.flat.cut import points, stages_at, stages_of
from ..parallel.pipeline.schedules import Schedule
from ..parallel.tensor import RULES, localise
from ..program import jaxpr as jx
from ..program.lookups import Lookup, lookups
from ..slicing.pieces import Flights
from ..slicing.program import Program
from ..slicing.rolling.loops import roll_loops
from ..slicing.side_by_side import side_by_side
from ..slicing.slicer import Slicing, cut_program, slice_program
from ..slicing.stacks import described
from ..strategy import Strategy
from .refusals import (
    check_breakpoints,
    check_independent_of_replicas,
    check_ordered,
    check_pipe,
    check_remat,
    heard,
    of_whole_batches,
    succeeds,
    unread_leaves,
    warn_gathered,
    warn_no_rule,
    warn_padded,
    warn_precision,
    warn_rows_of_a_microbatch,
    warn_unread,
    warn_untrained,
)
from .rows import check_coupling
from .writes import Writes, find_writes

Sums = dict[str, Mean]  # of each metric, over some rows


@dataclass(frozen=True)
class Traced:
    """The loss of one microbatch as the program of one device, and the abstract values that it reads.

    Attributes:
      program: the loss in pieces, segments and layer stacks (`slicing/program.py`).
      outputs: `({metric: Mean}, variables)`, with each output's position among the program's in its place.
      leaves: what the program reads of each parameter, as `jax.ShapeDtypeStruct`: in the compute dtype, a tensor rank's
        part, and of layers that pipeline stages own one rank's.
      variables, rows, key: of its other inputs: the model's variables, rows of one microbatch of one replica
        [rows, ...], and the key of dropout.
      concurrent: how many microbatches the program runs.
      axes: the mesh axes over which rows are spread and that have several devices, name -> size.
      summed: those over which totals and counts are summed: these, and `context` where it has several devices.
      traced_axes: the mesh axes that the program may name: these, and `tensor`.
      schedule: the pipeline's; None without one.
      gathered: what tensor ranks gather for want of a rule, in all of this step's programs so far: where, and bytes.
      lookups: leaves of integers of the batch that the loss looks up in something as they are, by their path.
    """

    program: Program
    outputs: tuple[Sums, Any]
    leaves: Sequence[jax.ShapeDtypeStruct]
    variables: Any
    rows: Any
    key: Any
    concurrent: int
    axes: Mapping[str, int]
    summed: Mapping[str, int]
    traced_axes: dict[str, int]
    schedule: Schedule | None
    gathered: Mapping[str, int]
    lookups: Mapping[str, Lookup]

    @property
    def inputs(self) -> tuple[Any, Any, Any]:
        """The program's inputs but for parameters: variables, rows and key, these of each concurrent microbatch."""
        each = lambda x: (x,) * self.concurrent if self.concurrent > 1 else x
        return self.variables, *jax.tree.map(each, (self.rows, self.key))

    def reads(self, name: str) -> bool:
        """Whether the loss depends on the leaf of the batch with this path; False where there is none."""
        rest, first = jax.tree_util.tree_leaves_with_path(self.inputs), "/0" * (self.concurrent > 1)
        inputs = zip(rest, self.program.inputs[len(self.program.consts) :], strict=True)
        named = [v for (path, _), v in inputs if name_of(path) == f"1/{name}{first}"]
        loss: Any = self.outputs[0]["loss"].total  # the position of an output, in the place of an array
        return bool(named) and self.program.depends(named, loss)

    @property
    def draws(self) -> bool:
        """Whether the loss depends on its key: noise, dropout."""
        return self.key is not None and self.program.depends(self.program.inputs[-1:], self.total)

    @property
    def total(self) -> int:
        """The position of the output that is differentiated: the loss's sum over rows."""
        return self.outputs[0]["loss"].total  # type: ignore[return-value]

    @property
    def count(self) -> int:
        """The position of what that sum is divided by, once it is over all rows."""
        return self.outputs[0]["loss"].count  # type: ignore[return-value]

    @property
    def counts(self) -> bool:
        """Whether the loss counts rows or tokens of the batch: a plain mean counts one a microbatch."""
        return self.program.depends(self.program.inputs, self.count)


@dataclass(frozen=True)
class Loss:
    """A traced loss beside what this device stores: the forward and the backward of one microbatch.

    `access` applies a rule to the leaves (`parallel/data/access.py`), or takes its place, with `fetch` and `give`.
    """

    traced: Traced
    access: Any
    stored: Sequence[jax.Array]

    def forward(
        self, variables: Any, rows: Any, key: Any, grad: bool = True, flights: Flights | None = None
    ) -> tuple[Sums, Any, list[Any]]:
        """The sums of each metric, new variables, and the tape that `backward` reads; `flights` as in `Program`."""
        values = jax.tree.leaves((variables, rows, key))
        outs, tape = self.traced.program.forward(self.access, self.stored, values, grad, flights)
        return *jax.tree.unflatten(jax.tree.structure(self.traced.outputs), outs), tape

    def backward(self, tape: Any, seed: jax.Array, into: Sequence[Any], flights: Flights | None = None) -> list[Any]:
        """`into` with one microbatch's gradients added; `seed` is that of the step's loss with respect to its sum."""
        return self.traced.program.backward(self.access, self.stored, tape, {self.traced.total: seed}, into, flights)


@dataclass(frozen=True)
class Tracing:
    """Traces the loss of one model under one strategy; `axes`, `schedule` and `gathered` are as in `Traced`; `astray`
    says what to warn of in the optimizer, from a loss and its leaves; `choices`, once there are some, what becomes of
    what each stack's layers save (`Residuals.kept`).

    Once a batch has been traced, these say what came of it:

      attention_modes: how context ranks attend.
      attention_spelled: attention that the loss spells out, by its line: which keys count, and the type of its scores.
      attention_not_taken: other attention that it spells out, by its line: why.
      experts_gathered: where expert ranks gather experts in place of exchanging tokens, and bytes of all of them.
      experts_fewer: where they do because the tokens would be more, and bytes of those.
      tokens_gathered: where they have all tokens of all, and bytes of those and of what would be sent.
      logits: which of a cross-entropy are made in chunks.
      fp8: under precision="fp8" why the products of each leaf are not in FP8, "" where they are.
      doubts: how the loss may couple rows.
      unread: paths of the batch's leaves that the loss does not read, in a step or without a key in evaluate.
      touched: positions of the model's own leaves that the loss hands back as other values.
      writes: what it writes to them; empty, or one.
    """

    model: Model
    layout: Layout
    strategy: Strategy
    axes: dict[str, int]
    schedule: Schedule | None = None
    astray: Callable[[jx.Flat, Sequence[tuple[str, tuple[int, ...]]]], str | None] | None = None
    choices: tuple[str, ...] = ()
    gathered: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    attention_modes: dict[AttentionMode, None] = field(default_factory=dict, compare=False, repr=False)
    attention_spelled: dict[str, tuple[str, Any]] = field(default_factory=dict, compare=False, repr=False)
    attention_not_taken: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    experts_gathered: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    experts_fewer: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    logits: dict[str, Logits] = field(default_factory=dict, compare=False, repr=False)
    tokens_gathered: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    fp8: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    doubts: dict[str, None] = field(default_factory=dict, compare=False, repr=False)
    unread: dict[str, None] = field(default_factory=dict, compare=False, repr=False)
    touched: dict[int, None] = field(default_factory=dict, compare=False, repr=False)
    writes: list[Writes] = field(default_factory=list, compare=False, repr=False)
    _traced: dict[Any, Traced] = field(default_factory=dict, compare=False, repr=False)

    @property
    def ranks(self) -> int:
        """The number of tensor ranks."""
        return self.layout.mesh.shape["tensor"]

    @property
    def takes_attention(self) -> bool:
        """Whether attention that the loss spells out becomes `jp.attention`."""
        shared = self.layout.mesh.shape["context"] > 1 and self.strategy.attention != "gather"
        return shared or self.strategy.kernels == "fused"

    @property
    def in_fp8(self) -> list[str]:
        """The paths of leaves whose products are all in FP8."""
        return [path for path, why in self.fp8.items() if not why]

    @property
    def summed(self) -> dict[str, int]:
        """The mesh axes over which totals and counts are summed: of rows, and of positions."""
        context = self.layout.mesh.shape["context"]
        return self.axes | ({"context": context} if context > 1 else {})

    @property
    def traced_axes(self) -> dict[str, int]:
        """The mesh axes that a program may name: what it is on one rank of `context` and `tensor`."""
        return self.summed | ({"tensor": self.ranks} if self.ranks > 1 else {})

    def __call__(self, variables: Any, rows: Any, key: jax.Array | None) -> Traced:
        """The loss for one microbatch (abstract or not). Traced once."""
        leaves, tree = jax.tree.flatten((variables, rows, key))
        kind = (tree, *((jnp.shape(x), x.dtype) for x in leaves))
        if kind not in self._traced:
            abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
            self._traced[kind] = self._wrapped(*jax.tree.map(abstract, (variables, rows, key)))
        return self._traced[kind]

    def takes_all_rows(self, traced: Traced) -> bool:
        """Whether the loss reads other replicas' rows where there are some: `jp.all_rows`, BatchNorm."""
        with couplings() as noted:
            whole, _ = self._trace((traced.variables, traced.rows, traced.key), {"data": 2})
        return bool(noted) or jx.communicates(whole.eqns)

    def _wrapped(self, variables: Any, rows: Any, key: Any) -> Traced:
        """What becomes of a loss of these abstract values, in order; `Step._train` goes on from here.

        trace       program/            the model's code runs once and leaves its equations
        roll        slicing/rolling/    blocks that a Python loop wrote out become a scan over layers
        split       parallel/context/   the equations of one context rank, on its positions of the sequence
        exchange    parallel/expert/    the equations of one expert rank, on its experts and the tokens of all ranks
        localise    parallel/tensor/    the equations of one tensor rank, on its parts of the weights
        chunk       numerics/logits/    large logits of a loss: a chunk of the tokens at a time, in a loop
        double      slicing/            the equations of each concurrent microbatch beside those of the others
        quantise    numerics/fp8/       products of layers' weights in float8
        slice       slicing/            segments and layer stacks: each fetches its parameters where it runs
        check       here, rows/         what this strategy cannot run as on one device is refused, or warned of
        """
        units, families = self.layout.storage.units, self.layout.storage.families
        own = [leaf.layers is not None for leaf in units]
        sharded = [None if leaf.dim is None else leaf.dim - leaf.stage for leaf in units]
        with couplings() as noted:
            whole, out = self._trace_block((variables, rows, key))
        rolled, loops = roll_loops(self._with_attention(whole), families, len(units), self.traced_axes, own)
        positions = self._context_program(rolled, (variables, rows, key), len(jax.tree.leaves(out[0])))
        local = self._tensor_program(self._expert_program(positions))
        local, logits = chunked(local, len(units), self.strategy.logits, self.traced_axes)
        self.logits.update(logits)
        if self.strategy.concurrent > 1:
            shared = len(units) + len(jax.tree.leaves(variables))
            sums = len(jax.tree.leaves(out[0]))
            local = side_by_side(local, shared, sums, self.strategy.concurrent, self.traced_axes)
        if self.strategy.precision == "fp8":
            local = self._fp8_program(rolled, local)
        every = "h" if "activations" in self.strategy.offloads else "s"
        how = Slicing(self._params, sharded, own, self.traced_axes, self.strategy.remat, self.choices, every)
        cut = self.layout.storage.cut
        program = cut_program(local, how, self._cut) if cut else slice_program(local, how)
        program = replace(program, loops=tuple(loops), coupled=bool(noted) or jx.communicates(whole.eqns))
        tree = jax.tree.structure(out)
        outputs = jax.tree.unflatten(tree, list(range(tree.num_leaves)))
        self._check(whole, program, outputs, (variables, rows, key), noted)
        found = self._lookups(whole, variables, rows)
        inputs = (self._leaves, variables, rows, key, self.strategy.concurrent)
        axes = (self.axes, self.summed, self.traced_axes)
        return Traced(program, outputs, *inputs, *axes, self.schedule, self.gathered, found)

    def _lookups(self, flat: jx.Flat, variables: Any, rows: Any) -> dict[str, Lookup]:
        before = len(self._params) + len(jax.tree.leaves(variables))
        leaves = enumerate(jax.tree_util.tree_leaves_with_path(rows), before)
        names = {i: name_of(path) for i, (path, x) in leaves if jnp.issubdtype(x.dtype, jnp.integer)}
        return {names[i]: lookup for i, lookup in lookups(flat, list(names)).items()}

    def _unread(self, whole: jx.Flat, rest: Any) -> list[str]:
        """The paths of the batch's leaves with rows that the loss reads neither in a step nor in evaluate, which gives
        it no key.
        """
        (variables, rows, key), params = rest, len(self._params)
        if not (names := unread_leaves(whole, rest, params)):
            return []
        other = variables, rows, None if key is not None else jax.eval_shape(lambda: jax.random.key(0))
        try:
            flat, _ = self._trace(other, self.axes)
        except Exception:  # the user's code: a loss that needs its key runs in a step alone, and has been read there
            return names
        also = unread_leaves(flat, other, params)
        return [name for name in names if name in also]

    def _cut(self, eqns: Sequence[Any], reads: Sequence[frozenset[int]]) -> list[list[Any]]:
        """Equations, and the numbers of the parameters that each reads, as the stages of a pipeline."""
        assert self.schedule is not None
        ranks, chunks = self.schedule.ranks, self.schedule.chunks
        if self.strategy.cuts:
            paths = [leaf.path for leaf in self.layout.leaves]
            at = points(self.strategy.cuts, ranks * chunks, paths)
            return stages_at(eqns, reads, [(one, frozenset(below(one, paths))) for one in at])
        if len(eqns) < ranks * chunks:
            raise ValueError(
                f"pipe={ranks} x chunks={chunks} makes {ranks * chunks} stages of a loss that has {len(eqns)} "
                "operations; use fewer, or data or fsdp for pipe"
            )
        return stages_of(eqns, ranks * chunks)

    @property
    def _params(self) -> list[jax.ShapeDtypeStruct]:
        """What a loss sees of each parameter: the whole of it, in the compute dtype."""
        computed = self.layout.policy.computed
        return [jax.ShapeDtypeStruct(leaf.logical, computed(leaf.dtype)) for leaf in self.layout.storage.units]

    @property
    def _leaves(self) -> list[jax.ShapeDtypeStruct]:
        """What the program of one device reads of each parameter."""
        stages = self.layout.mesh.shape["pipe"]

        def shape(leaf: Leaf) -> tuple[int, ...]:
            if leaf.layers is None:
                return leaf.logical
            return (math.prod(leaf.shape[: leaf.stage + 1]) // stages, *leaf.logical[1:])

        units = zip(self.layout.storage.units, self._params, strict=True)
        return [jax.ShapeDtypeStruct(shape(leaf.local), param.dtype) for leaf, param in units]

    def _trace_block(self, rest: Any) -> tuple[jx.Flat, Any]:
        """`_trace` of a block. Raises ValueError for a loss of whole batches: blocks cut groups of rows."""
        try:
            return self._trace(rest, self.axes)
        except (TypeError, ValueError) as error:
            (variables, rows, key), replicas = rest, math.prod(self.axes.values())
            have, loss, blocks = rows_of(rows), self._trace, (replicas, self.strategy.microbatches)
            takes = lambda many: succeeds(loss, (variables, one_block(rows, Fraction(have, many)), key), self.axes)
            if math.prod(blocks) == 1 or not takes(have * math.prod(blocks)):
                raise
            raise ValueError(of_whole_batches(error, variables, have, blocks, takes)) from error

    def _trace(self, rest: Any, axes: Mapping[str, int]) -> tuple[jx.Flat, Any]:
        """The equations of the model's loss, whose rows are spread over `axes`, and the abstract tree of its results.

        Its first inputs are the parameters as a layout keeps them, of which the model gets its own.
        """
        storage = self.layout.storage

        def loss(leaves: Sequence[Any], rest: Any) -> Any:
            variables, rows, key = rest
            try:
                params = storage.of_units(leaves)
                sums, new, after = self.model.forward(params, variables, rows, key, tuple(axes))
            except TypeError as error:  # of a scan's carry, say
                if (precision := self.strategy.precision) != "f32":
                    error.add_note(
                        f"precision={precision!r} gives the loss its parameters in {self.layout.policy.compute}; where "
                        "it works with precision='f32', a module that is told to compute in another dtype meets them: "
                        "give it the same (dtype=), or cast what it returns"
                    )
                raise
            if key is not None:  # what evaluation writes does not last
                pairs = enumerate(zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True))
                self.touched.update((number, None) for number, (one, other) in pairs if one is not other)
            return sums, new

        return jx.trace(loss, self._params, rest, axes={**self.traced_axes, **axes})

    def _with_attention(self, flat: jx.Flat) -> jx.Flat:
        """A program that calls `jp.attention` where it spells attention out, if that is asked for, or ranks of
        `context` share a sequence.
        """
        fused, shared = self.strategy.kernels == "fused", self.layout.mesh.shape["context"] > 1
        take = self.takes_attention
        replay = not take or (shared and self.strategy.attention != "gather")
        found = spelled(flat, self.traced_axes, replay, biases=fused and not shared, take=take)
        self.attention_spelled.update({line: (what, found.scores[line]) for line, what in found.taken.items()})
        self.attention_not_taken.update(found.not_taken)
        if fused and not found.taken and not any(calls(flat.eqns)):
            why = "; ".join(f"that of {line} {why}" for line, why in found.not_taken.items()) or "it spells none out"
            raise ValueError(
                f"kernels='fused' is for attention, and the loss has none that a kernel takes: {why}; leave kernels out"
            )
        return found.flat

    def _context_program(self, flat: jx.Flat, rest: Any, sums: int) -> jx.Flat:
        """The program of one context rank; the first `sums` outputs are totals and counts."""
        ranks = self.layout.mesh.shape["context"]
        if ranks == 1:
            return flat
        leaves, (variables, rows, _) = len(self._params), rest
        before = leaves + len(jax.tree.leaves(variables))
        batch = range(before, before + len(jax.tree.leaves(rows)))
        apart = self.layout.storage.cut or (self.schedule is not None and self.schedule.branches)
        branching = self.schedule.kind if apart and self.schedule else ""  # ranks are not in one layer at one time
        mode = choose(self.strategy.attention, flat.eqns, ranks, self.ranks, branching, self.attention_not_taken)
        self.attention_modes[mode] = None
        fun = split_sequence(flat, leaves, batch, sums, ranks, mode, CONTEXT_RULES, self.ranks, not branching)
        return jx.trace(
            fun, *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars), axes=self.traced_axes
        )[0]

    def _expert_program(self, flat: jx.Flat) -> jx.Flat:
        """The program of one expert rank."""
        ranks = self.layout.mesh.shape["expert"]
        if ranks == 1:
            return flat
        units = self.layout.storage.units
        dims = [None if leaf.expert is None else leaf.expert - leaf.stage for leaf in units]
        fun, found = exchange_tokens(flat, dims, ranks, EXPERT_RULES)
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars]
        parts = [jax.ShapeDtypeStruct(leaf.of_experts.logical, x.dtype) for leaf, x in zip(units, inputs, strict=False)]
        own, _ = jx.trace(fun, *parts, *inputs[len(parts) :], axes=self.traced_axes)
        self.experts_gathered.update(found.gathered)
        self.experts_fewer.update(found.fewer)
        self.tokens_gathered.update(found.all_tokens)
        return own

    def _tensor_program(self, flat: jx.Flat) -> jx.Flat:
        """The program of one tensor rank."""
        if self.ranks == 1:
            return flat
        units = self.layout.storage.units
        dims = [None if leaf.tensor is None else leaf.tensor - leaf.stage for leaf in units]
        fun, gathered = localise(flat, dims, self.layout.ruled, self.ranks, self.strategy.sequence, RULES)
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars]
        parts = [jax.ShapeDtypeStruct(leaf.local.logical, x.dtype) for leaf, x in zip(units, inputs, strict=False)]
        local, _ = jx.trace(fun, *parts, *inputs[len(parts) :], axes=self.traced_axes)
        self.gathered.update(gathered)
        warn_no_rule(gathered, self.ranks)
        return local

    def _fp8_program(self, rolled: jx.Flat, flat: jx.Flat) -> jx.Flat:
        """A program of one device with products in FP8: those that are chosen in the whole program, `rolled`."""
        alike = of_blocks([(leaf.path, leaf.shape) for leaf in self.layout.storage.models])
        leaves = [(leaf.path, leaf.rolled or leaf.path in alike) for leaf in self.layout.storage.units]
        own, why = in_fp8(rolled, flat, leaves, self.strategy, self.layout.policy.compute)
        self.fp8.update(why)
        return own

    def _check(self, whole: jx.Flat, program: Program, outputs: Any, rest: Any, noted: Sequence[str]) -> None:
        """Refuse, or warn of, what would not be as on one device; and tell the layout how its layers run."""
        check_ordered(whole, self.layout.mesh.size)
        check_breakpoints(whole, self.layout.mesh.size)
        self.layout.loops.update(described(program, self.layout.storage))
        if self.schedule is not None:
            check_pipe(program, outputs[1], self.layout, self.strategy)
            if program.main is not None:
                warn_padded(program.main.length, self.schedule.ranks, self.schedule.chunks)
        if self.touched:
            found = find_writes(self.model, self.layout, self.strategy, tuple(self.touched), rest)
            self.writes[:] = self.writes if found is None else [found]
        warn_gathered(program, self.layout)
        check_remat(program, self.layout, self.strategy, self.schedule)
        check_independent_of_replicas(program, outputs, len(jax.tree.leaves(rest)), frozenset(self.axes))
        warn_precision(whole, self.layout.policy.compute, self.strategy.precision)
        warn_untrained(whole, outputs, self.layout.storage.units)
        unread = [path for path in self._unread(whole, rest) if path not in self.unread]
        self.unread.update(dict.fromkeys(unread))
        warn_unread(unread)
        leaves = [(leaf.path, leaf.logical) for leaf in self.layout.storage.units]
        if self.astray and (said := self.astray(whole, leaves)):
            warnings.warn(said, stacklevel=2)
        replicas, m, trace = math.prod(self.axes.values()), self.strategy.microbatches, lambda *a: self._trace(*a)[0]
        known = any(kind[0] == jax.tree.structure(rest) for kind in self._traced)  # with another number of rows
        if self.model.rows is None and replicas * m > 1 and not known:
            warn_rows_of_a_microbatch(noted, rows_of(rest[1]) * replicas, m)
            told = heard(lambda: check_coupling(whole, outputs, rest, trace, self.axes, self.strategy))
            self.doubts.update((said, None) for said in (str(w.message) for w in told) if said.startswith("the loss "))
