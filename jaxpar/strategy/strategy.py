"""`Strategy`: every choice that a run makes about parallelism, as one value.

A strategy is made from fields or from text, and checked when it is made (`constraints.py`). It knows nothing of a
model. Axis sizes of -1 become numbers when the devices are known (`Strategy.sizes`).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..backend.machines import leaves_host
from ..backend.removed import removed
from ..backend.text import did_you_mean
from .axes import AXES, SHARDS
from .constraints import CHOICES, CONSTRAINTS, OFFLOADS, is_int
from .schedules import SCHEDULES

# `zero3` and `fsdp` are one strategy by two names, the paper's and PyTorch's.
PRESETS: dict[str, dict[str, Any]] = {
    "single": {"single": True},
    "dp": {"data": -1, "server": True},
    "ddp": {"data": -1},
    "zero1": {"fsdp": -1, "zero": 1},
    "zero2": {"fsdp": -1, "zero": 2},
    "zero3": {"fsdp": -1, "zero": 3},
    "fsdp": {"fsdp": -1, "zero": 3},
    "hsdp": {"data": "hosts", "fsdp": -1, "zero": 3},
    "pp": {"pipe": -1, "microbatches": -1},
    "tp": {"tensor": -1},
}
PER_RANK = 4  # microbatches by default: a bubble of m = 4 p is negligible (GPipe, Huang et al. 2019, section 2.3)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one training step is spread over devices.

    Attributes: Axes of the mesh (one size may be -1, which means all remaining devices)
      data: size of the axis of plain replicas; `"hosts"` is the number of hosts (2 where there is one host).
      fsdp: size of the axis over which ZeRO shards; rows are shared over `data`, `fsdp` and `expert` alike.
      pipe: size of the axis over which the layers of the model's layer stack are spread, in stages.
      expert: size of the axis over which experts are split: each rank stores some experts of a mixture. Tokens travel
        to the ranks of their experts and back (GShard, Lepikhin et al. 2021). ZeRO shards experts over `fsdp`, and all
        other parameters over both axes together.
      context: size of the axis over which the sequence is split: each rank has some positions of its rows (Llama 3,
        Grattafiori et al. 2024, section 3.3.2). ZeRO shards over `fsdp` and `context` together.
      tensor: size of the axis over which matmuls are split: each rank has some of the heads, features and words
        (Megatron-LM, Shoeybi et al. 2019, section 3). `make_train_step(rules=)` says which dim of which parameter is
        split.
      single: one device, however many are attached: the reference of every other strategy.

    Attributes: Data parallelism
      zero: what `fsdp` shards: 1 the optimizer state, 2 the gradients too, 3 the parameters too
        (ZeRO, Rajbhandari et al. 2020, section 5).
      hpz: whether zero=3 also shards the parameters and the optimizer state over `data`, where replicas would each
        store them. A step then gathers over `data` once, before its layers, and holds the result while it runs: a
        second shard, over `fsdp` alone (hpZ of ZeRO++, Wang et al. 2023, section 3.2; `parallel/data/fsdp.py`).
      server: data parallel 1.0: one device holds the weights and the optimizer state (`data` replicas).
      rule: the name of a rule for `data` and `fsdp` that `jaxpar.parallel.register` knows. It replaces plain replicas,
        `zero` and `server`.
      reduce: dtype in which gradients are reduced and accumulated: "f32"; "compute", the compute dtype; or "int8",
        float32 that travels in 8 bits, in blocks of 256 (ZeRO++, section 3.3; `parallel/data/eight_bits.py`).
      gather: dtype in which zero=3 gathers weights (`parallel/data/eight_bits.py`): "compute", the compute dtype;
        "int8", in blocks of 256 (ZeRO++, Wang et al. 2023, section 3.1); or, with precision="fp8", "fp8", the dtype of
        FP8 products.
      sync: when `zero=3` reduces the gradients of a layer: "microbatch", in the backward of every microbatch; or
        "step", once a step. Then each device accumulates whole gradients, in the dtype of `reduce` (PyTorch FSDP, Zhao
        et al. 2023, section 3.3.4). `zero=1` and 2 differ in the same way.
      prefetch: how many layers ahead a loop over layers gathers the weights that ZeRO shards, and how many layers
        behind it reduces gradients (`slicing/pieces.py`): 0, or 1, which takes the memory of one layer's weights and
        gradients; a step then gathers and reduces one layer more. A pipeline does so from tick to tick, under `1f1b`
        with one chunk. "auto" is 1 where loops send across hosts, but not in a pipeline; within a host, collectives
        overlap with compute without it.

    Attributes: Microbatches
      microbatches: number of parts into which each replica cuts its rows. Their gradients are accumulated. With `pipe`,
        the ranks work on them at the same time: with one microbatch, one rank works and p - 1 idle. -1, as in the
        preset `pp`, is four for each rank of the pipeline (4 p / (5 p - 1) of the time is work), and 1 without a
        pipeline. It becomes a number when the mesh is known, and does not depend on the rows.
      concurrent: number of microbatches that run side by side, layer by layer: while one waits for a collective,
        another computes (Domino, Wang et al. 2024; `slicing/side_by_side.py`), and a layer is fetched once for all.
        They keep as much for their backwards as one microbatch of all their rows. "auto" chooses 1, 2 or 4 when the
        shapes of a batch are known: on GPUs of a known kind, with `tensor`, `context` or `expert`, as many as hide
        their collectives and fit the memory (`inspect/concurrency.py`). It is 1 elsewhere, with remat="auto", and for
        losses that pass variables from one microbatch to the next.

    Attributes: The pipeline
      schedule: the order of forwards and backwards, by its name in `schedules.SCHEDULES`: "1f1b", "gpipe", or one with
        backwards in halves, as "zb-h1"; a file of torch's lines, "mine.csv"; or a `Schedule`.
      chunks: stages that one rank of the pipeline holds; more than one is the interleaved schedule (Narayanan et al.
        2021, section 2.2.2): a smaller bubble, more messages. "auto" is the number that the schedule needs: 2
        for a V, as "zb-v", else 1.
      stages: how the model is cut into stages: "layers", of the model's layer stack; "cut", into parts of its program,
        for models without one stack (`parallel/pipeline/flat/`); or "auto", the first if the names and shapes of the
        parameters show a stack. Or paths of modules, as in ["mid", "up/0"] or the text "mid:up/0": the second stage and
        those after it begin at the first use of their parameters. Or the number of blocks of a list in each stage, as
        in [7, 8, 8, 7] or the text "7:8:8:7": the first stage also has what comes before the list, and the last stage
        what comes after it.

    Attributes: Attention and the sequence
      attention: how queries of one context rank reach the keys of the others: "gather", keys and values are gathered on
        every rank; "ulysses", ranks exchange positions for heads (Jacobs et al. 2023); "ring", keys and values move
        from rank to rank (Liu et al. 2023); "usp", Ulysses within groups of ranks and rings between them (Fang and Zhao
        2024); or "auto", which chooses by heads and bytes (`parallel/context/attention_mode.py`).
      sequence: whether the operations between the matmuls of `tensor` (norms, dropout and the residual stream) are
        split over it along the sequence (Korthikanti et al. 2022, section 4.2.2): the forward saves less for the
        backward, which gathers it again.
      kernels: "own", the loss as it is written; or "fused": attention that the loss writes out (a product of queries
        and keys, a bias that rows share, a softmax, a product with values) is computed as by `jp.attention`, on GPUs by
        cuDNN, which keeps no scores. Ranks of `context` compute it in the same way or by blocks, unless `attention` is
        "gather".

    Attributes: Precision
      precision: compute dtype, "f32", "bf16", or "f16" with dynamic loss scaling. Master parameters stay float32. "fp8"
        is bf16, with products of layers' weights and activations in float8 (`numerics/fp8/`).
      fp8_except: with precision="fp8", parts of paths whose products stay in bfloat16, as "attention:ffn/down"; `*` is
        any characters.
      fp8_scaling: with precision="fp8", the part of an operand that shares one scale, a power of two: "row", the
        elements that are summed; or "tensor", all elements that a device has, whose scale cuBLASLt's kernel multiplies
        in.

    Attributes: Memory
      remat: what each layer of a layer stack, or each stage of a cut program, recomputes in its backward: "none" (as
        the model itself says), "layer" (all), "dots" (all but matmuls, and their sums over `tensor`), or a
        `jax.checkpoint` policy. Under schedules with backwards in halves, the first half recomputes and saves the
        values that the second half reads; "twice" is "layer" for each half separately. "auto" chooses for each saved
        value the option that takes the least time under `budget` (`inspect/remat.py`); with `offload`, values may also
        wait on the host.
      budget: bytes of a device that a step may take with remat="auto", as "70GB", as the compiler counts them; "" is
        92% of the memory of its kind.
      offload: the arrays that wait in the host's memory, one kind or a sum, as "activations+optimizer". On CPUs, which
        have one memory, nothing moves. "activations": the values that each layer of a layer stack saves for its
        backward (those that `remat` keeps; with "layer", the layers' inputs alone), while other layers compute; not for
        pipelines. "optimizer": the optimizer's state, which is copied to the device a block at a time
        (`step/offload.py`; ZeRO-Offload, Ren et al. 2021), for optimizers that work element by element. "params":
        stacks of layers; a device's part of a layer is copied to it while the previous layer runs, and the update goes
        a block at a time; with zero=3, or without ZeRO.
      logits: the number of tokens of a device for which a cross-entropy in the loss computes logits at a time, and
        again in the backward (`numerics/logits/logits.py`): a number; "auto", 2,048 if the logits of a microbatch take
        more than 4 GiB in float32; or "whole".

    >>> Strategy.parse("zero2,microbatches=4")
    Strategy('fsdp=-1,zero=2,microbatches=4')
    >>> str(Strategy(data=2, fsdp=4, precision="bf16"))
    'data=2,fsdp=4,precision=bf16'
    """

    data: int | Literal["hosts"] = 1
    fsdp: int = 1
    zero: int = 3
    hpz: bool = False
    pipe: int = 1
    schedule: Any = "1f1b"  # a name, or a `Schedule`
    chunks: Any = "auto"  # an int after `__post_init__`
    stages: str | Sequence[str | int] = "auto"
    expert: int = 1
    context: int = 1
    attention: str = "auto"
    tensor: int = 1
    sequence: bool = False
    single: bool = False
    server: bool = False
    rule: str = ""
    microbatches: int = 1
    concurrent: Any = "auto"  # an int after `__post_init__` if other fields decide it, else in `Step.settled`
    precision: str = "f32"
    fp8_except: str = ""
    fp8_scaling: str = "row"
    reduce: str = "f32"
    gather: str = "compute"
    remat: str | Callable[..., bool] = "none"
    budget: str = ""
    offload: str = "none"
    logits: str | int = "auto"
    prefetch: str | int = "auto"
    sync: str = "microbatch"
    kernels: str = "own"

    def __new__(cls, *args: Any, **fields: Any) -> "Strategy":
        """Refuse unknown fields and values without a name, with errors that help more than those of `dataclass`."""
        # A dataclass would raise a TypeError without a suggestion.
        if args:
            text = f"Strategy.parse({args[0]!r})" if isinstance(args[0], str) else "Strategy(fsdp=-1)"
            raise ValueError(f"Strategy{args!r}: its fields come by name; use {text}")
        field_names = cls.__dataclass_fields__
        for name in fields:
            if error := removed(f"Strategy.{name}"):
                raise ValueError(error)
            if name not in field_names:
                raise ValueError(
                    f"Strategy has no {name!r}; use one of {', '.join(field_names)}{did_you_mean(name, field_names)}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # Give each value one spelling, so that strategies that mean the same are equal and have the same text.
        # The dataclass is frozen, hence `object.__setattr__`.
        if self.chunks == "auto":
            object.__setattr__(self, "chunks", self.fewest_chunks)
        if isinstance(self.stages, list | tuple) and all(isinstance(x, str) or is_int(x) for x in self.stages):
            object.__setattr__(self, "stages", ":".join(map(str, self.stages)))
        if isinstance(self.offload, str) and {*(terms := self.offload.split("+"))} <= {*OFFLOADS}:
            object.__setattr__(self, "offload", "+".join(x for x in OFFLOADS if x in terms))
        if self.concurrent == "auto":
            object.__setattr__(self, "concurrent", self.default_concurrent)
        # The first constraint that is broken raises.
        for constraint in CONSTRAINTS:
            constraint.check(self)

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Return the strategy that a text describes; the reverse of `str(strategy)`.

        Args:
          text: `preset`, `name=value,...` or `preset,name=value,...`. A field that is given replaces the preset's.

        Raises:
          ValueError: naming the part that is wrong, and the nearest name.
        """
        if not isinstance(text, str):
            raise ValueError(f"Strategy.parse({text!r}): a strategy is text here; give 'fsdp' or 'data=2,fsdp=4', say")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        assigned: set[str] = set()  # a preset's fields may be assigned once more
        # Only the first part may be a preset, so that the fields after it replace the preset's.
        for number, part in enumerate(p.strip() for p in text.split(",")):
            name, equals, value = (s.strip() for s in part.partition("="))
            if number == 0 and not equals:
                if name not in PRESETS:
                    raise ValueError(
                        f"strategy {name!r} is unknown; use one of {', '.join(PRESETS)}, or name=value"
                        f"{_suggest_strategy(name.lower(), fields)}"
                    )
                values.update(PRESETS[name])
            # Fields of earlier versions come before unknown ones: their errors say what replaces them.
            elif error := removed(f"Strategy.{name}"):
                raise ValueError(error)
            elif name not in fields:
                raise ValueError(
                    f"{part!r} in strategy {text!r}: use name=value with a name of {', '.join(fields)}"
                    f"{did_you_mean(name, fields)}"
                )
            elif not value:
                raise ValueError(f"{part!r} in strategy {text!r} has no value; write {name}=...")
            elif name in assigned:
                raise ValueError(f"{part!r} in strategy {text!r} gives {name} twice; give it once")
            else:
                assigned.add(name)
                values[name] = _parse_value(value)
        return cls(**values)

    def sizes(self, devices: int, hosts: int = 1) -> dict[str, int]:
        """Return the axis sizes on a number of devices, in the order of the mesh.

        Args:
          hosts: number of hosts, which is the size of `data="hosts"`.

        Raises:
          ValueError: unless the sizes multiply to the number of devices.
        """
        if self.single:
            return dict.fromkeys(AXES, 1)
        # On one host, "hosts" is 2, so that hybrid sharding can be tried without a cluster.
        data: int = max(hosts, 2 if devices > 1 else 1) if self.data == "hosts" else self.data  # type: ignore[assignment]
        sizes = {axis: getattr(self, axis) for axis in AXES} | {"data": data}
        text = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)) or "data=1, fsdp=1"
        free_axes = [axis for axis, size in sizes.items() if size == -1]
        product = math.prod(size for size in sizes.values() if size != -1)
        if free_axes:
            if devices % product:
                divisors = " or ".join(str(d) for d in range(1, devices + 1) if devices % d == 0)
                raise ValueError(f"{text} does not divide {devices} devices; use {divisors}")
            # `CONSTRAINTS` allow a single axis of -1.
            sizes[free_axes[0]] = devices // product
        elif product != devices:
            raise ValueError(
                f"{text} needs {product} devices and there are {devices}; make {' x '.join(AXES)} = "
                f"{devices}, set one of them to -1, or pass a mesh of {product} devices (one device: strategy 'single')"
            )
        return sizes

    def prefetches(self, mesh: Any) -> bool:
        """Return whether loops over layers gather one layer ahead and reduce one layer behind on a mesh."""
        # With one backward in a step, the gradients that ZeRO shards are also summed over `data` in the loop.
        axes = SHARDS if self.turns > 1 or self.fsdp == 1 else ("data", *SHARDS)
        # With offloaded parameters, loops bring the next layer from the host instead, and gather it when it runs.
        is_allowed = self.prefetch == "auto" and self.pipe == 1 and "params" not in self.offloads
        return self.prefetch == 1 or (is_allowed and leaves_host(mesh, axes))

    @property
    def fewest_chunks(self) -> int:
        """The number of chunks per rank of the schedule if `chunks` is not given."""
        # A schedule without a name in `SCHEDULES` is refused by a constraint, after `__post_init__` has read this.
        if isinstance(self.schedule, str):
            return SCHEDULES[self.schedule].chunks if self.schedule in SCHEDULES else 1
        return getattr(self.schedule, "chunks", 1)

    @property
    def default_concurrent(self) -> Any:
        """The number of concurrent microbatches if it is not given: "auto" where a step may choose, else 1."""
        sends_activations = (self.tensor, self.context, self.expert) != (1, 1, 1)
        is_alone = self.microbatches == 1 or self.pipe != 1 or self.server
        # remat="auto" fills the memory that more microbatches would need.
        return "auto" if sends_activations and not is_alone and self.remat != "auto" else 1

    @property
    def cuts(self) -> tuple[str, ...]:
        """The paths at which `stages` cuts, or its counts of blocks as text; () if it is no list."""
        text = self.stages if isinstance(self.stages, str) else ""
        return () if not text or text in CHOICES["stages"].names else tuple(text.split(":"))

    @property
    def offloads(self) -> tuple[str, ...]:
        """The terms of `offload`, each of which is in `OFFLOADS`."""
        return () if self.offload == "none" else tuple(self.offload.split("+"))

    def kept_on_device(self, term: str) -> str:
        """Return why other fields do not let `term` of `OFFLOADS` wait on the host; "" if they do."""
        if self.server:
            return "a server's replicas keep it"
        # A pipeline updates at the end of a step, as any other strategy: its optimizer's state may wait.
        if self.pipe != 1 and term != "optimizer":
            arrays = "layers in the order of a table" if term == "params" else "it in slots"
            return f"stages keep {arrays} on their device"
        if term != "params":
            return ""
        # "params": loops copy the shard of a layer when it runs, so that no parameter may be stored whole.
        if self.fsdp != 1 and self.zero != 3:
            return f"zero={self.zero} gathers updated parameters to where they are whole"
        return "loops bring the next layer, and gather it when it runs: leave prefetch out" * (self.prefetch == 1)

    @property
    def turns(self) -> int:
        """How often a step without a pipeline runs forward and backward.

        `microbatches` must not be -1, nor `concurrent` "auto": a step knows both for a batch (`Step.settled`).
        """
        assert not isinstance(self.concurrent, str), "concurrent='auto' is not settled"
        return self.microbatches // self.concurrent

    def on(self, ranks: int) -> "Strategy":
        """Return this strategy for a mesh with `ranks` ranks of `pipe`: `microbatches` is then a number."""
        if self.microbatches != -1:
            return self
        # Without a pipeline, more microbatches would only cost time.
        return dataclasses.replace(self, microbatches=PER_RANK * ranks if ranks > 1 else 1)

    def text(self, skip: str = "") -> str:
        """Return the fields that differ from their default, without the field `skip`, as `name=value,...`."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # "auto" became a number in `__post_init__`.
            decided = {"chunks": self.fewest_chunks, "concurrent": self.default_concurrent}
            default = decided.get(field.name, field.default)
            if field.name == skip or value == default:
                continue
            # `parse` reads truth values in lower case. A `Schedule` has a label, a policy of jax.checkpoint a name.
            value = {True: "true", False: "false"}[value] if isinstance(value, bool) else value
            parts.append(f"{field.name}={getattr(value, 'label', getattr(value, '__name__', value))}")
        return ",".join(parts)

    def __str__(self) -> str:
        # `parse` takes no empty text, so that a strategy of defaults alone is written as data=1.
        return "single" if self == Strategy(single=True) else self.text() or "data=1"

    def __repr__(self) -> str:
        return f"Strategy({str(self)!r})"


def as_strategy(strategy: Strategy | str) -> Strategy:
    """Return the strategy that a text describes, or a strategy itself."""
    if isinstance(strategy, str):
        return Strategy.parse(strategy)
    # An Optax optimizer: its place and the strategy's were swapped.
    if hasattr(strategy, "init") and hasattr(strategy, "update"):
        raise ValueError("strategy= is an optimizer; the order is make_train_step(model, optimizer, strategy)")
    if not isinstance(strategy, Strategy):
        raise ValueError(
            f"strategy={strategy!r} is neither a jaxpar.Strategy nor text; try 'fsdp' or Strategy(fsdp=-1)"
        )
    return strategy


def _suggest_strategy(name: str, fields: Iterable[str]) -> str:
    """Return a suggestion for an unknown strategy: "fsdp=8" for `fsdp8`, the nearest preset for `zero4`."""
    # The name of a field and its size without "=".
    match = re.fullmatch(r"([a-z]+)\W?(\d+)", name)
    if match and match[1] in (*AXES, "microbatches", "chunks"):
        return f" (did you mean '{match[1]}={match[2]}'?)"
    return did_you_mean(name, PRESETS) or did_you_mean(name, fields)


def _parse_value(text: str) -> Any:
    """Return a truth value, a whole number or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text
