"""The matrix products of a compiled program: matmuls, convolutions, attention; what each multiplies, and its FLOPs.

They stand in HLO as `dot` and `convolution`, alone or in a fusion (a Triton kernel), and as calls of cuBLAS and cuDNN.
A multiply-add is two FLOPs.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from .hlo import Instruction, Module, arrays, dtype_of

_CUBLAS, _CUDNN_CONVOLUTION, _CUDNN_ATTENTION = "__cublas$", "__cudnn$conv", "__cudnn$fmha"


@dataclass(frozen=True)
class Product:
    """`batch` products of [m, k] and [k, n].

    Attributes:
      kind: "matmul", "convolution", "attention" or "attention backward".
      dtype: of its operands, as numpy names it; the wider one if they differ.
      batch, m, n, k: of a convolution the groups; output positions; output features; input features x window. Of
        attention rows x heads; query positions; key positions; head_dim.
      flops: what is to be computed: half of `full_flops` under a causal mask (Dao et al. 2023, arXiv:2307.08691,
        section 4.1); of a convolution without its padding.
      full_flops: what its shape says.
      precise: float32 without TF32 (`precision="highest"`).
    """

    kind: str
    dtype: str
    batch: int
    m: int
    n: int
    k: int
    flops: int
    full_flops: int
    precise: bool = False

    @property
    def causal(self) -> bool:
        """Whether part of it is masked."""
        return self.kind.startswith("attention") and self.flops < self.full_flops


def products(module: Module, i: Instruction, shapes: dict[str, str]) -> tuple[Product, ...]:
    """The products that one instruction computes, in itself or in the computation that it fuses.

    Args:
      module: where it stands.
      i: the instruction.
      shapes: of all instructions of its computation, by name.
    """
    if i.opcode in ("dot", "scaled-dot"):
        return (_dot(i, shapes, i.rest),)
    if i.opcode == "convolution":
        operand, weights, result = (arrays(shape)[0] for shape in (*(shapes[o] for o in i.operands[:2]), i.shape))
        return (_convolution(i, operand, weights, result),)
    if i.opcode == "custom-call":
        if i.target.startswith(_CUBLAS):
            return (_dot(i, shapes, i.rest.partition('"dot_dimension_numbers":')[2]),)
        if i.target.startswith(_CUDNN_CONVOLUTION):
            return (_cudnn_convolution(i, shapes),)
        if i.target.startswith(_CUDNN_ATTENTION):
            return (_attention(i, shapes, "Backward" in i.target),)
    if i.opcode == "fusion":
        block = module.computations[i.called[0]]
        inner = {j.name: j.shape for j in block}
        return tuple(product for j in block for product in products(module, j, inner))
    return ()


def _dot(i: Instruction, shapes: dict[str, str], numbers: str) -> Product:
    """Of the dims that `numbers` names: `lhs_contracting_dims={1}`, or JSON's `"lhs_contracting_dimensions":["1"]`."""
    (left_dtype, left), (right_dtype, right) = (arrays(shapes[operand])[0] for operand in i.operands[:2])
    dims = {
        (side, what): [int(n) for n in re.findall(r"\d+", found[1])]
        for side in ("lhs", "rhs")
        for what in ("contracting", "batch")
        if (found := re.search(rf'{side}_{what}_dim\w*"?[=:]\s*[{{[]([^}}\]]*)[}}\]]', numbers))
    }
    batch = math.prod(left[d] for d in dims.get(("lhs", "batch"), ()))
    k = math.prod(left[d] for d in dims.get(("lhs", "contracting"), ()))
    m, n = math.prod(left) // (batch * k), math.prod(right) // (batch * k)
    return _product("matmul", i, _wider(left_dtype, right_dtype), (batch, m, n, k), 2 * batch * m * n * k)


def _convolution(i: Instruction, operand: tuple, weights: tuple, result: tuple) -> Product:
    """Of HLO: padding, and the holes of a dilated operand, are not multiplied."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest)
    assert labels, i
    at = {
        side: dict(zip(text, dims, strict=True))
        for side, text, dims in zip("owr", labels.groups(), (operand[1], weights[1], result[1]), strict=True)
    }
    groups, row_groups = (int(_attribute(i, f"{what}_group_count", "1")) for what in ("feature", "batch"))
    rank = len(result[1]) - 2
    window = {key: _window(i, key, rank) for key in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")}
    valid = full = 1
    for d in range(rank):
        place = str(d)
        size, stride, dilate = window["size"][d][0], window["stride"][d][0], window["rhs_dilate"][d][0]
        position = np.arange(at["r"][place])[:, None] * stride + np.arange(size) * dilate - window["pad"][d][0]
        holes = window["lhs_dilate"][d][0]
        inside = (position >= 0) & (position < at["o"][place] * holes) & (position % holes == 0)
        valid, full = valid * int(inside.sum()), full * position.size
    # Groups of rows (the filter's gradient of a grouped convolution) are already gone from the result's rows.
    outs = at["r"]["f"]
    m, k = math.prod(result[1]) // outs, math.prod(weights[1]) // at["w"]["o"]
    pairs = 2 * at["r"]["b"] * outs * at["w"]["i"]
    size = groups * row_groups, m, outs // (groups * row_groups), k
    return _product("convolution", i, _wider(operand[0], weights[0]), size, pairs * valid, pairs * full)


def _cudnn_convolution(i: Instruction, shapes: dict[str, str]) -> Product:
    """cuDNN's calls: `window` and `dim_labels` are those of the forward convolution, in its backward ones as well."""
    first, second = (arrays(shapes[operand])[0] for operand in i.operands[:2])
    result = arrays(i.shape)[0]
    if "BackwardInput" in i.target:
        return _convolution(i, result, second, first)
    if "BackwardFilter" in i.target:
        return _convolution(i, first, result, second)
    return _convolution(i, first, second, result)


def _attention(i: Instruction, shapes: dict[str, str], backward: bool) -> Product:
    """cuDNN's: two products forward, five backward, of which one is computed again (arXiv:2307.08691, section 3)."""
    dtype, query = arrays(shapes[i.operands[0]])[0]
    value = arrays(shapes[i.operands[2]])[0][1]
    scores = re.search(r'"intermediate_tensor_shape":\s*{.*?"dimensions":\s*\[([^\]]*)\]', i.rest)
    assert scores, i
    rows, heads, queries, keys = (int(n) for n in re.findall(r"\d+", scores[1]))
    head = math.prod(query) // (rows * heads * queries)
    # Key and value share their dims, but for the last.
    head_of_values = head * value[-1] // query[-1]
    each = 2 * rows * heads * queries * keys
    full = each * (3 * head + 2 * head_of_values if backward else head + head_of_values)
    window = int((re.search(r'"sliding_window_length":\s*(\d+)', i.rest) or [0, 0])[1]) or queries
    causal = re.search(r'"mask_type":\s*"\w*CAUSAL', i.rest)
    seen = full * window * (2 * queries - window) // (2 * queries * queries) if causal else full
    kind = "attention backward" if backward else "attention"
    return _product(kind, i, dtype, (rows * heads, queries, keys, head), seen, full)


def _product(
    kind: str, i: Instruction, dtype: str, size: tuple[int, int, int, int], flops: int, full: int | None = None
) -> Product:
    precise = re.search(
        r'operand_precision"?[=:]\s*[{[]"?highest|algorithm"?[=:]\s*"?(alg_)?dot_f32_f32_f32', i.rest, re.I
    )
    return Product(kind, dtype_of(dtype), *size, flops, flops if full is None else full, bool(precise))


def _wider(a: str, b: str) -> str:
    return max(a, b, key=lambda dtype: int((re.search(r"\d+", dtype) or [8])[0]))


def _attribute(i: Instruction, name: str, default: str) -> str:
    found = re.search(rf"\b{name}=(\w+)", i.rest)
    return found[1] if found else default


def _window(i: Instruction, key: str, rank: int) -> list[list[int]]:
    """`window={size=3x3 pad=1_1x1_1}` by dim; what is not printed is 1, and padding 0."""
    inside = re.search(r"\bwindow={([^}]*)}", i.rest)
    found = re.search(rf"(?<!\w){key}=(\S+)", inside[1] if inside else "")
    if not found:
        return [[0 if key == "pad" else 1]] * rank
    return [[int(n) for n in re.findall(r"-?\d+", dim)] for dim in found[1].split("x")]
