"""Choose the dim of each parameter that counts experts, and is split over the mesh axis `expert`.

Source: GShard, Lepikhin et al. 2020, arXiv:2006.16668, section 3.

The first of these that names a leaf decides:

    1. the user's rules       {path: {"expert": dim}}, which may name "tensor" too; or {name: "expert"} for all dims to
                              which annotations give that name
    2. the model's own table  of the same form
    3. annotations            Flax's logical names, `NAMES`
    4. names and shapes       if none of the above names any leaf: a leaf called "router", "gate", ... of shape [D, E],
                              and leaves [E, a, b] in the same module

The layout is made before any batch is seen, so that the guess from shapes may be wrong. In that case a step sends more,
but computes the same, because the program of a rank follows the loss itself (`localiser.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..tensor.dims import Rules, names_in
from ..tensor.patterns import pattern

AXIS = "expert"
# Annotations of the dim in Flax, MaxText, T5X and others.
NAMES = ("expert", "experts", "exp", "num_experts", "expert_dim")
# The paths of routers, of experts, and of experts that every token uses, which are not split.
_ROUTER = re.compile("(.*/)?[^/]*(router|gating|gate|switch)[^/]*(/[^/]*)?", re.IGNORECASE)
_EXPERTS = re.compile(".*(expert|moe).*", re.IGNORECASE)
_SHARED = re.compile(".*shared.*", re.IGNORECASE)

Leaves = Sequence[tuple[str, tuple[int, ...]]]


def apart(rules: Rules | None) -> tuple[dict[str, int | str | None], Rules | None]:
    """Divide the user's or the model's rules into rules for `expert` and rules for `tensor`.

    Raises:
      ValueError: a rule names another axis.
    """
    if not isinstance(rules, Mapping):
        return {}, rules
    expert_rules: dict[str, int | str | None] = {}
    tensor_rules: dict[str, Any] = {}
    for key, value in rules.items():
        if isinstance(value, Mapping):
            if other_axes := [axis for axis in value if axis not in (AXIS, "tensor")]:
                raise ValueError(
                    f"rules: {key!r}: {other_axes[0]!r} is no axis that splits leaves; use 'expert' or 'tensor'"
                )
            expert_rules.update({key: value[AXIS]} if AXIS in value else {})
            tensor_rules.update({key: value["tensor"]} if "tensor" in value else {})
        elif value == AXIS:
            expert_rules[key] = AXIS
        else:
            tensor_rules[key] = value
    # Rules for experts alone leave the table of `tensor` empty, which would mean that it splits no leaf. None lets it
    # use its presets.
    return expert_rules, tensor_rules if tensor_rules or not expert_rules else None


def expert_dims(
    leaves: Leaves,
    ranks: int,
    rules: Mapping[str, int | str | None],
    model_rules: Mapping[str, int | str | None],
    names: Mapping[str, tuple[Any, ...]],
) -> dict[str, int]:
    """Return the dim of experts of every leaf that has one, by path, counted from the start.

    Args:
      ranks: the number of devices along `expert`.
      rules: the user's rules for this axis, from `apart`.
      model_rules: the model's own, from `apart`.
      names: for each path one name, None or tuple of names for each dim.

    Raises:
      ValueError: a rule matches no leaf, a dim does not exist or is not divisible by `ranks`, or no leaf has experts.
    """
    # 1. Rules by path: the user's come first.
    shapes = dict(leaves)
    annotated = {part for entry in names.values() for part in names_in(entry)}
    for key, value in rules.items():
        if value == AXIS and key not in annotated:
            raise ValueError(
                f"rules: {key!r}: 'expert' is for a name of dims, and the model's are "
                f"{', '.join(sorted(annotated)) or 'none'}; for a path give the dim: {{{key!r}: {{'expert': -3}}}}"
            )
    dim_by_path = _rule_dims(rules, shapes, strict=True)
    for path, dim in _rule_dims(model_rules, shapes).items():
        dim_by_path.setdefault(path, dim)
    # 2. Annotations, by jaxpar's names for experts and the names that the rules give.
    expert_names = {*NAMES, *(key for table in (model_rules, rules) for key, value in table.items() if value == AXIS)}
    for path, entry in names.items():
        matches = [d for d, part in enumerate(entry) if expert_names & {*names_in(part)}]
        # A router's kernel [D, E] has the name too. It stays whole: every token needs the scores of all experts.
        if path in shapes and len(matches) == 1 and len(shapes[path]) > 2 and matches[0] <= len(shapes[path]) - 3:
            dim_by_path.setdefault(path, matches[0])
    # 3. Names and shapes.
    if not dim_by_path:
        dim_by_path = dict(_expert_leaves(leaves))
    dims = {path: dim for path, dim in dim_by_path.items() if dim is not None}
    if not dims:
        raise ValueError(
            f"expert={ranks} splits no parameter, as no leaf [experts, ...] is in one module with a router; "
            f"{_hint(shapes, ranks)}use fsdp or data instead of expert"
        )
    for path, dim in dims.items():
        if shapes[path][dim] % ranks:
            raise ValueError(
                f"{path} {list(shapes[path])} has {shapes[path][dim]} experts on dim {dim}, which expert={ranks} does "
                f"not divide; use a divisor of {shapes[path][dim]}"
            )
    return dims


def _hint(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> str:
    """Return the advice for a model without recognised experts: the rules to write for them.

    The rules are for leaves [.., E, a, b] near any leaf [.., a, E]. Without such leaves the most likely leaf is
    proposed: one with "expert" in its path, or else the one of the most dims, if `ranks` divides it.
    """
    guessed = {p: d for p, d in _expert_leaves([*shapes.items()], strict=True, named=False) if not shapes[p][d] % ranks}
    # Leaves that are named as experts but have no dim for them: a Python list of modules, each with one expert.
    experts = [path for path in shapes if "expert" in path.lower()]
    if not guessed and experts and all(len(shapes[path]) < 3 for path in experts):
        first = f"{experts[0]} {list(shapes[experts[0]])}"
        return f"{first} holds a single expert: stack all experts in one leaf, by nn.vmap for example, or "
    divisible = [path for path, shape in shapes.items() if len(shape) > 2 and not shape[-3] % ranks]
    if not guessed and not divisible:
        return ""
    likely = "" if guessed else min(divisible, key=lambda path: (path not in experts, -len(shapes[path])))
    guessed = guessed or {likely: len(shapes[likely]) - 3}
    dims_from_end = {path: dim - len(shapes[path]) for path, dim in guessed.items()}
    rules = {}
    for path, dim in dims_from_end.items():
        parts = path.split("/")
        # The shortest end of the path whose matches all have this dim.
        ends = [re.escape("/".join(parts[n:])) for n in reversed(range(len(parts)))]
        is_unambiguous = lambda key, dim=dim: all(
            dims_from_end.get(p) == dim for p in shapes if pattern("", key).fullmatch(p)
        )
        rules[next(filter(is_unambiguous, [*ends, f"^{re.escape(path)}"]))] = {AXIS: dim}
    if likely and likely not in experts:  # any leaf of three dims: the model may well have no experts
        return f"if {likely} {list(shapes[likely])} holds {shapes[likely][-3]} experts, say so: rules={rules}, or "
    return f"say which dim counts experts: rules={rules}, or "


def looks_stacked(leaves: Leaves) -> dict[str, int]:
    """Return the dims of experts by shapes alone, in modules whose names say "expert" or "moe".

    Such a leaf [E, a, b] looks like a stack of E layers, and must not be treated as one. A router [.., a, E] is needed
    as evidence: neither vectors of L layers, [L, a], nor their kernels, [L, a, b], are experts.
    """
    return {path: dim for path, dim in _expert_leaves(leaves, strict=True) if _EXPERTS.fullmatch(path)}


def _rule_dims(
    table: Mapping[str, int | str | None], shapes: Mapping[str, tuple[int, ...]], strict: bool = False
) -> dict[str, int | None]:
    """Return the dim (counted from the start) or None that a table of rules gives to each leaf that it names.

    Args:
      table: path pattern -> dim; rules for names of dims are skipped.
      strict: whether a rule that matches no leaf is an error.
    """
    source = "rules" if strict else "the model's rules"
    dim_by_path: dict[str, int | None] = {}
    for key, dim in table.items():
        if dim == AXIS:
            continue
        matches = pattern(source, key).fullmatch
        paths = [path for path in shapes if matches(path)]
        if strict and not paths:
            raise ValueError(
                f"rules: {key!r} matches the end of no parameter's path; use one such as {next(iter(shapes))!r}"
            )
        for path in paths:
            n = len(shapes[path])
            if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool) or not -n <= dim < n):
                raise ValueError(
                    f"{source}: {key!r}: {path} {list(shapes[path])} has no dim {dim!r}; use {-n} to {n - 1}"
                )
            dim_by_path[path] = None if dim is None else dim % n
    return dim_by_path


def _expert_leaves(leaves: Leaves, strict: bool = False, named: bool = True) -> Iterator[tuple[str, int]]:
    """Yield the leaves that look like experts, with their dim of experts.

    These are the leaves [.., E, a, b] near a router [.., a, E], in the innermost module that has both. In this module,
    leaves of more dims and biases count too if they have the same E.

    Args:
      strict: whether the router must be [.., a, E], with features a of the experts. If False, it may be [.., E, a], and
        may have other features.
      named: whether router or experts must be recognised by name too.
    """
    dims = set()
    for router, shape in leaves:
        if len(shape) < 2 or not (not named or _ROUTER.fullmatch(router) or _EXPERTS.fullmatch(router)):
            continue
        if strict and shape[-1] == shape[-2]:  # nothing tells a square router [n, n] from n stacked vectors [n]
            continue
        # The modules around the router, from the innermost outwards.
        parts = router.split("/")
        for n in reversed(range(len(parts))):
            scope = "".join(f"{part}/" for part in parts[:n])
            siblings = [(p, s) for p, s in leaves if p.startswith(scope) and p != router and not _SHARED.fullmatch(p)]
            is_named = not named or bool(_ROUTER.fullmatch(router))
            # A router that is not named as one counts only for leaves that are named as experts.
            kernels = [
                (path, s)
                for path, s in siblings
                if len(s) == len(shape) + 1
                and s[:-3] == shape[:-2]
                and (s[-3] == shape[-1] and shape[-2] in s[-2:] if strict else s[-3] in shape[-2:])
                and (is_named or _EXPERTS.fullmatch(path))
            ]
            if kernels:
                # The first kernel tells the number of experts: the other leaves must agree.
                count, depth = kernels[0][1][-3], len(shape)
                dims.update((path, len(s) - 3) for path, s in kernels if s[-3] == count)
                dims.update(  # leaves of more dims: gate and up projection stacked, [E, 2, a, b]
                    (path, depth - 2)
                    for path, s in siblings
                    if len(s) > depth + 1
                    and s[: depth - 1] == (*shape[:-2], count)
                    and (is_named or _EXPERTS.fullmatch(path))
                )
                dims.update(  # biases, [.., E, a]
                    (path, len(s) - 2)
                    for path, s in siblings
                    if "bias" in path and len(s) == depth and s[-2] == count and s[:-2] == shape[:-2]
                )
                # The innermost module that has both decides; modules around it may have more routers.
                break
    yield from sorted(dims)
