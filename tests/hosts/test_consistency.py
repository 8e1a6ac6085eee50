"""The comparison before the first step, among threads of this process, with a dict as the coordinator's table."""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import Table

from jaxpar.hosts import consistency, ending
from jaxpar.hosts.environment import Place
from jaxpar.hosts.watchdog import Watch


def compare_in_threads(
    notes: Mapping[int, Any], texts: Mapping[int, str] | None = None, absent: int | None = None
) -> list[str]:
    """Compare the notes of several ranks, and return the error of each, "" for none. Rank `absent` never comes."""
    table, errors = Table(), ["never returned"] * len(notes)

    def compare(rank: int) -> None:
        ask: Callable[[int], str] = lambda rank: "its script has ended" if rank == absent else ""
        comparison = consistency.Comparison(table, Place("test", "a:1", len(notes), rank), "x/1", 300, ask)
        comparison.host = f"node{rank}"
        try:
            rank_texts = {"the program": texts[rank]} if texts else {}
            comparison("the options", notes[rank], rank_texts, "start all with the same")
            errors[rank] = ""
        except ValueError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=functools.partial(compare, rank)) for rank in notes if rank != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_what_differs_is_named_everywhere() -> None:
    """Other seeds trained on with exit 0; other strategies hung for minutes."""
    notes = {"seed": 0, "strategy": "fsdp"}
    assert compare_in_threads({0: notes, 1: notes, 2: notes}) == ["", "", ""]
    (error,) = {*compare_in_threads({0: notes, 1: {**notes, "seed": 1}, 2: {**notes, "seed": 1}, 3: notes})}
    assert error == (
        "the processes differ in the options: seed is 0 on rank 0 on node0 and 1 on rank 1 on node1, 2 on node2; "
        "start all with the same"
    )
    (error,) = {*compare_in_threads({0: notes, 1: {"seed": 0}})}
    assert "strategy is fsdp on rank 0 on node0 and not there on rank 1 on node1" in error


def test_of_programs_the_first_line_that_differs_is_shown() -> None:
    text, changed = "a = mul b 0.1\nc = add a 1", "a = mul b 0.2\nc = add a 1"
    assert compare_in_threads({0: {}, 1: {}}, {0: text, 1: text}) == ["", ""]
    (error,) = {*compare_in_threads({0: {}, 1: {}}, {0: text, 1: changed})}
    assert "the program is 'a = mul b 0.1' on rank 0 on node0 and 'a = mul b 0.2' on rank 1 on node1" in error
    (error,) = {*compare_in_threads({0: {}, 1: {}}, {0: text, 1: text + "\nd"})}
    assert "the program is 2 lines long on rank 0 on node0 and 3 on rank 1" in error


def test_who_never_comes_is_named() -> None:
    first, second, third = compare_in_threads({0: {}, 1: {}, 2: {}}, absent=2)
    assert (
        first
        == second
        == (
            "rank 2 will not compare the options with the others: its script has ended; let all processes run the same "
            "script, with batches of the same shapes"
        )
    )
    assert third == "never returned"


def test_who_has_gone_on_without_comparing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose batch has a known shape compares nothing, and the others waited for it."""
    watch = Watch(Table(), Place("test", "a:1", 2, 0))
    watch.beat.position = watch.peers[1].beat.position = 6
    monkeypatch.setattr(ending, "watch", lambda: watch)
    assert consistency._why_never(1) == ""
    watch.peers[1].beat.position = 7
    expected = "it last reported step 3 finished and step 4 begun, with a batch of shapes that it has trained on before"
    assert consistency._why_never(1) == expected
    watch.begin_run(0)  # a second run of the script, from which no beat of the other has come yet
    assert consistency._why_never(1) == ""


def test_programs_are_compared_as_text() -> None:
    def program(rate: float, shape: int, constant: Any) -> str:
        return consistency.program(jax.make_jaxpr(lambda x: x * rate + jnp.sum(constant))(jnp.ones(shape)))

    const = np.arange(300.0)
    first = program(0.1, 3, const)
    assert first == program(0.1, 3, const)
    assert len({first, program(0.2, 3, const), program(0.1, 4, const), program(0.1, 3, const[::-1].copy())}) == 4
    assert "0x7" not in consistency.program(jax.make_jaxpr(jax.nn.relu)(1.0))  # where a function lies in memory


def test_batches_are_compared_by_what_they_hold() -> None:
    batch = {"x": np.arange(6).reshape(2, 3), "n": np.float32(2)}
    assert consistency.shapes(batch) == "['n'] float32[], ['x'] int64[2, 3]"
    changed = [{**batch, "x": batch["x"].T.copy()}, {**batch, "x": batch["x"] + 1}, {"y": batch["x"], "n": batch["n"]}]
    assert len({consistency.digest(x) for x in [batch, *changed]}) == 4
    assert consistency.digest(jax.random.key(0)) != consistency.digest(jax.random.key(1))


def test_alone_nothing_is_compared() -> None:
    consistency.compare("the step", {"seed": 0})
