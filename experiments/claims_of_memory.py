"""Claims of what devices hold."""

import jax
import optax
from claim import DEVICES, Found, batch, claim, explained, size, step_of, verdict

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger
from jaxpar.inspect.memory import forward, saved
from jaxpar.models import named
from jaxpar.parallel.pipeline.schedules import Schedule

GB = 1e9


def total(strategy: str) -> float:
    """MB of a device in a step, as the compiler counts them."""
    return explained(strategy).memory["each device"].total / 1e6


@claim(
    "A training step with Adam takes 16 bytes a parameter, whatever the model",
    "Rajbhandari et al. 2020, section 3.1",
    "traced",
)
def sixteen_bytes() -> Found:
    at_rest = step_of("ddp").layout.bytes
    each = {name: n / size() for name, n in at_rest.items()}
    parts = " + ".join(f"{name} {x:.2f}" for name, x in each.items())
    figure = f"{parts} = {sum(each.values()):.2f} bytes, and activations."
    return Found(verdict(abs(sum(each.values()) - 16) < 0.01), figure, each)


@claim("Memory of a device: FSDP < DDP < data parallel with a server", "lecture notes", "compiled")
def fsdp_ddp_server() -> Found:
    at = explained("dp").memory
    server, others = (at[role].total / 1e6 for role in ("server", "others"))
    fsdp, ddp = total("zero3"), total("ddp")
    figure = (
        f"FSDP {fsdp:.1f} MB, DDP {ddp:.1f} MB, the server {server:.1f} MB on {DEVICES} devices; but its other devices "
        f"{others:.1f} MB, since they hold no optimizer state."
    )
    numbers = {"fsdp": fsdp, "ddp": ddp, "server": server, "others": others}
    return Found(verdict(fsdp < ddp < server, only_if=others < ddp), figure, numbers)


@claim("The server needs more memory than the others", "lecture notes on `nn.DataParallel`", "compiled")
def server_holds_more() -> Found:
    at = explained("dp").memory
    ratio = at["server"].total / at["others"].total
    figure = (
        f"{ratio:.2f} times as much on {DEVICES} devices: the optimizer's state, and the gradients of all replicas."
    )
    return Found(verdict(ratio > 1), figure, {"ratio": ratio})


@claim("ZeRO-3 divides all state by the number of devices", "Rajbhandari et al. 2020, figure 1", "traced")
def zero_3_divides() -> Found:
    parts = {n: sum(step_of("zero3", n).layout.bytes.values()) for n in (1, 2, 4, 8)}
    each = {f"n{n}": parts[1] / parts[n] for n in (2, 4, 8)}
    figure = f"By {', '.join(f'{x:.2f}' for x in each.values())} on 2, 4 and 8 devices. Activations it does not divide."
    return Found(verdict(all(abs(x / int(n[1:]) - 1) < 0.01 for n, x in each.items())), figure, each)


@claim("Mixed precision halves the memory of training", "posts; against it Micikevicius et al. 2018", "traced")
def mixed_precision_halves() -> Found:
    steps = {name: step_of(f"zero3,precision={name}") for name in ("f32", "bf16")}
    rest = {name: step.layout.bytes["params"] + step.layout.bytes["optimizer"] for name, step in steps.items()}
    kept = {name: saved(step, batch()) for name, step in steps.items()}
    state, activations = rest["bf16"] / rest["f32"], kept["bf16"] / kept["f32"]
    figure = (
        f"Parameters and optimizer state: {state:.2f} of those in float32, since they stay float32. What the forward "
        f"keeps "
        f"for the backward: {activations:.2f}."
    )
    return Found(verdict(state < 0.6), figure, {"state": state, "activations": activations})


@claim("bf16 halves what FSDP sends", "posts", "traced")
def bf16_halves_traffic() -> Found:
    def by(strategy: str) -> dict[str, int]:
        step = step_of(strategy)
        return Ledger.from_jaxpr(step.trace(batch()), step.mesh).by("kind", value="sent")

    full, half, low = (by(f"zero3,precision={p}") for p in ("f32", "bf16", "bf16,reduce=compute"))
    gathers = half["all-gather"] / full["all-gather"]
    sums, lower = (sum(x.values()) / sum(full.values()) for x in (half, low))
    figure = (
        f"Weights: {gathers:.2f} of the bytes. Gradients are reduced in float32, so that it is {sums:.2f} in all; with "
        f"`reduce=compute`, which adds them up in bfloat16, {lower:.2f}."
    )
    return Found(
        verdict(lower < 0.52, only_if=sums > 0.52), figure, {"gathers": gathers, "all": sums, "compute": lower}
    )


@claim(
    "Recomputing layers trades memory for a third more arithmetic",
    "Chen et al. 2016; Korthikanti et al. 2022",
    "compiled",
)
def recomputation() -> Found:
    none, layer = (step_of(s) for s in ("single", "single,remat=layer"))
    kept = [forward(step, batch()).saved / 1e6 for step in (none, layer)]
    flops = [sum(explained(s).flops.values()) for s in ("single", "single,remat=layer")]
    more = flops[1] / flops[0]
    figure = (
        f"A forward keeps {kept[1]:.1f} MB in place of {kept[0]:.1f} MB, for {more:.2f} times the FLOPs (the head, "
        f"which is "
        "no layer, is not recomputed)."
    )
    holds = kept[1] < kept[0] / 3 and 1.1 < more < 1.34
    return Found(verdict(holds), figure, {"kept": kept[1] / kept[0], "flops": more})


@claim(
    "A pipeline's bubble shrinks with the number of microbatches: (p - 1)/m of the work", "Huang et al. 2019", "traced"
)
def bubble_by_microbatches() -> Found:
    idle = {}
    for m in (4, 16, 64):
        schedule = Schedule("1f1b", 4, m)
        idle[f"m{m}"] = float(schedule.bubble / (1 - schedule.bubble))
    figure = (
        f"Counted from the table of 4 ranks: {', '.join(f'{x:.1%} for {m[1:]}' for m, x in idle.items())} microbatches."
    )
    return Found(verdict(all(abs(x - 3 / int(m[1:])) < 1e-9 for m, x in idle.items())), figure, idle)


@claim(
    "GPipe holds the activations of all microbatches, 1F1B those of p", "Narayanan et al. 2021, section 2.2", "traced"
)
def one_f_one_b_holds_less() -> Found:
    held = {f"{kind}_{m}": Schedule(kind, 4, m).in_flight(0) for kind in ("gpipe", "1f1b") for m in (8, 32)}
    figure = (
        f"4 ranks, 8 and 32 microbatches: GPipe {held['gpipe_8']} and {held['gpipe_32']}; 1F1B {held['1f1b_8']} and "
        f"{held['1f1b_32']}. Here that is 2 p - 1, since all ranks run one program, in whose ticks a forward and a "
        f"backward "
        "go together; with a program for each rank it is p."
    )
    holds = held["gpipe_32"] == 32 and held["1f1b_8"] == held["1f1b_32"]
    return Found(verdict(holds, only_if=held["1f1b_32"] > 4), figure, held)


@claim(
    "More microbatches in a pipeline need no more memory", "posts; true of 1F1B since Narayanan et al. 2019", "traced"
)
def microbatches_are_free() -> Found:
    mb = {}
    for kind in ("gpipe", "1f1b"):
        for m in (8, 32):
            step = step_of(f"pipe=4,data=2,microbatches={m},schedule={kind}", adam=False)
            mb[f"{kind}_{m}"] = saved(step, batch(2 * m)) / 1e6
    figure = (
        f"Rows of a microbatch as before, 8 and 32 of them: GPipe {mb['gpipe_8']:.2f} and {mb['gpipe_32']:.2f} MB of "
        f"activations, 1F1B {mb['1f1b_8']:.2f} and {mb['1f1b_32']:.2f} MB."
    )
    return Found(verdict(mb["1f1b_8"] == mb["1f1b_32"], only_if=mb["gpipe_8"] < mb["gpipe_32"]), figure, mb)


@claim("A model of 70B is trained by a pipeline times data parallel", "posts", "traced")
def seventy_billion() -> Found:
    big, room = named("llama3-70b"), 80.0
    held = {}
    for name in ("data=64", "pipe=8,data=8", "pipe=8,fsdp=8,zero=1", "fsdp=64"):
        step = jp.make_train_step(big.model, optax.adam(1e-3), f"{name},microbatches=32", jax.devices()[:64])
        held[name] = sum(step.layout.bytes.values()) / GB
    each = ", ".join(f"`{name}` {x:.1f} GB" for name, x in held.items())
    figure = (
        f"{big.parameters / 1e9:.1f} billion parameters with Adam on 64 devices of {room:.0f} GB, state of each "
        f"before any "
        f"activation: {each}. Replicas of stages do not fit; with the optimizer sharded over them they do; so does "
        f"FSDP alone."
    )
    fits = held["pipe=8,fsdp=8,zero=1"] < room
    return Found(verdict(fits, only_if=held["pipe=8,data=8"] > room), figure, held)


@claim("Tensor parallelism divides activations too", "posts; against it Korthikanti et al. 2022, section 4.2", "traced")
def tensor_divides_activations() -> Found:
    one, two, cut = (saved(step_of(s, n), batch()) for s, n in
                     (("single", 1), ("tensor=2", 2), ("tensor=2,sequence=true", 2)))  # fmt: skip
    figure = (
        f"2 ranks keep {two / one:.2f} of what one device does: what stands between the products is whole on all. With "
        f"`sequence=true` {cut / one:.2f}."
    )
    return Found(
        verdict(cut < 0.6 * one, only_if=two > 0.51 * one), figure, {"tensor": two / one, "sequence": cut / one}
    )
