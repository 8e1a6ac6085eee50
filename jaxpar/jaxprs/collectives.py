"""The names of collectives: each kind as HLO and a ledger spell it, and the primitives of jaxprs that are of it.

Primitives are those of jax 0.10 to 0.12, where a name may end in _start, and with check_vma in _invariant or _reduced;
tensor_... are the edges of a tensor rank's program (`collectives/edges.py`).
"""

KINDS = {
    "all-reduce": (
        *("psum", "psum2", "psum_invariant", "unreduced_psum", "tensor_leave"),
        *("pmax", "pmin", "unreduced_pmax", "unreduced_pmin"),
    ),
    "all-gather": ("all_gather", "all_gather_invariant", "all_gather_reduced", "tensor_gather", "tensor_unsplit"),
    "reduce-scatter": ("reduce_scatter", "unreduced_reduce_scatter", "tensor_scatter"),
    "all-to-all": ("all_to_all",),
    "ragged-all-to-all": ("ragged_all_to_all",),
    "collective-permute": ("ppermute",),
    "collective-broadcast": ("pbroadcast", "pbroadcast_dynamic"),
}
PRIMITIVES = {name: kind for kind, names in KINDS.items() for name in names}


def on_the_wire(kind: str, ranks: int) -> float:
    """The share of a collective's buffer that each of `ranks` devices sends, by the ring convention.

    The buffer is the whole one that a device takes part in: the output of an all-gather, the input of every other kind.
    A ring passes n - 1 of its n parts through every device, and for an all-reduce twice (Patarasuk and Yuan 2009).

    >>> on_the_wire("all-reduce", 8), on_the_wire("all-gather", 8), on_the_wire("collective-permute", 8)
    (1.75, 0.875, 1.0)
    """
    if kind.startswith("collective-"):  # a permute, and a broadcast, which NCCL pipelines: each passes all of it on
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks
