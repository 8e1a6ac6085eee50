"""Export of checkpoints for Hugging Face: a folder for `transformers`, or adapters for `peft`, which `--adapter` reads.

A folder for `transformers` holds config.json, the weights, and the tokenizer's files of the folder that the run started
from, if it did.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax

from ...backend.buckets import Place
from ...backend.files import json_of, member
from ...checkpoint.saved import Checkpoint
from ...models import llama
from .convert import weights_of
from .model_sources import folder_path, is_folder, is_function, split_changes
from .options import TrainOptions, named_model

# Files that are copied from the folder that a run started from.
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                    "chat_template*", "generation_config.json")  # fmt: skip
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def with_adapter(options: TrainOptions) -> TrainOptions:
    """Return the options with the rank, scale and targets of `--adapter` behind the folder in `--model`.

    The run's config.yaml contains them, so that other commands know the run's adapters.

    Raises:
      ValueError: the model is no folder, has other adapters, or they do not fit it.
    """
    if options.adapter is None:
        return options
    if not is_folder(options.model):
        raise ValueError(f"adapter={str(options.adapter)!r} needs the folder of its base: model='./folder'")
    config = named_model(options.model, options.length).config
    adapted = llama.with_adapters(config, options.adapter)
    if config.adapted_projections == adapted.adapted_projections:  # named in any order
        adapted = dataclasses.replace(adapted, lora_targets=config.lora_targets)
    model_changes = {change.partition("=")[0].strip() for change in split_changes(options.model)[1]}
    adapter_changes = ""
    for name in ("lora", "lora_alpha", "lora_targets"):
        value = getattr(adapted, name)
        if name not in model_changes:
            adapter_changes += f",{name}={value}"
        elif getattr(config, name) != value:
            raise ValueError(
                f"model={options.model!r} has another {name} than {options.adapter}, which has {value}; leave it out "
                "there"
            )
    return dataclasses.replace(options, model=options.model + adapter_changes)


def describe_adapter(folder: Path) -> str:
    """Return a line for people about the adapters that a run starts from."""
    options = llama.PeftConfig.read(folder)
    dropout = f"; their dropout of {options.dropout} is not computed" if options.dropout else ""
    return f"starts from the adapters in {folder}, of rank {options.rank}, trained on {options.base or '?'}{dropout}"


def check_exportable(model: str, target: Path, length: int = 1) -> llama.Config:
    """Return the sizes of a model that can be exported to `target`. A run calls this before it trains.

    Raises:
      ValueError: if the model cannot be exported, or `target` already holds weights.
    """
    config = None if is_function(model) else named_model(model, length).config
    if not isinstance(config, llama.Config):
        raise ValueError(
            f"{model} cannot be written for Hugging Face's transformers; Llamas can, and jaxpar convert --weights-only "
            "makes a checkpoint of any model's weights"
        )
    if existing := sorted(file.name for file in target.glob("*") if file.suffix in (".safetensors", ".bin")):
        raise ValueError(f"{target} already holds {existing[0]}; choose another folder, or remove the weights in it")
    return config


def export(model: str, source: Place, target: Path, dtype: str | None = None) -> str:
    """Write a folder for `transformers` from the last checkpoint of a run; return a line about it for people.

    Only process 0 writes.

    Args:
      model: the model's name, or the Hugging Face folder that it started from, whose tokenizer is copied.
      source, target: the folder of a checkpoint, of several, or of a run; and the folder to write.
      dtype: dtype of the weights; if None, the dtype of the model's folder, or float32 for a name.
    """
    # Checkpoints are complete in the shared folder, so that one process has all weights.
    if jax.process_index():
        return str(target)
    config, saved = check_exportable(model, target), Checkpoint(source)
    folder = folder_path(model) if is_folder(model) else None
    source_config: dict[str, Any] = {} if folder is None else json_of(member(folder, "config.json"))
    dtype = dtype or source_config.get("torch_dtype") or source_config.get("dtype")
    llama.save_hf(config, weights_of(saved), target, dtype)
    if folder is not None:
        # The model knows nothing of special tokens. Their ids are facts of the tokenizer.
        path = target / "config.json"
        ids = {name: source_config[name] for name in _TOKEN_IDS if name in source_config}
        path.write_text(json.dumps({**json.loads(path.read_text()), **ids}, indent=2) + "\n")
        # A link in a downloaded folder may lead to any file of this machine: `member` refuses it.
        for file in sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}):
            shutil.copy(member(folder, file.name), target / file.name)
    num_params = dataclasses.replace(config, lora=0).parameters  # adapters are merged into the weights
    return f"{target}, {num_params:,} parameters of {model} after step {saved.step}"


def adapters(model: str, source: Place, target: Path) -> str:
    """Write the adapters of a checkpoint in the format of the package `peft`; otherwise as `export`.

    `model` names the folder that the adapters belong to, and their rank: "./folder,lora=16".
    """
    config, saved = None if is_function(model) else named_model(model, 1).config, Checkpoint(source)
    if config is None or not getattr(config, "lora", 0):
        raise ValueError(f"{model} has no adapters; train a folder with some: --model ./folder,lora=16")
    llama.save_adapters(config, weights_of(saved), target, str(folder_path(model)) if is_folder(model) else model)
    return f"{target}, adapters of rank {config.lora} of {model} after step {saved.step}"
