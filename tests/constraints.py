"""`make constraints`: the exact versions that this environment has of all that jaxpar needs, for constraints.txt.

Run it where CI has passed. What the environment has besides, such as models of others that tests train, is left out.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = Path(__file__).parent.parent / "constraints.txt"
HEAD = """\
# The versions with which jaxpar's tests have passed: {python}, {system}, all extras but cuda12, cuda13 and tpu.
#   pip install -c constraints.txt .
# `make constraints` writes this file from the environment of the tests.
"""


def needed(name: str, extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
    """What an installed distribution asks for here, with these extras of its own."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        wanted = [{"extra": extra} for extra in extras or {""}]
        if requirement.marker is None or any(requirement.marker.evaluate(one) for one in wanted):
            yield requirement


def pins() -> dict[str, str]:
    """Name -> version of all that the extra `dev` of jaxpar brings, at any depth."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [("jaxpar", frozenset({"", "dev"}))]
    while left:
        here = left.pop()
        if here in seen:
            continue
        seen.add(here)
        for requirement in needed(*here):
            name = canonicalize_name(requirement.name)
            if name != "jaxpar":
                found[name] = metadata.version(name)
            left.append((name, frozenset({"", *requirement.extras})))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    head = HEAD.format(python=f"Python {platform.python_version()}", system=f"{sys.platform} {platform.machine()}")
    FILE.write_text(head + "".join(f"{name}=={version}\n" for name, version in pins().items()))
    print(f"written: {FILE}")
