"""`gpu.py speed`: a step of jaxpar beside a plain `jax.jit` step and `torch.compile`, each in a process of its own.

A process of its own makes what a contender holds its own peak, and lets one run out of memory without the others. All
are compared with jaxpar's `single`: that process and the contender's take turns, and the ratio is of medians.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_report import Record

HERE = Path(__file__).parent
BASELINE = "single"
# Rows and positions of a batch, and strategies for this model alone. 50,304 words are GPT-2's 50,257, filled up to a
# multiple of 128, for all alike. The mixture has 2 of Mixtral's 32 layers, and a quarter of their width: 1.05B.
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"rows": 16, "length": 1024, "changes": {"vocab": 50304}},
    "gpt2-medium": {"rows": 8, "length": 1024, "changes": {"vocab": 50304}},
    "llama3.2-1b": {"rows": 4, "length": 2048, "changes": {}},
    "mixtral-8x7b": {
        **{"rows": 8, "length": 2048, "changes": {"layers": 2, "ffn": 3584}},
        "strategies": ("expert=-1", "expert=-1,precision=fp8"),
    },
}
_SMALL = {"vocab": 64, "layers": 2, "heads": 2, "dim": 16, "context": 16}
_SMALL_LLAMA = {**_SMALL, "kv_heads": 1, "ffn": 24}


def spec_of(model: str, rows: int | None, tiny: bool) -> dict[str, Any]:
    """What a contender is told of the model. Raises ValueError for one that is not in `SIZES`."""
    if model not in SIZES:
        raise ValueError(f"model={model!r}: use one of {', '.join(SIZES)}")
    size = {"model": model, "tiny": tiny, **SIZES[model]}
    if tiny:
        size |= {"rows": 2, "length": 8, "changes": _SMALL if model.startswith("gpt2") else _SMALL_LLAMA}
    return size | ({"rows": rows} if rows else {})


class Contender:
    """A process with one step; it says what it is when it is ready, and runs steps when asked."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        # Left to itself, JAX takes three quarters of the card, and two processes share it.
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45", **os.environ}
        script = "gpu_torch.py" if name == "torch" else "gpu_worker.py"
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # until `end`
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), json.dumps({**spec, "contender": name})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment)  # fmt: skip

    def ask(self, request: str, seconds: float) -> dict[str, Any]:
        """The answer to a request ("" for the first, that it is ready), or {"error"} with why there is none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if request:
                self.process.stdin.write(f"{request}\n".encode())
                self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], max(seconds, 0))
            if not ready:
                return {"error": f"no answer within {seconds:.0f} s, ended"}
            if line := self.process.stdout.readline():
                return json.loads(line)
        except BrokenPipeError:
            pass  # it has died: its own words follow
        self.errors.seek(0)
        return {"error": f"the process died: {self.errors.read().decode(errors='replace')[-1500:]}"}

    def end(self) -> None:
        """Ends the process, and with that its hold of memory."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def run(options: Any, tiny: bool) -> None:
    """Every contender after the other beside the baseline."""
    asked = Contender("machine", {"tiny": tiny, "model": options.model})
    here = asked.ask("", 120)
    asked.end()
    if "error" in here:
        sys.exit(f"JAX does not start: {here['error']}")
    tiny = tiny or here["platform"] == "cpu"
    spec = spec_of(options.model, options.rows, tiny)
    record = Record(options.out, f"speed-{options.model}", options.budget, here, **spec)
    base = Contender(BASELINE, spec)
    try:
        ready = base.ask("", record.left)
        if "error" not in ready:
            ready |= _times(base, None, options, record, tiny)
        record.add(contender=f"jaxpar {BASELINE}", **ready)
        if "error" not in ready:
            own = spec.get("strategies", ())
            for name in ("plain", *options.strategies, *own, *(["torch"] if options.torch else [])):
                _beside(base, name, spec, options, record, tiny)
    finally:
        base.end()
    head = ("contender", "ms", "ratio", "tokens_s", "mfu", "peak_GB", "explained_GB", "predicted_ms", "ready_s",
            "loss", "absent", "error")  # fmt: skip
    note = "ratio: over jaxpar single, medians of alternating runs; peak: of the process; explained: step.explain"
    record.show(head, note=note)
    if any(row.get("error") for row in record.rows):
        sys.exit("some contenders have no figure: see above")


def _beside(base: Contender, name: str, spec: dict[str, Any], options: Any, record: Record, tiny: bool) -> None:
    shown = name if name in ("plain", "torch") else f"jaxpar {name}"
    if record.left < 30:
        record.add(contender=shown, error="not begun: the budget is spent")
        return
    other = Contender(name, spec)
    try:
        ready = other.ask("", record.left)
        if "error" not in ready and "absent" not in ready:
            ready |= _times(base, other, options, record, tiny)
        record.add(contender=shown, **ready)
    finally:
        other.end()


def _times(base: Contender, other: Contender | None, options: Any, record: Record, tiny: bool) -> dict[str, Any]:
    """Medians of alternating runs of a few steps, and what memory and loss are after them."""
    both = [base] if other is None else [base, other]
    seconds: list[list[float]] = [[] for _ in both]
    last: dict[str, Any] = {}
    for _ in range(2 if tiny else options.rounds):
        for number, one in enumerate(both):
            last = one.ask(f"run {1 if tiny else 5}", max(record.left, 20))
            if "error" in last:
                return {"error": last["error"]}
            seconds[number].append(last["seconds"])
    median = [sorted(one)[len(one) // 2] for one in seconds]
    found = {"ms": 1e3 * median[-1], "ratio": median[-1] / median[0], "tokens_s": last["tokens"] / median[-1]}
    if last.get("peak_flops"):
        found["mfu"] = last["model_flops"] / (median[-1] * last["peak_flops"])
    return found | {k: last.get(k) for k in ("peak_GB", "in_use_GB", "loss")} | {"times": seconds}


def serve(make: Any) -> None:
    """The other side: `make(spec)` gives what to say first and a function of a number of steps; stdin asks.

    Whatever libraries print goes to stderr: stdout is for answers, one JSON object a line.
    """
    answers, sys.stdout = os.fdopen(os.dup(1), "w", buffering=1), sys.stderr
    os.dup2(2, 1)
    from gpu_report import said

    try:
        start = time.perf_counter()
        first, steps = make(json.loads(sys.argv[1]))
        print(json.dumps({**first, "ready_s": time.perf_counter() - start}), file=answers)
        for line in sys.stdin:
            print(json.dumps(steps(int(line.split()[1]))), file=answers)
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(json.dumps({"error": said(error)}), file=answers)
