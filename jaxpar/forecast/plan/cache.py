"""What a plan has compiled, as JSON files: numbers, never programs, and a hash of them.

A file's name is the hash of all that its numbers depend on: the jaxprs of the loss and of the optimizer's update, the
shapes, the strategy, the target with its hardware, the compiler's flags, the versions, and jaxpar's own source.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jaxlib

from ...backend.files import json_of, local
from ...hardware.devices import Target
from ...model.model import Model
from ...model.paths import name_of

_FLAGS = ("jax_disable_most_optimizations", "jax_default_matmul_precision", "jax_enable_x64")


def folder(given: str | os.PathLike[str] | None) -> Path:
    """Where the files are: as given, else `JAXPAR_CACHE`, else jaxpar/plan in the user's folder for caches."""
    if given is not None:
        return local(given, "cache")
    if named := os.environ.get("JAXPAR_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxpar" / "plan"


class PlanCache:
    """Numbers by what they depend on. `about` is what all of a plan's have in common.

    Raises ValueError where the folder cannot be made or written to, before anything is compiled for it.
    """

    def __init__(self, path: Path, about: str) -> None:
        self.path, self.about = path, about
        try:
            path.mkdir(parents=True, exist_ok=True)
            why = "" if os.access(path, os.W_OK | os.X_OK) else "it may not be written to"
        except OSError as error:
            why = str(error.strerror)
        if why:
            raise ValueError(f"{path} cannot be the folder of what was compiled before: {why}; name another one by "
                             "cache= or JAXPAR_CACHE, or in Python cache=False")  # fmt: skip

    def get(self, *what: str) -> Any:
        """What was put, or None: also where the file is not whole, or not what was put."""
        try:
            found = json_of(self._file(what))
        except (OSError, ValueError):  # not there, or no file, or damaged
            return None
        value = found.get("value")
        return value if found.get("hash") == _hash(json.dumps(value)) else None

    def put(self, value: Any, *what: str) -> None:
        """Keeps `value`. Processes may put at the same time: a file appears whole."""
        file = self._file(what)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"hash": _hash(json.dumps(value)), "value": value}))
        part.replace(file)

    def _file(self, what: tuple[str, ...]) -> Path:
        return self.path / f"{_hash(self.about, *what)}.json"


def about(model: Model, optimizer: Any, batch: Any, target: Target, rules: Any, trainable: Any = None) -> str:
    """All that the numbers of a plan depend on, but for the strategy."""
    params, variables = jax.eval_shape(model.create, jax.random.key(0))
    key = jax.eval_shape(lambda: jax.random.key(0))
    loss = jax.make_jaxpr(model.call)(params, variables, batch, key)
    state = jax.eval_shape(optimizer.init, params)
    update = jax.make_jaxpr(optimizer.update)(params, state, params)
    hardware = {k: str(v) for k, v in dataclasses.asdict(target.hardware).items()}
    place = (target.name, target.hosts, target.per_host, len(target.devices), str(target.devices[0].device_kind))
    versions = (jax.__version__, jaxlib.__version__, _source(), os.environ.get("XLA_FLAGS", ""))
    flags = [f"{name}={jax.config.values[name]}" for name in _FLAGS]
    keys = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    paths = [(jax.tree_util.keystr(path), trainable is None or bool(trainable(name_of(path)))) for path in keys]
    split = str((rules, model.rules, model.names()))
    programs = [_plain(str(jaxpr)) for jaxpr in (loss, update)]
    return _hash(*programs, str(paths), str(batch), _plain(split), str(hardware), str(place), *versions, *flags)


def _plain(text: str) -> str:
    """Without addresses of objects, which differ in every process."""
    return re.sub(r"0x[0-9a-f]+", "", text)


@functools.cache
def _source() -> str:
    root = Path(__file__).parents[2]
    return _hash(*(file.read_text() for file in sorted(root.rglob("*.py"))))


def _hash(*parts: str) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() + b"\0")
    return found.hexdigest()[:32]
