"""The planner's own seconds and memory, by the number of devices that it plans for: a table of
experiments/results/plans.md.

Llama-3-8B with 4 of its 32 layers, one row of 4,096 tokens a device, `data=N/8,fsdp=8`: for every number of hosts of
8 H100s the same program. Each is planned in a process of its own, without a cache. Needs the CUDA compiler, no GPU:
`make gpu-compiler`, then

    JAX_PLATFORMS=cpu python experiments/benchmarks/planner.py
    JAX_PLATFORMS=cpu python experiments/benchmarks/planner.py 8 4096
"""

import resource
import subprocess
import sys
import time

import jaxpar as jp
from jaxpar.models import named

DEVICES = (8, 64, 512, 4096)


def plan(devices: int) -> None:
    """Prints one row."""
    model = named("llama3-8b", layers=4)
    begin, cpu = time.perf_counter(), time.process_time()
    found = jp.plan(
        model.model,
        model.example(devices, 4096),
        f"{devices // 8}x8xH100",
        strategies=[f"data={devices // 8},fsdp=8,precision=bf16"],
        cache=False,
    )
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts in KiB
    compiling = found.lines[0].compile_seconds
    print(f"| {devices:,} | {seconds:.1f} | {compiling:.1f} | {cpu:.1f} | {peak:,.0f} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["of"]:
        plan(int(sys.argv[2]))
        return
    print("| devices | s | of these compiling | s of CPU | MiB of the host |\n|-:|-:|-:|-:|-:|", flush=True)
    for devices in sys.argv[1:] or DEVICES:
        subprocess.run([sys.executable, __file__, "of", str(devices)], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
