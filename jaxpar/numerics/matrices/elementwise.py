"""Prove that an optimizer works element by element, so that it may see leaves stacked and padded as a step stores them.

A step may store the layers of a Python loop as one stack, or the layers of a pipeline in stages with zeros after the
last. This makes no difference to an optimizer that works element by element and uses sums over all leaves (AdamW,
clipping by global norm). It does to one that uses a leaf's norm, shape, rank or path (LAMB, Muon, Adafactor, masks).

    init and update  --trace-->  program  --evaluate symbolically-->  an expression for each result
    once for the stored leaves, once for the model's; all expressions must be equal

Trying the optimizer on numbers proves nothing: it may warm up, or start to clip only later. So every result must be the
same expression of one element and of scalars in both programs.
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
_IGNORED = ("sharding", "shape", "out_sharding", "mesh")  # parameters of an equation that do not change its values


class _Unclear(Exception):
    """Raised by an equation whose values may differ between stored leaves and the model's own."""


@dataclass(frozen=True)
class _Value:
    """The symbolic value of a variable.

    Attributes:
      expression: nested tuples of primitives and inputs.
      leaf: the number of the leaf to whose elements it belongs; None for a scalar.
      partial: the leaves over which it is summed so far, if it is a sum over leaves that is not complete.
    """

    expression: Any
    leaf: int | None = None
    partial: frozenset[int] = frozenset()

    def complete(self, leaves: int) -> "_Value":
        """Return the value as an ordinary scalar once it sums all leaves; that sum is the same in both programs."""
        return self if len(self.partial) < leaves else _Value(("every leaf", self.expression))


def sees_stacked(optimizer: Any, storage: Storage) -> bool:
    """Return whether an optimizer may see the leaves as a step stores them instead of the model's own."""
    if storage.same:
        return True
    try:
        stored, logical = (_expressions_of(optimizer, storage, as_stacked) for as_stacked in (True, False))
    except (_Unclear, ValueError, TypeError, KeyError, AttributeError, IndexError):
        # All but the first: the optimizer needs the model's own tree, as masks may.
        return False
    scalars_agree = stored.pop(None) == logical.pop(None)
    # The paths of stored leaves and of the model's own differ. Compare each stored leaf with all leaves in it.
    origins = zip(storage.leaves, storage.origin, strict=True)
    return scalars_agree and all(
        stored.get(leaf.path) == logical.get(storage.models[i].path)
        for leaf, members in origins
        if leaf.trainable
        for i in members
    )


def _expressions_of(optimizer: Any, storage: Storage, as_stacked: bool) -> dict[str | None, Any]:
    """Return `_expressions` for the leaves as stored, or for the model's own."""
    trained_leaves, params = storage.seen(as_stacked)
    masters, tree = jax.tree.flatten(params)
    # Paths and shapes alone, so that the planner, which asks for hundreds of layouts, finds the results in the cache.
    keys = tuple(_LeafKey(leaf.path, leaf.shape) for leaf in trained_leaves)
    return {**_expressions(optimizer, tree, tuple(masters), keys)}


def remembered(fun: Callable[..., R]) -> Callable[..., R]:
    """Cache a function whose first argument is an optimizer; an optimizer that cannot be hashed is not cached."""
    cached = functools.lru_cache(maxsize=64)(fun)

    def call(optimizer: Any, *args: Any) -> R:
        try:
            hash(optimizer)
        except TypeError:
            return fun(optimizer, *args)
        return cached(optimizer, *args)

    return call


def traced_update(optimizer: Any, params: Any) -> tuple[Any, jx.Flat, Any]:
    """Trace the update of an optimizer, an optax transformation with extra arguments, on abstract parameters.

    Returns:
      Its abstract state, its update as a program of (params, gradients, state, loss), and the abstract results of the
      update.
    """
    state = jax.eval_shape(optimizer.init, params)
    update = lambda params, grads, state, value: optimizer.update(grads, state, params, value=value)
    return state, *jx.trace(update, params, params, state, jax.ShapeDtypeStruct((), jnp.float32))


class _LeafKey(NamedTuple):
    """The properties of a leaf on which its expressions depend."""

    path: str
    shape: tuple[int, ...]


@remembered
def _expressions(
    optimizer: Any, tree: Any, masters: tuple[Any, ...], leaves: Sequence[_LeafKey]
) -> dict[str | None, Any]:
    """Return the expressions of all results of `init` and `update`.

    Returns:
      For the path of each leaf, the expressions of its update and of its arrays of the state, by name; for None, those
      of the state's scalars.

    Raises:
      _Unclear: if a result depends on other elements than its own, except through sums over all leaves.
    """
    params = jax.tree.unflatten(tree, masters)
    leaf_numbers = {name_of(path): i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    state, flat, update_results = traced_update(optimizer, params)

    def name_and_leaf(path: Any, x: Any) -> tuple[str, int | None]:
        """Return the name of an array of the state without the path of its leaf, and that leaf's number."""
        name = name_of(path)
        keys = name.split("/")
        # From the whole name to its last key: the longest end that is the path of a leaf.
        for n in range(len(keys)):
            number = leaf_numbers.get("/".join(keys[n:]))
            if number is not None:
                if tuple(x.shape) == leaves[number].shape:
                    return "/".join(keys[:n]), number
                break
        if x.shape:
            raise _Unclear(f"{name} {x.shape}")
        return name, None

    # 1. Evaluate both programs on symbolic inputs.
    init_program = jx.trace(optimizer.init, params)[0]
    state_names = [name_and_leaf(path, x) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    inputs = [_Value("parameter", i) for i in range(len(leaves))] + [_Value("gradient", i) for i in range(len(leaves))]
    inputs += [_Value(("state", name), number) for name, number in state_names] + [_Value("loss")]
    shapes = [leaf.shape for leaf in leaves]
    values = [*_evaluated(flat, inputs, shapes), *_evaluated(init_program, inputs[: len(leaves)], shapes)]

    # 2. Name the results: updates, the next state, the initial state.
    initial_names = [(f"initial {name}", number) for name, number in state_names]
    names = [*(("update", i) for i in range(len(leaves))), *state_names, *initial_names]
    paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(update_results[1])]
    if paths != [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]:
        raise _Unclear("the state changes its structure")

    # 3. Check that each result belongs to its own leaf, and collect the expressions.
    expressions: dict[str | None, Any] = {None: {}}
    for (name, number), value in zip(names, values, strict=True):
        if value.partial or value.leaf not in (None, number):
            raise _Unclear(name)
        expressions.setdefault(None if number is None else leaves[number].path, {})[name] = value.expression
    return expressions


def _evaluated(flat: jx.Flat, inputs: Sequence[_Value], shapes: Sequence[tuple[int, ...]]) -> list[_Value]:
    """Return the symbolic values of a program's results, from its inputs' values."""

    def constant(x: Any) -> _Value:
        if jnp.shape(x):
            raise _Unclear("an array of the optimizer's own")
        return _Value(("constant", float(x)))

    env = jx.Environment.of(flat, inputs, lambda atom: constant(atom.val), constant)
    for eqn in flat.eqns:
        env.store(eqn, _equation(eqn, env.read(eqn.invars), shapes))
    return env.read(flat.outvars)


def _equation(eqn: Any, values: list[_Value], shapes: Sequence[tuple[int, ...]]) -> list[_Value]:
    """Return the symbolic value of each result of an equation, from its operands' values."""
    if eqn.primitive.name != "cond" or values[0].leaf is not None or values[0].partial:
        return [_symbolic_result(eqn, values, shapes)]
    # Either branch may run, so that an element's result is an expression of what both of them make.
    branch = lambda program, ins, which: _evaluated(jx.flatten(program), ins, shapes)
    results = propagate(eqn, values, branch, lambda a, b: _joined("cond", (a, b)))
    assert results is not None
    return results


def _symbolic_result(eqn: Any, values: list[_Value], shapes: Sequence[tuple[int, ...]]) -> _Value:
    """Return the symbolic value of an equation's result, from the values of its inputs."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name == "reduce_sum":
        # The sum over one leaf. Padding must add zero, or the sum differs between the two programs.
        (value,) = values
        if value.leaf is None or shape or value.partial or not _vanishes(value.expression):
            raise _Unclear(name)
        return _Value((name, value.expression), None, frozenset({value.leaf})).complete(len(shapes))
    partial_sums = [value for value in values if value.partial]
    if partial_sums:
        # Add up the sums of the same expression over disjoint leaves, until all leaves are included.
        expressions = {value.expression for value in partial_sums}
        expression = next(iter(expressions))
        remaining_values = [value for value in values if not value.partial]
        only_zeros_remain = all(value.expression == ("constant", 0.0) for value in remaining_values)
        if len(expressions) == 1 and name == "add" and only_zeros_remain:
            summed_leaves = [value.partial for value in partial_sums]
            # The sets are disjoint, or a leaf would count twice.
            if sum(map(len, summed_leaves)) == len(frozenset().union(*summed_leaves)):
                return _Value(expression, None, frozenset().union(*summed_leaves)).complete(len(shapes))
        raise _Unclear(name)
    if name == "broadcast_in_dim" and values[0].leaf is None:
        return values[0]  # still a scalar: it is the same for every leaf that it is combined with
    if not primitives.of(eqn).elementwise or (shape and shape not in shapes):
        raise _Unclear(name)
    # Text, since parameters such as dtypes and functions need not be hashable.
    params = tuple(sorted((k, str(v)) for k, v in eqn.params.items() if k not in _IGNORED))
    return _joined((name, params), values)


def _vanishes(expression: Any) -> bool:
    """Return whether an expression is zero for the zeros after the last layer, which then add nothing to a sum."""
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
    """Return the value of an elementwise expression of values that belong to one leaf at most."""
    leaves = {value.leaf for value in values} - {None}
    if len(leaves) > 1 or any(value.partial for value in values):
        raise _Unclear(str(expression))
    return _Value((expression, tuple(value.expression for value in values)), next(iter(leaves), None))
