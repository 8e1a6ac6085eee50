"""Find the loops over alike blocks in a traced program, and roll them into scans.

A loop may run over several lists at once (`zip(layers, ffs)`), or over rows of one stacked parameter (`weights[i]`). It
may run twice in one loss, over a part of a list, or from its end (`reversed(layers)`). Blocks may alternate with a
period of at most 8. Then one round of the scan is one period of blocks:

    period 1    b0 | b1 | b2 | b3 | b4 | b5               period 2    a0 b1 | a2 b3 | a4 b5

Blocks that fill no round stay as they are written, or become a scan of their own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec

from ...program import jaxpr as jx
from .align import NotAlike, Span
from .indexing import slice_rows
from .readings import Pass, Readings, Row, find_rows, key_derivations
from .roll import roll, row_eqns

# A family: for each stack, its position among the program's inputs, and the positions of its layers.
StackMembers = Sequence[tuple[int, Sequence[int]]]
_PERIODS = range(1, 9)
_ADD_LEADING_DIM = ("broadcast_in_dim", "reshape")  # primitives that may put a dim of size 1 in front


@dataclass(frozen=True)
class RolledLoop:
    """The outcome for one loop: which blocks became scans.

    Attributes:
      leaf: the first leaf of the loop.
      depth: the number of its blocks.
      spans: the scans, of each pass in order.
      unrolled: the blocks that run one by one.
      difference: the first difference between blocks, if some run one by one or a pass became several scans; else None.
    """

    leaf: int
    depth: int
    spans: tuple[Span, ...]
    unrolled: tuple[int, ...] = ()
    difference: str | None = None


@dataclass(frozen=True)
class _Lists:
    """The lists that one loop runs over.

    Attributes:
      depth: the number of blocks.
      families: lists of leaves, one for each block.
      stacked: leaves whose rows are the blocks, with the dim.
    """

    depth: int
    families: tuple[StackMembers, ...] = ()
    stacked: tuple[tuple[int, int], ...] = ()

    def rows(self, flat: jx.Flat) -> dict[Any, Row]:
        """Return the variables of a program that are the parameters of one block, as rows of their stack."""
        family_rows = {v: Row(stack, k) for v, (stack, k) in _layers_of(flat, self.families).items()}
        sources = {flat.invars[i]: dim for i, dim in self.stacked}
        taken_rows = find_rows(flat.eqns, lambda v: v in sources)
        return family_rows | {v: row for v, row in taken_rows.items() if sources[row.source] == row.dim}


def roll_loops(
    flat: jx.Flat, families: Sequence[StackMembers], params: int, axes: dict[str, int], staged: Sequence[bool] = ()
) -> tuple[jx.Flat, list[RolledLoop]]:
    """Roll the loops of a program into scans.

    Args:
      flat: the program. Its first inputs are the parameters.
      families: the leaves of each list of blocks: the stack, which the program does not read, and its layers, which it
        reads.
      params: the number of parameters.
      axes: mesh axes that the program may name, name -> size.
      staged: for each leaf, whether the stages of a pipeline divide its layers; empty without a pipeline. A layer of
        such a leaf that no scan reads is read from the stack.

    Returns:
      The program with scans, and what became of each loop.
    """
    # 1. Prepare: loops that index their layers slice them, and stacks that the loss makes itself are the stored ones.
    flat = slice_rows(flat, lambda fun, flat: _traced(fun, flat, axes))
    flat, remaining_families = join(flat, families)

    # 2. Roll each loop.
    loops = []
    family_lists = [_Lists(len(family[0][1]), (family,)) for family in remaining_families]
    for lists in _merge_lists(flat, params, [*family_lists, *_stacked_lists(flat, params)]):
        flat, loop = _roll_lists(flat, lists, params, axes)
        if loop is not None:
            loops.append(loop)

    # 3. In a pipeline, a rank has no separate layers: read those that are not in a scan from their stack.
    staged_families = [[(stack, layers) for stack, layers in family if staged and staged[stack]] for family in families]
    stack_of = _layers_of(flat, staged_families)
    if any(v in stack_of for v in jx.free(jx.live(flat.eqns, flat.outvars), flat.outvars)):
        program, inputs = flat, flat.invars

        def fun(*values: Any) -> list[Any]:
            env = dict(zip(inputs, values, strict=True))
            input_values = [env[stack_of[v][0]][stack_of[v][1]] if v in stack_of else env[v] for v in inputs]
            run = jx.run(program.eqns, [*program.constvars, *program.invars], program.outvars)
            return run(*program.consts, *input_values)

        flat = _traced(fun, flat, axes)
    return flat, loops


def _traced(fun: Any, flat: jx.Flat, axes: dict[str, int]) -> jx.Flat:
    """Trace a function of a program's inputs."""
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars]
    return jx.trace(fun, *inputs, axes=axes)[0]


# ----------------------------------------------------------------------------------------------------------------------
# The lists that loops run over.


def _layers_of(flat: jx.Flat, families: Sequence[StackMembers]) -> dict[Any, tuple[Any, int]]:
    """Return, for each variable that is a layer of a family, the variable of its stack and its number there."""
    return {
        flat.invars[i]: (flat.invars[stack], k)
        for family in families
        for stack, members in family
        for k, i in enumerate(members)
    }


def _stacked_lists(flat: jx.Flat, params: int) -> list[_Lists]:
    """Return the leaves that a program reads row by row, every row of a dim by its number."""
    index = {v: i for i, v in enumerate(flat.invars[:params])}
    rows_read: dict[tuple[int, int], set[int]] = {}
    for row in find_rows(flat.eqns, lambda v: v in index).values():
        rows_read.setdefault((index[row.source], row.dim), set()).add(row.index)
    depths = {
        (leaf, dim): len(rows)
        for (leaf, dim), rows in rows_read.items()
        if len(rows) == flat.invars[leaf].aval.shape[dim]
    }
    return [_Lists(depth, (), (leaf_dim,)) for leaf_dim, depth in depths.items() if depth > 1]


def _merge_lists(flat: jx.Flat, params: int, all_lists: Sequence[_Lists]) -> list[_Lists]:
    """Merge the lists that one loop runs over: lists of one length that are still read in order when merged."""
    merged: list[_Lists] = []
    for lists in all_lists:
        last_block = _readings(flat, params, lists)[0].last_block
        # A loop over `zip(a, b)` reads a0 b0 a1 b1 ...: merged, the lists have the same passes. Two consecutive loops
        # read a0 a1 ... b0 b1 ...: merged, they would have more.
        for i, earlier in enumerate(merged):
            union = _Lists(lists.depth, earlier.families + lists.families, earlier.stacked + lists.stacked)
            passes = _pass_bounds(flat, params, earlier)
            same_passes = lists.depth == earlier.depth and _pass_bounds(flat, params, union) == passes
            if same_passes and passes[0] == last_block:
                merged[i] = union
                break
        else:
            merged.append(lists)
    return merged


def _pass_bounds(flat: jx.Flat, params: int, lists: _Lists) -> tuple[int | None, list[tuple[int, int]]]:
    """Return `Readings.last_block`, and the first and the last block (exclusive) of each pass."""
    readings = _readings(flat, params, lists)[0]
    return readings.last_block, [(loop_pass.start, loop_pass.stop) for loop_pass in readings.passes]


def _readings(flat: jx.Flat, params: int, lists: _Lists) -> tuple[Readings, tuple[Any, ...], dict[Any, Row]]:
    """Return the readings of some lists, forwards or from their end, the live equations, and the blocks' parameters."""
    eqns = jx.live(flat.eqns, flat.outvars)
    members = lists.rows(flat)
    block_of = {v: row.index for v, row in members.items()}
    param_vars = set(flat.invars[:params])
    readings = Readings.find(eqns, param_vars, block_of)
    # A loop over `reversed(layers)` has no pass in ascending order.
    if not readings.passes:
        backwards = Readings.find(eqns, param_vars, block_of, lists.depth - 1)
        readings = backwards if backwards.passes else readings
    return readings, eqns, members


# ----------------------------------------------------------------------------------------------------------------------
# The scans of one loop.


def _roll_lists(flat: jx.Flat, lists: _Lists, params: int, axes: dict[str, int]) -> tuple[jx.Flat, RolledLoop | None]:
    """Return a program with every pass over some lists as scans, and what became of the loop."""
    pass_index = len(_pass_bounds(flat, params, lists)[1]) - 1
    leaf = lists.families[0][0][0] if lists.families else lists.stacked[0][0]
    spans: list[Span] = []
    unrolled: list[int] = []
    difference: str | None = None
    if pass_index < 0:
        if not lists.families:
            return flat, None
        return flat, RolledLoop(leaf, lists.depth, (), (), "no block is read after another")
    # From the last pass to the first, and in a pass from the last span: positions in front of a scan stay valid.
    while pass_index >= 0:
        chosen, single_blocks, first_difference = _find_spans(flat, lists, params, pass_index)
        for i in reversed(range(len(chosen))):
            span, fun = chosen[i]
            if i < len(chosen) - 1:  # the program behind this span has changed: roll it again
                fun = _roll_span(flat, _ways(flat, lists, params, pass_index), pass_index, span)
            flat = _traced(fun, flat, axes)
        spans = [span for span, _ in chosen] + spans
        unrolled = single_blocks + unrolled
        difference, pass_index = first_difference or difference, pass_index - 1
    if not lists.families and not spans:  # rows of a parameter that happen to be read one after another
        return flat, None
    return flat, RolledLoop(leaf, lists.depth, tuple(spans), tuple(sorted({*unrolled})), difference)


def _find_spans(
    flat: jx.Flat, lists: _Lists, params: int, pass_index: int
) -> tuple[list[tuple[Span, Any]], list[int], str | None]:
    """Choose the scans of one pass, greedily from its first block: at each block, the longest span of any period.

    Returns:
      Each span with the program that has it as a scan; the blocks in no span; and the first difference between blocks,
      if there are such blocks or several spans.
    """
    ways = _ways(flat, lists, params, pass_index)
    # A pass covers the same blocks in all ways.
    loop_pass, last_block = ways[0][1].passes[pass_index], ways[0][1].last_block
    chosen: list[tuple[Span, Any]] = []
    single_blocks: list[int] = []
    difference: str | None = None
    block = loop_pass.start
    while block < loop_pass.stop:
        longest: tuple[Span, Any] | None = None
        for period in _PERIODS:
            # Try as many rounds as there are, and fewer if they differ, but no span shorter than the longest so far.
            span = Span(block, period, (loop_pass.stop - block) // period, last_block)
            while span.count > 1 and (longest is None or span.stop > longest[0].stop):
                try:
                    longest = span, _roll_span(flat, ways, pass_index, span)
                except NotAlike as error:
                    difference = difference or str(error)
                    # Try again with the rounds before the one that differs. If the second differs, no span has this
                    # period.
                    count = min(error.round_index, span.count - 1) if error.round_index > 1 else 0
                    span = Span(block, period, count, last_block)
            # No larger period can do better than to reach the end.
            if longest is not None and longest[0].stop == loop_pass.stop:
                break
        if longest is None:
            single_blocks.append(block if last_block is None else last_block - block)
        else:
            chosen.append(longest)
        block = block + 1 if longest is None else longest[0].stop
    return chosen, single_blocks, difference if single_blocks or len(chosen) > 1 else None


# Ways to read a program: its equations, sorted by the blocks of a loop, and the rows that a scan may slice.
_Ways = list[tuple[tuple[Any, ...], Readings, Mapping[Any, Row]]]


def _ways(flat: jx.Flat, lists: _Lists, params: int, pass_index: int) -> _Ways:
    """Return the ways in which a pass may be read, best first.

    1. Rows that blocks take of another array (`mask[i]`): the scan slices the array, or they are equations like others.
    2. Random keys: blocks are compared with their derivations, or all keys are derived before the loop. Blocks may
       differ in these alone: the last of `key, block_key = split(key)` does not use the first half.
    """
    readings, eqns, members = _readings(flat, params, lists)
    other_rows = _rows_of_other_arrays(readings, eqns, readings.passes[pass_index])
    ways: _Ways = [(eqns, readings, members)]
    if other_rows:
        without_rows = readings.without({id(e) for e in row_eqns(eqns, other_rows)})
        ways = [(eqns, without_rows, {**members, **other_rows}), *ways]
    if derivations := key_derivations(readings.sequence, (*flat.invars, *flat.constvars)):
        ways += [(eqns, way.without(derivations), rows) for _, way, rows in ways]
    return ways


def _roll_span(flat: jx.Flat, ways: _Ways, pass_index: int, span: Span) -> Any:
    """Return the program with a scan instead of some blocks of a pass, read in the first way that fits.

    Raises:
      NotAlike: the blocks differ in every way; the error is the one of the first way.
    """
    first_error: NotAlike | None = None
    for eqns, readings, rows in ways:
        try:
            return roll(flat, eqns, readings, rows, readings.passes[pass_index], span)
        except NotAlike as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _rows_of_other_arrays(readings: Readings, eqns: Sequence[Any], loop_pass: Pass) -> Mapping[Any, Row]:
    """Return the rows that are taken of arrays which exist before a pass begins, if several rows of an array are."""
    defined_at = {v: i for i, e in enumerate(readings.sequence) for v in e.outvars}
    rows = find_rows(eqns, lambda v: defined_at.get(v, -1) < loop_pass.first_reads[0])
    indices: dict[Any, set[int]] = {}
    for row in rows.values():
        indices.setdefault((row.source, row.dim), set()).add(row.index)
    return {v: row for v, row in rows.items() if len(indices[row.source, row.dim]) > 1}


# ----------------------------------------------------------------------------------------------------------------------
# Stacks that a loss makes itself.


def join(flat: jx.Flat, families: Sequence[StackMembers]) -> tuple[jx.Flat, list[StackMembers]]:
    """Replace each equation that stacks all layers of a family in order by the stored stack.

    Some losses stack their layers with `jnp.stack` before they scan them. These layers are stored as one stack already.
    Without this step, the loss would fetch all layers to stack them again.

    Returns:
      The program, and the families whose layers it still reads one by one.
    """
    layer_of = _layers_of(flat, families)
    defined_by = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    replaced = jx.Environment[Any]({}, jx.itself)  # a stack that the program makes -> the stored one
    eqns: list[Any] = []
    for eqn in flat.eqns:
        stack: Any
        stack, casts = _joined(eqn, defined_by, layer_of)
        if stack is None:
            eqns.append(eqn.replace(invars=replaced.read(eqn.invars)))
            continue
        # The casts of the layers become casts of the stack.
        for cast in casts:
            cast_stack: Any = jec.Var(cast.outvars[0].aval.update(shape=stack.aval.shape))
            eqns.append(cast.replace(invars=[stack], outvars=[cast_stack]))
            stack = cast_stack
        replaced[eqn.outvars[0]] = stack
    if not replaced:
        return flat, list(families)
    # A family may be read in both ways. One that is read in neither stays, so that it is reported.
    flat = dataclasses.replace(flat, eqns=tuple(eqns), outvars=tuple(replaced.read(flat.outvars)))
    read = set(jx.free(jx.live(flat.eqns, flat.outvars), flat.outvars))
    reads_layers = lambda family: any(flat.invars[i] in read for _, members in family for i in members)
    reads_stack = lambda family: any(flat.invars[stack] in read for stack, _ in family)
    return flat, [family for family in families if reads_layers(family) or not reads_stack(family)]


def _joined(eqn: Any, defined_by: Mapping[Any, Any], layer_of: Mapping[Any, tuple[Any, int]]) -> tuple[Any, list[Any]]:
    """Return the stack whose layers an equation stacks, and the casts of each layer; (None, []) for other equations.

    Args:
      defined_by: the equation that defines each variable.
      layer_of: as `_layers_of` returns.
    """
    name, params = eqn.primitive.name, eqn.params
    if name not in ("concatenate", "stack") or params.get("dimension", params.get("axis")) != 0:
        return None, []
    # The operands must be all layers of one stack, in order, with the same casts.
    layers = [_find_layer(v, defined_by, layer_of, name == "stack") for v in eqn.invars]
    first = layers[0]
    if first is None or first[0].aval.shape != eqn.outvars[0].aval.shape:
        return None, []
    dtypes = lambda casts: [(e.params["new_dtype"], e.params["weak_type"]) for e in casts]
    for k, layer in enumerate(layers):
        if layer is None or layer[0] is not first[0] or layer[1] != k or dtypes(layer[2]) != dtypes(first[2]):
            return None, []
    return first[0], first[2]


def _find_layer(
    var: Any, defined_by: Mapping[Any, Any], layer_of: Mapping[Any, tuple[Any, int]], has_leading_dim: bool
) -> tuple[Any, int, list[Any]] | None:
    """Return the stack, the number of the layer and its casts, if a variable is a layer, cast and maybe reshaped.

    Args:
      var: the variable: an operand of `stack`, or one of `concatenate`, which needs a dim of size 1 in front.
      defined_by, layer_of: as in `_joined`.
      has_leading_dim: True if the dim in front is not needed, as for `stack`.
    """
    casts: list[Any] = []
    # Walk back from the operand to a layer, through casts and at most one reshape that adds the dim in front.
    while not jx.is_literal(var) and var not in layer_of and var in defined_by:
        eqn = defined_by[var]
        if eqn.primitive.name == "convert_element_type":
            casts.insert(0, eqn)
        elif not has_leading_dim and eqn.primitive.name in _ADD_LEADING_DIM and len(eqn.invars) == 1:
            shape = eqn.invars[0].aval.shape
            inner_dims = tuple(range(1, len(shape) + 1))
            if var.aval.shape != (1, *shape) or eqn.params.get("broadcast_dimensions", inner_dims) != inner_dims:
                return None
            has_leading_dim = True
        else:
            return None
        var = eqn.invars[0]
    if jx.is_literal(var) or var not in layer_of or not has_leading_dim:
        return None
    return (*layer_of[var], casts)
