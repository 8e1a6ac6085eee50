"""Ranks that diverge never meet in a collective: the check reads this from the program of every step."""

from collections.abc import Callable
from typing import Any

import expert_cells
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar import collectives
from jaxpar.collectives.divergence import not_reached
from jaxpar.models import named
from jaxpar.parallel.expert.localiser import ExpertLocaliser
from jaxpar.parallel.expert.ops import rounds
from jaxpar.parallel.pipeline.slots import Slots

total = lambda x, axis="a": collectives.all_reduce(x, axis)
twice = lambda x: x + total(x)
rank = lambda axis="a": lax.axis_index(axis)
# An equation whose inner programs have other inputs than its operands.
solved = lambda x, solve: lax.custom_linear_solve(twice, x, lambda matvec, b: solve(b), symmetric=True)


def check(fun: Callable[[jax.Array], jax.Array]) -> list[str]:
    """Return the findings in a program on a mesh of two by two, axes `a` and `b`, whose rows are sharded over `a`."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    return not_reached(jax.make_jaxpr(mapped)(np.ones((4, 3), np.float32)))


DIVERGING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a branch by rank": lambda x: lax.cond(rank() == 0, twice, lambda x: x, x),
    "a branch by rows": lambda x: lax.cond(x.sum() > 0, twice, lambda x: x, x),
    "a branch in a loop, by what is carried": lambda x: lax.fori_loop(
        0, 3, lambda i, c: (lax.cond(c[1] > 0, twice, lambda x: x, c[0]), c[0].sum()), (x, jnp.float32(0))
    )[0],
    "a loop by rows": lambda x: lax.while_loop(lambda x: x.sum() < 9, twice, x),
    "a loop's own condition": lambda x: lax.while_loop(lambda x: total(x.sum()) < x.max(), lambda x: x + 1, x),
    "a branch of a branch": lambda x: lax.cond(
        rank() == 0, lambda x: lax.cond(total(x.sum(), "b") > 0, twice, lambda x: x, x), lambda x: x, x
    ),
    "branches that send in another order": lambda x: lax.cond(
        rank() == 0, lambda x: total(x) + total(x[0]), lambda x: total(x[0]) + total(x), x
    ),
    "a solver's loop by rows": lambda x: solved(x, lambda x: lax.while_loop(lambda x: x.sum() < 9, twice, x)),
    "both over the mesh": lambda x: lax.cond(rank("b") == 0, lambda x: total(x, ("a", "b")), lambda x: x, x),
}
TOGETHER: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a branch by a sum over ranks": lambda x: lax.cond(total(x.sum()) > 0, twice, lambda x: x, x),
    "a branch of ranks of the other axis": lambda x: lax.cond(rank("b") == 0, twice, lambda x: x, x),
    "rows that are not spread over the axis": lambda x: lax.cond(x.sum() > 0, lambda x: total(x, "b"), lambda x: x, x),
    "branches that send the same": lambda x: lax.cond(rank() == 0, twice, lambda x: total(2 * x), x),
    "a loop as long on all": lambda x: lax.while_loop(lambda x: total(x.sum()) < 9, twice, x),
    "a value that stood beside others": lambda x: lax.cond(
        lax.optimization_barrier((x, jnp.float32(1)))[1] > 0, twice, lambda x: x, x
    ),
    "a solver": lambda x: solved(x, twice),
    "beside a branch": lambda x: total(lax.cond(rank() == 0, jnp.sin, jnp.cos, x)),
}


@pytest.mark.parametrize("fun", DIVERGING.values(), ids=DIVERGING)
def test_where_ranks_part_no_collective_may_stand(fun: Callable[[jax.Array], jax.Array]) -> None:
    (finding, *_) = check(fun)
    assert "all-reduce over a" in finding
    assert "test_divergence.py" in finding


@pytest.mark.parametrize("fun", TOGETHER.values(), ids=TOGETHER)
def test_where_they_go_together_it_may(fun: Callable[[jax.Array], jax.Array]) -> None:
    assert check(fun) == []


# -- steps -------------------------------------------------------------------------------------------------------------


def make_step(name: str, strategy: str, num_devices: int = 8) -> Any:
    model = expert_cells.built(name)
    return jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[:num_devices])


def test_rounds_are_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that needs fewer rounds would leave the others waiting."""
    monkeypatch.setattr(rounds.lax, "pmax", lambda x, axis: x)
    rounds.rounds.cache_clear()
    with pytest.raises(ValueError, match="all-to-all over expert, where ranks of expert diverge"):
        make_step("one_expert", "expert=4", 4).trace(expert_cells.batch_of())
    rounds.rounds.cache_clear()


def test_messages_within_a_pipelines_operations_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Slots._loop

    def loop_with_messages(self: Any, name: str, does_run: Any, fun: Any, carry: Any) -> Any:
        send = lambda tree: jax.tree.map(lambda x: collectives.shift(x, "pipe", 1), tree)
        return loop(self, name, does_run, lambda *args: send(fun(*args)), carry)

    monkeypatch.setattr(Slots, "_loop", loop_with_messages)
    with pytest.raises(ValueError, match="collective-permute over pipe, where ranks of pipe diverge"):
        make_step("einsum", "pipe=2,expert=2,microbatches=2,schedule=zb-h1", 4).trace(expert_cells.batch_of())


def test_a_condition_on_rows_exchanges_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks waited for those whose rows made the other choice, until XLA ended the process."""
    step = make_step("skipped", "expert=2,fsdp=2", 4)
    assert not_reached(step.trace(expert_cells.batch_of())) == []
    assert any("cond at " in place for place in step.traced(expert_cells.batch_of()).notes.experts_gathered)
    monkeypatch.setattr(ExpertLocaliser, "is_equal_on_ranks", lambda self, x: True)
    with pytest.raises(ValueError, match="all-to-all over expert, where ranks of expert diverge"):
        make_step("skipped", "expert=2,fsdp=2", 4).trace(expert_cells.batch_of())


def test_a_step_that_would_hang_is_refused() -> None:
    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        y = batch["x"] @ params["w"]
        centre = lambda y: y - jp.all_rows(y).mean(axis=0)
        return jnp.square(jax.lax.cond(y[0, 0] > 0, centre, lambda y: y, y)).mean()

    model = jp.Model(init=lambda key: {"w": jnp.ones((4, 4))}, loss=loss, rows="independent")
    step = jp.make_train_step(model, optax.sgd(0.1), "ddp")
    state, batch = step.init(jax.random.key(0)), {"x": np.ones((8, 4), np.float32)}
    for use in (step, step.evaluate, step.value_and_grad):
        with pytest.raises(ValueError, match=r"(?s)hang.*all-gather over data.*test_divergence\.py.*jp\.all_rows"):
            use(state, batch)


@pytest.mark.battery
@pytest.mark.parametrize("mesh", ["pipe=2,tensor=2,fsdp=2,microbatches=4", "pipe=4,data=2,microbatches=4"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v,chunks=2", "1f1b"])
def test_cut_stages(mesh: str, schedule: str) -> None:
    """Includes `tensor`, which a step leaves out: no condition of this model lies in a buffer that stages share."""
    model = named("llama-tiny", vocab=32, dim=16, layers=8, heads=2, kv_heads=2, ffn=32).model
    step = jp.make_train_step(model, optax.sgd(0.1), f"{mesh},schedule={schedule},stages=cut")
    assert not_reached(step.trace({"tokens": np.zeros((16, 9), np.int32)})) == []
