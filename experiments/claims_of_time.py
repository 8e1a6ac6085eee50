"""Claims of time: of the machine that runs them, and no other."""

import time

import jax
from claim import Found, batch, claim, step_of, verdict

ROUNDS = 8


def fastest(strategies: tuple[str, ...], **changes: int) -> dict[str, float]:
    """Seconds of the fastest step of each, in turns."""
    best: dict[str, float] = {}
    steps = {s: step_of(s, **changes) for s in strategies}
    states = {s: step.init(jax.random.key(0)) for s, step in steps.items()}
    for turn in range(ROUNDS + 2):
        for s, step in steps.items():
            begin = time.perf_counter()
            states[s], _ = jax.block_until_ready(step(states[s], batch()))
            taken = time.perf_counter() - begin
            if turn >= 2:
                best[s] = min(taken, best.get(s, taken))
    return best


@claim("FSDP is slower than DDP, less so where layers are larger", "Zhao et al. 2023; posts", "timed")
def fsdp_is_slower() -> Found:
    ratios = {}
    for dim in (64, 256):
        found = fastest(("ddp", "zero3"), dim=dim, ffn=3 * dim)
        ratios[dim] = found["zero3"] / found["ddp"]
    each = ", ".join(f"{ratio:.2f} at a width of {dim}" for dim, ratio in ratios.items())
    figure = f"A step of FSDP over one of DDP: {each}. FSDP sends more, and updates a part where DDP updates all."
    return Found(verdict(max(ratios.values()) > 1, only_if=min(ratios.values()) <= 1), figure)


@claim("Data parallel with a server is slower than DDP", "PyTorch's documentation", "timed")
def server_is_slower() -> Found:
    found = fastest(("ddp", "dp"))
    ratio = found["dp"] / found["ddp"]
    return Found(verdict(ratio > 1), f"{ratio:.1f} times the time of a step.")


@claim("Recomputation costs a third more time", "Chen et al. 2016", "timed")
def recomputation_takes_time() -> Found:
    found = fastest(("ddp", "ddp,remat=layer"))
    ratio = found["ddp,remat=layer"] / found["ddp"]
    return Found(verdict(1.15 < ratio < 1.5), f"{ratio:.2f} times the time of a step.")
