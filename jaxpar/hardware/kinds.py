"""Kinds of accelerators that the table lacks, from a TOML file or from the attached GPU."""

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
_INTEGERS = ("memory_bytes", "host_memory_bytes", "per_host")


def load(path: str | pathlib.Path) -> Hardware:
    """Read a kind of accelerator from a TOML file.

    The file has the fields of `Hardware`. `like` names a kind that gives the missing fields; without it they are
    unknown. `config` is the text itself, or a file in the same folder:

        kind = "H100-96GB"
        like = "H100"
        memory_bytes = 102_000_000_000
        network_bandwidth = 25e9  # bytes/s, one direction

    Raises:
      ValueError: the file cannot be read, `kind` is missing, a field or `like` is unknown, or a number is not above 0.
    """
    path = pathlib.Path(path)
    # 1. Parse the file, and check every field.
    try:
        fields = tomllib.loads(text_of(path))
    except (OSError, ValueError, RecursionError) as error:  # TOML's errors are ValueErrors that name no file
        raise ValueError(f"{path} cannot be read as TOML: {error}; give a file that describes a kind") from error
    like = fields.pop("like", None)
    if like is not None and str(like) not in KINDS:
        raise ValueError(f"{path}: like={like!r} is not a known kind{nearest(str(like))}")
    for name, value in fields.items():
        _check_field(path, name, value)
    fields |= {name: int(fields[name]) for name in _INTEGERS if name in fields}  # TOML's 40e9 is a float
    if "kind" not in fields:
        raise ValueError(f'{path} gives no kind; name it, as in kind = "H100-96GB"')
    # 2. Fill in what the file leaves to another file or another kind.
    if "config" in fields and "{" not in fields["config"]:  # a proto's text always has braces
        fields["config"] = _read_config(path, fields["config"])
    # Peaks are merged by dtype; every other field replaces that of `like`.
    if like is not None:
        peaks = {**KINDS[like].peaks, **fields.pop("peaks", {})}
        return dataclasses.replace(KINDS[like], peaks=peaks, **fields)
    # `device_kind` of the file comes last, and wins.
    return Hardware(**{"device_kind": fields["kind"]} | fields)


def capture(kind: str = "attached") -> Hardware:
    """Describe the attached GPU as a kind, to compile for more of them than there are, on this machine or another.

    Memory is what this process may use (`memory_stats()["bytes_limit"]`), and `config` the compiler's own. Links and
    network are those of the same GPU in the table, or unknown. `to_toml` makes a file to write them in.

    Raises:
      ValueError: no GPU is attached.
    """
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        raise ValueError(
            f"capture({kind!r}) needs a GPU, and JAX runs on {device.platform!r}; describe it in a file "
            f"(jaxpar.hardware.kinds.load), like one of {', '.join(KINDS)}"
        )
    name = device.device_kind
    base = of_device_kind(name) or Hardware(kind=kind, device_kind=name, peaks=peaks_of(name))
    stats = device.memory_stats() or {}
    # What links and network give cannot be asked of the device: keep the table's numbers.
    return dataclasses.replace(
        base,
        kind=kind,
        memory_bytes=stats.get("bytes_limit", base.memory_bytes),
        config=_config_of(device),
    )


def to_toml(hardware: Hardware) -> str:
    """Return the text of a file from which `load` makes the same kind."""
    lines = []
    for name in _FIELDS:
        value = getattr(hardware, name)
        if name == "config":
            lines += [f"config = '''\n{value}'''"] if value else []  # TOML drops the newline after the quotes
        elif name == "peaks":
            lines.append(f"peaks = {{ {', '.join(f'{dtype} = {peak}' for dtype, peak in value.items())} }}")
        elif value is not None:
            lines.append(f"{name} = {json.dumps(value)}")  # JSON's strings and numbers are TOML's
    return "\n".join(lines) + "\n"


def _read_config(path: pathlib.Path, name: str) -> str:
    """Read a config from a file in the folder of `path`."""
    try:
        return text_of(path.parent / name)
    except OSError as error:
        raise ValueError(
            f"{path}: config={name!r} is neither a text with braces nor a file in the same folder: {error}"
        ) from error


def nearest(kind: str) -> str:
    """Return the end of an error about an unknown kind: similar kinds, and all known ones."""
    # Ignoring case, so that "a100-80gb" finds "A100-80GB".
    kinds_by_folded = {known_kind.casefold(): known_kind for known_kind in KINDS}
    matches = difflib.get_close_matches(kind.casefold(), kinds_by_folded, n=2)
    similar = [kinds_by_folded[name] for name in matches]
    return (f"; did you mean {' or '.join(similar)}?" if similar else ";") + f" known are {', '.join(KINDS)}"


def _check_field(path: pathlib.Path, name: str, value: Any) -> None:
    """Check the name and value of one field of a file. Raises ValueError."""
    if name not in _FIELDS:
        similar = difflib.get_close_matches(name, _FIELDS, n=1)
        advice = f"; did you mean {similar[0]}?" if similar else f"; it takes like, {', '.join(_FIELDS)}"
        raise ValueError(f"{path}: {name!r} is not a field{advice}")
    if name in ("kind", "device_kind", "config"):
        if not isinstance(value, str):
            raise ValueError(f'{path}: {name}={value!r} is not a string; write {name} = "..."')
        return
    numbers = value if isinstance(value, dict) else {name: value}
    if name == "peaks" and (not isinstance(value, dict) or not set(value) <= set(DTYPES)):
        raise ValueError(f"{path}: peaks={value!r} must give FLOP/s by dtype, of {', '.join(DTYPES)}")
    if name != "peaks" and isinstance(value, dict):
        raise ValueError(f"{path}: {name}={value!r} must be a number above 0")
    for key, number in numbers.items():
        is_integer = key in _INTEGERS
        is_number = isinstance(number, int | float) and not isinstance(number, bool)  # True is an int to Python
        if not is_number or not number > 0 or (is_integer and number % 1):  # `not >` is true for NaN as well
            raise ValueError(f"{path}: {key}={number!r} must be a {'whole ' if is_integer else ''}number above 0")


def _config_of(device: jax.Device) -> str:
    """Return the compiler's description of a GPU."""
    # jax.experimental.topologies exposes the devices of a topology, but not its attributes.
    from jax._src.lib import _jax

    return _jax.get_topology_for_devices([device]).target_config
