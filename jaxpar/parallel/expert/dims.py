"""Expert parallelism, its layout: which dim of which parameter is that of experts, split over the mesh axis `expert`
(GShard: Lepikhin et al. 2020, arXiv:2006.16668, section 3).

The first of these that names a leaf decides: the user's rules, the model's own table, annotations (Flax's logical
names), and, where none of them names any leaf, names and shapes: a router [D, E] that is called so, beside leaves
[E, ..] of more dims. The layout is made before any batch is seen, so that this may be wrong; then more is sent, and the
result is the same, because the program of a rank follows the loss itself (`localiser.py`).

A rule for this axis is `{path: {"expert": dim}}`, which may name "tensor" as well, or `{name: "expert"}` for all dims
to which annotations give that name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..tensor.dims import Rules, names_in
from ..tensor.patterns import pattern

AXIS = "expert"
NAMES = ("expert", "experts", "exp", "num_experts", "expert_dim")  # what others call the dim
_ROUTER = re.compile("(.*/)?[^/]*(router|gating|gate|switch)[^/]*(/[^/]*)?", re.IGNORECASE)
_EXPERTS = re.compile(".*(expert|moe).*", re.IGNORECASE)
_SHARED = re.compile(".*shared.*", re.IGNORECASE)

Leaves = Sequence[tuple[str, tuple[int, ...]]]


def apart(rules: Rules | None) -> tuple[dict[str, int | str | None], Rules | None]:
    """Rules for `expert`, and those for `tensor`. Raises ValueError for a rule that names another axis."""
    if not isinstance(rules, Mapping):
        return {}, rules
    own: dict[str, int | str | None] = {}
    rest: dict[str, Any] = {}
    for key, value in rules.items():
        if isinstance(value, Mapping):
            if unknown := [axis for axis in value if axis not in (AXIS, "tensor")]:
                raise ValueError(
                    f"rules: {key!r}: {unknown[0]!r} is no axis that splits leaves; use 'expert', 'tensor'"
                )
            own.update({key: value[AXIS]} if AXIS in value else {})
            rest.update({key: value["tensor"]} if "tensor" in value else {})
        elif value == AXIS:
            own[key] = AXIS
        else:
            rest[key] = value
    return own, rest if rest or not own else None


def expert_dims(
    leaves: Leaves,
    ranks: int,
    rules: Mapping[str, int | str | None],
    own: Mapping[str, int | str | None],
    names: Mapping[str, tuple[Any, ...]],
) -> dict[str, int]:
    """The dim of experts of every leaf that has one, by path, counted from the start.

    Args:
      leaves: path and shape of the model's own leaves.
      ranks: the number of devices on `expert`.
      rules, own: the user's and the model's table, as `apart` gives them.
      names: by path one name, None or tuple of names for each dim.

    Raises ValueError, naming leaf and numbers, for a rule that matches no leaf, a dim that a leaf does not have or that
    `ranks` does not divide, and where nothing is found.
    """
    shapes = dict(leaves)
    known = {part for entry in names.values() for part in names_in(entry)}
    for key, value in rules.items():
        if value == AXIS and key not in known:
            raise ValueError(
                f"rules: {key!r}: 'expert' is for a name of dims, and the model's are "
                f"{', '.join(sorted(known)) or 'none'}; for a path give the dim: {{{key!r}: {{'expert': -3}}}}"
            )
    chosen = _claimed(rules, shapes, strict=True)
    for path, dim in _claimed(own, shapes).items():
        chosen.setdefault(path, dim)
    meant = {*NAMES, *(key for table in (own, rules) for key, value in table.items() if value == AXIS)}
    for path, entry in names.items():
        at = [d for d, part in enumerate(entry) if meant & {*names_in(part)}]
        # A router's kernel [D, E] has the name too: what each token meets of all experts is whole.
        if path in shapes and len(at) == 1 and len(shapes[path]) > 2 and at[0] <= len(shapes[path]) - 3:
            chosen.setdefault(path, at[0])
    if not chosen:
        chosen = dict(_found(leaves))
    dims = {path: dim for path, dim in chosen.items() if dim is not None}
    if not dims:
        raise ValueError(
            f"expert={ranks} splits no parameter, as no leaf [experts, ...] stands beside a router; "
            f"{_hint(shapes, ranks)}use fsdp or data for expert"
        )
    for path, dim in dims.items():
        if shapes[path][dim] % ranks:
            raise ValueError(
                f"{path} {list(shapes[path])} has {shapes[path][dim]} experts on dim {dim}, which expert={ranks} does "
                f"not divide; use a divisor of {shapes[path][dim]}"
            )
    return dims


def _hint(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> str:
    """What to write where no names say it: rules for leaves [.., E, a, b] beside any [.., a, E], else for the likeliest
    that ranks divide.
    """
    found = {p: d for p, d in _found([*shapes.items()], strict=True, named=False) if not shapes[p][d] % ranks}
    experts = [path for path in shapes if "expert" in path.lower()]
    if not found and experts and all(len(shapes[path]) < 3 for path in experts):
        one = f"{experts[0]} {list(shapes[experts[0]])}"
        return f"{one} is one expert's alone: stack them all in one leaf, by nn.vmap, say, or "
    many = [path for path, shape in shapes.items() if len(shape) > 2 and not shape[-3] % ranks]
    if not found and not many:
        return ""
    likely = "" if found else min(many, key=lambda path: (path not in experts, -len(shapes[path])))
    found = found or {likely: len(shapes[likely]) - 3}
    back = {path: dim - len(shapes[path]) for path, dim in found.items()}
    rules = {}
    for path, dim in back.items():
        parts = path.split("/")
        ends = [re.escape("/".join(parts[n:])) for n in reversed(range(len(parts)))]
        own = lambda key, dim=dim: all(back.get(p) == dim for p in shapes if pattern("", key).fullmatch(p))
        rules[next(filter(own, [*ends, f"^{re.escape(path)}"]))] = {AXIS: dim}
    if likely and likely not in experts:  # any leaf of three dims: the model may well have no experts
        return f"if {likely} {list(shapes[likely])} is of {shapes[likely][-3]} experts, say so: rules={rules}, or "
    return f"say which dim is that of experts: rules={rules}, or "


def looks_stacked(leaves: Leaves) -> dict[str, int]:
    """The dims of experts by shapes alone, in modules that name them so: no layers, though they may look like such.
    Only beside a router [.., a, E]: vectors of L layers, [L, a], are none, nor are their kernels [L, a, b] experts.
    """
    return {path: dim for path, dim in _found(leaves, strict=True) if _EXPERTS.fullmatch(path)}


def _claimed(
    table: Mapping[str, int | str | None], shapes: Mapping[str, tuple[int, ...]], strict: bool = False
) -> dict[str, int | None]:
    chosen: dict[str, int | None] = {}
    for key, dim in table.items():
        if dim == AXIS:
            continue
        matches = pattern("rules", key).fullmatch
        found = [path for path in shapes if matches(path)]
        if strict and not found:
            raise ValueError(
                f"rules: {key!r} matches the end of no parameter's path; the first is {next(iter(shapes))}"
            )
        for path in found:
            n = len(shapes[path])
            if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool) or not -n <= dim < n):
                raise ValueError(f"rules: {key!r}: {path} {list(shapes[path])} has no dim {dim!r}; use {-n} to {n - 1}")
            chosen[path] = None if dim is None else dim % n
    return chosen


def _found(leaves: Leaves, strict: bool = False, named: bool = True) -> Iterator[tuple[str, int]]:
    """Leaves [.., E, a, b] beside a router [.., a, E], in the innermost module that has both, those of more dims, and
    their biases. If not `strict`, the router may be [.., E, a], and may have other features; if not `named`, all may
    have any names.
    """
    seen = set()
    for router, shape in leaves:
        if len(shape) < 2 or not (not named or _ROUTER.fullmatch(router) or _EXPERTS.fullmatch(router)):
            continue
        if strict and shape[-1] == shape[-2]:  # of as many layers as experts
            continue
        parts = router.split("/")
        for n in reversed(range(len(parts))):
            scope = "".join(f"{part}/" for part in parts[:n])
            inside = [(p, s) for p, s in leaves if p.startswith(scope) and p != router and not _SHARED.fullmatch(p)]
            known = not named or bool(_ROUTER.fullmatch(router))
            alike = [
                (path, s)
                for path, s in inside
                if len(s) == len(shape) + 1
                and s[:-3] == shape[:-2]
                and (s[-3] == shape[-1] and shape[-2] in s[-2:] if strict else s[-3] in shape[-2:])
                and (known or _EXPERTS.fullmatch(path))
            ]
            if alike:
                count, depth = alike[0][1][-3], len(shape)
                seen.update((path, len(s) - 3) for path, s in alike if s[-3] == count)
                seen.update(  # a gate beside what it gates, [E, 2, a, b]
                    (path, depth - 2)
                    for path, s in inside
                    if len(s) > depth + 1
                    and s[: depth - 1] == (*shape[:-2], count)
                    and (known or _EXPERTS.fullmatch(path))
                )
                seen.update(
                    (path, len(s) - 2)
                    for path, s in inside
                    if "bias" in path and len(s) == depth and s[-2] == count and s[:-2] == shape[:-2]
                )
                break
    yield from sorted(seen)
