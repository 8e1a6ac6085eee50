"""The commands on checkpoints: whether they are what was written, and what else can be made of them. No devices."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from ...backend.files import place
from ...backend.text import size
from ...checkpoint.saved import Checkpoint, numbers
from . import exports
from .convert import converted


@dataclass(frozen=True)
class VerifyOptions:
    """Reads all of a checkpoint, or of each of a run's, and compares every array with its checksum.

    Exits with 1 where one is damaged, naming array and file.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """of a checkpoint, of several, or of a run; here and elsewhere an address too, s3://bucket/run or gs://bucket/run"""


@dataclass(frozen=True)
class ConvertOptions:
    """Makes another checkpoint of one, or the folder of a Hugging Face model, an array at a time, without devices."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """folder of a checkpoint, of several, or of a run: the last"""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TARGET")]
    """folder to make"""
    to: Literal["checkpoint", "huggingface", "peft"] = "checkpoint"
    """what to make; huggingface is for Llamas, peft for their adapters alone"""
    weights_only: bool = False
    """leave out the optimizer's state and what else training needs"""
    dtype: str | None = None
    """of the weights, such as bfloat16; without it: as they are, float32"""
    model: str | None = None
    """huggingface, peft: the model, as in jaxpar train; without it: the one that the run was given"""


def verify(options: VerifyOptions) -> None:
    """`jaxpar verify-checkpoint`."""
    folder = place(options.folder, "folder")
    inside = next((inside for inside in (folder, folder / "checkpoints") if numbers(inside)), None)
    several = [folder] if inside is None else [inside / str(number) for number in numbers(inside)]
    bad = 0
    for one in several:
        try:
            saved = Checkpoint(one)
            saved.verify()
        except ValueError as error:
            if inside is None and not one.is_dir():
                raise
            bad += 1
            print(error)  # noqa: T201
        else:
            total = size(sum(path.stat().st_size for path in saved.folder.rglob("*")))
            print(f"{one}: {len(saved.arrays)} arrays, {total}, saved under {saved.strategy}: as written")  # noqa: T201
    if bad:
        sys.exit(1)


def convert(options: ConvertOptions) -> None:
    """`jaxpar convert`. Raises ValueError where the model has no form in Hugging Face's words, or is not known."""
    jax.config.update("jax_platforms", "cpu")  # the shapes of a model are asked for, and nothing runs
    saved = Checkpoint(options.source)
    if options.to == "checkpoint":
        made = converted(saved, options.target, options.weights_only, options.dtype)
        print(f"written: {made}")  # noqa: T201
        return
    name = options.model or saved.run.get("model")
    if not isinstance(name, str):
        raise ValueError(f"{saved.folder} does not say which model it is of; name it: --model llama-tiny,layers=2")
    if options.to == "peft":
        print(f"written: {exports.adapters(name, saved.folder, options.target)}")  # noqa: T201
        return
    print(f"written: {exports.export(name, saved.folder, options.target, options.dtype)}")  # noqa: T201
