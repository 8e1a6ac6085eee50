"""A step of jaxpar on 4 simulated devices beside torch's DDP and FSDP2 over gloo, with 4 processes of one thread each.

Six layers of llama-tiny on 16 rows of 128 tokens, AdamW, float32; torch has the decoder of `gpu_torch.py`, the same
products and norms. Medians of seconds on the clock of one step; contenders run one after the other, not in turns, so
that this means something on a machine with nothing else to do. Without torch (`make hf`) there are no ratios.

    python experiments/benchmarks/torch_gloo.py
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from turns import fresh, report

PROCESSES, LAYERS, ROWS, LENGTH, WARM = 4, 6, 16, 128, 3
OURS = {"ddp": "ddp", "fsdp2": "fsdp"}
sys.path.insert(0, str(Path(__file__).parents[1]))  # gpu_torch


def worker(kind: str, meeting: str, rank: int, rounds: int) -> list[float]:
    """The seconds of each step of one process of torch."""
    import torch
    from gpu_torch import decoder
    from torch import distributed

    from jaxpar.models import named

    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=PROCESSES)
    model: Any = decoder(torch, named("llama-tiny", layers=LAYERS).config, gated=True)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = distributed.device_mesh.init_device_mesh("cpu", (PROCESSES,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (ROWS // PROCESSES, LENGTH + 1))
    times = []
    for _ in range(WARM + rounds):
        begin = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - begin)
    distributed.destroy_process_group()
    return times[WARM:]


def theirs(kind: str, rounds: int) -> float:
    """Seconds of a step of torch: the median over steps and processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--torch", kind, str(Path(folder) / "meeting")]
        started = [
            subprocess.Popen(
                [*command, str(rank), str(rounds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(PROCESSES)
        ]
        outputs = [process.communicate(timeout=300) for process in started]
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"torch's {kind}: {errors[-2000:]}")
    return float(np.median([json.loads(printed.splitlines()[-1]) for printed, _ in outputs]))


def ours(strategy: str, rounds: int) -> float:
    """Seconds of a step of jaxpar, in this process."""
    import jax
    import optax

    import jaxpar as jp
    from jaxpar.models import named

    jp.simulate(PROCESSES)
    step = jp.make_train_step(named("llama-tiny", layers=LAYERS).model, optax.adamw(1e-3), strategy)
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH + 1), dtype=np.int32)}
    state, times = step.init(jax.random.key(0)), []
    for _ in range(WARM + rounds):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        times.append(time.perf_counter() - begin)
    return float(np.median(times[WARM:]))


def ratios(rounds: int) -> dict[str, float]:
    """Prints a line for each pair; ours over torch's, by name."""
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed (make hf): nothing to compare with")
        return {}
    found = {}
    for kind, strategy in OURS.items():
        mine, other = json.loads(fresh(__file__, "--ours", strategy, str(rounds))), theirs(kind, rounds)
        print(f"{strategy:5} {1e3 * mine:6.0f} ms, torch's {kind} {1e3 * other:6.0f} ms", flush=True)
        found[f"{strategy} over torch's {kind}"] = mine / other
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--torch"]:
        print(json.dumps(worker(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
    elif sys.argv[1:2] == ["--ours"]:
        print(json.dumps(ours(sys.argv[2], int(sys.argv[3]))))
    else:
        report(ratios, __doc__, rounds=20)
