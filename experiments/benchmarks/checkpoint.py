"""What a checkpoint costs: the stall of a save against 50 steps, and the memory of the host while saving and restoring.

`llama-130m` (134,105,856 parameters, Adam: 1.6 GB of state) on one device, or on `DEVICES` simulated ones, on which the
state itself is in the host's memory: `save` is beside it, `restore` with it. Memory is what the process has of its own
(RssAnon), sampled every 2 ms; files that are mapped are the system's to drop.

    python experiments/benchmarks/checkpoint.py [MODEL] [ROWS] [BUCKET]

    fresh      seconds of a core to touch as much memory as the state has for the first time: most of the first save on
               a virtual machine whose host takes freed pages back; later saves are copied into the first one's memory
    stall      seconds in which a save, not the first, keeps the next step from starting: the copy from the devices
    save       the first brings its memory with it, imports and folders too, the second is copied into that memory
    written    seconds until all is on disk, in the background
    step       seconds of a step alone, and while a checkpoint is being written
    to         where a bucket is given, s3://name: medians of saves to disk and there in turns, after one of each, of
               the state of SGD
"""

import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxpar as jp
from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.models import named

DEVICES, STEPS, TURNS = 4, 10, 3


def own_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def peak(call: Callable[[], Any]) -> tuple[Any, int, float]:
    """What a call returns, the most memory that it took beside what was there, and its seconds."""
    before, most, done = own_memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    try:
        result = call()
    finally:
        seconds = time.perf_counter() - begin
        done.set()
        thread.join()
    return result, max(most - before, 0), seconds


def main(name: str = "llama-130m", rows: int = 4, bucket: str = "") -> None:
    if jax.config.jax_platforms in (None, "cpu"):
        jp.simulate(DEVICES)
    model = named(name)
    # moto takes more than s3fs's 15 s to put more than a GB together.
    step = jp.make_train_step(model.model, optax.sgd(1e-4) if bucket else optax.adam(1e-4), "fsdp")
    folder = Path(tempfile.mkdtemp())
    state = step.init(jax.random.key(0))
    size = sum(x.nbytes for x in jax.tree.leaves(state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))
    print(f"{name}, {len(step.mesh.devices.flat)} x {step.mesh.devices.flat[0].platform}: {size / 1e9:.2f} GB of state")
    begin = time.thread_time()
    room = np.ones(size, np.uint8)
    fresh, begin = time.thread_time() - begin, time.thread_time()
    room[:] = 2
    print(f"fresh     {fresh:.2f} s, the same again {time.thread_time() - begin:.2f} s")
    del room
    batch = {"tokens": jax.random.randint(jax.random.key(1), (rows, 17), 0, 1000)}
    try:
        if bucket:
            in_turns(step, state, batch, {"disk": folder, "bucket": bucket})
            return
        for name in ("first", "second"):
            saves, most, _ = peak(lambda name=name: saved_at(time.perf_counter(), step, folder / name, state))
            returns, written = saves
            print(f"save      {name}: memory {most / size:.2f} N, returns {returns:.2f} s, written {written:.2f} s")
        del state
        _, _, seconds = peak(jp.Checkpoint(folder / "second").verify)
        print(f"verify    {seconds:.2f} s")
        state, most, seconds = peak(lambda: step.restore(folder / "second"))
        print(f"restore   memory {most / size:.2f} N, {seconds:.2f} s")
        state, metrics = step(state, batch)
        times, stall = [], 0.0
        for saving in (False, True):
            metrics["loss"].block_until_ready()
            if saving:
                before = time.perf_counter(), time.thread_time()
                saves = step.save(folder / "third", state)
                stall, busy = time.perf_counter() - before[0], time.thread_time() - before[1]
            for _ in range(STEPS):
                begin = time.perf_counter()
                state, metrics = step(state, batch)
                metrics["loss"].block_until_ready()
                times.append(time.perf_counter() - begin)
        saves.wait()
        alone, beside = sorted(times[:STEPS])[STEPS // 2], sorted(times[STEPS:])[STEPS // 2]
        print(f"stall     {stall:.2f} s ({busy:.2f} s of a core), {stall / (50 * alone):.1%} of 50 steps")
        print(f"step      {alone:.2f} s alone, {beside:.2f} s while a checkpoint is being written (medians of {STEPS})")
    finally:
        shutil.rmtree(folder)


def in_turns(step: Any, state: Any, batch: Any, places: dict[str, Any]) -> None:
    """Saves to each place in turns, and prints medians; memory is beside what is kept from the saves before."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in places}
    runs = {name: Checkpoints(at, step, {}, keep=1) for name, at in places.items()}
    for _ in range(1 + TURNS):
        for name, saves in runs.items():
            begin = time.perf_counter()
            stall, most, written = peak(lambda saves=saves, state=state: returned(saves, state))
            found[name].append((stall - begin, written, most / 1e6))
        state = jax.block_until_ready(step(state, batch)[0])
    for name, rows in found.items():
        stall, written, memory = (statistics.median(column[1:]) for column in zip(*rows, strict=True))
        print(f"to {name:6} stall {stall:.2f} s, written {written:.2f} s, memory {memory:.0f} MB more")


def returned(saves: Checkpoints, state: Any) -> float:
    """When the call has returned; waits until all is there."""
    saves.save(int(state.step), state)
    now = time.perf_counter()
    saves.wait()
    return now


def saved_at(begin: float, step: Any, folder: Path, state: Any) -> tuple[float, float]:
    """Seconds until the call returns, and until all is on disk."""
    saves = step.save(folder, state)
    stall = time.perf_counter() - begin
    saves.wait()
    return stall, time.perf_counter() - begin


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]), *sys.argv[3:4])
