"""What the parts of `gpu.py` share: what is missing here, the machine, a record that is written as it grows."""

import importlib.metadata
import importlib.util
import json
import re
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Where a distribution's name is not what Python imports.
_IMPORTED = {"lazy-loader": "lazy_loader", "pyyaml": "yaml", "orbax-checkpoint": "orbax"}


def missing() -> list[str]:
    """jaxpar's dependencies that are not importable here, or older than it needs, as pip's words for them."""
    found = []
    for needed in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name, _, least = needed.partition(">=")
        if importlib.util.find_spec(_IMPORTED.get(name, name)) is None:
            found.append(needed)
            continue
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # importable from a path, without a version
            continue
        if _numbers(here) < _numbers(least):
            found.append(f"{needed} (here: {here})")
    return found


def how_to_bring(lacking: Iterable[str]) -> str:
    """How a machine without a network gets them."""
    names = " ".join(f"'{one.partition(' ')[0]}'" for one in lacking)
    return (
        f"missing here: {', '.join(lacking)}\n"
        "with a network:     python -m pip install --target site NAMES\n"
        "without one, elsewhere: python -m pip download --only-binary=:all: --python-version 3.12 --dest wheels NAMES\n"
        "then here:          python -m pip install --no-index --find-links wheels --target site NAMES\n"
        f"and in both:        PYTHONPATH=site python experiments/gpu.py ...    with NAMES = {names}"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


class Record:
    """Rows of results in `<out>/<name>.json`, rewritten after each, so that what is killed leaves what it found."""

    def __init__(self, out: Path, name: str, budget: float, here: dict[str, Any] | None = None, **about: Any) -> None:
        """`here` is `machine()` of another process, where this one is not to start JAX on the card."""
        self.out, self.name, self.rows = out, name, []
        self.about = {"command": name, **(machine() if here is None else here), **about}
        self._start, self._budget = time.perf_counter(), budget
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget - (time.perf_counter() - self._start)

    def add(self, **row: Any) -> None:
        """One more row."""
        self.rows.append(row)
        shown = "  ".join(f"{k}={_short(v)}" for k, v in row.items() if not isinstance(v, list | dict))
        print(f"[{time.perf_counter() - self._start:5.0f} s] {shown}"[:400], flush=True)
        self._write()

    def _write(self) -> None:
        found = {**self.about, "seconds": time.perf_counter() - self._start, "rows": self.rows}
        (self.out / f"{self.name}.json").write_text(json.dumps(found, indent=1, default=str))

    def show(self, columns: Sequence[str], rows: Iterable[dict[str, Any]] | None = None, note: str = "") -> None:
        """Prints the table of those columns, and writes it to `<out>/<name>.txt`."""
        self._write()
        about = "; ".join(f"{k} {v}" for k, v in self.about.items() if k in ("device", "jax", "memory"))
        cells = [[_short(row.get(column)) for column in columns] for row in (self.rows if rows is None else rows)]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in [columns, *cells]]
        took = f"{time.perf_counter() - self._start:.0f} s; {self.out / self.name}.json"
        text = "\n".join([f"{self.name}: {about}", *(line.rstrip() for line in lines), *([note] if note else []), took])
        (self.out / f"{self.name}.txt").write_text(text + "\n")
        print(f"\n{text}", flush=True)


def machine() -> dict[str, Any]:
    """What a figure must be read with: devices, their memory, versions."""
    import jax

    device = jax.devices()[0]
    found = {"device": f"{jax.device_count()} x {device.device_kind}", "platform": device.platform}
    found["memory"] = (device.memory_stats() or {}).get("bytes_limit", "not known")
    found["driver"] = str(getattr(device.client, "platform_version", "")).replace("\n", " ")
    for name in ("jax", "jaxlib", "flax", "optax", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12",
                 "nvidia-cudnn-cu13", "torch"):  # fmt: skip
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the record says what is there
    return found


def said(error: BaseException) -> str:
    """An error in a line; what is out of memory says so first."""
    text = " ".join(str(error).split())
    exhausted = "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    return f"{'OUT OF MEMORY: ' * exhausted}{type(error).__name__}: {text[:500]}"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-2 or abs(value) >= 1e5 else f"{value:.4g}"
    return str(value)
