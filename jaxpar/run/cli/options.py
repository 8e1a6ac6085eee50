"""The options of `jaxpar train`, `check` and `explain`: their YAML form, and the objects that they name.

`TrainOptions` extends `Loop` by what the command line adds. `CheckOptions` and `ExplainOptions` accept the same YAML
files, but show only the options of one step. `read` reads a YAML file into the types of the fields. The functions
`model_of`, `optimizer_of`, `units_of` and `trainer_of` build what the options name.
"""

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
from ...data.chats import JSONL
from ...data.corpus import files_below
from ...model.model import Model
from ...models import Named, llama, named
from ...numerics.matrices.numbers import matrices
from ...strategy import PRESETS, Strategy
from ..train.loop import Loop, Units
from ..train.profile import Profile
from ..train.trainer import Trainer
from .model_sources import folder_path, is_folder, is_function, load_user_model, model_from_folder, split_changes

# Options of one invocation or one process. They do not belong to the run, and its config.yaml omits them.
INVOCATION_OPTIONS = ("config", "resume", "changed_data", "overwrite", "coordinator", "processes", "process")
# Options of the run that may change when it is resumed. The checkpoint's layout decides which strategies and devices
# fit, and the fingerprint of the data decides whether they are the same.
CHANGEABLE_OPTIONS = ("out", "data", "bytes", "broken", "adapter", "strategy", "devices", "steps", "evaluate_every",
                      "evaluate_batches", "save_every", "keep", "print_every", "prefetch", "on_nonfinite",
                      "check_replicas_every", "quiet", "sample", "export", "export_dtype", "profile")  # fmt: skip
_STRATEGY_HELP = (
    f"a preset ({', '.join(PRESETS)}), and name=value to change, or these alone: fsdp,precision=bf16 or data=2,fsdp=4; "
    f"names: {', '.join(field.name for field in dataclasses.fields(Strategy))}"
)
MODEL_HELP = (
    "a name, and sizes to change, as llama-tiny,layers=2; a folder of Hugging Face's Llama, whose config.json is read, "
    "as ./folder,lora=16; or package.module:function, which returns a jp.Model and a batch, or its data"
)
_TRAIN_MODEL_HELP = (
    "a name, and sizes to change: llama-tiny, gpt2, resnet18, mlp-tiny, ... or llama-tiny,layers=2,dropout=0.1; a "
    "folder of Hugging Face's Llama, whose weights it starts from, as ./folder or, with adapters of rank 16, "
    "./folder,lora=16; or package.module:function, which returns a "
    "jp.Model, its data and, if you like, what is held out"
)
# How tyro parses a path or an address. Their type is a union, which tyro needs help with.
_PLACE = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="{None}|PATH",
    instance_from_str=lambda words: None if words[0] == "None" else Path(words[0]),  # `Loop` recognizes addresses
    is_instance=lambda value: isinstance(value, Path | None) or is_bucket(value),
    str_from_instance=lambda value: [str(value)],
)
Class = TypeVar("Class")
_MAX_BYTES, _MAX_DEPTH = 1 << 20, 4  # limits of a YAML file: size, and levels of nesting


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Loop):
    """Train a model under any parallelism strategy: by name, from a folder of Hugging Face, or your own.

    Without --data, models of text learn from Python's own source, and models of images from handwritten digits. Without
    accelerators it runs on simulated CPU devices.
    """

    model: Annotated[str, tyro.conf.arg(help=_TRAIN_MODEL_HELP)] = "llama-tiny"
    strategy: Annotated[str, tyro.conf.arg(help=_STRATEGY_HELP)] = "fsdp"
    data: Annotated[Place | None, _PLACE] = None
    """text: a file or folder of bytes, token ids as .npy or .bin, or, for a folder with a tokenizer, chats or texts as
    .jsonl; images: a folder with one subfolder per class; or the address of any, s3://bucket/... or gs://..."""
    bytes: bool = False
    """text: take the raw bytes of --data for tokens, also of .json and .jsonl, and for a folder of Hugging Face"""
    broken: Literal["error", "skip"] = "error"
    """reaction to images that cannot be read and lines of .jsonl that are no documents: end the run (for images a long
    one before it begins), or skip and list them"""
    length: int = 64
    """text: tokens that each row predicts, the length of a window"""
    out: Annotated[Place | None, _PLACE] = None
    """folder for config, metrics, plot and checkpoints, or an address, s3://bucket/run; by default a new one below
    runs/, named by model and time"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon updates the model's hidden matrices, at AdamW's scale, and all other parameters by AdamW"""
    lr: float = 3e-3
    """learning rate at its peak; it follows a cosine down to a tenth of this"""
    warmup: int = 20
    """steps of linear warm-up to the peak, at most half of all steps"""
    weight_decay: float = 0.1
    """factor of weight decay; each step multiplies it by the learning rate"""
    clip: float = 1.0
    """largest global norm of the gradients; larger ones are scaled down to it"""
    sample: int = 200
    """text: number of bytes or tokens to generate at the end; 0 for none"""
    adapter: Path | None = None
    """folder of adapters in the format of peft, to start from beside a folder of Hugging Face's Llama"""
    export: Path | None = None
    """Llamas: write a folder for Hugging Face's transformers at the end"""
    export_dtype: str | None = None
    """dtype of the exported weights, such as bfloat16; by default the dtype of the folder that the run started from, or
    float32"""
    profile: int | None = None
    """number of steps to trace, from the third on, into the run's folder profile"""
    devices: int | None = None
    """number of CPU devices to simulate in each process; by default the accelerators, or 8 simulated devices"""
    config: Path | None = None
    """YAML file to take options from; options on the command line override it"""
    coordinator: str | None = None
    """host:port of process 0, if there are several processes; srun and mpirun need none of these three"""
    processes: int | None = None
    """number of processes"""
    process: int | None = None
    """number of this process, from 0"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, minimum in {"length": 1, "warmup": 0, "sample": 0}.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)} is too small; use {minimum} or more")
        if self.profile is not None and self.profile < 1:
            raise ValueError(f"profile={self.profile} traces no step; use 1 or more")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not a positive number; use a finite one above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"weight_decay={self.weight_decay} is not a number from 0; use one such as 0.1, or 0 for none"
            )

    @property
    def again(self) -> str:
        """The command that continues the run after it was stopped."""
        return f"to go on: jaxpar train --resume --out {shlex.quote(str(self.out))}"

    @classmethod
    def load(cls, path: Place | str) -> "TrainOptions":
        """Return the options in a YAML file; those that it omits have their defaults. Raises ValueError as `read`."""
        return cls(**read(cls, path))

    def dump(self) -> str:
        """Return all options of the run as YAML, for `load`."""
        # YAML has no paths and no addresses: store them as text.
        as_yaml = lambda v: str(v) if isinstance(v, Path) or is_bucket(v) else v
        values = {name: as_yaml(v) for name, v in vars(self).items() if name not in INVOCATION_OPTIONS}
        return yaml.safe_dump(values, sort_keys=False)

    @property
    def about(self) -> dict[str, Any]:
        """The options on which a run and a checkpoint must agree for the run to resume from it."""
        ignored = (*INVOCATION_OPTIONS, *CHANGEABLE_OPTIONS)
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items() if k not in ignored}


def _show_only(*names: str) -> Callable[[type[Class]], type[Class]]:
    """Return a class decorator that hides all inherited options of training but `names` from the command line.

    A YAML file may still set the hidden options, so that a run's config.yaml serves unchanged.
    """

    def hide(cls: type[Class]) -> type[Class]:
        # Keep the extras of the hints: they hold the help that tyro shows.
        hints = typing.get_type_hints(TrainOptions, include_extras=True)
        for field in dataclasses.fields(TrainOptions):
            if field.name not in names:
                # The decorator `dataclass` runs after this one, and takes the annotation and the default from the
                # class.
                cls.__annotations__[field.name] = tyro.conf.Suppress[hints[field.name]]
                setattr(cls, field.name, field.default)
        return cls

    return hide


_STEP_OPTIONS = ("rows", "model", "strategy", "data", "bytes", "length", "optimizer", "devices", "config",
                 "coordinator", "processes", "process")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
@_show_only(*_STEP_OPTIONS)
class CheckOptions(TrainOptions):
    """Prove that a strategy takes effect, without training. The config.yaml of a run serves as --config.

    The command compiles the training step and compares every promise of the strategy with the program: bytes of each
    array of the state, collectives by kind and axes. It exits with 1 if a promise is broken.
    """

    model: Annotated[str, tyro.conf.arg(help=MODEL_HELP)] = "llama-tiny"
    target: str | None = None
    """accelerators to compile for, which this machine need not have: 8xH100, 32x8xH100, v5e:4x4"""
    overlap: bool = False
    """also check, by predicted seconds, that the communication of layers overlaps with compute; for GPUs"""
    json: bool = False
    """print JSON instead of a table"""


@dataclass(frozen=True, kw_only=True)
@_show_only(*_STEP_OPTIONS)
class ExplainOptions(TrainOptions):
    """Show what a training step holds and sends on each device, without running it.

    The command compiles the step and reads memory, matrix products and collectives from its program. It compares the
    collectives with their closed form. The config.yaml of a run serves as --config. --step explains a step of your own,
    under any sharding.
    """

    model: Annotated[str, tyro.conf.arg(help=MODEL_HELP)] = "llama-tiny"
    step: str | None = None
    """package.module:function, instead of a model and a strategy: a function without arguments that returns (step,
    args). jax.jit must be able to lower step, and args is the tuple of its arguments, arrays or jax.ShapeDtypeStruct
    with their shardings"""
    target: str | None = None
    """accelerators to compile for, which this machine need not have: 8xH100, 32x8xH100, v5e:4x4"""
    json: bool = False
    """print JSON instead of a table"""
    picture: Path | None = None
    """also draw memory and bytes sent into this file: .svg, .png or .pdf"""


def read(cls: type, path: Place | str) -> dict[str, Any]:
    """Return the fields of a dataclass that a YAML file sets, converted to their types.

    Raises:
      ValueError: if the file is not flat YAML, or an option does not exist or has a value of another type.
    """
    path = place(path, "config")
    try:
        # The file may come from anybody: limit its size and its form before PyYAML builds objects.
        text = text_of(path, _MAX_BYTES)
        _check_flat(text)
        values = yaml.safe_load(text) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; write one option a line, such as steps: 300")
    hints = typing.get_type_hints(cls)
    field_names = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if message := removed(f"Loop.{name}"):
            raise ValueError(f"{path} has an option {name!r}: {message}; remove its line there")
        if name not in field_names:
            hint = did_you_mean(name, field_names) or f"; use one of {', '.join(field_names)}"
            raise ValueError(f"{path} has an option {name!r}, which does not exist{hint}")
    return {name: _convert(f"{path}: {name}", value, hints[name]) for name, value in values.items()}


def _check_flat(text: str) -> None:
    """Raise ValueError for YAML with aliases or deep nesting.

    Such a file is a mistake or an attack: a few aliases expand to gigabytes, and brackets take minutes to parse.
    """
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor}; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested; write one option a line, such as steps: 300")


def _convert(path_and_name: str, value: Any, hint: Any) -> Any:
    """Return a value from a YAML file as the type of an option.

    `hint` is the option's annotation: a type, a `Literal`, or a union of these. Raises ValueError, with the file and
    the option, if the value fits none of the types.
    """
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if kind is types.NoneType and value is None:
            return None
        if kind is Path and isinstance(value, str):
            return Path(value)
        # YAML 1.1 reads 3e-3, without a point, as text.
        if kind is float and (isinstance(value, int | float) or _is_number(value)) and not isinstance(value, bool):
            return float(value)
        # `type`, not `isinstance`: True is an int. The second test is for a `Literal`.
        if type(value) is kind or value in typing.get_args(kind):
            return value
    kind_name = lambda kind: " or ".join(map(repr, typing.get_args(kind))) or kind.__name__
    names = " or ".join("nothing" if kind is types.NoneType else kind_name(kind) for kind in kinds)
    raise ValueError(f"{path_and_name} is {value!r}; it must be {names}")


def _is_number(value: Any) -> bool:
    """Return whether a value is a text such as "3e-3"."""
    return isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) is not None


def model_of(options: TrainOptions) -> tuple[Named, data.Text | data.Chat | images.Images]:
    """Return the model and the data that the options name, for a name or a folder.

    Raises:
      ValueError: if the model or a size is unknown, or the data are missing or do not fit.
    """
    model = named_model(options.model, options.length)
    if model.kind == "text":
        return model, _text_source(options, model)
    # Without --data: handwritten digits, which need no download.
    source = images.digits() if options.data is None else images.folder(options.data, model.config.size, options.broken)
    # The data decide the sizes of an image model, such as its number of classes, unless the options do.
    name, changes = split_model(options.model)
    return named(name, **{**source.sizes, **changes}), source


def _text_source(options: TrainOptions, model: Named) -> data.Text | data.Chat:
    """Return the source of text that `--data` names; raise ValueError if its bytes would silently be the tokens."""
    path, vocabulary = options.data, model.config.vocab
    if path is None or options.bytes or (path := place(path, "data")).suffix in (".npy", ".bin"):
        return data.text(path, options.length, vocabulary)
    suffixes = {file.suffix for file in files_below(path)} if path.is_dir() else {path.suffix}
    if JSONL in suffixes and is_folder(options.model):
        return data.chat(path, data.Tokenizer(folder_path(options.model)), options.length, vocabulary, options.broken)
    # A folder may have a .json beside the files that are meant.
    if JSONL in suffixes or suffixes == {".json"}:
        advice = (
            f"{options.model} has no tokenizer; name a folder of Hugging Face: model='./folder'"
            if JSONL in suffixes
            else "write one object a line, into a file .jsonl"
        )
        raise ValueError(f"--data {path} is JSON, whose raw bytes are no text: {advice}; or train on them: bytes=True")
    if is_folder(options.model) and path.exists():
        raise ValueError(
            f"--data {path} would be read as bytes, which are no tokens of {options.model}; write its texts into a "
            'file .jsonl, {"text": "..."} a line, or train on them: bytes=True'
        )
    return data.text(path, options.length, vocabulary)


def named_model(text: str, length: int) -> Named:
    """Return the model that `--model` names: a name or a folder, perhaps with changes behind it.

    Raises:
      ValueError: if the model or a size is unknown, or the `length` of a row is beyond the model's context.
    """
    name, changes = split_model(text)
    model = model_from_folder(text, changes) if is_folder(text) else named(name, **changes)
    if model.kind == "text" and length > model.config.context:
        raise ValueError(
            f"length={length} is beyond the context of {text}, which is {model.config.context}; "
            f"use less, or --model {text},context={length}"
        )
    return model


def split_model(text: str) -> tuple[str, dict[str, Any]]:
    """Split "llama-tiny,layers=2" into the name and the changes: ("llama-tiny", {"layers": 2})."""
    name, parts = split_changes(text)
    changes: dict[str, Any] = {}
    for part in parts:
        size, value = _parse_change(part, text)
        if size in changes:
            raise ValueError(f"{part.strip()!r} in model {text!r} sets {size} again; give each size once")
        changes[size] = value
    return name, changes


def _parse_change(part: str, text: str) -> tuple[str, Any]:
    """Parse "layers=2". Raises ValueError, with the whole `text`, if it has another form."""
    # The value is YAML, so that numbers, booleans and texts need no quotes.
    name, equals, value = (word.strip() for word in part.partition("="))
    if not equals:
        raise ValueError(f"{part!r} in model {text!r}: write sizes to change as name=value, such as layers=2")
    try:
        return name, yaml.safe_load(value) if not _is_number(value) else float(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{part!r} in model {text!r}: {value!r} is not a value; write it as layers=2") from error


def optimizer_of(options: TrainOptions, model: Model, batch: Any) -> optax.GradientTransformation:
    """Return clipping, then the optimizer, with a learning rate of linear warm-up and cosine decay over all steps."""
    # A short run would otherwise end before its learning rate reaches the peak.
    warmup, decay = min(options.warmup, options.steps // 2), options.weight_decay
    rate = optax.warmup_cosine_decay_schedule(0, options.lr, warmup, max(options.steps, 1), options.lr / 10)
    tx = optimizer_named(options.optimizer, rate, decay, model, batch)
    return optax.chain(optax.clip_by_global_norm(options.clip), tx)


def optimizer_named(
    name: Literal["adamw", "muon"], rate: Any, decay: float, model: Model, batch: Any
) -> optax.GradientTransformation:
    """Return the optimizer that `--optimizer` names, with a learning rate or schedule, and a weight decay.

    For Muon, the model and a batch, or its shapes, tell which parameters are hidden matrices.
    """
    if name == "adamw":
        # b2 is 0.95 as for GPT-3 (Brown et al. 2020, appendix B), and not Optax's 0.999.
        return optax.adamw(rate, b2=0.95, weight_decay=decay)
    # Liu et al. 2025, arXiv:2502.16982, section 2.2: updates have the RMS of AdamW's, so that one rate serves both.
    return optax.contrib.muon(
        rate,
        adam_b2=0.95,
        weight_decay=decay,
        adam_weight_decay=decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=matrices(model, batch),
    )


def units_of(options: TrainOptions, model: Named, source: data.Text | data.Chat | images.Images) -> Units:
    """Return the units of a run: bits per byte for text read as bytes, nats per token, or images."""
    flops = model.flops(options.rows, options.length)
    # The loss is in nats. Text that is read as bytes is shown in bits per byte.
    if isinstance(source, images.Images):
        return Units("images", 1, "nats", 1.0, flops, source.baselines)
    if isinstance(source, data.Chat) or source.corpus is None:
        return Units("tokens", options.length, "nats/token", 1.0, flops, source.baselines)
    # These are in bits, the unit of the loss that is shown; `baselines` of the source are in nats.
    entropies = {"unigram entropy": source.corpus.unigram_entropy, "bigram entropy": source.corpus.bigram_entropy}
    return Units("tokens", options.length, "bits/byte", 1 / math.log(2), flops, entropies)


def trainer_of(options: TrainOptions, hooks: Iterable[Any]) -> tuple[Trainer, Named | None]:
    """Return the trainer that `jaxpar train` runs, and its model; None for a model that a user's function makes."""
    hooks = [*hooks, *([] if options.profile is None else [Profile(options.profile)])]
    if is_function(options.model):
        user_model = load_user_model(options.model)
        if user_model.data is None:
            raise ValueError(
                f"--model {options.model} returned a model and a batch, and training takes data: return model, data, "
                "where data(start) returns an iterator of batches that begins with batch start, or is a list or loader"
            )
        user_trainer = Trainer(
            user_model.model,
            optimizer_of(options, user_model.model, user_model.example(1)),
            user_model.data,
            options.strategy,
            options,
            held_out=user_model.held_out,
            hooks=hooks,
            about=options.about,
        )
        return user_trainer, None
    if is_folder(options.model) and options.data is None and options.steps and not options.bytes:
        raise ValueError(
            f"the default data are bytes, which are no tokens of {options.model}; name yours: --data chats.jsonl"
        )
    model, source = model_of(options)
    units = units_of(options, model, source)
    # With steps=0 nothing is trained: a step with adapters can be explained without a folder's weights.
    if model.trainable and options.steps and not is_folder(options.model):
        raise ValueError(f"--model {options.model}: adapters need the weights of a folder; give one: ./folder,lora=16")
    # A function: only a new run calls it, so that a resumed run reads no weights that it does not use.
    read_params = lambda: llama.from_hf(folder_path(options.model), adapter=options.adapter)[1]
    params = read_params if is_folder(options.model) else None
    trainer = Trainer(
        model.model,
        optimizer_of(options, model.model, model.example(1, options.length)),
        source,
        options.strategy,
        options,
        hooks=hooks,
        units=units,
        about=options.about,
        params=params,
        trainable=model.trainable,
        fresh=None if options.adapter else model.trainable,  # a base has no weights for new adapters
    )
    return trainer, model
