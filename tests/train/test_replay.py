"""A recorded step is computed again: the same to the bit, within rounding, or which leaf on which device is another."""

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from test_trainer import batches, trainer

import jaxpar as jp
from jaxpar.cli import main
from jaxpar.train.digests import digests_of
from jaxpar.train.recorder import read

MESH = jax.devices()[:4]


OPTIONS = {"record": 2, "save_every": 3, "steps": 6, "mesh": MESH}


def run(out: Path, hook: Any = None, **options: Any) -> jp.Trainer:
    made = trainer(out, hook, **OPTIONS | options)
    made.run()
    return made


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recorded")
    run(out)
    return out


def again(out: Path, step: int, **options: Any) -> Any:
    return jp.replay(trainer(out, **OPTIONS | options), step, equation=False)


@pytest.mark.slow
def test_the_same_layout_has_the_same_bits(recorded: Path) -> None:
    assert [line["step"] for _, line in digests_of(recorded)] == [2, 4, 6]
    assert (recorded / "digests.jsonl").stat().st_size < 4 * 2048  # a head, and three digests
    found = again(recorded, 6)
    assert (found.ok, found.since, found.compared, found.others) == (True, 3, (4, 6), {})
    assert str(found).startswith("step 6, computed again from the checkpoint of step 3, is the same to the bit: loss")
    assert (early := again(recorded, 2)).ok
    assert early.since == 0
    assert sorted(path.name for path in (recorded / "checkpoints").iterdir()) == ["3", "6"]


@pytest.mark.slow
def test_another_layout_has_the_same_numbers(recorded: Path) -> None:
    found = again(recorded, 6, strategy="data=2,fsdp=2")
    assert found.ok
    assert "is the same within 1e-05 (recorded steps: 4, 6); the strategy was fsdp=4, and is data=2,fsdp=2" in str(
        found
    )
    assert again(recorded, 6, strategy="fsdp=4,gather=int8").tolerance == 0.1  # the lower of the two
    other = again(recorded, 6, strategy="data=2,fsdp=2", optimizer=optax.adamw(1.1e-2))
    assert (other.ok, other.step, other.compared) == (False, 6, (4, 6))  # the loss of 4 is from before its update
    assert {*other.scalars} == {"loss", "grad_norm"}


def coupling(params: Any, batch: Any, key: Any) -> jax.Array:
    hidden = jax.numpy.tanh(batch["x"] @ params["w"])
    picked = hidden[jax.numpy.arange(3)[None], batch["label"][:, None]]  # the first rows: each replica has its own
    return (picked**2).mean()


def coupled(out: Path, strategy: str, devices: Any) -> jp.Trainer:
    """A trainer of a loss that couples rows, and says that it does not."""

    def data(start: int) -> Any:
        for i in range(start, 10**6):
            yield {"x": np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32), "label": np.arange(8) % 5}

    model = jp.Model(lambda key: {"w": jax.random.normal(key, (8, 8))}, coupling, rows="independent")
    loop = jp.Loop(steps=2, out=out, record=2, quiet=True)
    return jp.Trainer(model, optax.adam(0.1), data, strategy, loop, mesh=devices)


@pytest.mark.battery
def test_a_wrong_strategy_is_named_by_its_equation(tmp_path: Path) -> None:
    coupled(tmp_path, "ddp", MESH).run()
    at = inspect.getsourcelines(coupling)[1] + 2
    found = jp.replay(coupled(tmp_path, "single", MESH[:1]), 2)
    assert (found.ok, {*found.scalars}) == (False, {"loss", "grad_norm"})
    assert "data=4 on devices 0, 1, 2, 3 and single on device 0 part at gather, its result, at " in str(found)
    assert f"test_replay.py:{at}:" in str(found)
    assert jp.replay(coupled(tmp_path, "fsdp", MESH), 2).ok  # whose replicas have the same first rows


_WORKER = """
import sys
import jaxpar as jp
jp.initialize()
import jax
sys.path[:0] = ["tests", "tests/train"]
from test_replay import coupled
coupled(sys.argv[1], "ddp", jax.devices()).run()
print(jp.replay(coupled(sys.argv[1], "data=2", jax.devices()[::2]), 2))
"""


@pytest.mark.battery
def test_of_two_processes_both_name_the_equation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxpar", "launch", "--processes", "2", "--devices", "2", "--", "-c", _WORKER]
    run = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" part at gather, its result, at ") == 2, run.stdout


def test_other_data_are_named(recorded: Path) -> None:
    def others(start: int) -> Any:
        for number, batch in enumerate(batches(start), start + 1):
            yield batch if number < 6 else batch | {"y": batch["y"] + 1}

    found = again(recorded, 6, data=others)
    assert found.batch == ("y",)
    assert "its batch is another, in y: the data are not what they were" in str(found)


def test_what_cannot_be_replayed_is_refused(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 3 was not recorded; use one that was, such as 2, 4, 6"):
        again(recorded, 3)
    with pytest.raises(ValueError, match=r"computed with steps=6, here steps=7, .*; give steps=6"):
        again(recorded, 6, steps=7)
    with pytest.raises(ValueError, match="is of another run: seed 0 there and 1 here"):
        again(recorded, 6, seed=1)
    with pytest.raises(ValueError, match="is of another model or optimizer"):
        again(recorded, 2, optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match="holds no digests; record them as it trains, with record=10"):
        again(tmp_path, 3)
    with pytest.raises(ValueError, match="record=2 needs somewhere to write to"):
        trainer(record=2)
    with pytest.raises(ValueError, match="goes on with older parameters"):
        jp.Loop(record=2, on_nonfinite="rollback", out=tmp_path)


@pytest.mark.slow
def test_a_run_that_is_resumed_has_each_digest_once(recorded: Path, tmp_path: Path) -> None:
    run(tmp_path, steps=4, save_every=2)
    run(tmp_path, save_every=2, resume=True)
    lines = read(tmp_path / "digests.jsonl")
    assert [line["step"] for line in lines] == [0, 2, 4, 4, 6]
    strip = lambda out: {line["step"]: line["leaves"] for _, line in digests_of(out)}
    assert strip(tmp_path) == strip(recorded)
    with pytest.raises(ValueError, match="computed with steps=4, here steps=6"):
        again(tmp_path, 4)
    assert again(tmp_path, 6).compared == (4, 6)  # 4 is that of the checkpoint


@pytest.mark.slow
def test_recording_changes_no_program(tmp_path: Path) -> None:
    texts = {run(tmp_path / str(record), record=record, steps=2).compiled.as_text() for record in (2, None)}
    assert len(texts) == 1


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "llama-tiny,layers=1,dim=16,heads=2,kv_heads=2,ffn=32"
    words = "--steps 2 --record 1 --length 8 --rows 8 --evaluate-batches 1 --sample 0 --quiet --strategy fsdp"
    main(["train", "--model", model, "--out", str(tmp_path / "run"), *words.split()])
    main(["replay", str(tmp_path / "run"), "--step", "2", "--rotate", "1"])
    assert "step 2, computed again from the initial values, is the same to the bit: loss" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ends:
        main(["replay", str(tmp_path / "run"), "--step", "3"])
    assert ends.value.code == 2
    assert "step 3 was not recorded; use one that was, such as 2, 1" in capsys.readouterr().err


# -- bits that are flipped ---------------------------------------------------------------------------------------------


def flipped(x: jax.Array, device: int, bit: int) -> jax.Array:
    """An array with another bit in the first element of what one device holds, which jax is not told."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint32)[0] ^= 1 << bit
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def flips(what: str, step: int, device: int) -> jp.Hook:
    """Flips a bit in the state after a step: a hook hears of the step before while that one is running."""

    def flip(made: Any, metrics: Any) -> None:
        if metrics["step"] == step - 1:
            path = lambda kind: lambda p, x: flipped(x, device, 9) if kind in jax.tree_util.keystr(p) else x
            kind = {"params": "['layers']", "optimizer": ".mu['layers']"}[what]
            tree = jax.tree_util.tree_map_with_path(path(kind), getattr(made.state, what))
            made.state = dataclasses.replace(made.state, **{what: tree})

    return jp.Hook(on_step=flip)


def flips_gradient(at: int, device: int, mesh: Any, spec: PartitionSpec) -> optax.GradientTransformation:
    """Flips a bit in one device's part of a gradient, in step `at`; never at 0."""
    place = [one.id for one in mesh.devices.flat].index(device)

    def local(x: jax.Array) -> jax.Array:
        number = jax.lax.axis_index(("data", "fsdp"))
        bits = jax.lax.bitcast_convert_type(x, jax.numpy.uint32)
        other = jax.lax.bitcast_convert_type(bits.at[(0,) * x.ndim].set(bits[(0,) * x.ndim] ^ (1 << 20)), x.dtype)
        return jax.numpy.where(number == place, other, x)

    def update(grads: Any, count: jax.Array, params: Any = None) -> Any:
        wrong = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(grads["layers"])
        layers = jax.numpy.where(count + 1 == at, wrong, grads["layers"])
        return grads | {"layers": layers}, count + 1

    return optax.GradientTransformation(lambda params: jax.numpy.zeros((), jax.numpy.int32), update)


@pytest.mark.parametrize("what", ["params", "optimizer", "gradient"])
def test_a_flipped_bit_of_a_replica_ends_the_run_by_its_leaf_and_device(what: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if what == "gradient":
        mesh = trainer(tmp_path, strategy="ddp", mesh=MESH).step.mesh
        options["optimizer"] = optax.chain(flips_gradient(3, 2, mesh, PartitionSpec()), optax.adamw(1e-2))
    hook = None if what == "gradient" else flips(what, 3, 2)
    moment = {
        "params": "",
        "optimizer": r", optimizer/0/mu/layers \[3, 16, 16\]",
        "gradient": r", optimizer/1/0/mu/layers \[3, 16, 16\], optimizer/1/0/nu/layers \[3, 16, 16\]",
    }[what]
    with pytest.raises(ValueError, match=rf"after step 4 in params/layers \[3, 16, 16\]{moment}: device 2 of process 0 "
                                         "differs from device 0 of process 0, device 1 of process 0"):  # fmt: skip
        run(tmp_path, hook, strategy="ddp", **options)
    assert [line["step"] for _, line in digests_of(tmp_path)] == [2]


@pytest.mark.parametrize("at", [4, 3])  # a recorded step, and one between two
@pytest.mark.parametrize("what", ["params", "optimizer", "gradient"])
def test_a_flipped_bit_of_a_shard_is_convicted_by_a_replay(what: str, at: int, tmp_path: Path) -> None:
    options, clean = dict[str, Any](), dict[str, Any]()
    if what == "gradient":
        made = trainer(tmp_path, strategy="fsdp", mesh=MESH).step
        spec = next(x.sharding.spec for x in jax.tree.leaves(made.abstract_state().params) if len(x.shape) == 3)
        options, clean = (
            {"optimizer": optax.chain(flips_gradient(step, 2, made.mesh, spec), optax.adamw(1e-2))} for step in (at, 0)
        )
    run(tmp_path, None if what == "gradient" else flips(what, at, 2), keep=1, save_every=6, **options)
    found = again(tmp_path, 6, **clean)
    assert (found.ok, found.step, found.compared) == (False, 4, (2, 4))
    assert "DIFFERS; 1 recorded steps before it are the same" in str(found)
    assert json.loads(json.dumps(dataclasses.asdict(found)))["step"] == 4
    moved = {"params/layers", "optimizer/1/0/mu/layers", "optimizer/1/0/nu/layers"}
    of = {"params": {"params/layers"}, "optimizer": {"optimizer/0/mu/layers"}, "gradient": moved}[what]
    if at == 3 and what == "optimizer":  # whose next update has moved the leaf itself, which no forward has read
        of |= {"params/layers"}
    elif at == 3:  # a forward of all devices has read it
        assert len(found.leaves) == 6
        assert len(found.devices) == 4
        assert "it began in one of the steps 3 to 4: where each is recorded (record=1), " in str(found)
        # A low bit of a parameter changes the loss on some releases of jax alone.
        assert "loss" in found.scalars or what != "gradient"
        return
    assert found.devices == ("device 2 of process 0",)
    assert {*found.leaves} == of


@pytest.mark.slow
def test_a_device_that_is_always_wrong_is_found_by_turning_the_others(tmp_path: Path) -> None:
    turned = [*MESH[-1:], *MESH[:-1]]

    def options(devices: Any) -> dict[str, Any]:
        step = trainer(tmp_path / "none", strategy="fsdp", mesh=devices).step
        spec = next(x.sharding.spec for x in jax.tree.leaves(step.abstract_state().params) if len(x.shape) == 3)
        return {"optimizer": optax.chain(flips_gradient(2, 1, step.mesh, spec), optax.adamw(1e-2)), "mesh": devices}

    run(tmp_path, steps=2, **options(MESH))
    assert again(tmp_path, 2, steps=2, **options(MESH)).ok  # it is wrong as it was
    found = again(tmp_path, 2, steps=2, **options(turned))
    both = ("device 1 of process 0 (now device 0 of process 0)", "device 2 of process 0 (now device 1 of process 0)")
    assert found.devices == both
