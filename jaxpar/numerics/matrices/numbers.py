"""Which parameters are a model's hidden matrices, and along which dims: for optimizers of whole matrices, such as Muon
(Jordan et al. 2024), which are meant for these, and not for embeddings, heads, norms and biases.
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

_BATCH = -2  # the mark of all that depends on the batch
_VECTOR = re.compile("(.*/)?(bias|b|scale)")
_NUMBER = re.compile(r"_?\d+")


@dataclass(frozen=True)
class Matrix:
    """What a leaf is to an optimizer of matrices.

    Attributes:
      shape: the leaf's.
      reduction, output: the dims that a product with it sums, and those that it makes; the others are batch dims, each
        of whose indices is a matrix of its own. Both are empty where it is no hidden matrix.
      why: then why not; else how it is known.
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
        """As optax asks for them; None where it is no hidden matrix."""
        return MuonDimensionNumbers(self.reduction, self.output) if self.output else None


@dataclass(frozen=True, repr=False)
class Matrices:
    """The hidden matrices of a model; print it to see them. Called with a tree of parameters, or of their gradients, it
    gives optax's dimension numbers in that tree, None where a leaf is no hidden matrix; so it can itself be optax's
    `muon_weight_dimension_numbers`. A leaf that the model has not is a ValueError.

    Attributes:
      leaves: a `Matrix` for each of the model's leaves, by path.
    """

    leaves: Mapping[str, Matrix]

    def __call__(self, params: Any) -> Any:
        """Optax's dimension numbers in the tree of these parameters."""

        def numbers(path: Any, x: Any) -> MuonDimensionNumbers | None:
            leaf = self.leaves.get(name_of(path))
            if leaf is None or leaf.shape != tuple(x.shape):
                known = "is none of the model's" if leaf is None else f"is {list(leaf.shape)} in the model"
                raise ValueError(
                    f"{name_of(path)} {list(x.shape)} {known}; use jp.matrices(model) of the model that is trained, on "
                    "its own tree of parameters"
                )
            return leaf.numbers

        return jax.tree_util.tree_map_with_path(numbers, params)

    def __repr__(self) -> str:
        hidden = sum(bool(leaf.output) for leaf in self.leaves.values())
        return f"Matrices({hidden} of {len(self.leaves)} leaves; print it to see them)"

    def __str__(self) -> str:
        sizes = lambda leaf, dims: " x ".join(str(leaf.shape[d]) for d in dims) or "-"
        rows = [
            (path, str(list(x.shape)), sizes(x, x.batch), sizes(x, x.reduction), sizes(x, x.output), x.why)
            for path, x in sorted(self.leaves.items(), key=lambda item: not item[1].output)
        ]
        return table([("leaf", "shape", "batch", "in", "out", ""), *rows], "<<<<<<")


def matrices(model: Model, batch: Any = None) -> Matrices:
    """The hidden matrices of a model, for an optimizer of whole matrices.

    ```python
    optax.contrib.muon(0.02, muon_weight_dimension_numbers=jp.matrices(model, batch))
    ```

    Args:
      model: from `from_nnx`, `from_linen` or `Model(init=..., loss=...)`.
      batch: arrays or `jax.ShapeDtypeStruct` [rows, ...] as the loss takes them. With it, the loss is traced, and its
        program says what each leaf is: the dims that a product sums are *in*, those that it makes *out*, all others
        (layers, experts) *batch*; exact for models of any names. Without it, shapes and the names of parameters that
        jaxpar knows decide, and leaves of three dims or more whose names say nothing are none: a guess, as the record
        says of each.

    No hidden matrices are: tables that are looked up, the first products of all (they read the batch itself) and the
    last (what they make goes into the loss), what is added to or multiplied with activations (norms, biases,
    positions), and kernels that are one number for each feature (depthwise convolutions).

    Nothing is allocated, and nothing is sent. Raises ValueError where the loss does.
    """
    params, variables = jax.eval_shape(model.create, jax.random.key(0))
    flat = {name_of(path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    if batch is None:
        return Matrices(_by_names(flat))
    loss = lambda params, variables, batch: model.call(params, variables, batch, None)[0]["loss"].total
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return Matrices(_by_program(jx.trace(loss, params, variables, rows)[0], flat))


class _Read(NamedTuple):
    """One product with a leaf: dims that it sums and makes; the leaves that the other operand depends on."""

    reduction: tuple[int, ...]
    output: tuple[int, ...]
    after: frozenset[int]


def _by_program(program: jx.Flat, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Matrix]:
    """By a loss, whose first inputs are parameters with these paths and shapes."""
    reads: dict[int, list[_Read]] = {}
    tables: set[int] = set()
    depthwise: set[int] = set()

    def note(eqn: Any, ins: Sequence[followed.Followed]) -> frozenset[int]:
        if eqn.primitive.name == "gather" and _BATCH in ins[1].marks and _BATCH not in ins[0].marks:
            tables.update(i for i, _ in ins[0].views)
        if eqn.primitive.name in PRODUCTS:
            for side in (0, 1):
                x, other = ins[side], ins[1 - side]
                if side == 0 and _BATCH not in other.marks:
                    continue  # of parameters alone: the right one is what the left one is multiplied with
                for i, dims in x.views:
                    summed, made = _sides(eqn, side, dims)
                    if eqn.primitive.name == "conv_general_dilated" and _is_depthwise(eqn):
                        depthwise.add(i)
                    elif math.prod(p.size for p in summed) > 1 < math.prod(p.size for p in made):
                        numbers = [tuple(sorted({p.dim for p in row if p.source == i})) for row in (summed, made)]
                        reads.setdefault(i, []).append(_Read(numbers[0], numbers[1], other.marks - {i}))
        return frozenset()

    own, given = program.invars[: len(shapes)], program.invars[len(shapes) :]
    env = {var: followed.source(i, shape) for i, (var, shape) in enumerate(zip(own, shapes.values(), strict=True))}
    env.update(dict.fromkeys(given, followed.Followed((), frozenset({_BATCH}))))
    # What the loss does not read says nothing.
    followed.Follower(note, ends=_BATCH).follow(jx.live(program.eqns, program.outvars), env)

    feeding = frozenset().union(*(read.after for found in reads.values() for read in found))
    weights = frozenset(reads) | tables
    out: dict[str, Matrix] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        found = reads.get(i, [])
        ways = {frozenset((read.reduction, read.output)) for read in found}
        if i in tables:
            why = "its rows are looked up"
        elif i in depthwise:
            why = "depthwise: one number for each feature and place"
        elif not found:
            why = "it is in no product of a matrix with activations"
        elif any(set(read.reduction) & set(read.output) for read in found) or len(ways) > 1:
            why = "products read it along different dims"
        elif not any(read.after & weights for read in found):
            why = "it reads the batch itself: where the model begins"
        elif i not in feeding:
            why = "what it makes goes into the loss: where the model ends"
        else:
            out[name] = Matrix(shape, found[0].reduction, found[0].output, "as the loss reads it")
            continue
        out[name] = Matrix(shape, why=why)
    return out


def _sides(eqn: Any, side: int, dims: followed.Dims) -> tuple[list[followed.DimPart], list[followed.DimPart]]:
    """The parts of one operand of a product that it sums, and those that are dims of the result and of no batch."""
    params, rank = eqn.params, len(dims)
    if eqn.primitive.name == "conv_general_dilated":
        output = params["dimension_numbers"].rhs_spec[0] if side else -1
        summed, apart = [d for d in range(rank) if side and d != output], [] if side else list(range(rank))
    else:
        ragged = params.get("ragged_dot_dimension_numbers")
        contracted, batch = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
        groups = [] if ragged is None or side == 0 else [*ragged.rhs_group_dimensions]
        summed, apart = [int(d) for d in contracted[side]], [int(d) for d in (*batch[side], *groups)]
    parts = lambda at: [p for d in at for p in dims[d]]
    return parts(summed), parts([d for d in range(rank) if d not in (*summed, *apart)])


def _is_depthwise(eqn: Any) -> bool:
    """Whether each feature out is of one feature in."""
    return (
        eqn.invars[1].aval.shape[eqn.params["dimension_numbers"].rhs_spec[1]] == 1 < eqn.params["feature_group_count"]
    )


def layer_dims(flat: Leaves, experts: Mapping[str, int]) -> dict[str, int]:
    """The dim of layers of each leaf that is a stack of them, by paths and shapes; `experts` are dims of those."""
    first, second = inside_stack(flat, experts), on_second_dim(flat, experts)
    return {path: 0 if first(path) else 1 for path, _ in flat if first(path) or second(path)}


def _by_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Matrix]:
    """By paths and shapes alone."""
    flat = list(shapes.items())
    experts = looks_stacked(flat)
    layers = layer_dims(flat, experts)
    alike = Counter((_NUMBER.sub("", path), shape) for path, shape in flat)  # blocks of a loop; Haiku's first has none
    blocks = {path for path, shape in flat if alike[_NUMBER.sub("", path), shape] > 1}
    norm, ends = NORM.fullmatch, [pattern("", key).fullmatch for key in ENDS]
    heads = [(pattern("", key).fullmatch, dim) for key, dim in HEADS.items()]
    out: dict[str, Matrix] = {}
    for path, shape in shapes.items():
        batch = {dims[path] for dims in (layers, experts) if path in dims}
        dims = tuple(d for d in range(len(shape)) if d not in batch)
        split = next((dim for end, dim in heads if end(path) and has_heads(path, shapes)), None)
        kernel = len(dims) == 4 and shape[dims[0]] == shape[dims[1]]
        if norm(path) or len(dims) < 2 or _VECTOR.fullmatch(path):
            why = "a norm's, or a vector"
        elif any(end(path) for end in ends):
            why = "by its name, where the model begins or ends"
        elif (blocks or layers) and path not in blocks and not batch:
            why = "beside the layers, where the model begins or ends; give a batch to know"
        elif kernel and shape[dims[2]] == 1:
            why = "depthwise, by its shape"
        elif len(dims) == 3 and split is not None:
            cut = 1 if split == -2 else 2  # [d, heads, head_dim], or [heads, head_dim, d]
            out[path] = Matrix(shape, dims[:cut], dims[cut:], "by its name and shape")
            continue
        elif kernel or len(dims) == 2:
            last = len(dims) - 1 if kernel or not path.endswith("weight") else 0  # Equinox has [out, in]
            out[path] = Matrix(shape, tuple(d for d in dims if d != dims[last]), (dims[last],), "by its shape")
            continue
        else:
            why = f"nothing says which of its {len(dims)} dims are in and out; give a batch to know"
        out[path] = Matrix(shape, why=why)
    return out


def astray(loss: jx.Flat, leaves: Leaves, multiplied: Mapping[str, frozenset[int]], factors: bool) -> str | None:
    """What to say of an optimizer that multiplies what is no matrix; None where all is well.

    Args:
      loss: a program whose first inputs are the `leaves`, by path and shape.
      multiplied: of each leaf that the optimizer sees, by path, along which dims it multiplies.
      factors: whether it keeps factors of them, as Shampoo does, which is meant for embeddings and heads too.
    """
    found, stacks = _by_program(loss, dict(leaves)), layer_dims(leaves, looks_stacked(leaves))
    layers = lambda path: {*found[path].batch, *([stacks[path]] if path in stacks else [])}
    mixed = [path for path, dims in multiplied.items() if not dims.isdisjoint(layers(path))]
    others = [path for path, dims in multiplied.items() if dims and path not in mixed and not found[path].output]
    missed = [path for path, dims in multiplied.items() if not dims and found[path].output]
    if not mixed and (factors or not others):
        return None
    said = {
        "layers of a stack with one another, as if they were rows of a matrix:": mixed,
        "what is no hidden matrix:": others,
        "nothing of": missed,
    }
    wrong = (f"{what} {few([f'{p} {list(found[p].shape)}' for p in paths])}" for what, paths in said.items() if paths)
    return (
        f"the optimizer multiplies {'; '.join(wrong)}. Say which dims are of matrices: optax.contrib.muon(..., "
        "muon_weight_dimension_numbers=jp.matrices(model, batch))"
    )
