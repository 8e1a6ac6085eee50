"""A model's loss as one device runs it: traced, rewritten by passes, sliced, and checked against its strategy.

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

from ..layout.leaves import Leaf
from ..model.batches import one_block, rows_of
from ..model.model import Mean, Model, couplings
from ..model.paths import below, name_of
from ..parallel.pipeline.flat.cut import points, stages_at, stages_of
from ..parallel.pipeline.schedules import Schedule
from ..program import jaxpr as jx
from ..program.lookups import Lookup, lookups
from ..slicing.pieces import Flights
from ..slicing.program import Program
from ..slicing.slicer import Slicing, cut_program, slice_program
from ..slicing.stacks import described
from .passes import Notes, PlacedLoss, Setting, rewrite
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
      lookups: leaves of integers of the batch that the loss looks up in something as they are, by their path.
      notes: what its passes and checks found (`passes.py`).
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
    lookups: Mapping[str, Lookup]
    notes: Notes

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


@dataclass(frozen=True, kw_only=True)
class Tracing(Setting):
    """Traces the loss of one model under one strategy.

    Attributes:
      astray: what to warn of in the optimizer, from a loss and its leaves.
      choices: once there are some, what becomes of what each stack's layers save (`Residuals.kept`).
    """

    model: Model
    astray: Callable[[jx.Flat, Sequence[tuple[str, tuple[int, ...]]]], str | None] | None = None
    choices: tuple[str, ...] = ()
    # Shared by the tracings of other choices, so that a warning is not repeated for each of them.
    _traced: dict[Any, Traced] = field(default_factory=dict, compare=False, repr=False)

    @property
    def writes(self) -> Writes | None:
        """What the loss writes to its parameters, once a step's program is traced; None if it writes nothing."""
        return next((x.notes.writes for x in reversed(self._traced.values()) if x.notes.writes), None)

    def __call__(self, variables: Any, rows: Any, key: jax.Array | None) -> Traced:
        """The loss for one microbatch (abstract or not). Traced once."""
        leaves, tree = jax.tree.flatten((variables, rows, key))
        kind = (tree, self.choices, *((jnp.shape(x), x.dtype) for x in leaves))
        if kind not in self._traced:
            abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
            self._traced[kind] = self._made(*jax.tree.map(abstract, (variables, rows, key)))
        return self._traced[kind]

    def takes_all_rows(self, traced: Traced) -> bool:
        """Whether the loss reads other replicas' rows where there are some: `jp.all_rows`, BatchNorm."""
        with couplings() as noted:
            whole, _ = self._trace((traced.variables, traced.rows, traced.key), {"data": 2})
        return bool(noted) or jx.communicates(whole.eqns)

    def _made(self, variables: Any, rows: Any, key: Any) -> Traced:
        """The program of a loss of these abstract values; `Step._train` goes on from here.

        trace       program/    the model's code runs once and leaves its equations
        rewrite     passes.py   `PASSES`, in order: the equations of one device
        slice       slicing/    segments and layer stacks: each fetches its parameters where it runs
        check       refusals.py, rows/    what this strategy cannot run as on one device is refused, or warned of
        """
        rest, notes = (variables, rows, key), Notes()
        with couplings() as noted:
            whole, out = self._trace_block(rest, notes)
        sums = len(jax.tree.leaves(out[0]))
        loss = rewrite(self, PlacedLoss(whole, self.layout.storage.units, rest, sums, whole), notes)
        program = replace(
            self._sliced(loss), loops=tuple(notes.loops), coupled=bool(noted) or jx.communicates(whole.eqns)
        )
        tree = jax.tree.structure(out)
        outputs = jax.tree.unflatten(tree, list(range(tree.num_leaves)))
        self._check(whole, program, outputs, rest, noted, notes)
        found = self._lookups(whole, variables, rows)
        inputs = (self._leaves(loss.placements), variables, rows, key, self.strategy.concurrent)
        axes = (self.axes, self.summed, self.traced_axes)
        return Traced(program, outputs, *inputs, *axes, self.schedule, found, notes)

    def _sliced(self, loss: PlacedLoss) -> Program:
        """A loss in pieces."""
        units = self.layout.storage.units
        sharded = [None if leaf.dim is None else leaf.dim - leaf.stage for leaf in units]
        every = "h" if "activations" in self.strategy.offloads else "s"
        how = Slicing(self._params, sharded, self.staged, self.traced_axes, self.strategy.remat, self.choices, every)
        return cut_program(loss.flat, how, self._cut) if self.layout.storage.cut else slice_program(loss.flat, how)

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

    def _leaves(self, placements: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
        """What the program of one device reads of each parameter: one rank's part, and of a stage's layers its own."""
        stages = self.layout.mesh.shape["pipe"]

        def shape(leaf: Leaf) -> tuple[int, ...]:
            if leaf.layers is None:
                return leaf.logical
            return (math.prod(leaf.shape[: leaf.stage + 1]) // stages, *leaf.logical[1:])

        params = zip(placements, self._params, strict=True)
        return [jax.ShapeDtypeStruct(shape(leaf), param.dtype) for leaf, param in params]

    def _trace_block(self, rest: Any, notes: Notes) -> tuple[jx.Flat, Any]:
        """`_trace` of a block, with notes. Raises ValueError for a loss of whole batches: blocks cut groups of rows."""
        try:
            return self._trace(rest, self.axes, notes)
        except (TypeError, ValueError) as error:
            (variables, rows, key), replicas = rest, math.prod(self.axes.values())
            have, loss, blocks = rows_of(rows), self._trace, (replicas, self.strategy.microbatches)
            takes = lambda many: succeeds(loss, (variables, one_block(rows, Fraction(have, many)), key), self.axes)
            if math.prod(blocks) == 1 or not takes(have * math.prod(blocks)):
                raise
            raise ValueError(of_whole_batches(error, variables, have, blocks, takes)) from error

    def _trace(self, rest: Any, axes: Mapping[str, int], notes: Notes | None = None) -> tuple[jx.Flat, Any]:
        """The equations of the model's loss, whose rows are spread over `axes`, and the abstract tree of its results.

        Its first inputs are the parameters as a layout keeps them, of which the model gets its own. The notes tell
        which of these it hands back as other values.
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
            if notes is not None and key is not None:  # what evaluation writes does not last
                pairs = enumerate(zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True))
                notes.touched = tuple(number for number, (one, other) in pairs if one is not other)
            return sums, new

        return jx.trace(loss, self._params, rest, axes={**self.traced_axes, **axes})

    def _check(
        self, whole: jx.Flat, program: Program, outputs: Any, rest: Any, noted: Sequence[str], notes: Notes
    ) -> None:
        """Refuse, or warn of, what would not be as on one device; and tell the layout how its layers run."""
        check_ordered(whole, self.layout.mesh.size)
        check_breakpoints(whole, self.layout.mesh.size)
        self.layout.loops.update(described(program, self.layout.storage))
        if self.schedule is not None:
            check_pipe(program, outputs[1], self.layout, self.strategy)
            if program.main is not None:
                warn_padded(program.main.length, self.schedule.ranks, self.schedule.chunks)
        if notes.touched:
            notes.writes = find_writes(self.model, self.layout, self.strategy, notes.touched, rest)
        warn_gathered(program, self.layout)
        check_remat(program, self.layout, self.strategy, self.schedule)
        check_independent_of_replicas(program, outputs, len(jax.tree.leaves(rest)), frozenset(self.axes))
        warn_precision(whole, self.layout.policy.compute, self.strategy.precision)
        warn_untrained(whole, outputs, self.layout.storage.units)
        notes.unread = self._unread(whole, rest)
        warned = {path for earlier in self._traced.values() for path in earlier.notes.unread}
        warn_unread([path for path in notes.unread if path not in warned])
        leaves = [(leaf.path, leaf.logical) for leaf in self.layout.storage.units]
        if self.astray and (said := self.astray(whole, leaves)):
            warnings.warn(said, stacklevel=2)
        replicas, m, trace = math.prod(self.axes.values()), self.strategy.microbatches, lambda *a: self._trace(*a)[0]
        # With another number of rows, or other choices, the loss couples what it coupled before.
        known = next((old for kind, old in self._traced.items() if kind[0] == jax.tree.structure(rest)), None)
        if known is not None:
            notes.doubts = known.notes.doubts
        elif self.model.rows is None and replicas * m > 1:
            warn_rows_of_a_microbatch(noted, rows_of(rest[1]) * replicas, m)
            told = heard(lambda: check_coupling(whole, outputs, rest, trace, self.axes, self.strategy))
            notes.doubts = [said for said in (str(w.message) for w in told) if said.startswith("the loss ")]
