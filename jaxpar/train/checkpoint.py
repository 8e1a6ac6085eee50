"""Checkpoints of a training run: Orbax writes them, and beside every state what is needed to put it into any layout.

A checkpoint is a folder named by its step, written under another name and renamed when complete: what a killed process
leaves half-written is no checkpoint. `state` in it holds the arrays as the layout stores them, by their path; `about`
their logical and stored shapes, specs and dtypes, the strategy, the mesh, and what the run says of itself.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..layout.layout import is_stored
from ..layout.state import State
from ..model.paths import name_of
from ..step.core import Step
from ..strategy import ROWS, Strategy
from ..text import did_you_mean

_VERSION = 1  # of what `about` holds


class Checkpoints:
    """The checkpoints of one run, in a folder. A context manager: leaving it waits for what is being written.

    Args:
      folder: made if need be. With several hosts it must be one that all of them see.
      step: whose states they are.
      about: what else makes the run what it is (seed, sizes, ...), as JSON; another run is not resumed.
      keep: how many are kept, the last ones.
    """

    def __init__(self, folder: Path | str, step: Step, about: Mapping[str, Any], keep: int = 2):
        import orbax.checkpoint as orbax  # 0.4 s, and only who trains with checkpoints needs it

        self.step, self.folder, self._orbax = step, Path(folder).absolute(), orbax
        about_all = {"version": _VERSION, "run": dict(about), **layout_of(step)}
        self.about = json.loads(json.dumps(about_all))  # as it is read back: lists for tuples
        self.folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            # Orbax would do it in a thread that `close` does not wait for, and that dies loudly with the process.
            for unfinished in self.folder.glob(f"*{orbax.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(unfinished)
        options = orbax.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = orbax.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The step of the last complete checkpoint, None without any."""
        return self._manager.latest_step()

    def save(self, number: int, state: State) -> None:
        """Writes the state after step `number`, in the background; the state may be donated at once."""
        args = self._orbax.args
        if self.latest != number:
            parts = {"state": args.StandardSave(_raw(state)), "about": args.JsonSave(self.about)}
            self._manager.save(number, args=args.Composite(**parts))

    def restore(self) -> State:
        """The last complete state, as the step's layout stores it.

        Raises ValueError where there is none, and where it belongs to another run, model, optimizer or layout, naming
        what differs.
        """
        args, number = self._orbax.args, self.latest
        if number is None:
            raise ValueError(f"{self.folder} holds no complete checkpoint; start the run anew")
        about = self._read(number, about=args.JsonRestore())
        check(about, self.about, f"{self.folder / str(number)}")
        template, implementations = _template(self.step)
        restored = self._read(number, state=args.StandardRestore(template))
        leaves, tree = jax.tree_util.tree_flatten_with_path(self.step.abstract_state())
        arrays = [restored[name_of(path)] for path, _ in leaves]
        kinds = [implementations.get(name_of(path)) for path, _ in leaves]
        wrapped = [
            x if kind is None else jax.random.wrap_key_data(x, impl=kind) for x, kind in zip(arrays, kinds, strict=True)
        ]
        return jax.tree.unflatten(tree, wrapped)

    def _read(self, number: int, **item: Any) -> Any:
        """One item of a checkpoint. Raises ValueError where a file of it is missing or damaged."""
        (name,) = item
        try:
            return self._manager.restore(number, args=self._orbax.args.Composite(**item))[name]
        except (ValueError, KeyError, OSError) as error:  # whatever Orbax, tensorstore and JSON say of their files
            others = [step for step in self._manager.all_steps() if step != number]
            before = f"remove that folder to go on from step {max(others)}" if others else "start a new run"
            raise ValueError(
                f"{self.folder / str(number)} cannot be read, its {name} is damaged or incomplete; {before} "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            ) from error


def layout_of(step: Step) -> dict[str, Any]:
    """The layout of a step's state as JSON: strategy, mesh sizes, and for every array of the state its logical shape
    (without padding), its stored shape, its spec and its dtype.
    """
    template, _ = _template(step)
    logical: dict[str, Any] = {f"params/{leaf.path}": leaf.logical for leaf in step.layout.leaves}
    logical |= {
        f"optimizer/{name_of(path)}": place.leaf.logical
        for path, place in jax.tree_util.tree_leaves_with_path(step.layout.optimizer, is_leaf=is_stored)
        if place.leaf is not None
    }
    arrays = {
        name: {
            "shape": list(logical.get(name, x.shape)),
            "stored": list(x.shape),
            "spec": list(x.sharding.spec),
            "dtype": str(x.dtype),
        }
        for name, x in template.items()
    }
    sizes = {axis: size for axis, size in step.mesh.shape.items() if size > 1}
    return {"strategy": str(exact(step)), "mesh": sizes, "arrays": arrays}


def exact(step: Step) -> Strategy:
    """The strategy of a step with the sizes that its axes have, where it says -1 or "hosts"."""
    sizes = {axis: step.mesh.shape[axis] for axis in ROWS}
    return step.strategy if step.strategy.single else dataclasses.replace(step.strategy, **sizes)


def check(saved: Mapping[str, Any], here: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless a checkpoint `saved` as its `about` says fits a run that would write `here`."""
    if saved.get("version") != here["version"]:
        raise ValueError(
            f"{where} was written in form {saved.get('version')}, this jaxpar reads {here['version']}; "
            "resume with the version of jaxpar that wrote it"
        )
    run, now = saved["run"], here["run"]
    if differing := [name for name in (run | now) if run.get(name) != now.get(name)]:
        list_ = ", ".join(f"{name} {run.get(name)!r} there and {now.get(name)!r} here" for name in differing)
        raise ValueError(f"{where} is of another run: {list_}; resume with the values there, or start a new run")
    shapes = [{name: (x["shape"], x["dtype"]) for name, x in about["arrays"].items()} for about in (saved, here)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{where} is of another model, optimizer or precision: {_difference(*shapes)}; "
            "resume with what it was trained with, or start a new run"
        )
    if saved["arrays"] != here["arrays"] or saved["mesh"] != here["mesh"]:
        raise ValueError(
            f"{where} has the layout of {saved['strategy']} (mesh {_sizes(saved['mesh'])}), and this run that of "
            f"{here['strategy']} (mesh {_sizes(here['mesh'])}); resume with strategy {saved['strategy']!r} on as many "
            "devices, or start a new run with step.init(key, params=...)"
        )


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first array by which two tables differ."""
    describe = lambda x: f"{x[1]}{x[0]}"
    for name in there:
        if name not in here:
            return f"{name} is there and not here{did_you_mean(name, here)}"
        if there[name] != here[name]:
            return f"{name} is {describe(there[name])} there and {describe(here[name])} here"
    return f"{next(name for name in here if name not in there)} is here and not there"


def _sizes(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items()) or "of one device"


def _raw(state: State) -> dict[str, jax.Array]:
    """The arrays of a state by their path; of keys, their data."""
    named = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
    return {name: jax.random.key_data(x) if _is_key(x) else x for name, x in named.items()}


def _template(step: Step) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Any]]:
    """`_raw` of the step's state, as shapes with shardings, and the implementations of its keys by their path."""
    state = step.abstract_state()
    implementations: dict[str, Any] = {}

    def note(state: State) -> dict[str, jax.Array]:
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            if _is_key(x):
                implementations[name_of(path)] = jax.random.key_impl(x)
        return _raw(state)

    raw = jax.eval_shape(note, state)
    # A server's state lives on the layout's mesh of one device, whatever devices its replicas have.
    specs = {name_of(path): x.sharding.spec for path, x in jax.tree_util.tree_leaves_with_path(state)}
    place = lambda name: step.layout.sharding(specs.get(name, PartitionSpec()))
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(name)) for name, x in raw.items()
    }, implementations


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
