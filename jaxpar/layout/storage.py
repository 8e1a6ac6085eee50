"""The leaves of a model as a step keeps them: layers of a Python loop stacked, those of a pipeline in whole stages."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ..model.paths import name_of
from .families import families, unlike
from .leaves import LAYERS, Form, Leaf, Pipe, Stacked, Staged, Whole, may_stack, place
from .precision import Policy


def own_leaves(flat: Sequence[tuple[str, tuple[int, ...], bool]]) -> frozenset[str]:
    """The paths of the leaves that look like the model's largest stack of layers, from paths, shapes and `rolled`.

    They share their first dim, the number of layers, and the first part of their paths. Where some of these lie below
    a path all of whose leaves share that dim, the others have it by chance ([heads, head_dim], and as many layers as
    heads). The layout is made before any batch is seen, so that this is a guess; a leaf guessed wrongly is gathered
    where it is used.
    """
    inside = _inside_stack([(path, shape) for path, shape, _ in flat])
    groups: dict[Any, list[tuple[str, tuple[int, ...]]]] = {}
    for path, shape, rolled in flat:
        if rolled or may_stack(shape):
            first = path.partition("*")[0] if rolled else path.partition("/")[0] if "/" in path else ""
            groups.setdefault((first, rolled, shape[0]), []).append((path, shape))
    groups = {key: [leaf for leaf in group if inside(leaf[0])] or group for key, group in groups.items()}
    # One matrix alone is no stack, and where there are stacked matrices, stacked vectors alone are none. Blocks of a
    # loop, and leaves below one path, come before a dim shared by chance: 7 in a convolution's [7, 7, in, out].
    sizes = {
        key: (
            key[1] or any(inside(path) for path, _ in group),
            any(key[1] or len(shape) > 2 for _, shape in group),
            sum(math.prod(shape) for _, shape in group),
        )
        for key, group in groups.items()
        if key[1] or len(group) > 1 or len(group[0][1]) > 2
    }
    largest = groups[max(sizes, key=lambda key: sizes[key])] if sizes else []
    return frozenset(path for path, _ in largest)


def _inside_stack(flat: Sequence[tuple[str, tuple[int, ...]]]) -> Callable[[str], bool]:
    """Whether a path lies below one all of whose leaves, a stack of vectors among them, have one first dim: layers."""
    below: dict[str, list[tuple[int, ...]]] = {}
    for path, shape in flat:
        parts = path.split("/")
        for n in range(1, len(parts)):
            below.setdefault("/".join(parts[:n]), []).append(shape)
    stacks = {
        name
        for name, shapes in below.items()
        if len(shapes) > 1
        and all(map(may_stack, shapes))
        and len({shape[0] for shape in shapes}) == 1
        and any(len(shape) == 2 for shape in shapes)
    }
    return lambda path: any(path.startswith(f"{name}/") for name in stacks)


def _on_second_dim(flat: Sequence[tuple[str, tuple[int, ...]]]) -> Callable[[str], bool]:
    """Whether a path lies below one all of whose leaves have one second dim, and neither one first nor one number of
    dims, or first and last: layers on dim 1, as by `nn.scan(variable_axes={"params": 1})`.
    """
    below: dict[str, list[tuple[int, ...]]] = {}
    for path, shape in flat:
        parts = path.split("/")
        for n in range(1, len(parts)):
            below.setdefault("/".join(parts[:n]), []).append(shape)
    varied = lambda values: len({*values}) > 1
    stacks = {
        name
        for name, shapes in below.items()
        if all(len(shape) > 1 and shape[1] <= LAYERS for shape in shapes)
        and not varied(shape[1] for shape in shapes)
        and any(len(shape) > 2 for shape in shapes)
        and (varied(map(len, shapes)) or (varied(s[0] for s in shapes) and varied(s[-1] for s in shapes)))
    }
    return lambda path: any(path.startswith(f"{name}/") for name in stacks)


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
        """One value for each unit from a device's own values of the leaves: of stages their layers, chunk by chunk, on
        dim 0.
        """
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


def make_leaves(
    params: Any,
    shards: int,
    trainable: Callable[[str], bool] | None,
    pipe: Pipe,
    split: Mapping[str, int] = MappingProxyType({}),
    ranks: int = 1,
    mixed: Mapping[str, int] = MappingProxyType({}),
    experts: int = 1,
) -> Storage:
    """An abstract parameter tree, kept for `shards` devices, a pipeline, `ranks` over which dims are `split` (by path),
    and `experts`, ranks of that axis, over which the dims of experts in `mixed` are. Raises ValueError on a tree
    without any leaf.
    """
    names, shapes, trains = [], [], []
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = name_of(path)
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise ValueError(
                f"parameter {name} is {x.dtype}, which is no number; keep keys with the variables "
                "(Model(stateful=True)), or use the loss's own key"
            )
        names.append(name)
        shapes.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
        trains.append(bool(jnp.issubdtype(x.dtype, jnp.inexact)) and (trainable is None or bool(trainable(name))))
    if not any(trains):
        listed = ", ".join(names[:5]) or "none"
        needed = "at least one must be floating-point" if trainable is None else "trainable= must be true for some path"
        raise ValueError(f"no trainable parameters among {len(names)} leaves ({listed}); {needed}")

    kind = lambda name: (split.get(name), mixed.get(name))
    alike = [(name, (x.shape, x.dtype, t, kind(name))) for name, x, t in zip(names, shapes, trains, strict=True)]
    inside = _inside_stack([(name, x.shape) for name, x in zip(names, shapes, strict=True)])
    # Paths with a slash of their own may be two parameters' at once.
    found = [] if len({*names}) < len(names) else families(alike, inside)
    pairs = [pair for family in found for pair in zip(family.paths, family.members, strict=True)]
    rolled = {members[0]: (path, members) for path, members in pairs}
    inner = {at for _, members in rolled.values() for at in members}
    origin: list[tuple[int, ...]] = []
    flat: list[tuple[str, tuple[int, ...], bool]] = []
    for at, (name, x) in enumerate(zip(names, shapes, strict=True)):
        if at in rolled:
            path, members = rolled[at]
            flat.append((path, (len(members), *x.shape), True))
            origin.append(members)
        elif at not in inner:
            flat.append((name, x.shape, False))
            origin.append((at,))
    tree = jax.tree.structure(params)
    if rolled:  # nested dicts by path, which sort their keys
        nested: dict[str, Any] = {}
        entries = [entry for path, _ in jax.tree_util.tree_leaves_with_path(params) for entry in path]
        slashes = any("/" in name_of((entry,)) for entry in entries)
        for number, (path, _, _) in enumerate(flat):
            node = nested
            *above, last = [path] if slashes else path.split("/")
            for part in above:
                node = node.setdefault(part, {})
            node[last] = number
        order, tree = jax.tree.flatten(nested)
        flat, origin = [flat[i] for i in order], [origin[i] for i in order]
    second = _on_second_dim([(path, shape) for path, shape, _ in flat])
    on_second = {path for path, _, is_rolled in flat if not is_rolled and second(path) and not inside(path)}
    in_front = lambda path, shape: (shape[1], shape[0], *shape[2:]) if path in on_second else shape
    own = own_leaves([(path, in_front(path, shape), r) for path, shape, r in flat]) if pipe.ranks > 1 else frozenset()
    dims, of_experts = ({at: by[name] for at, name in enumerate(names) if name in by} for by in (split, mixed))

    def placed(path: str, shape: tuple[int, ...], is_rolled: bool, at: int) -> Leaf:
        tensor, expert = (by[at] + is_rolled if at in by else None for by in (dims, of_experts))
        form: Form = Stacked() if is_rolled else Whole()
        second = path in on_second
        if path in own:
            if second:  # the stages take layers from dim 0
                shape = in_front(path, shape)
                tensor, expert = (None if d is None else {0: 1, 1: 0}.get(d, d) for d in (tensor, expert))
            turned = pipe.ranks if pipe.turns and pipe.chunks > 1 else 0
            form = Staged(shape[0], pipe.held(shape[0]), None if is_rolled else int(second), turned)
        second = second and path not in own
        return place(
            path, shape, shapes[at].dtype, shards, trains[at], pipe, form, tensor, ranks, second, expert, experts
        )

    leaves = [placed(path, shape, r, at[0]) for (path, shape, r), at in zip(flat, origin, strict=True)]
    as_is = {at[0]: leaf for leaf, at in zip(leaves, origin, strict=True) if leaf.as_modelled}

    def one(pipe: Pipe, i: int, name: str, x: Any, trains: bool) -> Leaf:
        """One of the model's own leaves."""
        split = {"tensor": dims.get(i), "ranks": ranks, "expert": of_experts.get(i), "experts": experts}
        return place(name, tuple(x.shape), x.dtype, shards, trains, pipe, **split)

    every = list(enumerate(zip(names, shapes, trains, strict=True)))
    models = tuple(as_is.get(i) or one(pipe, i, *leaf) for i, leaf in every)
    storage = Storage(tuple(leaves), tree, models, jax.tree.structure(params), tuple(origin))
    if pipe.ranks == 1 or pipe.stages == "layers" or not (pipe.stages == "cut" or _lacks_stack(storage, pipe)):
        for leaf in leaves:
            if leaf.layers is not None and leaf.stage in (leaf.tensor, leaf.expert):
                axis, n = ("tensor", ranks) if leaf.tensor == leaf.stage else ("expert", experts)
                raise ValueError(
                    f"a rule puts {axis}={n} on dim 0 of {leaf.path} {list(leaf.logical)}, whose layers "
                    f"pipe={pipe.ranks} takes apart; name another dim: rules={{{leaf.path!r}: 1}}, or None for none"
                )
        return storage
    cut = replace(pipe, stages="cut")
    models = tuple(one(cut, i, *leaf) for i, leaf in every)
    return Storage(
        models, storage.model_tree, models, storage.model_tree, tuple((i,) for i in range(len(models))), cut=True
    )


def _lacks_stack(storage: Storage, pipe: Pipe) -> bool:
    """Whether no stack is most of a model: it has none, or lists of blocks most of which are not alike, or too short.

    A stack that the model scans is one, however short it is: its program cannot be cut within. Kernels of square
    convolutions, [k, k, in, out], are none, nor matrices that share a dim.
    """
    own = [leaf for leaf in storage.leaves if leaf.layers is not None]
    if not own or not all(leaf.rolled for leaf in own):
        kernels = all(len(leaf.logical) > 3 and leaf.logical[0] == leaf.logical[1] for leaf in own)
        return kernels or all(len(leaf.logical) < 3 for leaf in own)
    blocks = sum(leaf.layers or 0 for leaf in own)
    return 2 * blocks < len(storage.models) or min(leaf.layers or 0 for leaf in own) < pipe.ranks * pipe.chunks


def list_name(leaf: Leaf) -> str:
    """A list of blocks, such as `layers/*`, or a leaf whose rows are read one by one."""
    before, star, _ = leaf.path.partition("*")
    return before + star


def uneven(storage: Storage) -> dict[str, str]:
    """The lists some of whose blocks are kept as one stack and others, of other shapes, one by one: the first leaf that
    differs.
    """
    shapes = [(leaf.path, leaf.shape) for leaf in storage.models]
    found: dict[str, str] = {}
    for leaf, members in zip(storage.leaves, storage.origin, strict=True):
        if leaf.rolled and "*+" not in leaf.path and list_name(leaf) not in found:
            why = unlike(shapes, leaf.path.partition("*")[0], storage.models[members[0]].path)
            if why is not None:
                found[list_name(leaf)] = why
    return found
