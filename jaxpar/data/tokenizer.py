"""The tokenizer of a Hugging Face model's folder, and its chat template: conversations as tokens.

    tokenizer.json                            the tokenizer, read by the package `tokenizers`
    tokenizer_config.json                     special tokens, and "chat_template"
    chat_template.jinja                       the template, which comes before the one of tokenizer_config.json
    generation_config.json, config.json       "eos_token_id", the tokens at which generation stops

A template is a program from a download. Jinja's sandbox runs it, with the functions that `transformers` gives to it
(`render_jinja_template` in its `chat_template_utils.py`). `strftime_now` is left out: a date would change the tokens of
a resumed run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..backend.files import json_of, local, member, text_of
from ..backend.packages import needed
from ..backend.text import reason

Span = tuple[int, int]
# The tag {% generation %} puts these around the answers. Unicode guarantees that they are no characters of a text.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_TAG = re.compile(r"{%-?\s*generation\b")


class Rendered(NamedTuple):
    """A text to be tokenized.

    Attributes:
      text: the text.
      answers: the spans of `text` that are trained on, as (begin, end) of its characters.
      is_plain: whether the tokenizer adds its own first token, and the end of a text follows; a template writes both.
    """

    text: str
    answers: Sequence[Span]
    is_plain: bool


class NoTemplateError(ValueError):
    """A model without a chat template is given messages."""


class TemplateError(ValueError):
    """A chat template does not render the messages that it is given."""


class Tokenizer:
    """The tokenizer and the chat template of a Hugging Face model.

    Args:
      folder: the model's folder, with `tokenizer.json`.

    Attributes:
      folder: the folder.
      has_template: whether there is a chat template.

    Raises:
      ValueError: the tokenizer is missing or cannot be read, the template is no Jinja, or one of the packages
        `tokenizers` and `jinja2` is not installed.
    """

    def __init__(self, folder: os.PathLike[str] | str):
        self.folder = local(folder, "folder")
        if not (self.folder / "tokenizer.json").exists():
            raise ValueError(
                f"{folder} has no tokenizer.json, which text and chats need; download the model's tokenizer too, or "
                f"convert it: transformers.AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})"
            )
        file = member(self.folder, "tokenizer.json")
        library, text = needed("tokenizers", f"{file} needs"), text_of(file)
        try:
            self._tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:  # the package raises this very class
            raise ValueError(f"{file} cannot be read as a tokenizer: {error}; fetch it once more") from error
        # A file may say to cut or fill up every text, as its last user did.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _optional_json(self.folder, "tokenizer_config.json")
        special = {**_optional_json(self.folder, "special_tokens_map.json"), **config}
        # Special tokens are texts, or objects with their text.
        special = {name: x.get("content") if isinstance(x, Mapping) else x for name, x in special.items()}
        self._special = {name: x for name, x in special.items() if name.endswith("_token") and isinstance(x, str)}
        self._end = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        source, self._template_place = _template_source(self.folder, config)
        self.has_template = source is not None
        self._has_tag = source is not None and _TAG.search(source) is not None
        self._template = None if source is None else _compile(source, self._template_place)

    @property
    def stop(self) -> list[int]:
        """The ids at which an answer ends: those of the model's files, and the special token behind an answer."""
        configs = (_optional_json(self.folder, name) for name in ("generation_config.json", "config.json"))
        values = [self._end, *(config.get("eos_token_id") for config in configs)]
        ids = {i for x in values for i in (x if isinstance(x, list) else [x]) if isinstance(i, int)}
        if self.has_template:
            # Many models end an answer by another token than a text. The template knows it.
            example = self.chat([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "answer"}])
            behind = example.text[example.answers[-1][0] :].rpartition("answer")[2]
            special_ids = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
            ids |= special_ids & set(self._tokenizer.encode(behind, add_special_tokens=False).ids[:1])
        return sorted(ids)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation up to where the model's answer begins, as `jp.generate` takes them.

        Args:
          messages: [{"role": "user", "content": "..."}, ...].

        Raises:
          ValueError: there is no template, or it refuses the messages.
        """
        text, _ = self._render(messages, None, add_generation_prompt=True)
        return self.encode([Rendered(text, (), False)])[0][0].tolist()

    def decode(self, ids: Any) -> str:
        """Return the text of ids, integers [n], without special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def encode(self, texts: Sequence[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of texts, int32 [n], and whether the loss counts each, bool [n]; on all cores.

        A token counts if its first character is in an answer.

        Raises:
          ValueError: a plain text needs the token that ends a text, and the files name none.
        """
        plain, rendered = ([x.text for x in texts if x.is_plain is value] for value in (True, False))
        if plain and self._end is None:
            raise ValueError(
                f"{self.folder} names no eos_token, which ends a text; add one to tokenizer_config.json, as "
                '"eos_token": "</s>"'
            )
        encodings = {
            True: iter(self._tokenizer.encode_batch(plain, add_special_tokens=True)),
            False: iter(self._tokenizer.encode_batch(rendered, add_special_tokens=False)),
        }
        return [self._ids_and_counts(x, next(encodings[x.is_plain])) for x in texts]

    def _ids_and_counts(self, rendered: Rendered, encoding: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text and whether each counts, from what the package made of it."""
        ids, begins = np.array(encoding.ids, np.int32), np.array(encoding.offsets, int).reshape(-1, 2)[:, 0]
        # Tokens that the tokenizer adds have the offsets (0, 0).
        is_text = np.array(encoding.special_tokens_mask) == 0 if rendered.is_plain else True
        counts = np.zeros(ids.size, bool)
        for begin, stop in rendered.answers:
            counts |= is_text & (begins >= begin) & (begins < stop)
        if rendered.is_plain:
            # Some tokenizers end a text themselves. Here it ends behind its answer, and a prompt does not end.
            size = ids.size - int(ids[-1:].tolist() == [self._end])
            end = np.full(1 if rendered.answers else 0, self._end, np.int32)
            ids, counts = np.append(ids[:size], end), np.append(counts[:size], end == self._end)
        return ids, counts

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Rendered:
        """Return a conversation as text, and where the assistant speaks.

        These are the blocks {% generation %} of the template. In a template without them, an answer is the text that
        its message adds to that of the messages before it; it includes the token that ends the answer.

        Raises:
          ValueError: there is no template, it refuses the messages, or it does not render the messages one by one.
        """
        text, answers = self._render(messages, tools)
        if self._has_tag:
            return Rendered(text, answers, False)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, _ = self._render(messages[:i], tools, add_generation_prompt=True)
                dialog = self._render(messages[: i + 1], tools)[0] if i + 1 < len(messages) else text
                if not (text.startswith(dialog) and dialog.startswith(prompt)):
                    raise TemplateError(
                        f"{self._template_place} renders message {i + 1} differently when others follow, so that its "
                        "answers cannot be found; put {% generation %} and {% endgeneration %} around them in it"
                    )
                answers = [*answers, (len(prompt), len(dialog))]
        return Rendered(text, answers, False)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool = False
    ) -> tuple[str, Sequence[Span]]:
        """Return the text of messages, and the spans of its generation blocks.

        `add_generation_prompt` begins an answer at the end of the text.
        """
        if self._template is None:
            raise NoTemplateError(
                f"{self.folder} has no chat template, which messages need; copy chat_template.jinja or "
                "tokenizer_config.json of a model that was tuned on chats, or write lines with prompt and completion"
            )
        variables = {**self._special, "messages": list(messages), "tools": tools, "documents": None}
        try:
            text = self._template.render(**variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template may fail as any program does
            text = reason(error)
            hint = "; write a date in its place, since today's would change a resumed run" * ("strftime_now" in text)
            raise TemplateError(f"{self._template_place} cannot render it: {text}{hint}") from error
        if not self._has_tag:
            return text, ()
        # Odd pieces are answers.
        pieces = re.split(f"[{_BEGIN}{_END}]", text)
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        return "".join(pieces), list(zip(ends[0:-1:2], ends[1::2], strict=True))


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a file of the folder; {} if there is no such file."""
    return json_of(member(folder, name)) if (folder / name).exists() else {}


def _template_source(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the source of the chat template, None if there is none, and its place for errors."""
    if (folder / "chat_template.jinja").exists():
        file = member(folder, "chat_template.jinja")
        return text_of(file), str(file)
    source = config.get("chat_template")
    # A model may have several templates, by name.
    if isinstance(source, list):
        source = {x.get("name"): x.get("template") for x in source if isinstance(x, Mapping)}.get("default")
    return source if isinstance(source, str) else None, f"chat_template of {folder / 'tokenizer_config.json'}"


def _compile(source: str, place: str) -> Any:
    """Compile a template as `transformers` does; raise ValueError if it is no Jinja."""
    needed("jinja2", f"{place} needs")
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tag {% generation %} around an answer."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            """Return the block with marks at both of its ends."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            """Return the text of the block between marks."""
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> Any:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise ValueError(
            f"{place} is no template of Jinja: {error.message} (line {error.lineno}); mend it, or fetch it once more"
        ) from error
