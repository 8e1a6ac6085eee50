"""Shapes as HLO prints them: "f32[8,3]{1,0}", or a tuple of those in parentheses."""

import math
import re


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(HLO dtype, dims) of each array in a shape; of a dynamic dim its bound.

    >>> arrays("(bf16[8,3]{1,0}, pred[], token[])")
    [('bf16', (8, 3)), ('pred', ())]
    """
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    return [(dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in found if dtype != "token"]


def nbytes(shape: str) -> int:
    """Bytes of all arrays in a shape; those of less than 8 bits are packed.

    >>> nbytes("(bf16[8,3]{1,0}, s4[3])")
    50
    """
    return sum(math.ceil(math.prod(dims) * bits(dtype) / 8) for dtype, dims in arrays(shape))


def bits(dtype: str) -> int:
    """Bits of one element.

    >>> [bits(dtype) for dtype in ("bf16", "f8e4m3fn", "s4", "pred")]
    [16, 8, 4, 8]
    """
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8
