"""All ratios of the benchmarks that take no GPU, beside those stored from the last run on a machine like this one.

    python experiments/benchmarks/suite.py            # prints them; fails where one is 10% worse than stored
    python experiments/benchmarks/suite.py --store    # and keeps them, in ratios.json, for the next run
    python experiments/benchmarks/suite.py --only backward overhead

A ratio is jaxpar's time over another's, or over its own forward's: less is better. Contenders take turns, and most are
compared in CPU time, so that ratios hold on a busy machine; none is worth storing from one. What was stored on a
machine with another name or number of cores is shown, and nothing fails by it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STORED = HERE / "ratios.json"
SCRIPTS = {
    "backward": ["--rounds", "15"],
    "data_parallel": ["--rounds", "15"],
    "overhead": ["--rounds", "15"],
    "first_state": ["--rounds", "3"],
    "compile_time": ["--rounds", "3"],
    "torch_gloo": ["--rounds", "15"],
}
WORSE = 1.1


@dataclass(frozen=True)
class Found:
    """One ratio: now, and as it was stored, None where it was not."""

    name: str
    now: float
    before: float | None

    @property
    def worse(self) -> bool:
        """Whether it is 10% worse than stored."""
        return self.before is not None and self.now > WORSE * self.before

    def __str__(self) -> str:
        was = "not stored" if self.before is None else f"stored {self.before:.2f}"
        return f"{self.name:58} {self.now:6.2f}  {was}{'  WORSE' if self.worse else ''}"


def machine() -> dict[str, Any]:
    """What tells this machine from others."""
    return {"name": platform.node(), "processor": platform.machine(), "cores": os.cpu_count()}


def compared(ratios: Mapping[str, float], stored: Mapping[str, Any]) -> list[Found]:
    """Ratios beside those of a file that `kept` wrote; {} where there is none."""
    before = stored.get("ratios", {})
    return [Found(name, now, before.get(name)) for name, now in ratios.items()]


def kept(ratios: Mapping[str, float], stored: Mapping[str, Any], where: Mapping[str, Any]) -> dict[str, Any]:
    """The file with new ratios in it; others of the same machine stay."""
    old = stored.get("ratios", {}) if stored.get("machine") == where else {}
    return {"machine": dict(where), "ratios": {**old, **{name: round(x, 3) for name, x in ratios.items()}}}


def run(name: str, arguments: Sequence[str]) -> dict[str, float]:
    """The ratios of one script, whose other lines are passed on as they come. Raises RuntimeError if it fails."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    last = ""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(f"    {last}" if last else f"{name}", flush=True)
            last = line.rstrip()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return json.loads(last)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", action="store_true", help=f"keep the ratios in {STORED.name}")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="SCRIPT")
    options = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    ratios = {name: x for script in options.only for name, x in run(script, SCRIPTS[script]).items()}
    where = machine()
    same = stored.get("machine") == where
    print(f"\n{where['name']}, {where['cores']} cores; stored: {stored.get('machine', {}).get('name', 'nothing')}")
    found = compared(ratios, stored)
    print("\n".join(map(str, found)))
    if options.store:
        STORED.write_text(json.dumps(kept(ratios, stored, where), indent=2) + "\n")
    return int(same and any(each.worse for each in found))


if __name__ == "__main__":
    sys.exit(main())
