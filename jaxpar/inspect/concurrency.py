"""concurrent="auto": how many microbatches run side by side, chosen by a closed form before anything is compiled.

If microbatches run one after another, kernels wait for all collectives of activations (`tensor`, `context`, `expert`).
With c of them side by side, layer by layer, they wait for one in c: the others travel while another microbatch
computes. A layer is gathered, and its gradients are reduced, once for c microbatches.

    C           seconds of kernels, of the traced forwards and backwards
    A           seconds of collectives of activations
    P(c), L(c)  seconds of collectives of parameters and gradients, outside of layers and of layers. With c at a time
                they are a c-th, unless a step sends them once and not for every microbatch
    exposed(c)  A / c + P(c) + max(0, A - A / c + L(c) - C)
    choice      the smallest c of 1, 2, 4 with exposed(c) <= 4% of C + exposed(c), else the largest, if it fits

    bytes(c)    the state + c times the activations that one microbatch saves

The program has three quarters of a device's memory, JAX's part by default, less a reserve. A choice with more bytes is
left out. If the closed form is above a quarter of them, the program is compiled, and its total decides. The step then
runs this program. All processes choose the same, since shapes and the kind of the devices decide.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from ..backend.machines import hosts_spanned
from ..backend.text import size
from ..hardware.compiled.memory import program_memory
from ..hardware.hardware import RESERVE, Hardware, of_device_kind
from ..hardware.links import Reach, collective_seconds
from ..parallel.data import rule_of
from ..program import jaxpr as jx
from ..program.collectives import PRIMITIVES
from ..program.primitives import PRODUCTS
from ..program.walk import programs, visit
from ..step.tracing import Traced
from .expected import sent_for_leaf
from .ledger import Collective
from .memory import forward
from .predict.efficiency import EXPECTED_PACE, estimated_seconds
from .remat import equation_seconds
from .step_view import RunnableStep as Step
from .uses import leaf_uses, program_of_turns, uses_of_turns

AnyStep = TypeVar("AnyStep", bound=Step)
_CHOICES = (2, 4)
_EXPOSED_SHARE = 0.04  # of a step; less is not worth the memory
_JAX_SHARE = 0.75  # of a device's memory: XLA_PYTHON_CLIENT_MEM_FRACTION, if it is not set
_NEAR = 0.25  # share of these bytes from which on a program is compiled: the buffers of a mixture are not saved values
_AXES = ("tensor", "context", "expert")
_SLICES = "dynamic_slice", "dynamic_update_slice"  # of the values of all layers, of which they move one layer's


def settle(step: AnyStep, batch: Any) -> AnyStep:
    """Return the step with the number of concurrent microbatches for a batch of these shapes.

    Compiles nothing, or one program or two if memory is short. Nothing runs.
    """
    step = step.choosing(concurrent=1)
    hardware = _hardware(step)
    if hardware is None or all(step.mesh.shape[axis] == 1 for axis in _AXES):
        return step
    usable = int((1 - RESERVE) * _JAX_SHARE * (hardware.memory_bytes or 0))
    traced = step.traced(batch)
    if _passes_variables(traced):
        step.concurrency_remark = "concurrent=1: the loss passes variables from one microbatch to the next."
        return step
    if not traced.program.stacks:
        step.concurrency_remark = (
            "concurrent=1: the loss has no stack of layers, in which microbatches could take turns."
        )
        return step
    # 1. The choices by their exposed seconds.
    seconds = _Seconds.of(step, traced, hardware)
    choices = [1]
    for c in _CHOICES:
        if seconds.share(choices[-1]) > _EXPOSED_SHARE and step.strategy.microbatches % c == 0:
            choices.append(c)
    # 2. The largest of them that fits.
    state, saved = sum(step.layout.bytes.values()), forward(step, batch).saved
    too_large = ""
    chosen = step
    for c in reversed(choices[1:]):
        needed, trial = state + c * saved, step.choosing(concurrent=c)
        if _NEAR * usable < needed <= usable:
            needed = _compiled_bytes(trial, batch)
        if needed <= usable:
            chosen = trial
            break
        room = f"need {size(needed)} of {size(usable)}" if needed < math.inf else "find no room"
        too_large += f"; {c} at a time {room}"
    waits = ", ".join(f"{1e3 * seconds.exposed(c):.3g} ms ({seconds.share(c):.1%}) with {c}" for c in choices)
    chosen.concurrency_remark = (
        f"concurrent={chosen.strategy.concurrent}: by closed forms, a step has {1e3 * seconds.kernels:.3g} ms of "
        f"kernels and waits {waits} at a time; each microbatch saves {size(saved)} for its backward{too_large}."
    )
    return chosen


def _compiled_bytes(step: Step, batch: Any) -> float:
    """Return the bytes of a step's compiled program on one device; infinity if XLA finds no room for it."""
    try:
        return program_memory(step.compile(batch))["total"]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf


def _hardware(step: Step) -> Hardware | None:
    """Return the numbers of the step's GPUs; None for other devices, and for kinds without the numbers."""
    device = step.mesh.devices.flat[0]
    hardware = of_device_kind(device.device_kind) if device.platform == "gpu" else None
    names = "memory_bytes", "memory_bandwidth", "link_bandwidth", "network_bandwidth"
    return None if hardware is None or None in (getattr(hardware, name) for name in names) else hardware


def _passes_variables(traced: Traced) -> bool:
    """Return whether new variables depend on rows or keys, as BatchNorm's statistics do."""
    program = traced.program
    rows_and_keys = program.inputs[len(program.consts) + len(jax.tree.leaves(traced.variables)) :]
    varies = lambda i: program.depends(rows_and_keys, i) or any(program.outputs[i] is v for v in rows_and_keys)
    return any(map(varies, jax.tree.leaves(traced.outputs[1])))


@dataclass(frozen=True)
class _Seconds:
    """The seconds of a step whose microbatches run one after another.

    Attributes:
      kernels: of forwards and backwards.
      activations: of the collectives of activations that kernels wait for.
      once: of the parameters and gradients outside of layers, with which nothing overlaps.
      layers: of the parameters and gradients of layers, which overlap with kernels.
      repeated: whether every turn sends parameters and gradients.
    """

    kernels: float
    activations: float
    once: float
    layers: float
    repeated: bool

    @classmethod
    def of(cls, step: Step, traced: Traced, hardware: Hardware) -> "_Seconds":
        """Return the seconds of a step."""
        program = program_of_turns(step, traced)
        uses = uses_of_turns(step, traced, program)
        seconds = functools.partial(_sent_seconds, step, hardware)
        once, of_layers = list[Collective](), list[Collective]()
        for leaf, counts, uses_of_leaf in zip(
            step.layout.storage.units, uses.use_counts, leaf_uses(step, traced, uses), strict=True
        ):
            # The second number counts uses of single layers.
            (of_layers if counts.fetches[1] else once).extend(sent_for_leaf(step, traced, leaf, uses_of_leaf))
        return cls(
            kernels=_kernel_seconds(program, hardware),
            # The hops of a ring travel while the block before is computed.
            activations=seconds(x for x in uses.model_collectives if x.kind != "collective-permute"),
            once=seconds(once),
            layers=seconds(of_layers),
            repeated=step.strategy.fsdp != 1 and rule_of(step.strategy).at_once,
        )

    def exposed(self, concurrent: int) -> float:
        """Return the seconds of a step in which kernels wait, with so many microbatches side by side."""
        turns = concurrent if self.repeated else 1
        overlapping = self.activations * (1 - 1 / concurrent) + self.layers / turns
        return self.activations / concurrent + self.once / turns + max(0.0, overlapping - self.kernels)

    def share(self, concurrent: int) -> float:
        """Return the exposed share of a step."""
        return (exposed := self.exposed(concurrent)) / (exposed + self.kernels)


def _kernel_seconds(program: Any, hardware: Hardware) -> float:
    """Return the seconds of a program's products by their FLOPs, and of other kernels by their bytes."""
    seconds = 0.0
    for eqn, num_runs in visit(program.eqns):
        if eqn.primitive.name in PRODUCTS:
            flops = {dtype: 2.0 * count for dtype, (count, _) in jx.matmuls([eqn]).items()}
            seconds += num_runs * EXPECTED_PACE * estimated_seconds(flops, 0, hardware)
    # Not the branches of conditionals: attention has one for each platform, and on GPUs keeps no scores.
    counted = {*PRODUCTS, *PRIMITIVES, *_SLICES}
    for eqn, num_runs in visit(program.eqns, into=lambda eqn: eqn.primitive.name != "cond"):
        if eqn.primitive.name not in counted and not programs(eqn):
            seconds += num_runs * equation_seconds(eqn, hardware)
    return seconds


def _sent_seconds(step: Step, hardware: Hardware, sent: Iterable[Collective]) -> float:
    """Return the seconds of collectives, each alone."""
    seconds = 0.0
    for x in sent:
        # Conditional rounds send tokens that overflow an expert's buffer. Balanced experts have no overflow.
        if not x.count or x.conditional:
            continue
        assert x.ranks is not None
        hosts = hosts_spanned(step.mesh, x.axes)
        reach = Reach(x.ranks, hosts, -(-x.ranks // hosts))
        if x.kind == "collective-permute":
            reach = Reach(2, min(hosts, 2), 2 // min(hosts, 2))
        seconds += x.count * collective_seconds(x.kind, x.bytes // x.count, reach, hardware)[0]
    return seconds
