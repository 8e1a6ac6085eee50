"""Find in an optimizer's program what it does with whole matrices, and make the program of a single matrix.

Muon, Shampoo, SOAP and GaLore multiply or factorise the dims of a leaf; AdamW works element by element. As in
`elementwise.py`, neither a name nor a trial tells which one an optimizer is. So its update is traced, and the dims of
each leaf are followed through the program (`program/dims.py`). The equations between the products of one leaf are its
region:

    gradients, state --> elementwise --> [ region: products, norms, ... of one leaf ] --> elementwise --> updates, state

    update_program   traces the update, and finds its products          -> UpdateProgram
    region_of        finds the region of one leaf                       -> Region
    one_matrix       makes the program of a single matrix of the leaf   -> jx.Flat

A dim of a stack is a batch dim if the program never combines two of its indices, as with layers. The program of one
matrix is the region on one index of each batch dim. `parallel/tensor` makes it, by rewriting the region for as many
ranks as there are layers. `owners.py` then decides which rank runs the program on which matrix.
"""

from __future__ import annotations

import functools
import graphlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ...layout.leaves import Staged
from ...layout.storage import Storage
from ...model.paths import name_of
from ...parallel.tensor import RULES
from ...parallel.tensor.edges import EDGES
from ...parallel.tensor.localiser import Localiser, LocalValue
from ...program import dims as followed
from ...program import equal, primitives
from ...program import jaxpr as jx
from ...program.primitives import PRODUCTS
from ...program.walk import visit
from .elementwise import remembered, traced_update

LeafDims = Mapping[int, frozenset[int]]  # some dims of leaves, by the number of the leaf


@dataclass(frozen=True)
class UpdateProgram:
    """An optimizer's update, traced on the leaves that it sees; or a branch of a `cond` in it.

    Attributes:
      flat: the program. An update maps (params, gradients, state, value) to the changes and the next state.
      values: the followed value of each variable. Its sources are the leaves, by number; arrays of the state that
        belong to a leaf count as values of that leaf.
      state: for each variable that is an array of the state, before or after the update, the number of that array.
      products: for each equation, the dims along which it multiplies or factorises leaves.
      branches: by the number of its equation, the branches of each `cond` that works on several leaves.
      tree: the tree of the results of an update.
    """

    flat: jx.Flat
    values: Mapping[Any, followed.Followed]
    state: Mapping[Any, int]
    products: tuple[LeafDims, ...]
    branches: Mapping[int, tuple[UpdateProgram, ...]]
    tree: Any = None

    @staticmethod
    def from_inputs(
        flat: jx.Flat, inputs: Sequence[followed.Followed], state: Mapping[Any, int], tree: Any = None
    ) -> UpdateProgram:
        """Follow the leaves through a program, from the followed values of its inputs."""
        # Values that nobody reads must not be exchanged.
        flat = replace(flat, eqns=jx.live(flat.eqns, flat.outvars))
        eqn_products: dict[int, frozenset[int]] = {}  # of the equation that is being followed
        products: list[LeafDims] = []

        def note_products(eqn: Any, ins: Sequence[followed.Followed]) -> frozenset[int]:
            for i, dims in multiplied(eqn, ins):
                eqn_products[i] = eqn_products.get(i, frozenset()) | dims
            return frozenset()

        follower, values = followed.Follower(note_products), dict(zip(flat.invars, inputs, strict=True))
        branches: dict[int, tuple[UpdateProgram, ...]] = {}
        for k, eqn in enumerate(flat.eqns):
            eqn_products.clear()
            follower.follow([eqn], values)
            products.append(dict(eqn_products))
            # A `cond` that multiplies matrices of several leaves has owners within its branches.
            variables = [v for v in (*eqn.invars[1:], *eqn.outvars) if not jx.is_literal(v)]
            leaves = {i for v in variables for i, _ in values.get(v, followed.NOTHING).views}
            if eqn_products and eqn.primitive.name == "cond" and len(leaves) > 1:
                branch_jaxprs = eqn.params["branches"]
                branches[k] = tuple(_branch(jx.flatten(jaxpr), eqn, values, state) for jaxpr in branch_jaxprs)
        return UpdateProgram(flat, values, state, tuple(products), branches, tree)

    @property
    def leaves(self) -> dict[int, frozenset[int]]:
        """The leaves that are multiplied or factorised, with the dims along which they are."""
        return {
            i: frozenset().union(*(eqn_dims.get(i, ()) for eqn_dims in self.products))
            for leaf_dims in self.products
            for i in leaf_dims
        }

    @property
    def factors(self) -> bool:
        """Whether the optimizer has arrays of a leaf in another shape, such as Shampoo's factors."""
        return any(v.aval.shape != self.flat.invars[i].aval.shape for v in self.state for i in self.views(v))

    @functools.cached_property
    def users(self) -> dict[Any, set[int]]:
        """The numbers of the equations that read each variable; -1 for the program's caller."""
        users: dict[Any, set[int]] = {}
        for k, variables in [*enumerate(eqn.invars for eqn in self.flat.eqns), (-1, self.flat.outvars)]:
            for v in variables:
                if not jx.is_literal(v):
                    users.setdefault(v, set()).add(k)
        return users

    def views(self, v: Any) -> dict[int, followed.Dims]:
        """Return the dims of a value for each leaf that it belongs to, by the leaf's number."""
        return {} if jx.is_literal(v) else dict(self.values.get(v, followed.NOTHING).views)


def _branch(
    flat: jx.Flat, eqn: Any, values: Mapping[Any, followed.Followed], state: Mapping[Any, int]
) -> UpdateProgram:
    """Return a branch of a `cond` as a program, whose inputs are the operands and whose outputs are the results."""
    outer_vars = [None if jx.is_literal(v) else v for v in (*eqn.invars[1:], *eqn.outvars)]
    inputs = [values.get(v, followed.NOTHING) for v in outer_vars[: len(flat.invars)]]
    pairs = zip((*flat.invars, *flat.outvars), outer_vars, strict=True)
    branch_state = {v: state[outer] for v, outer in pairs if not jx.is_literal(v) and outer in state}
    return UpdateProgram.from_inputs(flat, inputs, branch_state)


@remembered
def update_program(optimizer: Any, tree: Any, masters: tuple[Any, ...]) -> UpdateProgram | None:
    """Trace the update of an optimizer of whole matrices.

    Args:
      optimizer: an optax transformation with extra arguments.
      tree: the tree of the parameters that it sees.
      masters: their abstract masters.

    Returns:
      The update, or None for an optimizer that neither multiplies nor factorises leaves, such as AdamW.
    """
    params = jax.tree.unflatten(tree, masters)
    try:
        state, flat, results = traced_update(optimizer, params)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        # The optimizer needs an argument that a step does not have. The step reports this when it is traced itself.
        return None
    if not _has_products(flat.eqns):
        return None
    leaf_numbers = {name_of(path): i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    leaf_values = [followed.source(i, leaf.shape) for i, leaf in enumerate(masters)]
    state_values = [
        _state_value(name_of(path), x, leaf_numbers, masters) for path, x in jax.tree_util.tree_leaves_with_path(state)
    ]
    # The program's inputs are (params, gradients, state, loss), its outputs (changes, next state).
    state_ins = flat.invars[2 * len(leaf_values) : -1]
    state_outs = flat.outvars[len(flat.outvars) - len(state_values) :]
    state_numbers = {v: i for side in (state_ins, state_outs) for i, v in enumerate(side) if not jx.is_literal(v)}
    inputs = (*leaf_values, *leaf_values, *state_values, followed.NOTHING)
    # The leaf values twice: for the parameters, and for their gradients.
    program = UpdateProgram.from_inputs(flat, inputs, state_numbers, jax.tree.structure(results))
    return program if program.leaves else None


def _state_value(name: str, x: Any, leaf_numbers: dict[str, int], leaves: Sequence[Any]) -> followed.Followed:
    """Return the followed value of an array of the state, as a value of the leaf whose path its name contains.

    Its leading dims are the leaf's, as far as their sizes agree. If it is one of several arrays of the leaf, such as
    the factors `GG/kernel/0` and `GG/kernel/1`, its last two dims are never the leaf's.
    """
    keys = name.split("/")
    # The match that ends last, and the longest of these.
    spans = ((start, stop) for stop in range(len(keys), 0, -1) for start in range(stop))
    number, end = next(
        ((leaf_numbers[path], stop) for start, stop in spans if (path := "/".join(keys[start:stop])) in leaf_numbers),
        (None, 0),
    )
    if number is None or not x.shape:
        return followed.NOTHING
    num_shared, shape = 0, leaves[number].shape
    max_shared = min(len(shape), x.ndim if end == len(keys) else x.ndim - 2)
    while num_shared < max_shared and shape[num_shared] == x.shape[num_shared]:
        num_shared += 1
    shared_dims = followed.source(number, shape).views[0][1][:num_shared]
    new_dims = tuple((followed.DimPart(-1, 0, n),) for n in x.shape[num_shared:])
    return followed.Followed(((number, (*shared_dims, *new_dims)),), frozenset({number}))


def _has_products(eqns: Iterable[Any]) -> bool:
    """Return whether some equation, or one inside it, is a product or a factorisation, as inside `linalg.solve`."""
    return any(eqn.primitive.name in PRODUCTS or primitives.of(eqn).factorises for eqn, _ in visit(eqns))


def multiplied(eqn: Any, ins: Sequence[followed.Followed]) -> list[tuple[int, frozenset[int]]]:
    """Return the leaves that an equation multiplies or factorises, with the dims of theirs along which it does.

    A product of factors of a leaf counts too, without dims of the leaf. A sum of squares is no product.

    Returns:
      (number of a leaf, dims) for each operand that belongs to a leaf.
    """
    name = eqn.primitive.name
    products: list[tuple[int, frozenset[int]]] = []
    for side, operand in enumerate(ins):
        for i, dims in operand.views:
            positions: Sequence[int] = ()
            # Factorisations work on the last two dims.
            if primitives.of(eqn).factorises:
                positions = range(max(len(dims) - 2, 0), len(dims))
            elif name == "dot_general":
                contracted, batch = eqn.params["dimension_numbers"]
                # Without free dims, the result is a sum of squares or an inner product.
                has_free_dims = eqn.outvars[0].aval.ndim > len(batch[0])
                positions = [d for d in range(len(dims)) if has_free_dims and contracted[0] and d not in batch[side]]
            # A product inside another equation: which dims it takes is not known, so all of them.
            elif _has_products([eqn]):
                positions = range(len(dims))
            if parts := [p for d in positions for p in dims[d] if p.size > 1]:
                products.append((i, frozenset(p.dim for p in parts if p.source == i)))
    return products


@dataclass(frozen=True)
class Region:
    """The equations of an update that work on one leaf as whole matrices.

    Attributes:
      leaf: the number of the leaf among those that the optimizer sees.
      shape: the shape of the leaf.
      eqns: the equations, in order.
      ins: the variables that they read from outside: values of the leaf, scalars and constants.
      outs: their results that are read outside.
      dims: the dims of each of these variables that is a value of the leaf. A result with unknown dims
        counts as one with the leaf's dims if it has the leaf's shape, else as one with new dims.
      mixed: the dims of the leaf along which the equations combine several indices.
      state: for each variable that is an array of the optimizer's state, the number of that array.
    """

    leaf: int
    shape: tuple[int, ...]
    eqns: tuple[Any, ...]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    dims: Mapping[Any, followed.Dims] = field(repr=False)
    mixed: frozenset[int]
    state: Mapping[Any, int] = field(repr=False)

    @property
    def batch(self) -> list[int]:
        """The dims of the leaf along which the equations work on each index separately, and that all values have."""
        is_separate = lambda d: d not in self.mixed and all(self.find_dim(v, d) is not None for v in self.dims)
        return [d for d, n in enumerate(self.shape) if n > 1 and is_separate(d)]

    def has_leaf_dims(self, var: Any) -> bool:
        """Return whether a value has exactly the dims of the leaf."""
        return self.dims[var] == dict(followed.source(self.leaf, self.shape).views)[self.leaf]

    def find_dim(self, var: Any, dim: int) -> int | None:
        """Return the dim of a value that is dim `dim` of the leaf; None if it has none, or only a part of it."""
        var_dims = enumerate(self.dims.get(var, ()))
        return next((d for d, parts in var_dims if len(parts) == 1 and parts[0][:2] == (self.leaf, dim)), None)

    def has_same_program(self, region: Region) -> bool:
        """Return whether the equations of two regions are the same program."""
        return equal.same_program(*(jx.build(r.eqns, r.ins, r.outs) for r in (self, region)))


def region_of(program: UpdateProgram, leaf: int, shape: tuple[int, ...]) -> Region | str:
    """Return the region of a leaf, or the reason why it has none.

    Args:
      program: the update, or a branch of it.
      leaf: the number of the leaf, which some equation multiplies or factorises.

    Returns:
      The equations between the products of the leaf; equations before them if the region then reads fewer elements; and
      equations after them that move the results or work on their elements.
    """
    eqns, users, views = program.flat.eqns, program.users, program.views
    involves_other_leaves = lambda *variables: any(views(v).keys() - {leaf} for v in variables)

    # 1. The products of the leaf, and all equations on a path from one to another.
    product_eqns = [k for k, dims in enumerate(program.products) if leaf in dims and k not in program.branches]
    products = [v for k in product_eqns for v in eqns[k].outvars]
    ancestors, descendants = {id(eqn) for eqn in jx.needed(eqns, products)}, jx.depends(eqns, products)
    chosen = {k for k, eqn in enumerate(eqns) if id(eqn) in ancestors and not descendants.isdisjoint(eqn.outvars)}
    if any(involves_other_leaves(*eqns[k].invars, *eqns[k].outvars) for k in chosen):
        return "as the layout keeps it: one equation of the optimizer multiplies several leaves"

    # 2. Grow backwards over equations whose results only the region reads. Keep the largest set that reads no more
    #    elements than before, since each element read is sent to an owner.
    inputs_of = lambda numbers: jx.free(eqns[k] for k in sorted(numbers))
    num_elements_read = lambda numbers: sum(math.prod(v.aval.shape) for v in inputs_of(numbers) if views(v))
    grown = set(chosen)
    # Backwards, so that all readers of a result have been decided before the equation that makes it.
    for k in range(max(chosen), -1, -1):
        readers = [users[v] for v in eqns[k].outvars if v in users]
        only_region_reads = readers and all(numbers <= grown for numbers in readers)
        if k not in grown and only_region_reads and not involves_other_leaves(*eqns[k].invars):
            grown.add(k)
            chosen = set(grown) if num_elements_read(grown) <= num_elements_read(chosen) else chosen

    # 3. Grow forwards over equations that only move, or work element by element on, results of the region that nothing
    #    else reads. Their results are sent back instead of their inputs.
    region_results = {v for k in chosen for v in eqns[k].outvars}
    for k in range(min(chosen), len(eqns)):
        primitive, leaf_inputs = primitives.of(eqns[k]), [v for v in eqns[k].invars if views(v)]
        only_reads_region = leaf_inputs and all(v in region_results and users[v] <= chosen | {k} for v in leaf_inputs)
        if k not in chosen and only_reads_region and (primitive.moves or primitive.elementwise):
            chosen.add(k)
            region_results.update(eqns[k].outvars)

    # 4. The inputs and outputs of the region, and their dims.
    region_eqns, follower = [eqns[k] for k in sorted(chosen)], followed.Follower()
    ins = inputs_of(chosen)
    outs = [v for eqn in region_eqns for v in eqn.outvars if users.get(v, set()) - chosen]
    leaf_dims = dict(followed.source(leaf, shape).views)[leaf]
    new_dims = lambda v: (
        leaf_dims if v.aval.shape == shape else tuple((followed.DimPart(-1, 0, n),) for n in v.aval.shape)
    )
    dims = {v: new_dims(v) for v in outs} | {v: views(v)[leaf] for v in (*ins, *outs) if leaf in views(v)}
    follower.follow(region_eqns, dict(program.values))
    mixed = frozenset(dim for i, dim in follower.mixed if i == leaf)
    return Region(leaf, shape, tuple(region_eqns), tuple(ins), tuple(outs), dims, mixed, program.state)


_FACTORISATION_FLOPS = 9  # times n^3: eigenvalues and vectors of a symmetric matrix (Golub & Van Loan, section 8.3)


def flops_of(eqns: Iterable[Any]) -> int:
    """Return the FLOPs of all products and factorisations in some equations.

    Every factorisation counts as an eigendecomposition of a symmetric matrix with its vectors.
    """
    eqns = list(eqns)
    factorised = [(eqn.invars[0].aval.shape, runs) for eqn, runs in visit(eqns) if primitives.of(eqn).factorises]
    factorisation_flops = sum(
        runs * _FACTORISATION_FLOPS * math.prod(shape) * min(shape[-2:]) for shape, runs in factorised
    )
    return factorisation_flops + 2 * sum(count for count, _ in jx.matmuls(eqns).values())


def one_matrix(region: Region) -> jx.Flat | None:
    """Return the program of a region on one matrix, in which values of the leaf have size 1 on each batch dim.

    Returns None if the region cannot be cut along some batch dim.
    """
    flat: jx.Flat | None = jx.Flat((), (), region.ins, region.outs, region.eqns)
    for d in region.batch:
        cut_dims = [region.find_dim(v, d) for v in (*region.ins, *region.outs)]
        flat = None if flat is None else _cut(flat, cut_dims, region.shape[d])
    return flat


def _cut(flat: jx.Flat, cut_dims: Sequence[int | None], num_parts: int) -> jx.Flat | None:
    """Return a program on one of `num_parts` equal parts of its inputs and outputs; None if the parts depend on others.

    `cut_dims` has for each input, and then each output, the dim that is cut; None if it stays whole.
    """
    localiser, result_dims, n = Localiser(num_parts, False, RULES), list[Any](), len(flat.invars)

    def part(*xs: Any) -> list[Any]:
        values = [LocalValue(x, dim, v.aval.shape) for v, x, dim in zip(flat.invars, xs, cut_dims[:n], strict=True)]
        # A result whose dim is not the one that was asked for is found below.
        results = localiser.run(flat, values)
        result_dims[:] = [result.dim for result in results]
        return [result.value for result in results]

    shapes = [
        tuple(1 if d == dim else size for d, size in enumerate(v.aval.shape))
        for v, dim in zip(flat.invars, cut_dims[:n], strict=True)
    ]
    avals = (jax.ShapeDtypeStruct(shape, v.aval.dtype) for shape, v in zip(shapes, flat.invars, strict=True))
    part_program = jx.trace(part, *avals)[0]
    # Gathers and collectives would need the other parts; a result on another dim is no part of the output.
    needs_other_parts = localiser.gathered or result_dims != cut_dims[n:] or jx.communicates(part_program.eqns, EDGES)
    return None if needs_other_parts else part_program


def axes_at_rest(storage: Storage, sharded: bool, sizes: Mapping[str, int]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the mesh axes that shard each dim of the model's own trainable leaves at rest.

    Args:
      sharded: whether ZeRO shards them.
      sizes: the size of each mesh axis; axes of one device are left out.
    """
    axes_by_leaf: dict[int, tuple[tuple[str, ...], ...]] = {}
    for leaf, members in zip(storage.leaves, storage.origin, strict=True):
        spec = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in leaf.spec(sharded)]
        spec_axes = [tuple(axis for axis in dim_axes if sizes[axis] > 1) for dim_axes in spec]
        axes = spec_axes + [()] * (len(leaf.shape) - len(spec_axes))
        if isinstance(leaf.form, Staged):
            # From stored dims to the model's: drop the dim of chunks, and move the layers back to their dim.
            axes = axes[leaf.stage :]
            if leaf.form.dim:
                axes.insert(leaf.form.dim, axes.pop(0))
        axes_by_leaf.update(dict.fromkeys(members, tuple(axes[1:] if leaf.rolled else axes)))
    return tuple(axes_by_leaf[i] for i, leaf in enumerate(storage.models) if leaf.trainable)


def in_order(eqns: Sequence[Any], within: Mapping[int, Any]) -> tuple[Any, ...] | None:
    """Order the nodes of a program so that each comes after the nodes whose results it reads.

    Args:
      within: by the id of an equation, the node that runs it with others; any other equation is a node.

    Returns:
      The nodes in order; None if two of them need results of each other.
    """
    nodes = [within.get(id(eqn), eqn) for eqn in eqns]
    producers = {v: id(node) for node, eqn in zip(nodes, eqns, strict=True) for v in eqn.outvars}
    graph = graphlib.TopologicalSorter[int]()
    for node, eqn in zip(nodes, eqns, strict=True):
        needed = [producers[v] for v in eqn.invars if not jx.is_literal(v) and v in producers]
        graph.add(id(node), *(producer for producer in dict.fromkeys(needed) if producer != id(node)))
    try:
        return tuple({id(node): node for node in nodes}[node_id] for node_id in graph.static_order())
    except graphlib.CycleError:
        return None
