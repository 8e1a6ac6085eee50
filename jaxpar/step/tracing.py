"""A model's loss as the program of one device: traced, rewritten, sliced, and checked against its strategy.

    model.forward  --trace-->  jx.Flat  --passes-->  PlacedLoss.flat  --slice-->  Program (segments and layer stacks)
                               all ranks             one rank                     fetches parameters where it runs

The loss is the loss of one microbatch of one replica (a block of rows). It is traced once for batches of one shape,
before anything runs. Two records hold it:

    Traced   abstract: the program, the shapes that it reads, the positions of its outputs; reports read it
    Loss     on arrays: the program with a device's stored parameters, `forward` and `backward` of one microbatch
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

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
from ..slicing.flights import Flights
from ..slicing.program import Program
from ..slicing.slicer import Slicing, cut_program, slice_program
from ..slicing.stacks import described
from .loss_warnings import (
    recorded_warnings,
    unread_leaves,
    warn_gathered,
    warn_padded,
    warn_precision,
    warn_rows_of_a_microbatch,
    warn_unread,
    warn_untrained,
)
from .passes import Notes, PlacedLoss, Setting, rewrite
from .refusals import (
    check_breakpoints,
    check_independent_of_replicas,
    check_ordered,
    check_pipe,
    check_remat,
    succeeds,
    whole_batch_error,
)
from .rows import check_coupling
from .writes import Writes, find_writes

Sums = dict[str, Mean]  # metric -> its total and count over some rows


@dataclass(frozen=True)
class Traced:
    """The loss of one microbatch as the program of one device, and the abstract values that it reads.

    Attributes:
      program: the loss in pieces, segments and layer stacks (`slicing/program.py`).
      outputs: `({metric: Mean}, variables)`, with the position of each output among the program's instead of its value.
      leaves: the part of each parameter that the program reads, as `jax.ShapeDtypeStruct` in the compute dtype: one
        tensor rank's part; of layers that pipeline stages own, the layers of one rank.
      variables: the model's variables.
      rows: the rows of one microbatch of one replica, [rows, ...].
      key: the key of dropout.
      concurrent: how many microbatches the program runs side by side.
      axes, summed, traced_axes, schedule: as in `Setting` (`passes.py`).
      lookups: by path, integer leaves of the batch that the loss uses unchanged as indices into another array.
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
        """The program's inputs except parameters: variables, and the rows and key of each concurrent microbatch."""
        repeat = lambda x: (x,) * self.concurrent if self.concurrent > 1 else x
        return self.variables, *jax.tree.map(repeat, (self.rows, self.key))

    def reads(self, name: str) -> bool:
        """Return whether the loss depends on the leaf of the batch with this path; False if there is no such leaf."""
        # Paths begin with the position in `inputs`: 1 is the rows. All concurrent microbatches read the same leaves.
        leaves, first_microbatch = jax.tree_util.tree_leaves_with_path(self.inputs), "/0" * (self.concurrent > 1)
        inputs = zip(leaves, self.program.inputs[len(self.program.consts) :], strict=True)
        variables = [v for (path, _), v in inputs if name_of(path) == f"1/{name}{first_microbatch}"]
        return bool(variables) and self.program.depends(variables, self.total)

    @property
    def draws(self) -> bool:
        """Whether the loss depends on its key, as dropout does."""
        return self.key is not None and self.program.depends(self.program.inputs[-1:], self.total)

    @property
    def total(self) -> int:
        """The position of the output that is differentiated: the loss's sum over rows."""
        return self.outputs[0]["loss"].total  # type: ignore[return-value]

    @property
    def count(self) -> int:
        """The position of the output that `total` is divided by, once both are summed over all rows."""
        return self.outputs[0]["loss"].count  # type: ignore[return-value]

    @property
    def counts(self) -> bool:
        """Whether the count depends on the batch (rows, tokens); the count of a plain mean is 1 per microbatch."""
        return self.program.depends(self.program.inputs, self.count)


@dataclass(frozen=True)
class Loss:
    """A traced loss on the parameters of one device: the forward and the backward of one microbatch.

    Attributes:
      access: how parameters are fetched and gradients returned (`fetch` and `give`): a rule on the leaves
        (`parallel/data/access.py`), or a substitute for it.
      stored: what this device stores of each parameter.
    """

    traced: Traced
    access: Any
    stored: Sequence[jax.Array]

    def forward(
        self, variables: Any, rows: Any, key: Any, grad: bool = True, flights: Flights | None = None
    ) -> tuple[Sums, Any, list[Any]]:
        """Run the forward of one microbatch.

        Args:
          variables, rows, key: as in `Traced`.
          grad: whether a backward follows.
          flights: the prefetched layers before this microbatch (`Program.in_flight`), which it updates.

        Returns:
          The sums of each metric, the new variables, and the tape that `backward` reads.
        """
        values = jax.tree.leaves((variables, rows, key))
        outs, tape = self.traced.program.forward(self.access, self.stored, values, grad, flights)
        return *jax.tree.unflatten(jax.tree.structure(self.traced.outputs), outs), tape

    def backward(self, tape: Any, seed: jax.Array, into: Sequence[Any], flights: Flights | None = None) -> list[Any]:
        """Add the gradients of one microbatch to the accumulators.

        Args:
          tape: from `forward`.
          seed: the cotangent of the microbatch's total.
          into: the accumulated gradient of each parameter; None before its first.
          flights: as `forward` left them.

        Returns:
          The new accumulators; None stays where the loss does not depend on a parameter.
        """
        return self.traced.program.backward(self.access, self.stored, tape, {self.traced.total: seed}, into, flights)


class _Rewritten(NamedTuple):
    """A traced loss before it is sliced.

    Attributes:
      unsplit: its equations before any pass.
      tree: the structure of its results, `({metric: Mean}, variables)`.
      loss: its equations on one device.
      noted: the calls that read rows of other replicas (`model.couplings`).
      notes: the notes of the passes.
    """

    unsplit: jx.Flat
    tree: Any
    loss: PlacedLoss
    noted: Sequence[str]
    notes: Notes


@dataclass(frozen=True, kw_only=True)
class Tracing(Setting):
    """Traces the loss of one model under one strategy; the attributes of `Setting` come first.

    Attributes:
      matrix_warning: for an optimizer of matrices, a function of a loss and its leaves that returns the text of a
        warning, or None.
      choices: for each stack, what happens to the values that its layers save (`Residuals.kept`); empty until
        remat="auto" has chosen.
    """

    model: Model
    matrix_warning: Callable[[jx.Flat, Sequence[tuple[str, tuple[int, ...]]]], str | None] | None = None
    choices: tuple[str, ...] = ()
    # Tracings with other choices or another remat share both, so that no warning is repeated, and the model's code
    # runs once for all of them.
    _traced: dict[Any, Traced] = field(default_factory=dict, compare=False, repr=False)
    _rewritten: dict[Any, "_Rewritten"] = field(default_factory=dict, compare=False, repr=False)

    @property
    def writes(self) -> Writes | None:
        """The loss's writes to its parameters; None if it writes nothing, or before a step is traced."""
        return next((x.notes.writes for x in reversed(self._traced.values()) if x.notes.writes), None)

    def __call__(self, variables: Any, rows: Any, key: jax.Array | None) -> Traced:
        """Return the traced loss for one microbatch, of arrays or shapes; each kind of inputs is traced once."""
        # With a key the loss is traced for training, without one (None, part of the tree) for evaluation.
        leaves, tree = jax.tree.flatten((variables, rows, key))
        kind = (tree, self.strategy.concurrent, *((jnp.shape(x), x.dtype) for x in leaves))
        if (chosen := (*kind, self.strategy.remat, self.choices)) not in self._traced:
            # Without shardings and weak types, so that arrays and shapes give one trace.
            abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
            inputs = jax.tree.map(abstract, (variables, rows, key))
            if kind not in self._rewritten:
                self._rewritten[kind] = self._rewrite(inputs)
            self._traced[chosen] = self._make(self._rewritten[kind])
        return self._traced[chosen]

    def takes_all_rows(self, traced: Traced) -> bool:
        """Return whether the loss would read rows of other replicas, as with `jp.all_rows` or BatchNorm."""
        # Traced for two replicas, since with one there are no other rows to read.
        with couplings() as noted:
            flat, _ = self._trace((traced.variables, traced.rows, traced.key), {"data": 2})
        return bool(noted) or jx.communicates(flat.eqns)

    def _rewrite(self, inputs: Any) -> "_Rewritten":
        """Trace a loss of these abstract values, and rewrite it for one device; neither depends on `remat`."""
        # 1. Trace: the model's code runs once, on the parameters of all ranks, and leaves its equations.
        notes = Notes()
        with couplings() as noted:
            unsplit, out = self._trace_block(inputs, notes)
        # 2. Rewrite them for one device (`PASSES`).
        num_sums = len(jax.tree.leaves(out[0]))
        loss = rewrite(self, PlacedLoss(unsplit, self.layout.storage.units, inputs, num_sums, unsplit), notes)
        return _Rewritten(unsplit, jax.tree.structure(out), loss, noted, notes)

    def _make(self, rewritten: "_Rewritten") -> Traced:
        """Make the program of a rewritten loss; `Step._train` continues from here."""
        unsplit, tree, loss, noted = rewritten.unsplit, rewritten.tree, rewritten.loss, rewritten.noted
        # The checks add to the notes of this program alone.
        inputs, notes = loss.inputs, replace(rewritten.notes)
        # 1. Slice it.
        program = replace(
            self._sliced(loss), loops=tuple(notes.loops), coupled=bool(noted) or jx.communicates(unsplit.eqns)
        )
        # 2. Check the program (refusals.py, loss_warnings.py, rows/). Outputs are known by position from here on.
        outputs = jax.tree.unflatten(tree, list(range(tree.num_leaves)))
        self._check(unsplit, program, outputs, inputs, noted, notes)
        variables, rows, key = inputs
        lookups_by_path = self._lookups(unsplit, variables, rows)
        abstract = (self._leaves(loss.placements), variables, rows, key, self.strategy.concurrent)
        axes = (self.axes, self.summed, self.traced_axes)
        return Traced(program, outputs, *abstract, *axes, self.schedule, lookups_by_path, notes)

    def _sliced(self, loss: PlacedLoss) -> Program:
        """Cut a loss into segments and layer stacks, or into the stages of a pipeline."""
        units = self.layout.storage.units
        # The sharded dim of a layer is counted without the dim of chunks.
        sharded = [None if leaf.dim is None else leaf.dim - leaf.stage for leaf in units]
        # "h": saved values go to the host; "s": they stay on the device (`Residuals.kept`).
        default_choice = "h" if "activations" in self.strategy.offloads else "s"
        remat = self.strategy.remat
        options = Slicing(self._params, sharded, self.staged, self.traced_axes, remat, self.choices, default_choice)
        if self.layout.storage.cut:
            return cut_program(loss.flat, options, self._cut)
        return slice_program(loss.flat, options)

    def _lookups(self, flat: jx.Flat, variables: Any, rows: Any) -> dict[str, Lookup]:
        """Return the integer leaves of the batch that the loss uses as indices, by path."""
        # The program's inputs are parameters, variables, rows and key.
        first_row = len(self._params) + len(jax.tree.leaves(variables))
        leaves = enumerate(jax.tree_util.tree_leaves_with_path(rows), first_row)
        names = {i: name_of(path) for i, (path, x) in leaves if jnp.issubdtype(x.dtype, jnp.integer)}
        return {names[i]: lookup for i, lookup in lookups(flat, list(names)).items()}

    def _unread(self, unsplit: jx.Flat, inputs: Any) -> list[str]:
        """Return the paths of leaves with rows that the loss reads neither in a step nor, without key, in evaluate."""
        (variables, rows, key), num_params = inputs, len(self._params)
        # Usually all leaves are read, and no second trace is needed.
        if not (names := unread_leaves(unsplit, inputs, num_params)):
            return []
        # A loss may read a leaf in one of the two modes alone, so that the other one is traced too.
        other_inputs = variables, rows, None if key is not None else jax.eval_shape(lambda: jax.random.key(0))
        try:
            flat, _ = self._trace(other_inputs, self.axes)
        except Exception:
            # The user's code may raise anything. A loss that needs its key runs in a step alone, as traced above.
            return names
        unread_in_both = unread_leaves(flat, other_inputs, num_params)
        return [name for name in names if name in unread_in_both]

    def _cut(self, eqns: Sequence[Any], reads: Sequence[frozenset[int]]) -> list[list[Any]]:
        """Divide equations into the stages of a pipeline.

        Args:
          reads: for each of them, the positions of the parameters that it reads.
        """
        assert self.schedule is not None
        ranks, chunks = self.schedule.ranks, self.schedule.chunks
        # 1. At the modules that the user names.
        if self.strategy.cuts:
            paths = [leaf.path for leaf in self.layout.leaves]
            cuts = points(self.strategy.cuts, ranks * chunks, paths)
            return stages_at(eqns, reads, [(cut, frozenset(below(cut, paths))) for cut in cuts])
        # 2. Else where the stages come out balanced.
        if len(eqns) < ranks * chunks:
            raise ValueError(
                f"pipe={ranks} x chunks={chunks} makes {ranks * chunks} stages of a loss that has {len(eqns)} "
                "operations; use fewer stages, or data or fsdp instead of pipe"
            )
        return stages_of(eqns, ranks * chunks)

    @property
    def _params(self) -> list[jax.ShapeDtypeStruct]:
        """The parameters as a loss sees them: undivided, in the compute dtype."""
        computed = self.layout.policy.computed
        return [jax.ShapeDtypeStruct(leaf.logical, computed(leaf.dtype)) for leaf in self.layout.storage.units]

    def _leaves(self, placements: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
        """Return the parameters as the program of one device reads them: one rank's part, one stage's layers."""

        def shape(leaf: Leaf) -> tuple[int, ...]:
            if leaf.layers is None:
                return leaf.logical
            # All chunks of a rank, padding included, lie on dim 0.
            return (math.prod(leaf.shape[: leaf.stage + 1]) // self.sizes["pipe"], *leaf.logical[1:])

        params = zip(placements, self._params, strict=True)
        return [jax.ShapeDtypeStruct(shape(leaf), param.dtype) for leaf, param in params]

    def _trace_block(self, inputs: Any, notes: Notes) -> tuple[jx.Flat, Any]:
        """Trace the loss of one block, with notes.

        Raises ValueError for a loss that takes the rows of a whole batch, but not of a block, such as groups of rows.
        """
        try:
            return self._trace(inputs, self.axes, notes)
        except (TypeError, ValueError) as error:
            (variables, rows, key), replicas = inputs, math.prod(self.axes.values())
            num_rows, loss, blocks = rows_of(rows), self._trace, (replicas, self.strategy.microbatches)
            # Whether the loss takes another number of rows; then it is the cut into blocks that does not fit.
            takes = lambda n: succeeds(loss, (variables, one_block(rows, Fraction(num_rows, n)), key), self.axes)
            if math.prod(blocks) == 1 or not takes(num_rows * math.prod(blocks)):
                raise
            raise ValueError(whole_batch_error(error, variables, num_rows, blocks, takes)) from error

    def _trace(self, inputs: Any, axes: Mapping[str, int], notes: Notes | None = None) -> tuple[jx.Flat, Any]:
        """Trace the model's loss.

        Args:
          inputs: abstract variables, rows and key.
          axes: the mesh axes over which rows are spread.
          notes: if given, they record which parameters the loss returns as other values.

        Returns:
          The equations, whose first inputs are the parameters as the layout stores them (`Storage.units`); and the
          abstract tree of the results.
        """
        storage = self.layout.storage

        def loss(leaves: Sequence[Any], inputs: Any) -> Any:
            variables, rows, key = inputs
            try:
                # The model's own tree, so that the user's code sees its layers as it wrote them.
                params = storage.of_units(leaves)
                sums, new_variables, new_params = self.model.forward(params, variables, rows, key, tuple(axes))
            except TypeError as error:  # such as a scan whose carry changes its dtype
                if (precision := self.strategy.precision) != "f32":
                    error.add_note(
                        f"precision={precision!r} gives the loss its parameters in {self.layout.policy.compute}; if it "
                        "works with precision='f32', one of its modules computes in another dtype: pass the same "
                        "dtype= to that module, or cast what it returns"
                    )
                raise
            # Without a key the loss is evaluated, and no write of an evaluation lasts.
            if notes is not None and key is not None:
                pairs = enumerate(zip(jax.tree.leaves(params), jax.tree.leaves(new_params), strict=True))
                notes.touched = tuple(i for i, (param, new_param) in pairs if param is not new_param)
            return sums, new_variables

        return jx.trace(loss, self._params, inputs, axes={**self.traced_axes, **axes})

    def _check(
        self, unsplit: jx.Flat, program: Program, outputs: Any, inputs: Any, noted: Sequence[str], notes: Notes
    ) -> None:
        """Raise an error, or warn, if a step would differ from one device's; tell the layout how its layers run.

        Args:
          unsplit: the equations of the loss before any pass split them.
          program: the sliced loss.
          outputs: the positions of its results, as in `Traced`.
          inputs: abstract variables, rows and key.
          noted: the calls that read rows of other replicas (`model.couplings`).
          notes: the notes of the passes, to which the checks add.
        """
        # 1. Errors: programs that cannot run on several devices, in a pipeline, or with this remat.
        check_ordered(unsplit, self.layout.mesh.size)
        check_breakpoints(unsplit, self.layout.mesh.size)
        # For `print(step.layout)`, and for the text of the warning below.
        self.layout.loops.update(described(program, self.layout.storage))
        if self.schedule is not None:
            check_pipe(program, outputs[1], self.layout, self.strategy)
            if program.main is not None:
                warn_padded(program.main.length, self.schedule.ranks, self.schedule.chunks)
        if notes.touched:
            notes.writes = find_writes(self.model, self.layout, self.strategy, notes.touched, inputs)
        warn_gathered(program, self.layout)
        check_remat(program, self.layout, self.strategy, self.schedule)
        check_independent_of_replicas(program, outputs, len(jax.tree.leaves(inputs)), frozenset(self.axes))

        # 2. Warnings. Leaves that an earlier trace warned of are not named again.
        warn_precision(unsplit, self.layout.policy.compute, self.strategy.precision)
        warn_untrained(unsplit, outputs, self.layout.storage.units)
        notes.unread = self._unread(unsplit, inputs)
        warned = {path for earlier in self._traced.values() for path in earlier.notes.unread}
        warn_unread([path for path in notes.unread if path not in warned])
        leaves = [(leaf.path, leaf.logical) for leaf in self.layout.storage.units]
        if self.matrix_warning and (warning := self.matrix_warning(unsplit, leaves)):
            warnings.warn(warning, stacklevel=2)

        # 3. Rows that the loss couples. With another number of rows, or other choices, it couples the same.
        replicas, m, trace = math.prod(self.axes.values()), self.strategy.microbatches, lambda *a: self._trace(*a)[0]
        earlier = next((x for kind, x in self._traced.items() if kind[0] == jax.tree.structure(inputs)), None)
        if earlier is not None:
            notes.doubts = earlier.notes.doubts
        elif self.model.rows is None and replicas * m > 1:
            warn_rows_of_a_microbatch(noted, rows_of(inputs[1]) * replicas, m)
            caught = recorded_warnings(lambda: check_coupling(unsplit, outputs, inputs, trace, self.axes, m))
            notes.doubts = [text for text in (str(w.message) for w in caught) if text.startswith("the loss ")]
