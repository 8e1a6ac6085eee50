"""What is written for Hugging Face's `transformers`: weights, and beside them what its tokenizer needs."""

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
from .model_sources import folder_path, is_folder, is_function
from .options import named_model

# Of a model's folder, whatever is there of these.
_BESIDE = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*",
           "generation_config.json")  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_exportable(model: str, target: Path, length: int = 1) -> llama.Config:
    """The sizes of a model that can be exported. Raises ValueError where it cannot be, and where `target` already holds
    weights: before anything is trained.
    """
    config = None if is_function(model) else named_model(model, length).config
    if not isinstance(config, llama.Config):
        raise ValueError(
            f"{model} cannot be written for Hugging Face's transformers; Llamas can, and jaxpar convert --weights-only "
            "makes a checkpoint of any model's weights"
        )
    if there := sorted(file.name for file in target.glob("*") if file.suffix in (".safetensors", ".bin")):
        raise ValueError(f"{target} already holds {there[0]}; choose another folder, or remove the weights in it")
    return config


def export(model: str, source: Place, target: Path, dtype: str | None = None) -> str:
    """Writes the folder from the last checkpoint of a run, by one process; returns a line that says what it is.

    Args:
      model: its name, or the folder of Hugging Face's that it started from, whose tokenizer is copied.
      source: the folder of a checkpoint, of several, or of a run.
      target: the folder to make.
      dtype: of the weights; the folder's if None, float32 for a name.
    """
    if jax.process_index():
        return str(target)
    config, saved = check_exportable(model, target), Checkpoint(source)
    folder = folder_path(model) if is_folder(model) else None
    stated: dict[str, Any] = {} if folder is None else json_of(member(folder, "config.json"))
    dtype = dtype or stated.get("torch_dtype") or stated.get("dtype")
    llama.save_hf(config, weights_of(saved), target, dtype)
    if folder is not None:
        path = target / "config.json"
        ids = {name: stated[name] for name in _TOKENS if name in stated}
        path.write_text(json.dumps({**json.loads(path.read_text()), **ids}, indent=2) + "\n")
        for file in sorted({file for pattern in _BESIDE for file in folder.glob(pattern) if file.is_file()}):
            shutil.copy(member(folder, file.name), target / file.name)
    count = dataclasses.replace(config, lora=0).parameters
    return f"{target}, {count:,} parameters of {model} after step {saved.step}"


def adapters(model: str, source: Place, target: Path) -> str:
    """Writes the adapters of a checkpoint alone, as the package `peft` keeps them; returns a line that says what it is.

    Args:
      model: the folder that they are for, and their rank: "./folder,lora=16".
      source, target: as for `export`.
    """
    config, saved = None if is_function(model) else named_model(model, 1).config, Checkpoint(source)
    if config is None or not getattr(config, "lora", 0):
        raise ValueError(f"{model} has no adapters; train a folder with some: --model ./folder,lora=16")
    llama.save_adapters(config, weights_of(saved), target, str(folder_path(model)) if is_folder(model) else model)
    return f"{target}, adapters of rank {config.lora} of {model} after step {saved.step}"
