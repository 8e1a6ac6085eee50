"""Prove an optimizer elementwise, so that it may see leaves stacked and padded as a step keeps them.

Layers of a loop kept as one stack, or layers in whole stages with zeros after the last, make no difference to an
optimizer that works element by element, with no more than sums over all leaves beside that (AdamW, clipping by global
norm). They do to one that looks at a leaf's norm, shape, rank or place (LAMB, Muon, Adafactor, masks by path). What an
optimizer is cannot be seen by trying it, since it may warm up, or clip only later; it is read from its program, traced
in both forms: every result must be the same expression of its own element and of scalars.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ...layout.storage import Storage
from ...model.paths import name_of
from ...program import jaxpr as jx
from ...program import primitives
from ...program.walk import propagate

R = TypeVar("R")
_IGNORED = ("sharding", "shape", "out_sharding", "mesh")  # parameters of an equation that say nothing of its values


class _Unclear(Exception):
    """The program does what need not be the same in both forms."""


@dataclass(frozen=True)
class _Value:
    """A value: its expression, the leaf whose element it is of (None: a scalar), the leaves it partly sums."""

    expression: Any
    leaf: int | None = None
    partial: frozenset[int] = frozenset()

    def complete(self, leaves: int) -> "_Value":
        """A sum over all leaves is a scalar like any other, and the same in both forms."""
        return self if len(self.partial) < leaves else _Value(("every leaf", self.expression))


def sees_stacked(optimizer: Any, storage: Storage) -> bool:
    """Whether an optimizer may be shown leaves as a step keeps them."""
    if storage.same:
        return True
    try:
        ours, theirs = (_results_of(optimizer, storage, as_stacked) for as_stacked in (True, False))
    except (_Unclear, ValueError, TypeError, KeyError, AttributeError, IndexError):
        # The last five: it asks for the model's own tree, as masks may.
        return False
    scalars = ours.pop(None) == theirs.pop(None)
    members = zip(storage.leaves, storage.origin, strict=True)
    return scalars and all(
        ours.get(leaf.path) == theirs.get(storage.models[i].path) for leaf, at in members if leaf.trainable for i in at
    )


def _results_of(optimizer: Any, storage: Storage, as_stacked: bool) -> dict[str | None, Any]:
    """`_results` of the leaves of one form, which a search for layouts asks for hundreds of times."""
    tuned, params = storage.seen(as_stacked)
    masters, tree = jax.tree.flatten(params)
    return {**_results(optimizer, tree, tuple(masters), tuple(_Seen(leaf.path, leaf.shape) for leaf in tuned))}


def remembered(fun: Callable[..., R]) -> Callable[..., R]:
    """`fun`, an optimizer its first argument: its results are kept, but for an object that has no hash."""
    kept = functools.lru_cache(maxsize=64)(fun)

    def call(optimizer: Any, *args: Any) -> R:
        try:
            hash(optimizer)
        except TypeError:
            return fun(optimizer, *args)
        return kept(optimizer, *args)

    return call


def traced_update(optimizer: Any, params: Any) -> tuple[Any, jx.Flat, Any]:
    """The abstract state of an optimizer, its update as a program of (params, gradients, state, loss), and what that
    returns, abstract.
    """
    state = jax.eval_shape(optimizer.init, params)
    update = lambda params, grads, state, value: optimizer.update(grads, state, params, value=value)
    return state, *jx.trace(update, params, params, state, jax.ShapeDtypeStruct((), jnp.float32))


class _Seen(NamedTuple):
    """Of a leaf what its results depend on."""

    path: str
    shape: tuple[int, ...]


@remembered
def _results(optimizer: Any, tree: Any, masters: tuple[Any, ...], tuned: Sequence[_Seen]) -> dict[str | None, Any]:
    """By path, what an optimizer makes of a leaf and its state, in `init` and `update`; None: of scalars."""
    params = jax.tree.unflatten(tree, masters)
    at = {name_of(path): number for number, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    state, flat, out = traced_update(optimizer, params)

    def home(path: Any, x: Any) -> tuple[str, int | None]:
        """The name of an array of the state, that of its leaf cut off, and the leaf."""
        name = name_of(path)
        parts = name.split("/")
        for n in range(len(parts)):
            number = at.get("/".join(parts[n:]))
            if number is not None:
                if tuple(x.shape) == tuned[number].shape:
                    return "/".join(parts[:n]), number
                break
        if x.shape:
            raise _Unclear(f"{name} {x.shape}")
        return name, None

    made = jx.trace(optimizer.init, params)[0]
    held = [home(path, x) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    inputs = [_Value("parameter", i) for i in range(len(tuned))] + [_Value("gradient", i) for i in range(len(tuned))]
    inputs += [_Value(("state", name), number) for name, number in held] + [_Value("loss")]
    shapes = [leaf.shape for leaf in tuned]
    values = [*_evaluated(flat, inputs, shapes), *_evaluated(made, inputs[: len(tuned)], shapes)]

    results: dict[str | None, Any] = {None: {}}
    first = [(f"initial {name}", number) for name, number in held]
    names = [*(("update", i) for i in range(len(tuned))), *held, *first]
    paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(out[1])]
    if paths != [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]:
        raise _Unclear("the state changes its structure")
    for (name, number), value in zip(names, values, strict=True):
        if value.partial or value.leaf not in (None, number):
            raise _Unclear(name)
        results.setdefault(None if number is None else tuned[number].path, {})[name] = value.expression
    return results


def _evaluated(flat: jx.Flat, inputs: Sequence[_Value], shapes: Sequence[tuple[int, ...]]) -> list[_Value]:
    """What a program's results are, from what its inputs are."""

    def constant(x: Any) -> _Value:
        if jnp.shape(x):
            raise _Unclear("an array of the optimizer's own")
        return _Value(("constant", float(x)))

    env = jx.Environment.of(flat, inputs, lambda atom: constant(atom.val), constant)
    for eqn in flat.eqns:
        env.store(eqn, _equation(eqn, env.read(eqn.invars), shapes))
    return env.read(flat.outvars)


def _equation(eqn: Any, values: list[_Value], shapes: Sequence[tuple[int, ...]]) -> list[_Value]:
    """What each result of an equation is."""
    name = eqn.primitive.name
    if name != "cond" or values[0].leaf is not None or values[0].partial:
        return [_one(eqn, name, values, shapes)]
    branch = lambda program, ins, which: _evaluated(jx.flatten(program), ins, shapes)
    results = propagate(eqn, values, branch, lambda a, b: _joined("cond", (a, b)))
    assert results is not None
    return results


def _one(eqn: Any, name: str, values: list[_Value], shapes: Sequence[tuple[int, ...]]) -> _Value:
    shape = eqn.outvars[0].aval.shape
    if name == "reduce_sum":
        (value,) = values
        if value.leaf is None or shape or value.partial or not _vanishes(value.expression):
            raise _Unclear(name)
        return _Value((name, value.expression), None, frozenset({value.leaf})).complete(len(shapes))
    partial = [value for value in values if value.partial]
    if partial:
        # Sums over leaves: of the same expression of each, joined until all are in.
        kinds = {value.expression for value in partial}
        kind = next(iter(kinds))
        others = [value for value in values if not value.partial]
        zero = all(value.expression == ("constant", 0.0) for value in others)
        if len(kinds) == 1 and name == "add" and zero:
            sets = [value.partial for value in partial]
            if sum(map(len, sets)) == len(frozenset().union(*sets)):
                return _Value(kind, None, frozenset().union(*sets)).complete(len(shapes))
        raise _Unclear(name)
    if name == "broadcast_in_dim" and values[0].leaf is None:
        return values[0]  # a scalar, whatever leaf it will meet
    if not primitives.of(eqn).elementwise or (shape and shape not in shapes):
        raise _Unclear(name)
    params = tuple(sorted((k, str(v)) for k, v in eqn.params.items() if k not in _IGNORED))
    return _joined((name, params), values)


def _vanishes(expression: Any) -> bool:
    """Whether an expression is zero of the zeros that follow the last layer, so that they add nothing to a sum."""
    match expression:
        case "parameter" | "gradient" | ("state", _):
            return True
        case ("constant", value):
            return value == 0
        case (("mul", _), operands):
            return any(map(_vanishes, operands))
        case (("div", _), (numerator, _)):
            return _vanishes(numerator)
        case (("select_n", _), (_, *cases)):
            return all(map(_vanishes, cases))
        case (("integer_pow", params), (base,)):
            return int(dict(params)["y"]) > 0 and _vanishes(base)
        case ((name, _), operands) if primitives.PRIMITIVES.get(name, primitives.UNKNOWN).zero:
            return all(map(_vanishes, operands))
    return False


def _joined(expression: Any, values: Sequence[_Value]) -> _Value:
    leaves = {value.leaf for value in values} - {None}
    if len(leaves) > 1 or any(value.partial for value in values):
        raise _Unclear(str(expression))
    return _Value((expression, tuple(value.expression for value in values)), next(iter(leaves), None))
