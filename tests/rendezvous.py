"""A proof, from a program compiled for CPU devices, that no two of its collectives can meet out of order.

The runtime starts a kernel as soon as its operands are there, and a collective meets the others of its rendezvous:
those of the same kind, groups and channel. So of any two in one rendezvous one must depend on the other, where each
stands for itself, for the loop that it is in, or for the call.
"""

import functools
import itertools
import re
from collections.abc import Iterator

from jaxpar.hardware.compiled.hlo import Instruction, Module

Rendezvous = tuple[str, str, str]


def unordered(text: str) -> list[str]:
    """Pairs of collectives of a compiled program that may meet in one rendezvous and do not depend on each other."""
    module = Module(text, ())

    def meets(i: Instruction) -> frozenset[Rendezvous]:
        """The rendezvous in which an instruction, or what it runs, takes part."""
        if i.collective:
            return frozenset([(i.collective, *(_attribute(i.rest, name) for name in ("replica_groups", "channel_id")))])
        loops = re.findall(r"\b(?:condition|body)=%?([\w.\-]+)", i.rest) if i.opcode == "while" else ()
        return frozenset().union(*(found for name in (*i.called, *loops, *i.branches) for found in of(name)))

    @functools.cache
    def of(computation: str) -> list[frozenset[Rendezvous]]:
        """Those of each instruction of a computation."""
        return [meets(i) for i in module.computations[computation]]

    return [pair for name, block in module.computations.items() for pair in _pairs(block, of(name))]


def _attribute(rest: str, name: str) -> str:
    """An attribute's value, with the commas inside its braces."""
    found = re.search(rf"\b(?:{name}|source_target_pairs)=(.*?)(?:, \w+=|$)", rest)
    return found[1] if found else ""


def _pairs(block: list[Instruction], meets: list[frozenset[Rendezvous]]) -> Iterator[str]:
    number = {i.name: n for n, i in enumerate(block)}
    needs: list[int] = []  # of each instruction all that it depends on, as bits
    for i in block:
        bits = 0
        for operand in i.operands:
            bits |= needs[number[operand]] | 1 << number[operand]
        needs.append(bits)
    members = [n for n, found in enumerate(meets) if found]
    for a, b in itertools.combinations(members, 2):
        if meets[a] & meets[b] and not (needs[a] >> b & 1 or needs[b] >> a & 1):
            yield f"{block[a].name} | {block[b].name}: {sorted(meets[a] & meets[b])[0]}"
