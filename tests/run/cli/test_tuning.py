"""Tuning a Hugging Face folder on chats from the command line: answers, adapters that come back, bytes refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import yaml
from chats import conversation, write_lines, write_tokenizer
from test_cli import fails

import jaxpar as jp
from jaxpar.data import Tokenizer
from jaxpar.models import llama
from jaxpar.run.cli import main
from jaxpar.run.cli.exports import with_adapter
from jaxpar.run.cli.options import TrainOptions, model_of
from jaxpar.run.cli.parsing import parse
from jaxpar.run.train.recorder import read

pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab = write_tokenizer(folder := tmp_path_factory.mktemp("model"))
    config = llama.Config(vocab=vocab, dim=32, layers=1, heads=2, kv_heads=1, ffn=32, tied=True, context=128)
    params, _ = jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss).create(jax.random.key(3))
    llama.to_hf(config, params, folder, dtype="bfloat16")
    return folder


@pytest.fixture
def base(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a tokenizer, beside chats, texts and JSON."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "base")
    write_lines(tmp_path / "chats.jsonl", *[conversation("the sky", "is blue", "and the grass", "is green")] * 24)
    write_lines(tmp_path / "plain.txt", "the sky is blue" * 20)
    write_lines(tmp_path / "all.json", [conversation("the sky", "is blue")])
    return tmp_path / "base"


@pytest.mark.slow
def test_adapters_are_tuned_on_chats_answer_and_come_back(base: Path, capsys: pytest.CaptureFixture) -> None:
    """They are the same in the state of a run, in peft's format, in a run that starts from them, and merged."""
    words = "--data chats.jsonl --length 64 --strategy fsdp,precision=bf16 --weight-decay 0 --warmup 0"
    first = f"train --model ./base,lora=4,lora_targets=query+value+up+down {words} --steps 90 --lr 0.03 --out run"
    main([*first.split(), "--sample", "8", "--evaluate-batches", "1"])
    shown = capsys.readouterr().out
    assert "on chats.jsonl: 24 documents in 24 lines, 1 of them held out; the others fill" in shown
    assert "and the grass<|im_end|>\n<|im_start|>assistant\n\nand its answer:\nis green\n" in shown
    losses = [line["loss"] for line in read(Path("run") / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < 0.25 * losses[0]

    main(["convert", "run", "adapters", "--to", "peft"])
    main(["convert", "run", "merged", "--to", "huggingface", "--dtype", "float32"])
    capsys.readouterr()
    second = f"train --model ./base --adapter ./adapters {words} --steps 1 --lr 1e-9 --sample 0 --out again"
    main([*second.split(), "--evaluate-batches", "1"])
    main(["convert", "again", "exported", "--to", "huggingface", "--dtype", "float32"])
    shown = capsys.readouterr().out
    assert "starts from the adapters in adapters, of rank 4, trained on base" in shown
    # Where the first run ended; the rows of the batch differ.
    (line,) = [line for line in read(Path("again") / "metrics.jsonl") if "loss" in line]
    assert line["loss"] < 0.25 * losses[0]
    model = yaml.safe_load((Path("again") / "config.yaml").read_text())["model"]
    assert model == "./base,lora=4,lora_alpha=16.0,lora_targets=query+value+up+down"
    for one, other in zip(*(jax.tree.leaves(llama.from_hf(name)[1]) for name in ("merged", "exported")), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)
    assert (Path("exported") / "tokenizer.json").exists()

    # It resumes, and other commands know its adapters.
    main("train --resume --out again --steps 2".split())
    main("convert again adapters-again --to peft".split())
    config = json.loads((Path("adapters-again") / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj", "up_proj", "v_proj"]

    # The same answer from Python, by the merged model under another strategy.
    merged, params = llama.from_hf("merged")
    net = jp.from_nnx(lambda rngs: llama.Llama(merged, rngs=rngs), llama.loss, llama.RULES)
    step = jp.make_train_step(net, optax.sgd(0.1), "tensor=2", jax.devices()[:2])
    module = step.model(step.init(jax.random.key(0), params=params))
    tokenizer = Tokenizer("merged")
    prompt = tokenizer.prompt(conversation("the sky", "is blue", "and the grass")["messages"])
    tokens = jp.generate(module, [prompt], 8, jax.random.key(0), temperature=0, stop=tokenizer.stop)
    assert tokenizer.decode(np.asarray(tokens)[0, len(prompt) :].tolist()) == "is green"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model llama-tiny --data chats.jsonl", "llama-tiny has no tokenizer; name a folder of Hugging Face:"),
        ("--model llama-tiny --data all.json", "all.json is JSON, whose raw bytes are no text: write one object a"),
        ("--model ./base --data all.json", "write one object a line, into a file .jsonl; or train on them: --bytes"),
        ("--model ./base --data plain.txt", "bytes, which are no tokens of ./base; write its texts into a file .jsonl"),
        ("--model ./base", "the default data are bytes, which are no tokens of ./base; name yours: --data chats.jsonl"),
        ("--model ./base --data chats.jsonl --length 8", "longer than --length 8: 24, chats.jsonl:1 (49), "),
        ("--model llama-tiny --adapter adapters", "--adapter adapters needs the folder of its base: --model ./folder"),
        ("--model ./base --adapter none --data chats.jsonl", "there is no folder none; give the folder that has"),
        ("--model ./base,lora=2,lora_targets=all --data chats.jsonl", "lora_targets='all' names all; join some of"),
    ],
)
def test_what_has_no_tokens_is_refused(base: Path, words: str, message: str, capsys: pytest.CaptureFixture) -> None:
    """The raw bytes of JSON were trained on, with a notice and the status 0."""
    assert message in fails(["train", *words.split(), "--out", "run"], 2, capsys)
    assert not Path("run").exists()


@pytest.mark.parametrize("words", ["--model llama-tiny --data chats.jsonl", "--model ./base --data plain.txt"])
def test_bytes_that_are_asked_for_are_read(base: Path, words: str) -> None:
    _, source = model_of(parse(TrainOptions, "train", [*words.split(), "--bytes", "--length", "8"]))
    assert source.corpus is not None


def test_the_projections_of_an_adapter_may_be_named_in_any_order(base: Path) -> None:
    config, params = llama.from_hf(base)
    adapted = dataclasses.replace(config, lora=2, lora_targets="query+value")
    params, _ = jp.from_nnx(lambda rngs: llama.Llama(adapted, rngs=rngs), llama.loss).create(jax.random.key(0))
    llama.save_adapters(adapted, params, "adapters", "base")
    options = lambda model: parse(TrainOptions, "train", ["--model", model, "--adapter", "adapters"])
    assert "lora_targets=value+query" in with_adapter(options("./base,lora_targets=value+query")).model
    with pytest.raises(
        ValueError, match=r"has another lora_targets than adapters, which has query\+value; leave it out"
    ):
        with_adapter(options("./base,lora_targets=query"))
    assert with_adapter(options("./base")).model == "./base,lora=2,lora_alpha=16.0,lora_targets=query+value"
