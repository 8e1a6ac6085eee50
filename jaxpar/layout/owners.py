"""What an optimizer does with whole matrices, read from its program.

Muon, Shampoo, SOAP and GaLore multiply or factorise a leaf's own dims; AdamW takes elements one by one. As in
`elementwise.py`, which one it is cannot be seen by trying it, and not from its name: the update is traced, and the dims
of each leaf are followed through it (`program/dims.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..model.paths import name_of
from ..program import dims as followed
from ..program import jaxpr as jx
from .storage import Storage

# Primitives that multiply or factorise matrices; all others move, reduce, or take elements one by one.
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_FACTORISE = ("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "ormqr", "qr",
              "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve")  # fmt: skip


@dataclass(frozen=True)
class UpdateProgram:
    """An optimizer's update, traced on the leaves that it sees.

    Attributes:
      flat: the program of (params, gradients, state, value), whose results are the changes and the next state.
      out: the tree of its results, abstract.
      inputs: what each of its inputs is; of a leaf's own part of the state too. Sources are the leaves, by number.
      products: for each leaf that is multiplied or factorised, by number, the dims along which.
    """

    flat: jx.Flat
    out: Any
    inputs: tuple[followed.Followed, ...]
    products: dict[int, frozenset[int]]


def update_program(optimizer: Any, storage: Storage, as_stacked: bool) -> UpdateProgram | None:
    """The update of an optimizer that multiplies or factorises leaves; None for any other, AdamW among them."""
    tuned, params = storage.seen(as_stacked)
    masters, tree = jax.tree.flatten(params)
    given = optimizer, tree, tuple(masters), tuple((leaf.path, leaf.shape) for leaf in tuned)
    try:
        hash(optimizer)
    except TypeError:  # an object of its own may have no hash
        traced = _update_program
    else:
        traced = _known_programs
    try:
        return traced(*given)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return None  # it asks for what a step has not; the step says so where it is traced


def _update_program(optimizer: Any, tree: Any, masters: tuple[Any, ...], leaves: Sequence[Any]) -> UpdateProgram | None:
    params = jax.tree.unflatten(tree, masters)
    state = jax.eval_shape(optimizer.init, params)
    flat, out = jx.trace(
        lambda params, grads, state, value: optimizer.update(grads, state, params, value=value),
        params,
        params,
        state,
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    if not jx.communicates(flat.eqns, (*_PRODUCTS, *_FACTORISE)):
        return None
    at = {name_of(path): i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    own = [followed.source(i, leaf.shape) for i, leaf in enumerate(masters)]
    held = [_held(name_of(path), x, at, masters) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    inputs = (*own, *own, *held, followed.NOTHING)
    products: dict[int, frozenset[int]] = {}

    def note(eqn: Any, ins: Sequence[followed.Followed]) -> frozenset[int]:
        for i, dims in multiplied(eqn, ins):
            products[i] = products.get(i, frozenset()) | dims
        return frozenset()

    follower = followed.Follower(note)
    follower.follow(flat.eqns, dict(zip(flat.invars, inputs, strict=True)))
    return UpdateProgram(flat, out, inputs, products) if products else None


_known_programs = functools.lru_cache(maxsize=64)(_update_program)


def _held(name: str, x: Any, at: dict[str, int], leaves: Sequence[Any]) -> followed.Followed:
    """An array of the state, by the end of its path the leaf's whose dims it has, as far as they agree."""
    parts = name.split("/")
    number = next((at[end] for n in range(len(parts)) if (end := "/".join(parts[n:])) in at), None)
    if number is None or not x.shape:
        return followed.NOTHING
    same, shape = 0, leaves[number].shape
    while same < min(len(shape), x.ndim) and shape[same] == x.shape[same]:
        same += 1
    dims = followed.source(number, shape).views[0][1][:same]
    rest = tuple((followed.DimPart(-1, 0, n),) for n in x.shape[same:])
    return followed.Followed(((number, (*dims, *rest)),), frozenset({number}))


def multiplied(eqn: Any, ins: Sequence[followed.Followed]) -> list[tuple[int, frozenset[int]]]:
    """The leaves whose own dims an equation multiplies or factorises, and along which; a sum of squares is neither."""
    name = eqn.primitive.name
    found: list[tuple[int, frozenset[int]]] = []
    for side, x in enumerate(ins):
        for i, dims in x.views:
            at: Sequence[int] = ()
            if name in _FACTORISE:
                at = range(max(len(dims) - 2, 0), len(dims))
            elif name == "dot_general":
                contracted, batch = eqn.params["dimension_numbers"]
                free = eqn.outvars[0].aval.ndim > len(batch[0])
                at = [d for d in range(len(dims)) if free and contracted[0] and d not in batch[side]]
            elif name in _PRODUCTS:
                at = range(len(dims))
            sources = frozenset(p.dim for d in at for p in dims[d] if p.source == i and p.size > 1)
            if sources:
                found.append((i, sources))
    return found
