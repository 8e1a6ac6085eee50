"""Choose how the queries of one context rank reach the keys of all ranks.

The modes, for c ranks, with Hq query heads and Hkv key heads:

    gather     keys and values are gathered, queries stay        any mask; 2 Hkv heads a position go to all other ranks
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
RINGS = ("ring", "usp")  # modes with hops, which all devices of a program must take at the same time


@dataclass(frozen=True)
class AttentionMode:
    """A way to compute attention over a split sequence.

    Attributes:
      name: the mode.
      why: the reason for it, for reports.
      group: for usp, the number of neighbouring ranks that share the heads; 1 for other modes (see `sharing`).
      order: the order in which ranks hold chunks; zigzag balances causal work on a ring.
    """

    name: Literal["gather", "ulysses", "ring", "usp"]
    why: str
    group: int = 1
    order: Order = "plain"

    def sharing(self, ranks: int) -> int:
        """Return how many of `ranks` ranks share the heads of a position."""
        return ranks if self.name == "ulysses" else self.group

    def parts(self, ranks: int) -> int:
        """Return the number of chunks that `ranks` ranks hold of a sequence."""
        return ranks * (2 if self.order == "zigzag" else 1)


GATHER = AttentionMode("gather", "it was asked for")


@dataclass(frozen=True)
class Call:
    """A call of `jp.attention` in a program.

    Attributes:
      options: its options.
      query: the shape of its queries [B, T, Hq, D].
      key: the shape of its keys [B, S, Hkv, D].
      line: its place in the user's code.
      itemsize: the bytes of one element.
    """

    options: AttentionOptions
    query: tuple[int, ...]
    key: tuple[int, ...]
    line: str
    itemsize: int

    @property
    def needs_gather(self) -> str:
        """Why the call must be by gather, whatever the user asked for; "" if any mode can compute it."""
        return "has a mask" if self.options.masked else ""


@dataclass(frozen=True)
class _Heads:
    """How the heads of a program's calls fit `ranks` context ranks.

    Attributes:
      ranks: the number of context ranks.
      tensor: the number of tensor ranks that share the heads; 1 if each of them computes all heads.
      counts: for each call, the query and key heads of a tensor rank.
      scored: the calls with a function of scores.
      mixing_line: the line of a function of scores that mixes heads; "" if none does.
    """

    ranks: int
    tensor: int
    counts: list[tuple[int, int]]
    scored: list[Call]
    mixing_line: str

    @classmethod
    def of(cls, calls: Sequence[Call], ranks: int, tensor: int) -> "_Heads":
        """Count the heads of some calls. If `tensor` does not divide them, each tensor rank computes all heads."""
        is_divided = all(n % tensor == 0 for call in calls for n in (call.query[2], call.key[2]))
        tensor = tensor if is_divided else 1
        counts = [(call.query[2] // tensor, call.key[2] // tensor) for call in calls]
        scored = [call for call in calls if call.options.function is not None]
        mixing_line = next((call.line for call in scored if not call.options.function.by_heads), "")
        return cls(ranks, tensor, counts, scored, mixing_line)

    @property
    def undivided(self) -> list[tuple[int, int]]:
        """The head counts whose query heads the ranks do not divide."""
        return [pair for pair in self.counts if pair[0] % self.ranks]

    @property
    def uneven(self) -> list[tuple[int, int]]:
        """The head counts, with a function of scores, where neither key heads nor ranks divide the other."""
        return [(q, k) for q, k in self.counts if self.scored and k % self.ranks and self.ranks % k]

    @property
    def group(self) -> int:
        """The largest number of ranks that can share the heads of all calls."""
        return math.gcd(self.ranks, *itertools.chain(*self.counts))

    @property
    def owner_text(self) -> str:
        """A text that names the tensor rank that has the heads; "" without tensor ranks."""
        return f" of a tensor rank (tensor={self.tensor})" if self.tensor > 1 else ""


def options_of(eqn: Any) -> AttentionOptions | None:
    """Return the options of an equation that is a `jp.attention`; None for any other equation."""
    kernel = kernels.of(eqn)
    # `jp.attention` binds its options to the kernel by `functools.partial`.
    bound_args = getattr(kernel.fun, "args", ()) if kernel is not None else ()
    return bound_args[0] if bound_args and isinstance(bound_args[0], AttentionOptions) else None


def calls(eqns: Sequence[Any]) -> Iterator[Call]:
    """Yield every `jp.attention` of a program."""
    for eqn, _ in visit(eqns, lambda eqn: options_of(eqn) is None):
        if (options := options_of(eqn)) is not None:
            query, key = (v.aval.shape for v in eqn.invars[:2])
            yield Call(options, query, key, jx.where(eqn), eqn.invars[0].aval.dtype.itemsize)


def choose(
    requested: str,
    eqns: Sequence[Any],
    ranks: int,
    tensor: int,
    schedule: str = "",
    not_taken: Mapping[str, str] = MappingProxyType({}),
) -> AttentionMode:
    """Choose the attention mode of a program on `ranks` context ranks.

    Args:
      requested: the mode that the user asked for, or "auto" for the one that sends the fewest bytes.
      eqns: the program.
      tensor: the number of tensor ranks that share the heads.
      schedule: the schedule of a pipeline whose ranks run different operations at the same time, "" for any other. It
        rules out a ring, since XLA makes all devices of a program meet in a collective-permute.
      not_taken: by line, why `attention/` cannot use attention that the program spells out.

    Raises:
      ValueError: if the mode that the user asked for is impossible.
    """
    all_calls = list(calls(eqns))
    free_calls = [call for call in all_calls if not call.needs_gather]
    if requested == "gather":
        return GATHER
    # 1. Without a call that other modes can compute, only gather is possible.
    if not free_calls:
        why = "the loss calls no jp.attention and spells none out"
        # The reason names the first call.
        if obstacles := {call.line: call.needs_gather for call in all_calls} | dict(not_taken):
            line = next(iter(obstacles))
            why = f"the attention at {line} {obstacles[line]}"
        if requested != "auto":
            raise ValueError(
                f"attention={requested!r} needs attention by a softmax of scores, and {why}; use causal=, window= and "
                "segment_ids= of jp.attention, or attention='gather'"
            )
        return AttentionMode("gather", why)

    # 2. Check the mode that the user asked for, and take it.
    heads = _Heads.of(free_calls, ranks, tensor)
    _check(requested, heads, schedule)
    # In plain order, the last rank of a causal ring would compute most blocks, and the first rank one.
    order = "zigzag" if any(_is_triangular(call, ranks) for call in free_calls) else "plain"
    ring = AttentionMode("ring", "it was asked for", 1, order)
    usp = replace(ring, name="usp", group=heads.group)
    ulysses = AttentionMode("ulysses", ring.why)
    if requested == "usp" and heads.group < ranks:
        return replace(usp, why=f"{usp.why}, in groups of {heads.group} ranks")
    if requested == "usp":
        return replace(ulysses, why=f"{usp.why} as usp, whose only group has all ranks")
    if requested in ("ulysses", "ring"):
        return ulysses if requested == "ulysses" else ring

    # 3. Choose for "auto".
    return _choose_cheapest(free_calls, heads, schedule, (ulysses, usp, ring))


def _check(requested: str, heads: _Heads, schedule: str) -> None:
    """Raise ValueError if the mode that the user asked for is impossible with these heads and this schedule."""
    ranks = heads.ranks
    # 1. Some heads on each rank: they must be independent of the others, and whole.
    if requested in ("ulysses", "usp") and heads.mixing_line:
        raise ValueError(
            f"attention={requested!r} has some of the heads on each rank, and the function of scores at "
            f"{heads.mixing_line} mixes heads, or merges them with other dims; use attention='ring'"
        )
    if requested == "ulysses" and heads.undivided:
        raise ValueError(
            f"attention='ulysses' gives each of context={ranks} ranks whole heads, and does not divide "
            f"{heads.undivided[0][0]} query heads{heads.owner_text}; use attention='ring', or a context= that divides "
            "them"
        )
    if requested == "ulysses" and heads.uneven:
        raise ValueError(
            f"attention='ulysses' with the function of scores at {heads.scored[0].line}: its {heads.uneven[0][1]} key "
            f"heads{heads.owner_text} must divide context={ranks}, or be divided by it; use attention='ring'"
        )
    # 2. Hops of a ring: all devices take each at the same time.
    if requested in RINGS and schedule:
        raise ValueError(
            f"attention={requested!r} with schedule={schedule!r}, whose ranks are not in one layer at one time: all "
            "devices must take a hop of the ring together; use attention='gather' or 'ulysses', or schedule='1f1b'"
        )
    # 3. Groups of ranks that share heads: there must be a group of more than one.
    if requested == "usp" and heads.group == 1:
        raise ValueError(
            f"attention='usp' shares heads among some of context={ranks} ranks, and no divisor of it divides "
            f"{heads.counts[0][0]} query and {heads.counts[0][1]} key heads{heads.owner_text}; use attention='ring'"
        )


def _choose_cheapest(
    calls: Sequence[Call], heads: _Heads, schedule: str, modes: tuple[AttentionMode, AttentionMode, AttentionMode]
) -> AttentionMode:
    """Choose the mode that sends the fewest bytes among those that are possible; `modes` are ulysses, usp and ring."""
    ulysses, usp, ring = modes
    ranks = heads.ranks
    # Ulysses gives each rank whole heads.
    divides_heads = not (heads.undivided or heads.uneven or heads.mixing_line)
    q, k = (heads.undivided or heads.uneven or heads.counts)[0]
    verb = f"divides {q} query heads" if divides_heads else f"does not divide {q} query and {k} key heads"
    division_text = f"context={ranks} {verb}{heads.owner_text}"

    # 1. Cases that leave no choice.
    if schedule:
        why = f"ranks of schedule={schedule} are not in one layer at one time, as a ring needs"
        return replace(ulysses, why=division_text) if divides_heads else AttentionMode("gather", why)
    if heads.mixing_line:
        return replace(ring, why=f"the function of scores at {heads.mixing_line} mixes heads")
    # With a function of scores, a rank that has all keys would compute hidden ones as well.
    if causal_line := next((call.line for call in heads.scored if call.options.causal), ""):
        return replace(ring, why=f"it skips hidden keys in the causal function of scores at {causal_line}")

    # 2. Compare what the possible modes send.
    candidates = [ulysses] * divides_heads + [usp] * (1 < heads.group < ranks) + [ring]
    sent = {mode: sum(_bytes_sent(call, mode, ranks, heads.tensor) for call in calls) for mode in candidates}
    # `sorted` is stable: of equal costs, the first candidate wins.
    cheapest, *dearer = sorted(candidates, key=lambda mode: sent[mode])
    ratios = ", ".join(
        f"{mode.name} {sent[mode] / sent[cheapest]:.2f} times as much" for mode in dearer if sent[cheapest]
    )
    return replace(cheapest, why=f"{division_text}{f', and it sends least ({ratios})' if ratios else ''}")


def _is_triangular(call: Call, ranks: int) -> bool:
    """Return whether a call is causal, and the queries of the last rank see the keys of all ranks."""
    return call.options.causal and _hops(call, ranks, 1) == ranks - 1


def _bytes_sent(call: Call, mode: AttentionMode, ranks: int, tensor: int) -> int:
    """Return the bytes that a call sends, forwards and backwards."""
    queries, keys = ((b, n, heads // tensor, d) for b, n, heads, d in (call.query, call.key))
    if mode.name == "ulysses":
        return sum(ulysses_bytes(queries, keys, ranks, call.itemsize))
    # In zigzag order a window saves no hops (`Rounds.of`).
    hops = _hops(call, ranks, mode.group) if mode.order == "plain" else None
    return sum(usp_bytes(queries, keys, ranks, mode.group, call.itemsize, hops))


def _hops(call: Call, ranks: int, group: int) -> int:
    """Return how often a call's keys are passed on, in plain order, round a ring of groups."""
    return ring_hops(-(-call.query[1] * group // ranks), ranks // group, call.options.window)
