"""A small tokenizer with a chat template, as a folder of Hugging Face has it, for the tests of chats."""

import json
from pathlib import Path
from typing import Any

import pytest

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
_HEAD = "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
_FOOT = "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATE = _HEAD + "{{ m['content'] + '<|im_end|>' }}" + _FOOT
# The same text; its blocks are the answers with the token that ends them.
TAGGED = (
    _HEAD
    + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    + "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    + _FOOT
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE, **config: Any) -> int:
    """Write the tokenizer, of bytes and a few merges, into a folder; return the size of its vocabulary."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the packages of the extra hf")
    pytest.importorskip("jinja2")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the sky is blue and the grass is green"] * 2, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(4)  # as its last user left it
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False) | {"content": "</s>", "special": True}
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken"} | end, "chat_template": template} | config
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    return tokenizer.get_vocab_size()


def conversation(*contents: str) -> dict[str, Any]:
    """Return messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def write_lines(file: Path, *lines: Any) -> Path:
    """Write objects as JSON, and texts as they are, a line each."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("".join(f"{text}\n" for text in texts))
    return file
