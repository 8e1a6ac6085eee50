"""Steps that jaxpar did not make: what is found in them is what a count by hand finds, and mistakes have their line."""

import contextlib
import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.hardware import missing_compiler
from jaxpar.run.cli.commands import run

LAYERS, ROWS, LENGTH, WIDTH, HIDDEN, WORDS = 4, 64, 32, 128, 512, 1000
AXES = {"fsdp": 4, "tensor": 2}
ADAM = optax.adam(1e-3)

NEWER = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)


@pytest.mark.cuda_compiler
@pytest.mark.skipif(not NEWER, reason="older jax has no kind of devices in types that it compares")
def test_explicit_axes_are_refused_where_types_name_devices() -> None:
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"has explicit axes, .*; give the mesh axis_types=\(AxisType.Auto, \.\.\.\)"):
        jp.explain(lambda x: x.sum(), x, target="8xH100")


def mesh_of(abstract: bool = False) -> Any:
    if abstract:
        return AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 2)
    return Mesh(np.array(jax.devices()).reshape(tuple(AXES.values())), tuple(AXES))


def logical(x: jax.Array, mesh: Any, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def train_step(state: Any, batch: Any, mesh: Any, constrained: bool) -> Any:
    """As MaxText writes one: layers scanned, constraints on activations, FSDP and tensor axes in the specs."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        hidden = jax.nn.relu(x @ w["up"])  # up
        hidden = logical(hidden, mesh, "fsdp", None, "tensor") if constrained else hidden
        x = x + hidden @ w["down"]  # down
        return logical(x, mesh, "fsdp", None, None) if constrained else x, None

    def loss(params: Any) -> jax.Array:
        x = params["embed"][batch]  # lookup
        x = logical(x, mesh, "fsdp", None, None) if constrained else x
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.square(x).mean()  # loss

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = ADAM.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


def step_of(mesh: Any, constrained: bool = True, sharded_optimizer: bool = True, donate: bool = True) -> Any:
    """The jitted step, and the shapes of its arguments."""
    place = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
    layers = {
        "up": place((LAYERS, WIDTH, HIDDEN), None, "fsdp", "tensor"),
        "down": place((LAYERS, HIDDEN, WIDTH), None, "tensor", "fsdp"),
    }
    params = {"embed": place((WORDS, WIDTH), "tensor", "fsdp"), "layers": layers}
    specs = {p.shape: p.sharding.spec for p in jax.tree.leaves(params)} if sharded_optimizer else {}
    placed = lambda x: x.update(sharding=NamedSharding(mesh, specs.get(x.shape, P())))
    state = {"params": params, "opt_state": jax.tree.map(placed, jax.eval_shape(ADAM.init, params))}
    fn = functools.partial(train_step, mesh=mesh, constrained=constrained)
    out_shardings = (jax.tree.map(lambda x: x.sharding, state), None)
    jitted = jax.jit(fn, out_shardings=out_shardings, donate_argnums=(0,) if donate else ())
    batch = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
    return jitted, state, batch


def line(marker: str, fn: Any = train_step) -> str:
    """Where this file has a line that ends so."""
    lines, first_line = inspect.getsourcelines(fn)
    (line_number,) = [number for number, text in enumerate(lines, first_line) if text.rstrip().endswith(f"# {marker}")]
    return f"tests/forecast/test_jitted.py:{line_number}"


def sent(explanation: Any, **fields: Any) -> int:
    return sum(site.sent for site in explanation.sites if all(getattr(site, k) == v for k, v in fields.items()))


@pytest.fixture(scope="module")
def explanation() -> Any:
    return jp.explain(*step_of(mesh_of()))


WEIGHT = 4 * WIDTH * HIDDEN // AXES["tensor"]  # of a tensor rank
ROW = 4 * (ROWS // AXES["fsdp"]) * LENGTH * WIDTH


def test_what_is_found_is_what_is_counted_by_hand(explanation: Any) -> None:
    for name in ("up", "down"):  # gathered forwards and backwards; their gradients summed, as are activations
        site = {"source": line(name), "operation": "dot_general"}
        weight = f"state['params']['layers']['{name}']"
        assert sent(explanation, kind="all-gather", argument=weight, **site) == 2 * LAYERS * WEIGHT * 3 // 4
        assert sent(explanation, kind="all-reduce", axes=("fsdp",), **site) == 2 * LAYERS * WEIGHT * 3 // 4
        assert sent(explanation, kind="all-reduce", axes=("tensor",), **site) == 2 * LAYERS * ROW // 2
    assert explanation.ledger.total(kind="all-gather", axes=("fsdp",)) == 2 * 2 * LAYERS * WEIGHT
    assert sum(site.sent for site in explanation.sites) == explanation.ledger.by(value="sent")[()]
    assert explanation.exposed == explanation.ledger.by(value="sent")[()]
    params = 2 * LAYERS * WIDTH * HIDDEN + WORDS * WIDTH
    assert explanation.memory.arguments == 3 * 4 * params // 8 + 4 + 4 * ROWS * LENGTH // 4
    assert explanation.memory.taken_over == 3 * 4 * params // 8 + 4
    assert sum(x.bytes for x in explanation.arguments) == 3 * 4 * params + 4 + 4 * ROWS * LENGTH
    assert not explanation.copied
    assert explanation.axes == AXES
    assert explanation.costs.flops == {"float32": 3 * 2 * 2 * LAYERS * ROWS * LENGTH * WIDTH * HIDDEN // 8}


def test_a_dropped_constraint_has_its_line(explanation: Any) -> None:
    promises = jp.Promises(collectives=explanation.ledger.by("kind", "axes"), memory=explanation.memory.total)
    assert jp.check(*step_of(mesh_of()), promises=promises).ok
    proof = jp.check(*step_of(mesh_of(), constrained=False), promises=promises)
    broken = {finding.what: finding.note for finding in proof.broken}
    # Every device computes all rows, and sums them.
    shape = str([ROWS, LENGTH, HIDDEN // AXES["tensor"]])
    assert f"all-reduce over fsdp of float32{shape} for dot_general at {line('up')}" in broken["all-reduce fsdp"]
    message = r"^train_step on 8 x cpu does not keep[^:]*:(?s:.*)all-reduce fsdp, promised 1\.\d+ MB, found 16"
    with pytest.raises(ValueError, match=message):
        proof.require()


def test_a_replicated_optimizer_has_its_paths() -> None:
    step = step_of(mesh_of(), sharded_optimizer=False, donate=False)
    explanation = jp.explain(*step)
    leaves = ("['layers']['up']", "['layers']['down']", "['embed']")
    moment_paths = [f"state['opt_state'][0].{moment}{leaf}" for moment in ("mu", "nu") for leaf in leaves]
    assert {x.path for x in explanation.copied} == set(moment_paths)
    assert {x.copied for x in explanation.copied} == {("fsdp", "tensor")}
    nbytes = 2 * 4 * (2 * LAYERS * WIDTH * HIDDEN + WORDS * WIDTH)
    assert f"whole, {nbytes / 1e6:.2f} MB, along fsdp+tensor" in " ".join(str(explanation).split())
    assert "No argument is donated" in str(explanation)
    proof = jp.check(*step, promises=jp.Promises(copies={"fsdp": 1e6}))
    (broken,) = proof.broken
    assert broken.part == "copies"
    assert moment_paths[0].rpartition("[")[0] in broken.note
    assert jp.check(*step, promises=jp.Promises(copies={"fsdp": 2e6})).ok


def test_what_is_gathered_only_to_be_cut_is_named() -> None:
    mesh = mesh_of()

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("fsdp")))  # cut anew

    place = lambda *spec: jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
    (broken,) = jp.check(step, place(None, ("fsdp", "tensor"))).broken  # XLA warns of this one on stderr
    assert broken.found == 64 * 64 * 4 * 7 // 8
    assert f"all-gather over fsdp+tensor of x for sin at {line('cut anew', step)}" in broken.note
    assert "involuntary full rematerialization" in broken.note
    for spec in (("fsdp", "tensor"), (("fsdp", "tensor"),), (None, "fsdp")):
        assert jp.check(step, place(*spec)).ok

    def looked_up(x: jax.Array, at: jax.Array) -> jax.Array:  # cut, at an index of the program's own
        return jax.lax.dynamic_slice_in_dim(logical(x, mesh), at, 8)

    explanation = jp.explain(looked_up, place("fsdp"), 3)
    assert [(site.kind, site.involuntary) for site in explanation.sites] == [("all-gather", False)]


def exchanging(x: jax.Array) -> jax.Array:
    x = jax.lax.all_to_all(x, "fsdp", 1, 0, tiled=True)  # exchanged
    return jax.lax.ppermute(jnp.sin(x), "tensor", [(0, 1), (1, 0)])  # passed on


def test_what_is_exchanged_and_passed_on_has_its_line() -> None:
    mesh = mesh_of()
    x = jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    fn = jax.shard_map(exchanging, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    sites = {site.kind: (site.axes, site.source, site.sent) for site in jp.explain(jax.jit(fn), x).sites}
    shard_bytes = 4 * 8 * 8
    assert sites == {
        "all-to-all": (("fsdp",), line("exchanged", exchanging), shard_bytes * 3 // 4),
        "collective-permute": (("tensor",), line("passed on", exchanging), shard_bytes),
    }


def test_forms_of_a_program_say_the_same(explanation: Any) -> None:
    fn, *args = step_of(mesh_of())
    lowered = fn.lower(*args)
    compiled = lowered.compile()
    for program in (lowered, compiled):
        explained = jp.explain(program)
        assert (explained.sites, explained.memory) == (explanation.sites, explanation.memory)
    text = jp.explain(compiled.as_text(), mesh=mesh_of())
    assert text.sites == explanation.sites
    assert text.memory is None
    assert text.arguments is None
    assert "not known" in str(text)
    for uncompiled in (lowered.as_text(), lowered.as_text(dialect="hlo")):  # raw errors of their reader
        with pytest.raises(ValueError, match=r"not a compiled program.* begins '.*; give compiled.as_text\(\)"):
            jp.explain(uncompiled)
    unknown = jp.explain(compiled.as_text())
    axes = {axis for collective in unknown.ledger for axis in collective.axes}
    assert axes == {"devices", "2 of devices", "4 of devices"}
    assert "give the arguments NamedShardings, or mesh=" in " ".join(str(unknown).split())


@pytest.mark.parametrize("abstract", [True, False])
def test_a_target_stands_for_the_mesh(abstract: bool, explanation: Any) -> None:
    moved = jp.explain(*step_of(mesh_of(abstract)), target="cpu:8")
    for part in ("ledger", "sites", "memory", "arguments"):
        assert getattr(moved, part) == getattr(explanation, part)
    assert moved.prediction is None


class Block(nn.Module):
    """As Flax's own examples write one: logical axes on the parameters, rules at the end."""

    mesh: Mesh

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = lambda *axes: nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
        y = nn.Dense(HIDDEN, use_bias=False, kernel_init=kernel("embed", "mlp"))(x)  # into
        y = nn.with_logical_constraint(nn.relu(y), ("batch", "length", "mlp"), mesh=self.mesh)
        y = nn.Dense(WIDTH, use_bias=False, kernel_init=kernel("mlp", "embed"))(y)  # out
        return nn.with_logical_constraint(x + y, ("batch", "length", None), mesh=self.mesh)


def test_a_flax_example() -> None:
    rules = (("batch", "fsdp"), ("length", None), ("embed", "fsdp"), ("mlp", "tensor"))
    model = Block(mesh := mesh_of())
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32)

    def init(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros(x.shape))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=ADAM)

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            with nn.logical_axis_rules(rules):
                return jnp.square(state.apply_fn({"params": params}, batch)).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    shapes = jax.eval_shape(init, jax.random.key(0))
    places = nn.logical_to_mesh_sharding(nn.get_partition_spec(shapes), mesh, rules)
    rows = NamedSharding(mesh, P("fsdp"))
    step = jax.jit(train_step, in_shardings=(places, rows), out_shardings=(places, None), donate_argnums=0)
    explanation = jp.explain(step, shapes, x)
    into_line, out_line = (line(marker, Block) for marker in ("into", "out"))
    # The kernel into the layer is used once, as its input has no gradient; that out of it forwards and backwards.
    assert sent(explanation, kind="all-gather", axes=("fsdp",), source=into_line) == WEIGHT * 3 // 4
    assert sent(explanation, kind="all-reduce", axes=("fsdp",), source=out_line) == 2 * WEIGHT * 3 // 4
    assert sent(explanation, kind="all-reduce", axes=("tensor",), source=out_line) == ROW
    print(explanation)
    moved = jp.explain(step, shapes, x, target="cpu:8")
    assert moved.ledger == explanation.ledger


def test_errors_say_what_to_do() -> None:
    fn, *args = step_of(mesh_of())
    split: Any = "fsdp"
    no_sharding = jax.ShapeDtypeStruct((8,), jnp.float32)
    for call, message in (
        (lambda: jp.explain(fn, *args, target="cpu:4"), r"has 8 devices \(fsdp=4, tensor=2\), target='cpu:4' has 4"),
        (lambda: jp.explain(*step_of(mesh_of(abstract=True))), r"has no devices; name some, such as target='8xH100'"),
        (lambda: jp.explain(jnp.sin, no_sharding, target="cpu:8"), "no argument has a NamedSharding"),
        (lambda: jp.explain(3), "fn is a int; give a function"),
        (
            lambda: jp.explain(jax.jit(jnp.sin).lower(1.0), 1.0),
            "a Lowered has its arguments already; leave out",
        ),
        (
            lambda: jp.check(fn, *args, promises=jp.Promises(copies={"model": 1e6})),
            "axis 'model' is promised, and the mesh has fsdp, tensor; promise one of these",
        ),
        (lambda: jp.Promises(collectives={("allgather", "fsdp"): 1}), "'allgather' is no collective; promise one of"),
        (lambda: jp.predict(fn, *args, target="cpu:8"), "cpu devices have no peaks and bandwidths"),
        (
            lambda: jp.plan_shardings(jnp.sin, split, "8xH100"),
            r"shardings is 'fsdp'; give, by name or in a list,",
        ),
        (lambda: jp.plan_shardings(jnp.sin, [1.0], "8xH100"), r"shardings is 'dict'; give, by name"),
        (lambda: jp.plan_shardings(jnp.sin, {}, "8xH100"), "no proposal is valid: shardings is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
def test_on_gpus_that_are_not_here(explanation: Any) -> None:
    on_gpus = jp.explain(*step_of(AbstractMesh((2, 8), ("fsdp", "tensor"))), target="16xH100")
    assert on_gpus.devices == "16 x NVIDIA H100 80GB HBM3"
    assert on_gpus.across == {axes for axes in {collective.axes for collective in on_gpus.ledger} if "fsdp" in axes}
    for name in ("up", "down"):
        weight = {"argument": f"state['params']['layers']['{name}']", "source": line(name), "axes": ("fsdp",)}
        assert sent(on_gpus, **weight) == 2 * LAYERS * 4 * WIDTH * HIDDEN // 8 // 2
    prediction = on_gpus.prediction
    assert prediction.seconds == pytest.approx(prediction.compute + prediction.exposed)
    assert 0 < sum(site.hidden for site in on_gpus.sites) < sum(site.sent for site in on_gpus.sites)
    assert prediction.devices == 16
    assert "rows/s" not in str(prediction)
    one_gpu = jp.predict(lambda x: x @ x, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), target="1xH100")
    assert one_gpu.flops == 2 * 4096**3
    text = jax.jit(jnp.sin).lower(1.0).compile().as_text()
    with pytest.raises(ValueError, match="the program is compiled for CPUs, and nothing can be predicted"):
        jp.predict(text, target="1xH100")


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
def test_proposals_are_ranked_by_what_they_take() -> None:
    mesh = AbstractMesh((2, 8), ("fsdp", "tensor"))
    step, *args = step_of(mesh, constrained=False)
    replicated = tuple(jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, P())), args))
    small = AbstractMesh((2, 4), ("fsdp", "tensor"))
    plan = jp.plan_shardings(step, {"whole": replicated, "split": tuple(args), "small": step_of(small)[1:]}, "16xH100")
    names = list(plan.found)
    assert {*names} == {"split", "whole"}
    assert plan.best == names[0]
    assert "8 devices" in plan.refused["small"]
    assert list(plan.why) == names[1:]
    assert re.search(r"^\d+\.\d% slower: \+.* ms ", plan.why[names[1]])
    seconds = [explanation.prediction.seconds for explanation in plan.found.values()]
    assert seconds == sorted(seconds)
    assert f"{1e3 * seconds[1]:,.1f}" in str(plan)
    assert list(plan.json()["found"]) == names
    with pytest.raises(ValueError, match=r"no proposal is valid: 1: .*8 devices"):
        jp.plan_shardings(step, [step_of(small)[1:]], "16xH100")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_steps.py").write_text(
        "import jax.numpy as jnp\ndef make(): return jnp.sin, (jnp.ones(8),)\ndef bad(): return jnp.sin\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run(["explain", "--step", "my_steps:make", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["name"], report["memory"]["arguments"], report["ledger"]) == ("sin", 32, [])
    for words, message in {
        ("my_steps:bad",): r"--step my_steps:bad returned a \w+; give a function without arguments that returns",
        ("my_steps:none",): r"my_steps has no function 'none'; write def none\(\): return step, \(state, batch\)",
        ("steps.py",): "--step steps.py is no package.module:function",
        ("my_steps:make", "--strategy", "ddp"): "--step names a whole step, which takes no --strategy",
        ("my_steps:make", "--rows", "999"): "--step names a whole step, which takes no --rows",  # it was ignored
    }.items():
        with pytest.raises(ValueError, match=message):
            run(["explain", "--step", *words])


def test_arguments_that_are_none_unread_or_bound() -> None:
    place = NamedSharding(mesh_of(), P("fsdp"))

    def step(bound: jax.Array, batch: Any, unread: jax.Array) -> jax.Array:
        return bound + batch["x"]

    x = jax.device_put(jnp.ones(8), place)
    explanation = jp.explain(functools.partial(jax.jit(step), x), {"none": None, "x": x}, jnp.ones(3))
    assert [x.path for x in explanation.arguments] == ["bound", "batch['x']"]
    assert jp.explain(functools.partial(step, x), {"none": None, "x": x}, x).arguments[0].path == "batch['x']"
    assert jp.explain(lambda: None).arguments == ()
    assert jp.explain(lambda x: logical(x, mesh_of(), "fsdp"), jnp.ones((8, 8))).axes == AXES
    static = jax.jit(lambda x, n: x * n, static_argnums=1)
    assert jp.explain(static, x, 3).arguments == jp.explain(static, x, 3, target="cpu:8").arguments[:1]


def test_programs_of_every_kind_are_moved() -> None:
    mesh = mesh_of()
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    placed = lambda mesh: jax.ShapeDtypeStruct((64, 64), "f4", sharding=NamedSharding(mesh, P("fsdp", "tensor")))
    total = lambda x: jax.lax.psum(x, "fsdp")
    mapped = jax.shard_map(total, mesh=mesh, in_specs=P("fsdp", "tensor"), out_specs=P(None, "tensor"))
    bound = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("tensor")))
    for fn, array_mesh, context in (
        (mapped, mesh, None),
        (lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), P(None, "tensor")), mesh, mesh),
        (lambda x: jax.sharding.reshard(x, P("fsdp", None)).sum(), explicit, explicit),
        (lambda x: x + bound + jax.random.normal(jax.random.key(0), x.shape), mesh, None),
    ):
        if NEWER and array_mesh is explicit:  # refused: `test_explicit_axes_are_refused_where_types_name_devices`
            continue
        with jax.set_mesh(context) if context is not None else contextlib.nullcontext():
            on_mesh, on_target = (jp.explain(fn, placed(array_mesh), target=name) for name in (None, "cpu:8"))
        assert (on_mesh.ledger, on_mesh.sites, on_mesh.axes) == (on_target.ledger, on_target.sites, on_target.axes)
        assert on_mesh.axes == AXES


def test_a_step_of_jaxpar_is_explained_as_it_explains_itself() -> None:
    model = jp.Model(lambda key: {"w": jnp.ones((64, 64))}, lambda params, batch, key: (batch @ params["w"]).mean())
    step, batch = jp.make_train_step(model, ADAM, "zero1"), np.ones((8, 64), np.float32)
    assert str(jp.explain(step, batch)) == str(step.explain(batch))
    assert jp.check(step, batch).ok
    with pytest.raises(ValueError, match="takes its batch alone; for a target make it with mesh="):
        jp.explain(step, batch, target="8xH100")
    with pytest.raises(ValueError, match="promises what its strategy says"):
        jp.check(step, batch, promises=jp.Promises())
    with pytest.raises(ValueError, match="compiled for CPU has no asynchronous collectives"):  # it was a TypeError
        jp.check(step, batch, overlap=True)
    with pytest.raises(ValueError, match="overlap= asks what a strategy promises"):
        jp.check(jnp.sin, batch, overlap=True)
