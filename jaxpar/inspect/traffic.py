"""Bytes that a kernel of a compiled program reads from memory and writes to it.

Every operand is read once and every result written once, with two exceptions, as in XLA's own cost analysis: of an
array of which a kernel takes a slice (a layer of a stack, the rows of an embedding) it reads the slice, and an array
that it updates in place it writes where it changes. Caches are left out: an operand that an earlier kernel
has just written may still be in L2.
"""

import math

from .hlo import Instruction, Module
from .shapes import arrays, bits, nbytes

# What the compiler resolves: no kernel runs.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier domain "
    "add-dependency get-dimension-size".split()
)
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand has the new values


def traffic(module: Module, i: Instruction, shapes: dict[str, str]) -> tuple[int, int]:
    """Bytes (read, written) of one instruction that runs as a kernel; `shapes` as for `products`."""
    if i.opcode == "fusion":
        return _of_fusion(module.computations[i.called[0]])
    if i.opcode in _SLICES:
        return nbytes(i.shape) + sum(nbytes(shapes[operand]) for operand in i.operands[1:]), nbytes(i.shape)
    if i.opcode in _UPDATES:
        changed = nbytes(shapes[i.operands[_UPDATES[i.opcode]]])
        return changed + sum(nbytes(shapes[operand]) for operand in i.operands[1:]), changed
    read = sum(nbytes(shapes[operand]) for operand in i.operands)
    return read, read if i.opcode == "copy-start" else nbytes(i.shape)


def _of_fusion(block: list[Instruction]) -> tuple[int, int]:
    """Of the instructions that one kernel fuses."""
    named = {i.name: i for i in block}
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for i in block:
        for place, operand in enumerate(i.operands):
            users.setdefault(operand, []).append((i, place))

    def read(name: str, width: int) -> float:
        """Bytes that the users of an array of this many bits per element read."""
        total = 0.0
        for user, place in users.get(name, ()):
            if user.opcode in ("bitcast", "reshape", "tuple"):
                total += read(user.name, width)
            elif user.opcode in _SLICES and place == 0:
                total += width / 8 * sum(math.prod(dims) for _, dims in arrays(user.shape))
            elif user.opcode in _UPDATES and place == 0:
                # Added to in place: what changes is read first. A slice is overwritten unread.
                total += nbytes(named[user.operands[2]].shape) if user.opcode == "scatter" else 0
            else:
                return float("inf")
        return total

    def written(i: Instruction) -> int:
        if i.opcode == "tuple":
            return sum(written(named[operand]) for operand in i.operands)
        if i.opcode in ("bitcast", "reshape") and i.operands:
            return written(named[i.operands[0]])
        if i.opcode in _UPDATES:
            return nbytes(named[i.operands[_UPDATES[i.opcode]]].shape)
        return 0 if i.opcode == "parameter" else nbytes(i.shape)

    inputs = [i for i in block if i.opcode == "parameter" and arrays(i.shape)]
    total = sum(min(nbytes(i.shape), read(i.name, bits(arrays(i.shape)[0][0]))) for i in inputs)
    return round(total), sum(written(i) for i in block if i.root)
