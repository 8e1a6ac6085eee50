"""`jp.experts` against all experts on all tokens, in float64: results and gradients, under random cotangents."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.model import permutations
from jaxpar.parallel.expert.ops.dispatch import dispatch
from jaxpar.parallel.expert.ops.experts import balanced, swiglu
from jaxpar.parallel.expert.ops.overflow import most_blocks
from jaxpar.parallel.expert.ops.routing import Router
from jaxpar.program import jaxpr as jx

Tree = Any
ROWS, DIM, FFN = 4, 6, 5


@pytest.fixture(autouse=True)
def wide() -> Any:
    with jax.enable_x64(True):
        yield


def inputs(tokens: int, experts: int, rows: int = ROWS, dtype: Any = np.float64) -> tuple[Tree, np.ndarray]:
    random = np.random.default_rng(experts)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)
    weights = {"gate": draw(experts, DIM, FFN), "up": draw(experts, DIM, FFN), "down": draw(experts, FFN, DIM)}
    return (draw(rows, tokens, DIM), draw(rows, tokens, experts), weights), draw(rows, tokens, DIM)


def slot_mask(ids: np.ndarray, gates: np.ndarray, experts: int, slots: int, drop: str, within: str) -> np.ndarray:
    """Return which choices have a slot, found one by one: bool [B, T, k]."""
    has_slot = np.zeros(ids.shape, bool)
    rows, tokens, k = ids.shape
    for group in [[r] for r in range(rows)] if within == "row" else [range(rows)]:
        choices = [(r, t, j) for r in group for t in range(tokens) for j in range(k)]
        if drop == "probability":
            choices.sort(key=lambda choice: -gates[choice])
        used = [0] * experts
        for choice in choices:
            has_slot[choice] = used[ids[choice]] < slots
            used[ids[choice]] += 1
    return has_slot


def dense(
    x: jax.Array, logits: jax.Array, weights: Tree, k: int, keep: Any = None, scores: str = "softmax", scale: float = 1
) -> jax.Array:
    """Compute all experts on all tokens; `keep` is a mask of the choices that count."""
    probabilities = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    _, ids = jax.lax.top_k(probabilities, k)
    gates = jnp.take_along_axis(probabilities, ids, -1)
    gates = scale * gates / gates.sum(-1, keepdims=True)
    if keep is not None:
        gates = gates * keep
    full = (jax.nn.one_hot(ids, logits.shape[-1]) * gates[..., None]).sum(-2)
    return jnp.einsum("bte,ebtd->btd", full, jax.vmap(lambda w: swiglu(w, x))(weights))


def differentiated(f: Any, args: Tree, cotangent: jax.Array) -> Tree:
    """Return the value and the cotangents, from one program: eagerly, JAX would compile each operation separately."""

    def value_and_cotangents(*args: Any) -> Tree:
        out, pull = jax.vjp(f, *args)
        return out, pull(cotangent.astype(out.dtype))

    return jax.jit(value_and_cotangents)(*args)


def run(*args: Any, **options: Any) -> tuple[jax.Array, Any]:
    return jax.jit(lambda *args: jp.experts(*args, **options))(*args)


def assert_same(got: Tree, expected: Tree, tolerance: float) -> None:
    """Compare each leaf in units of its largest value."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-30))


CASES = {  # tokens of a row, experts, k, and what is added to the logits of expert e, times e
    "odd": (37, 7, 3, 0.1),
    "all experts": (9, 5, 5, 0.0),
    "one expert has all": (101, 8, 1, 50.0),  # seven have none; its buffer and blocks, the last one not full
    "two experts have all": (101, 8, 2, 50.0),
    "uneven": (90, 16, 4, 0.3),
}


@pytest.mark.parametrize(("tokens", "experts", "k", "skew"), CASES.values(), ids=CASES)
def test_dropless_is_all_experts_on_all_tokens(tokens: int, experts: int, k: int, skew: float) -> None:
    (x, logits, weights), cotangent = inputs(tokens, experts)
    args = x, logits + skew * jnp.arange(experts), weights
    got = differentiated(lambda *a: jp.experts(*a, k=k)[0], args, cotangent)
    assert_same(got, differentiated(lambda *a: dense(*a, k), args, cotangent), 1e-12)


def test_blocks_are_enough_wherever_tokens_go() -> None:
    """The bound on their number is reached, and never passed."""
    random = np.random.default_rng(0)
    for tokens, k, experts, slots, size in ((50, 2, 6, 10, 4), (31, 1, 3, 5, 5), (20, 3, 4, 6, 2)):
        bound = most_blocks(tokens, k, experts, slots, size)
        largest = 0
        for _ in range(300):
            preference = random.normal(size=experts) * random.choice([0, 1, 100])
            ids = np.argsort(preference + random.normal(size=(tokens, experts)), axis=1)[:, -k:]
            load = np.bincount(ids.reshape(-1), minlength=experts)
            largest = max(largest, sum(-(-max(n - slots, 0) // size) for n in load))
        assert 0 < largest <= bound <= largest + 2


@pytest.mark.parametrize("within", ["row", "microbatch"])
@pytest.mark.parametrize("drop", ["position", "probability"])
def test_capacity_drops_what_it_says(drop: str, within: str) -> None:
    tokens, experts, k, capacity = 23, 6, 2, 0.7
    args, cotangent = inputs(tokens, experts)
    slots = int(np.ceil(capacity * tokens * k / experts * (1 if within == "row" else ROWS)))
    options = {"k": k, "capacity": capacity, "drop": drop, "drop_within": within}
    got = differentiated(lambda *a: jp.experts(*a, **options)[0], args, cotangent)
    _, logits, _ = args
    probabilities = jax.nn.softmax(logits)
    _, ids = jax.lax.top_k(probabilities, k)
    gates = jnp.take_along_axis(probabilities, ids, -1)
    gates = gates / gates.sum(-1, keepdims=True)
    has_slot = slot_mask(np.asarray(ids), np.asarray(gates), experts, slots, drop, within)
    assert_same(got, differentiated(lambda *a: dense(*a, k, has_slot), args, cotangent), 1e-12)
    routing = run(*args, **options)[1]
    assert 0 < 1 - has_slot.mean() < 0.6
    np.testing.assert_allclose(routing.dropped, 1 - has_slot.reshape(ROWS, -1).mean(axis=1), atol=1e-6)


@pytest.mark.slow
def test_sigmoid_scores_groups_and_bias() -> None:
    """DeepSeek-V3's: a bias moves the choice and not the weight."""
    args, cotangent = inputs(11, 8)
    x, logits, weights = args
    got = differentiated(lambda *a: jp.experts(*a, k=3, scores="sigmoid", scale=2.5)[0], args, cotangent)
    assert_same(got, differentiated(lambda *a: dense(*a, 3, None, "sigmoid", 2.5), args, cotangent), 1e-12)

    bias = jnp.zeros(8).at[5].set(10.0)
    _, routing = run(x, logits, weights, k=3, scores="sigmoid", bias=bias)
    np.testing.assert_allclose(routing.load[:, 5], 1 / 3, atol=1e-6)  # of every token one of three
    grads = jax.grad(lambda b: jp.experts(x, logits, weights, k=3, bias=b)[0].sum())(bias)
    assert not np.any(grads)
    assert (balanced(bias, routing.load.mean(axis=0), 0.5) - bias).tolist()[5] == -0.5


def test_nodes_are_limited_as_deepseek_v3_says() -> None:
    """Token by token (section 2.1.2, and its published inference code): of 4 nodes of 4 experts the 2 whose two best
    experts have the largest sum, each with its bias; of their experts the 3 best; weights without the bias. In groups
    of two, as these were, the sum of all experts would do as well.
    """
    random = np.random.default_rng(0)
    logits, bias = random.normal(size=(2, 40, 16)), random.normal(size=16)
    router = Router(3, "sigmoid", True, 2.5, jnp.asarray(bias), 4, 2)
    ids, weights, _ = map(np.asarray, router.choose(logits))
    by_all = 0
    for row, token in np.ndindex(2, 40):
        scores = 1 / (1 + np.exp(-logits[row, token]))
        biased = (scores + bias).reshape(4, 4)
        nodes = np.argsort(-np.sort(biased, axis=1)[:, -2:].sum(axis=1))[:2]
        by_all += {*nodes} != {*np.argsort(-biased.sum(axis=1))[:2]}
        reach = [4 * node + e for node in nodes for e in range(4)]
        best = sorted(reach, key=lambda e: -biased.reshape(-1)[e])[:3]
        assert ids[row, token].tolist() == best
        np.testing.assert_allclose(weights[row, token], 2.5 * scores[best] / scores[best].sum(), rtol=1e-12)
    assert by_all > 5


def test_shared_experts_and_a_function_of_ones_own() -> None:
    (x, logits, weights), _ = inputs(7, 4)
    shared = jax.tree.map(lambda w: w[0] * 0.5, weights)
    y = run(x, logits, weights, k=2)[0]
    np.testing.assert_allclose(run(x, logits, weights, k=2, shared=shared)[0], y + swiglu(shared, x), atol=1e-12)
    scale_and_shift = lambda w, rows: rows * w["scale"] + w["shift"]
    leaves = {"scale": jnp.arange(4.0)[:, None], "shift": jnp.ones((4, 1))}
    got = run(x, jnp.zeros_like(logits).at[..., 3].set(99.0), leaves, k=1, expert=scale_and_shift)[0]
    np.testing.assert_allclose(got, 3 * x + 1, atol=1e-12)


def test_three_balance_losses_and_the_z_loss() -> None:
    (x, logits, weights), _ = inputs(9, 4)
    probabilities, k = np.asarray(jax.nn.softmax(logits)), 2
    hot = np.asarray(jax.nn.one_hot(jax.lax.top_k(logits, k)[1], 4)).sum(-2)  # [B, T, E]
    share = lambda axes: 4 / k * hot.mean(axis=axes)
    over_all = (share((0, 1)) * probabilities.mean((0, 1))).sum()  # which one block cannot tell from a global one
    expected = {
        "sequence": (share(1) * probabilities.mean(1)).sum(-1).mean(),
        "global": over_all,
        "microbatch": over_all,
    }
    kinds = lambda *args: {kind: jp.experts(*args, k=k, balance=kind)[1] for kind in expected}
    for kind, routing in jax.jit(kinds)(x, logits, weights).items():
        np.testing.assert_allclose(routing.balance.mean(), expected[kind], rtol=1e-6, err_msg=kind)
    np.testing.assert_allclose(routing.z.mean(), np.square(np.log(np.exp(logits).sum(-1))).mean(), rtol=1e-6)
    np.testing.assert_allclose(routing.load, hot.mean(1) / k, atol=1e-6)
    assert not np.any(routing.dropped)
    even = run(x, jnp.zeros_like(logits), weights, k=4)[1]
    np.testing.assert_allclose(even.balance, 1, rtol=1e-6)


def test_numpy_arrays_are_taken() -> None:
    """NumPy arrays, from a module called outside of a step, once raised an AttributeError of JAX."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)
    weights = {"gate": draw(4, 8, 16), "up": draw(4, 8, 16), "down": draw(4, 16, 8)}
    inputs = draw(2, 5, 8), draw(2, 5, 4), weights
    np.testing.assert_array_equal(jp.experts(*inputs, k=2)[0], jp.experts(*jax.tree.map(jnp.asarray, inputs), k=2)[0])


def test_bfloat16_rounds_each_leaf_by_its_own_scale() -> None:
    """All tokens to one expert: what 30 blocks add to its weights is added up in float32."""
    args, cotangent = inputs(1000, 8)
    args = jax.tree.map(lambda x: x.astype(jnp.bfloat16), args)
    args = args[0], (args[1] + 50 * jnp.arange(8)).astype(jnp.float32), args[2]
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), args)
    (got, grads), (expected, exact) = (
        differentiated(lambda *a: jp.experts(*a, k=1)[0], inputs_of_dtype, cotangent)
        for inputs_of_dtype in (args, wide)
    )
    assert got.dtype == jnp.bfloat16
    assert_same(got, expected, 0.02)
    assert_same((grads[0], grads[2]), (exact[0], exact[2]), 0.02)


# -- what a step makes of it -------------------------------------------------------------------------------------------


def routed(**options: Any) -> jp.Model:
    """A linear router and four experts; the balance loss is added."""

    def init(key: jax.Array) -> Tree:
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)
        weights = {"gate": draw(0, 4, DIM, FFN), "up": draw(1, 4, DIM, FFN), "down": draw(2, 4, FFN, DIM)}
        return {"router": draw(3, DIM, 4), "experts": weights}

    rows = options.pop("rows", None)

    def loss(params: Tree, batch: Tree, key: Any) -> jax.Array:
        y, routing = jp.experts(batch["x"], batch["x"] @ params["router"], params["experts"], k=2, **options)
        per_row = (jnp.square(y - 1).mean(axis=(1, 2)) + 0.1 * routing.balance + 0.01 * routing.z) * batch["weight"]
        return per_row.mean()

    return jp.Model(init=init, loss=loss, rows=rows)


def batch() -> Tree:
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 13, DIM)) + np.linspace(-1, 1, 8)[:, None, None]  # rows that prefer different experts
    return {"x": x.astype(np.float32), "weight": random.uniform(0.5, 2, 8).astype(np.float32)}


def test_rows_keep_to_themselves_and_so_layouts_agree() -> None:
    """Each row has slots of its own, and the loads of all rows are known to each."""
    with jax.enable_x64(False):
        model = routed(capacity=0.6, balance="global", rows="independent")
        assert jp.verify(model, "zero3,microbatches=2", batch(), mesh=jax.devices()[:4]).ok


def traced(**options: Any) -> list[str]:
    with jax.enable_x64(False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jp.make_train_step(routed(**options), optax.sgd(0.1), "fsdp", mesh=jax.devices()[:2]).trace(batch())
    return [str(w.message) for w in caught]


def test_what_couples_rows_is_said_by_its_line() -> None:
    assert traced(capacity=0.6) == []
    (warning,) = traced(capacity=0.6, drop_within="microbatch")
    assert "may couple rows" in warning
    assert "use drop_within='row', or capacity=None" in warning
    with pytest.raises(ValueError, match=r"(?s)the loss couples rows.*test_experts\.py.*use balance='global'"):
        traced(balance="microbatch")
    assert traced(balance="microbatch", capacity=0.6, drop_within="microbatch", rows="independent") == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 5}, "k=5 experts cannot be chosen from 4; use 1 to 4"),
        ({"capacity": 0.0}, "capacity=0.0, in units of the mean load, must be above 0"),
        ({"groups": 3, "group_limit": 1}, "groups=3 does not divide 4"),
        ({"groups": 2}, "groups=2 with group_limit=None; use groups of 2 or more with a group_limit"),
        ({"k": 3, "groups": 2, "group_limit": 1}, "fewer than k=3"),
        ({"balance": "local"}, "balance='local'; use one of"),
        ({"bias": jnp.zeros(3)}, r"bias \[3\] does not fit 4 experts; give"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(options: Tree, words: str) -> None:
    (x, logits, weights), _ = inputs(5, 4)
    with pytest.raises(ValueError, match=words):
        jp.experts(x, logits, weights, **{"k": 2, **options})
    with pytest.raises(ValueError, match=r"weights has a leaf \[2, 6, 5\] for 4 experts"):
        jp.experts(x, logits, {"gate": weights["gate"][:2]}, k=2)
    with pytest.raises(ValueError, match=r"x .* has 2 dims"):
        jp.experts(x[0], logits, weights, k=2)


def test_dispatches_that_drop_are_gathered_each_by_itself() -> None:
    """Two that drop had one name, and the one with fewer slots was gathered with those of the other."""
    eqns = []
    for slots in (2, 4):
        x, ids, weights = jnp.ones((6, DIM)), jnp.zeros((6, 1), jnp.int32), jnp.ones((6, 1))
        fun = lambda *inputs, c=slots: dispatch(4, c, 1, True, "", True)(*inputs)
        eqns.append(next(eqn for eqn in jax.make_jaxpr(fun)(x, ids, weights).eqns if permutations.of(eqn)))
    for slots, eqn in zip((2, 4), eqns, strict=True):
        route = permutations.of(eqn)
        assert route is not None
        assert route.gather is not None
        _, (rows, *_) = jx.trace(route.gather(2), *(v.aval for v in eqn.invars), axes={"expert": 2})
        assert rows.shape == (2, 2 * slots, DIM)
