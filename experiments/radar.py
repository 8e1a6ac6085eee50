"""A radar of compilers: a dozen strategies compiled for H100s by the jax that is installed, beside what others made.

python experiments/radar.py                   # make radar: compiles, stores, draws experiments/results/radar.md
python experiments/radar.py --only fsdp       # prints some, and stores nothing
make radar PYTHON=python3.13 VENV=.venv313    # with the jax of another environment

Nothing runs. jaxpar writes every collective of a step's gradients inside `shard_map`, and asks no partitioner for any.
So each collective of the traced program has to be in the compiled one: of the same kind, between the same devices, of
as many bytes a step. That is compared here, buffer by buffer.
"""

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from report import console

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.hardware.compiled.hlo import Instruction, buffers
from jaxpar.hardware.compiled.kernels import Choice, Executable, Operation, Start, While
from jaxpar.inspect.check import check
from jaxpar.inspect.ledger import Ledger
from jaxpar.inspect.predict import predict
from jaxpar.models import named
from jaxpar.program.collectives import PRIMITIVES, axes_of
from jaxpar.program.jaxpr import live, opened, programs

ROOT = Path(__file__).parents[1]
STORED, PAGE = Path(__file__).with_suffix(".json"), ROOT / "experiments" / "results" / "radar.md"
LLAMA = "llama-60m", {"layers": 8, "dim": 2048, "heads": 16, "kv_heads": 16, "ffn": 4096, "vocab": 4096}
MIXTRAL = "mixtral-tiny", {"layers": 4, "dim": 1024, "heads": 8, "kv_heads": 8, "ffn": 2048, "vocab": 4096}
LENGTH, ROWS = 1024, 16  # rows of a device
NOTED = 0.02  # a change of temporaries or of seconds is named from here on


@dataclass(frozen=True)
class Case:
    """A strategy, the devices that it is compiled for, and a model."""

    strategy: str
    devices: str = "2x8xH100"
    model: tuple[str, dict[str, int]] = LLAMA


CASES = (
    Case("data=16"),
    Case("fsdp=16,zero=1"),
    Case("fsdp=16,zero=2,microbatches=4"),
    Case("fsdp=16"),
    Case("fsdp=16,microbatches=4"),
    Case("data=2,fsdp=8"),
    Case("data=2,tensor=8,sequence=true"),
    Case("fsdp=2,tensor=8,sequence=true,microbatches=4,concurrent=2"),
    Case("fsdp=8,context=2"),
    Case("pipe=4,fsdp=4,microbatches=8"),
    Case("fsdp=2,expert=8", model=MIXTRAL),
    Case("pipe=2,expert=8,microbatches=4,schedule=1f1b-overlap", model=MIXTRAL),
    Case("data=4096", "512x8xH100"),  # the size at which an all-reduce was dropped elsewhere
)


@dataclass(frozen=True)
class Buffer:
    """An array that a collective takes: in an all-gather all that comes of it."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(repr=False)  # devices, as places in the mesh

    def __str__(self) -> str:
        return f"{self.kind} {'+'.join(self.axes)} {self.dtype} {self.bytes} B"


def look(case: Case) -> dict[str, Any]:
    """What the compiler made of a case, as it is stored: of each kind, axes and dtype the bytes a device and step that
    are written and compiled; how many different arrays are sent, and those that are sent in other sizes; the order; how
    long collectives run and what waits, as predicted; temporaries; promises that are broken.
    """
    found = target(case.devices)
    name, sizes = case.model
    model, strategy = named(name, **sizes), f"{case.strategy},precision=bf16,remat=layer"
    step = jp.make_train_step(model.model, optax.adamw(1e-3), strategy, mesh=found.devices)
    batch = model.example(ROWS * len(found.devices), LENGTH)
    compiled, jaxpr = step.compile(batch), step.trace(batch)
    program = Executable(compiled.as_text() or "", step.mesh)
    written, made = list(dict.fromkeys(of_trace(jaxpr, step.mesh))), list(dict.fromkeys(of_program(program)))
    sent = [ledger.by("kind", "axes", "dtype") for ledger in (Ledger.from_jaxpr(jaxpr, step.mesh), Ledger.of(program))]
    seconds = predict(program, step, batch, found.hardware)
    total = sum(part.bytes for part in seconds.collectives)
    memory: Any = compiled.memory_analysis()
    return {
        "bytes": {
            f"{kind} {'+'.join(axes)} {dtype}": [side.get((kind, axes, dtype), 0) for side in sent]
            for kind, axes, dtype in sorted({*sent[0], *sent[1]})
        },
        "arrays": len(written),
        "resized": [str(x) for x in written if x not in made],
        "moved": moved([x for x in written if x in made], [x for x in made if x in written]),
        "asynchronous": round(sum(part.bytes for part in seconds.collectives if part.asynchronous) / total, 3),
        "step_ms": round(1e3 * seconds.seconds, 1),
        "hidden_ms": round(1e3 * seconds.hidden, 1),
        "exposed_ms": round(1e3 * seconds.exposed, 1),
        "temporaries": memory.temp_size_in_bytes,
        "broken": [f"{broken.part}: {broken.what}" for broken in check(step, batch, compiled).broken],
    }


def of_trace(jaxpr: Any, mesh: jax.sharding.Mesh, mapped: bool = False) -> Iterator[Buffer]:
    """What a traced program's collectives take, in its order."""
    jaxpr, grid = opened(jaxpr)[0], np.arange(mesh.size).reshape(mesh.devices.shape)
    for eqn in live(jaxpr.eqns, jaxpr.outvars) if mapped else jaxpr.eqns:
        kind = PRIMITIVES.get(eqn.primitive.name.removesuffix("_start"))
        if kind is None:
            for inner in programs(eqn):
                yield from of_trace(inner, mesh, eqn.primitive.name == "shard_map")
            continue
        axes = [axis for axis in mesh.axis_names if axis in axes_of(eqn) and mesh.shape[axis] > 1]
        at = [mesh.axis_names.index(axis) for axis in axes]
        lines = np.moveaxis(grid, at, range(-len(at), 0)).reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
        parts = eqn.params.get("axis_index_groups") or [range(lines.shape[1])]
        parts = eqn.params["perm"] if kind == "collective-permute" else parts
        named_so = (
            tuple(axes)
            if len(parts) == 1 or kind == "collective-permute"
            else (f"{len(parts[0])} of {'+'.join(axes)}",)
        )
        arrays = [v.aval for v in eqn.invars[: 1 if kind == "ragged-all-to-all" else None]]
        sizes = [(x.dtype.name, x.size * x.dtype.itemsize) for x in arrays]
        yield from _buffers(kind, named_so, [line[list(part)] for line in lines for part in parts], sizes)


def of_program(program: Executable) -> Iterator[Buffer]:
    """What a compiled program's collectives take, in the order in which they start."""
    module = program.module
    blocks = {i.name: block for block in module.computations.values() for i in block}

    def walk(operations: Iterable[Operation]) -> Iterator[Buffer]:
        for one in operations:
            if isinstance(one, While | Choice):
                for inner in [one.body] if isinstance(one, While) else one.branches:
                    yield from walk(inner)
            elif isinstance(one, Start):
                block = {i.name: i for i in blocks[one.name]}
                i = block[one.name]
                if not i.collective:  # in an asynchronous computation of its own
                    block = {j.name: j for j in module.computations[i.called[0]]}
                    i = next(j for j in block.values() if j.collective)
                operands = i.operands[: 1 if one.kind == "ragged-all-to-all" else None]
                sizes = [x for name in operands for shape in joined(block[name]) for x in buffers(shape)]
                yield from _buffers(one.kind, one.axes, one.groups, sizes)

    def joined(i: Instruction) -> list[str]:
        """The shapes of the arrays that are made one for a collective; of any other array its own."""
        inner = {j.name: j for j in module.computations[i.called[0]]} if i.opcode == "fusion" else {}
        root = next((j for j in inner.values() if j.root), i)
        beside = inner or {j.name: j for j in blocks[i.name]}
        return [beside[name].shape for name in root.operands] if root.opcode == "concatenate" else [i.shape]

    yield from walk(program.operations)


def _buffers(kind: str, axes: tuple[str, ...], groups: Any, sizes: Iterable[tuple[str, int]]) -> Iterator[Buffer]:
    told = sorted(tuple(int(place) for place in group) for group in groups)
    if kind == "collective-permute":
        told = [pair for pair in told if pair[0] != pair[1]]
    if axes and told and len(told[0]) > 1:
        for dtype, size in sizes:
            yield Buffer(kind, axes, dtype, size * (len(told[0]) if kind == "all-gather" else 1), tuple(told))


def moved(written: Sequence[Buffer], made: Sequence[Buffer]) -> int:
    """How many of the same have another place in the order: all but the longest run of those that have kept theirs."""
    longest: list[int] = []
    for place in (written.index(x) for x in made):
        longest.append(1 + max((n for n, x in zip(longest, made, strict=False) if written.index(x) < place), default=0))
    return len(made) - max(longest, default=0)


def missing(row: dict[str, Any]) -> dict[str, int]:
    """Bytes that are written and not compiled, by kind, axes and dtype."""
    return {kind: written - made for kind, (written, made) in row["bytes"].items() if made < written}


def besides(row: dict[str, Any]) -> dict[str, int]:
    """Bytes that are compiled and not written."""
    return {kind: made - written for kind, (written, made) in row["bytes"].items() if made > written}


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """What one compiler does otherwise than another, case by case."""
    for name in (name for name in new if name in old):
        before, after = old[name], new[name]
        written = [{kind: pair[0] for kind, pair in row["bytes"].items() if pair[0]} for row in (before, after)]
        if written[0] != written[1]:
            yield f"`{name}`: the traced programs differ; compile it again with both"
            continue
        said = []
        for what, of in ("missing", missing), ("besides", besides):
            if of(before) != of(after):
                said.append(f"{what}: {_listed(of(before))}, now {_listed(of(after))}")
        said += [
            f"{what}: {before[key]}, now {after[key]}"
            for what, key in (("arrays of another size", "resized"), ("promises broken", "broken"))
            if before[key] != after[key]
        ]
        if before["moved"] != after["moved"]:
            said.append(f"moved: {before['moved']}, now {after['moved']}")
        for what, key, unit, scale in (
            ("asynchronous", "asynchronous", "%", 100),
            ("step", "step_ms", " ms", 1),
            ("exposed", "exposed_ms", " ms", 1),
            ("temporaries", "temporaries", " GB", 1e-9),
        ):
            against = before["step_ms"] if key == "exposed_ms" else before[key]
            if abs(after[key] - before[key]) > NOTED * against:
                said.append(f"{what} {scale * before[key]:.3g}, now {scale * after[key]:.3g}{unit}")
        if said:
            yield f"`{name}`: {'; '.join(said)}"


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{kind} {size:,} B" for kind, size in sizes.items()) or "nothing"


def drawn(page: str, results: dict[str, dict[str, Any]]) -> str:
    """experiments/results/radar.md with the tables of what is stored by version of jax, the newest first."""
    versions = sorted(results, key=lambda version: [int(part) for part in version.split(".")], reverse=True)
    lines = [page.partition("\n## jax")[0].rstrip()]
    for version, before in zip(versions, [*versions[1:], None], strict=True):
        lines += [f"\n## jax {version}\n", _line(_COLUMNS), "|-" * len(_COLUMNS) + "|"]
        lines += [_line(_cells(name, row)) for name, row in results[version].items()]
        if before is not None:
            said = list(changes(results[before], results[version]))
            lines += ["", f"Since jax {before}:" if said else f"Since jax {before}: nothing.", ""]
            lines += [f"- {one}" for one in said]
    return "\n".join(lines).rstrip() + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(name: str, row: dict[str, Any]) -> Iterator[str]:
    yield f"`{name}`"
    yield f"{sum(written for written, _ in row['bytes'].values()) / 1e9:.2f}"
    yield _listed(missing(row))
    yield f"{sum(besides(row).values()):,} B"
    yield f"{row['arrays'] - len(row['resized'])} of {row['arrays']}"
    yield str(row["moved"])
    yield f"{row['asynchronous']:.0%}"
    yield f"{row['hidden_ms']:.1f}"
    yield f"{row['exposed_ms']:.1f} of {row['step_ms']:.1f}"
    yield f"{row['temporaries'] / 1e9:.2f}"
    yield "; ".join(row["broken"]) or "kept"


_COLUMNS = "strategy|written|missing|besides|as written|moved|asynchronous|hidden|exposed|temporaries|promises".split(
    "|"
)


@dataclass(frozen=True)
class Options:
    """Compile a dozen strategies for H100s, and compare their collectives with the traced ones."""

    only: str = ""
    """part of a strategy: these are printed, and nothing is stored"""


def main(options: Options) -> None:
    """Compiles all cases with the jax that is installed, stores what came of them, and draws the page."""
    jax.config.update("jax_platforms", "cpu")  # so that the CUDA compiler does without a GPU
    screen, rows = console(), {}
    for case in (case for case in CASES if options.only in case.strategy):
        begin = time.perf_counter()
        rows[case.strategy] = look(case)
        screen.print(f"{case.strategy}: {time.perf_counter() - begin:.0f} s")
    if options.only:
        screen.print_json(json.dumps(rows))
        return
    results = json.loads(STORED.read_text()) if STORED.exists() else {}
    results[jax.__version__] = rows
    STORED.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(drawn(PAGE.read_text(), results))
    screen.print(f"written: {STORED.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main(tyro.cli(Options))
