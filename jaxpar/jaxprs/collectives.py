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
