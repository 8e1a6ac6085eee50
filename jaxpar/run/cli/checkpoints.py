"""The commands on checkpoints, which need no devices.

`jaxpar verify-checkpoint` compares checkpoints with their checksums. `jaxpar convert` makes another checkpoint of one,
or a folder for Hugging Face's `transformers` or `peft`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from ...backend.files import place
from ...backend.text import size
from ...checkpoint.saved import Checkpoint, complete_steps
from . import exports
from .convert import converted


@dataclass(frozen=True)
class VerifyOptions:
    """Read a checkpoint, or every checkpoint of a run, and compare every array with its checksum.

    Exits with 1 if a checkpoint is damaged, naming array and file.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """folder of a checkpoint, of several, or of a run; or an address, s3://bucket/run or gs://bucket/run"""


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a checkpoint to another one or to a Hugging Face folder, an array at a time and without devices."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """folder of a checkpoint; or of several, or of a run, to convert the last one"""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TARGET")]
    """folder to write"""
    to: Literal["checkpoint", "huggingface", "peft"] = "checkpoint"
    """format of the result; huggingface is for Llamas, peft for their adapters alone"""
    weights_only: bool = False
    """leave out the optimizer's state and everything else that only training needs"""
    dtype: str | None = None
    """dtype of the weights, such as bfloat16; by default the dtype of the checkpoint, float32"""
    model: str | None = None
    """huggingface, peft: the model, as in jaxpar train; by default the model of the run"""


def verify(options: VerifyOptions) -> None:
    """Run `jaxpar verify-checkpoint`."""
    folder = place(options.folder, "folder")
    parent = next((parent for parent in (folder, folder / "checkpoints") if complete_steps(parent)), None)
    # Without numbered checkpoints inside, the folder itself should be one.
    checkpoint_folders = [folder] if parent is None else [parent / str(number) for number in complete_steps(parent)]
    num_damaged = 0
    for checkpoint_folder in checkpoint_folders:
        try:
            saved = Checkpoint(checkpoint_folder)
            saved.verify()
        except ValueError as error:
            # A folder that does not exist is the user's error, and no damage.
            if parent is None and not checkpoint_folder.is_dir():
                raise
            num_damaged += 1
            print(error)  # noqa: T201
        else:
            total = size(sum(path.stat().st_size for path in saved.folder.rglob("*")))
            contents = f"{len(saved.arrays)} arrays, {total}, saved under {saved.strategy}"
            print(f"{checkpoint_folder}: {contents}: as written")  # noqa: T201
    if num_damaged:
        sys.exit(1)


def convert(options: ConvertOptions) -> None:
    """Run `jaxpar convert`. Raises ValueError if the model is not known, or Hugging Face has no such model."""
    jax.config.update("jax_platforms", "cpu")  # only shapes are computed, so leave accelerators to others
    saved = Checkpoint(options.source)
    if options.to == "checkpoint":
        result = converted(saved, options.target, options.weights_only, options.dtype)
        print(f"written: {result}")  # noqa: T201
        return
    # The folder knows the name if `jaxpar train` wrote it; `about` of another loop may lack one.
    name = options.model or saved.run.get("model")
    if not isinstance(name, str):
        raise ValueError(f"{saved.folder} does not say which model it is of; name it: --model llama-tiny,layers=2")
    if options.to == "peft":
        print(f"written: {exports.adapters(name, saved.folder, options.target)}")  # noqa: T201
        return
    print(f"written: {exports.export(name, saved.folder, options.target, options.dtype)}")  # noqa: T201
