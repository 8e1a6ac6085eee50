"""Choose the dim of each parameter that is split over the mesh axis `tensor`.

    column-parallel   kernel [in, out] split by out   query, key, value (whole heads), gate, up, head; their biases
    row-parallel      kernel [in, out] split by in    out, down; their biases are whole
    by vocabulary     embedding [V, D] split by V

The first of these sources that names a leaf decides:

    1. the user's `rules`
    2. the model's own table of rules
    3. Flax's annotations, if the model has any that name this axis
    4. `PRESETS`, if the model has neither a table nor annotations
    5. the kernel, for a bias that no other source names

Where presets know no layer of the model and rules split nothing, `pairs.py` finds products that follow one another:
convolutions, dense layers of any name. A vocabulary that the ranks do not divide stays whole, unless `rules` name it.

A rule is `{path: dim}` or `{name: "tensor"}`. The path is a regular expression for whole components at the end of a
leaf's path. A negative dim counts from the end, so that it holds for a layer and for a stack of layers [L, ...]; None
leaves the leaf whole. The second form, or `{name: None}`, applies to all dims to which annotations give that name.

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3. Plain JAX version: `experiments/naive/tensor.py`.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...backend.text import did_you_mean
from ...layout.leaves import PAD_FROM
from ...strategy.constraints import is_int
from .pairs import pair_dims
from .patterns import pattern

# Kernels are [in, out], or stacked: -1 is column-parallel, -2 row-parallel. The first rule that matches decides.
PRESETS: dict[str, int | None] = {
    # Attention: jaxpar; Llama, Qwen, Gemma and related models in Hugging Face; T5; Llama of Meta; GPT-2; Diffusers.
    "(query|key|value|(query|key|value|[qkv])_proj|[qkv]|w[qkv]|to_[qkv])/(kernel|w)": -1,
    "(out|o_proj|out_proj|output_proj|o|wo|to_out|to_out_0|(attn|attention)/c_proj)/(kernel|w)": -2,
    # Feed-forward: jaxpar; Hugging Face; GPT-2; OPT and ViT; GPT-J; T5; Meta; BERT; Flax's examples.
    "(gate|up|gate_proj|up_proj|c_fc|fc1|fc_in|wi|wi_[01]|w1|w3|intermediate/dense)/(kernel|w)": -1,
    "(down|down_proj|mlp/c_proj|fc2|fc_out|w2|output/dense)/(kernel|w)": -2,
    "MlpBlock_[0-9]+/Dense_0/kernel": -1,
    "MlpBlock_[0-9]+/Dense_1/kernel": -2,
    # Gemma of Flax's examples, with heads N: [N, D, h], [2, N, D, h], [3, N, D, h] and [N, h, D].
    "(q|kv|qkv|attn_vec)_einsum/w": -3,
}
# The first and last layers of a model. That a path matches here does not mean that presets know its other layers.
ENDS: dict[str, int | None] = {
    "(head|lm_head)/(kernel|w)": -1,
    "(wpe|[^/]*(pos|type)[^/]*)/embedding": None,
    "embedding|input_embedding": -2,
}

# Attention with a separate dim of heads, [D, H, h] and [H, h, D]: `MultiHeadAttention` of Flax NNX,
# `MultiHeadDotProductAttention` of Linen, Tunix's models.
HEADS: dict[str, int | None] = {
    "(query|key|value|[qkv]_proj|[qkv]|w[qkv])/(kernel|w)": -2,
    "(out|o_proj|out_proj|o|wo)/(kernel|w)": -3,
}
PAIRS = (("query", "out"), ("q_proj", "o_proj"), ("q_proj", "out_proj"), ("q", "o"), ("wq", "wo"))

# Kernels that hold two or three projections side by side. A slice of the columns would mix them.
FUSED = re.compile(
    "(.*/)?(c_attn|[Ww]?qkv|to_qkv|qkv_proj|query_key_value|in_proj|to_kv|kv_proj|gate_up_proj)/(kernel|w)"
)

# Names that annotations give to dims. The logical names come from `standard_logical_axis_rules` of T5X and
# `logical_axis_rules` of MaxText. Neither splits "embed", "kv" (the features of one head) or "layers" over this axis.
# The mesh axes: "tensor" of jaxpar and MaxText, "tp" of Tunix, "model" of T5X and the Flax documentation, "mp" of
# EasyLM.
DIMS: dict[str, str | None] = dict.fromkeys(
    ("vocab", "mlp", "mlp_no_fsdp", "heads", "q_heads", "kv_heads", "joined_kv", "tensor", "tp", "model", "mp"),
    "tensor",
)
# Tunix annotates the scale of a norm with the axis, although a norm works on the residual stream, which is whole.
NORM = re.compile(r"(.*/)?[^/]*norm[^/]*/[^/]+", re.IGNORECASE)


# A mapping as a value gives the dim for each axis, for leaves that `expert` splits as well.
Rules = Mapping[str, int | str | Mapping[str, int | None] | None]
Leaves = Sequence[tuple[str, tuple[int, ...]]]
_Shapes = Mapping[str, tuple[int, ...]]


class Dims(dict[str, int]):
    """The dim over `tensor` of every split leaf, by path.

    Attributes:
      found: the paths that no rule names, and that `pairs.py` found.
    """

    found: frozenset[str] = frozenset()


def tensor_dims(
    leaves: Leaves,
    size: int,
    rules: Rules | None = None,
    model_rules: Rules | None = None,
    names: Mapping[str, tuple[Any, ...]] | None = None,
    order: Callable[[], Sequence[str]] | None = None,
) -> Dims:
    """Return the dim over `tensor` of every leaf that is split, by path, counted from the start.

    Args:
      leaves: path and shape of the model's own leaves, such as ("layers/ffn/up/kernel", (4, 128, 384)).
      size: the number of devices on `tensor`. Rules are checked even if it is 1.
      rules: the user's rules (see above). Each must match a leaf. Leaves that they do not name are decided by the other
        sources.
      model_rules: the model's table. It must be complete: with a table, even an empty one, no preset applies.
      names: by path, one name, None or tuple of names for each dim; fewer if the last dims have none.
      order: returns the paths in the order in which the model creates its leaves (`pairs.creation_order`); None for the
        order of `leaves`. It is called only if needed.

    Raises:
      ValueError: for a malformed rule, a rule that matches no leaf, rules that disagree on a leaf, a dim that the leaf
        does not have or that `size` does not divide; also if rules, a table or annotations are given, but split
        nothing.

    Warns:
      UserWarning: if none of these is given and no leaf is found to split, so that every rank computes the same.
    """
    shapes = dict(leaves)
    # 1. Separate rules for paths from rules for names of dims.
    axes = {path: entry for path, entry in (names or {}).items() if path in shapes}
    dim_names = {name for entry in axes.values() for name in names_in(entry)}
    paths, user_names = _kinds("rules", rules, dim_names)
    model_paths, model_names = _kinds("the model's rules", model_rules, dim_names)
    table = {**DIMS, **model_names, **user_names}
    annotated = {path: _annotated(path, shapes[path], entry, table, user_names) for path, entry in axes.items()}

    # 2. Ask each source, in order of precedence; `source | chosen` keeps the earlier choices.
    chosen = _claims("rules", paths, shapes, dim_names)
    chosen = {path: dim for path, dim in annotated.items() if user_names.keys() & {*names_in(axes[path])}} | chosen
    chosen_by_user = frozenset(chosen)
    chosen = _claims("the model's rules", model_paths, shapes) | chosen
    seeks_pairs = False
    if dim_names & table.keys():
        chosen = annotated | chosen
    elif model_rules is None:
        seeks_pairs = all(dim is None for dim in chosen.values())
        chosen = _presets(shapes) | chosen

    # 3. Leave vocabularies whole that the ranks do not divide; any other such dim is an error.
    for path, rule_dim in chosen.items():
        if rule_dim is not None and shapes[path][rule_dim] % size and path not in chosen_by_user:
            is_vocabulary = "vocab" in names_in(axes.get(path, ())[rule_dim : rule_dim + 1]) or _is_end(path)
            chosen[path] = None if is_vocabulary else rule_dim
    _check_division(chosen, shapes, size)

    # 4. Add biases, and pairs of products in models that no preset knows.
    chosen = _biases(shapes, chosen) | chosen
    pairs = _pairs(shapes, size, chosen, order) if seeks_pairs and size > 1 else {}
    pairs = _biases(shapes, pairs) | pairs
    dims = Dims((path, dim) for path in shapes if (dim := chosen.get(path, pairs.get(path))) is not None)
    dims.found = frozenset(pairs.keys() - chosen.keys())
    if size > 1 and not dims:
        if rules or model_rules is not None or dim_names & table.keys():
            raise ValueError(_nothing_split(shapes, size))
        warnings.warn(
            f"{_nothing_split(shapes, size)} Until then each of the {size} ranks holds and computes all of it",
            stacklevel=2,
        )
    return dims


def undivided_leaves(leaves: Leaves, dims: Mapping[str, int], size: int) -> dict[str, str]:
    """Return, by path, why each of `size` tensor ranks stores a leaf of 16,384 elements or more whole."""
    presets = _presets(dict(leaves))
    reasons: dict[str, str] = {}
    for path, shape in leaves:
        if path in dims or math.prod(shape) < PAD_FROM:
            continue
        dim, why = presets.get(path), "no rule splits it"
        if FUSED.fullmatch(path):
            why = f"{why}; {_fused(path)}"
        elif dim is not None and shape[dim] % size and _is_end(path):
            padded = -(-shape[dim] // size) * size
            why = f"tensor={size} does not divide the {shape[dim]} on dim {dim}; pad them to {padded} to split it"
        reasons[path] = f"whole on every tensor rank: {why}"
    return reasons


def _is_end(path: str) -> bool:
    """Return whether a leaf belongs to the first or last layer of a model, which is split by vocabulary."""
    return any(pattern("", key).fullmatch(path) for key in ENDS)


def _kinds(source: str, rules: Any, dim_names: set[str]) -> tuple[dict[str, int | None], dict[str, str | None]]:
    """Check rules from `source`, and separate those for paths from those for `dim_names`, the names in annotations."""
    if rules is not None and not isinstance(rules, Mapping):
        raise ValueError(f"{source}: {rules!r} is a {type(rules).__name__}; use a dict such as {{'ffn/up/kernel': -1}}")
    paths: dict[str, int | None] = {}
    names: dict[str, str | None] = {}
    for key, value in (rules or {}).items():
        if not isinstance(key, str):
            raise ValueError(f"{source}: {key!r} is a {type(key).__name__}; use the end of a path: 'ffn/up/kernel'")
        if value == "tensor" and key not in dim_names:
            model = f"the model's are {', '.join(sorted(dim_names))}" if dim_names else "the model is not annotated"
            raise ValueError(
                f"{source}: {key!r}: 'tensor' is for a name of dims, and {model}; for a path give the dim: "
                "{'ffn/up/kernel': -1}"
            )
        if value == "tensor" or (value is None and key in dim_names):
            names[key] = value
        elif value is None or is_int(value):
            paths[key] = value
        else:
            raise ValueError(
                f"{source}: {key!r}: {value!r} is no dim; use an int (-1 is the last), None to leave the leaf whole, "
                "or 'tensor' where the key is a name of dims"
            )
    return paths, names


def names_in(entry: Any) -> Iterator[str]:
    """Yield the names in the annotation of a leaf, or of one dim."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, tuple):
        for part in entry:
            yield from names_in(part)


def _annotated(path: str, shape: tuple[int, ...], entry: tuple[Any, ...], table: Any, user_names: Any) -> int | None:
    """Return the dim of one leaf that its annotation puts on `tensor`; the user's names come before the table's."""
    if len(entry) > len(shape):
        raise ValueError(f"{path} {list(shape)} is annotated with {entry}; give no more names than it has dims")
    for names in (user_names,) if NORM.fullmatch(path) else (user_names, table):
        dims = [dim for dim, part in enumerate(entry) if any(names.get(name) for name in names_in(part))]
        if len(dims) > 1:
            raise ValueError(
                f"{path} {list(shape)} is annotated with {entry}, which puts its dims {dims} on tensor; choose one: "
                f"rules={{{_end(path)!r}: {dims[0]}}}"
            )
        if dims:
            return dims[0]
    return None


def _claims(
    source: str, rules: Mapping[str, Any], shapes: _Shapes, dim_names: set[str] | None = None
) -> dict[str, Any]:
    """Return the dims that a table of rules, from `source`, gives to the leaves that it names.

    If `dim_names`, the names of dims in annotations, are given, each rule must match a leaf.
    """
    chosen: dict[str, int | None] = {}
    deciding_key: dict[str, str] = {}
    for key, value in rules.items():
        matches = pattern(source, key).fullmatch
        matching_paths = [path for path in shapes if matches(path)]
        if not matching_paths and dim_names is not None:
            raise ValueError(_unmatched(key, shapes, dim_names))
        for path in matching_paths:
            rank = len(shapes[path])
            if value is not None and not -rank <= value < rank:
                raise ValueError(
                    f"{source}: {key!r}: {value} is no dim of {path} {list(shapes[path])}; "
                    + (f"use -{rank} to {rank - 1}, or None" if rank else "it has none, use None")
                )
            dim = None if value is None else value % rank
            # Two rules may name one leaf if they agree.
            if chosen.setdefault(path, dim) != dim:
                raise ValueError(
                    f"{source}: {deciding_key[path]!r}: {rules[deciding_key[path]]} and {key!r}: {value} disagree on "
                    f"{path} {list(shapes[path])}; change one so that it does not match"
                )
            deciding_key.setdefault(path, key)
    return chosen


def _pairs(
    shapes: _Shapes, size: int, chosen: Mapping[str, int | None], order: Callable[[], Sequence[str]] | None
) -> dict[str, int]:
    """Return the dims of leaves that no rule names, in pairs of products that follow one another.

    Where presets know columns and rows of the model's layers, only feed-forwards are paired.
    """
    ends = [pattern("", key) for key in ENDS]
    layers = [path for path in chosen if len(shapes[path]) > 1 and not any(end.fullmatch(path) for end in ends)]
    # Two different dims, counted from the end, are columns and rows.
    knows_layers = len({dim - len(shapes[path]) for path in layers if (dim := chosen[path]) is not None}) > 1
    fused = {path: None for path in shapes if FUSED.fullmatch(path)}
    kernels = [path for path, shape in shapes.items() if len(shape) > 1 and path not in chosen and path not in fused]
    # Finding the order traces the model, so only if there is a kernel to pair.
    paths = order() if kernels and order is not None else list(shapes)
    leaves = [(path, shapes[path]) for path in paths]
    return pair_dims(leaves, size, {**fused, **chosen}, knows_layers) if kernels else {}


def _presets(shapes: _Shapes) -> dict[str, int | None]:
    """Return the dims that `PRESETS`, `ENDS` and `HEADS` give to the leaves."""
    flat, by_heads = ([(pattern("", key), dim) for key, dim in table.items()] for table in (PRESETS | ENDS, HEADS))
    chosen: dict[str, int | None] = {}
    for path, shape in shapes.items():
        above, _, end = path.rpartition("value/")
        if end in ("kernel", "w") and not any(f"{above}{name}/{end}" in shapes for name in ("query", "key")):
            continue  # without query and key it is the value of a state, not of attention
        table = [*by_heads, *flat] if has_heads(path, shapes) else flat
        # The first rule that matches decides.
        for dim in [dim for end, dim in table if end.fullmatch(path)][:1]:
            if dim is None or len(shape) + dim >= 0:
                chosen[path] = None if dim is None else len(shape) + dim
    return chosen


def has_heads(path: str, shapes: _Shapes) -> bool:
    """Return whether the attention around a leaf has query [D, H, h] and out [H, h, D], not stacks of matrices."""
    *above, _, leaf = ["", *path.split("/")]
    for names in PAIRS:
        query, out = (shapes.get("/".join([*above[1:], name, leaf]), ()) for name in names)
        if len(query) == len(out) > 2 and query[-2:] == out[-3:-1] and query[:-3] == out[:-3]:
            return True
    return False


def _biases(shapes: _Shapes, chosen: Mapping[str, int | None]) -> dict[str, int]:
    """Return the dims of biases, which follow from the dims of their kernels."""
    dims = {}
    for path, bias in shapes.items():
        module, slash, leaf = path.rpartition("/")
        kernel_path = f"{module}{slash}{'w' if leaf == 'b' else 'kernel'}"
        dim, kernel = chosen.get(kernel_path), shapes.get(kernel_path, ())
        if leaf not in ("bias", "b") or dim is None:
            continue
        # Behind the dims of the stacks, if there are any, a kernel is [..., *features] and its bias [*features].
        for num_stacks in reversed(range(len(bias))):
            if bias[:num_stacks] == kernel[:num_stacks] and bias[num_stacks:] == kernel[num_stacks - len(bias) :]:
                # A row-parallel kernel is split along a dim that its bias lacks: the bias is whole.
                if (bias_dim := dim - len(kernel) + len(bias)) >= num_stacks:
                    dims[path] = bias_dim
                break
    return dims


def _check_division(chosen: Mapping[str, int | None], shapes: _Shapes, size: int) -> None:
    """Raise ValueError for the first chosen dim that the ranks do not divide."""
    undivided = [(path, dim) for path in shapes if (dim := chosen.get(path)) is not None and shapes[path][dim] % size]
    if undivided:
        (path, dim), shape = undivided[0], shapes[undivided[0][0]]
        smaller_axis = f"use tensor={common}, " if (common := math.gcd(shape[dim], size)) > 1 else ""
        whole_rules = ", ".join(f"{end!r}: None" for end in dict.fromkeys(_end(path) for path, _ in undivided))
        num_split = sum(dim is not None for dim in chosen.values())
        # Leaving leaves whole helps only if some leaf stays split.
        leave_whole = f"leave it whole: rules={{{whole_rules}}}"
        remedy = leave_whole if num_split > len(undivided) else "use data or fsdp instead of tensor"
        raise ValueError(
            f"{path} {list(shape)} has {shape[dim]} on dim {dim}, which tensor={size} does not divide; pad it to "
            f"{-(-shape[dim] // size) * size}, {smaller_axis}or {remedy}"
        )


def _unmatched(key: str, shapes: _Shapes, dim_names: set[str]) -> str:
    """Return the error text for a rule that matches no leaf, with a similar path if there is one."""
    if key in dim_names:
        return f"rules: {key!r} is a name of dims and the end of no path; use rules={{{key!r}: 'tensor'}}"
    ends = dict.fromkeys("/".join(path.split("/")[i:]) for path in shapes for i in range(path.count("/") + 1))
    hint = did_you_mean(key, ends, "{}", least=0.5) or f"the largest leaves are {_largest(shapes)}"
    return f"rules: {key!r} matches the end of no parameter's path; {hint}"


def _nothing_split(shapes: _Shapes, size: int) -> str:
    """Explain why no parameter is split, and name a rule that would split one, if `size` divides any dim."""
    reason = f"tensor={size} splits no parameter, as no rule names one and no product follows another; the largest are "
    reason += f"{_largest(shapes)}."
    # The longest dim of the largest parameter holds features, and no window: of [3, 3, in, out] as of [out, in, 3, 3].
    dims = [(path, dim) for path, shape in shapes.items() for dim in reversed(range(-len(shape), 0))]
    divided = [(path, dim) for path, dim in dims if math.prod(shapes[path]) and shapes[path][dim] % size == 0]
    if not divided:
        return (
            f"{reason} No parameter has a dim that {size} divides: make one a multiple of {size}, or use data or fsdp "
            "instead of tensor."
        )
    path, dim = max(divided, key=lambda leaf_dim: (math.prod(shapes[leaf_dim[0]]), shapes[leaf_dim[0]][leaf_dim[1]]))
    fused = next((f" {path}: {_fused(path)}." for path in shapes if FUSED.fullmatch(path)), "")
    return (
        f"{reason}{fused} Say which dim to split, the output or the input features of a kernel, counted from the last: "
        f"rules={{{_key(path, dim, shapes, size)!r}: {dim}}}"
    )


def _largest(shapes: _Shapes) -> str:
    """Name the three largest leaves."""
    largest_paths = sorted(shapes, key=lambda path: -math.prod(shapes[path]))[:3]
    return ", ".join(f"{path} {list(shapes[path])}" for path in largest_paths)


def _fused(path: str) -> str:
    """Explain why a fused kernel is not split."""
    projections = "gate and up" if "gate" in path else "several projections"
    return f"it holds {projections} side by side, and a part of its columns is no part of each; make them separate"


def _key(path: str, dim: int, shapes: _Shapes, size: int) -> str:
    """Return a rule's key for a leaf whose dim is to be split.

    The key is `_end`, or the whole path if a leaf with the same end cannot be split along this dim.
    """
    matches = pattern("", _end(path)).fullmatch
    matching_shapes = [shape for candidate, shape in shapes.items() if matches(candidate)]
    is_divided = all(len(shape) >= -dim and shape[dim] % size == 0 for shape in matching_shapes)
    return _end(path) if is_divided else f"^{re.escape(path)}"


def _end(path: str) -> str:
    """Return a rule's key for a leaf: the end of its path, which the layers of a Python loop share."""
    parts = path.split("/")[-3:]
    while len(parts) > 1 and parts[0].isdigit():
        parts = parts[1:]
    return re.escape("/".join(parts))
