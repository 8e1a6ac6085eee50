"""The page of the radar says what experiments/radar.py stored, and that looks at every collective of a program."""

import copy
import json
import re

import jax
import jax.numpy as jnp
import pytest
import radar
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.hardware.compiled.kernels import Executable

RESULTS = json.loads(radar.STORED.read_text())


def test_the_page_says_what_is_stored() -> None:
    assert radar.PAGE.read_text() == radar.drawn(radar.PAGE.read_text(), RESULTS)


def test_no_compiler_drops_what_is_written() -> None:
    for version, rows in RESULTS.items():
        assert list(rows) == [case.strategy for case in radar.CASES], version
        for strategy, row in rows.items():
            assert not radar.missing(row), (version, strategy)
            assert all("all-reduce" in kind for kind in radar.besides(row)), (version, strategy)  # the norm
            assert sum(radar.besides(row).values()) < 100


def test_changes_are_named() -> None:
    (old, *_), name = RESULTS.values(), "fsdp=16"
    assert not list(radar.changes(old, copy.deepcopy(old)))
    new = copy.deepcopy(old)
    new[name]["bytes"]["reduce-scatter fsdp float32"][1] -= 8
    new[name]["temporaries"] *= 2
    (said,) = radar.changes(old, new)
    before = f"{old[name]['temporaries'] / 1e9:.3g}"
    assert said.startswith(f"`fsdp=16`: missing: nothing, now reduce-scatter fsdp float32 8 B; temporaries {before}")
    new[name]["bytes"]["reduce-scatter fsdp float32"][0] -= 8
    assert list(radar.changes(old, new)) == ["`fsdp=16`: the traced programs differ; compile it again with both"]


def test_a_dropped_collective_is_seen() -> None:
    """Also where another of the same size is left, over other devices."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))

    def both(x: jax.Array) -> jax.Array:
        y = lax.psum(x, "data")
        return (
            lax.psum(jnp.sin(y), "fsdp")
            + lax.ppermute(y, "fsdp", [(0, 1), (1, 2)]).sum()
            + lax.all_gather(y, "fsdp").sum()
        )

    run = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    x = jnp.ones((8, 3))
    written = list(radar.of_trace(jax.make_jaxpr(run)(x), mesh))
    text = run.lower(x).compile().as_text()
    made = list(radar.of_program(Executable(text, mesh)))
    assert [str(one) for one in written] == [
        "all-reduce data float32 96 B",
        "all-reduce fsdp float32 96 B",
        "collective-permute fsdp float32 96 B",
        "all-gather fsdp float32 384 B",
    ]
    assert set(made) == set(written)
    assert not radar.moved(written, written)
    assert radar.moved(written, [*written[1:], written[0]]) == 1
    elsewhere = re.sub(r"(= f32\[8,3\]\S* all-reduce\(.*replica_groups=)\S+", r"\1{{0,1,2,3},{4,5,6,7}},", text)
    assert set(written) - set(radar.of_program(Executable(elsewhere, mesh))) == {written[0]}


@pytest.mark.battery
@pytest.mark.cuda_compiler
def test_this_compiler_drops_none() -> None:
    for case in (one for one in radar.CASES if one.strategy in ("data=4096", "fsdp=16,microbatches=4")):
        assert not radar.missing(radar.look(case))
