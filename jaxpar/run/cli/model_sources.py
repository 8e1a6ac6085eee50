"""Models and steps that do not come by name: a user's function, or a folder in Hugging Face's format.

The text behind `--model` has one of three forms:

    llama-tiny,layers=2        a name, and sizes to change         (`models.named`)
    package.module:function    a function that makes a model       (`load_user_model`)
    ./folder,lora=16           a folder of a Llama, and changes    (`model_from_folder`)

`--step` takes a function that makes a step (`load_user_step`).
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

# The changes that leave the weights of a folder valid.
_CHANGEABLE = ("lora", "lora_alpha", "lora_targets", "dropout", "context")


@dataclass(frozen=True)
class UserModel:
    """The model that a user's function made, with its data or a batch.

    Attributes:
      model: the model.
      data_or_batch: data to train on; or one batch, which suffices to check, explain and plan.
      held_out: data to evaluate on, or None.
    """

    model: Model
    data_or_batch: Any
    held_out: Any = None

    @property
    def data(self) -> Any:
        """The data, as a `Trainer` takes them; None if the function returned one batch."""
        return self.data_or_batch if is_data(self.data_or_batch) else None

    @functools.cached_property
    def batch(self) -> Any:
        """One batch: the one that the function returned, or the first of its data."""
        return self.data_or_batch if self.data is None else next(training(self.data, 1, 0))

    def example(self, rows: int) -> Any:
        """Return the shapes and dtypes of a batch with `rows` rows."""

        def with_rows(x: Any) -> Any:
            if isinstance(x, Replicated):  # has no rows
                return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), x)
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

        return jax.tree.map(with_rows, self.batch, is_leaf=lambda x: isinstance(x, Replicated))


def is_function(model: str) -> bool:
    """Return whether a text has the form `package.module:function`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", model) is not None


def is_folder(model: str) -> bool:
    """Return whether a text names a folder, perhaps with changes behind it: a folder that exists, or a path."""
    return os.path.isdir(split_changes(model)[0]) or model.startswith((".", "/", "~"))


def split_changes(model: str) -> tuple[str, list[str]]:
    """Split "./folder,lora=16" into the name or folder and the changes behind it: "./folder" and ["lora=16"]."""
    # A folder that exists may have a comma in its name.
    name, *changes = [model] if os.path.isdir(model) else model.split(",")
    return name, changes


def folder_path(model: str) -> Path:
    """Return the path of a folder that `--model` names."""
    return Path(split_changes(model)[0]).expanduser()


def call_user_function(reference: str, option: str, returns: str) -> Any:
    """Import and call a user's function, without arguments, and return its result.

    Args:
      reference: `package.module:function`. Modules in the current folder are found too.
      option: the option that names it, for errors.
      returns: the expected result, for the error that says how to write the function.

    Raises:
      ValueError: if there is no such function. Errors of the module itself are not caught.
    """
    module_name, _, function_name = reference.partition(":")
    # The script `jaxpar` does not have the current folder in its path, unlike `python -m jaxpar`.
    if (current_folder := str(Path.cwd())) not in sys.path:
        # In front of the installed packages: the user means the module in this folder.
        sys.path.insert(0, current_folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import within the module that fails is an error of the module.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        raise ValueError(
            f"{option} {reference}: there is no module {error.name!r}; run it in the folder that holds it, or install "
            "it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(
            f"{option} {reference}: {module_name} has no function {function_name!r}; write def {function_name}(): "
            f"return {returns}"
        )
    check_call(function, f"{option} {reference}")
    return function()


def load_user_step(reference: str) -> tuple[Any, ...]:
    """Return the step that a user's function makes, jitted or not, followed by its arguments.

    Raises:
      ValueError: as `call_user_function`, and if the function does not return a step and a tuple of arguments.
    """
    result = call_user_function(reference, "--step", "step, (state, batch)") if is_function(reference) else None
    if not (isinstance(result, tuple) and len(result) == 2 and callable(result[0]) and isinstance(result[1], tuple)):
        problem = f"returned a {type(result).__name__}" if is_function(reference) else "is no package.module:function"
        raise ValueError(
            f"--step {reference} {problem}; give a function without arguments that returns (step, args): what "
            "jax.jit gives or takes, and a tuple of its arguments, arrays or jax.ShapeDtypeStruct with their shardings"
        )
    return result[0], *result[1]


def load_user_model(reference: str) -> UserModel:
    """Return the model and the data, or the batch, that a user's function makes.

    Raises:
      ValueError: as `call_user_function`, and if the function does not return a `jp.Model` and a batch or data.
    """
    result = call_user_function(reference, "--model", "model, data")
    if not (isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], Model)):
        raise ValueError(
            f"--model {reference} returned a {type(result).__name__}; return (model, data) or (model, data, held_out): "
            f"a jp.Model, from {MAKERS}, and what jp.Trainer takes as data; "
            "to check, explain and plan, a batch of arrays or jax.ShapeDtypeStruct serves as well"
        )
    user_model = UserModel(*result)
    # One batch, whose number of rows is free here; but its leaves must agree on it.
    if user_model.data is None:
        check_rows(user_model.data_or_batch, 1, 1, 1)
    return user_model


def is_data(value: Any) -> bool:
    """Return whether a value is data to train on (a function, list or loader), not a batch (a tree of arrays)."""
    # A list is data, because a batch is a dict, a tuple or an array.
    if callable(value) or hasattr(value, "batches") or isinstance(value, list):
        return True
    return isinstance(value, Iterable) and not isinstance(value, dict | tuple) and not hasattr(value, "shape")


def model_from_folder(model: str, changes: dict[str, Any]) -> Named:
    """Return the Llama whose sizes the `config.json` of a folder states. Its weights are not read (`llama.from_hf`).

    `changes` replace values of the file.

    Raises:
      ValueError: if there is no `config.json`, or a change would need other weights.
    """
    path = folder_path(model)
    if not (path / "config.json").exists():
        raise ValueError(
            f"--model {model}: there is no {path / 'config.json'}; give the folder of a Hugging Face model"
        )
    if fixed_names := [name for name in changes if name not in _CHANGEABLE]:
        raise ValueError(
            f"--model {model}: {fixed_names[0]} cannot be changed, because the folder's weights depend on it; "
            f"change only {', '.join(_CHANGEABLE)}"
        )
    config = dataclasses.replace(LLAMA.to_config(json_of(member(path, "config.json"))), **changes)
    return Named(model, "text", config, from_nnx(lambda rngs: Llama(config, rngs=rngs), loss, RULES), text.generate)
