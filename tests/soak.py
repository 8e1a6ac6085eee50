"""Every strategy family on every model of the battery, many steps each, on a machine that has other things to do.

    python tests/soak.py [--seconds 120] [--steps 200] [--from 300] [--jobs 4] [--hang 300]

A cell is a process of its own, which trains as a user would: it must end by itself, neither aborted nor hung. Half of
the cells run beside as many busy processes as there are cores, half are held to one core. `--seconds` ends the run
early; the cells are shuffled, always alike, so that a short run meets every family. Its last line says how many are
done, and `--from` goes on there. `--jobs` runs so many at once, where there are cores for them.
"""

import argparse
import collections
import concurrent.futures
import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

FAMILIES = (
    *("dp", "ddp", "zero1", "zero2", "zero3", "data=2,fsdp=4", "data=4,fsdp=2,zero=1", "zero2,microbatches=2"),
    *("fsdp=8,microbatches=2,precision=bf16", "tensor=2,fsdp=4", "tensor=2,fsdp=2,data=2,zero=2,sequence=true"),
    *("pipe=2,fsdp=4,microbatches=4", "pipe=2,data=2,tensor=2,microbatches=4"),
)
REFUSED = 3  # exit status of a cell whose strategy the model does not admit


def train(model: str, strategy: str, steps: int) -> None:
    """One cell."""
    import jaxpar as jp

    jp.simulate(8)

    import jax
    import optax
    from zoo import ZOO

    entry = ZOO[model]()
    try:
        step = jp.make_train_step(entry.model, optax.sgd(0.01, momentum=0.9), strategy)
        step.trace(entry.batch)
    except ValueError as error:
        print(error)
        sys.exit(REFUSED)
    state, batch = step.init(jax.random.key(0)), entry.batch
    for _ in range(steps):  # several steps are under way at a time, as in any loop that does not look at each loss
        state, metrics = step(state, batch)
    loss, grads = step.value_and_grad(state, batch)
    jax.block_until_ready((metrics, loss, grads, step.evaluate(state, batch), step.params(state)))


def outcome(model: str, strategy: str, steps: int, held: bool, hang: float) -> str:
    """ "ok", "refused", or how a cell ended, with the end of what it wrote."""
    command = [sys.executable, __file__, "--cell", model, strategy, "--steps", str(steps)]
    try:
        done = subprocess.run([*command, *["--held"] * held], capture_output=True, text=True, timeout=hang)
    except subprocess.TimeoutExpired:
        return f"hung: no end after {hang:g} s"
    if done.returncode in (0, REFUSED):
        return "refused" if done.returncode else "ok"
    said = [line for line in done.stderr.splitlines() if not line.startswith((" ", "WARNING", "I0000"))]  # no frames
    return f"ended with status {done.returncode}: {' | '.join(said)[-600:]}"


def main() -> None:
    """Run the cells, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell after this time")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the number of the cell to begin with")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--cell", nargs=2, metavar=("MODEL", "STRATEGY"), help="this one alone, in this process")
    parser.add_argument("--hang", type=float, default=300, help="seconds without an end; more beside other work")
    parser.add_argument("--held", action="store_true", help="hold the cell to one core")
    options = parser.parse_args()
    if options.cell:
        if options.held:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        train(*options.cell, options.steps)
        return
    from zoo import ZOO

    cells = list(itertools.product(ZOO, FAMILIES, (False, True)))
    random.Random(0).shuffle(cells)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    start = time.monotonic()

    def run(number: int) -> str:
        if time.monotonic() - start > options.seconds:
            return "left"
        model, strategy, held = cells[number]
        found = outcome(model, strategy, options.steps, held, options.hang)
        print(f"{number:3} {model:20} {strategy:45} {'one core' if held else 'busy':9} {found}", flush=True)
        return found if found in ("ok", "refused") else "failed"

    try:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            counts = collections.Counter(pool.map(run, range(options.first, len(cells))))
    finally:
        for process in busy:
            process.kill()
    print(f"{counts['ok']} passed, {counts['failed']} failed, {counts['refused']} skipped; ", end="")
    print(f"{len(cells) - counts['left']} of {len(cells)} cells are done")
    sys.exit(bool(counts["failed"]) or not counts["ok"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
