"""Names and options that jaxpar had once, and what to do instead of each.

A key is how a user writes it: `jp.name`, `Strategy.field`, `Loop.option` (on the command line `--option`), `jaxpar
command`. Who refuses an unknown name looks here first.
"""

_REPLAY = (
    "keep metrics.jsonl of both runs and compare their losses step by step; jp.verify and jp.bisect(model, strategy, "
    "None, batch) name the equation at which a strategy is wrong, and step.check_replicas(state) a device that is"
)
REMOVED = {
    "jp.replay": _REPLAY,
    "jaxpar replay": _REPLAY,
    "Loop.record": f"use check_replicas_every=10 to compare replicas, or {_REPLAY}",
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
