"""Each host caches the programs compiled for GPUs and TPUs, so that a resumed run compiles nothing.

CPUs stand for GPUs here: a program of one device, without collectives, can be cached on them too.
"""

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
out, steps, resume = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
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
jp.Trainer(model, optax.adamw(0.1), data, "single", jp.Loop(steps=steps, out=out, resume=resume, quiet=True)).run()
print("COUNTS", json.dumps(counts))
"""


def test_a_step_keeps_what_is_compiled_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cached_devices: list[Any] = []
    monkeypatch.setattr("jaxpar.make.keep_compiled", cached_devices.append)
    model = jp.Model(
        init=lambda key: {"w": jax.numpy.ones(8)}, loss=lambda params, batch, key: (batch * params["w"]).mean()
    )
    jp.make_train_step(model, optax.sgd(0.1), "fsdp", mesh=jax.devices()[2:4])
    assert cached_devices == [jax.devices()[2]]


def run(tmp_path: Path, *arguments: str) -> dict[str, int]:
    """Run `_RUN` in a process; return the numbers of requests to the cache and of hits."""
    process = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments],
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "1", "XDG_CACHE_HOME": str(tmp_path / "caches")},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert process.returncode == 0, process.stderr
    assert "cache" not in process.stderr  # JAX warns there if it cannot write
    return json.loads(next(x for x in process.stdout.splitlines() if x.startswith("COUNTS")).removeprefix("COUNTS"))


@pytest.mark.slow
def test_a_resumed_run_compiles_nothing(tmp_path: Path) -> None:
    """Compiling a step of Llama-8B takes minutes, and jax itself lets only one of all hosts' processes write."""
    out = str(tmp_path / "out")
    first = run(tmp_path, out, "2")
    assert first["hits"] == 0
    resumed = run(tmp_path, out, "4", "resume")
    assert resumed["hits"] >= first["requests"] - 1  # all except the program of the initial values
    # The first resume has cached the program that puts a checkpoint on devices, too.
    resumed_again = run(tmp_path, out, "6", "resume")
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
    if mode & 0o022:
        with pytest.warns(
            UserWarning, match=rf"others could write to {place} \(mode {mode:o}\): the programs in it are removed"
        ):
            keep_compiled(device())
    else:
        keep_compiled(device())
    assert place.stat().st_mode & 0o7777 == 0o700
    assert place.parent.parent.stat().st_mode & 0o022 == 0  # others could replace the cache
    assert [path.name for path in place.iterdir()] == ([] if mode & 0o022 else ["program-cache"])
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert config["jax_compilation_cache_dir"] == str(place)


def test_a_folder_of_another_user_is_not_used(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.pop("config")
    folder().mkdir(parents=True)
    other_user = os.geteuid() + 1
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: other_user)
        with pytest.warns(
            UserWarning, match=r"jaxpar: it belongs to another user, \d+; compiled programs are not cached. JAX"
        ):
            keep_compiled(device())
    (elsewhere := tmp_path / "elsewhere").mkdir()
    elsewhere.chmod(0o777)
    folder().rmdir()
    folder().symlink_to(elsewhere)
    with pytest.warns(
        UserWarning, match=r"others can write to .*elsewhere, to which it is a link; compiled programs are no"
    ):
        keep_compiled(device())
    assert not config
    # Once the link leads to a private folder, it is used.
    elsewhere.chmod(0o700)
    keep_compiled(device())
    assert config["jax_compilation_cache_dir"] == str(folder())


def test_a_folder_that_cannot_be_made_is_told(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    config.pop("config")
    with pytest.warns(
        UserWarning, match=r"Not a directory; compiled programs are not cached. JAX_COMPILATION_CACHE_DIR="
    ):
        keep_compiled(device())
    assert not config
