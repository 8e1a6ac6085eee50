"""What a checkpoint says of itself, in `about.json`: its arrays, the run, where in the data it was."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..axes import ROWS
from ..buckets import Place
from ..step.core import Step
from ..strategy import Strategy
from ..text import did_you_mean
from .arrays import Array
from .files import ABOUT, Damaged, dtype_of, mapping, number, read_json, sequence

VERSION = 2  # of the form; the first was Orbax's own, in the layout of its run


@dataclass(frozen=True)
class About:
    """What a checkpoint says of itself.

    Attributes:
      step: steps taken.
      hosts: how many wrote it.
      strategy: of the run that wrote it, for people; any other reads it.
      arrays: shape and dtype by name.
      kinds: the implementation of keys, by name.
      run: what identifies the run, such as seed and rows.
      data: where in the data it was, as the data say it.
    """

    step: int
    hosts: int
    strategy: str
    arrays: dict[str, tuple[tuple[int, ...], np.dtype]]
    kinds: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """As it is written."""
        arrays = {name: {"shape": list(shape), "dtype": dtype.name} for name, (shape, dtype) in self.arrays.items()}
        versions = {"version": VERSION, "jax": jax.__version__}
        return json.loads(json.dumps({**versions, **vars(self), "arrays": arrays}))  # lists for tuples

    @classmethod
    def read(cls, folder: Place) -> About:
        """As it was written. Raises Damaged where it is not, ValueError where the form is another."""
        if not (folder / ABOUT).is_file() and ((folder / "about").is_dir() or (folder / "_METADATA").exists()):
            raise ValueError(f"{folder} was written by another program or an older jaxpar; read it with that")
        content = mapping(read_json(folder / ABOUT), ABOUT)
        if content.get("version") != VERSION:
            raise ValueError(
                f"{folder} was written in form {str(content.get('version'))[:20]}, this jaxpar reads {VERSION}; "
                "use the version of jaxpar that wrote it"
            )
        arrays = {}
        for name, entry in mapping(content.get("arrays"), f"{ABOUT}: arrays").items():
            entry = mapping(entry, f"{ABOUT}: {name}")
            shape = tuple(number(n, f"{ABOUT}: a dim of {name}") for n in sequence(entry.get("shape"), ABOUT))
            arrays[name] = shape, dtype_of(entry.get("dtype"), f"{ABOUT}: {name}")
        strategy = content.get("strategy")
        kinds = mapping(content.get("kinds"), f"{ABOUT}: kinds")
        if not all(isinstance(text, str) for text in (strategy, *kinds.values())):
            raise Damaged(f"{ABOUT}: strategy and kinds of keys are no text")
        return cls(
            number(content.get("step"), f"{ABOUT}: step"),
            number(content.get("hosts"), f"{ABOUT}: hosts"),
            str(strategy),
            arrays,
            kinds,
            mapping(content.get("run"), f"{ABOUT}: run"),
            mapping(content.get("data"), f"{ABOUT}: data"),
        )


def about_of(
    step: Step, arrays: Sequence[Array], number: int, run: Mapping[str, Any], data: Mapping[str, Any]
) -> About:
    """What a checkpoint of these arrays says of itself."""
    saved = [(name, array) for array in arrays if not array.derived for name in array.names]
    shapes = {name: (array.logical, array.dtype) for name, array in saved}
    kinds = {name: array.kind for name, array in saved if array.kind is not None}
    return About(number, jax.process_count(), str(exact(step)), shapes, kinds, dict(run), dict(data))


def exact(step: Step) -> Strategy:
    """The strategy of a step with the sizes that its axes have, where it says -1 or "hosts"."""
    sizes = {axis: step.mesh.shape[axis] for axis in ROWS}
    return step.strategy if step.strategy.single else dataclasses.replace(step.strategy, **sizes)


def same_run(saved: Mapping[str, Any], here: Mapping[str, Any], where: Place, changed: Collection[str] = ()) -> None:
    """Raise ValueError unless both are about one run, but for what may have `changed`, naming what differs."""
    names = [name for name in {**saved, **here} if name not in changed]
    if differing := [name for name in names if saved.get(name) != here.get(name)]:
        listed = ", ".join(f"{name} {saved.get(name)!r} there and {here.get(name)!r} here" for name in differing)
        hint = ", with changed_data to go on with other data" if "data" in differing else ""
        raise ValueError(f"{where} is of another run: {listed}; resume with the values there{hint}, or start a new run")


def fits(saved: About, wanted: Mapping[str, Array], where: Place, more: Collection[str]) -> None:
    """Raise ValueError unless a checkpoint has the arrays `wanted` by name, and no others but `more`, naming the first
    that differs. No dtype is cast, but for frozen parameters, which are stored as the loss sees them.
    """
    hint = "resume with what it was trained with, take its weights alone with weights_only=True, or start a new run"
    for name, array in wanted.items():
        if name not in saved.arrays:
            near = did_you_mean(name, saved.arrays)
            raise ValueError(f"{where} is of another model or optimizer: {name} is here and not there{near}; {hint}")
        here, there = (array.logical, array.dtype), saved.arrays[name]
        floats = array.frozen and all(jnp.issubdtype(dtype, jnp.floating) for _, dtype in (here, there))
        if floats and here[0] == there[0]:
            continue
        if here != there or saved.kinds.get(name) != array.kind:
            texts = [f"{dtype.name}{list(shape)}" for shape, dtype in (there, here)]
            if saved.kinds.get(name) != array.kind:
                texts = [f"a key of {saved.kinds.get(name)}", f"one of {array.kind}"]
            if there[0] == here[0]:
                hint = f"nothing is cast in silence: {hint}"
            says = f"{name} is {texts[0]} there and {texts[1]} here"
            raise ValueError(f"{where} is of another model, optimizer or precision: {says}; {hint}")
    if others := [name for name in saved.arrays if name not in wanted and name not in more]:
        near = did_you_mean(others[0], wanted)
        raise ValueError(f"{where} is of another model or optimizer: {others[0]} is there and not here{near}; {hint}")
