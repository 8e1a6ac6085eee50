"""Find the hidden matrices of a model, for optimizers of whole matrices such as Muon (Jordan et al. 2024).

These optimizers are meant for hidden matrices, not for embeddings, heads, norms and biases. `matrices` returns for each
leaf which of its dims are input dims (summed by a product), output dims and batch dims (layers, experts):

    with a batch       `_by_program` traces the loss and looks at each product that reads the leaf: exact
    without a batch    `_by_names` decides by paths and shapes: a guess

`matrix_warning` is about an optimizer that multiplies leaves that are no hidden matrices.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from optax.contrib import MuonDimensionNumbers

from ...backend.text import few, table
from ...layout.families import inside_stack, on_second_dim
from ...model.model import Model
from ...model.paths import name_of
from ...parallel.expert.dims import Leaves, looks_stacked
from ...parallel.tensor.dims import ENDS, HEADS, NORM, has_heads
from ...parallel.tensor.patterns import pattern
from ...program import dims as followed
from ...program import jaxpr as jx
from ...program.primitives import PRODUCTS

_BATCH = -2  # marks values that depend on the batch
_VECTOR = re.compile("(.*/)?(bias|b|scale)")
_NUMBER = re.compile(r"_?\d+")


@dataclass(frozen=True)
class Matrix:
    """The role of one leaf for an optimizer of matrices.

    Attributes:
      shape: the shape of the leaf.
      reduction: the dims that a product with the leaf sums; empty if the leaf is no hidden matrix.
      output: the dims that the product adds to its result; empty if the leaf is no hidden matrix.
      why: the reason why it is no hidden matrix, or how its dims are known.

    All remaining dims of a hidden matrix are batch dims: each of their indices has a separate matrix.
    """

    shape: tuple[int, ...]
    reduction: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    why: str = ""

    @property
    def batch(self) -> tuple[int, ...]:
        """The dims of layers, experts and the like."""
        return (
            tuple(d for d in range(len(self.shape)) if d not in (*self.reduction, *self.output)) if self.output else ()
        )

    @property
    def numbers(self) -> MuonDimensionNumbers | None:
        """The dims in optax's form; None if the leaf is no hidden matrix."""
        return MuonDimensionNumbers(self.reduction, self.output) if self.output else None


@dataclass(frozen=True, repr=False)
class Matrices:
    """The hidden matrices of a model; print it to see them.

    Call it with a tree of parameters, or of their gradients. It returns optax's dimension numbers in that tree, with
    None for a leaf that is no hidden matrix. So it can be passed to optax as `muon_weight_dimension_numbers`. A leaf
    that is not in the model raises ValueError.

    Attributes:
      leaves: a `Matrix` for each of the model's leaves, by path.
    """

    leaves: Mapping[str, Matrix]

    def __call__(self, params: Any) -> Any:
        """Return optax's dimension numbers in the tree of these parameters."""

        def dimension_numbers(path: Any, x: Any) -> MuonDimensionNumbers | None:
            leaf = self.leaves.get(name_of(path))
            if leaf is None or leaf.shape != tuple(x.shape):
                mismatch = "is no leaf of the model" if leaf is None else f"is {list(leaf.shape)} in the model"
                raise ValueError(
                    f"{name_of(path)} {list(x.shape)} {mismatch}; use jp.matrices(model) of the model that is trained, "
                    "on its own tree of parameters"
                )
            return leaf.numbers

        return jax.tree_util.tree_map_with_path(dimension_numbers, params)

    def __repr__(self) -> str:
        num_hidden = sum(bool(leaf.output) for leaf in self.leaves.values())
        return f"Matrices({num_hidden} of {len(self.leaves)} leaves; print it to see them)"

    def __str__(self) -> str:
        sizes = lambda leaf, dims: " x ".join(str(leaf.shape[d]) for d in dims) or "-"
        rows = [
            (path, str(list(m.shape)), sizes(m, m.batch), sizes(m, m.reduction), sizes(m, m.output), m.why)
            for path, m in sorted(self.leaves.items(), key=lambda item: not item[1].output)
        ]
        return table([("leaf", "shape", "batch", "in", "out", ""), *rows], "<<<<<<")


def matrices(model: Model, batch: Any = None) -> Matrices:
    """Find the hidden matrices of a model, for an optimizer of whole matrices.

    ```python
    optax.contrib.muon(0.02, muon_weight_dimension_numbers=jp.matrices(model, batch))
    ```

    Args:
      model: from `from_nnx`, `from_linen` or `Model(init=..., loss=...)`.
      batch: arrays or `jax.ShapeDtypeStruct` [rows, ...], as the loss takes them. With a batch, the loss is traced, and
        its products tell what each leaf is: the dims that they sum are *in*, the dims of their results *out*, all
        remaining dims (layers, experts) *batch*. This is exact, whatever the names of the parameters. Without a batch,
        shapes and the names that jaxpar knows decide. Leaves of three dims or more with unknown names then count as no
        matrices. This is a guess, as the record says for each leaf.

    Returns:
      A record of all leaves. These are no hidden matrices: tables that are looked up, weights of the first products
      (they read the batch itself) and of the last (their results go into the loss), arrays that are added to or
      multiplied with activations (norms, biases, positions), and kernels with one number per feature (depthwise
      convolutions).

    Raises:
      ValueError: if the loss does.

    Allocates and communicates nothing.
    """
    params, variables = jax.eval_shape(model.create, jax.random.key(0))
    shapes = {name_of(path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    if batch is None:
        return Matrices(_by_names(shapes))
    loss = lambda params, variables, batch: model.call(params, variables, batch, None)[0]["loss"].total
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return Matrices(_by_program(jx.trace(loss, params, variables, rows)[0], shapes))


class _Read(NamedTuple):
    """One product that reads a leaf.

    Attributes:
      reduction: the dims of the leaf that the product sums.
      output: the dims of the leaf that are dims of the result.
      sources: the leaves that the other operand depends on, by number.
    """

    reduction: tuple[int, ...]
    output: tuple[int, ...]
    sources: frozenset[int]


def _by_program(program: jx.Flat, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Matrix]:
    """Return the role of each leaf from the program of a loss.

    The program's first inputs are the parameters; `shapes` has their shapes by path, in the same order.
    """
    # 1. Follow the parameters through the program, and collect how products and lookups read them.
    reads: dict[int, list[_Read]] = {}
    tables: set[int] = set()
    depthwise: set[int] = set()

    def note_reads(eqn: Any, ins: Sequence[followed.Followed]) -> frozenset[int]:
        if eqn.primitive.name == "gather" and _BATCH in ins[1].marks and _BATCH not in ins[0].marks:
            tables.update(i for i, _ in ins[0].views)
        if eqn.primitive.name in PRODUCTS:
            for side in (0, 1):
                operand, other_operand = ins[side], ins[1 - side]
                if side == 0 and _BATCH not in other_operand.marks:
                    continue  # a product of two parameters counts as a read of the right one alone
                for i, dims in operand.views:
                    summed, free = _summed_and_free(eqn, side, dims)
                    if eqn.primitive.name == "conv_general_dilated" and _is_depthwise(eqn):
                        depthwise.add(i)
                    # With one element on either side it is a vector or a scalar, and no matrix.
                    elif math.prod(p.size for p in summed) > 1 < math.prod(p.size for p in free):
                        reduction, output = (
                            tuple(sorted({p.dim for p in parts if p.source == i})) for parts in (summed, free)
                        )
                        reads.setdefault(i, []).append(_Read(reduction, output, other_operand.marks - {i}))
        return frozenset()

    param_vars, batch_vars = program.invars[: len(shapes)], program.invars[len(shapes) :]
    env = {v: followed.source(i, shape) for i, (v, shape) in enumerate(zip(param_vars, shapes.values(), strict=True))}
    env.update(dict.fromkeys(batch_vars, followed.Followed((), frozenset({_BATCH}))))
    followed.Follower(note_reads, ends=_BATCH).follow(jx.live(program.eqns, program.outvars), env)

    # 2. Decide for each leaf. A hidden matrix reads what other weights made, and makes what other weights read.
    feeding = frozenset().union(*(read.sources for leaf_reads in reads.values() for read in leaf_reads))
    weights = frozenset(reads) | tables
    result: dict[str, Matrix] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        leaf_reads = reads.get(i, [])
        # As a set, so that a matrix and its transpose, as of tied weights, count as one way.
        orientations = {frozenset((read.reduction, read.output)) for read in leaf_reads}
        if i in tables:
            reason = "its rows are looked up"
        elif i in depthwise:
            reason = "depthwise: one number for each feature and place"
        elif not leaf_reads:
            reason = "it is in no product of a matrix with activations"
        elif any(set(read.reduction) & set(read.output) for read in leaf_reads) or len(orientations) > 1:
            reason = "products read it along different dims"
        elif not any(read.sources & weights for read in leaf_reads):
            reason = "it reads the batch itself: where the model begins"
        elif i not in feeding:
            reason = "its results go into the loss: where the model ends"
        else:
            result[name] = Matrix(shape, leaf_reads[0].reduction, leaf_reads[0].output, "as the loss reads it")
            continue
        result[name] = Matrix(shape, why=reason)
    return result


def _summed_and_free(eqn: Any, side: int, dims: followed.Dims) -> tuple[list[followed.DimPart], list[followed.DimPart]]:
    """Return the parts of one operand that a product sums, and those that are dims of the result but no batch dims.

    Args:
      side: which operand, 0 or 1.
      dims: the followed dims of that operand.
    """
    params, rank = eqn.params, len(dims)
    if eqn.primitive.name == "conv_general_dilated":
        # A kernel sums its input features and places. The activations of a convolution count as neither.
        output_dim = params["dimension_numbers"].rhs_spec[0] if side else -1
        summed, excluded = [d for d in range(rank) if side and d != output_dim], [] if side else list(range(rank))
    else:
        ragged = params.get("ragged_dot_dimension_numbers")
        contracted, batch = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
        # A ragged product has the experts on its group dim: one matrix for each.
        groups = [] if ragged is None or side == 0 else [*ragged.rhs_group_dimensions]
        summed, excluded = [int(d) for d in contracted[side]], [int(d) for d in (*batch[side], *groups)]
    parts_of = lambda positions: [part for d in positions for part in dims[d]]
    return parts_of(summed), parts_of([d for d in range(rank) if d not in (*summed, *excluded)])


def _is_depthwise(eqn: Any) -> bool:
    """Return whether each output feature of a convolution depends on one input feature alone."""
    return (
        eqn.invars[1].aval.shape[eqn.params["dimension_numbers"].rhs_spec[1]] == 1 < eqn.params["feature_group_count"]
    )


def layer_dims(flat: Leaves, experts: Mapping[str, int]) -> dict[str, int]:
    """Return the dim of layers of each leaf that lies inside a stack, by path.

    `experts` has by path the dims of experts, which are not dims of layers.
    """
    on_first_dim, on_dim_one = inside_stack(flat, experts), on_second_dim(flat, experts)
    return {path: 0 if on_first_dim(path) else 1 for path, _ in flat if on_first_dim(path) or on_dim_one(path)}


def _by_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Matrix]:
    """Guess the role of each leaf from the paths and shapes of all leaves."""
    flat = list(shapes.items())
    expert_dims = looks_stacked(flat)
    stack_dims = layer_dims(flat, expert_dims)
    # Leaves of alike blocks in a Python loop. Haiku's first block has no number.
    block_counts = Counter((_NUMBER.sub("", path), shape) for path, shape in flat)
    block_paths = {path for path, shape in flat if block_counts[_NUMBER.sub("", path), shape] > 1}
    is_norm, end_patterns = NORM.fullmatch, [pattern("", key).fullmatch for key in ENDS]
    head_patterns = [(pattern("", key).fullmatch, dim) for key, dim in HEADS.items()]
    result: dict[str, Matrix] = {}
    for path, shape in shapes.items():
        batch_dims = {dims[path] for dims in (stack_dims, expert_dims) if path in dims}
        dims = tuple(d for d in range(len(shape)) if d not in batch_dims)
        head_dim = next((dim for matches, dim in head_patterns if matches(path) and has_heads(path, shapes)), None)
        is_kernel = len(dims) == 4 and shape[dims[0]] == shape[dims[1]]  # [k, k, in, out]
        # The order of these tests matters: names of norms and heads say more than shapes do.
        if is_norm(path) or len(dims) < 2 or _VECTOR.fullmatch(path):
            reason = "a norm's, or a vector"
        elif any(matches(path) for matches in end_patterns):
            reason = "by its name, where the model begins or ends"
        # A matrix outside all layers is an embedding or a head.
        elif (block_paths or stack_dims) and path not in block_paths and not batch_dims:
            reason = "outside the layers, where the model begins or ends; give a batch to know"
        elif is_kernel and shape[dims[2]] == 1:
            reason = "depthwise, by its shape"
        elif len(dims) == 3 and head_dim is not None:
            num_inputs = 1 if head_dim == -2 else 2  # [d, heads, head_dim], or [heads, head_dim, d]
            result[path] = Matrix(shape, dims[:num_inputs], dims[num_inputs:], "by its name and shape")
            continue
        elif is_kernel or len(dims) == 2:
            output = len(dims) - 1 if is_kernel or not path.endswith("weight") else 0  # Equinox has [out, in]
            result[path] = Matrix(shape, tuple(d for d in dims if d != dims[output]), (dims[output],), "by its shape")
            continue
        else:
            reason = f"nothing says which of its {len(dims)} dims are in and out; give a batch to know"
        result[path] = Matrix(shape, why=reason)
    return result


def matrix_warning(
    loss: jx.Flat, leaves: Leaves, multiplied: Mapping[str, frozenset[int]], factors: bool
) -> str | None:
    """Return the text of a warning about an optimizer that multiplies leaves that are no hidden matrices.

    Args:
      loss: a program whose first inputs are the parameters.
      leaves: the path and shape of each parameter, in the order of these inputs.
      multiplied: for each leaf that the optimizer sees, by path, the dims along which it multiplies.
      factors: whether it keeps factors of the leaves, as Shampoo does. Such optimizers are meant for embeddings and
        heads too.

    Returns:
      The text, or None if nothing is wrong.
    """
    # 1. The roles of the leaves by the loss, and the dims of layers by names, which no optimizer may multiply.
    roles, stack_dims = _by_program(loss, dict(leaves)), layer_dims(leaves, looks_stacked(leaves))
    batch_dims = lambda path: {*roles[path].batch, *([stack_dims[path]] if path in stack_dims else [])}
    mixing_layers = [path for path, dims in multiplied.items() if not dims.isdisjoint(batch_dims(path))]
    not_hidden = [
        path for path, dims in multiplied.items() if dims and path not in mixing_layers and not roles[path].output
    ]
    missed = [path for path, dims in multiplied.items() if not dims and roles[path].output]
    # 2. Mixing layers is always wrong; other leaves may be multiplied by an optimizer that keeps factors.
    if not mixing_layers and (factors or not not_hidden):
        return None
    paths_by_problem = {
        "layers of a stack with one another, as if they were rows of a matrix:": mixing_layers,
        "leaves that are no hidden matrices:": not_hidden,
        "no dims of these hidden matrices:": missed,
    }
    problems = (
        f"{problem} {few([f'{path} {list(roles[path].shape)}' for path in paths])}"
        for problem, paths in paths_by_problem.items()
        if paths
    )
    return (
        f"the optimizer multiplies {'; '.join(problems)}. Pass the dims of the hidden matrices: "
        "optax.contrib.muon(..., muon_weight_dimension_numbers=jp.matrices(model, batch))"
    )
