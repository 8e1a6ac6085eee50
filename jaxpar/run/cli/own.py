"""What `--model` takes beside names: a function of one's own that makes a model, and a folder of Hugging Face's; and
what `--step` takes, a function that makes a step.
"""

import dataclasses
import functools
import importlib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ...backend.files import json_of, member
from ...data.streams import training
from ...model.batches import check_rows
from ...model.calls import check_call
from ...model.model import MAKERS, Model, Replicated
from ...model.nnx import from_nnx
from ...models import Named
from ...models.llama import Llama, loss
from ...models.llama.model import RULES
from ...models.llama.weights import LLAMA
from ...models.parts import text

# What may be changed of a model whose weights are given.
_FREE = ("lora", "lora_alpha", "dropout", "context")


@dataclass(frozen=True)
class Own:
    """What a user's function made: a model, and a batch of any number of rows, or data and what is held out."""

    model: Model
    first: Any
    held_out: Any = None

    @property
    def data(self) -> Any:
        """What a `Trainer` takes as data; None where there is a batch alone."""
        return self.first if is_data(self.first) else None

    @functools.cached_property
    def batch(self) -> Any:
        """A batch."""
        return self.first if self.data is None else next(training(self.data, 1, 0))

    def example(self, rows: int) -> Any:
        """The shapes of such a batch of `rows`."""

        def leaf(x: Any) -> Any:
            if isinstance(x, Replicated):
                return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), x)
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

        return jax.tree.map(leaf, self.batch, is_leaf=lambda x: isinstance(x, Replicated))


def is_function(given: str) -> bool:
    """Whether a model is named as `package.module:function`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", given) is not None


def is_folder(given: str) -> bool:
    """Whether a model is named as a folder, sizes to change behind it: what exists as one, or is written as a path."""
    return os.path.isdir(parted(given)[0]) or given.startswith((".", "/", "~"))


def parted(given: str) -> tuple[str, list[str]]:
    """A name or folder, and the sizes to change behind it: "./folder,lora=16" is "./folder" and "lora=16"."""
    name, *changes = [given] if os.path.isdir(given) else given.split(",")
    return name, changes


def path_of(given: str) -> Path:
    """The folder of a model that is named as one."""
    return Path(parted(given)[0]).expanduser()


def made_by(given: str, option: str, returns: str) -> Any:
    """What `package.module:function` returns, called without arguments; modules in the current folder are found too.

    Args:
      given: the function's name.
      option: of the command that names it.
      returns: what it should return, for the hint that says how to write it.

    Raises ValueError where there is no such function; what the module itself raises is its own.
    """
    module, _, name = given.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise ValueError(
            f"{option} {given}: there is no module {error.name!r}; run it in the folder that holds it, or install it"
        ) from error
    function = getattr(found, name, None)
    if not callable(function):
        raise ValueError(f"{option} {given}: {module} has no function {name!r}; write def {name}(): return {returns}")
    check_call(function, f"{option} {given}")
    return function()


def own_step(given: str) -> tuple[Any, ...]:
    """The function, jitted or not, that `package.module:function` returns, and its arguments.

    Raises ValueError as `made_by`, and where it does not return the two.
    """
    made = made_by(given, "--step", "step, (state, batch)") if is_function(given) else None
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple)):
        said = f"returned a {type(made).__name__}" if is_function(given) else "is no package.module:function"
        raise ValueError(
            f"--step {given} {said}; needs a function without arguments that returns (step, args): what jax.jit gives "
            "or takes, and a tuple of its arguments, arrays or jax.ShapeDtypeStruct with their shardings"
        )
    return made[0], *made[1]


def own(given: str) -> Own:
    """The model and the data that `package.module:function` returns.

    Raises ValueError as `made_by`, and where it does not return a `jp.Model` and a batch or data.
    """
    made = made_by(given, "--model", "model, data")
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], Model)):
        raise ValueError(
            f"--model {given} returned a {type(made).__name__}; needs (model, data) or (model, data, held_out): a "
            f"jp.Model, from {MAKERS}, and what jp.Trainer takes as data; "
            "to check, explain and plan, a batch of arrays or jax.ShapeDtypeStruct serves as well"
        )
    mine = Own(*made)
    if mine.data is None:
        check_rows(mine.first, 1, 1, 1)
    return mine


def is_data(given: Any) -> bool:
    """Whether it is data to train on, a function, a list, a loader, and no batch, a pytree of arrays."""
    if callable(given) or hasattr(given, "batches") or isinstance(given, list):
        return True
    return isinstance(given, Iterable) and not isinstance(given, dict | tuple) and not hasattr(given, "shape")


def folder(given: str, changes: dict[str, Any]) -> Named:
    """The Llama whose sizes the `config.json` of a folder says, but for `changes` which leave its weights what they
    are; these are not read: `llama.from_hf` does.
    """
    path = path_of(given)
    if not (path / "config.json").exists():
        raise ValueError(
            f"--model {given}: there is no {path / 'config.json'}; give the folder of a Hugging Face model"
        )
    if fixed := [name for name in changes if name not in _FREE]:
        raise ValueError(
            f"--model {given}: {fixed[0]} is as the folder's config.json has it; what may be changed is "
            f"{', '.join(_FREE)}"
        )
    config = dataclasses.replace(LLAMA.to_config(json_of(member(path, "config.json"))), **changes)
    return Named(given, "text", config, from_nnx(lambda rngs: Llama(config, rngs=rngs), loss, RULES), text.generate)
