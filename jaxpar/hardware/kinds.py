"""Kinds of accelerators that the table lacks: from a file, or from the GPU that is attached."""

import dataclasses
import difflib
import json
import pathlib
import tomllib
from typing import Any

import jax

from ..backend.files import text_of
from .hardware import DTYPES, KINDS, Hardware, of_device_kind, peaks_of

_FIELDS = {field.name: field for field in dataclasses.fields(Hardware)}
_WHOLE = ("memory_bytes", "host_memory_bytes", "per_host")


def load(path: str | pathlib.Path) -> Hardware:
    """A kind of accelerator as a TOML file describes it.

    The file has the fields of `Hardware`. Those that it leaves out are those of the kind that `like` names, or else not
    known. `config` is the text itself, or a file beside this one:

        kind = "H100-96GB"
        like = "H100"
        memory_bytes = 102_000_000_000
        network_bandwidth = 25e9  # bytes/s, one direction

    Raises ValueError where the file cannot be read, a field or `like` is not known, a number is none or not above 0, or
    `kind` is missing.
    """
    path = pathlib.Path(path)
    try:
        given = tomllib.loads(text_of(path))
    except (OSError, ValueError, RecursionError) as error:  # TOML's errors are ValueErrors that name no file
        raise ValueError(f"{path} cannot be read as TOML: {error}; give a file that describes a kind") from error
    like = given.pop("like", None)
    if like is not None and str(like) not in KINDS:
        raise ValueError(f"{path}: like={like!r} is no known kind{nearest(str(like))}")
    for name, value in given.items():
        _check(path, name, value)
    given |= {name: int(given[name]) for name in _WHOLE if name in given}  # 40e9 is a float
    if "kind" not in given:
        raise ValueError(f'{path} gives no kind; name it, as in kind = "H100-96GB"')
    if "config" in given and "{" not in given["config"]:
        given["config"] = _config_at(path, given["config"])
    if like is not None:
        peaks = {**KINDS[like].peaks, **given.pop("peaks", {})}
        return dataclasses.replace(KINDS[like], peaks=peaks, **given)
    return Hardware(**{"device_kind": given["kind"]} | given)


def capture(kind: str = "attached") -> Hardware:
    """The GPU that is attached, as a kind, to compile for more of it than there are, here or elsewhere.

    Its memory is what this process may use (`memory_stats()["bytes_limit"]`), its `config` the compiler's own. Links
    and network are those of the same GPU in the table, or not known: `to_toml` makes a file to write them in.

    Raises ValueError where no GPU is attached.
    """
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        raise ValueError(
            f"capture({kind!r}) needs a GPU, and JAX runs on {device.platform!r}; describe it in a file "
            f"(jaxpar.hardware.kinds.load), like one of {', '.join(KINDS)}"
        )
    name = device.device_kind
    known = of_device_kind(name) or Hardware(kind=kind, device_kind=name, peaks=peaks_of(name))
    stats = device.memory_stats() or {}
    return dataclasses.replace(
        known,
        kind=kind,
        memory_bytes=stats.get("bytes_limit", known.memory_bytes),
        config=_config_of(device),
    )


def to_toml(hardware: Hardware) -> str:
    """The text of a file from which `load` makes the same kind again."""
    lines = []
    for name in _FIELDS:
        value = getattr(hardware, name)
        if name == "config":
            lines += [f"config = '''\n{value}'''"] if value else []
        elif name == "peaks":
            lines.append(f"peaks = {{ {', '.join(f'{dtype} = {peak}' for dtype, peak in value.items())} }}")
        elif value is not None:
            lines.append(f"{name} = {json.dumps(value)}")  # of strings and numbers, JSON is TOML
    return "\n".join(lines) + "\n"


def _config_at(path: pathlib.Path, name: str) -> str:
    try:
        return text_of(path.parent / name)
    except OSError as error:
        raise ValueError(
            f"{path}: config={name!r} is neither a text with braces nor a file beside it: {error}"
        ) from error


def nearest(kind: str) -> str:
    """The end of an error about an unknown kind: what may have been meant, and what there is."""
    folded = {known.casefold(): known for known in KINDS}
    close = [folded[name] for name in difflib.get_close_matches(kind.casefold(), folded, n=2)]
    return (f"; did you mean {' or '.join(close)}?" if close else ";") + f" known are {', '.join(KINDS)}"


def _check(path: pathlib.Path, name: str, value: Any) -> None:
    if name not in _FIELDS:
        close = difflib.get_close_matches(name, _FIELDS, n=1)
        meant = f"; did you mean {close[0]}?" if close else f"; it takes like, {', '.join(_FIELDS)}"
        raise ValueError(f"{path}: {name!r} is no field{meant}")
    if name in ("kind", "device_kind", "config"):
        if not isinstance(value, str):
            raise ValueError(f'{path}: {name}={value!r} is no string; write {name} = "..."')
        return
    numbers = value if isinstance(value, dict) else {name: value}
    if name == "peaks" and (not isinstance(value, dict) or not set(value) <= set(DTYPES)):
        raise ValueError(f"{path}: peaks={value!r} must give FLOP/s by dtype, of {', '.join(DTYPES)}")
    if name != "peaks" and isinstance(value, dict):
        raise ValueError(f"{path}: {name}={value!r} must be a number above 0")
    for key, number in numbers.items():
        whole = key in _WHOLE
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0 or (whole and number % 1):
            raise ValueError(f"{path}: {key}={number!r} must be a {'whole ' if whole else ''}number above 0")


def _config_of(device: jax.Device) -> str:
    # JAX's public API of topologies keeps the devices of one, and drops its attributes.
    from jax._src.lib import _jax

    return _jax.get_topology_for_devices([device]).target_config
