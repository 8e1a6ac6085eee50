"""One process of a run that `campaign.py` breaks: a model that compiles in a second, data that are a function of the
batch's number, and the faults that only the process itself can have.

    python tests/campaign_worker.py '{"out": "runs/x", "steps": 60}'
"""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process does; JSON on its command line.

    Attributes:
      rank, processes, port: of several processes on loopback.
      data: "noise", or "digits": images, read by grain.
      shift: of the noise, as files that differ between hosts would.
      version: another version of optax, as it says.
      flips: instead of training, so many copies of the run's last checkpoint, a bit of each flipped.
      spoil: the batch of this step is not a number.
      clock: seconds by which the clock is put on after step `clock_at`.
    """

    out: str
    steps: int = 60
    rank: int = 0
    processes: int = 1
    port: int = 0
    seed: int = 0
    lr: float = 1e-2
    data: str = "noise"
    shift: int = 0
    rows: int = 8
    strategy: str = "fsdp"
    precision: str = "f32"
    version: str = ""
    save_every: int = 3
    flips: int = 0
    spoil: int = 0
    clock: float = 0.0
    clock_at: int = 5


def say(text: str) -> None:
    """What the campaign waits for, in one write."""
    os.write(1, f"{text}\n".encode())


def model(work: Work) -> Any:
    """Three scanned layers and what is around them."""
    import jax

    import jaxpar as jp

    def init(key: Any) -> dict[str, Any]:
        a, b = jax.random.split(key)
        width = 12 if work.data == "noise" else 64
        return {"in": jax.random.normal(a, (width, 64)) * 0.3, "layers": jax.random.normal(b, (3, 64, 64)) * 0.1}

    def loss(params: Any, batch: Any, key: Any) -> Any:
        if work.data == "noise":
            x, y = batch["x"], batch["y"]
        else:
            x, y = batch["image"].reshape(-1, 64), jax.nn.one_hot(batch["label"], 8)
        x, _ = jax.lax.scan(lambda x, w: (x + jax.numpy.tanh(x @ w), None), x @ params["in"], params["layers"])
        return ((x[:, :8] - y) ** 2).mean()

    return jp.Model(init=init, loss=loss)


def batches(work: Work) -> Callable[[int], Iterator[Any]]:
    """Noise, from batch `start` on."""
    import numpy as np

    def batches(start: int) -> Iterator[Any]:
        for number in itertools.count(start):
            rng = np.random.default_rng(number + work.shift)
            x, y = (rng.normal(size=(work.rows, width)).astype(np.float32) for width in (12, 8))
            yield {"x": x * (np.nan if number + 1 == work.spoil else 1), "y": y}

    return batches


def trainer(work: Work, hooks: list[Any], **changes: Any) -> Any:
    """The run: resumed, wherever it may stand."""
    import optax

    import jaxpar as jp
    from jaxpar.data import images

    # One that trains anew and one that goes on say the same.
    loop = jp.Loop(steps=work.steps, rows=work.rows, seed=work.seed, save_every=work.save_every, out=Path(work.out),
                   resume=True, print_every=10**6)  # fmt: skip
    loop = dataclasses.replace(loop, **changes)
    strategy = f"{work.strategy},precision={work.precision}"
    about = {"lr": work.lr}
    data = batches(work) if work.data == "noise" else images.digits()
    return jp.Trainer(model(work), optax.adamw(work.lr), data, strategy, loop, hooks=hooks, about=about)


def digest(state: Any) -> str:
    """Of the bits of this process's parameters and moments."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for leaf in jax.tree.leaves((state.params, state.optimizer)):
        for shard in leaf.addressable_shards:
            found.update(np.asarray(shard.data).tobytes())
    return found.hexdigest()


def train(work: Work) -> None:
    """Trains to the end, and says what came out."""
    import jaxpar as jp

    def put_on(_: Any, metrics: dict[str, float]) -> None:
        if work.clock and metrics["step"] == work.clock_at:
            right = time.time
            time.time = lambda: right() + work.clock

    hook = jp.Hook(
        on_start=lambda _, at: say(f"START {int(at['step'])}"),
        on_step=lambda _, metrics: (put_on(_, metrics), say(f"STEP {int(metrics['step'])}")),
    )
    run = trainer(work, [hook])
    state = run.run()
    say(f"END {digest(state)}")


def flip(work: Work) -> None:
    """Restores copies of the run's last checkpoint in each of which one bit is another, and says how each ended."""
    import random

    out = Path(work.out)
    truth = digest(trainer(work, [], quiet=True).run())
    for number in range(work.flips):
        choice = random.Random(number)
        copy = out.with_name(f"{out.name}-flip{number}")
        shutil.copytree(out, copy)
        last = max((x for x in (copy / "checkpoints").iterdir() if x.name.isdigit()), key=lambda x: int(x.name))
        is_read = lambda x: x.is_file() and x.stat().st_size and x.name != "commit_success.txt"  # a name says it
        files = sorted(filter(is_read, last.rglob("*")))
        file = choice.choices(files, [x.stat().st_size for x in files])[0]
        data = bytearray(file.read_bytes())
        bit = choice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        try:
            found = digest(trainer(dataclasses.replace(work, out=str(copy)), [], quiet=True).run())
            end = "harmless" if found == truth else "silent"
        except ValueError as error:
            end = "named" if str(last) in str(error) else "unnamed"
            found = str(error)
        except Exception as error:  # anything at all is what is counted here
            end, found = "bare", f"{type(error).__name__}: {error}"
        shown = " ".join(found.split())[:200]
        say(f"FLIP {end} bit {bit} of {len(data)} bytes in {file.relative_to(last)}: {shown}")
        shutil.rmtree(copy)


def main() -> None:
    """Joins the others, where there are any, and does what is asked."""
    work = Work(**json.loads(sys.argv[1]))
    if work.version:
        real = importlib.metadata.version
        importlib.metadata.version = lambda name: work.version if name == "optax" else real(name)
        import optax

        optax.__version__ = work.version
    import jax

    jax.config.update("jax_num_cpu_devices", 2 // work.processes)
    if work.processes > 1:
        import jaxpar as jp

        jp.initialize(f"127.0.0.1:{work.port}", work.processes, work.rank)
        say("JOINED")
    (flip if work.flips else train)(work)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FloatingPointError, OSError, RuntimeError) as error:  # as the command line shows them
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
