"""The table of factors, proved: of random equations of each primitive in it, every factor on parts against the whole.

Its rows are claims about JAX. A wrong one gives a wrong loss or gradient under every strategy that splits values, and
lets a loss through that couples rows.
"""

from collections.abc import Sequence
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
from jaxpar.program.factors import ELEMENTWISE, FACTORS
from jaxpar.program.primitives import PRIMITIVES
from jaxpar.program.registration import claims_of

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
NEWER = {"log2", "one_minus_square", "polynomial"} if jax.__version_info__ < (0, 11) else set()  # what this jax has not


def prove(eqns: Sequence[tuple[Any, Sequence[Any]]]) -> int:
    """Every factor of some equations, in 2 and in 3 parts, all of them compiled as one program. How many there were."""
    claims = [claim for eqn, values in eqns for claim in claims_of(eqn, values, factors.of(eqn))]

    def bound(eqn: Any, values: Sequence[Any], **changes: Any) -> list[Any]:
        if eqn.primitive.name in COLLECTIVES:
            ranks = [jnp.stack([x * (i + 1) for i in range(RANKS)]) for x in values]
            return jax.vmap(lambda *xs: jx.bind(eqn, xs, **changes), axis_name="i")(*ranks)
        return jx.bind(eqn, values, **changes)

    def run(operands: Any, cut: Any) -> Any:
        whole = [bound(eqn, values) for (eqn, _), values in zip(eqns, operands, strict=True)]
        each = zip(claims, cut, strict=True)
        return whole, [[bound(claim.eqn, part, **claim.changes()) for part in parts] for claim, parts in each]

    whole, parts = jax.tree.map(
        np.asarray, jax.jit(run)([values for _, values in eqns], [claim.cut() for claim in claims])
    )
    wholes = {id(eqn): value for (eqn, _), value in zip(eqns, whole, strict=True)}
    for claim, found in zip(claims, parts, strict=True):
        said = claim.difference(wholes[id(claim.eqn)], found)
        assert not said, f"{claim.eqn}: {claim.factor} in {claim.parts} parts: {said}"
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
