"""Strategy: every choice a run makes about parallelism, as one value, and every error a user can make in it."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..backend.machines import leaves_host
from ..backend.removed import removed
from ..backend.text import amount, did_you_mean
from .axes import AXES, SHARDS
from .schedules import SCHEDULES, is_schedule
from .schedules.operations import MOST

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
OFFLOADS = ("activations", "optimizer", "params")
SUMS = tuple("+".join(terms) for n in range(1, 4) for terms in itertools.combinations(OFFLOADS, n))  # of `offload`
_CHOICES = {
    "schedule": tuple(SCHEDULES),
    "precision": ("f32", "bf16", "f16", "fp8"),
    "fp8_scaling": ("row", "tensor"),
    "reduce": ("f32", "compute", "int8"),
    "gather": ("compute", "int8", "fp8"),
    "remat": ("none", "layer", "dots", "twice", "auto"),
    "offload": ("none", *SUMS),
    "attention": ("auto", "gather", "ulysses", "ring", "usp"),
    "stages": ("auto", "layers", "cut"),
    "logits": ("auto", "whole"),
    "prefetch": ("auto",),
    "sync": ("microbatch", "step"),
    "kernels": ("own", "fused"),
}
_OTHERS = {  # what a choice may be besides, or why it may not
    "precision": " (mxfp8 and nvfp4 have kernels for B200 alone, and no B200 was there to prove them: see "
    "docs/recipes/precision.md)",
    "remat": " or a jax.checkpoint policy",
    "stages": " or paths of modules, as in 'mid:up/0', or counts, as in '3:4'",
    "logits": " or a number of tokens",
    "prefetch": ", 0 or 1 (two layers ahead hide no more than one, and are held: see docs/strategies/zero3.md)",
    "fp8_scaling": " (XLA has no kernel for blocks of 128, makes bfloat16's of nvfp4, and says of mxfp8 'Unsupported "
    "instruction opcode: scaled-dot': see docs/recipes/precision.md)",
}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one training step is spread over devices.

    Attributes:
      data: size of the mesh axis of plain replicas; `"hosts"` is the number of hosts (2 where there is one host).
      fsdp: size of the axis over which ZeRO shards; rows are shared over `data`, `fsdp` and `expert` alike.
      zero: what `fsdp` shards: 1 the optimizer state, 2 the gradients too, 3 the parameters too
        (ZeRO, Rajbhandari et al. 2020, section 5).
      hpz: whether zero=3 shards over `data` too what replicas would hold of parameters and optimizer, and a step
        gathers over `data` once, in front of its layers, its part of what `fsdp` shares: a second shard, which it holds
        while it runs (hpZ of ZeRO++, Wang et al. 2023, section 3.2; `parallel/data/fsdp.py`).
      pipe: size of the axis over which the layers of the model's layer stack are spread, in stages.
      schedule: the order of forwards and backwards in the pipeline, by its name in `tables.SCHEDULES`: "1f1b",
        "gpipe", or one with backwards in halves, as "zb-h1"; a file of torch's lines, "mine.csv"; or a `Schedule`.
      chunks: stages that one rank of the pipeline holds; more than one is the interleaved schedule (Narayanan et al.
        2021, section 2.2.2): a smaller bubble, more messages. "auto" is what the schedule needs: 2 of a V, as
        "zb-v", else 1.
      stages: what becomes a stage: "layers" of the model's layer stack; "cut", a part of its program, for models
        without one stack (`parallel/pipeline/flat/`); or "auto", the first where the parameters have a stack, as far as
        their names and shapes tell. Or where to cut: paths of modules, as in ["mid", "up/0"] or the text "mid:up/0", at
        the first use of whose parameters the second stage and those after it begin. Or how many blocks of a list each
        stage has, as in [7, 8, 8, 7] or the text "7:8:8:7": what comes before the list is in the first stage, what
        comes behind it in the last.
      expert: size of the axis over which experts are split, each rank having some of a mixture's; tokens go to theirs
        and come back (GShard, Lepikhin et al. 2021). ZeRO shards experts over `fsdp`, all else over both together.
      context: size of the axis over which the sequence is split, each rank having some of the positions of its rows
        (Llama 3, Grattafiori et al. 2024, section 3.3.2). ZeRO shards over `fsdp` and `context` together.
      attention: how queries of one context rank reach the keys of the others: "gather", keys and values are gathered on
        every rank; "ulysses", ranks exchange positions for heads (Jacobs et al. 2023); "ring", keys and values move
        from rank to rank (Liu et al. 2023); "usp", groups of ranks do the one and pass on the other (Fang and Zhao
        2024); or "auto", which chooses by heads and bytes (`parallel/context/attention_mode.py`).
      tensor: size of the axis over which matmuls are split, each rank having some of the heads, features and words
        (Megatron-LM, Shoeybi et al. 2019, section 3); which dim of which parameter, `make_train_step(rules=)` says.
      sequence: whether what stands between those matmuls, norms, dropout and the residual stream, is split over
        `tensor` along the sequence (Korthikanti et al. 2022, section 4.2.2): less is kept for the backward, which
        gathers it again.
      single: one device, whatever else is attached: the reference of every other strategy.
      server: data parallel 1.0, weights and optimizer on one device (`data` replicas).
      rule: a rule of one's own for `data` and `fsdp`, in place of plain replicas, `zero` and `server`: the name under
        which `jaxpar.parallel.register` knows it.
      microbatches: number of parts that each replica cuts its rows into; their gradients are accumulated, and with
        `pipe` they are what the ranks work on at the same time: with one, one rank works and p - 1 idle. -1, as in the
        preset `pp`, is four for each rank of the pipeline (of which 4 p / (5 p - 1) are work), and 1 where there is
        no pipeline. It becomes a number when the mesh is known, and does not depend on the rows.
      concurrent: how many of them run side by side, layer by layer: while one waits for a collective another computes
        (Domino, Wang et al. 2024; `slicing/side_by_side.py`), and a layer is fetched once for all. They keep as much
        for their backwards as one microbatch of all their rows.
      precision: compute dtype, "f32", "bf16", or "f16" with dynamic loss scaling. Master parameters stay float32. "fp8"
        is bf16, with products of layers' weights and activations in float8 (`numerics/fp8/`).
      fp8_except: with precision="fp8", parts of paths whose products stay in bfloat16, as "attention:ffn/down"; `*` is
        any characters.
      fp8_scaling: with precision="fp8", of what an operand has one scale, a power of two: "row", of what is summed; or
        "tensor", of all that a device has of it, which cuBLASLt's kernel multiplies in by itself.
      reduce: dtype in which gradients are reduced and accumulated: "f32"; "compute", the compute dtype; or "int8",
        float32 that travels in 8 bits, in blocks of 256 (ZeRO++, section 3.3; `parallel/data/eight_bits.py`).
      gather: dtype in which zero=3 gathers weights (`parallel/data/eight_bits.py`): "compute", the compute dtype;
        "int8", in blocks of 256 (ZeRO++, Wang et al. 2023, section 3.1); or with precision="fp8" "fp8", those of FP8
        products.
      remat: what each layer of a layer stack, or each stage of a cut program, recomputes in its backward: "none" (what
        the model itself says), "layer" (all), "dots" (all but matmuls, and their sums over `tensor`), or a
        `jax.checkpoint` policy. Under schedules with backwards in halves, the first half recomputes and leaves what the
        second reads; with "twice", as "layer", each of them recomputes. "auto" chooses for each value that a layer
        leaves what takes the least time under `budget` (`inspect/remat.py`), with `offload` the host among others.
      budget: bytes of a device that a step may take with remat="auto", as "70GB", as the compiler counts them; "" is
        92% of the memory of its kind.
      offload: what waits in the host's memory, or a sum of these, as "activations+optimizer". "activations": what each
        layer of a layer stack leaves for its backward, beside which other layers compute (what `remat` keeps, with
        "layer" the layers' inputs alone); on CPUs, which have one memory, nothing moves; not for pipelines.
        "optimizer": the optimizer's state, brought to the device a block at a time (`step/offload.py`; ZeRO-Offload,
        Ren et al. 2021), of optimizers that work element by element. "params": stacks of layers, of which a device's
        part of one is brought to it while the layer before runs, and its update a block at a time; of zero=3 and where
        no ZeRO is.
      logits: of how many tokens of a device the logits of a cross-entropy in the loss are made at a time, and again
        in the backward (`numerics/logits/logits.py`): a number; "auto", 2,048 where those of a microbatch take more
        than 4 GiB in float32; or "whole".
      prefetch: how many layers ahead a loop over layers gathers the weights that ZeRO shards, and how many behind it
        reduces gradients (`slicing/pieces.py`): 0, or 1, for the memory of one layer's weights and gradients; a step
        then gathers and reduces one layer more. A pipeline does so from tick to tick, under `1f1b` with one chunk.
        "auto" is 1 where loops send across hosts, but not in a pipeline; within a host collectives hide without it.
      sync: when `zero=3` reduces the gradients of a layer: of every "microbatch", in its backward; or once a "step", of
        whole gradients that each device accumulates, in the dtype of `reduce` (PyTorch FSDP, Zhao et al. 2023,
        section 3.3.4). `zero=1` and 2 differ by just that.
      kernels: "own", the loss as it is written; or "fused", attention that it spells out (a product of queries and
        keys, a bias that rows share, a softmax, a product with values) is computed as by `jp.attention`: on GPUs by
        cuDNN, which keeps no scores. Ranks of `context` compute it so or by blocks, unless `attention` is "gather".

    One of `pipe`, `data`, `fsdp`, `expert`, `context` and `tensor` may be -1: what the others leave of the devices.

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
    chunks: Any = "auto"  # an int, once it is made
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
    concurrent: int = 1
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
        """Refuses what is no field, and values without a name, in words of its own."""
        if args:
            text = f"Strategy.parse({args[0]!r})" if isinstance(args[0], str) else "Strategy(fsdp=-1)"
            raise ValueError(f"Strategy{args!r}: its fields come by name; use {text}")
        known = cls.__dataclass_fields__
        for name in fields:
            if says := removed(f"Strategy.{name}"):
                raise ValueError(says)
            if name not in known:
                raise ValueError(f"Strategy has no {name!r}; use one of {', '.join(known)}{did_you_mean(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not (axis == "data" and size == "hosts") and (not _is_int(size) or (size < 1 and size != -1)):
                raise ValueError(
                    f"{axis}={size!r} is not an axis size; use a whole number from 1, or -1 for what is left"
                )
        free = [axis for axis in AXES if getattr(self, axis) == -1]
        if len(free) > 1:
            raise ValueError(
                f"{'=-1 and '.join(free)}=-1: only one axis can be what the others leave; give the rest a size"
            )
        if not _is_int(self.zero) or self.zero not in (1, 2, 3):
            raise ValueError(f"zero={self.zero!r} is not a ZeRO stage; use 1, 2 or 3 (no ZeRO: fsdp=1 with data=-1)")
        chunks = self._fewest_chunks if self.chunks == "auto" else self.chunks
        object.__setattr__(self, "chunks", chunks)
        for name in ("microbatches", "concurrent", "chunks"):
            count, free = getattr(self, name), name == "microbatches"
            if not _is_int(count) or not (1 <= count <= MOST or (free and count == -1)):
                four = ", or -1 for four a rank of the pipeline" if free else ""
                raise ValueError(f"{name}={count!r} is not a count; use a whole number from 1 to {MOST:,}{four}")
        if chunks > 1 and self.pipe == 1:
            what = f"chunks={chunks}" if chunks != self._fewest_chunks else f"schedule={self.schedule}"
            raise ValueError(f"{what} without a pipeline; give pipe= a size, or leave {what.partition('=')[0]} out")
        if isinstance(self.stages, list | tuple) and all(isinstance(x, str) or _is_int(x) for x in self.stages):
            object.__setattr__(self, "stages", ":".join(map(str, self.stages)))  # as in text
        if self.stages != "auto" and self.pipe == 1:
            raise ValueError(f"stages={self.stages!r} without a pipeline; give pipe= a size, or leave stages out")
        if isinstance(self.offload, str) and {*(terms := self.offload.split("+"))} <= {*OFFLOADS}:
            object.__setattr__(self, "offload", "+".join(x for x in OFFLOADS if x in terms))  # in one order
        for name, choices in _CHOICES.items():
            listed = isinstance(value := getattr(self, name), str) and value in choices
            other = {"stages": lambda x: self.cuts and all(self.cuts), "schedule": is_schedule, "remat": callable}
            other["logits"] = lambda x: _is_int(x) and x > 0
            other["prefetch"] = lambda x: _is_int(x) and x in (0, 1)
            if not listed and not (name in other and other[name](value)):
                if says := removed(f"{name}={str(value).partition(':')[0]}"):
                    raise ValueError(says)
                near = did_you_mean(value, choices)
                raise ValueError(
                    f"{name}={value!r} is unknown; use one of {', '.join(choices)}{_OTHERS.get(name, '')}{near}"
                )
        for name in ("single", "server", "sequence", "hpz"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a truth value; use True or False")
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence=True splits the sequence over tensor; give tensor= a size, or leave sequence out"
            )
        if self.concurrent > 1 and (self.pipe != 1 or self.server):
            other = "server=True, which sends between steps" if self.server else f"pipe={self.pipe}, which does so too"
            raise ValueError(f"concurrent={self.concurrent}, of microbatches at a time, beside {other}; leave one out")
        if self.microbatches != -1 and self.microbatches % self.concurrent:
            raise ValueError(
                f"concurrent={self.concurrent} does not divide microbatches={self.microbatches}; use "
                f"microbatches={-(-self.microbatches // self.concurrent) * self.concurrent}"
            )
        if self.attention != "auto" and self.context == 1:
            raise ValueError(
                f"attention={self.attention!r} says how context ranks attend; give context= a size, or leave it out"
            )
        if self.prefetch == 1 and self.server:
            why = "a server has no shards; use prefetch=0, or leave it out"
            raise ValueError(f"prefetch=1 with {self._text(skip='prefetch')}: {why}")
        if self.sync == "step" and (self.zero != 3 or self.fsdp == 1 or self.rule or self.server):
            raise ValueError(
                f"sync='step' with {self._text(skip='sync') or 'data=1'}: it accumulates whole gradients of what "
                "zero=3 shards over fsdp; give fsdp a size and zero=3, or leave it out (zero=1 reduces once a step)"
            )
        if self.hpz and (self.zero != 3 or 1 in (self.fsdp, self.data) or self.rule or self.server):
            raise ValueError(
                f"hpz=True with {self._text(skip='hpz') or 'data=1'}: a second shard of what zero=3 shards is one over "
                "fsdp alone beside one over data and fsdp; use hsdp, or give both a size with zero=3"
            )
        if not isinstance(self.budget, str) or (self.budget and amount(self.budget, "B") and self.remat != "auto"):
            raise ValueError(
                f"budget={self.budget!r} with remat={self.remat!r}: give text such as '70GB', remat='auto'"
            )
        if self.remat == "auto" and self.server:
            raise ValueError(
                f"remat='auto' with {self._text(skip='remat')}: a server's step is several programs, and a budget is "
                "one's; use remat='layer' or 'dots'"
            )
        for term in self.offloads:
            if why := self.kept_on_device(term):
                instead = "remat='layer', or data or fsdp" if term == "activations" else "fsdp with zero=3"
                raise ValueError(
                    f"offload={self.offload!r} with {self._text(skip='offload')}: {why}; use {instead}, or leave "
                    f"{term!r} out"
                )
        if self.server and self.precision == "fp8":
            raise ValueError(
                "server=True with precision='fp8': a server's programs are not compiled for FP8 kernels; use ddp, or "
                "precision='bf16'"
            )
        if self.gather != "compute" and (self.fsdp == 1 or self.zero != 3 or self.rule):
            raise ValueError(
                f"gather={self.gather!r} with {self._text(skip='gather') or 'data=1'}: only zero=3 gathers weights "
                "where they are used; use fsdp=-1, or leave gather out"
            )
        if self.reduce == "int8" and (self.server or self.single or self.rule):
            raise ValueError(
                f"reduce='int8' with {self._text(skip='reduce')}: it is how ddp and ZeRO send gradients; use ddp or "
                "fsdp=-1, or leave reduce out"
            )
        if not isinstance(self.fp8_except, str):
            raise ValueError(f"fp8_except={self.fp8_except!r}: give parts of paths as text, as 'attention:ffn/down'")
        of_fp8 = self.fp8_except or self.fp8_scaling != "row" or self.gather == "fp8"
        if of_fp8 and self.precision != "fp8":
            raise ValueError(
                f"precision={self.precision!r} in {self}: fp8_except, fp8_scaling and gather='fp8' are of products in "
                "FP8 and their weights; use precision='fp8', or gather='int8'"
            )
        for axis in AXES:
            if axis != "data" and self.server and (size := getattr(self, axis)) != 1:
                raise ValueError(
                    f"server=True with {axis}={size}: a central server shards nothing; use data={size} alone"
                )
        if not isinstance(self.rule, str) or not (self.rule.isidentifier() or not self.rule):
            raise ValueError(
                f"rule={self.rule!r} is not the name of a rule; use that of a registered one, as in 'int8'"
            )
        if self.rule and (self.server or self.single or self.zero != 3):
            raise ValueError(f"{self}: server, single and zero choose rules of jaxpar's own; leave them out, or rule")
        if self.single and (any(getattr(self, axis) != 1 for axis in AXES) or self.server):
            raise ValueError(
                f"single=True with {self._text(skip='single')}: one device has no axes; leave one of the two out"
            )

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """A strategy from text: `preset`, `name=value,...` or `preset,name=value,...`; `str(strategy)` is the reverse.

        Raises ValueError naming the part that is wrong and the nearest name.
        """
        if not isinstance(text, str):
            raise ValueError(f"Strategy.parse({text!r}): needs text, such as 'fsdp' or 'data=2,fsdp=4'")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        given: set[str] = set()
        for number, part in enumerate(p.strip() for p in text.split(",")):
            name, equals, value = (s.strip() for s in part.partition("="))
            if number == 0 and not equals:
                if name not in PRESETS:
                    raise ValueError(
                        f"strategy {name!r} is unknown; use one of {', '.join(PRESETS)}, or name=value"
                        f"{_meant(name.lower(), fields)}"
                    )
                values.update(PRESETS[name])
            elif says := removed(f"Strategy.{name}"):
                raise ValueError(says)
            elif name not in fields:
                raise ValueError(
                    f"{part!r} in strategy {text!r}: use name=value with a name of {', '.join(fields)}"
                    f"{did_you_mean(name, fields)}"
                )
            elif not value:
                raise ValueError(f"{part!r} in strategy {text!r} has no value; write {name}=...")
            elif name in given:
                raise ValueError(f"{part!r} in strategy {text!r} gives {name} again; give it once")
            else:
                given.add(name)
                values[name] = _value(value)
        return cls(**values)

    def sizes(self, devices: int, hosts: int = 1) -> dict[str, int]:
        """Axis sizes on a number of devices, in the order of the mesh. Raises ValueError unless they multiply to it."""
        if self.single:
            return dict.fromkeys(AXES, 1)
        data: int = max(hosts, 2 if devices > 1 else 1) if self.data == "hosts" else self.data  # type: ignore[assignment]
        known = {axis: getattr(self, axis) for axis in AXES} | {"data": data}
        given = ", ".join(f"{k}={v}" for k, v in known.items() if v not in (1, -1)) or "data=1, fsdp=1"
        free = [k for k, v in known.items() if v == -1]
        product = math.prod(v for v in known.values() if v != -1)
        if free:
            if devices % product:
                divisors = " or ".join(str(d) for d in range(1, devices + 1) if devices % d == 0)
                raise ValueError(f"{given} does not divide {devices} devices; use {divisors}")
            known[free[0]] = devices // product
        elif product != devices:
            raise ValueError(
                f"{given} needs {product} devices and there are {devices}; make {' x '.join(AXES)} = "
                f"{devices}, set one of them to -1, or pass a mesh of {product} devices (one device: strategy 'single')"
            )
        return known

    def prefetches(self, mesh: Any) -> bool:
        """Whether loops over layers send one layer ahead on a `jax.sharding.Mesh`."""
        # The only backward of a step sums over `data`, too, what ZeRO shards.
        over = SHARDS if self.turns > 1 or self.fsdp == 1 else ("data", *SHARDS)
        may = self.prefetch == "auto" and self.pipe == 1 and "params" not in self.offloads
        return self.prefetch == 1 or (may and leaves_host(mesh, over))

    @property
    def _fewest_chunks(self) -> int:
        """The number of chunks that a schedule has where none is given."""
        if isinstance(self.schedule, str):
            return SCHEDULES[self.schedule].chunks if self.schedule in SCHEDULES else 1
        return getattr(self.schedule, "chunks", 1)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The paths at which `stages` cuts, or its counts of blocks as text; () where it is no list."""
        text = self.stages if isinstance(self.stages, str) else ""
        return () if not text or text in _CHOICES["stages"] else tuple(text.split(":"))

    @property
    def offloads(self) -> tuple[str, ...]:
        """What `offload` sums."""
        return () if self.offload == "none" else tuple(self.offload.split("+"))

    def kept_on_device(self, term: str) -> str:
        """Why its other choices do not let `term` of `OFFLOADS` wait on the host; "" where they do."""
        if self.server:
            return "a server's replicas keep it"
        if self.pipe != 1 and term != "optimizer":
            kept = "layers in the order of a table" if term == "params" else "it in slots"
            return f"stages keep {kept} on their device"
        if term != "params":
            return ""
        if self.fsdp != 1 and self.zero != 3:
            return f"zero={self.zero} gathers updated parameters to where they are whole"
        return "loops bring the next layer, and gather it when it runs: leave prefetch out" * (self.prefetch == 1)

    @property
    def turns(self) -> int:
        """How often a step without a pipeline runs forward and backward, once its microbatches are a number."""
        return self.microbatches // self.concurrent

    def on(self, ranks: int) -> "Strategy":
        """This strategy on a mesh whose axis `pipe` has so many ranks: `microbatches` is a number."""
        if self.microbatches != -1:
            return self
        return dataclasses.replace(self, microbatches=PER_RANK * ranks if ranks > 1 else 1)

    def _text(self, skip: str = "") -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = self._fewest_chunks if field.name == "chunks" else field.default
            if field.name == skip or value == default:
                continue
            value = {True: "true", False: "false"}[value] if isinstance(value, bool) else value
            parts.append(f"{field.name}={getattr(value, 'label', getattr(value, '__name__', value))}")
        return ",".join(parts)

    def __str__(self) -> str:
        return "single" if self == Strategy(single=True) else self._text() or "data=1"

    def __repr__(self) -> str:
        return f"Strategy({str(self)!r})"


def as_strategy(strategy: Strategy | str) -> Strategy:
    """A strategy from its text, or itself."""
    if isinstance(strategy, str):
        return Strategy.parse(strategy)
    if hasattr(strategy, "init") and hasattr(strategy, "update"):
        raise ValueError("strategy= is an optimizer; the order is make_train_step(model, optimizer, strategy)")
    if not isinstance(strategy, Strategy):
        raise ValueError(
            f"strategy={strategy!r} is neither a jaxpar.Strategy nor text; try 'fsdp' or Strategy(fsdp=-1)"
        )
    return strategy


def _meant(name: str, fields: Iterable[str]) -> str:
    """What an unknown strategy may stand for: `fsdp8` for fsdp=8, `zero4` for one of the presets."""
    size = re.fullmatch(r"([a-z]+)\W?(\d+)", name)
    if size and size[1] in (*AXES, "microbatches", "chunks"):
        return f" (did you mean '{size[1]}={size[2]}'?)"
    return did_you_mean(name, PRESETS) or did_you_mean(name, fields)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text
