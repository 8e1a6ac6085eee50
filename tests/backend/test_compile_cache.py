"""Each host caches the programs compiled for GPUs and TPUs, so that a resumed run compiles nothing.

CPUs stand for GPUs here: a program of one device, without collectives, can be cached on them too.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest

import jaxpar as jp
from jaxpar.backend import compile_cache
from jaxpar.backend.compile_cache import folder, keep_compiled

_RUN = """
import json, sys
from types import SimpleNamespace
import jax, optax
import jaxpar as jp
from jaxpar.backend.compile_cache import keep_compiled
out = sys.argv[1]
counts = {"requests": 0, "hits": 0}
names = {"/jax/compilation_cache/compile_requests_use_cache": "requests", "/jax/compilation_cache/cache_hits": "hits"}
def listen(event, **_):
    if event in names:
        counts[names[event]] += 1
jax.monitoring.register_event_listener(listen)
gpu = SimpleNamespace(platform="gpu", process_index=0, client=None)
keep_compiled(gpu)
# The first process of another host, in which jax itself would not write.
from jax._src import compiler, distributed
from jaxpar.backend import compile_cache
compiler._cache_write = compile_cache._write
distributed.global_state.process_id = 1
init = lambda key: {"w": jax.random.normal(key, (8, 8))}
model = jp.Model(init=init, loss=lambda params, batch, key: ((batch @ params["w"]) ** 2).mean())
data = [jax.numpy.ones((4, 8))] * 6
for steps in map(int, sys.argv[2:]):
    counts.update(requests=0, hits=0)
    loop = jp.Loop(steps=steps, out=out, resume=True, quiet=True)
    jp.Trainer(model, optax.adamw(0.1), data, "single", loop).run()
    print("COUNTS", json.dumps(counts))
    jax.clear_caches()
"""


def test_a_step_keeps_what_is_compiled_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cached_devices: list[Any] = []
    monkeypatch.setattr("jaxpar.make.keep_compiled", cached_devices.append)
    model = jp.Model(lambda key: {"w": jax.numpy.ones(8)}, lambda params, batch, key: (batch * params["w"]).mean())
    jp.make_train_step(model, optax.sgd(0.1), "fsdp", mesh=jax.devices()[2:4])
    assert cached_devices == [jax.devices()[2]]


def run(tmp_path: Path, *steps: str) -> list[dict[str, int]]:
    """Run to these steps, in one process; return for each the numbers of requests to the cache and of hits."""
    command = [sys.executable, "-c", _RUN, str(tmp_path / "out"), *steps]
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "1", "XDG_CACHE_HOME": str(tmp_path / "caches")}
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert process.returncode == 0, process.stderr
    assert "cache" not in process.stderr  # JAX warns there if it cannot write
    lines = [line for line in process.stdout.splitlines() if line.startswith("COUNTS")]
    return [json.loads(line.removeprefix("COUNTS")) for line in lines]


@pytest.mark.slow
def test_a_resumed_run_compiles_nothing(tmp_path: Path) -> None:
    """Compiling a step of Llama-8B takes minutes, and jax itself lets only one of all hosts' processes write."""
    (first,) = run(tmp_path, "2")
    assert first["hits"] == 0
    resumed, resumed_again = run(tmp_path, "4", "6")
    assert resumed["hits"] >= first["requests"] - 1  # all except the program of the initial values
    # The first resume has cached the program that puts a checkpoint on devices, too.
    assert resumed_again["hits"] == resumed_again["requests"] > 0


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Replace jax's config; return the updates to it, and under "config" the replacement."""
    updates: dict[str, Any] = {}
    replacement = SimpleNamespace(
        jax_compilation_cache_dir=None, jax_enable_compilation_cache=True, update=updates.__setitem__
    )
    monkeypatch.setattr(compile_cache, "jax", SimpleNamespace(**{**vars(jax), "config": replacement}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    updates["config"] = replacement
    return updates


def device(platform: str = "gpu") -> Any:
    return SimpleNamespace(platform=platform, process_index=0, client=None)


def test_where_it_is_kept(config: dict[str, Any], tmp_path: Path) -> None:
    jax_config = config.pop("config")
    keep_compiled(device("cpu"))
    keep_compiled(jax.devices()[0])
    assert not config
    jax_config.jax_compilation_cache_dir = "/of/the/user"
    keep_compiled(device())
    jax_config.jax_compilation_cache_dir, jax_config.jax_enable_compilation_cache = None, False
    keep_compiled(device("tpu"))
    assert not config
    jax_config.jax_enable_compilation_cache = True
    keep_compiled(device("tpu"))
    place = folder()
    assert place.name == socket.gethostname()  # hosts may share the folder above, but have different processors
    assert config == {"jax_compilation_cache_dir": str(place), "jax_persistent_cache_min_compile_time_secs": 0.0}
    assert place.is_relative_to(tmp_path)
    assert place.stat().st_mode & 0o077 == 0  # others could make us run any program


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o755, 0o700, 0o1777])
def test_a_folder_that_exists_is_made_private(mode: int, config: dict[str, Any], tmp_path: Path) -> None:
    """An existing folder once kept its mode, such as 777, and programs that others had put there were run."""
    config.pop("config")
    place = folder()
    place.mkdir(parents=True)
    (place / "program-cache").write_text("of whom?")
    place.parent.parent.chmod(0o777)
    place.chmod(mode)
    says = rf"others could write to {place} \(mode {mode:o}\): the programs in it are removed"
    with pytest.warns(UserWarning, match=says) if mode & 0o022 else contextlib.nullcontext():
        keep_compiled(device())
    assert place.stat().st_mode & 0o7777 == 0o700
    assert place.parent.parent.stat().st_mode & 0o022 == 0  # others could replace the cache
    assert [path.name for path in place.iterdir()] == ([] if mode & 0o022 else ["program-cache"])
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert config["jax_compilation_cache_dir"] == str(place)


def test_a_folder_of_others_is_unused(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.pop("config")
    folder().mkdir(parents=True)
    other_user = os.geteuid() + 1
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: other_user)
        says = r"jaxpar: it belongs to another user, \d+; compiled programs are not cached. JAX"
        with pytest.warns(UserWarning, match=says):
            keep_compiled(device())
    (elsewhere := tmp_path / "elsewhere").mkdir()
    elsewhere.chmod(0o777)
    folder().rmdir()
    folder().symlink_to(elsewhere)
    says = r"others can write to .*elsewhere, to which it is a link; compiled programs are no"
    with pytest.warns(UserWarning, match=says):
        keep_compiled(device())
    assert not config
    # Once the link leads to a private folder, it is used.
    elsewhere.chmod(0o700)
    keep_compiled(device())
    assert config["jax_compilation_cache_dir"] == str(folder())


def test_what_cannot_be_made_is_told(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    config.pop("config")
    says = r"Not a directory; compiled programs are not cached. JAX_COMPILATION_CACHE_DIR="
    with pytest.warns(UserWarning, match=says):
        keep_compiled(device())
    assert not config
