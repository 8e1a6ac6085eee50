"""The options of `jaxpar train`, and their YAML."""

import dataclasses
import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import optax
import tyro
import yaml

from ... import data
from ...backend.buckets import Place, is_bucket
from ...backend.files import place, text_of
from ...backend.removed import removed
from ...backend.text import did_you_mean
from ...data import images
from ...model.model import Model
from ...models import Named, llama, named
from ...numerics.matrices.numbers import matrices
from ...strategy import PRESETS, Strategy
from ..train.loop import Loop, Units
from ..train.profile import Profile
from ..train.trainer import Trainer
from .model_sources import folder_path, is_folder, is_function, load_user_model, model_from_folder, split_changes

# Of one invocation or one process, not of the run: they are not in its config.yaml.
PASSING = ("config", "resume", "changed_data", "overwrite", "coordinator", "processes", "process")
# What may differ when a run is resumed, besides those. Which strategies and devices fit, the checkpoint's layout says,
# and whether the data are the same, their content.
FREE = ("out", "data", "broken", "strategy", "devices", "steps", "evaluate_every", "evaluate_batches", "save_every",
        "keep", "print_every", "prefetch", "on_nonfinite", "check_replicas_every", "quiet", "sample",
        "export", "export_dtype", "profile")  # fmt: skip
_STRATEGY = (
    f"a preset ({', '.join(PRESETS)}), and name=value to change, or these alone: fsdp,precision=bf16 or data=2,fsdp=4; "
    f"names: {', '.join(field.name for field in dataclasses.fields(Strategy))}"
)
MODEL = (
    "a name, and sizes to change, as llama-tiny,layers=2; a folder of Hugging Face's Llama, whose config.json is read, "
    "as ./folder,lora=16; or package.module:function, which returns a jp.Model and a batch, or its data"
)
_TRAINED = (
    "a name, and sizes to change: llama-tiny, gpt2, resnet18, mlp-tiny, ... or llama-tiny,layers=2,dropout=0.1; a "
    "folder of Hugging Face's Llama, whose weights it starts from, as ./folder or, with adapters of rank 16, "
    "./folder,lora=16; or package.module:function, which returns a "
    "jp.Model, its data and, if you like, what is held out"
)
_PLACE = tyro.constructors.PrimitiveConstructorSpec(  # of two types; tyro knows one
    nargs=1,
    metavar="{None}|PATH",
    instance_from_str=lambda words: None if words[0] == "None" else Path(words[0]),  # `Loop` makes an address of it
    is_instance=lambda given: isinstance(given, Path | None) or is_bucket(given),
    str_from_instance=lambda given: [str(given)],
)
Class = TypeVar("Class")
_LONGEST, _DEEPEST = 1 << 20, 4  # bytes and levels of a file of options


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Loop):
    """Train a model under any parallelism strategy: by name, from a folder of Hugging Face, or your own.

    Without --data, models of text learn from Python's own source, and models of images from handwritten digits. Without
    accelerators it runs on simulated CPU devices.
    """

    model: Annotated[str, tyro.conf.arg(help=_TRAINED)] = "llama-tiny"
    strategy: Annotated[str, tyro.conf.arg(help=_STRATEGY)] = "fsdp"
    data: Annotated[Place | None, _PLACE] = None
    """text: a file or folder of bytes, or token ids as .npy or .bin; images: a folder with one subfolder per class; or
    the address of either, s3://bucket/... or gs://..."""
    broken: Literal["error", "skip"] = "error"
    """images that cannot be read: end the run, a long one before it begins; or leave them out, and say which"""
    length: int = 64
    """text: tokens that each row predicts"""
    out: Annotated[Place | None, _PLACE] = None
    """folder for config, metrics, plot and checkpoints, or an address, s3://bucket/run; without it: a new one below
    runs/, named by model and time"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the model's hidden matrices, at AdamW's scale; AdamW for all else"""
    lr: float = 3e-3
    """learning rate: its peak, followed by a cosine to a tenth"""
    warmup: int = 20
    """steps up to the peak, at most half of all"""
    weight_decay: float = 0.1
    """weights lose so much of themselves, times the learning rate"""
    clip: float = 1.0
    """global norm that gradients are clipped to"""
    sample: int = 200
    """text: bytes to generate at the end; 0 for none"""
    export: Path | None = None
    """Llamas: write a folder for Hugging Face's transformers at the end"""
    export_dtype: str | None = None
    """of what is exported, such as bfloat16; without it: that of the folder that it started from, else float32"""
    profile: int | None = None
    """trace so many steps, the third and on, into the folder's profile"""
    devices: int | None = None
    """simulate so many CPU devices in each process; without it: the accelerators, or 8 simulated devices"""
    config: Path | None = None
    """YAML file to take options from; those on the command line come before it"""
    coordinator: str | None = None
    """host:port of process 0, where there are several; srun and mpirun need none of these three"""
    processes: int | None = None
    """how many processes there are"""
    process: int | None = None
    """which one this is, from 0"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"length": 1, "warmup": 0, "sample": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too small; use {least} or more")
        if self.profile is not None and self.profile < 1:
            raise ValueError(f"profile={self.profile}: trace one step or more")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay} is not a number from 0; use 0 for none, such as 0.1")

    @property
    def again(self) -> str:
        """The command that goes on after the run was stopped."""
        return f"to go on: jaxpar train --resume --out {shlex.quote(str(self.out))}"

    @classmethod
    def load(cls, path: Place | str) -> "TrainOptions":
        """Options from a YAML file; what it does not name has its default. Raises ValueError naming what is wrong."""
        return cls(**read(cls, path))

    def dump(self) -> str:
        """The options of the run as YAML, all of them, for `load`."""
        text = lambda v: str(v) if isinstance(v, Path) or is_bucket(v) else v
        values = {name: text(v) for name, v in vars(self).items() if name not in PASSING}
        return yaml.safe_dump(values, sort_keys=False)

    @property
    def about(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be resumed."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items() if k not in (*PASSING, *FREE)}


def _showing(*names: str) -> Callable[[type[Class]], type[Class]]:
    """Of the options of training that a class inherits, its command has these. The rest may stand in a YAML file, so
    that a run's config.yaml serves as it is, and has no part.
    """

    def hidden(cls: type[Class]) -> type[Class]:
        hints = typing.get_type_hints(TrainOptions, include_extras=True)
        for field in dataclasses.fields(TrainOptions):
            if field.name not in names:
                cls.__annotations__[field.name] = tyro.conf.Suppress[hints[field.name]]
                setattr(cls, field.name, field.default)
        return cls

    return hidden


_OF_A_STEP = ("rows", "model", "strategy", "data", "length", "optimizer", "devices", "config", "coordinator",
              "processes", "process")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
@_showing(*_OF_A_STEP)
class CheckOptions(TrainOptions):
    """Prove that a strategy takes effect: nothing is trained. The config.yaml of a run serves as --config.

    The training step is compiled, and every promise of the strategy compared with the program: bytes of each array of
    the state, collectives by kind and axes. Exits with 1 where one is broken.
    """

    model: Annotated[str, tyro.conf.arg(help=MODEL)] = "llama-tiny"
    target: str | None = None
    """accelerators to compile for that are not here: 8xH100, 32x8xH100, v5e:4x4"""
    overlap: bool = False
    """whether what layers send is hidden behind what others compute too, by predicted seconds: for GPUs, here or not"""
    json: bool = False
    """print JSON instead of a table"""


@dataclass(frozen=True, kw_only=True)
@_showing(*_OF_A_STEP)
class ExplainOptions(TrainOptions):
    """Show what a training step holds and sends on each device: nothing runs.

    The step is compiled; memory, matrix products and collectives are read from its program, these beside their closed
    form. The config.yaml of a run serves as --config. With --step it is a step of your own, under any sharding.
    """

    model: Annotated[str, tyro.conf.arg(help=MODEL)] = "llama-tiny"
    step: str | None = None
    """package.module:function, in place of a model and a strategy: called without arguments it returns (step, args), a
    function that jax.jit lowers and the tuple of its arguments, arrays or jax.ShapeDtypeStruct with their shardings"""
    target: str | None = None
    """accelerators to compile for that are not here: 8xH100, 32x8xH100, v5e:4x4"""
    json: bool = False
    """print JSON instead of a table"""
    picture: Path | None = None
    """draw memory and bytes sent into this file too: .svg, .png or .pdf"""


def read(cls: type, path: Place | str) -> dict[str, Any]:
    """The fields of a dataclass that a YAML file names, in their types. Raises ValueError naming what is wrong."""
    path = place(path, "config")
    try:
        text = text_of(path, _LONGEST)
        _check_flat(text)
        values = yaml.safe_load(text) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; write one option a line, such as steps: 300")
    types_ = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if says := removed(f"Loop.{name}"):
            raise ValueError(f"{path} has an option {name!r}: {says}; remove its line there")
        if name not in known:
            near = did_you_mean(name, known) or f"; use one of {', '.join(known)}"
            raise ValueError(f"{path} has an option {name!r}, which does not exist{near}")
    return {name: _typed(f"{path}: {name}", value, types_[name]) for name, value in values.items()}


def _check_flat(text: str) -> None:
    """Raises ValueError for YAML beyond names and values: few aliases make gigabytes, brackets take minutes."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor}; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError("it is nested; write one option a line, such as steps: 300")


def _typed(where: str, value: Any, wanted: Any) -> Any:
    kinds = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    for kind in kinds:
        if kind is types.NoneType and value is None:
            return None
        if kind is Path and isinstance(value, str):
            return Path(value)
        # YAML 1.1 takes 3e-3, without a point, for text.
        if kind is float and (isinstance(value, int | float) or _is_number(value)) and not isinstance(value, bool):
            return float(value)
        if type(value) is kind or value in typing.get_args(kind):
            return value
    said = lambda kind: " or ".join(map(repr, typing.get_args(kind))) or kind.__name__
    names = " or ".join("nothing" if kind is types.NoneType else said(kind) for kind in kinds)
    raise ValueError(f"{where} is {value!r}, needs {names}")


def _is_number(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) is not None


def model_of(options: TrainOptions) -> tuple[Named, data.Text | images.Images]:
    """The model and the data. Raises ValueError for an unknown model or size, and where data is missing or unfit."""
    model = named_of(options.model, options.length)
    if model.kind == "text":
        return model, data.text(options.data, options.length, model.config.vocab)
    source = images.digits() if options.data is None else images.folder(options.data, model.config.size, options.broken)
    name, changes = _name_of(options.model)
    return named(name, **{**source.sizes, **changes}), source


def named_of(text: str, length: int) -> Named:
    """A model by name, with sizes to change behind it, for rows of so many positions. Raises ValueError for an unknown
    model or size, and for rows that it is not meant for.
    """
    name, changes = _name_of(text)
    model = model_from_folder(text, changes) if is_folder(text) else named(name, **changes)
    if model.kind == "text" and length > model.config.context:
        raise ValueError(
            f"length={length} is beyond the context of {text}, which is {model.config.context}; "
            f"use less, or --model {text},context={length}"
        )
    return model


def _name_of(text: str) -> tuple[str, dict[str, Any]]:
    name, parts = split_changes(text)
    changes: dict[str, Any] = {}
    for part in parts:
        size, value = _change(part, text)
        if size in changes:
            raise ValueError(f"{part.strip()!r} in model {text!r} sets {size} again; give each size once")
        changes[size] = value
    return name, changes


def _change(part: str, text: str) -> tuple[str, Any]:
    name, equals, value = (word.strip() for word in part.partition("="))
    if not equals:
        raise ValueError(f"{part!r} in model {text!r}: write sizes to change as name=value, such as layers=2")
    try:
        return name, yaml.safe_load(value) if not _is_number(value) else float(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{part!r} in model {text!r}: {value!r} is no value; write it as layers=2") from error


def optimizer_of(options: TrainOptions, model: Model, batch: Any) -> optax.GradientTransformation:
    """The optimizer behind clipping, on a warm-up and a cosine over all steps; `batch` gives the shapes of one."""
    warmup, decay = min(options.warmup, options.steps // 2), options.weight_decay
    rate = optax.warmup_cosine_decay_schedule(0, options.lr, warmup, max(options.steps, 1), options.lr / 10)
    tx = optimizer_named(options.optimizer, rate, decay, model, batch)
    return optax.chain(optax.clip_by_global_norm(options.clip), tx)


def optimizer_named(
    name: Literal["adamw", "muon"], rate: Any, decay: float, model: Model, batch: Any
) -> optax.GradientTransformation:
    """Of a command's `--optimizer`; `batch` gives the shapes of one."""
    if name == "adamw":
        return optax.adamw(rate, b2=0.95, weight_decay=decay)
    # Liu et al. 2025, arXiv:2502.16982, section 2.2: updates as large as AdamW's, so that one rate serves both.
    return optax.contrib.muon(
        rate,
        adam_b2=0.95,
        weight_decay=decay,
        adam_weight_decay=decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=matrices(model, batch),
    )


def units_of(options: TrainOptions, model: Named, source: data.Text | images.Images) -> Units:
    """What is counted: bytes in bits, tokens in nats, images."""
    flops = model.flops(options.rows, options.length)
    if isinstance(source, images.Images):
        return Units("images", 1, "nats", 1.0, flops, source.baselines)
    if source.corpus is None:
        return Units("tokens", options.length, "nats/token", 1.0, flops, source.baselines)
    entropies = {"unigram entropy": source.corpus.unigram_entropy, "bigram entropy": source.corpus.bigram_entropy}
    return Units("tokens", options.length, "bits/byte", 1 / math.log(2), flops, entropies)


def trainer_of(options: TrainOptions, hooks: Iterable[Any] = ()) -> tuple[Trainer, Named | None]:
    """The trainer that `jaxpar train` runs, and its model where that has a name or a folder."""
    hooks = [*hooks, *([] if options.profile is None else [Profile(options.profile)])]
    if is_function(options.model):
        mine = load_user_model(options.model)
        if mine.data is None:
            raise ValueError(
                f"--model {options.model} returned a model and a batch, and training takes data: return model, data, "
                "where data(start) returns an iterator of batches that begins with batch start, or is a list or loader"
            )
        about = {"hooks": hooks, "about": options.about}
        tx = optimizer_of(options, mine.model, mine.example(1))
        return Trainer(mine.model, tx, mine.data, options.strategy, options, held_out=mine.held_out, **about), None
    model, source = model_of(options)
    units = units_of(options, model, source)
    if model.trainable and options.steps and not is_folder(options.model):
        raise ValueError(f"--model {options.model}: adapters want weights beside them; give a folder: ./folder,lora=16")
    params = (lambda: llama.from_hf(folder_path(options.model))[1]) if is_folder(options.model) else None
    about = {"units": units, "about": options.about, "params": params, "fresh": model.trainable}
    trainer = Trainer(
        model.model,
        optimizer_of(options, model.model, model.example(1, options.length)),
        source,
        options.strategy,
        options,
        hooks=hooks,
        trainable=model.trainable,
        **about,
    )
    return trainer, model
