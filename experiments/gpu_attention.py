"""`gpu.py attention`: `jp.attention` beside attention as the formula has it, with its scores in memory.

Errors are |ours - exact| / |exact| in the Frobenius norm, `exact` being the formula in float32 on the same device; the
formula in the low precision itself is the yardstick. Times are of forward and backward together.

Dims: B rows, T positions, H heads, K key/value heads, h head_dim.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_report import Record, said

import jaxpar as jp


@dataclass(frozen=True)
class Case:
    """Sizes, and what is asked of attention."""

    name: str
    b: int
    t: int
    heads: int
    groups: int
    h: int
    causal: bool = True
    window: int | None = None
    segments: int = 0


CASES = (
    Case("causal", 8, 1024, 12, 12, 64),
    Case("no mask", 8, 1024, 12, 12, 64, causal=False),
    Case("head_dim 128", 4, 2048, 16, 16, 128),
    Case("GQA 4:1", 4, 2048, 32, 8, 64),
    Case("odd length", 8, 1021, 12, 12, 64),
    Case("odd, no mask", 8, 1021, 12, 12, 64, causal=False),
    Case("window 256", 4, 2048, 16, 16, 64, window=256),
    Case("packed, 4 a row", 4, 2048, 16, 16, 64, segments=4),
    Case("long", 1, 8192, 16, 4, 128),
)
TINY = (
    Case("GQA 2:1, odd", 1, 7, 4, 2, 8),
    Case("packed, 2 a row", 1, 8, 2, 2, 8, segments=2),
)


def formula(case: Case, query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None) -> jax.Array:
    """softmax(query key^T / sqrt(h)) value, softmax in float32; [B, T, H, h]."""
    key, value = (jnp.repeat(x, case.heads // case.groups, axis=2) for x in (key, value))
    scores = jnp.einsum("bthc,bshc->bhts", query, key, preferred_element_type=jnp.float32) / np.sqrt(case.h)
    i, j = jnp.arange(case.t)[:, None], jnp.arange(case.t)
    seen = (j <= i) if case.causal else jnp.ones((case.t, case.t), bool)
    seen = seen & (j > i - case.window) if case.window else seen
    seen = seen[None, None]
    if ids is not None:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(value.dtype)
    return jnp.einsum("bhts,bshc->bthc", weights, value)


def ours(case: Case, query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None) -> jax.Array:
    return jp.attention(query, key, value, causal=case.causal, window=case.window, segment_ids=ids)


def with_gradients(attend: Callable[..., jax.Array], case: Case) -> Callable[..., Any]:
    """(query, key, value, ids, cotangent) -> the value, and the three gradients."""

    def run(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any, given: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *qkv: attend(case, *qkv, ids), query, key, value)
        return out, *pull(given.astype(out.dtype))

    return run


def run(record: Record, rounds: int, tiny: bool) -> None:
    for case in TINY if tiny else CASES:
        for dtype in ("bfloat16", "float16"):
            if record.left < 0:
                record.add(case=case.name, dtype=dtype, error="not begun: the budget is spent")
                continue
            try:
                record.add(case=case.name, dtype=dtype, **measure(case, dtype, 2 if tiny else rounds))
            except Exception as error:
                record.add(case=case.name, dtype=dtype, error=said(error))
    head = ("case", "dtype", "by", "out", "out_plain", "dq", "dk", "dv", "dqkv_plain", "ok", "ms", "ratio", "MB",
            "MB_plain", "error")  # fmt: skip
    note = "ratio: ours over the formula's time, medians of alternating runs; MB: temporaries of the program"
    record.show(head, note=note)


def measure(case: Case, dtype: str, rounds: int) -> dict[str, Any]:
    """Errors, times and memory of one case."""
    keys = jax.random.split(jax.random.key(0), 4)
    wide = [jax.random.normal(k, (case.b, case.t, n, case.h)) for k, n in
            zip(keys, (case.heads, case.groups, case.groups, case.heads), strict=True)]  # fmt: skip
    low = [x.astype(dtype) for x in wide]
    ids = None
    if case.segments:
        ids = jnp.broadcast_to(jnp.arange(case.t) * case.segments // case.t, (case.b, case.t))
    with jax.default_matmul_precision("highest"):  # of the same, rounded inputs
        exact = jax.jit(with_gradients(formula, case))(*(x.astype(jnp.float32) for x in low[:3]), ids, low[3])
    exact = [np.asarray(x) for x in exact]
    found: dict[str, Any] = {}
    programs, peaks = {}, {}
    for name, attend in (("ours", ours), ("plain", formula)):  # ours first: the peak of a process only grows
        programs[name] = jax.jit(with_gradients(attend, case)).lower(*low[:3], ids, low[3]).compile()
        before = _peak()
        got = [np.asarray(x, np.float32) for x in programs[name](*low[:3], ids, low[3])]
        peaks[name] = _peak() if before is not None and (_peak() or 0) > before else None
        errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, exact, strict=True)]
        if name == "ours":
            found |= {"by": "cuDNN" if "__cudnn$fmha" in programs[name].as_text() else "XLA"}
            found |= dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))
        else:
            found |= {"out_plain": errors[0], "dqkv_plain": max(errors[1:])}
    # Flash attention rounds the weights block by block: twice the formula's own rounding is not wrong.
    limit = 2 * max(found["out_plain"], found["dqkv_plain"], 1e-3)
    found["ok"] = all(np.isfinite(found[n]) and found[n] <= limit for n in ("out", "dq", "dk", "dv"))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(_seconds(functools.partial(program, *low[:3], ids, low[3])))
    median = {name: float(np.median(seconds)) for name, seconds in times.items()}
    memory = {name: program.memory_analysis().temp_size_in_bytes / 1e6 for name, program in programs.items()}
    found |= {"ms": 1e3 * median["ours"], "ms_plain": 1e3 * median["plain"], "ratio": median["ours"] / median["plain"]}
    found |= {"MB": memory["ours"], "MB_plain": memory["plain"], "peak_bytes": peaks["ours"]}
    return found | {"peak_bytes_plain": peaks["plain"], "seconds": times}


def _seconds(call: Callable[[], Any], count: int = 5) -> float:
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(count):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / count


def _peak() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
