"""The table of factors, proved: of random equations of each primitive in it, every factor on parts against the whole.

Its rows are claims about JAX. A wrong one gives a wrong loss or gradient under every strategy that splits values, and
lets a loss through that couples rows.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import EXAMPLES, RANKS

from jaxpar.parallel.tensor.edges import EDGES
from jaxpar.program import factors
from jaxpar.program import jaxpr as jx
from jaxpar.program.factors import ELEMENTWISE, FACTORS, Factor
from jaxpar.program.primitives import PRIMITIVES

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
NEWER = {"log2", "one_minus_square", "polynomial"} if jax.__version_info__ < (0, 11) else set()  # what this jax has not
JOINED = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
          "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip


def part(shape: Sequence[int], dim: int | None, n: int) -> tuple[int, ...]:
    return tuple(size // n if d == dim else size for d, size in enumerate(shape))


def divides(eqn: Any, factor: Factor, n: int) -> bool:
    """Whether a factor can be cut into n equal parts."""
    ins, outs = factors.shapes(eqn)
    sizes = [s[d] for s, d in zip((*ins, *outs), (*factor.ins, *factor.outs), strict=True) if d is not None]
    groups = [eqn.params[factor.grouped]] if factor.grouped else []
    return bool(sizes) and not any(size % n for size in (*sizes, *groups))


def joined(eqn: Any, factor: Factor, parts: Sequence[Any], operands: Sequence[Any], dim: int | None) -> Any:
    """A result from those of the parts."""
    if dim is not None:
        return np.concatenate(parts, dim)
    if factor.reduced in JOINED:
        return reduce(JOINED[factor.reduced], parts)
    if factor.reduced in ("argmax", "argmin"):  # of the part whose own best is the best, the first of them
        (at,) = eqn.params["axes"]
        best = [np.take_along_axis(x, np.expand_dims(i, at), at) for x, i in zip(operands, parts, strict=True)]
        which = getattr(np, factor.reduced)(np.concatenate(best, at), at)
        within = np.take_along_axis(np.stack(parts, at), np.expand_dims(which, at), at)
        return np.squeeze(within, at) + (which * operands[0].shape[at]).astype(within.dtype)
    assert not factor.reduced, factor.reduced
    for other in parts[1:]:
        np.testing.assert_array_equal(other, parts[0])
    return parts[0]


def prove(eqns: Sequence[tuple[Any, Sequence[Any]]]) -> int:
    """Every factor of some equations, in 2 and in 3 parts, all of them compiled as one program. How many there were."""
    claims = [
        (eqn, values, f, n) for eqn, values in eqns for f in factors.of(eqn) for n in (2, 3) if divides(eqn, f, n)
    ]
    cut = [
        [[x if d is None else np.split(x, n, d)[i] for x, d in zip(values, f.ins, strict=True)] for i in range(n)]
        for eqn, values, f, n in claims
    ]

    def bound(eqn: Any, values: Sequence[Any], **changes: Any) -> list[Any]:
        if eqn.primitive.name in COLLECTIVES:
            ranks = [jnp.stack([x * (i + 1) for i in range(RANKS)]) for x in values]
            return jax.vmap(lambda *xs: jx.bind(eqn, xs, **changes), axis_name="i")(*ranks)
        return jx.bind(eqn, values, **changes)

    def run(operands: Any, cut: Any) -> Any:
        whole = [bound(eqn, values) for (eqn, _), values in zip(eqns, operands, strict=True)]
        parts = []
        for (eqn, _, f, n), each in zip(claims, cut, strict=True):
            changes = f.params(lambda shape, dim, n=n: part(shape, dim, n)) if f.params else {}
            parts.append([bound(eqn, values, **changes) for values in each])
        return whole, parts

    whole, parts = jax.tree.map(np.asarray, jax.jit(run)([values for _, values in eqns], cut))
    wholes = {id(eqn): value for (eqn, _), value in zip(eqns, whole, strict=True)}
    for (eqn, _, f, n), operands, outs in zip(claims, cut, parts, strict=True):
        ranks = int(eqn.primitive.name in COLLECTIVES)
        for i, dim in enumerate(f.outs):
            expected, dim = wholes[id(eqn)][i], None if dim is None else dim + ranks
            found = joined(eqn, f, [out[i] for out in outs], [x[0] for x in operands], dim)
            said = f"{eqn}: {f.ins} -> {f.outs} {f.reduced} in {n} parts, result {i}"
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), said
            if np.issubdtype(found.dtype, np.inexact):
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=said)
            else:
                np.testing.assert_array_equal(found, expected, err_msg=said)
    return len(claims)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.battery) for seed in range(1, 6))])
@pytest.mark.parametrize("name", FACTORS)
def test_each_factor_on_parts_is_the_equation_on_the_whole(name: str, seed: int) -> None:
    assert name in EXAMPLES, f"{name} has factors and no example equation in tests/equations.py"
    if name in NEWER:
        pytest.skip(f"jax {jax.__version__} has no {name}")
    examples = 1 if name in ELEMENTWISE else 5  # some, such as igamma, take a second to compile
    proved = prove(equations.equations(name, examples, seed))
    assert proved or seed, "no factor of these examples has parts: draw others"


def test_a_wrong_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRIMITIVES, "cumsum", PRIMITIVES["add"])
    with pytest.raises(AssertionError, match="cumsum"):
        prove(equations.equations("cumsum", 2))


# JAX's primitives that have a batching rule and no factors, by what they are.
NOT_BY_FACTORS = {
    "they hold programs, or a function's own derivative or batching: walked, each by a rule of its own": """
        call_hi_primitive call_hi_primitive_linearized cond custom_lin custom_linear_solve custom_vmap_call eval_jaxpr
        jit remat2 remat_opt scan while
    """,
    "draws: which numbers there are depends on the shape of the whole": """
        philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed random_split
        random_unwrap random_wrap rng_bit_generator threefry2x32 threefry4x32
    """,
    "each operand by itself, or none": "dce_sink device_put empty optimization_barrier stage tie",
    "collectives, by rules of their own": """
        axis_index pbroadcast pbroadcast_dynamic pmax pmin ppermute precv psend psum ragged_all_to_all
    """,
    "types of values within shard_map, where losses are not traced": """
        all_gather_invariant all_gather_reduced preduced psum_invariant pvary reduced_vary_cast reduced_vary_cast_p
        unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p
    """,
    "where values of a mesh of the user's own are": """
        global_array_to_host_local_array host_local_array_to_global_array inspect_sharding layout_constraint reshard
        with_memory_space_constraint
    """,
    "fused kernels, of which jp.local_kernel says how they are cut": """
        dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd_wrapper ffi_call ragged_dot_general scaled_dot scaled_matmul scaled_matmul_wrapper
    """,
    "effects: prints, callbacks, references": """
        addupdate check debug_callback debug_print freeze get io_callback new_ref pure_callback swap
    """,
    "numbers of another format, as they are": "from_edtype to_edtype",
    "our own edges of tensor": " ".join(EDGES),
}


# Those of Equinox and lineax, where something has imported them.
OTHERS = """
announce_jaxpr linear_solve maybe_set noinline nonbatchable nondifferentiable_backward nontraceable select_if_vmap
unvmap_all unvmap_any unvmap_max vprim
"""


def test_each_primitive_of_jax_has_factors_or_a_reason() -> None:
    """A newer jax brings others: give them a row in program/factors.py and an example, or say here what they are."""
    import jax._src.interpreters.batching as batching  # the public table can only be written to

    every = {primitive.name for primitive in batching.fancy_primitive_batchers}
    known = every - {*OTHERS.split()}
    assert len(known) > 200, "JAX keeps its batching rules elsewhere"
    excused = " ".join(NOT_BY_FACTORS.values()).split()
    assert not {*FACTORS} & {*excused}
    assert not known - {*FACTORS, *excused}


def test_a_rule_that_names_no_parameter_of_the_primitive_raises() -> None:
    """It mixed along the last dim instead, and a loss over that dim was wrong without a word."""
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.cumsum(x, 0))(jnp.ones((3, 4))).eqns
    assert [factor.ins for factor in factors.along("axis")(eqn)] == [(1,)]
    with pytest.raises(ValueError, match=r"the rule of cumsum .* reads the dims from dimension, .* name one of these"):
        list(factors.along("dimension")(eqn))
