"""The commands on checkpoints, applied to checkpoints as `jaxpar train` writes them."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.models import llama, named
from jaxpar.run.cli import main

TINY = "llama-tiny,layers=2,dim=16,heads=2,kv_heads=2,ffn=24"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    model = named("llama-tiny", layers=2, dim=16, heads=2, kv_heads=2, ffn=24).model
    step = jp.make_train_step(model, optax.sgd(0.1), "fsdp")
    state = step.init(jax.random.key(0))
    with Checkpoints(out / "checkpoints", step, {"model": TINY}, keep=3) as saves:
        saves.save(0, state)
        saves.save(1, replace(state, step=state.step + 1))
    return out


@pytest.mark.slow
def test_checkpoints_are_verified(run: Path, capsys: pytest.CaptureFixture) -> None:
    main(["verify-checkpoint", str(run)])
    shown = capsys.readouterr().out
    assert len(re.findall(r"checkpoints/\d: \d+ arrays, .* saved under fsdp=8: as written", shown)) == 2
    path = max((run / "checkpoints" / "0" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SystemExit) as exit_:
        main(["verify-checkpoint", str(run / "checkpoints")])
    assert exit_.value.code == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"0 is damaged: state/\S+ is not what was written; .*1: \d+ arrays", shown)
    path.write_bytes(content)
    with pytest.raises(SystemExit) as exit_:
        main(["verify-checkpoint", str(run / "nowhere")])
    assert exit_.value.code == 2


def test_a_checkpoint_becomes_weights_and_a_hugging_face_folder(run: Path, tmp_path: Path) -> None:
    source = jp.Checkpoint(run)
    main(["convert", str(run), str(tmp_path / "weights"), "--weights-only", "--dtype", "bfloat16"])
    weights = jp.Checkpoint(tmp_path / "weights")
    weights.verify()
    assert weights.step == 1
    assert not any(name.startswith("optimizer") for name in weights.arrays)
    np.testing.assert_array_equal(weights.read("params/embedding"), source.read("params/embedding").astype("bfloat16"))
    main(["convert", str(run), str(tmp_path / "all")])
    assert jp.Checkpoint(tmp_path / "all").arrays == source.arrays
    with pytest.raises(SystemExit):
        main(["convert", str(run), str(tmp_path / "all")])

    pytest.importorskip("safetensors")
    main(["convert", str(run), str(tmp_path / "hf"), "--to", "huggingface"])
    config, params = llama.from_hf(tmp_path / "hf")
    assert config.layers == 2
    np.testing.assert_array_equal(params["layers"]["ffn"]["up"]["kernel"], source.read("params/layers/ffn/up/kernel"))
    with pytest.raises(SystemExit):
        main(["convert", str(run), str(tmp_path / "hf2"), "--to", "huggingface", "--model", "gpt-tiny"])
