"""The tensors in the files of a Hugging Face model: reading them one by one, writing them file by file.

    model.safetensors                       one file, or
    model.safetensors.index.json            "weight_map": the file of each tensor
    model-00001-of-00002.safetensors, ...
    pytorch_model.bin, or .bin.index.json   the same two forms in older models

A safetensors file is an 8-byte header length, a JSON header and the tensors' bytes
(https://github.com/huggingface/safetensors#format). It is mapped into memory, so that a tensor is read only when it is
needed. It contains no code. A .bin file is a pickle, read with `weights_only=True`, which runs no code either.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # installed with jax; importing it registers bfloat16 in NumPy, which safetensors needs
import numpy as np

from ...backend.files import SAFETENSORS, json_of, member
from ...backend.packages import needed


class Tensor(NamedTuple):
    """A tensor that is read on demand.

    Attributes:
      shape: its shape in the file.
      read: returns it as a NumPy array.
      dtype: its NumPy dtype; only tensors to be written need one.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    dtype: Any = None

    @property
    def nbytes(self) -> int:
        """The size of a tensor to be written, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def as_tensor(array: Any) -> Tensor:
    """Wrap a torch tensor on any device or an array; NumPy arrays and torch tensors on the CPU are not copied."""
    return Tensor(tuple(array.shape), lambda: _to_numpy(array))


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """Compute `target[...] = source`; a transposed source is copied in blocks of columns.

    NumPy's copy of a transposed matrix touches a new cache line for each element. 16 columns at a time use up a cache
    line before it is evicted, which is 4 to 7 times as fast (2048 x 8192, bfloat16 and float32).
    """
    width = source.shape[-1] if source.flags.c_contiguous else 16
    for start in range(0, source.shape[-1], width):
        target[..., start : start + width] = source[..., start : start + width]


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Open the model in a folder.

    Yields:
      Its tensors by name. They can be read until the context ends.

    Raises:
      ValueError: the folder has no model or lacks a file of it; a file cannot be read or lies outside of the folder;
        or the package to read it with is not installed.
    """
    file, read_file = _find_model(folder)
    files = [file]
    if file.name.endswith(".index.json"):
        weight_map = json_of(file).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{file} has no weight_map, which says in which file each tensor is; fetch it once more")
        # `member` refuses names that lead out of the folder: an index is input from elsewhere.
        files = [member(folder, name, file) for name in sorted(set(weight_map.values()))]
    tensors: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for file in files:
            tensors |= open_file(file, stack, read_file)
        yield tensors


def open_file(
    file: Path, stack: contextlib.ExitStack, read_file: Callable[..., dict[str, Tensor]] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of one file, safetensors if `read_file` is None, which can be read until `stack` closes."""
    try:
        return (read_file or _read_safetensors)(file, stack)
    except ValueError:  # raised here, with a text for users
        raise
    except Exception as error:  # safetensors and torch raise many types, and neither need be installed
        raise ValueError(f"{file} cannot be read: {error}; fetch it once more") from error


def write(folder: Path, tensors: Mapping[str, Tensor], max_shard_size: int) -> None:
    """Write a model as safetensors files. Tensors are read and written one by one; only one is in memory.

    Args:
      folder: created if it does not exist.
      tensors: by name, in the order in which they are written.
      max_shard_size: the largest number of bytes in a file, except for a file with a single, larger tensor.

    Raises:
      ValueError: the folder already contains weights.
    """
    # Refuse to mix models: a reader may prefer the old file, and overwriting a file breaks readers that have mapped it.
    if existing := sorted(
        file.name for pattern in ("model*.safetensors*", "pytorch_model*") for file in folder.glob(pattern)
    ):
        raise ValueError(f"{folder} already holds {existing[0]}; choose another folder, or remove the weights in it")
    # 1. Distribute the tensors over files, in order.
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        # A tensor that is larger than a file may be gets a file for itself.
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards, size = [*shards, []], 0
        shards[-1].append(name)
        size += tensor.nbytes
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    # 2. Write the files.
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in zip(files, shards, strict=True):
        write_file(folder / file, {name: tensors[name] for name in names})
    # 3. Write the index of several files.
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file: header length, JSON header, then the tensors one by one."""
    # 1. The header needs only shapes and dtypes, so that no tensor is read for it. Its metadata tells transformers that
    # the weights have PyTorch's layout.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": SAFETENSORS[tensor.dtype.name], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of 8 bytes
    # 2. The tensors, in the order of their offsets.
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(_contiguous(tensor.read()).reshape(-1).view(np.uint8).data)


def _find_model(folder: Path) -> tuple[Path, Callable[[Path, contextlib.ExitStack], dict[str, Tensor]]]:
    """Return the model's file or index, and the function that reads files of its format."""
    readers = {"model.safetensors": _read_safetensors, "pytorch_model.bin": _read_torch}
    # transformers looks for files in this order.
    for name, read_file in readers.items():
        for file in (folder / name, folder / f"{name}.index.json"):
            if file.exists():
                return member(folder, file.name), read_file
    raise ValueError(
        f"{folder} holds no model: neither {' nor '.join(readers)}, nor one in several files with {next(iter(readers))}"
        ".index.json; download all files of the model"
    )


def _read_safetensors(file: Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    """Map a safetensors file into memory until `stack` closes; return its tensors by name."""
    # `stack` keeps the file open after this function returns, because `Tensor.read` is called later.
    mapped = stack.enter_context(needed("safetensors", "these weights need").safe_open(file, framework="np"))
    return {
        name: Tensor(tuple(mapped.get_slice(name).get_shape()), lambda name=name: mapped.get_tensor(name))
        for name in mapped.keys()  # noqa: SIM118  # not a dict, and cannot be iterated over
    }


def _read_torch(file: Path, _: contextlib.ExitStack) -> dict[str, Tensor]:
    """Map a .bin file of torch into memory; return its tensors by name."""
    state = needed("torch", "these weights need").load(file, map_location="cpu", mmap=True, weights_only=True)
    return {name: as_tensor(x) for name, x in state.items()}


def _to_numpy(array: Any) -> np.ndarray:
    """Convert a torch tensor or an array to NumPy."""
    if not hasattr(array, "detach"):
        return np.asarray(array)
    torch = needed("torch", "these weights need")
    array = array.detach().cpu()
    if array.dtype == torch.bfloat16:  # torch cannot convert bfloat16 to NumPy: reinterpret its bits
        return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return array.numpy()


def _contiguous(array: np.ndarray) -> np.ndarray:
    """Return the array itself if it is C-contiguous, else a copy that is."""
    if array.flags.c_contiguous:
        return array
    copy_into(copy := np.empty(array.shape, array.dtype), array)
    return copy
