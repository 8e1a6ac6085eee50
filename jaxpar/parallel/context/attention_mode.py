"""How the queries of one context rank reach the keys of all ranks, and which mode is chosen.

gather     keys and values are gathered, queries stay        any mask; sends 2 Hkv a position, c times over
ulysses    ranks exchange positions for heads, and back      sends (2 Hq + 2 Hkv) a position; c divides the heads
ring       keys and values move from rank to rank            sends as gather; holds two blocks of keys at a time
usp        ulysses in groups of ranks, a ring of the groups  where a divisor of c divides the heads
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from ...program import jaxpr as jx
from ...program import kernels
from ...program.walk import visit
from .attention.flash import AttentionOptions
from .ops import ring_hops, ulysses_bytes, usp_bytes
from .ops.order import Order

AXIS = "context"
RINGS = ("ring", "usp")  # whose hops all devices of a program must meet in


@dataclass(frozen=True)
class AttentionMode:
    """How attention over a split sequence is computed, and why so."""

    name: Literal["gather", "ulysses", "ring", "usp"]
    why: str
    group: int = 1  # of usp: how many ranks next to each other share the heads
    order: Order = "plain"  # zigzag balances causal work on a ring

    def sharing(self, ranks: int) -> int:
        """How many of so many ranks share the heads of a position."""
        return ranks if self.name == "ulysses" else self.group

    def parts(self, ranks: int) -> int:
        """The number of chunks that so many ranks have of a sequence."""
        return ranks * (2 if self.order == "zigzag" else 1)


GATHER = AttentionMode("gather", "it was asked for")


@dataclass(frozen=True)
class Call:
    """One `jp.attention` of a program: its options, the shapes of query and key, and its line."""

    options: AttentionOptions
    query: tuple[int, ...]
    key: tuple[int, ...]
    line: str
    itemsize: int  # bytes an element

    @property
    def hinders(self) -> str:
        """Why it is by gather whatever was asked for; empty where it need not be."""
        return "has a mask" if self.options.masked else ""


def options_of(eqn: Any) -> AttentionOptions | None:
    """Those of an equation that is a `jp.attention`."""
    kernel = kernels.of(eqn)
    found = getattr(kernel.fun, "args", ()) if kernel is not None else ()
    return found[0] if found and isinstance(found[0], AttentionOptions) else None


def calls(eqns: Sequence[Any]) -> Iterator[Call]:
    """Every `jp.attention` of a program."""
    for eqn, _ in visit(eqns, lambda eqn: options_of(eqn) is None):
        if (options := options_of(eqn)) is not None:
            query, key = (v.aval.shape for v in eqn.invars[:2])
            yield Call(options, query, key, jx.where(eqn), eqn.invars[0].aval.dtype.itemsize)


def choose(
    asked: str,
    eqns: Sequence[Any],
    ranks: int,
    tensor: int,
    schedule: str = "",
    not_taken: Mapping[str, str] = MappingProxyType({}),
) -> AttentionMode:
    """The attention mode of a program on `ranks` context ranks, where `tensor` ranks share the heads.

    `not_taken` has, by line, attention that the program spells out in a way that `attention/` does not take, and why.

    `schedule` is that of a pipeline whose ranks run different operations at one time: no ring there, since XLA lets all
    devices of a program meet in a collective-permute, whichever of them exchange something.

    Raises ValueError where the mode that was asked for cannot be.
    """
    found = list(calls(eqns))
    free = [call for call in found if not call.hinders]
    if asked == "gather":
        return GATHER
    if not free:
        why = "the loss calls no jp.attention and spells none out"
        if others := {call.line: call.hinders for call in found} | dict(not_taken):
            line = next(iter(others))
            why = f"that of {line} {others[line]}"
        if asked != "auto":
            raise ValueError(
                f"attention={asked!r} is for attention by a softmax of scores, and {why}; use causal=, window= and "
                "segment_ids= of jp.attention, or attention='gather'"
            )
        return AttentionMode("gather", why)
    divided = all(n % tensor == 0 for call in free for n in (call.query[2], call.key[2]))
    tensor = tensor if divided else 1  # else each tensor rank computes all heads
    heads = [(call.query[2] // tensor, call.key[2] // tensor) for call in free]
    odd = [pair for pair in heads if pair[0] % ranks]
    shared = f" of a tensor rank (tensor={tensor})" if tensor > 1 else ""
    scored = [call for call in free if call.options.function is not None]
    mixed = next((call.line for call in scored if not call.options.function.by_heads), "")
    if asked in ("ulysses", "usp") and mixed:
        raise ValueError(
            f"attention={asked!r} has some of the heads on each rank, and what {mixed} makes of scores mixes heads, or "
            "merges them with other dims; use attention='ring'"
        )
    if asked == "ulysses" and odd:
        raise ValueError(
            f"attention='ulysses' gives each of context={ranks} ranks whole heads, and does not divide {odd[0][0]} "
            f"query heads{shared}; use attention='ring', or a context= that divides them"
        )
    uneven = [(q, k) for q, k in heads if scored and k % ranks and ranks % k]
    if asked == "ulysses" and uneven:
        raise ValueError(
            f"attention='ulysses' of scores that {scored[0].line} makes others of: {uneven[0][1]} key "
            f"heads{shared} must divide context={ranks}, or be divided by it; use attention='ring'"
        )
    if asked in RINGS and schedule:
        raise ValueError(
            f"attention={asked!r} with schedule={schedule!r}, whose ranks are not in one layer at one time: a hop of "
            "the ring needs all devices; use attention='gather' or 'ulysses', or schedule='1f1b'"
        )
    group = math.gcd(ranks, *itertools.chain(*heads))
    if asked == "usp" and group == 1:
        raise ValueError(
            f"attention='usp' shares heads among some of context={ranks} ranks, and no divisor of it divides "
            f"{heads[0][0]} query and {heads[0][1]} key heads{shared}; use attention='ring'"
        )
    order = "zigzag" if any(_triangular(call, ranks) for call in free) else "plain"
    ring = AttentionMode("ring", "it was asked for", 1, order)
    usp = replace(ring, name="usp", group=group)
    ulysses = AttentionMode("ulysses", ring.why)
    if asked == "usp" and group < ranks:
        return replace(usp, why=f"{usp.why}, in groups of {group} ranks")
    if asked in ("ulysses", "ring"):
        return ulysses if asked == "ulysses" else ring
    # A rank that has all keys computes hidden ones as well, where their scores are others.
    halved = next((call.line for call in scored if call.options.causal), "")
    by_heads = not (odd or uneven or mixed)
    q, k = (odd or uneven or heads)[0]
    divides = f"divides {q} query heads" if by_heads else f"does not divide {q} query and {k} key heads"
    divides = f"context={ranks} {divides}{shared}"
    if schedule:
        why = f"ranks of schedule={schedule} are not in one layer at one time, as a ring needs"
        return replace(ulysses, why=divides) if by_heads else AttentionMode("gather", why)
    if mixed:
        return replace(ring, why=f"what {mixed} makes of scores is of all heads")
    if halved:
        return replace(
            ring, why=f"of the causal scores that {halved} makes others of, it leaves out those of hidden keys"
        )
    can = [ulysses] * by_heads + [usp] * (1 < group < ranks) + [ring]
    sent = {mode: sum(_sent(call, mode, ranks, tensor) for call in free) for mode in can}
    least, *others = sorted(can, key=lambda mode: sent[mode])
    more = ", ".join(f"{mode.name} {sent[mode] / sent[least]:.2f} times as much" for mode in others if sent[least])
    return replace(least, why=f"{divides}{f', and it sends least ({more})' if more else ''}")


def _triangular(call: Call, ranks: int) -> bool:
    """Whether later positions see more keys than earlier ones, those of every rank before them."""
    return call.options.causal and _hops(call, ranks, 1) == ranks - 1


def _sent(call: Call, mode: AttentionMode, ranks: int, tensor: int) -> int:
    """Bytes that a call sends, forwards and backwards."""
    (b, t, hq, d), (_, s, hkv, _), e = call.query, call.key, call.itemsize
    hq, hkv = hq // tensor, hkv // tensor
    if mode.name == "ulysses":
        return sum(ulysses_bytes(b, s, hq, hkv, d, ranks, e))
    hops = _hops(call, ranks, mode.group) if mode.order == "plain" else None
    return sum(usp_bytes(b, s, hq, hkv, d, ranks, mode.group, e, t, hops))


def _hops(call: Call, ranks: int, group: int) -> int:
    """Of its keys, in plain order, round a ring of groups."""
    return ring_hops(-(-call.query[1] * group // ranks), ranks // group, call.options.window)
