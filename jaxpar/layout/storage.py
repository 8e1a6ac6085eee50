"""The leaves of a model as a step keeps them: layers of a Python loop stacked, those of a pipeline in whole stages."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ..model.paths import name_of
from .families import families, inside_stack, on_second_dim, own_leaves, unlike
from .leaves import Form, Leaf, Pipe, Sharing, Stacked, Staged, Whole, place
from .precision import Policy


@dataclass(frozen=True)
class Storage:
    """The leaves of a model as a step keeps them, and as the model has them.

    Attributes:
      leaves: what a step keeps, in the order of `tree`.
      tree: their tree: the model's own, unless layers of a Python loop are kept as stacks.
      models: the model's leaves, placed one by one, in the order of `model_tree`.
      origin: for each kept leaf, the positions among the model's of what it holds.
      cut: whether the stages of a pipeline are parts of the model's program, and no layers of a stack; then each leaf
        is the model's own, spread over `pipe`.
    """

    leaves: tuple[Leaf, ...]
    tree: Any
    models: tuple[Leaf, ...]
    model_tree: Any
    origin: tuple[tuple[int, ...], ...]
    cut: bool = False

    @functools.cached_property
    def units(self) -> tuple[Leaf, ...]:
        """The kept leaves, and then, one by one, the layers of those that are rolled: what a program may read."""
        layers = [
            replace(
                leaf,
                path=self.models[i].path,
                shape=self.models[i].shape,
                dim=at,
                form=Whole(),
                tensor=self.models[i].tensor,
                expert=self.models[i].expert,
            )
            for leaf, members in zip(self.leaves, self.origin, strict=True)
            if leaf.rolled
            for at in [None if leaf.dim is None else leaf.inner(True)]
            for i in members
        ]
        return (*self.leaves, *layers)

    def unit_values(self, local: Sequence[Any]) -> list[Any]:
        """The value of each unit from a device's values of the leaves: stages' layers, by chunk, on dim 0."""
        whole = [
            x.reshape(-1, *x.shape[len(leaf.form.held) :]) if isinstance(leaf.form, Staged) else x
            for leaf, x in zip(self.leaves, local, strict=True)
        ]
        rolled = [(x, at) for leaf, x, at in zip(self.leaves, whole, self.origin, strict=True) if leaf.rolled]
        return [*whole, *(x[k] for x, at in rolled for k in range(len(at)))]

    def of_units(self, values: Sequence[Any]) -> Any:
        """The model's own tree from one value for each unit, all layers in order."""
        members = {i: at for family in self.families for i, at in family}
        out: dict[int, Any] = {}
        for i, (leaf, at) in enumerate(zip(self.leaves, self.origin, strict=True)):
            if i in members:  # its layers are units of their own
                parts = [values[k] for k in members[i]]
            else:
                parts = leaf.form.own(values[i]) if isinstance(leaf.form, Staged) else [values[i]]
            out.update(zip(at, parts, strict=True))
        return jax.tree.unflatten(self.model_tree, [out[i] for i in range(len(out))])

    @property
    def families(self) -> list[list[tuple[int, list[int]]]]:
        """Rolled leaves by the loop that they come from: positions of each, and of its layers, among the units."""
        out: dict[Any, list[tuple[int, list[int]]]] = {}
        position = len(self.leaves)
        for i, (leaf, at) in enumerate(zip(self.leaves, self.origin, strict=True)):
            if leaf.rolled:
                members = list(range(position, position + len(at)))
                out.setdefault((leaf.path.partition("*")[0], len(at)), []).append((i, members))
                position += len(at)
        return list(out.values())

    @property
    def same(self) -> bool:
        """Whether every leaf is kept in the model's own shape."""
        return self.tree == self.model_tree and all(leaf.as_modelled for leaf in self.leaves)

    def seen(self, as_stacked: bool) -> tuple[list[Leaf], Any]:
        """The trainable leaves that an optimizer sees, as a step keeps them or the model's own; and abstract masters in
        their tree, None, which is no leaf, for frozen ones.
        """
        leaves, tree = (self.leaves, self.tree) if as_stacked else (self.models, self.model_tree)
        masters = [jax.ShapeDtypeStruct(f.shape, Policy.master(f.dtype)) if f.trainable else None for f in leaves]
        return [leaf for leaf in leaves if leaf.trainable], jax.tree.unflatten(tree, masters)


@dataclass(frozen=True)
class _ModelLeaf:
    """One of the model's own leaves, or layers of a Python loop that are kept as one.

    Attributes:
      path, shape, dtype, trainable: as of `Leaf`.
      tensor, expert: the dims that these axes split.
      members: positions among the model's own leaves; several of layers.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    tensor: int | None
    expert: int | None
    members: tuple[int, ...]

    @property
    def rolled(self) -> bool:
        return len(self.members) > 1

    def stacked(self, path: str, members: tuple[int, ...]) -> "_ModelLeaf":
        """Layers like this one as one leaf."""
        tensor, expert = (None if d is None else d + 1 for d in (self.tensor, self.expert))
        shape = (len(members), *self.shape)
        return replace(self, path=path, shape=shape, tensor=tensor, expert=expert, members=members)

    def in_front(self) -> "_ModelLeaf":
        """Layers on dim 1 -> on dim 0, where stages take them from."""
        tensor, expert = (None if d is None else {0: 1, 1: 0}.get(d, d) for d in (self.tensor, self.expert))
        shape = (self.shape[1], self.shape[0], *self.shape[2:])
        return replace(self, shape=shape, tensor=tensor, expert=expert)

    def placed(self, sharing: Sharing, form: Form, second: bool = False) -> Leaf:
        """The leaf as a step keeps it."""
        dims = (self.tensor, self.expert)
        return place(self.path, self.shape, self.dtype, self.trainable, sharing, form, *dims, second)


def make_leaves(
    params: Any,
    trainable: Callable[[str], bool] | None,
    sharing: Sharing,
    split: Mapping[str, int] = MappingProxyType({}),
    mixed: Mapping[str, int] = MappingProxyType({}),
    others: Mapping[str, int] = MappingProxyType({}),
) -> Storage:
    """An abstract parameter tree as the devices of `sharing` keep it; `split` are the dims that `tensor` splits, by
    path, `mixed` those of experts, `others` dims that are known to be none of layers: what `vmap` made looks like a
    stack.
    """
    model, tree = _model_leaves(params, trainable, split, mixed), jax.tree.structure(params)
    inside = inside_stack([(one.path, one.shape) for one in model], others)
    rolled, kept = _rolled(model, params, inside)
    leaves = _placed(rolled, sharing, inside, others)
    as_is = {row.members[0]: leaf for row, leaf in zip(rolled, leaves, strict=True) if leaf.as_modelled}
    models = tuple(as_is.get(i) or one.placed(sharing, Whole()) for i, one in enumerate(model))
    # A layer of a stack lies as the stack does, whatever its own shape says: an optimizer's arrays meet it there.
    stacked = [(row, leaf) for row, leaf in zip(rolled, leaves, strict=True) if isinstance(leaf.form, Stacked)]
    dims = {i: (leaf.inner(True), leaf.padded) for row, leaf in stacked if leaf.dim is not None for i in row.members}
    models = tuple(
        replace(leaf, dim=dims[i][0], padded=dims[i][1]) if i in dims else leaf for i, leaf in enumerate(models)
    )
    storage = Storage(tuple(leaves), kept, models, tree, tuple(row.members for row in rolled))
    pipe = sharing.pipe
    lacks = pipe.ranks > 1 and (_lacks_stack(storage, pipe) or _torn(storage, inside))
    if pipe.ranks == 1 or pipe.stages == "layers" or not (pipe.stages == "cut" or lacks):
        _check_stages(leaves, pipe)
        return storage
    cut = replace(sharing, pipe=replace(pipe, stages="cut"))
    models = tuple(one.placed(cut, Whole()) for one in model)
    return Storage(models, tree, models, tree, tuple((i,) for i in range(len(models))), cut=True)


def _model_leaves(
    params: Any, trainable: Callable[[str], bool] | None, split: Mapping[str, int], mixed: Mapping[str, int]
) -> list[_ModelLeaf]:
    """The model's own leaves."""
    out: list[_ModelLeaf] = []
    for at, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        name = name_of(path)
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise ValueError(
                f"parameter {name} is {x.dtype}, which is no number; keep keys with the variables "
                "(Model(stateful=True)), or use the loss's own key"
            )
        if (dim := mixed.get(name)) is not None and dim == split.get(name):
            other = next((d for d in range(x.ndim) if d != dim), None)
            raise ValueError(
                f"tensor and expert are both to split dim {dim} of {name} {list(x.shape)}; name another dim for one: "
                f"rules={{{name!r}: {{'expert': {dim}, 'tensor': {other}}}}}"
            )
        trains = _trains(name, x.dtype, trainable)
        out.append(_ModelLeaf(name, tuple(x.shape), x.dtype, trains, split.get(name), mixed.get(name), (at,)))
    return out


def check_trains(params: Any, trainable: Callable[[str], bool] | None) -> None:
    """Raise ValueError on an abstract parameter tree without any trainable leaf, whatever the strategy."""
    leaves = [(name_of(path), x.dtype) for path, x in jax.tree_util.tree_leaves_with_path(params)]
    if any(_trains(name, dtype, trainable) for name, dtype in leaves):
        return
    listed = ", ".join(name for name, _ in leaves[:5]) or "none"
    needed = "at least one must be floating-point" if trainable is None else "trainable= must be true for some path"
    if not leaves:
        needed = "init has to return at least one array of floating-point numbers; run a loss without any by jax.jit"
    raise ValueError(f"no trainable parameters among {len(leaves)} leaves ({listed}); {needed}")


def _trains(path: str, dtype: Any, trainable: Callable[[str], bool] | None) -> bool:
    """Whether a leaf is trained."""
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and (trainable is None or bool(trainable(path)))


def _rolled(model: Sequence[_ModelLeaf], params: Any, inside: Callable[[str], bool]) -> tuple[list[_ModelLeaf], Any]:
    """The leaves and their tree with the alike layers of Python loops as stacks; the model's own if there are none.

    Paths that are `inside` a stack are stacked already.
    """
    alike = [(one.path, (one.shape, one.dtype, one.trainable, (one.tensor, one.expert))) for one in model]
    # Paths with a slash of their own may be two parameters' at once.
    found = [] if len({one.path for one in model}) < len(model) else families(alike, inside)
    stacks = {
        members[0]: model[members[0]].stacked(path, members)
        for family in found
        for path, members in zip(family.paths, family.members, strict=True)
    }
    if not stacks:
        return list(model), jax.tree.structure(params)
    inner = {at for stack in stacks.values() for at in stack.members}
    rows = [stacks.get(at, one) for at, one in enumerate(model) if at in stacks or at not in inner]
    nested: dict[str, Any] = {}  # by path; dicts sort their keys
    entries = [entry for path, _ in jax.tree_util.tree_leaves_with_path(params) for entry in path]
    slashes = any("/" in name_of((entry,)) for entry in entries)
    for number, row in enumerate(rows):
        node = nested
        *above, last = [row.path] if slashes else row.path.split("/")
        for part in above:
            node = node.setdefault(part, {})
        node[last] = number
    order, tree = jax.tree.flatten(nested)
    return [rows[i] for i in order], tree


def _placed(
    rows: Sequence[_ModelLeaf], sharing: Sharing, inside: Callable[[str], bool], others: Mapping[str, int]
) -> list[Leaf]:
    """The leaves as a step keeps them: those of the largest stack in the stages of a pipeline."""
    pipe, second = sharing.pipe, on_second_dim([(row.path, row.shape) for row in rows], others)
    swapped = [not row.rolled and second(row.path) and not inside(row.path) for row in rows]
    fronted = [row.in_front() if swap else row for row, swap in zip(rows, swapped, strict=True)]
    of_layers = [(row.path, row.shape, row.rolled) for row in fronted if others.get(row.path) != 0]
    own = own_leaves(of_layers) if pipe.ranks > 1 else frozenset()
    turned = pipe.ranks if pipe.turns and pipe.chunks > 1 else 0
    leaves: list[Leaf] = []
    for row, front, swap in zip(rows, fronted, swapped, strict=True):
        if row.path not in own:
            leaves.append(row.placed(sharing, Stacked() if row.rolled else Whole(), swap))
            continue
        layers = front.shape[0]
        form = Staged(layers, pipe.held(layers), None if row.rolled else int(swap), turned)
        leaves.append(front.placed(sharing, form))
    return leaves


def _check_stages(leaves: Sequence[Leaf], pipe: Pipe) -> None:
    """Raise ValueError where the dim of layers, which stages take apart, is split over another axis."""
    for leaf in leaves:
        if leaf.layers is not None and leaf.stage in (leaf.tensor, leaf.expert):
            axis, n = ("tensor", leaf.ranks) if leaf.tensor == leaf.stage else ("expert", leaf.experts)
            raise ValueError(
                f"a rule puts {axis}={n} on dim 0 of {leaf.path} {list(leaf.logical)}, whose layers "
                f"pipe={pipe.ranks} takes apart; name another dim: rules={{{leaf.path!r}: 1}}, None for none, or give "
                "stages='cut', which needs no layers"
            )


def _lacks_stack(storage: Storage, pipe: Pipe) -> bool:
    """Whether no stack is most of a model: it has none, or its lists of blocks are too short, or most blocks unlike.

    A stack that the model scans is one, however short it is: its program cannot be cut within. Kernels of square
    convolutions, [k, k, in, out], are none, nor matrices that share a dim.
    """
    own = [leaf for leaf in storage.leaves if leaf.layers is not None]
    if not own or not all(leaf.rolled for leaf in own):
        kernels = all(len(leaf.logical) > 3 and leaf.logical[0] == leaf.logical[1] for leaf in own)
        return kernels or all(len(leaf.logical) < 3 for leaf in own)
    blocks = sum(leaf.layers or 0 for leaf in own)
    return 2 * blocks < len(storage.models) or min(leaf.layers or 0 for leaf in own) < pipe.ranks * pipe.chunks


def _torn(storage: Storage, inside: Callable[[str], bool]) -> bool:
    """Whether what looks like a stack of layers is within one of several blocks, alike but for what `tensor` splits."""
    shapes = [(leaf.path, (leaf.logical, leaf.dtype, leaf.trainable)) for leaf in storage.models]
    blocks = {at for family in families(shapes, inside) for members in family.members for at in members}
    alone = lambda leaf: leaf.layers is not None and not leaf.rolled
    return any(
        alone(leaf) and not blocks.isdisjoint(at) for leaf, at in zip(storage.leaves, storage.origin, strict=True)
    )


def list_name(leaf: Leaf) -> str:
    """A list of blocks, such as `layers/*`, or a leaf whose rows are read one by one."""
    before, star, _ = leaf.path.partition("*")
    return before + star


def uneven(storage: Storage) -> dict[str, str]:
    """The first leaf that differs, of lists with some blocks in one stack and others, of other shapes, one by one."""
    shapes = [(leaf.path, leaf.shape) for leaf in storage.models]
    found: dict[str, str] = {}
    for leaf, members in zip(storage.leaves, storage.origin, strict=True):
        if leaf.rolled and "*+" not in leaf.path and list_name(leaf) not in found:
            why = unlike(shapes, leaf.path.partition("*")[0], storage.models[members[0]].path)
            if why is not None:
                found[list_name(leaf)] = why
    return found
