"""Tensors in the files of a Hugging Face model: read one by one, and written a file at a time.

A model is `model.safetensors`, or several such files beside `model.safetensors.index.json`, which says where each
tensor is; older ones are `pytorch_model.bin`, or several. A safetensors file is mapped into memory, so that nothing is
read before it is asked for (https://github.com/huggingface/safetensors#format). It holds no code, and neither is code
of a .bin file run: it is read with `weights_only=True`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # comes with jax; from then on NumPy, and so safetensors, knows bfloat16
import numpy as np

from ...backend.files import SAFETENSORS, json_of, member
from ...backend.packages import needed


class Tensor(NamedTuple):
    """A tensor that is read when it is asked for: its shape, `read()`, which gives a NumPy array, and the dtype of one
    that is to be written.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    dtype: Any = None

    @property
    def nbytes(self) -> int:
        """Of one that is to be written."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_of(x: Any) -> Tensor:
    """A torch tensor (on any device) or an array. Of torch on the CPU and of NumPy nothing is copied."""
    return Tensor(tuple(x.shape), lambda: _numpy(x))


def fill(into: np.ndarray, x: np.ndarray) -> None:
    """`into[...] = x`, for a matrix that is transposed 4 to 7 times as fast as NumPy does it (measured on 2048 x 8192,
    bfloat16 and float32): 16 columns at a time, so that a cache line is used up before it is dropped.
    """
    width = x.shape[-1] if x.flags.c_contiguous else 16
    for i in range(0, x.shape[-1], width):
        into[..., i : i + width] = x[..., i : i + width]


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of the model in a folder, by name. They can be read until the context is left.

    Raises ValueError where there is no model, or not all of it, where a file is none, cannot be read or lies outside of
    the folder, and where the package to read it with is missing.
    """
    file, part_of = _found(folder)
    parts = [file]
    if file.name.endswith(".index.json"):
        places = json_of(file).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f"{file} has no weight_map, which says in which file each tensor is; fetch it once more")
        parts = [member(folder, name, file) for name in sorted(set(places.values()))]
    tensors: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for part in parts:
            try:
                tensors |= part_of(part, stack)
            except ValueError:  # of ours
                raise
            except Exception as error:  # the formats have many, of packages that may not be installed
                raise ValueError(f"{part} cannot be read: {error}; fetch it once more") from error
        yield tensors


def write(folder: Path, tensors: Mapping[str, Tensor], max_shard_size: int) -> None:
    """Safetensors files of at most `max_shard_size` bytes each, unless a single tensor has more.

    Tensors are read one by one, and no other is in memory. Raises ValueError where the folder holds weights already.
    """
    # The other file might be read first, and a file that is overwritten might be mapped by who reads from it.
    if there := sorted(
        file.name for pattern in ("model*.safetensors*", "pytorch_model*") for file in folder.glob(pattern)
    ):
        raise ValueError(f"{folder} already holds {there[0]}; choose another folder, or remove the weights in it")
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards, size = [*shards, []], 0
        shards[-1].append(name)
        size += tensor.nbytes
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in zip(files, shards, strict=True):
        write_file(folder / file, {name: tensors[name] for name in names})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file."""
    # By its metadata transformers tells whose layout of weights it is.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, x in tensors.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": SAFETENSORS[x.dtype.name], "shape": [*x.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            out.write(_contiguous(x.read()).reshape(-1).view(np.uint8).data)


def _found(folder: Path) -> tuple[Path, Callable[[Path, contextlib.ExitStack], dict[str, Tensor]]]:
    kinds = {"model.safetensors": _safetensors, "pytorch_model.bin": _torch}
    # The order in which transformers looks for them.
    for name, part_of in kinds.items():
        for file in (folder / name, folder / f"{name}.index.json"):
            if file.exists():
                return member(folder, file.name), part_of
    raise ValueError(
        f"{folder} holds no model: neither {' nor '.join(kinds)}, nor one in several files with {next(iter(kinds))}"
        ".index.json; download all files of the model"
    )


def _safetensors(file: Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    part = stack.enter_context(needed("safetensors", "these weights need").safe_open(file, framework="np"))
    return {
        name: Tensor(tuple(part.get_slice(name).get_shape()), lambda name=name: part.get_tensor(name))
        for name in part.keys()  # noqa: SIM118  # it has this method, and is no dict
    }


def _torch(file: Path, _: contextlib.ExitStack) -> dict[str, Tensor]:
    state = needed("torch", "these weights need").load(file, map_location="cpu", mmap=True, weights_only=True)
    return {name: tensor_of(x) for name, x in state.items()}


def _numpy(x: Any) -> np.ndarray:
    if not hasattr(x, "detach"):
        return np.asarray(x)
    torch = needed("torch", "these weights need")
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:  # which torch does not hand to NumPy
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _contiguous(x: np.ndarray) -> np.ndarray:
    if x.flags.c_contiguous:
        return x
    fill(copy := np.empty(x.shape, x.dtype), x)
    return copy
