"""`gpu.py profile`: five steps under jax.profiler, and what their trace says: kernels by time, shares, gaps."""

import collections
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpu_report import Record
from gpu_speed import spec_of

import jaxpar as jp
from jaxpar.models import named

STEPS, TOP, LARGEST = 5, 15, 16 * 2**20
# By the name of a kernel; the first that fits.
KINDS = (
    ("collective", r"nccl|all-reduce|all-gather|reduce-scatter|all-to-all|collective|ppermute"),
    ("attention", r"cudnn.*(sdpa|fmha|flash)|fmha|flash_|sdpa|softmax.*bmm"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|xmma|wgmma|\bdot\b|dot[._]\d|dot_general|matmul"),
    ("copy", r"memcpy|memset|^copy|d2d|h2d|d2h"),
)
Span = tuple[int, int]  # nanoseconds, from and to


def run(record: Record, model: str, strategy: str, tiny: bool) -> None:
    spec = spec_of(model, None, tiny)
    chosen = named(model, **spec["changes"])
    step = jp.make_train_step(
        chosen.model, optax.adamw(3e-4), f"{strategy},precision=bf16", mesh=jax.devices()[: 1 if tiny else None]
    )
    tokens = np.random.default_rng(0).integers(chosen.config.vocab, size=(spec["rows"], spec["length"] + 1))
    batch, state = {"tokens": jnp.asarray(tokens, jnp.int32)}, step.init(jax.random.key(0))
    for _ in range(3):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls are not asked for, and would be most of the file
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(STEPS):
                state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
        (path,) = Path(folder).rglob("*.xplane.pb")
        raw = path.read_bytes()
    if len(raw) <= LARGEST:  # to be opened by xprof or TensorBoard
        (record.out / "profile.xplane.pb").write_bytes(raw)
    record.about |= {"model": model, "strategy": strategy, "trace_bytes": len(raw), "kept": len(raw) <= LARGEST}
    busy, spans = read(raw)
    summarise(record, busy, spans)


def read(raw: bytes) -> tuple[dict[str, tuple[float, int]], list[Span]]:
    """Of a trace: kernel -> (nanoseconds, how often), and when each ran. Of the first GPU, or of the CPU's threads."""
    data = jax.profiler.ProfileData.from_serialized_xspace(raw)  # kept: its planes die with it
    planes = {plane.name: plane for plane in data.planes}
    gpus = sorted(name for name in planes if name.startswith("/device:GPU"))
    plane = planes[gpus[0] if gpus else "/host:CPU"]
    kernels: dict[str, tuple[float, int]] = {}
    spans: list[Span] = []
    for line in plane.lines:
        # Beside the streams of a GPU stand lines that sum them up; on CPUs XLA's own threads are of interest.
        if not line.name.startswith("Stream" if gpus else "tf_XLA"):
            continue
        for event in line.events:
            # By name alone: to read an event's statistics aborts the process on some (jax 0.12, those of thread pools).
            name = event.name
            if not gpus and re.match(r"while|call|conditional|.*(::|[ $])", name):
                continue  # the first three hold others, the rest are no operations of XLA
            seconds, count = kernels.get(name, (0.0, 0))
            kernels[name] = (seconds + event.duration_ns, count + 1)
            spans.append((int(event.start_ns), int(event.start_ns + event.duration_ns)))
    return kernels, spans


def summarise(record: Record, kernels: dict[str, tuple[float, int]], spans: list[Span]) -> None:
    """Shares by kind, the kernels that take most, and when nothing ran."""
    if not spans:
        record.add(error="the trace holds no kernel")
        return
    total = sum(seconds for seconds, _ in kernels.values())
    kinds: collections.Counter[str] = collections.Counter()
    for name, (seconds, _) in kernels.items():
        kinds[kind_of(name)] += seconds
    for kind, seconds in kinds.most_common():
        record.add(what=f"share of {kind}", ms_a_step=seconds / STEPS / 1e6, share=seconds / total)
    first, last = min(a for a, _ in spans), max(b for _, b in spans)
    idle = gaps(spans)
    record.add(what="nothing runs", ms_a_step=sum(idle) / STEPS / 1e6, share=sum(idle) / max(last - first, 1),
               count=len(idle), longest_us=max(idle, default=0) / 1e3)  # fmt: skip
    for name, (seconds, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:TOP]:
        record.add(what=name[:90], kind=kind_of(name), ms_a_step=seconds / STEPS / 1e6, share=seconds / total,
                   count=count // STEPS)  # fmt: skip
    note = f"share: of all kernels' time; of the gaps: of the time from the first to the last; {STEPS} steps"
    record.show(("what", "kind", "ms_a_step", "share", "count", "longest_us"), note=note)


def kind_of(name: str) -> str:
    """A word of `KINDS`, or "other".

    >>> kind_of("nvjet_tst_128x256_64x4 (custom-call.3)"), kind_of("loop_add_fusion_2")
    ('matmul', 'other')
    """
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def gaps(spans: Iterable[Span]) -> list[int]:
    """The times, in nanoseconds, between spans during which none runs.

    >>> gaps([(0, 4), (2, 6), (9, 10), (3, 5)])
    [3]
    """
    found, end = [], None
    for start, stop in sorted(spans):
        if end is not None and start > end:
            found.append(start - end)
        end = stop if end is None else max(end, stop)
    return found
