"""Chats, completions and texts in JSONL: their tokens, what the loss counts, the packed rows, and lines left out."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chats import TAGGED, TEMPLATE, conversation, write_lines, write_tokenizer

import jaxpar as jp
from jaxpar.data import Packed, Tokenizer, chat
from jaxpar.data.chats import pack
from jaxpar.models import named

TALK = conversation("the sky", "is blue", "and the grass", "is green\U0001f33f")
CHATS = [conversation(f"the sky {i}", "is blue " * (i % 5 + 1)) for i in range(60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def counted_text(tokenizer: Tokenizer, ids: np.ndarray, counts: np.ndarray) -> str:
    """The text of the tokens that count, special ones included."""
    return tokenizer._tokenizer.decode(ids[counts].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED], ids=["plain", "tagged"])
def test_tokens_and_answers_are_those_of_transformers(folder: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs torch and transformers: `make hf`")
    write_tokenizer(folder, template)
    ours, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids, counts = ours.encode([ours.chat(TALK["messages"])])[0]
    expected = theirs.apply_chat_template(
        TALK["messages"], chat_template=TAGGED, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == expected["input_ids"]
    if template is TAGGED:
        assert counts.astype(int).tolist() == expected["assistant_masks"]
    # Without tags an answer has all that its message adds.
    end = "" if template is TAGGED else "\n"
    assert counted_text(ours, ids, counts) == f"is blue<|im_end|>{end}is green\U0001f33f<|im_end|>{end}"
    prompt = theirs.apply_chat_template(TALK["messages"][:3], add_generation_prompt=True, return_dict=False)
    assert ours.prompt(TALK["messages"][:3]) == prompt == ids[: len(prompt)].tolist()
    assert ours.stop == [1, 3]  # </s>, and the token behind an answer
    assert ours.decode(ids.tolist()).startswith("user\nthe sky\nassistant")


def test_completions_and_texts_begin_and_end_as_the_tokenizer_says(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = {"prompt": "the sky", "completion": " is blue"}, {"text": "the grass is green"}
    data = chat(write_lines(tmp_path / "x.jsonl", *lines), tokenizer, 32)
    ((ids, counts),), ((text_ids, text_counts),) = data.train.documents, data.rest.documents
    show = lambda ids: tokenizer._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert show(ids) == "<s>the sky is blue</s>"
    assert counted_text(tokenizer, ids, counts) == " is blue</s>"
    assert show(text_ids) == "<s>the grass is green</s>"
    assert text_counts.tolist() == [False, *[True] * (text_ids.size - 1)]


def test_documents_share_rows_and_count_by_themselves(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = chat(write_lines(tmp_path / "x.jsonl", *CHATS), tokenizer, 96, vocabulary=280)
    assert len(data.rest.documents) == 3  # every 20th
    seen = []
    for row in data.train:
        tokens, segments, mask = (row[name] for name in ("tokens", "segments", "mask"))
        assert (tokens.shape, segments.shape, mask.shape) == ((97,), (97,), (96,))
        assert (tokens.dtype, segments.dtype, mask.dtype) == (np.int32, np.int32, np.float32)
        assert segments[0] == 0
        assert not mask[segments[1:] != segments[:-1]].any()  # nothing predicts the first token of a document
        assert not tokens[segments == -1].any()
        for number in range(segments.max() + 1):
            ids, counts = tokens[segments == number], np.append(False, mask > 0)[segments == number]
            seen.append((tuple(ids.tolist()), counted_text(tokenizer, ids, counts)))
    expected = [(tuple(ids.tolist()), counted_text(tokenizer, ids, counts)) for ids, counts in data.train.documents]
    assert sorted(seen) == sorted(expected)
    assert all(text.startswith("is blue is") or text == "is blue <|im_end|>\n" for _, text in seen)
    assert len(data.train) < 57
    assert f"60 documents in 60 lines, 3 of them held out; the others fill {len(data.train)} rows" in data.description


def test_rows_are_full() -> None:
    assert pack([5, 3, 4, 4, 2], 9) == [[0, 2], [3, 1, 4]]
    sizes = np.random.default_rng(0).integers(1, 100, 1000)
    rows = pack(sizes.tolist(), 100)
    assert sorted(document for row in rows for document in row) == list(range(1000))
    assert max(sizes[row].sum() for row in rows) <= 100
    assert len(rows) <= 11 / 9 * -(-sizes.sum() // 100) + 1


def test_a_run_resumes_in_the_middle_and_hosts_read_their_parts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", *CHATS)
    data, again = (chat(file, tokenizer, 48) for _ in range(2))
    assert data.fingerprint == again.fingerprint != chat(file, tokenizer, 49).fingerprint
    whole = list(islice(data.batches(4, seed=3), 20))
    resumed = again.batches(4, seed=3, start=7)
    resumed.part = (1, 2)
    for expected, batch in zip(whole[7:], resumed, strict=False):
        for name in ("tokens", "segments", "mask"):
            np.testing.assert_array_equal(batch[name], expected[name][2:])
    assert sum(batch["mask"].sum() for batch in data.held_out(2)) == sum(c[1:].sum() for _, c in data.rest.documents)


def test_a_long_text_is_cut_and_every_token_but_the_first_is_predicted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = {"text": "the sky is blue and " * 20}
    data = chat(write_lines(tmp_path / "x.jsonl", text), tokenizer, 8)
    documents = [*data.train.documents, *data.rest.documents]
    targets = np.concatenate([ids[1:] for ids, _ in documents])
    whole = tokenizer._tokenizer.encode(text["text"]).ids
    assert [0, *targets.tolist()] == [*whole, 1]


def test_lines_that_do_not_fit_are_named_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    lines = [TALK, "", {"text": ""}, conversation("the sky", "is blue " * 30), {"prompt": "the", "completion": ""}]
    write_lines(tmp_path / "many" / "b.jsonl", *lines, TALK)
    write_lines(tmp_path / "many" / "a.jsonl", TALK)
    write_lines(tmp_path / "many" / "notes.txt", "no JSON")
    data = chat(tmp_path / "many", tokenizer, 64)
    assert len(data.train.documents) == 2
    (long,) = data.left_out["longer than length=64"]
    assert long.startswith("b.jsonl:4 (")
    assert data.left_out["empty"] == ["b.jsonl:2", "b.jsonl:3", "b.jsonl:5"]
    assert "3 documents in 7 lines, 1 of them held out" in data.description
    assert (
        "left out, empty: 3, b.jsonl:2, b.jsonl:3, b.jsonl:5; left out, longer than length=64: 1, b" in data.description
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"x.jsonl:2 \(no JSON: Expecting value"),
        (b'{"text": "\xff"}'.decode("latin-1"), None),
        ("[" * 100_000, r"x.jsonl:2 \("),
        ("[1]", r"x.jsonl:2 \(a list, no object\)"),
        ({"conversations": []}, r"x.jsonl:2 \(keys conversations, which have another form\)"),
        ({"prompt": "no completion"}, r"x.jsonl:2 \(keys prompt, which have another form\)"),
        ({"messages": []}, "keys messages, which have another form"),
        ({"messages": [{"role": "user", "content": "x"}]}, "it has messages of user, and the loss counts those of the"),
        # It was trained on, and the answer did not count.
        ({"messages": [*TALK["messages"], {"role": "asistant", "content": "x"}]}, "the role 'asistant'; did you mean"),
        ({"messages": [{"role": "assistant", "content": [1]}]}, "message 1 needs a role and a content, both texts"),
        (conversation("REFUSE", "x"), "chat_template of .*tokenizer_config.json cannot render it: no such talk"),
        (conversation("ESCAPE", "x"), "cannot render it: .*unsafe"),
    ],
)
def test_lines_that_are_no_documents_are_refused_or_skipped(tmp_path: Path, line: Any, message: str | None) -> None:
    """Both what the error names and what it advises."""
    refuse = "{% if messages[0]['content'] == 'REFUSE' %}{{ raise_exception('no such talk') }}{% endif %}"
    escape = "{% if messages[0]['content'] == 'ESCAPE' %}{{ ''.__class__.__mro__ }}{% endif %}"
    write_tokenizer(tmp_path / "model", refuse + escape + TEMPLATE)
    tokenizer, file = Tokenizer(tmp_path / "model"), write_lines(tmp_path / "x.jsonl", TALK, line, TALK)
    if message is None:  # another letter
        assert len(chat(file, tokenizer, 64).left_out) == 0
        return
    is_refused = "cannot render" in message
    kind = "refused by the chat template" if is_refused else "malformed"
    text = "do not fit the chat template: .*; change the" if is_refused else "are no documents: .*; write"
    with pytest.raises(ValueError, match=rf"1 of 3 lines {text}.* broken='skip'") as error:
        chat(file, tokenizer, 64)
    assert re.search(message, str(error.value))
    data = chat(file, tokenizer, 64, broken="skip")
    assert len(data.left_out[kind]) == 1
    assert f"left out, {kind}: 1, x.jsonl:2 (" in data.description
    file.write_bytes(b'{"text": "\xff"}\n')
    # It advised to skip them.
    with pytest.raises(ValueError, match=r"1 of 1 lines are no documents: x.jsonl:1 \(no JSON: .*codec.* a line$"):
        chat(file, tokenizer, 64, broken="skip")


def test_a_template_that_changes_earlier_messages_needs_tags(folder: Path) -> None:
    """As templates that drop the reasoning of earlier answers; the tags that the error advises serve."""
    last = "{% if loop.last %}{{ 'thought ' }}{% endif %}"
    before = "{{ '<|im_start|>' + m['role'] + '\n' }}"
    write_tokenizer(folder, TEMPLATE.replace(before, before + last))
    says = "renders message 2 differently when others follow, .* put {% generation %} and {% endgeneration %} around"
    with pytest.raises(ValueError, match=says):
        Tokenizer(folder).chat(TALK["messages"])
    write_tokenizer(folder, TAGGED.replace("{% generation %}", "{% generation %}" + last))
    tokenizer = Tokenizer(folder)
    ids, counts = tokenizer.encode([tokenizer.chat(TALK["messages"])])[0]
    assert counted_text(tokenizer, ids, counts) == "is blue<|im_end|>thought is green\U0001f33f<|im_end|>"


def test_a_model_without_a_template_takes_one_or_completions(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(folder, template=None)
    file = write_lines(tmp_path / "x.jsonl", TALK, TALK)
    says = "has no chat template, which messages need; copy chat_template.jinja .*, or write lines with prompt"
    with pytest.raises(ValueError, match=says):
        chat(file, Tokenizer(folder), 64)
    assert Tokenizer(folder).stop == [1]
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert len(chat(file, Tokenizer(folder), 64).train) == 1
    (folder / "chat_template.jinja").write_text("{% for m in %}")
    with pytest.raises(ValueError, match=r"chat_template.jinja is no template of Jinja: .* \(line 1\); mend it"):
        Tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    completion = {"prompt": "the", "completion": " sky"}
    assert len(chat(write_lines(file, completion, completion), Tokenizer(folder), 64).train) == 1
    # One of several templates.
    write_tokenizer(folder, template=[{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}])
    assert Tokenizer(folder).has_template


def test_folders_without_a_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(folder, eos_token=None)
    file = write_lines(tmp_path / "x.jsonl", {"text": "the sky"}, {"text": "is blue"})
    with pytest.raises(
        ValueError, match=r"names no eos_token, which ends a text; add one to tokenizer_config.json, as ."
    ):
        chat(file, Tokenizer(folder), 64)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "</s>"}))
    assert len(chat(file, Tokenizer(folder), 64).train) == 1
    with pytest.raises(ValueError, match=r"makes token 2.., but the model has a vocabulary of 99: 0 to 98"):
        chat(file, Tokenizer(folder), 64, vocabulary=99)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read as a tokenizer: .*; fetch it once more"):
        Tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json, which text and chats need; .*save_pretrained\("):
        Tokenizer(folder)


def test_too_few_documents_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The length that the error advises serves."""
    file = write_lines(tmp_path / "x.jsonl", TALK, TALK)
    with pytest.raises(ValueError, match=r"has 0 documents in 2 lines; left out, longer than length=8: 2, .*x.jsonl:1"):
        chat(file, tokenizer, 8)
    with pytest.raises(ValueError, match=r"one to hold out, or use length=(\d+)") as error:
        chat(file, tokenizer, 8)
    length = int(str(error.value).rpartition("=")[2])
    assert len(chat(file, tokenizer, length).train) == 1
    with pytest.raises(ValueError, match="or use length="):
        chat(file, tokenizer, length - 1)
    with pytest.raises(ValueError, match=r"x.jsonl has 1 documents in 1 lines; give two or more"):
        chat(write_lines(file, TALK), tokenizer, 64)
    with pytest.raises(ValueError, match="there is no file or folder"):
        chat(tmp_path / "none.jsonl", tokenizer, 64)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no file .jsonl; give a folder of some"):
        chat(tmp_path / "empty", tokenizer, 64)
    with pytest.raises(ValueError, match="broken='no': use 'error' or 'skip'"):
        chat(file, tokenizer, 64, broken="no")


def test_a_packed_data_set_needs_no_tokenizer() -> None:
    documents = [(np.array([4, 5, 6], np.int32), np.array([False, False, True])) for _ in range(2)]
    (row,) = Packed(documents, 6)
    assert row["tokens"].tolist() == [4, 5, 6, 4, 5, 6, 0]
    assert row["segments"].tolist() == [0, 0, 0, 1, 1, 1, -1]
    assert row["mask"].tolist() == [0, 1, 0, 0, 1, 0]


def test_a_template_that_asks_for_today_s_date_is_refused_and_one_with_a_date_is_not(tmp_path: Path) -> None:
    """Mistral Small 3.1 asks always; Llama 3.1 asks only if there is the function, and else has a date."""
    today = "{{ strftime_now('%Y') }}"
    write_tokenizer(tmp_path / "asks", today + TEMPLATE)
    with pytest.raises(ValueError, match="'strftime_now' is undefined; write a date in its place"):
        Tokenizer(tmp_path / "asks").chat(TALK["messages"])
    for name, source in {
        "date": today.replace("strftime_now('%Y')", "'2026'"),
        "tested": "{% if strftime_now is defined %}" + today + "{% else %}2026{% endif %}",
    }.items():
        write_tokenizer(tmp_path / name, source + TEMPLATE)
        assert Tokenizer(tmp_path / name).chat(TALK["messages"]).text.startswith("2026<s>")


def test_packed_documents_have_the_loss_of_documents_alone() -> None:
    random = np.random.default_rng(0)
    documents = [(random.integers(1, 256, n, dtype=np.int32), random.random(n) < 0.7) for n in (9, 14, 5, 11, 3, 7)]

    def total_and_count(data: Packed) -> tuple[float, float]:
        rows = [data[i] for i in range(len(data))]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        step = jp.make_train_step(named("llama-tiny", layers=1).model, None, "single", mesh=jax.devices()[:1])
        state = step.init(jax.random.key(0))
        return float(step.evaluate(state, batch)["loss"]) * batch["mask"].sum(), batch["mask"].sum()

    apart = [total_and_count(Packed([document], 20)) for document in documents]
    loss, count = total_and_count(packed := Packed(documents, 20))
    assert len(packed) < len(documents)
    assert count == sum(n for _, n in apart)
    assert loss == pytest.approx(sum(nats for nats, _ in apart), rel=1e-5)
