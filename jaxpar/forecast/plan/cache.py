"""Store what a plan has compiled as JSON files: numbers with a hash of them, never programs.

A file's name is the hash of everything that its numbers depend on: the jaxprs of the loss and of the optimizer's
update, the shapes, the strategy, the target with its hardware, the compiler's flags, the versions, and jaxpar's source.
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

from ...backend.files import json_of, local, user_cache
from ...hardware.devices import Target
from ...model.model import Model
from ...model.paths import name_of

_FLAGS = ("jax_disable_most_optimizations", "jax_default_matmul_precision", "jax_enable_x64")


def folder(path: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the files: `path`, else `JAXPAR_CACHE`, else jaxpar/plan in the user's cache folder."""
    if path is not None:
        return local(path, "cache")
    if from_environment := os.environ.get("JAXPAR_CACHE"):
        return Path(from_environment)
    return user_cache("plan")


class PlanCache:
    """A dictionary on disk: JSON values by keys of strings.

    Args:
      path: the folder, which is made if it does not exist.
      plan_key: the part of the key that all values of one plan share.

    Raises:
      ValueError: the folder cannot be made or written to. This comes before anything is compiled for the cache.
    """

    def __init__(self, path: Path, plan_key: str) -> None:
        self.path, self.plan_key = path, plan_key
        try:
            path.mkdir(parents=True, exist_ok=True)
            why = "" if os.access(path, os.W_OK | os.X_OK) else "it may not be written to"
        except OSError as error:
            why = str(error.strerror)
        if why:
            raise ValueError(f"{path} cannot be the folder of the plan cache: {why}; name another one by "
                             "cache= or JAXPAR_CACHE, or in Python cache=False")  # fmt: skip

    def get(self, *key: str) -> Any:
        """Return the value of a key; None if there is none, or if its file is damaged."""
        try:
            entry = json_of(self._file(key))
        except (OSError, ValueError):  # missing, unreadable, or no JSON
            return None
        value = entry.get("value")
        # JSON that is cut or edited may still parse. The hash tells.
        return value if entry.get("hash") == _hash(json.dumps(value)) else None

    def put(self, value: Any, *key: str) -> None:
        """Store a value. Several processes may store at the same time."""
        file = self._file(key)
        # Write to a file of this process and rename it, so that no reader sees half a file.
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"hash": _hash(json.dumps(value)), "value": value}))
        part.replace(file)

    def _file(self, key: tuple[str, ...]) -> Path:
        """Return the file of a key."""
        return self.path / f"{_hash(self.plan_key, *key)}.json"


def plan_key(model: Model, optimizer: Any, batch: Any, target: Target, rules: Any, trainable: Any = None) -> str:
    """Return a hash of everything that a plan's numbers depend on, except for the strategy. Arguments as for `plan`."""
    # 1. The programs of loss and update, as jaxprs: equal code gives equal text in every process.
    params, variables = jax.eval_shape(model.create, jax.random.key(0))
    rng_key = jax.eval_shape(lambda: jax.random.key(0))
    loss = jax.make_jaxpr(model.call)(params, variables, batch, rng_key)
    # The state's structure decides the update's program, so that the state need not be hashed itself.
    state = jax.eval_shape(optimizer.init, params)
    update = jax.make_jaxpr(optimizer.update)(params, state, params)

    # 2. The devices, the versions, and the flags of the compiler.
    hardware = {k: str(v) for k, v in dataclasses.asdict(target.hardware).items()}
    devices = (target.name, target.hosts, target.per_host, len(target.devices), str(target.devices[0].device_kind))
    versions = (jax.__version__, jaxlib.__version__, _source_hash(), os.environ.get("XLA_FLAGS", ""))
    flags = [f"{name}={jax.config.values[name]}" for name in _FLAGS]

    # 3. The names of parameters, which sharding rules match, and whether each is trained.
    key_paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    paths = [(jax.tree_util.keystr(path), trainable is None or bool(trainable(name_of(path)))) for path in key_paths]
    sharding_rules = str((rules, model.rules, model.names()))
    programs = [_without_addresses(str(jaxpr)) for jaxpr in (loss, update)]
    inputs = (str(paths), str(batch), _without_addresses(sharding_rules), str(hardware), str(devices))
    return _hash(*programs, *inputs, *versions, *flags)


def _without_addresses(text: str) -> str:
    """Return a text without the addresses of objects, which differ in every process."""
    return re.sub(r"0x[0-9a-f]+", "", text)


@functools.cache
def _source_hash() -> str:
    """Return a hash of jaxpar's source: a new version may make other programs of the same loss."""
    root = Path(__file__).parents[2]
    return _hash(*(file.read_text() for file in sorted(root.rglob("*.py"))))


def _hash(*parts: str) -> str:
    """Return the SHA-256 of some strings, as 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")  # NUL ends a part, so that ("ab", "c") and ("a", "bc") differ
    return digest.hexdigest()[:32]
