"""Where iterators of others are in their data: how they are asked for it and told, and what of it goes into JSON."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

# How iterators that can go on elsewhere say where they are, and are told: ours; torch's and Hugging Face's; grain's.
_CURSORS = (("state", "restore"), ("state_dict", "load_state_dict"), ("get_state", "set_state"))

_TAGS = ("bytes", "tuple", "items", "array", "tensor")


def cursor(data: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to ask data for a position, and how to tell them one; None where they have none."""
    for names in _CURSORS:
        get, set_ = (getattr(data, name, None) for name in names)
        if callable(get) and callable(set_):
            return get, set_
    return None


def restored(data: Any, position: Any) -> Callable[[], Any] | None:
    """How to ask data for a position, after they were told this one (if it is not None); None where they have none."""
    if (found := cursor(data)) is None:
        return None
    if position is not None:
        found[1](position)
    return found[0]


def epochs(data: Any) -> list[Callable[[int], Any]]:
    """Who is told the number of every pass through data: the data, a loader's data set, its sampler (`set_epoch`)."""
    layers = [data, *(getattr(data, name, None) for name in ("dataset", "sampler"))]
    return [tell for layer in layers if callable(tell := getattr(layer, "set_epoch", None))]


def to_json(position: Any, place: str = "") -> Any:
    """A position as JSON. What JSON has not is an object with one key: bytes (grain's loader), tuples, arrays and
    torch's tensors (the state of a generator), and dicts whose keys are no strings.

    Raises ValueError for anything else, with where it is (`place`).
    """
    if position is None or isinstance(position, bool | int | float | str):
        return position
    if isinstance(position, bytes):
        return {"bytes": position.decode("latin-1")}
    if isinstance(position, list | tuple):
        made = [to_json(x, f"{place}/{i}") for i, x in enumerate(position)]
        return {"tuple": made} if isinstance(position, tuple) else made
    if isinstance(position, dict):
        made = [[key, to_json(x, f"{place}/{key}")] for key, x in position.items()]
        plain = all(isinstance(key, str) for key in position) and not (len(made) == 1 and made[0][0] in _TAGS)
        return dict(made) if plain else {"items": [[to_json(key, place), x] for key, x in made]}
    if type(position).__module__ == "torch" and hasattr(position, "numpy"):
        return {"tensor": to_json(position.numpy(force=True), place)["array"]}
    if isinstance(position, np.ndarray | np.generic) and position.dtype.kind in "biuf":
        values = np.asarray(position)
        text = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
        return {"array": [values.dtype.str, list(values.shape), text]}
    raise ValueError(
        f"the data's position holds a {type(position).__name__} at {place or '/'}, which a checkpoint cannot keep; it "
        "takes numbers, strings, bytes, arrays, and lists, tuples and dicts of them"
    )


def from_json(position: Any) -> Any:
    """The position that `to_json` was given."""
    if isinstance(position, list):
        return [from_json(x) for x in position]
    if not isinstance(position, dict):
        return position
    content: Any
    tag, content = next(iter(position.items())) if len(position) == 1 else ("", None)
    if tag == "bytes":
        return content.encode("latin-1")
    if tag == "tuple":
        return tuple(map(from_json, content))
    if tag == "items":
        return {from_json(key): from_json(x) for key, x in content}
    if tag in ("array", "tensor"):
        dtype, shape, text = content
        values = np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
        return importlib.import_module("torch").from_numpy(values) if tag == "tensor" else values
    return {key: from_json(x) for key, x in position.items()}
