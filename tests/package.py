"""`make package`: a wheel and an sdist, the wheel built from the sdist, and a first run of what is installed from it.

The environment that it is installed into is empty, but that jax and the other dependencies are those of this one, which
spares a download of some hundred MB: what pyproject.toml asks for is compared with what is there. Of an index it needs
`build` and `hatchling`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What the sdist holds beside the package: a clone without its history.
IN_SDIST = ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "zensical.toml", "pyproject.toml",
            "docs/index.md", "docs/assets/strategies.svg", "tests/conftest.py", "experiments/compare.py",
            "constraints.txt")  # fmt: skip

SMOKE = """
import importlib.metadata, importlib.resources, sys
import jaxpar as jp
assert jp.__file__.startswith(sys.prefix), jp.__file__
assert importlib.metadata.version("jaxpar") == jp.__version__
missing = []
for text in importlib.metadata.requires("jaxpar"):
    from packaging.requirements import Requirement
    needed = Requirement(text)
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        if not needed.specifier.contains(importlib.metadata.version(needed.name)):
            missing.append(text)
assert not missing, missing
assert importlib.resources.files(jp).joinpath("py.typed").is_file()

import jax, jax.numpy as jnp, optax
jp.simulate(4)
model = jp.Model(
    init=lambda key: {"w": jax.random.normal(key, (8, 8))}, loss=lambda params, batch, key: (batch @ params["w"]).mean()
)
step = jp.make_train_step(model, optax.adam(1e-3), "zero3")
state, metrics = step(step.init(jax.random.key(0)), jnp.ones((8, 8)))
assert int(state.step) == 1 and bool(metrics["finite"])

from jaxpar.hardware.kinds import KINDS  # reads XLA's descriptions of GPUs
print(f"jaxpar {jp.__version__}: a step on {step.mesh.size} devices, {len(KINDS)} kinds of accelerators")
"""


def run(*words: str | Path, cwd: Path | None = None) -> str:
    """What a command says. Ends this program with what it says where it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX", "XLA"))}
    env = clean | {"JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Builds, compares what is in the archives with what git knows, installs, and runs it."""
    listed = run("git", "ls-files", "jaxpar", cwd=ROOT).split()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run(sys.executable, "-m", "venv", "--without-pip", place / "tools")
        python = place / "tools" / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "build")
        run(python, "-m", "build", "--outdir", place / "dist", ROOT)
        (wheel,), (sdist,) = ([*(place / "dist").glob(kind)] for kind in ("*.whl", "*.tar.gz"))
        in_wheel = zipfile.ZipFile(wheel).namelist()
        with tarfile.open(sdist) as archive:
            in_sdist = {member.partition("/")[2] for member in archive.getnames()}
        if missing := [*({*listed} - {*in_wheel}), *({*listed, *IN_SDIST} - in_sdist)]:
            sys.exit(f"{wheel.name} or {sdist.name} lacks {missing}; see [tool.hatch] in pyproject.toml")
        if more := [n for n in in_wheel if not n.startswith(("jaxpar/", "jaxpar-")) or "__pycache__" in n]:
            sys.exit(f"{wheel.name} has {more}; see [tool.hatch] in pyproject.toml")
        print(f"{wheel.name} {wheel.stat().st_size:,} bytes, {sdist.name} {sdist.stat().st_size:,} bytes")

        run(sys.executable, "-m", "venv", "--without-pip", place / "env")
        python = place / "env" / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
        (Path(site) / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        print(run(python, "-c", SMOKE, cwd=place), end="")
        for words in (["--help"], ["--version"], ["train", "--help"], ["timeline"]):
            said = run(place / "env" / "bin" / "jaxpar", *words, cwd=place)
            assert said.strip(), words
        print("jaxpar --help, --version, train --help, timeline: as they should be")


if __name__ == "__main__":
    main()
