"""What is compiled for GPUs and TPUs is kept by each host, so that a resumed run compiles nothing. CPUs stand for them:
a program of one device, without collectives, can be kept there too.
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
# The first process of another host, to which jax leaves no writing.
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
    kept: list[Any] = []
    monkeypatch.setattr("jaxpar.make.keep_compiled", kept.append)
    model = jp.Model(
        init=lambda key: {"w": jax.numpy.ones(8)}, loss=lambda params, batch, key: (batch * params["w"]).mean()
    )
    jp.make_train_step(model, optax.sgd(0.1), "fsdp", mesh=jax.devices()[2:4])
    assert kept == [jax.devices()[2]]


def run(tmp_path: Path, *words: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *words],
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "1", "XDG_CACHE_HOME": str(tmp_path / "caches")},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert "cache" not in done.stderr  # as where JAX could not write
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("COUNTS")).removeprefix("COUNTS"))


@pytest.mark.slow
def test_a_resumed_run_compiles_nothing(tmp_path: Path) -> None:
    """A step of Llama-8B takes minutes to compile; and of several hosts' processes, jax lets one write."""
    out = str(tmp_path / "out")
    first = run(tmp_path, out, "2")
    assert first["hits"] == 0
    resumed = run(tmp_path, out, "4", "resume")
    assert resumed["hits"] >= first["requests"] - 1  # all but the initial values
    again = run(tmp_path, out, "6", "resume")  # what puts a checkpoint on devices too
    assert again["hits"] == again["requests"] > 0


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What is set; jax's own stays as it is."""
    found: dict[str, Any] = {}
    own = SimpleNamespace(jax_compilation_cache_dir=None, jax_enable_compilation_cache=True, update=found.__setitem__)
    monkeypatch.setattr(compile_cache, "jax", SimpleNamespace(**{**vars(jax), "config": own}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found["own"] = own
    return found


def device(platform: str = "gpu") -> Any:
    return SimpleNamespace(platform=platform, process_index=0, client=None)


def test_where_it_is_kept(config: dict[str, Any], tmp_path: Path) -> None:
    own = config.pop("own")
    keep_compiled(device("cpu"))
    keep_compiled(jax.devices()[0])
    assert not config
    own.jax_compilation_cache_dir = "/of/the/user"
    keep_compiled(device())
    own.jax_compilation_cache_dir, own.jax_enable_compilation_cache = None, False
    keep_compiled(device("tpu"))
    assert not config
    own.jax_enable_compilation_cache = True
    keep_compiled(device("tpu"))
    place = folder()
    assert place.name == socket.gethostname()  # hosts may share the folder, and have other processors
    assert config == {"jax_compilation_cache_dir": str(place), "jax_persistent_cache_min_compile_time_secs": 0.0}
    assert place.is_relative_to(tmp_path)
    assert place.stat().st_mode & 0o077 == 0  # who can write there can have us run what they like


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o755, 0o700, 0o1777])
def test_a_folder_that_exists_is_made_private(mode: int, config: dict[str, Any], tmp_path: Path) -> None:
    """Its mode was that of whoever made it first: 777 stayed, and what anybody put there was run."""
    config.pop("own")
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
    assert place.parent.parent.stat().st_mode & 0o022 == 0  # who can write there can put another in its place
    assert [path.name for path in place.iterdir()] == ([] if mode & 0o022 else ["program-cache"])
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert config["jax_compilation_cache_dir"] == str(place)


def test_a_folder_of_another_user_is_not_used(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.pop("own")
    folder().mkdir(parents=True)
    other = os.geteuid() + 1
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: other)
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
    # The advice, or what follows from it: a folder of one's own.
    elsewhere.chmod(0o700)
    keep_compiled(device())
    assert config["jax_compilation_cache_dir"] == str(folder())


def test_a_folder_that_cannot_be_made_is_told(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    config.pop("own")
    with pytest.warns(
        UserWarning, match=r"Not a directory; compiled programs are not cached. JAX_COMPILATION_CACHE_DIR="
    ):
        keep_compiled(device())
    assert not config
