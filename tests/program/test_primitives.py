"""The records of primitives: each attribute against what equations compute, and one line for a new one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_factors import NEWER

import jaxpar
from jaxpar.program import factors
from jaxpar.program import jaxpr as jx
from jaxpar.program.factors import ELEMENTWISE, FACTORS
from jaxpar.program.primitives import PRIMITIVES, having, linear
from jaxpar.program.walk import CALLS, programs, visit

PACKAGE = Path(jaxpar.__file__).parent
WORKER = Path(__file__).parents[1] / "new_primitive.py"
HERE = [name for name in FACTORS if name not in NEWER]
LINEAR = [name for name in HERE if PRIMITIVES[name].linear]


def sides(eqn: Any) -> list[list[bool]]:
    """The operands of which an equation may be linear together."""
    n = len(eqn.invars)
    some = [[True] * n, [False, *[True] * (n - 1)], *([i == j for j in range(n)] for i in range(n))]
    return [among for among in some if any(among) and linear(eqn, among)]


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str) -> None:
    """f(2 x + y) = 2 f(x) + f(y), and no operand is called linear alone that is so with others only."""
    cases = [(eqn, values, among) for eqn, values in equations.equations(name, 2) for among in sides(eqn)]
    floats = [(e, v, a) for e, v, a in cases if all(x.dtype.kind in "fc" for x, yes in zip(v, a, strict=True) if yes)]

    @jax.jit
    def run() -> Any:
        found = []
        for eqn, values, among in floats:
            other = [x[::-1] + 1 if x.ndim else x + 1 for x in values]
            mixed = lambda make, values=values, other=other, among=among: [
                make(x, y) if yes else x for x, y, yes in zip(values, other, among, strict=True)
            ]
            left = jx.bind(eqn, mixed(lambda x, y: 2 * x + y))
            one, two = jx.bind(eqn, values), jx.bind(eqn, mixed(lambda x, y: y))
            found.append((left, [2 * a + b for a, b in zip(one, two, strict=True)]))
        return found

    if name != "convert_element_type":  # of integers it is none
        assert floats
    error = 0.05 if name in ("reduce_precision", "convert_element_type") else 1e-5  # of bfloat16, about
    for left, right in run():
        for a, b in zip(left, right, strict=True):
            np.testing.assert_allclose(np.asarray(a, complex), np.asarray(b, complex), rtol=error, atol=10 * error)


@pytest.mark.slow
def test_zero_of_zeros() -> None:
    """Of elementwise ones all that are, and no other."""
    names = [name for name in HERE if name in ELEMENTWISE]
    eqns = [equations.equations(name, 1)[0] for name in names]
    zeros = [[np.zeros(x.shape, x.dtype) for x in values] for _, values in eqns]
    run = jax.jit(lambda zeros: [jx.bind(eqn, values) for (eqn, _), values in zip(eqns, zeros, strict=True)])
    zero = {name: not any(map(np.any, results)) for name, results in zip(names, run(zeros), strict=True)}
    assert zero == {name: PRIMITIVES[name].zero for name in names}


def test_what_moves_has_elements_of_its_operands() -> None:
    for name in (name for name in HERE if PRIMITIVES[name].moves):
        for eqn, values in equations.equations(name, 1):
            there = {float(x) for value in values for x in value.ravel()}
            assert {float(x) for y in jx.bind(eqn, values) for x in np.asarray(y).ravel()} <= there, eqn


def test_reductions_have_no_dim_of_what_they_reduce() -> None:
    """All of one operand whose rows say how to join parts without a dim, and no other."""
    eqns = [eqn for name in HERE for eqn, _ in equations.equations(name, 3) if len(eqn.invars) == 1]
    reduced = {eqn.primitive.name for eqn in eqns if any(f.reduced and f.outs == (None,) for f in factors.of(eqn))}
    assert reduced == {*having("reduces")}


def test_what_is_nested_holds_programs_and_takes_their_operands() -> None:
    @jax.custom_vjp
    def own(x: Any) -> Any:
        return jax.checkpoint(jax.numpy.sin)(x)

    own.defvjp(lambda x: (x, x), lambda x, ct: (ct,))

    def fun(x: Any) -> Any:
        x = jax.lax.cond(x > 0, jax.nn.relu, own, x)
        x = jax.lax.while_loop(lambda x: x < 3, lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, None, 2)[0], x)
        return jax.lax.custom_linear_solve(lambda y: 2 * y, x, lambda mv, b: b / 2, lambda mv, b: b / 2)

    seen = [eqn for eqn, _ in visit(jax.make_jaxpr(fun)(1.0).eqns) if programs(eqn)]
    held = {eqn.primitive.name for eqn in seen} - {*CALLS}
    assert len(held) == 7
    assert held <= {*having("nested")}


@pytest.mark.slow
def test_a_new_primitive_is_one_line(tmp_path: Path) -> None:
    """Without its line, each axis gathers or refuses it, the check of rows has no rule, and it costs nothing."""
    folder = tmp_path / "jaxpar"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before, end, after = (folder / "program/factors.py").read_text().partition("\nFACTORS = ")
    line = 'elementwise("twice", cheap=True, kernel=True, linear="all", zero=True)\n'
    (folder / "program/factors.py").write_text(before + line + end + after)
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER], env={**os.environ, "PYTHONPATH": str(path)}, stdout=subprocess.PIPE, text=True
        )
        for path in (PACKAGE.parent, tmp_path)
    ]
    without, known = (json.loads(worker.communicate()[0]) for worker in workers)
    assert not any(without.values()), without
    assert all(known.values()), known


def test_multiply_adds_of_grouped_products() -> None:
    """Each row meets the matrix of its group alone; in the gradient of the matrices each group sums its own rows."""
    x, w, sizes = jnp.ones((12, 4)), jnp.ones((3, 4, 5)), jnp.array([2, 6, 4])
    grouped = lambda x, w: jax.lax.ragged_dot(x, w, sizes).sum()
    for fun, products in ((grouped, 1), (jax.grad(grouped, (0, 1)), 3)):
        ((count, _),) = jx.matmuls(jax.make_jaxpr(fun)(x, w).eqns).values()
        assert count == products * 12 * 4 * 5
