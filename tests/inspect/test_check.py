"""check: unmodified strategies keep their promises; strategies broken on purpose are caught before anything runs."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxpar as jp
from jaxpar.hardware.devices import gpu_topology
from jaxpar.inspect.check.findings import check
from jaxpar.inspect.check.proof import Proof
from jaxpar.layout.leaves import Leaf, ModelLeaf
from jaxpar.models import llama
from jaxpar.parallel import DDP, rule_of
from jaxpar.parallel.tensor import RULES
from jaxpar.program import jaxpr as jx
from jaxpar.run.cli.commands import main
from jaxpar.slicing.slicer import Slicing, slice_program
from jaxpar.step.checks import misfit
from jaxpar.step.core import Step
from jaxpar.step.gradients import Local
from jaxpar.step.update import Update

# One layer is 1.18 MB in float32, so that a layer alone is more than what need not be promised.
LAYERS, DIM, HIDDEN, VOCAB = 3, 384, 768, 40
BATCH = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (16, 6), dtype=np.int32)}
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
MATRIX = LAYERS * DIM * HIDDEN  # elements of "up"
SPLIT = {"up": -1, "down": -2}


def init(key: jax.Array) -> dict[str, jax.Array]:
    shapes = {"embed": (VOCAB, DIM), "up": (LAYERS, DIM, HIDDEN), "down": (LAYERS, HIDDEN, DIM), "scale": (LAYERS, DIM)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.05 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
    def layer(h: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h * (1 + w["scale"]) @ w["up"]) @ w["down"], None

    stack = {name: params[name] for name in ("up", "down", "scale")}
    h, _ = lax.scan(layer, params["embed"][batch["tokens"][:, :-1]], stack)
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["embed"].T, batch["tokens"][:, 1:]).mean()


MODEL = jp.Model(init=init, loss=loss)


def make_step(strategy: str, optimizer: Any = ADAMW, **options: Any) -> Step:
    return jp.make_train_step(MODEL, optimizer, strategy, rules=SPLIT if "tensor" in strategy else None, **options)


@functools.cache
def proof_of(strategy: str) -> Proof:
    """Check a strategy; several tests share the result."""
    return check(make_step(strategy, mesh=jax.devices()[:1] if strategy == "single" else None), BATCH)


STRATEGIES = """single dp ddp zero1 zero1,precision=bf16 zero2 zero3 hsdp pipe=2,fsdp=4,microbatches=2 data=4,tensor=2
    data=2,fsdp=2,tensor=2,zero=2""".split()
BATTERY = """ddp,microbatches=2 ddp,precision=f16,reduce=compute zero2,precision=bf16 zero3,precision=f16,remat=layer
    tensor=8,precision=bf16""".split()


@pytest.mark.xdist_group("check")
@pytest.mark.parametrize("strategy", [*STRATEGIES, *(pytest.param(x, marks=pytest.mark.battery) for x in BATTERY)])
def test_strategies_keep_their_promises(strategy: str) -> None:
    proof = proof_of(strategy)
    assert proof.ok, proof
    proof.require()
    text = str(proof)
    assert max(map(len, text.splitlines())) <= 80
    assert "promises kept" in text
    assert json.loads(json.dumps(proof.json()))["ok"]
    parts = {finding.part for finding in proof.findings}
    of_few = {"single": {"state", "arguments"}, "dp": {"state", "exchanges"}}
    assert of_few.get(strategy, {"state", "arguments", "as written", "as compiled"}) <= parts


@pytest.mark.slow
def test_the_program_that_is_checked_is_the_one_that_runs(caplog: pytest.LogCaptureFixture) -> None:
    """One compilation, whether the step is called or compiled first."""
    step = make_step("zero1", check=True)
    state = step.init(jax.random.key(0))
    caplog.clear()
    with jax.log_compiles(True):
        for _ in range(2):
            state, _ = step(state, BATCH)
        step.compile(BATCH)
    compiled = [record for record in caplog.records if "Finished XLA compilation of jit(_train)" in record.getMessage()]
    assert len(compiled) == 1


# Defects. Each replaces the function that `BREAKS` names.


def unsharded(strategy: Any) -> Any:
    """Return DDP's rule, as if the strategy's flag did nothing."""
    return DDP


def unpublished(strategy: Any) -> Any:
    return dataclasses.replace(rule_of(strategy), published=False)


def not_reduced(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    return x


def at_once(flat: Any, how: Slicing) -> Any:
    return slice_program(flat, dataclasses.replace(how, sharded=[0] * len(how.sharded)))


_placed = ModelLeaf.placed


def leaf_whole(model_leaf: ModelLeaf, *arguments: Any) -> Leaf:
    leaf = _placed(model_leaf, *arguments)
    return dataclasses.replace(leaf, dim=None, padded=0) if leaf.path == "scale" else leaf


_gradients = Local.gradients


def gathered_rows(local: Local, stored: Any, variables: Any, batch: Any, *arguments: Any) -> Any:
    """All-gather activations that nobody promised, 2.1 MB from all replicas."""
    rows = jnp.tile(batch["tokens"].astype(jnp.float32), (1, 5500))
    all_rows = lax.all_gather(rows, "fsdp", tiled=True)
    grads, variables, sums = _gradients(local, stored, variables, batch, *arguments)
    return [g + 0 * all_rows.sum().astype(g.dtype) for g in grads], variables, sums


def whole_update(update: Update, leaf: Any, x: jax.Array) -> jax.Array:
    """Make the partitioner gather every leaf for the update."""
    return lax.with_sharding_constraint(x, update.layout.sharding(PartitionSpec()))


def gathered_operands(localiser: Any, eqn: Any, inputs: Any) -> Any:
    return [(value, None) for value in jx.bind(eqn, [localiser.whole(x) for x in inputs])]


def replicated_output(step: Step, name: str, batch: Any) -> Any:
    state, place = step._shardings, step.layout.sharding
    whole_optimizer = jax.tree.map(lambda _: place(PartitionSpec()), state.optimizer)
    shardings = (state, {"tokens": place(PartitionSpec(("data", "fsdp")))})
    outputs = (dataclasses.replace(state, optimizer=whole_optimizer), None)
    return jax.jit(step._train, in_shardings=shardings, out_shardings=outputs, donate_argnums=0)


# name -> (strategy, replacements, expected findings). The strategies keep their promises without the replacements.
BREAKS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a flag that does nothing": (
        "zero1",
        {"jaxpar.step.core.rule_of": unsharded, "jaxpar.step.gradients.rule_of": unsharded},
        [
            "MISSING state: optimizer state 1/0/mu/up",
            "MISSING as written: reduce-scatter fsdp float32",
            "MISSING as compiled: reduce-scatter fsdp",
            "UNPROMISED as compiled: all-reduce fsdp",
        ],
    ),
    "updated shards are not published": (
        "zero1",
        {"jaxpar.step.core.rule_of": unpublished},
        ["MISSING as written: all-gather fsdp float32"],
    ),
    "gradients are not reduced": (
        "ddp",
        {"jaxpar.parallel.data.ddp.all_reduce": not_reduced},
        ["MISSING as written: all-reduce data float32", "MISSING as compiled: all-reduce data"],
    ),
    "all layers are gathered at once": (
        "zero3",
        {"jaxpar.step.tracing.slice_program": at_once},
        ["MISSING layers: up", "MISSING layers: down"],
    ),
    "one leaf is not sharded": (
        "zero3",
        {"jaxpar.layout.leaves.ModelLeaf.placed": leaf_whole},
        ["MISSING state: parameters scale", "MISSING state: optimizer state 1/0/nu/scale"],
    ),
    "the optimizer's state leaves the step whole": (
        "zero3",
        {"jaxpar.step.core.Step._function": replicated_output},
        ["MISSING state: optimizer state 1/0/mu/down"],
    ),
    "activations are gathered": (
        "zero3",
        {"jaxpar.step.gradients.Local.gradients": gathered_rows},
        ["UNPROMISED as written: all-gather fsdp float32", "UNPROMISED as compiled: all-gather fsdp"],
    ),
    "the update gathers": (
        "zero3",
        {"jaxpar.step.update.Update.constrain": whole_update},
        ["UNPROMISED as compiled: all-gather fsdp"],
    ),
    "tensor ranks gather weights": (
        "data=4,tensor=2",
        {"jaxpar.step.passes.RULES": {**RULES, "dot_general": gathered_operands}},
        ["UNPROMISED tensor: weights, "],
    ),
    "tensor has no rule": (
        "data=4,tensor=2",
        {"jaxpar.step.passes.RULES": {**RULES, "dot_general": lambda *_: None}},
        ["UNPROMISED tensor: for want of a rule, dot_general"],
    ),
}
ALIKE = ("the optimizer's state leaves the step whole", "activations are gathered")  # caught as others are


@pytest.mark.filterwarnings("ignore:tensor=2. dot_general .* has no rule:UserWarning")  # which is what is broken
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.battery] if name in ALIKE else []) for name in BREAKS]
)
def test_a_broken_strategy_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, breaks, expected_findings = BREAKS[name]
    for target, broken in breaks.items():
        monkeypatch.setattr(target, broken)
    proof = check(make_step(strategy), BATCH)
    found = [f"{finding.verdict} {finding.part}: {finding.what}" for finding in proof.broken if finding.note]
    for expected in expected_findings:
        assert any(finding.startswith(expected) for finding in found), (expected, proof)
    assert "broken" in str(proof)
    assert max(map(len, str(proof).splitlines())) <= 80


@pytest.mark.slow
def test_nothing_runs_where_a_promise_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what was promised, what was found, and what to try; the state is unchanged."""
    monkeypatch.setattr("jaxpar.parallel.data.ddp.all_reduce", not_reduced)
    step = make_step("ddp", check=True)
    state = step.init(jax.random.key(0))
    for _ in range(2):  # not only the first time
        with pytest.raises(ValueError, match="strategy data=-1 on 8 x cpu did not take effect") as error:
            step(state, BATCH)
    assert not state.step.is_deleted()
    sent = 4 * sum(x.size for x in jax.tree.leaves(state.params))
    message = f"MISSING as compiled: all-reduce data, promised {sent / 1e6:.2f} MB, found 8 B"
    assert message in str(error.value)
    with pytest.raises(ValueError, match="MISSING as written: all-reduce data float32"):
        step.compile(BATCH)


def pair(key: jax.Array) -> dict[str, jax.Array]:
    a, b = jax.random.split(key)
    return {"a": jax.random.normal(a, (DIM, HIDDEN)) / 50, "b": jax.random.normal(b, (HIDDEN, DIM)) / 50}


@pytest.mark.filterwarnings("ignore:the optimizer multiplies")
@pytest.mark.slow
def test_an_optimizer_that_gathers_is_named() -> None:
    """Muon multiplies matrices that fsdp and tensor shard. As one stack of several leaves they have no owners, and the
    note names the line of optax that multiplies.
    """

    def value(params: dict[str, jax.Array], batch: jax.Array, key: jax.Array | None) -> jax.Array:
        return jnp.square(jnp.tanh(batch @ params["a"]) @ params["b"]).mean()

    model, batch = jp.Model(init=pair, loss=value), np.ones((8, DIM), np.float32)
    make = lambda optimizer: jp.make_train_step(model, optimizer, "fsdp=4,tensor=2", rules={"a": -1, "b": -2})
    assert check(make(optax.contrib.muon(1e-2)), batch).ok
    muon = optax.contrib.scale_by_muon(weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2))
    stack = lambda tree: jnp.stack([tree["a"], tree["b"].mT])

    def stacked(grads: Any, state: Any, params: Any = None) -> Any:
        (a, b), state = muon.update(stack(grads), state, params)
        return {"a": a, "b": b.mT}, state

    proof = check(make(optax.GradientTransformation(lambda p: muon.init(stack(p)), stacked)), batch)
    findings = {finding.what: finding for finding in proof.broken}
    assert findings.keys() == {"all-gather fsdp", "all-reduce tensor"}
    note = findings["all-gather fsdp"].note
    assert "suggested spec" in note
    assert all(move.spec is not None and not {*move.axes} & {*move.spec} for move in findings["all-gather fsdp"].moves)
    assert "optax/contrib/_muon.py:" in note
    assert " of a [" in note or " of b [" in note
    assert check(make(optax.adafactor(1e-2, min_dim_size_to_factor=16)), batch).ok  # it sends vectors


@pytest.mark.slow
def test_a_state_that_does_not_fit_is_named_by_its_array() -> None:
    """jax's own error names no array. A state of another strategy can be moved if its leaves have the same shapes."""
    step, other_step = make_step("zero3"), make_step("ddp")
    state = other_step.init(jax.random.key(0))
    message = r"the state has params/down \[3, 768, 384\] as P\(\) over data=8, the step keeps it as P\(.*fsdp.*\)"
    with pytest.raises(ValueError, match=message):
        step(state, BATCH)
    step(jax.device_put(state, jax.tree.map(lambda x: x.sharding, step.abstract_state())), BATCH)
    abstract_state = step.abstract_state()
    misfit_text = misfit(make_step("zero3", optax.sgd(0.1)).abstract_state(), abstract_state)
    assert misfit_text.startswith("the state lacks optimizer/1/0/count")
    misfit_text = misfit(make_step("pipe=2,fsdp=4,microbatches=2").abstract_state(), abstract_state)
    assert "params/down of shape [4, 768, 384], the step keeps [3, 768, 384]" in misfit_text


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(200)))
    model = "llama-tiny,layers=2,dim=16,heads=2,kv_heads=1,ffn=16"
    return ["check", "--model", model, "--length", "8", "--data", str(text)]


@pytest.mark.slow
def test_command(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    main([*words, "--strategy", "zero1"])
    assert "promises kept" in capsys.readouterr().out
    for name in ("core", "gradients"):
        monkeypatch.setattr(f"jaxpar.step.{name}.rule_of", unsharded)
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--strategy", "zero1", "--json"])
    assert exit_.value.code == 1
    assert not json.loads(capsys.readouterr().out)["ok"]
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--target", "8xH1000"])
    assert exit_.value.code == 2
    assert "H1000" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--strategy", "zero1", "--overlap"])
    assert "compiled for CPU has no asynchronous collectives" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.parametrize(
    "strategy",
    ["zero3,precision=bf16", pytest.param("pipe=2,data=2,tensor=2,microbatches=2", marks=pytest.mark.battery)],
)
def test_gpus_that_are_not_there(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU compiler is allowed fewer differences, and a defect shows in its program too."""
    devices = gpu_topology("8xH100")
    proof = check(make_step(strategy, mesh=devices), BATCH)
    assert proof.ok, proof
    allowed = {finding.note.partition(":")[0] for finding in proof.findings if finding.note}
    assert allowed <= {"norms", "last message", "one layer"}
    monkeypatch.setattr("jaxpar.step.update.Update.constrain", whole_update)
    assert check(make_step("zero3", mesh=devices), BATCH).broken


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_one_layer_that_gpus_compilers_unroll() -> None:
    """Forward and backward are then one program, which gathers once: half of the promise, which was called MISSING."""
    config = llama.Config(vocab=128, dim=256, layers=1, heads=2, kv_heads=2, ffn=512)
    model = jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss)
    step = jp.make_train_step(model, optax.sgd(0.1), "fsdp=2,remat=layer", mesh=gpu_topology("2xH100"))
    proof = check(step, {"tokens": jax.ShapeDtypeStruct((4, 65), np.int32)})
    assert proof.ok, proof
    halved = [finding for finding in proof.findings if finding.found < 0.99 * finding.promised]
    assert any(finding.note.startswith("one layer: ") for finding in halved)


@pytest.mark.battery
@pytest.mark.cuda_compiler
def test_command_for_a_target(words: list[str], capsys: pytest.CaptureFixture) -> None:
    main([*words, "--strategy", "zero2,precision=bf16", "--target", "8xH100"])
    assert "8 x NVIDIA H100" in capsys.readouterr().out


@pytest.mark.xdist_group("check")
@pytest.mark.parametrize(
    ("strategy", "name", "promised"),
    [
        ("zero3", "parameters up", 4 * MATRIX // 8),
        ("zero1,precision=bf16", "parameters up", 4 * MATRIX // 8),  # the master lives with the optimizer
        ("zero1,precision=bf16", "copy of parameters up", 2 * MATRIX),
        ("zero1,precision=bf16", "optimizer state 1/0/mu/up", 4 * MATRIX // 8),
        ("data=2,fsdp=2,tensor=2,zero=2", "parameters up", 4 * MATRIX // 2),
        ("data=2,fsdp=2,tensor=2,zero=2", "optimizer state 1/0/nu/up", 4 * MATRIX // 4),
        ("pipe=2,fsdp=4,microbatches=2", "parameters up", 4 * MATRIX // 3 * 4 // 8),  # 3 layers become 4 on 2 ranks
    ],
)
def test_bytes_are_the_papers(strategy: str, name: str, promised: int) -> None:
    (finding,) = (finding for finding in proof_of(strategy).findings if finding.what == name)
    assert finding.promised == finding.found == promised
