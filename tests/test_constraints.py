"""constraints.txt holds what it says: versions that pyproject.toml and each other allow."""

import tomllib
from importlib import metadata
from pathlib import Path

import constraints
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LINES = [line for line in constraints.FILE.read_text().splitlines() if not line.startswith("#")]
PINNED = dict(line.split("==") for line in LINES)


def test_every_line_is_one_exact_version() -> None:
    assert [f"{name}=={version}" for name, version in sorted(PINNED.items())] == LINES


def test_they_are_versions_that_the_project_allows() -> None:
    """Of all dependencies and extras, but what is for accelerators, and gcsfs, which the tests do without."""
    project = tomllib.loads((Path(constraints.FILE).parent / "pyproject.toml").read_text())["project"]
    extras = [x for name, some in project["optional-dependencies"].items() if name not in ("cuda12", "cuda13", "tpu")
              for x in some]  # fmt: skip
    wanted = [Requirement(text) for text in [*project["dependencies"], *extras]]
    wanted = [one for one in wanted if canonicalize_name(one.name) not in ("jaxpar", "gcsfs")]
    refused = [str(one) for one in wanted if not one.specifier.contains(PINNED.get(canonicalize_name(one.name), "0"))]
    assert not refused, "run make constraints"


def test_they_fit_each_other() -> None:
    """By what the distributions that are installed in just these versions ask for."""
    for name, version in PINNED.items():
        try:
            if metadata.version(name) != version:
                continue
        except metadata.PackageNotFoundError:
            continue
        for one in constraints.needed(name):
            pinned = PINNED.get(canonicalize_name(one.name))
            assert pinned is not None, f"{name} needs {one}, which has no version in constraints.txt"
            assert one.specifier.contains(pinned, prereleases=True), f"{name} needs {one}, not {pinned}"


def test_what_is_written_has_all_that_the_project_needs() -> None:
    """Whatever versions this environment has: others than in the file are no fault of it."""
    found = constraints.pins()
    assert {canonicalize_name(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy", "s3fs", "pytest")} <= {
        *found
    }
    assert "jaxpar" not in found
    assert all(metadata.version(name) == version for name, version in found.items())
