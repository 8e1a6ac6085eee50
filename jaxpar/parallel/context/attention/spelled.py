"""Attention that a program spells out: scores of queries and keys, a softmax over keys, a product with values.

    product of queries and keys --> times a number, mask --> softmax --> product with values
    [B, T, K, G, h] [B, S, K, h]    [B, K, G, T, S]                      [B, S, K, h]

It is recognised by its dataflow, in whatever spelling. If the program only scales scores and hides keys by positions
and ids (`hidden.py`: causal, a window, segments), `jp.attention` replaces it, and can run on a ring, by Ulysses, or in
a fused kernel. Any other function of scores is replayed for each block of them (`replayed.py`) if the sequence is
split, or becomes a bias of a fused kernel. If neither is possible, the reason is noted with the line.

Dims: B rows, T query positions, S key positions, K key heads, G query heads of each, h head_dim.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from ....program import jaxpr as jx
from ....program.walk import CALLS, CUSTOM, called
from .dims import attention_dims, name_dims, names_of_product, product_dims
from .fused import attention, biased_attention
from .hidden import Obstacle, Scope, describe, number_of
from .replayed import AttentionSite, read_bias, replayed_attention
from .scores import Scores
from .softmax import Dim, Names, Weights, chain_to, moves, names_after, scales_along_dims, weighs_by_exp, weights_of

Chain = Sequence[tuple[Any, int]]  # equations in a row, each with the index of the operand that comes from the last one


@dataclass(frozen=True)
class SpelledAttention:
    """One attention that a program spells out, and how to compute it instead.

    Attributes:
      last: the equation of its product with values.
      arrays: the variables of queries, keys, values, and of segment ids or of the operands of a function of scores.
      compute: returns the result of `last` from the values of `arrays`.
      description: which keys count, for people.
      scores_type: the type of its scores, which are no residuals any more.
    """

    last: Any
    arrays: tuple[Any, ...]
    compute: Callable[..., jax.Array]
    description: str
    scores_type: Any


@dataclass(frozen=True)
class Spelled:
    """A program, and the attention that it spelled out.

    Attributes:
      flat: the program after the replacements; the original one if there are none.
      replay: whether functions of scores are replaced too.
      biases: whether biases that all rows share are replaced, in preference to functions of scores.
      taken: which keys count, by the line of each replaced attention.
      scores: the type of its scores, by the same lines.
      not_taken: why it is not replaced, by the line of each other attention.
    """

    flat: jx.Flat
    replay: bool = False
    biases: bool = False
    taken: dict[str, str] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    not_taken: dict[str, str] = field(default_factory=dict)


def spelled(
    flat: jx.Flat, axes: Mapping[str, int], replay: bool = False, biases: bool = False, take: bool = True
) -> Spelled:
    """Find the attention that a program spells out, and replace it.

    Args:
      flat: the program.
      axes: the mesh axes that the program may name, and their sizes.
      replay: whether to replace attention with other functions of scores too, for a split sequence.
      biases: whether to replace attention with a bias by a fused kernel of whole sequences.
      take: whether to replace anything; False only finds.

    Returns:
      The program and notes on each attention.
    """
    result = Spelled(flat, replay, biases)
    scope = Scope(flat, _constants(flat))
    if not _find(scope, result) or not take:
        return result
    rewritten_flat, _ = jx.trace(_rewritten(scope), *map(jx.type_of, flat.invars), axes=dict(axes))
    # Scores and softmax of replaced attention are dead now, if nothing else reads them.
    return replace(result, flat=replace(rewritten_flat, eqns=jx.live(rewritten_flat.eqns, rewritten_flat.outvars)))


def _constants(flat: jx.Flat) -> dict[Any, Any]:
    """Return the arrays that a program closes over, by variable."""
    return dict(zip(flat.constvars, flat.consts, strict=True))


def _find(scope: Scope, result: Spelled) -> bool:
    """Find the attention of a program and its inner programs, and note it in the scope and the result.

    Returns:
      Whether there is something to replace.
    """
    for spelled_attention in _find_here(scope, result):
        # Its arrays may be values of a parent, such as a mask from outside a loop.
        for atom in spelled_attention.arrays:
            scope.make_available(atom)
        scope.replacements[id(spelled_attention.last)] = spelled_attention
        line = jx.where(spelled_attention.last)
        result.taken[line], result.scores[line] = spelled_attention.description, spelled_attention.scores_type
    for eqn in scope.eqns:
        if (inner_program := _inner_program(eqn)) is not None:
            body, num_unchanged = inner_program
            flat = jx.flatten(body if hasattr(body, "consts") else jec.ClosedJaxpr(body, ()))
            # A scan's carry and slices change from step to step, and cannot be followed outside.
            outer = dict(zip(flat.invars[:num_unchanged], eqn.invars, strict=False))
            inner = Scope(flat, _constants(flat), scope, outer)
            if _find(inner, result):
                scope.replacements[id(eqn)] = inner
    return bool(scope.replacements)


def _inner_program(eqn: Any) -> tuple[Any, int] | None:
    """Return the inner program of an equation that may be rewritten: the body of a scan or of a rematerialised call.

    Returns:
      The program, and the number of its first inputs that are operands of the equation unchanged; or None.
    """
    # `flatten` has inlined calls, except for kernels. A function with a custom derivative must stay in one piece.
    if eqn.primitive.name in (*CALLS, *CUSTOM) or (body := called(eqn)) is None:
        return None
    return body, len(jx.scan_parts(eqn).consts if eqn.primitive.name == "scan" else eqn.invars)


def _rewritten(scope: Scope) -> Callable[..., list[Any]]:
    """Return a program as a function that computes the replacements instead of the attention that it spells out.

    Its arguments are the scope's extra inputs and the program's inputs.
    """

    def run_program(*values: Any) -> list[Any]:
        inputs = zip((*scope.extra_inputs, *scope.flat.invars), values, strict=True)
        env = jx.Environment({**scope.consts, **dict(inputs)})

        def results(eqn: Any, operands: Sequence[Any]) -> list[Any]:
            replacement = scope.replacements.get(id(eqn))
            if isinstance(replacement, SpelledAttention):
                return [replacement.compute(*env.read(replacement.arrays))]
            if replacement is not None:
                return _run_inner(eqn, replacement, [*env.read(replacement.extra_inputs), *operands])
            return jx.bind(eqn, operands)

        for eqn in scope.eqns:
            env.compute(eqn, results)
        return env.read(scope.flat.outvars)

    return run_program


def _run_inner(eqn: Any, inner: Scope, values: Sequence[Any]) -> list[Any]:
    """Return the results of an equation whose inner program is rewritten.

    `values` are the inner scope's extra inputs, followed by the equation's operands.
    """
    run_program = _rewritten(inner)
    if eqn.primitive.name != "scan":
        closed, consts = jx.opened(jax.make_jaxpr(run_program)(*values))
        assert not consts, "the program of a rematerialised call closes over no array"
        return jx.bind(eqn, values, jaxpr=closed)
    # Extra inputs are the same in all iterations: the body closes over them.
    n = len(inner.extra_inputs)
    return jx.rerun(eqn, values[n:], lambda _, body_inputs, state: (state, run_program(*values[:n], *body_inputs)))[1]


def _find_here(scope: Scope, result: Spelled) -> list[SpelledAttention]:
    """Return the attention among a program's own equations, without inner programs; note why the others are none."""
    attentions = []
    for eqn in scope.eqns:
        # Attention ends in a product that sums over keys.
        if eqn.primitive.name != "dot_general" or scales_along_dims(eqn):
            continue
        # Either operand of a product may be the weights.
        for side in (0, 1):
            try:
                if (weights := weights_of(eqn.invars[side], scope)) is not None:
                    attentions.append(_attention(eqn, side, weights, scope, result))
                elif weighs_by_exp(eqn.invars[side], scope):
                    raise Obstacle(eqn, "weighs values by an exponential of scores in no known form of a softmax")
            except Obstacle as obstacle:
                result.not_taken[jx.where(eqn)] = str(obstacle)
    return attentions


def _attention(last: Any, side: int, weights: Weights, scope: Scope, result: Spelled) -> SpelledAttention:
    """Recognise the attention that ends in `last`, a product of weights (its operand `side`) and values.

    `weights` is their softmax, and `result` tells whether functions of scores and biases may be replaced.

    Raises:
      Obstacle: it is no attention, or none that can be replaced.
    """
    # 1. Follow the scores from the product of queries and keys to the softmax.
    if (chain := chain_to(weights.scores, scope)) is None:
        raise Obstacle(last, "weighs values by a softmax of scores that are no product of queries and keys")
    product, score_eqns = chain
    key_index = 0 if _is_keys(product, score_eqns, weights) else 1
    query_names, key_names = name_dims(product, key_index)
    product_names = names_of_product(product, (key_names, query_names) if key_index == 0 else (query_names, key_names))
    scores = Scores(product_names, scope, product.outvars[0])
    for eqn, operand in score_eqns:
        scores.pass_through(eqn, operand)
    # 2. Follow the weights from the softmax to the product with values.
    weight_names, obstacles = _follow_weights(last, weights, scores)
    if weights.sinks:
        obstacles = [Obstacle(last, "has a softmax of more than its keys"), *obstacles]
    # 3. Name the dims of values and of the result.
    dims = attention_dims(last, side, scores.names[weights.dim], query_names, key_names, weight_names)
    t, s = dims.sizes["t"], dims.sizes["s"]
    # 4. Replace it by `jp.attention` if its options suffice, else by a bias or a function of scores.
    try:
        causal, window, read = scores.options(t, s, last, *obstacles)
        attend = _attend_with_options(t, causal, window, scores.scale)
        texts = [*["causal"] * causal, *[f"window={window}"] * bool(window), *["segments"] * bool(read)]
    except Obstacle:
        is_biased = result.biases and scores.obstacle and scores.is_affine and not obstacles and t == s
        if not (result.replay or is_biased):
            raise
        dim_order = *dims.rows, *dims.heads, *dims.groups, "t", "s"
        site = AttentionSite(scope, last, {name: dims.sizes[name] for name in dim_order})
        score_ends = (product.outvars[0], product_names), (weights.scores, scores.names)
        causal = scores.causal(t, s)
        if is_biased:
            read, bias = read_bias(site, score_ends)
            attend, text = _attend_with_bias(bias, causal, scores.scale), "with a bias"
        else:
            transforms_weights = len(obstacles) > bool(weights.sinks)
            weight_ends = (weights.result, scores.names), (last.invars[side], weight_names)
            weight_ends = weight_ends if transforms_weights else None
            read, attend, text = replayed_attention(site, score_ends, weight_ends, weights.sinks, causal)
        texts = [*["causal"] * causal, text]
    arrays = (product.invars[1 - key_index], product.invars[key_index], last.invars[1 - side], *read)
    compute = dims.computation(attend, last.outvars[0].aval)
    return SpelledAttention(last, arrays, compute, ", ".join(texts) or "all keys", weights.scores.aval)


def _follow_weights(last: Any, weights: Weights, scores: Scores) -> tuple[Names, list[Obstacle]]:
    """Follow the weights from the softmax to the product with values.

    Returns:
      The names of their dims there, and the obstacles to `jp.attention`: equations that scale or drop weights.

    Raises:
      Obstacle: an equation is not linear in the weights.
    """
    names, obstacles = scores.names, list[Obstacle]()
    dependents = jx.depends(scores.scope.eqns, [weights.result]) if weights.following else set()
    for eqn, operand in weights.following:
        if moves(eqn):
            names = names_after(eqn, names)
            continue
        # Not linear: a product of two values that both depend on the softmax, or weights as divisor or condition.
        arguments = [x for i, x in enumerate(eqn.invars) if i != operand and not jx.is_literal(x)]
        if dependents.intersection(arguments) or (eqn.primitive.name, operand) in (("div", 1), ("select_n", 0)):
            raise Obstacle(eqn, f"computes {eqn.primitive.name} of weights, which is not linear")
        if eqn.primitive.name == "select_n" and replace(scores, names=names).replacing_number(eqn, operand) != 0:
            raise Obstacle(eqn, "replaces some weights by other numbers than 0")
        if scales_along_dims(eqn):
            # `dot_general` puts the shared dims first in its result.
            _, shared = product_dims(eqn)
            free = [dims for d, dims in enumerate(names) if d not in shared[operand]]
            names = (*(names[d] for d in shared[operand]), *free)
            if _is_one(eqn.invars[1 - operand], scores.scope, eqn):
                continue
        obstacles.append(Obstacle(eqn, f"computes {eqn.primitive.name} of weights, as dropout does"))
    return names, obstacles


def _attend_with_options(t: int, causal: bool, window: int | None, scale: float) -> Callable[..., jax.Array]:
    """Return `jp.attention` with these options, as a function of queries, keys, values and perhaps segment ids."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
        row_ids = [jnp.broadcast_to(x.reshape(-1, t), q.shape[:2]) for x in ids]
        return attention(q, k, v, segment_ids=next(iter(row_ids), None), causal=causal, window=window, scale=scale)

    return attend


def _attend_with_bias(bias: Callable[..., jax.Array], causal: bool, scale: float) -> Callable[..., jax.Array]:
    """Return attention with a bias, as a function of queries, keys, values and the arrays that the bias reads."""
    kernel = functools.partial(biased_attention, causal=causal, scale=scale)
    return lambda q, k, v, *operands: kernel(q, k, v, bias(q, k, *operands))


def _is_one(atom: Any, scope: Scope, reader: Any) -> bool:
    """Whether all numbers of an array are 1, for example a mask of heads that nobody passed."""
    try:
        return number_of(describe(atom, tuple("b" for _ in atom.aval.shape), scope, reader), reader) == 1
    except Obstacle:
        return False


def _is_keys(product: Any, score_eqns: Chain, weights: Weights) -> bool:
    """Whether the first operand of a product is the keys: whether the softmax is over a dim of it.

    Raises:
      Obstacle: a reshape on the way to the softmax cuts through dims.
    """
    # Name all dims by their operand, and follow the names to the softmax.
    mark = lambda i: tuple((Dim(i, n),) if n != 1 else () for n in product.invars[i].aval.shape)
    names = names_of_product(product, (mark(0), mark(1)))
    for eqn, _ in score_eqns:
        names = names_after(eqn, names) if moves(eqn) else names
    return [dim.name for dim in names[weights.dim]] == [0]
