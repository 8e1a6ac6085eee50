"""Find the logits of cross-entropies in a traced loss, and make them for a chunk of tokens at a time.

Logits are a product of hidden states [.., T, D] and a head [D, V]. A loss reduces them to a few numbers for each token,
or to sums of these. The equations between (a cast, a bias, a soft cap, log-softmax and a lookup, a one-hot, a z-loss,
an argmax) form a region:

    hidden states, head --> product --> logits --> ... --> numbers for each token
                            |------------ region -----------|

A region runs on one chunk of tokens after another, in a loop. Its backward makes each chunk's logits again, as
`jp.cross_entropy` does. Each equation becomes what it would be on a rank of `context` that holds this part of the
positions, by the same rules (`chunks.py`); no equation is replaced by a different one. If an equation has no rule, or
needs logits of several chunks at once, the logits stay whole.

This is the last rewriting of the program. It changes the program of one device, whose logits are that device's part of
the positions and words.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from ...parallel.context.split import Split
from ...parallel.tensor.localiser import LocalValue
from ...parallel.tensor.primitives import ELEMENTWISE, shape_of
from ...program import jaxpr as jx
from ...program.environment import through
from ...program.walk import propagate, visit
from .chunks import RULES, Chunk, StayWholeError
from .cross_entropy import CHUNK, HeadProduct, compute_first, num_chunks

LARGE = 4 * 2**30  # bytes of float32 logits on one device, beyond which "auto" makes them in chunks
MAX_NUMBERS_PER_TOKEN = 8  # numbers for each token that a region may return, such as a token's best few words
# One-hots and index columns consist of these.
_LABEL_PRIMITIVES = frozenset((*ELEMENTWISE, "broadcast_in_dim", "iota", "concatenate"))
_HOLDERS = dict.fromkeys(jx.REMATS, "jax.checkpoint") | {"scan": "a loop", "cond": "a branch"}


@dataclass(frozen=True)
class Logits:
    """Logits that were found in a loss.

    Attributes:
      tokens: the number of tokens of one device and microbatch.
      words: the number of words, in this device's part of the vocabulary.
      chunks: the number of chunks; 1 if the logits are whole.
      why: the reason why they are whole.
    """

    tokens: int
    words: int
    chunks: int = 1
    why: str = ""


def chunked(flat: jx.Flat, leaves: int, chunk: int | str, axes: dict[str, int]) -> tuple[jx.Flat, dict[str, Logits]]:
    """Return a loss with its logits in chunks, and the logits that were found, by the line of the program.

    Args:
      flat: the program of one device; its first inputs are `leaves` parameters.
      chunk: the largest number of tokens in a chunk; "auto" for `CHUNK` if logits are larger than `LARGE`; "whole" for
        no chunks.
      axes: the mesh axes that the program may name, name -> size.
    """
    logits_by_place: dict[str, Logits] = {}
    # A float32 has 4 bytes.
    min_elements = {"whole": math.inf, "auto": LARGE / 4}.get(str(chunk), 0)
    leaf_vars, batch_vars = flat.invars[:leaves], flat.invars[leaves:]
    for region, holder in _nested_regions(flat, leaves, min_elements).values():
        reason = f"they are made within {holder}"
        logits_by_place[region.place] = Logits(region.tokens, region.words, why=reason)
    for logits_var in [eqn.outvars[0] for eqn in flat.eqns if _is_large(eqn, min_elements)]:
        # Look the equation up again: the loop of an earlier region may have renamed its operands.
        eqn = next((e for e in flat.eqns if logits_var in e.outvars), None)
        region = eqn and _Region.of_product(flat, eqn, leaf_vars, batch_vars)
        if not region:
            continue
        place, tokens, words = region.place, region.tokens, region.words
        try:
            loop, chunks = region.in_chunks(CHUNK if isinstance(chunk, str) else chunk, axes)
        except StayWholeError as error:
            logits_by_place[place] = Logits(tokens, words, why=str(error))
            continue
        if chunks > 1:
            logits_by_place[place], flat = Logits(tokens, words, chunks), region.replaced_in(flat, loop)
    return flat, logits_by_place


def _is_large(eqn: Any, min_elements: float) -> bool:
    """Return whether an equation is a product of more than `min_elements` elements."""
    return eqn.primitive.name == "dot_general" and math.prod(shape_of(eqn)) > min_elements


def _nested_regions(flat: jx.Flat, leaves: int, min_elements: float) -> "dict[str, tuple[_Region, str]]":
    """Return cross-entropies within loops, branches and checkpoints, whose logits stay whole.

    Returns:
      place -> the region, and the kind of equation that holds it.
    """
    regions_by_place: dict[str, tuple[_Region, str]] = {}

    # Each variable carries the set of its sources, "leaf" for parameters and "rest" for the batch.
    def visit_program(holder: str, program: Any, ins: list[frozenset[str]], _: Any) -> list[frozenset[str]]:
        if holder:
            inner = jx.flatten(jec.ClosedJaxpr(*jx.opened(program)))
            inputs_from = lambda source: [v for v, sources in zip(inner.invars, ins, strict=True) if source in sources]
            regions = [
                _Region.of_product(inner, eqn, inputs_from("leaf"), inputs_from("rest"))
                for eqn in inner.eqns
                if _is_large(eqn, min_elements)
            ]
            regions_by_place.update((region.place, (region, holder)) for region in regions if region)
        return through(program, ins, visit_equation, frozenset())

    def visit_equation(eqn: Any, ins: list[frozenset[str]]) -> list[frozenset[str]]:
        visit_inner = functools.partial(visit_program, _HOLDERS.get(eqn.primitive.name, ""))
        outs = propagate(eqn, ins, visit_inner, frozenset.union)
        return outs or [frozenset[str]().union(*ins)] * len(eqn.outvars)

    holders = [eqn for eqn in flat.eqns if eqn.primitive.name in _HOLDERS]
    if any(_is_large(inner, min_elements) for eqn in holders for inner, _ in visit([eqn])):
        sources = [frozenset(("leaf" if i < leaves else "rest",)) for i in range(len(flat.invars))]
        through(flat, sources, visit_equation, frozenset())
    return regions_by_place


def _head_product(eqn: Any, batch_dependent: set[Any]) -> HeadProduct | None:
    """Return how an equation multiplies hidden states, which depend on the batch, with a head, which does not."""
    (contracted, batch), params = eqn.params["dimension_numbers"], eqn.params
    for side in (0, 1):
        hidden, head = eqn.invars[side], eqn.invars[1 - side]
        if jx.is_literal(head) or head in batch_dependent or hidden not in batch_dependent:
            continue
        # One summed dim and no batch dims: any other product is no head.
        if batch[0] or len(contracted[0]) != 1:
            continue
        if head.aval.ndim == 2 <= hidden.aval.ndim and jnp.issubdtype(head.aval.dtype, jnp.floating):
            dtype = params["preferred_element_type"]
            return HeadProduct(contracted[side][0], contracted[1 - side][0], side == 1, params["precision"], dtype)
    return None


def _reads(eqn: Any) -> list[Any]:
    """Return the variables that an equation reads."""
    return [v for v in eqn.invars if not jx.is_literal(v)]


def _dependents(flat: jx.Flat, product_eqn: Any) -> set[Any]:
    """Return the results of an equation, and all variables that depend on them."""
    dependent_vars = set(product_eqn.outvars)
    for eqn in flat.eqns[flat.eqns.index(product_eqn) + 1 :]:
        if any(v in dependent_vars for v in _reads(eqn)):
            dependent_vars.update(eqn.outvars)
    return dependent_vars


def _region_eqns(
    flat: jx.Flat, product_eqn: Any, dependent_vars: set[Any], is_large: Callable[[Any], bool]
) -> tuple[set[int], set[int]]:
    """Return the equations of the region that begins with a product, by id.

    Args:
      dependent_vars: the variables that depend on the logits.
      is_large: returns whether a variable is about as large as the logits.

    Returns:
      region_ids: the equations that read large variables which depend on the logits, and all before these, back to the
        product.
      label_ids: the equations that make one-hots and index columns for them, from nothing of the logits.
    """
    # 1. From the end of the program back to the product.
    region_ids: set[int] = set()
    needed_vars: set[Any] = set()
    for eqn in reversed(flat.eqns):
        reads_large = any(v in dependent_vars and is_large(v) for v in _reads(eqn))
        is_dependent = not dependent_vars.isdisjoint(eqn.outvars)
        if is_dependent and (eqn is product_eqn or reads_large or needed_vars & {*eqn.outvars}):
            region_ids.add(id(eqn))
            needed_vars.update(v for v in _reads(eqn) if v in dependent_vars)
    # 2. Large one-hots must be made chunk by chunk too. Of `logits[arange(n), labels]`, the index column `arange(n)`
    # must be recognised as such, so that its equations belong to the region at any size.
    region = [eqn for eqn in flat.eqns if id(eqn) in region_ids]
    producer = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    pending = [v for eqn in region if eqn is not product_eqn for v in _reads(eqn) if v not in dependent_vars]
    index_vars = {eqn.invars[1] for eqn in region if eqn.primitive.name == "gather"} - dependent_vars
    label_ids: set[int] = set()
    while pending:
        v = pending.pop()
        eqn = producer.get(v) if is_large(v) or v in index_vars else None
        if eqn is not None and eqn.primitive.name in _LABEL_PRIMITIVES:
            label_ids.add(id(eqn))
            index_vars.update(_reads(eqn) if v in index_vars else ())
            pending += _reads(eqn)
    return region_ids, label_ids


@dataclass
class _Region:
    """The equations between a product of hidden states and a head, and the numbers for each token that remain.

    Attributes:
      product_eqn: the equation of the product.
      head_product: how it multiplies.
      eqns: the equations, in the program's order.
      label_ids: the ids of those equations that need no logits, and make one-hots and index columns.
      invars: the variables that the equations read, the hidden states and the head first.
      outvars: the variables that are read outside.
      trained_vars: the variables of the program that depend on parameters, and have a cotangent.
      dependent_vars: the variables of the program that depend on the logits.
      reason_whole: why the region cannot run in chunks, if it returns more than a few numbers for each token.
      out_values: the results of one chunk, as the last trace left them.
    """

    product_eqn: Any
    head_product: HeadProduct
    eqns: list[Any]
    label_ids: set[int]
    invars: list[Any]
    outvars: list[Any]
    trained_vars: set[Any]
    dependent_vars: set[Any]
    reason_whole: str
    out_values: list[LocalValue] = field(default_factory=list)

    @classmethod
    def of_product(
        cls, flat: jx.Flat, product_eqn: Any, leaf_vars: Iterable[Any], batch_vars: Iterable[Any]
    ) -> "_Region | None":
        """Return the region that begins with a product; None if it belongs to no cross-entropy.

        `leaf_vars` are the parameters among the program's inputs, `batch_vars` the other inputs.
        """
        head_product = _head_product(product_eqn, jx.depends(flat.eqns, batch_vars))
        if head_product is None:
            return None
        trained_vars = jx.depends(flat.eqns, leaf_vars)
        num_logits = math.prod(shape_of(product_eqn))
        size = lambda v: 0 if jx.is_literal(v) else math.prod(v.aval.shape)
        # Half as large already counts: a slice of the logits without the last position is not as large as they are.
        is_large = lambda v: 2 * size(v) > num_logits
        dependent_vars = _dependents(flat, product_eqn)
        # 1. Its equations, and the variables that are read outside.
        region_ids, label_ids = _region_eqns(flat, product_eqn, dependent_vars, is_large)
        eqns = [eqn for eqn in flat.eqns if id(eqn) in region_ids | label_ids]
        read_outside = {v for eqn in flat.eqns if id(eqn) not in region_ids for v in _reads(eqn)}
        read_outside.update(v for v in flat.outvars if not jx.is_literal(v))
        results = [v for eqn in eqns if id(eqn) in region_ids for v in eqn.outvars]
        outvars = [v for v in results if v in read_outside]
        # 2. A cross-entropy has an exp, a log, and no further product with parameters.
        products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general" and eqn is not product_eqn]
        primitive_names = lambda eqns: {inner.primitive.name for eqn in eqns for inner, _ in visit([eqn])}
        names = primitive_names(eqns)
        dependent_names = primitive_names(e for e in flat.eqns if not dependent_vars.isdisjoint(e.outvars))
        has_weights = any(trained_vars.issuperset(_reads(eqn)) for eqn in products)
        if not outvars or not ("exp" in names and "log" in dependent_names and not has_weights):
            return None
        # 3. Its results must be a few numbers for each token.
        hidden, head = product_eqn.invars[::-1] if head_product.swapped else product_eqn.invars
        words = head.aval.shape[1 - head_product.of_head]
        # More than a few numbers for each token: size(v) / tokens > MAX_NUMBERS_PER_TOKEN, without a division.
        large_results = {v for v in outvars if size(v) * words > MAX_NUMBERS_PER_TOKEN * num_logits or is_large(v)}
        outer_eqns = (eqn for eqn in flat.eqns if id(eqn) not in region_ids)
        reader = next((eqn for eqn in outer_eqns if not large_results.isdisjoint(_reads(eqn))), None)
        subject = "the loss returns" if reader is None else f"{reader.primitive.name} at {jx.where(reader)} reads"
        reason = f"{subject} more than {MAX_NUMBERS_PER_TOKEN} numbers per token that depend on them"
        invars = [hidden, head, *(v for v in jx.free(eqns) if v not in (hidden, head))]
        return cls(
            product_eqn,
            head_product,
            eqns,
            label_ids,
            invars,
            outvars,
            trained_vars,
            dependent_vars,
            reason if large_results else "",
        )

    @property
    def words(self) -> int:
        """The number of words that the head has."""
        return shape_of(self.product_eqn)[0 if self.head_product.swapped else -1]

    @property
    def tokens(self) -> int:
        """The number of tokens that have logits."""
        return math.prod(shape_of(self.product_eqn)) // self.words

    @property
    def place(self) -> str:
        """The user's line of the product; its shape if there is no line."""
        return jx.where(self.product_eqn) or f"logits [{self.tokens}, {self.words}]"

    def in_chunks(self, chunk: int, axes: dict[str, int]) -> tuple[jx.Flat, int]:
        """Return the program from `invars` to `outvars` in chunks of at most `chunk` tokens, and their number.

        Raises:
          StayWholeError: if the region cannot run in chunks.
        """
        hidden, _, *other_vars = self.invars
        self._check_operands()
        # 1. Cut the longest dim of the hidden states.
        # The longest dim can be cut into the most chunks.
        token_dims = [d for d in range(hidden.aval.ndim) if d != self.head_product.of_hidden]
        dim = max(token_dims, key=lambda d: hidden.aval.shape[d])
        n = num_chunks(hidden.aval.shape[dim], -(-self.tokens // chunk))
        region = jx.Flat((), (), tuple(self.invars), tuple(self.outvars), tuple(self.eqns))

        # 2. The loop over chunks.
        def run_chunks(states: jax.Array, head: jax.Array, *other_inputs: jax.Array) -> list[jax.Array]:
            chunks = _cut_chunks(states, dim, n)
            # A loop adds up gradients in the dtype of its inputs. So inputs with gradients enter in float32, and each
            # chunk casts them; the head's gradient belongs to `wide_head` (`cross_entropy.product`).
            wide_head, fixed_head = _widen(head), lax.stop_gradient(head)
            wide_inputs = [
                _widen(x) if v in self.trained_vars else x for v, x in zip(other_vars, other_inputs, strict=True)
            ]

            @jax.checkpoint
            def run_chunk(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, list[jax.Array]]:
                index, chunk_states = chunk
                localiser = Chunk(
                    n,
                    False,
                    RULES,
                    max_gathered=2**62,
                    index=index,
                    product_eqn=self.product_eqn,
                    head_product=self.head_product,
                    wide_head=wide_head,
                )
                inputs = [x.astype(v.aval.dtype) for v, x in zip(other_vars, wide_inputs, strict=True)]
                values = [(chunk_states, Split(dim)), (fixed_head, None), *((x, None) for x in inputs)]
                args = [
                    LocalValue(x, split, v.aval.shape, v in self.trained_vars)
                    for v, (x, split) in zip(self.invars, values, strict=True)
                ]
                self.out_values = localiser.run(region, args, linear=True)
                return None, [x.value for x in self.out_values]

            _, stacked_outs = lax.scan(run_chunk, None, (jnp.arange(n, dtype=jnp.int32), chunks))
            return [self._join_chunks(ys, x) for ys, x in zip(stacked_outs, self.out_values, strict=True)]

        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.invars]
        if n == 1:
            return region, 1
        loop, _ = jx.trace(run_chunks, *shapes, axes=axes)
        # The backward of a custom_vjp is another program, which may read all tokens: tracing it raises StayWholeError.
        if any(inner.primitive.name.startswith("custom_vjp") for eqn in self.eqns for inner, _ in visit([eqn])):
            jx.trace(lambda *values: jx.pulled(run_chunks, values), *shapes, axes=axes)
        # Drop the equations that made whole one-hots: each chunk makes its own part.
        return dataclasses.replace(loop, eqns=jx.live(loop.eqns, loop.outvars)), n

    def _check_operands(self) -> None:
        """Raise StayWholeError if the region cannot run in chunks because of its operands or results."""
        hidden, head, *other_vars = self.invars
        if self.reason_whole:
            raise StayWholeError(self.reason_whole)
        if any(v is head or v is hidden for e in self.eqns if e is not self.product_eqn for v in e.invars):
            raise StayWholeError("the cross-entropy reads the head or the hidden states again")
        num_logits = math.prod(shape_of(self.product_eqn))
        if any(not jx.is_literal(v) and 2 * math.prod(v.aval.shape) > num_logits for v in other_vars):
            raise StayWholeError("they meet a value of their size that is no one-hot")

    @staticmethod
    def _join_chunks(ys: jax.Array, x: LocalValue) -> jax.Array:
        """Return the result of all chunks as one array.

        Args:
          ys: the result of each chunk, [chunks, ...].
          x: the result of one chunk: along which dim it is split, or that it is a partial sum.
        """
        if x.partial:
            # Partial sums add up in float32, as a loop would otherwise round after each chunk.
            value = _widen(ys).sum(0).astype(ys.dtype)
        elif not isinstance(x.dim, Split) or x.dim.overlap > 0:
            raise StayWholeError("a result of the cross-entropy is neither split by token nor a sum over tokens")
        else:
            d, rows = int(x.dim), x.dim.rows
            ys = ys.reshape(*ys.shape[: d + 1], rows, -1, *ys.shape[d + 2 :])  # [chunks, .., rows, positions, ..]
            ys = jnp.moveaxis(ys, 0, d + 1)  # [.., rows, chunks, positions, ..]
            ys = ys.reshape(*ys.shape[: d + 1], -1, *ys.shape[d + 3 :])  # [.., rows, padded positions, ..]
            value = lax.slice_in_dim(ys, 0, x.shape[d] // rows, axis=d + 1).reshape(x.shape)
        return compute_first(value) if jnp.issubdtype(value.dtype, jnp.inexact) else value

    def replaced_in(self, flat: jx.Flat, loop: jx.Flat) -> jx.Flat:
        """Return program `flat` with the equations of `loop` instead of this region's."""
        replaced_ids = {id(eqn) for eqn in self.eqns} - self.label_ids
        last = max(i for i, eqn in enumerate(flat.eqns) if id(eqn) in replaced_ids)
        remaining = [(i, eqn) for i, eqn in enumerate(flat.eqns) if id(eqn) not in replaced_ids]
        # 1. The loop runs where the region ended. Equations that read its results move behind it.
        needs_loop = lambda eqn: not self.dependent_vars.isdisjoint(_reads(eqn))
        # Equations between the region's that do not depend on the logits keep their place before the loop.
        eqns_before = [eqn for i, eqn in remaining if i < last and not needs_loop(eqn)]
        eqns_after = [eqn for i, eqn in remaining if i > last or needs_loop(eqn)]
        # 2. The loop reads the region's inputs, and later equations read the loop's results.
        loop_inputs = jx.Environment(zip(loop.invars, self.invars, strict=True), jx.itself)
        loop_eqns = [eqn.replace(invars=loop_inputs.read(eqn.invars)) for eqn in loop.eqns]
        results = jx.Environment(zip(self.outvars, loop_inputs.read(loop.outvars), strict=True), jx.itself)
        outvars = tuple(results.read(flat.outvars))
        eqns_after = [eqn.replace(invars=results.read(eqn.invars)) for eqn in eqns_after]
        # 3. Drop one-hots and index columns that nothing reads any more, since each chunk makes its own.
        unlabelled = [eqn for eqn in eqns_before if id(eqn) not in self.label_ids]
        read_vars = [v for eqn in (*unlabelled, *loop_eqns, *eqns_after) for v in eqn.invars]
        needed_ids = {id(eqn) for eqn in (*unlabelled, *jx.needed(eqns_before, (*read_vars, *outvars)))}
        needed_eqns = [eqn for eqn in eqns_before if id(eqn) in needed_ids]
        return jx.Flat(
            (*flat.constvars, *loop.constvars),
            (*flat.consts, *loop.consts),
            flat.invars,
            outvars,
            (*needed_eqns, *loop_eqns, *eqns_after),
        )


def _cut_chunks(x: jax.Array, dim: int, n: int) -> jax.Array:
    """Cut a dim into n chunks of equal length: [.., positions, ..] -> [n, .., length, ..].

    The padding repeats the last position, whose logits are finite if its own are: 0 times NaN is not zero.
    """
    length = -(-x.shape[dim] // n)
    if missing := length * n - x.shape[dim]:
        x = jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)], "edge")
    return jnp.moveaxis(x.reshape(*x.shape[:dim], n, length, *x.shape[dim + 1 :]), dim, 0)


def _widen(x: jax.Array) -> jax.Array:
    """Return floating-point numbers in float32 or wider, and others unchanged."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.inexact) else x
