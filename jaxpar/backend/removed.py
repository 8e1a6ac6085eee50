"""Names and options that were removed from jaxpar, each with a replacement.

A key is what a user writes: `jp.name`, `Strategy.field`, `Loop.option` (on the command line `--option`), `jaxpar
command`. Code that refuses an unknown name looks here first, so that its error can name the replacement.
"""

_REPLAY = (
    "keep metrics.jsonl of both runs and compare their losses step by step; jp.verify and jp.bisect(model, strategy, "
    "None, batch) name the equation at which a strategy is wrong, and step.check_replicas(state) a device that is"
)
_DEEPSEEK = (
    "experiments/deepseek has it, as a jp.Model of one's own: from deepseek import named; mixtral-tiny, mixtral-8x7b "
    "and qwen3-30b-a3b are mixtures that jaxpar has by name"
)
_WIRES = "nobody has measured what these 8 bits gain between devices"
REMOVED = {
    "jp.from_haiku": (
        "give what hk.transform(f) returns to jp.Model(init, loss): init(key) returns f.init(key, x), and "
        "loss(params, batch, key) calls f.apply(params, key, batch['x']); docs/equinox-haiku.md has it in full"
    ),
    "jp.replay": _REPLAY,
    "jaxpar replay": _REPLAY,
    "jaxpar bench": (
        "jaxpar doctor times an all-reduce over each axis and checks it; experiments/collectives.py measures every "
        "collective by size, as nccl-tests does"
    ),
    "Loop.record": f"use check_replicas_every=10 to compare replicas, or {_REPLAY}",
    "Strategy.send": f"{_WIRES}; stages send activations in the compute dtype, half as wide with precision=bf16",
    "Strategy.exchange": f"{_WIRES}; ranks send tokens in the compute dtype, half as wide with precision=bf16",
    "Strategy.error_feedback": f"{_WIRES}; leave it out: reduce=int8 rounds each gradient once",
    "Strategy.deferred_batch_norm": (
        "leave it out: running statistics change microbatch by microbatch; with microbatches=1 they change once a step"
    ),
    "jaxpar.models.deepseek": _DEEPSEEK,
    "jaxpar.models.DeepSeek": _DEEPSEEK,
    "model deepseek-tiny": _DEEPSEEK,
    "model deepseek-v3": _DEEPSEEK,
    "schedule=auto": (
        "use zb-h1, zb-h2 or zb-v, which jp.plan tries too, or a table of your own: schedule=mine.csv, in torch's lines"
    ),
    "jp.bisect(b=path)": (
        "each of two processes ran code that the other one sent; call jp.bisect(model, 'fsdp', None, batch), with "
        "your strategy, in each of them: it names the equation at which that one departs from its own single device"
    ),
}


def removed(name: str) -> str:
    """Return the error for a name that was removed; "" for any other name.

    >>> removed("jp.train")
    ''
    """
    return f"{name} was removed from jaxpar; {REMOVED[name]}" if name in REMOVED else ""
