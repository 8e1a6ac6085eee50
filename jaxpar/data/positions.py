"""The positions of other libraries' iterators in their data: reading them, restoring them, storing them as JSON.

ours                     state         restore
torch, Hugging Face      state_dict    load_state_dict
grain                    get_state     set_state
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

# (method that returns a position, method that restores one).
_CURSOR_METHODS = (("state", "restore"), ("state_dict", "load_state_dict"), ("get_state", "set_state"))

# Keys of the JSON objects that stand for values without a JSON form.
_TAGS = ("bytes", "tuple", "items", "array", "tensor")


def cursor(data: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return the methods of data that get and set their position; None if they have none."""
    for method_names in _CURSOR_METHODS:
        get_position, set_position = (getattr(data, name, None) for name in method_names)
        if callable(get_position) and callable(set_position):
            return get_position, set_position
    return None


def restored(data: Any, position: Any) -> Callable[[], Any] | None:
    """Set the position of data, unless it is None, and return the method that gets their position.

    Returns None, and sets nothing, if the data have no position.
    """
    if (methods := cursor(data)) is None:
        return None
    get_position, set_position = methods
    if position is not None:
        set_position(position)
    return get_position


def epochs(data: Any) -> list[Callable[[int], Any]]:
    """List the methods `set_epoch` of data, a loader's data set and its sampler, to be called before every pass."""
    # A torch DataLoader itself has no `set_epoch`. Its sampler has one (DistributedSampler), or its data set
    # (Hugging Face).
    components = [data, *(getattr(data, name, None) for name in ("dataset", "sampler"))]
    return [set_epoch for component in components if callable(set_epoch := getattr(component, "set_epoch", None))]


def to_json(position: Any, place: str = "") -> Any:
    """Return a position as JSON.

    Values without a JSON form become an object with one key, its type: bytes (grain's loader), tuples, arrays, torch's
    tensors (the state of a generator), and dicts with other keys than strings.

    Args:
      position: what the data returned.
      place: the path of this value within the position, for errors.

    Raises:
      ValueError: the position contains a value of another type. The error names its place.
    """
    if position is None or isinstance(position, bool | int | float | str):
        return position
    # latin-1 maps each byte to one character and back, so that no byte string is refused.
    if isinstance(position, bytes):
        return {"bytes": position.decode("latin-1")}
    if isinstance(position, list | tuple):
        elements = [to_json(x, f"{place}/{i}") for i, x in enumerate(position)]
        return {"tuple": elements} if isinstance(position, tuple) else elements
    if isinstance(position, dict):
        items = [[key, to_json(x, f"{place}/{key}")] for key, x in position.items()]
        # A dict whose only key is a tag would be read as that type, so it is stored as "items" too.
        is_tagged = len(items) == 1 and items[0][0] in _TAGS
        is_plain = all(isinstance(key, str) for key in position) and not is_tagged
        return dict(items) if is_plain else {"items": [[to_json(key, place), x] for key, x in items]}
    if type(position).__module__ == "torch" and hasattr(position, "numpy"):
        return {"tensor": to_json(position.numpy(force=True), place)["array"]}
    # Only kinds whose `dtype.str` reads back as the same dtype: bfloat16, of kind V, would come back as raw bytes.
    if isinstance(position, np.ndarray | np.generic) and position.dtype.kind in "biuf":
        values = np.asarray(position)
        encoded = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
        return {"array": [values.dtype.str, list(values.shape), encoded]}
    raise ValueError(
        f"the data's position holds a {type(position).__name__} at {place or '/'}, which a checkpoint cannot keep; let "
        "the data return numbers, strings, bytes, arrays, and lists, tuples and dicts of them"
    )


def from_json(position: Any) -> Any:
    """Return the position from which `to_json` made this JSON value."""
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
        dtype, shape, encoded = content
        # `frombuffer` returns a read-only view. A loader may write to its state, and torch warns of such arrays.
        values = np.frombuffer(base64.b64decode(encoded), dtype).reshape(shape).copy()
        return importlib.import_module("torch").from_numpy(values) if tag == "tensor" else values
    return {key: from_json(x) for key, x in position.items()}
