"""The matrix products of a compiled program: matmuls, convolutions and attention, with their sizes and FLOPs.

HLO has them as `dot` and `convolution`, alone or in a fusion (a Triton kernel), and as calls of cuBLAS and cuDNN.
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

                     batch          m                  n               k
        convolution  groups         output positions   output features input features x window
        attention    rows x heads   query positions    key positions   head_dim

    Attributes:
      kind: "matmul", "convolution", "attention" or "attention backward".
      dtype: numpy's name for the dtype of its operands; the wider one if they differ.
      batch, m, n, k: sizes.
      flops: FLOPs without a convolution's padding, and half of `full_flops` under a causal mask (Dao et al. 2023,
        arXiv:2307.08691, section 4.1).
      full_flops: FLOPs by the shapes alone.
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
        """Whether the product is attention with a mask."""
        return self.kind.startswith("attention") and self.flops < self.full_flops


def products(module: Module, instr: Instruction, shapes: dict[str, str]) -> tuple[Product, ...]:
    """Return the products that an instruction computes, or the computation that it fuses.

    `shapes` are those of all instructions of its computation, by name.
    """
    if instr.opcode in ("dot", "scaled-dot"):
        return (_dot(instr, shapes, instr.rest),)
    if instr.opcode == "convolution":
        operands = (shapes[operand] for operand in instr.operands[:2])
        operand, weights, result = (arrays(shape)[0] for shape in (*operands, instr.shape))
        return (_convolution(instr, operand, weights, result),)
    if instr.opcode == "custom-call":
        if instr.target.startswith(_CUBLAS):
            return (_dot(instr, shapes, instr.rest.partition('"dot_dimension_numbers":')[2]),)
        if instr.target.startswith(_CUDNN_CONVOLUTION):
            return (_cudnn_convolution(instr, shapes),)
        if instr.target.startswith(_CUDNN_ATTENTION):
            return (_attention(instr, shapes, "Backward" in instr.target),)
    if instr.opcode == "fusion":
        block = module.computations[instr.called[0]]
        inner_shapes = {inner.name: inner.shape for inner in block}
        return tuple(product for inner in block for product in products(module, inner, inner_shapes))
    return ()


def _dot(instr: Instruction, shapes: dict[str, str], dimension_numbers: str) -> Product:
    """Return the product of a matmul.

    `dimension_numbers` are contracted and batch dims, as HLO (`lhs_contracting_dims={1}`) or cuBLAS
    (`"lhs_contracting_dimensions":["1"]`) prints them.
    """
    (lhs_dtype, lhs), (rhs_dtype, rhs) = (arrays(shapes[operand])[0] for operand in instr.operands[:2])
    dims = {
        # HLO writes the dims as {1}, cuBLAS as ["1"].
        (side, role): [int(dim) for dim in re.findall(r"\d+", match[1])]
        for side in ("lhs", "rhs")
        for role in ("contracting", "batch")
        if (match := re.search(rf'{side}_{role}_dim\w*"?[=:]\s*[{{[]([^}}\]]*)[}}\]]', dimension_numbers))
    }
    batch = math.prod(lhs[dim] for dim in dims.get(("lhs", "batch"), ()))
    k = math.prod(lhs[dim] for dim in dims.get(("lhs", "contracting"), ()))
    # The left operand has batch x m x k elements, the right one batch x k x n.
    m, n = math.prod(lhs) // (batch * k), math.prod(rhs) // (batch * k)
    return _product("matmul", instr, _wider(lhs_dtype, rhs_dtype), (batch, m, n, k), 2 * batch * m * n * k)


def _convolution(instr: Instruction, operand: tuple, weights: tuple, result: tuple) -> Product:
    """Return the product of a convolution; padding and the holes of a dilated operand do not count as FLOPs.

    `operand`, `weights` and `result` are (dtype, dims).
    """
    # Labels name the dims: b and f of the operand are rows and features, i and o of the weights input and output
    # features; digits are spatial dims.
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instr.rest)
    assert labels, instr
    sizes = {
        array: dict(zip(text, dims, strict=True))
        for array, text, dims in zip("owr", labels.groups(), (operand[1], weights[1], result[1]), strict=True)
    }
    groups, row_groups = (int(_attribute(instr, f"{kind}_group_count", "1")) for kind in ("feature", "batch"))
    rank = len(result[1]) - 2
    window = {key: _window(instr, key, rank) for key in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")}
    # Pairs of output position and window position, without and with those that read padding or holes.
    num_valid = num_pairs = 1
    for d in range(rank):
        label = str(d)
        size, stride, dilation = window["size"][d][0], window["stride"][d][0], window["rhs_dilate"][d][0]
        position = np.arange(sizes["r"][label])[:, None] * stride + np.arange(size) * dilation - window["pad"][d][0]
        spacing = window["lhs_dilate"][d][0]
        is_valid = (position >= 0) & (position < sizes["o"][label] * spacing) & (position % spacing == 0)
        num_valid, num_pairs = num_valid * int(is_valid.sum()), num_pairs * position.size
    # Groups of rows (the filter's gradient of a grouped convolution) are already gone from the result's rows.
    out_features = sizes["r"]["f"]
    m, k = math.prod(result[1]) // out_features, math.prod(weights[1]) // sizes["w"]["o"]
    # Each pair multiplies, in each row, every output feature with the input features of its group.
    flops_per_pair = 2 * sizes["r"]["b"] * out_features * sizes["w"]["i"]
    shape = groups * row_groups, m, out_features // (groups * row_groups), k
    dtype = _wider(operand[0], weights[0])
    return _product("convolution", instr, dtype, shape, flops_per_pair * num_valid, flops_per_pair * num_pairs)


def _cudnn_convolution(instr: Instruction, shapes: dict[str, str]) -> Product:
    """Return the product of a call of cuDNN, whose backward calls have the forward's `window` and `dim_labels`."""
    first, second = (arrays(shapes[operand])[0] for operand in instr.operands[:2])
    result = arrays(instr.shape)[0]
    if "BackwardInput" in instr.target:
        return _convolution(instr, result, second, first)
    if "BackwardFilter" in instr.target:
        return _convolution(instr, first, result, second)
    return _convolution(instr, first, second, result)


def _attention(instr: Instruction, shapes: dict[str, str], is_backward: bool) -> Product:
    """Return the product of cuDNN's attention.

    It is two matmuls forward, and five backward, one of them recomputed (arXiv:2307.08691, section 3).
    """
    dtype, query = arrays(shapes[instr.operands[0]])[0]
    value = arrays(shapes[instr.operands[2]])[0][1]
    scores = re.search(r'"intermediate_tensor_shape":\s*{.*?"dimensions":\s*\[([^\]]*)\]', instr.rest)
    assert scores, instr
    rows, heads, queries, keys = (int(size) for size in re.findall(r"\d+", scores[1]))
    head_dim = math.prod(query) // (rows * heads * queries)
    # Key and value have the same dims except the last.
    value_head_dim = head_dim * value[-1] // query[-1]
    flops_per_feature = 2 * rows * heads * queries * keys
    full_flops = flops_per_feature * (3 * head_dim + 2 * value_head_dim if is_backward else head_dim + value_head_dim)
    window = int((re.search(r'"sliding_window_length":\s*(\d+)', instr.rest) or [0, 0])[1]) or queries
    is_causal = re.search(r'"mask_type":\s*"\w*CAUSAL', instr.rest)
    # A query at position q sees min(q + 1, window) keys: about window (2 queries - window) / 2 pairs.
    flops = full_flops * window * (2 * queries - window) // (2 * queries * queries) if is_causal else full_flops
    kind = "attention backward" if is_backward else "attention"
    return _product(kind, instr, dtype, (rows * heads, queries, keys, head_dim), flops, full_flops)


def _product(
    kind: str, instr: Instruction, dtype: str, shape: tuple[int, int, int, int], flops: int, full: int | None = None
) -> Product:
    """Return a product of an HLO dtype; `shape` is (batch, m, n, k), and `full` its FLOPs if they differ."""
    precise = re.search(
        r'operand_precision"?[=:]\s*[{[]"?highest|algorithm"?[=:]\s*"?(alg_)?dot_f32_f32_f32', instr.rest, re.I
    )
    return Product(kind, dtype_of(dtype), *shape, flops, flops if full is None else full, bool(precise))


def _wider(first: str, second: str) -> str:
    """Return the dtype with more bits; dtypes without a number have 8."""
    return max(first, second, key=lambda dtype: int((re.search(r"\d+", dtype) or [8])[0]))


def _attribute(instr: Instruction, name: str, default: str) -> str:
    """Return an attribute of an instruction."""
    match = re.search(rf"\b{name}=(\w+)", instr.rest)
    return match[1] if match else default


def _window(instr: Instruction, key: str, rank: int) -> list[list[int]]:
    """Parse one key of `window={size=3x3 pad=1_1x1_1}`, by dim; without a value, pad is 0 and the others 1."""
    window = re.search(r"\bwindow={([^}]*)}", instr.rest)
    match = re.search(rf"(?<!\w){key}=(\S+)", window[1] if window else "")
    if not match:
        return [[0 if key == "pad" else 1]] * rank
    return [[int(number) for number in re.findall(r"-?\d+", dim)] for dim in match[1].split("x")]
