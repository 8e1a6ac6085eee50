"""All parameter leaves of a model, as the model has them and as a step stores them.

    model's own leaves  -->  ModelLeaf rows  -->  stacks of Python loops  -->  forms and sharded dims  -->  Storage
    `_model_leaves`          path, shape, ...     `_stack_loops`               `_place_rows`

`make_leaves` runs these steps. Layers of a Python loop become one stack, and the layers of the largest stack become the
stages of a pipeline. If the model has no such stack, each leaf is stored as the model has it, spread over `pipe`, and
the stages are parts of its program.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ..model.paths import name_of
from .families import families, inside_stack, largest_stack, on_second_dim, unlike
from .leaves import Leaf, ModelLeaf, Pipe, Sharing, Stacked, Staged, Whole
from .precision import Policy


@dataclass(frozen=True)
class Storage:
    """The leaves of a model, as a step stores them and as the model has them.

    Attributes:
      leaves: the stored leaves, in the order of `tree`.
      tree: their tree: the model's own, unless layers of a Python loop are stored as stacks.
      models: the model's own leaves, each placed separately, in the order of `model_tree`.
      model_tree: the model's own tree.
      origin: for each stored leaf, the positions among `models` of the leaves that it holds.
      cut: whether the stages of a pipeline are parts of the model's program instead of layers of a stack. Then each
        stored leaf is one of the model's own, spread over `pipe`.
    """

    leaves: tuple[Leaf, ...]
    tree: Any
    models: tuple[Leaf, ...]
    model_tree: Any
    origin: tuple[tuple[int, ...], ...]
    cut: bool = False

    @functools.cached_property
    def units(self) -> tuple[Leaf, ...]:
        """All leaves that a program may read: the stored leaves, then the separate layers of each rolled leaf."""
        # A layer's unit inherits all other properties from its stack.
        layers = [
            replace(
                leaf,
                path=self.models[i].path,
                shape=self.models[i].shape,
                dim=dim,
                form=Whole(),
                tensor=self.models[i].tensor,
                expert=self.models[i].expert,
            )
            for leaf, members in zip(self.leaves, self.origin, strict=True)
            if leaf.rolled
            for dim in [None if leaf.dim is None else leaf.inner(True)]
            for i in members
        ]
        return (*self.leaves, *layers)

    def unit_values(self, local: Sequence[Any]) -> list[Any]:
        """Return the value of each unit, from a device's values of the stored leaves.

        The layers of a pipeline's stages lie on dim 0, chunk by chunk.
        """
        # [chunks, layers / chunks, ...] -> [layers, ...], padding included: programs read layers by number.
        leaf_values = [
            x.reshape(-1, *x.shape[len(leaf.form.held) :]) if isinstance(leaf.form, Staged) else x
            for leaf, x in zip(self.leaves, local, strict=True)
        ]
        stacks = [
            (x, members) for leaf, x, members in zip(self.leaves, leaf_values, self.origin, strict=True) if leaf.rolled
        ]
        return [*leaf_values, *(x[layer] for x, members in stacks for layer in range(len(members)))]

    def of_units(self, values: Sequence[Any]) -> Any:
        """Return the model's own tree, from one value for each unit, with all layers in order."""
        layer_units = {i: units for family in self.families for i, units in family}
        model_values: dict[int, Any] = {}  # by position among the model's leaves
        for i, (leaf, members) in enumerate(zip(self.leaves, self.origin, strict=True)):
            if i in layer_units:
                # A program reads a rolled leaf through the units of its layers.
                parts = [values[k] for k in layer_units[i]]
            else:
                parts = leaf.form.own(values[i]) if isinstance(leaf.form, Staged) else [values[i]]
            model_values.update(zip(members, parts, strict=True))
        return jax.tree.unflatten(self.model_tree, [model_values[i] for i in range(len(model_values))])

    @property
    def families(self) -> list[list[tuple[int, list[int]]]]:
        """The rolled leaves, grouped by the Python loop that they come from.

        For each rolled leaf: its position among the units, and the positions of its layers among the units.
        """
        by_loop: dict[Any, list[tuple[int, list[int]]]] = {}
        next_unit = len(self.leaves)
        for i, (leaf, members) in enumerate(zip(self.leaves, self.origin, strict=True)):
            if leaf.rolled:
                # The units of layers follow the stored leaves, in the order of `units`.
                layer_units = list(range(next_unit, next_unit + len(members)))
                by_loop.setdefault((leaf.path.partition("*")[0], len(members)), []).append((i, layer_units))
                next_unit += len(members)
        return list(by_loop.values())

    @property
    def same(self) -> bool:
        """Whether every leaf is stored in the model's own shape."""
        return self.tree == self.model_tree and all(leaf.as_modelled for leaf in self.leaves)

    def seen(self, as_stacked: bool) -> tuple[list[Leaf], Any]:
        """Return the trainable leaves that an optimizer sees, and their abstract masters.

        Args:
          as_stacked: whether it sees the leaves as a step stores them, instead of the model's own.

        Returns:
          The leaves, and a tree with a `jax.ShapeDtypeStruct` for each of them. A frozen leaf is None in the tree,
          which jax does not count as a leaf.
        """
        leaves, tree = (self.leaves, self.tree) if as_stacked else (self.models, self.model_tree)
        masters = [
            jax.ShapeDtypeStruct(leaf.shape, Policy.master(leaf.dtype)) if leaf.trainable else None for leaf in leaves
        ]
        return [leaf for leaf in leaves if leaf.trainable], jax.tree.unflatten(tree, masters)


def make_leaves(
    params: Any,
    trainable: Callable[[str], bool] | None,
    sharing: Sharing,
    split: Mapping[str, int] = MappingProxyType({}),
    expert_split: Mapping[str, int] = MappingProxyType({}),
    non_layer_dims: Mapping[str, int] = MappingProxyType({}),
) -> Storage:
    """Choose how the devices of `sharing` store the leaves of a model.

    Args:
      trainable: returns whether the leaf of a path is trained; None trains all floating-point leaves.
      split: by path, the dim that `tensor` splits.
      expert_split: by path, the dim of experts, which `expert` splits.
      non_layer_dims: by path, a dim that is known not to be layers, such as one that `vmap` made.

    Raises:
      ValueError: for a parameter that is a key, or if two axes are to split the same dim.
    """
    # 1. Store the layers of Python loops as stacks, and choose the sharded dims.
    model_rows, tree = _model_leaves(params, trainable, split, expert_split), jax.tree.structure(params)
    inside = inside_stack([(row.path, row.shape) for row in model_rows], non_layer_dims)
    rows, stored_tree = _stack_loops(model_rows, params, inside)
    leaves = _place_rows(rows, sharing, inside, non_layer_dims)

    # 2. Place the model's own leaves for the trees that are handed out and for optimizers that need them. A layer is
    #    sharded like its stack, whatever its own shape suggests, because the optimizer's arrays are stored like it.
    #    A leaf that is stored in the model's own shape needs no second placement.
    unchanged = {row.members[0]: leaf for row, leaf in zip(rows, leaves, strict=True) if leaf.as_modelled}
    models = tuple(unchanged.get(i) or row.placed(sharing, Whole()) for i, row in enumerate(model_rows))
    stacks = [(row, leaf) for row, leaf in zip(rows, leaves, strict=True) if isinstance(leaf.form, Stacked)]
    dims = {i: (leaf.inner(True), leaf.padded) for row, leaf in stacks if leaf.dim is not None for i in row.members}
    models = tuple(
        replace(leaf, dim=dims[i][0], padded=dims[i][1]) if i in dims else leaf for i, leaf in enumerate(models)
    )
    storage = Storage(tuple(leaves), stored_tree, models, tree, tuple(row.members for row in rows))

    # 3. Without a stack that fills the stages of a pipeline, cut the program instead, and store every leaf as it is.
    pipe = sharing.pipe
    needs_cut = pipe.ranks > 1 and (_lacks_stack(storage, pipe) or _has_nested_stack(storage, inside))
    if pipe.ranks == 1 or pipe.stages == "layers" or not (pipe.stages == "cut" or needs_cut):
        _check_stages(leaves, pipe)
        return storage
    cut = replace(sharing, pipe=replace(pipe, stages="cut"))
    models = tuple(row.placed(cut, Whole()) for row in model_rows)
    return Storage(models, tree, models, tree, tuple((i,) for i in range(len(models))), cut=True)


def _model_leaves(
    params: Any, trainable: Callable[[str], bool] | None, split: Mapping[str, int], expert_split: Mapping[str, int]
) -> list[ModelLeaf]:
    """Return a row for each of the model's own leaves; raise ValueError for one that cannot be stored."""
    rows: list[ModelLeaf] = []
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        name = name_of(path)
        # Random keys have an extended dtype: they cannot be trained, padded or reduced.
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise ValueError(
                f"parameter {name} is {x.dtype}, which is no number; keep keys with the variables "
                "(Model(stateful=True)), or use the loss's own key"
            )
        if (dim := expert_split.get(name)) is not None and dim == split.get(name):
            free_dim = next((d for d in range(x.ndim) if d != dim), None)
            raise ValueError(
                f"tensor and expert would both split dim {dim} of {name} {list(x.shape)}; name another dim for one: "
                f"rules={{{name!r}: {{'expert': {dim}, 'tensor': {free_dim}}}}}"
            )
        is_trained = _is_trained(name, x.dtype, trainable)
        rows.append(ModelLeaf(name, tuple(x.shape), x.dtype, is_trained, split.get(name), expert_split.get(name), (i,)))
    return rows


def check_trains(params: Any, trainable: Callable[[str], bool] | None) -> None:
    """Raise ValueError if an abstract parameter tree has no trainable leaf; no strategy can train it."""
    leaves = [(name_of(path), x.dtype) for path, x in jax.tree_util.tree_leaves_with_path(params)]
    if any(_is_trained(name, dtype, trainable) for name, dtype in leaves):
        return
    first_names = ", ".join(name for name, _ in leaves[:5]) or "none"
    advice = "at least one must be floating-point" if trainable is None else "trainable= must be true for some path"
    if not leaves:
        advice = "init has to return at least one floating-point array; run a loss without parameters by jax.jit"
    raise ValueError(f"no trainable parameters among {len(leaves)} leaves ({first_names}); {advice}")


def _is_trained(path: str, dtype: Any, trainable: Callable[[str], bool] | None) -> bool:
    """Return whether a leaf is trained: it is floating-point or complex, and `trainable` chooses its path."""
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and (trainable is None or bool(trainable(path)))


def _stack_loops(
    model_rows: Sequence[ModelLeaf], params: Any, inside: Callable[[str], bool]
) -> tuple[list[ModelLeaf], Any]:
    """Replace the alike layers of Python loops by stacks, and return the new rows and their tree.

    `inside` returns whether a path lies inside a stack, whose layers are stacked already.
    """
    # A stack has one shape, dtype and so on, in which its layers must agree.
    properties = [(row.path, (row.shape, row.dtype, row.trainable, (row.tensor, row.expert))) for row in model_rows]
    # If names contain slashes, two parameters may have the same path. Then no path can be trusted.
    has_duplicates = len({row.path for row in model_rows}) < len(model_rows)
    stacks = {
        members[0]: model_rows[members[0]].stacked(path, members)
        for family in ([] if has_duplicates else families(properties, inside))
        for path, members in zip(family.paths, family.members, strict=True)
    }
    if not stacks:
        return list(model_rows), jax.tree.structure(params)
    stacked_positions = {i for stack in stacks.values() for i in stack.members}
    rows = [stacks.get(i, row) for i, row in enumerate(model_rows) if i in stacks or i not in stacked_positions]

    # Build the new tree as nested dicts of positions. jax sorts the keys of dicts, so that the order of rows changes.
    nested: dict[str, Any] = {}
    entries = [entry for path, _ in jax.tree_util.tree_leaves_with_path(params) for entry in path]
    has_slashes = any("/" in name_of((entry,)) for entry in entries)
    for i, row in enumerate(rows):
        node = nested
        *parents, key = [row.path] if has_slashes else row.path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = i
    order, tree = jax.tree.flatten(nested)
    return [rows[i] for i in order], tree


def _place_rows(
    rows: Sequence[ModelLeaf], sharing: Sharing, inside: Callable[[str], bool], non_layer_dims: Mapping[str, int]
) -> list[Leaf]:
    """Choose the form and the sharded dim of each row; the largest stack becomes the stages of a pipeline."""
    pipe, has_second_dim = sharing.pipe, on_second_dim([(row.path, row.shape) for row in rows], non_layer_dims)
    # Whether the layers are on dim 1 and must move to dim 0 to be split into stages.
    swapped = [not row.rolled and has_second_dim(row.path) and not inside(row.path) for row in rows]
    layers_first = [row.with_layers_first() if swap else row for row, swap in zip(rows, swapped, strict=True)]
    # Dim 0 of some leaves is known not to be layers; they cannot be in the largest stack.
    candidates = [(row.path, row.shape, row.rolled) for row in layers_first if non_layer_dims.get(row.path) != 0]
    staged_paths = largest_stack(candidates) if pipe.ranks > 1 else frozenset()
    # With a single chunk, a V and a loop store layers in the same order.
    v_ranks = pipe.ranks if pipe.is_v and pipe.chunks > 1 else 0
    leaves: list[Leaf] = []
    for row, front_row, swap in zip(rows, layers_first, swapped, strict=True):
        if row.path not in staged_paths:
            leaves.append(row.placed(sharing, Stacked() if row.rolled else Whole(), swap))
            continue
        num_layers = front_row.shape[0]
        form = Staged(num_layers, pipe.held(num_layers), None if row.rolled else int(swap), v_ranks)
        leaves.append(front_row.placed(sharing, form))
    return leaves


def _check_stages(leaves: Sequence[Leaf], pipe: Pipe) -> None:
    """Raise ValueError if a rule splits the dim of layers, which the stages of a pipeline split, over another axis."""
    for leaf in leaves:
        if leaf.layers is not None and leaf.stage in (leaf.tensor, leaf.expert):
            axis, n = ("tensor", leaf.ranks) if leaf.tensor == leaf.stage else ("expert", leaf.experts)
            raise ValueError(
                f"a rule puts {axis}={n} on dim 0 of {leaf.path} {list(leaf.logical)}, whose layers "
                f"pipe={pipe.ranks} takes apart; name another dim: rules={{{leaf.path!r}: 1}}, None for none, or give "
                "stages='cut', which needs no layers"
            )


def _lacks_stack(storage: Storage, pipe: Pipe) -> bool:
    """Return whether no stack makes up most of a model, so that its program must be cut into stages.

    This is so if there is no stack, if most blocks are unlike, or if a list of blocks is shorter than the number of
    stages. A stack that the model scans counts however short it is, because a scan cannot be cut. Kernels of square
    convolutions, [k, k, in, out], and matrices that share a dim are no stacks.
    """
    staged = [leaf for leaf in storage.leaves if leaf.layers is not None]
    # Here the model itself scans the stack, or there is no stack.
    if not staged or not all(leaf.rolled for leaf in staged):
        are_kernels = all(len(leaf.logical) > 3 and leaf.logical[0] == leaf.logical[1] for leaf in staged)
        return are_kernels or all(len(leaf.logical) < 3 for leaf in staged)
    # Each layer of these stacks is a leaf of the model: count whether they are half of its leaves.
    num_stacked = sum(leaf.layers or 0 for leaf in staged)
    shortest = min(leaf.layers or 0 for leaf in staged)
    return 2 * num_stacked < len(storage.models) or shortest < pipe.ranks * pipe.chunks


def _has_nested_stack(storage: Storage, inside: Callable[[str], bool]) -> bool:
    """Return whether an apparent stack of layers is one leaf of a block in a Python loop.

    Such a loop was not stacked because `tensor` splits its blocks along different dims; they are alike otherwise.
    """
    # Without the dims that `tensor` and `expert` split, by which such blocks differ.
    properties = [(leaf.path, (leaf.logical, leaf.dtype, leaf.trainable)) for leaf in storage.models]
    block_leaves = {i for family in families(properties, inside) for members in family.members for i in members}
    is_scanned = lambda leaf: leaf.layers is not None and not leaf.rolled
    return any(
        is_scanned(leaf) and not block_leaves.isdisjoint(members)
        for leaf, members in zip(storage.leaves, storage.origin, strict=True)
    )


def list_name(leaf: Leaf) -> str:
    """Return the name of the list of blocks that a leaf stacks, such as `layers/*`; its path if it stacks none."""
    prefix, star, _ = leaf.path.partition("*")
    return prefix + star


def uneven(storage: Storage) -> dict[str, str]:
    """Return, for each list whose blocks are only partly stacked, the first leaf that differs between its blocks."""
    shapes = [(leaf.path, leaf.shape) for leaf in storage.models]
    differences: dict[str, str] = {}
    for leaf, members in zip(storage.leaves, storage.origin, strict=True):
        # Blocks that alternate (`*+0`, `*+1`) differ by design.
        if leaf.rolled and "*+" not in leaf.path and list_name(leaf) not in differences:
            difference = unlike(shapes, leaf.path.partition("*")[0], storage.models[members[0]].path)
            if difference is not None:
                differences[list_name(leaf)] = difference
    return differences
