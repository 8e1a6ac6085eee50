"""The table of factors beside that of Shardy, XLA's partitioner: what it knows of an operation contradicts no row.

Each equation is lowered by itself, and Shardy's own pass writes its rule beside each operation:

    sdy.sharding_rule = #sdy.op_sharding_rule<([i, k], [k, j])->([i, j]) {i=6, j=5, k=12} reduction={k}>
"""

import re
from typing import Any

import equations
import jax
import pytest
from jax._src.lib.mlir import passmanager
from test_factors import COLLECTIVES, NEWER

from jaxpar.program import factors
from jaxpar.program import jaxpr as jx
from jaxpar.program.factors import ELEMENTWISE, FACTORS
from jaxpar.program.primitives import PRIMITIVES

Dims = tuple[int | None, ...]
Claim = tuple[Dims, Dims, bool]  # the dims of an index in operands and results, and whether it is reduced
PASS = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
RULE = re.compile(r"op_sharding_rule<\((.*?)\)->\((.*?)\) \{([^}]*)\}(.*?)>")  # of more than scalars
# Of a function's own operations, not of what reduces two elements within one, those that have operands.
OPERATION = re.compile(
    r"^    %\S+ = (?!.*stablehlo\.(?:constant|iota)|call |.*broadcast_in_dim .* dims = \[\])", re.MULTILINE
)


def shardy(eqn: Any) -> tuple[set[Claim], set[Claim]] | None:
    """What Shardy's rule claims: of indices that may be split and are the outermost of their dims, and of all others.
    None of an equation that is no operation, or several.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    module = jax.jit(lambda *xs: jx.bind(eqn, xs)).lower(*avals).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(PASS).run(module.operation)
    found = RULE.findall(str(module))
    if len(found) != 1 or len(OPERATION.findall(str(module))) != 1:
        return None
    ins, outs, sizes, kinds = found[0]
    size = {index: int(n) for index, n in re.findall(r"(\w+)=(\d+)", sizes)}
    kind = {index: what for what, names in re.findall(r"(\w+)=\{([^}]*)\}", kinds) for index in names.split(", ")}

    def tensors(text: str) -> list[list[list[str]]]:
        """Of each tensor and dim its indices, without those of size 1."""
        dims = [dims.split(", ") if dims else [] for dims in re.findall(r"\[([^\]]*)\]", text)]
        return [[[i for i in re.findall(r"[a-z](?:_\d+)?", d) if size[i] > 1] for d in some] for some in dims]

    # Behind operands are what reductions begin with; before the place of an extreme is the extreme.
    operands, results = tensors(ins)[: len(eqn.invars)], tensors(outs)[-len(eqn.outvars) :]
    if (len(operands), len(results)) != (len(eqn.invars), len(eqn.outvars)):
        return None
    at = lambda some, index: tuple(next((d for d, of in enumerate(t) if of[:1] == [index]), None) for t in some)
    claims = {index: (at(operands, index), at(results, index), kind.get(index) == "reduction") for index in size}
    split = {index for index in size if size[index] > 1 and kind.get(index) in (None, "reduction")}
    return {claims[i] for i in split}, {claims[i] for i in {*size} - split}


def ours(eqn: Any) -> set[Claim]:
    """Our own claims, of indices of more than 1."""
    ins, outs = factors.shapes(eqn)
    long = lambda f: max(
        (s[d] for s, d in zip((*ins, *outs), (*f.ins, *f.outs), strict=True) if d is not None), default=1
    )
    return {(f.ins, f.outs, bool(f.reduced)) for f in factors.of(eqn) if long(f) > 1}


def connects(claim: Claim) -> bool:
    """Whether a claim is of two dims at least: Shardy gives each dim of which it knows nothing an index of its own."""
    return sum(d is not None for dims in claim[:2] for d in dims) > 1


def meet(one: Claim, other: Claim) -> bool:
    """Whether two claims are of one dim of a tensor."""
    return any(
        a == b is not None
        for left, right in zip(one[:2], other[:2], strict=True)
        for a, b in zip(left, right, strict=True)
    )


def contradicted(eqn: Any) -> set[Claim] | None:
    """Our claims about dims of which Shardy knows something else; None where it says nothing of the equation."""
    if (known := shardy(eqn)) is None:
        return None
    split, others = known
    return {c for c in ours(eqn) - split if any(meet(c, o) and connects(o) for o in (*split, *others))}


@pytest.mark.slow
def test_shardy_contradicts_no_factor() -> None:
    compared = set()
    for name in (name for name in FACTORS if name not in (*COLLECTIVES, *NEWER)):
        for eqn, _ in equations.equations(name, 1 if name in ELEMENTWISE else 4):
            if (wrong := contradicted(eqn)) is not None:
                compared.add(name)
                assert not wrong, f"{eqn}: Shardy knows {shardy(eqn)}, and not {wrong}"
    assert len(compared) > 80, f"hardly any equation is one operation with a rule of Shardy's: {sorted(compared)}"


def test_shardy_contradicts_a_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRIMITIVES, "cumsum", PRIMITIVES["add"])
    assert any(contradicted(eqn) for eqn, _ in equations.equations("cumsum", 4))
