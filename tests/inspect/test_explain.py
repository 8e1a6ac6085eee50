"""step.explain: memory, ledger, exchanges of a server and closed forms, as text and as JSON."""

import functools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from jax import lax
from test_known_cost import compiled, group

import jaxpar as jp
from jaxpar.backend.machines import leaves_host
from jaxpar.backend.text import size
from jaxpar.hardware.compiled.entry import Nesting
from jaxpar.hardware.compiled.hlo import arrays
from jaxpar.hardware.compiled.kernels import Start, While
from jaxpar.inspect.explain.explanation import Explanation, _strategy_in_words, ledger_table
from jaxpar.inspect.explain.findings import _axes_across_hosts, explain
from jaxpar.inspect.explain.picture import memory_parts
from jaxpar.inspect.ledger import Collective, Ledger
from jaxpar.inspect.memory import saved
from jaxpar.step.server import Live, ServerStep

DEVICES, LAYERS, DIM = 8, 4, 32
BATCH = {"x": np.ones((16, DIM), np.float32), "weight": jp.Replicated(np.ones(3, np.float32))}


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (LAYERS, DIM, DIM)) / DIM**0.5, "odd": jnp.ones(3)}


def loss(params: dict[str, jax.Array], batch: Any, key: jax.Array | None) -> tuple[jax.Array, dict[str, Any]]:
    h, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch["x"], params["w"])
    value = (h**2).mean() * (batch["weight"] * params["odd"]).sum()
    return value, {"size": jp.Mean(jnp.abs(h).sum(), h.size)}


MODEL = jp.Model(init=init, loss=loss)
P = 4 * (LAYERS * DIM * DIM + 3)  # bytes of the parameters, and of their momentum


@functools.cache
def explanation_of(strategy: str) -> Explanation:
    return jp.make_train_step(MODEL, optax.sgd(0.1, momentum=0.9), strategy).explain(BATCH)


@pytest.mark.parametrize(
    ("strategy", "shards", "parts"),
    [
        ("single", 1, set()),
        ("ddp", 1, {"data parallel"}),
        ("zero3", 8, {"scalars", "ZeRO-3"}),
        ("hsdp", 4, {"scalars", "ZeRO-3", "data parallel"}),
    ],
)
def test_of_one_program(strategy: str, shards: int, parts: set[str]) -> None:
    step = jp.make_train_step(MODEL, optax.sgd(0.1, momentum=0.9), strategy)
    explanation = step.explain(BATCH)
    stored_bytes = 4 * (LAYERS * DIM * DIM // shards + 3)
    memory = explanation.memory["each device"]
    assert (memory.params, memory.grads, memory.optimizer) == (stored_bytes, stored_bytes, stored_bytes)
    compiled = step.compile(BATCH)
    program = compiled.memory_analysis()
    assert memory.temporaries == program.temp_size_in_bytes
    assert memory.arguments == program.argument_size_in_bytes >= 2 * stored_bytes
    most = memory.arguments + memory.outputs + memory.temporaries - 2 * stored_bytes + 64
    assert memory.arguments <= memory.total <= most
    assert explanation.ledger == Ledger.from_hlo(compiled.as_text(), step.mesh)
    assert explanation.transfers == ()
    for check in explanation.checks:
        assert check.written_count == check.expected_count
        assert 0 <= check.found - check.expected <= 64, check
    assert list(explanation.notes) == (["odd"] if shards > 1 else [])
    # The forward, and two products of each layer in the backward, of this device's rows.
    assert explanation.flops == {"float32": 3 * LAYERS * 2 * (16 // step.replicas) * DIM * DIM}
    assert explanation.exposed == explanation.ledger.total("sent")  # nothing overlaps on the CPU
    for collective in explanation.ledger:
        group_size = math.prod(explanation.axes[axis] for axis in collective.axes)
        times = 2 if collective.kind == "all-reduce" else 1
        assert collective.sent == times * collective.bytes * (group_size - 1) // group_size
    assert explanation.across == frozenset()
    assert {check.strategy for check in explanation.checks} == parts
    assert_printable(explanation)


def test_a_note_is_written_once() -> None:
    """The note of a leaf that no rule splits came both from the layout and from explain."""
    shapes = {"position": (128, 128), "split": (128, 8)}
    model = jp.Model(
        lambda key: {name: jnp.ones(shape) for name, shape in shapes.items()},
        lambda params, batch, key: jnp.mean(batch @ params["position"] @ params["split"]),
    )
    step = jp.make_train_step(model, optax.sgd(0.1), "tensor=2", mesh=jax.devices()[:2], rules={"split": 1})
    explanation = step.explain(np.ones((4, 128), np.float32))
    note = "whole on every tensor rank: no rule splits it"
    assert explanation.notes == step.layout.notes == {"position": note}
    assert " ".join(str(explanation).split()).count(note) == 1


def assert_printable(explanation: Explanation) -> None:
    """Check the text and the JSON of an explanation."""
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("closed form") == bool(explanation.checks) + bool(explanation.transfers)
    assert all(path in text for path in explanation.notes)
    parsed = json.loads(json.dumps(explanation.json(), allow_nan=False))
    assert parsed["flops"] == explanation.flops
    assert {row["across_hosts"] for row in parsed["ledger"]} <= {False}
    assert parsed["memory"].keys() == explanation.memory.keys()
    assert [check["found"] for check in parsed["checks"]] == [check.found for check in explanation.checks]


def test_of_a_server() -> None:
    """A server has five exchanges, and stores the optimizer's state and the gradients of all replicas."""
    explanation = explanation_of("dp")
    num_others = DEVICES - 1
    keys = 4 + 8  # the step's number and the key go with the weights
    assert [(transfer.kind, transfer.what, transfer.found) for transfer in explanation.transfers] == [
        ("scatter", "rows of the batch", num_others * (2 * DIM * 4 + 3 * 4)),
        ("broadcast", "weights", num_others * (P + keys)),
        ("gather", "losses", num_others * 2 * 2 * 4),
        ("scatter", "gradients of the losses", num_others * 4),
        ("gather", "gradients", num_others * P),
    ]
    assert all(transfer.expected == transfer.found for transfer in explanation.transfers)
    server, replica = explanation.memory["server"], explanation.memory["others"]
    assert (server.params, server.grads, server.optimizer) == (P, DEVICES * P, P)
    assert (replica.params, replica.grads, replica.optimizer) == (P, P, 0)
    assert server.program == "update"
    assert server.total > replica.total
    assert explanation.ledger == ()
    assert_printable(explanation)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_exchanges_are_those_that_run(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal has the transfers of a real step, in the same order, to the same devices."""
    step = jp.make_train_step(MODEL, optax.sgd(0.1), f"dp,microbatches={microbatches}")
    assert isinstance(step, ServerStep)
    moves = []
    move = Live.move

    def watched(self: Live, kind: str, subject: str, tree: Any, target: Any) -> Any:
        moved = move(self, kind, subject, tree, target)
        places = {len(x.sharding.device_set) for x in jax.tree.leaves(moved)}
        moves.append((kind, subject, *places))
        return moved

    monkeypatch.setattr(Live, "move", watched)
    step(step.init(jax.random.key(0)), BATCH)
    assert [(kind, subject) for kind, subject, _ in moves] == [
        (transfer.kind, transfer.what) for transfer in step.explain(BATCH).transfers
    ]
    assert [devices for *_, devices in moves] == [DEVICES, DEVICES, 1, DEVICES, 1]


@pytest.mark.parametrize(
    ("strategy", "values"),
    [
        ("zero3,remat=layer", LAYERS),  # the input of each layer
        ("ddp,remat=layer,microbatches=2", LAYERS),
        ("pipe=2,data=4,microbatches=2,remat=layer", 3 * LAYERS // 2),  # 3 slots, each of half the layers
    ],
)
def test_saved_activations_by_hand(strategy: str, values: int) -> None:
    """Saved are a layer's values for one microbatch, the last layer's output, and the derivative of its square."""
    step = jp.make_train_step(MODEL, optax.sgd(0.1), strategy)
    value_bytes = 16 // step.replicas // step.strategy.microbatches * DIM * 4
    num_values = saved(step, BATCH) / value_bytes
    assert values <= num_values <= values + (0 if step.schedule else 4)
    without_remat = jp.make_train_step(MODEL, optax.sgd(0.1), strategy.replace("remat=layer", "remat=none"))
    assert saved(without_remat, BATCH) / value_bytes >= num_values + values  # the tanh of each layer too


def test_parts_of_memory_add_up() -> None:
    for strategy in ("zero3", "dp"):
        for memory in explanation_of(strategy).memory.values():
            parts = memory_parts(memory)
            assert all(part >= 0 for part in parts.values())
            assert sum(parts.values()) == max(memory.total, memory.params + memory.grads + memory.optimizer)


def test_collectives_that_leave_a_host() -> None:
    """On two hosts of four devices, data crosses hosts, fsdp and tensor do not; another device order reverses this."""

    def mesh(hosts: np.ndarray) -> Any:
        devices = np.vectorize(lambda host: SimpleNamespace(process_index=host), otypes=[object])(hosts)
        return SimpleNamespace(devices=devices, axis_names=("pipe", "data", "fsdp", "tensor"))

    outer = mesh(np.arange(8).reshape(1, 2, 2, 2) // 4)
    expected = {("data",): True, ("fsdp",): False, ("fsdp", "tensor"): False, ("data", "fsdp"): True, ("pipe",): False}
    assert {axes: leaves_host(outer, axes) for axes in expected} == expected
    assert leaves_host(outer, ("2 of data+fsdp",))
    inner = mesh(np.arange(8).reshape(1, 2, 2, 2) % 2)
    assert [leaves_host(inner, (axis,)) for axis in ("data", "fsdp", "tensor")] == [False, False, True]
    # Groups of two within a host, on an axis that crosses hosts; and in a loop, groups that cross hosts.
    program = lambda *operations: SimpleNamespace(operations=operations)
    start = lambda axes, groups: Start("", "", "all-gather", axes, 8, groups, waits=False)
    within, beyond = start(("2 of data+fsdp",), ((0, 2), (4, 6))), start(("4 of data+fsdp",), ((0, 2, 4, 6),))
    closed: Any = Ledger([Collective("all-gather", ("2 of data+fsdp",), "float32", 1, 8)])
    axes_across = _axes_across_hosts(outer, [program(within), program(While("", 1, (beyond,)))], closed)
    assert axes_across == {("4 of data+fsdp",)}
    # Without programs, the closed form's axes decide.
    assert _axes_across_hosts(outer, [], closed) == {("2 of data+fsdp",)}


def gathered_behind_compute(text: str) -> int:
    """Return the bytes of bfloat16 all-gathers over 8 devices that overlap with compute.

    An all-gather overlaps if a kernel that computes is scheduled between its start and its done. Names tell which
    kernels only move or cast. Layers run in loops, whose first or last iteration may be outside the loop.
    """
    entry, total = text.index("\nENTRY"), 0
    for start in re.finditer(r"\n +%(all-gather-start[\w.]*) = (.*) all-gather-start\(", text):
        done_index = text.index(f"all-gather-done(%{start[1]})", start.end())
        kernels = re.findall(r"\n +%(\w*fusion)[\w.]* = ", text[start.end() : done_index])
        if any(not re.match("loop_(convert|broadcast|pad|dynamic|select)|wrapped", kernel) for kernel in kernels):
            parts_and_wholes = sum(math.prod(dims) for _, dims in arrays(start[2]))
            (body,) = re.findall(r"\n%(\S+) \(", text[: start.start()])[-1:]
            trips = re.search(rf'body=%{re.escape(body)}[,\s].*?"known_trip_count":{{"n":"(\d+)"', text)
            total += 2 * parts_and_wholes * 8 // 9 * (1 if start.start() > entry or not trips else int(trips[1]))
    return total


@pytest.mark.slow
@pytest.mark.cuda_compiler
@group("hsdp")
def test_of_two_hosts_of_gpus() -> None:
    """A program compiled for 2 x 8 H100s shows the collectives that leave a host, and those that are exposed."""
    cell = compiled("hsdp")
    explanation = explain(cell.step, cell.batch, cell.program)
    assert (explanation.hosts, explanation.axes) == (2, {"data": 2, "fsdp": 8})
    assert explanation.across == {("data",), ("data", "fsdp")}
    rows = explanation.json()["ledger"]
    moved = {way: sum(row["bytes"] for row in rows if row["across_hosts"] == way) for way in (True, False)}
    gathered, reduced = (cell.ledger.total(kind=kind) for kind in ("all-gather", "reduce-scatter"))
    assert 0 <= moved[False] - gathered - reduced < 1000  # norms
    # A shard of the gradients in float32, and what is not sharded: the scales of 9 norms, a sum and a count. What a
    # loop sends a layer late has two scales more, in its first iteration.
    assert moved[True] == reduced // 8 + 4 * (9 + 2) * cell.step.layout.leaves[-1].shape[-1] + 8
    assert explanation.exposed == sum(row["sent"] for row in rows if not row["overlapped"])
    assert 0 < gathered_behind_compute(cell.text) == cell.ledger.total(kind="all-gather", overlapped=True)
    text = str(explanation)
    assert "H100 80GB HBM3 on 2 hosts (data=2, fsdp=8), 3,303,100 parameters" in " ".join(text.split())
    assert re.search(r"all-reduce +data +float32 .* across +\d+%", text)
    assert re.search(r"all-gather +fsdp +bfloat16 .* inside +\d+%", text)
    assert f"exposed: {size(explanation.exposed)} of {size(explanation.ledger.total('sent'))}" in text


def python_loop_loss(params: Any, batch: Any, key: jax.Array | None, odd: bool = False) -> jax.Array:
    h = batch["x"]
    for number, layer in enumerate(params["layers"]):
        h = h + (jnp.sin if odd and number == 1 else jnp.tanh)(h @ layer["w"])
    return jnp.square(h).mean()


@pytest.mark.parametrize("odd", [False, True])
def test_loops_that_are_rolled_and_why_one_is_not(odd: bool) -> None:
    layers = lambda key: {"layers": [{"w": w} for w in jax.random.normal(key, (LAYERS, DIM, DIM)) / DIM**0.5]}
    model = jp.Model(init=layers, loss=functools.partial(python_loop_loss, odd=odd))
    explanation = jp.make_train_step(model, optax.sgd(0.1), "zero3").explain(BATCH)
    assert list(explanation.loops) == ["layers/*"]
    (text,) = explanation.loops.values()
    assert text.startswith(f"{LAYERS} layers of a Python loop")
    assert (text.rpartition(", ")[2] == "one stack") == (not odd)
    assert ("sin" in text) == odd
    assert "layers/*  " in str(explanation)


@pytest.mark.slow
def test_an_update_that_has_to_move_leaves_is_explained() -> None:
    """LAMB uses norms of the model's own leaves. 3 layers on 2 ranks are stored as 4, and XLA gathers such a leaf, with
    "involuntary full rematerialization" in its log.
    """
    init = lambda key: {"w": jax.random.normal(key, (3, DIM, 40)), "v": jax.random.normal(key, (3, 40, DIM))}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        layer = lambda h, p: (h + jnp.tanh(h @ p["w"]) @ p["v"], None)
        return jnp.square(lax.scan(layer, batch["x"], params)[0]).mean()

    model = jp.Model(init=init, loss=loss)
    explanation = jp.make_train_step(model, optax.lamb(1e-3), "pipe=2,fsdp=4,microbatches=2").explain(BATCH)
    (remark,) = (remark for remark in explanation.remarks if remark.startswith("The update also sends"))
    assert explanation.moves[0].leaf in ("w", "v")
    assert f" of {explanation.moves[0].leaf} [" in remark
    assert "a number of layers that 2 divides" in remark
    assert any(check.strategy == "beside the closed form" for check in explanation.checks)


def test_a_batch_that_lies_elsewhere_is_remarked() -> None:
    step = jp.make_train_step(MODEL, optax.sgd(0.1), "zero3")
    on_one_device = jax.device_put(BATCH["x"], jax.devices()[0])
    (remark,) = (remark for remark in step.explain({**BATCH, "x": on_one_device}).remarks if "batch" in remark)
    assert remark.startswith("The batch's x [16, 32] lies as SingleDeviceSharding")


def test_a_picture_names_each_way_once() -> None:
    """It was "data parallel over 4, data parallel over 2, ...": replicated leaves are summed over `fsdp` too."""
    strategies = (("data parallel", ("data", "fsdp")), ("data parallel", ("data",)), ("ZeRO-3", ("fsdp",)))
    checks = [SimpleNamespace(strategy=strategy, axes=axes) for strategy, axes in strategies]
    explanation: Any = SimpleNamespace(checks=checks, axes={"data": 2, "fsdp": 4}, transfers=())
    assert _strategy_in_words(explanation) == "data parallel over 2, ZeRO-3 over 4"


@pytest.mark.parametrize("strategy", ["zero3", "dp"])
def test_picture(strategy: str, tmp_path: Path) -> None:
    explanation = explanation_of(strategy)
    explanation.picture(tmp_path / "step.svg")
    drawn = (tmp_path / "step.svg").read_text()  # text is drawn as outlines, and written beside them as comments
    title = "ZeRO-3 over 8" if strategy == "zero3" else "data parallel through a central server"
    expected_texts = [f"A training step on 8 x cpu: {title}", explanation.strategy]
    expected_texts += ["all-gather", "fsdp"] if strategy == "zero3" else ["gather of gradients", "through the server"]
    expected_texts += ["parameters", "saved activations", "closed form"]
    expected_texts += [size(memory.total) for memory in explanation.memory.values()]
    assert [text for text in expected_texts if text not in drawn] == []
    explanation.picture(tmp_path / "step.png")
    image = plt.imread(tmp_path / "step.png")
    assert image[0, 0, 3] == 0  # no background
    with pytest.raises(ValueError, match=r"step\.txt has a suffix that is no kind of picture"):
        explanation.picture(tmp_path / "step.txt")


def test_a_missing_shard_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing all-reduce is a ratio far below 1."""
    from jaxpar.parallel.data import zero

    monkeypatch.setattr(zero, "all_reduce", lambda x, axes: x)
    explanation = jp.make_train_step(MODEL, optax.sgd(0.1), "hsdp").explain(BATCH)
    check = next(check for check in explanation.checks if check.axes == ("data",))
    assert check.found < check.expected
    assert check.ratio is not None
    assert check.ratio < 0.1


def test_sizes() -> None:
    printed = ["0 B", "999 B", "1.00 kB", "3.41 MB", "2.50 GB", "7.00 TB"]
    assert [size(num_bytes) for num_bytes in (0, 999, 1000, 3_412_480, 2.5e9, 7e12)] == printed


def test_axes_are_never_cut() -> None:
    """Five axes were printed as "...ext+tensor"."""
    axes = ("pipe", "data", "fsdp", "expert", "context")
    ledger = Ledger(Nesting().collectives("all-reduce", axes, 32, {"bfloat16": 10**9}))
    assert "+".join(axes) in ledger_table(ledger, None)
