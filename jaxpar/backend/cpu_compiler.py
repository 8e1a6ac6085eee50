"""A workaround for bugs of XLA's CPU compiler: a flag, and canary programs that show whether it is needed.

From jaxlib 0.10.2 on, XLA compiles matrix products, and reductions with the products before them, to kernels of
YNNPACK. Two releases have bugs in reductions: silently wrong numbers, and processes that are killed or hang (issues
39103, 39257 and 40412 at github.com/jax-ml/jax). The flag lets YNNPACK compile everything except reductions, for which
XLA then uses its older code. To exclude YNNPACK altogether would be correct too, but a step of llama-tiny would take
1.25 times as long.

XLA ends a process whose XLA_FLAGS has an unknown name, so the flag is set for these two releases only. All releases
from 0.10.2 to 0.12.0 know it, and so do the CUDA and TPU plugins of the same release; 0.11.1 and later are correct
without it. XLA reads XLA_FLAGS once, when the first backend starts. If that was too early, jaxpar's own programs get
the same setting as an option (`cpu_options`), and a warning tells users about theirs (`warn_unset`).

Run as a script with the name of a canary, this file runs that program as this environment compiles it. The exit status
is 0 if its result is correct.
"""

import functools
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src.xla_bridge import backends_are_initialized  # JAX has no public API for this

WRONG = ("0.10.2", "0.11.0")  # releases of jaxlib that need the flag
NAME = "xla_cpu_experimental_ynn_fusion_type"
FLAG = f"--{NAME}=-reduce"
# The same setting as an option of one program: without reductions, only fusions of a single dot product remain.
_OPTION: dict[str, bool | int | str] = {NAME: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# The first backend had started without the flag before jaxpar was imported.
_STARTED_WITHOUT_FLAG = backends_are_initialized() and NAME not in os.environ.get("XLA_FLAGS", "")
_WRONG_NUMBERS_STATUS = 3  # exit status of a canary with a wrong result
_CANARY_SECONDS = 300  # a canary that takes longer is taken to hang


def is_wrong() -> bool:
    """Tell whether the CPU compiler of this jaxlib is wrong without the flag."""
    return jaxlib.__version__ in WRONG


def is_unset() -> bool:
    """Tell whether this jaxlib needs the flag and compiles programs without it."""
    return is_wrong() and (_STARTED_WITHOUT_FLAG or NAME not in os.environ.get("XLA_FLAGS", ""))


def set_flag() -> None:
    """Add the flag to XLA_FLAGS if this jaxlib needs it and no backend has started; subprocesses inherit it.

    XLA_FLAGS stays unchanged if it sets these fusions already, or if it is the name of a file with flags.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    # A value without a dash at its beginning names a file of flags, to which nothing can be added here.
    if is_wrong() and NAME not in flags and (not flags or flags.startswith("-")) and not backends_are_initialized():
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()


def cpu_options(platform: str | None = None) -> dict[str, bool | int | str] | None:
    """Return the options for `jax.jit(compiler_options=)` that replace the flag.

    Returns None unless the flag is needed and XLA_FLAGS lacks it. XLA takes options for whole programs only: a function
    with options cannot be called within another `jit`. `platform` is that of the program's devices, or JAX's default.
    """
    return _OPTION if is_unset() and (platform or jax.default_backend()) == "cpu" else None


@functools.cache
def warn_unset() -> None:
    """Warn once if the user's own programs may compute wrong numbers on CPU devices."""
    if is_unset():
        cause = (
            "it started before jaxpar could set"
            if _STARTED_WITHOUT_FLAG
            else "XLA_FLAGS was written anew after jaxpar had set"
        )
        warnings.warn(
            f"jax's CPU compiler (jaxlib {jaxlib.__version__}) can compute wrong numbers in silence, and {cause} the "
            "flag that prevents it. The steps of jaxpar are right; for a jit of your own "
            f"import jaxpar before the first array, or set XLA_FLAGS={FLAG}",
            stacklevel=3,
        )


def _sums_of_many_rows() -> bool:
    """Return whether a sum of squares is correct for each of 40,000 rows."""
    n = 40_000  # 7,232 of these rows are wrong; for 32,769 to 65,535 rows some are
    i = jnp.arange(n, dtype=jnp.float32)
    x = jnp.stack((i, jnp.zeros_like(i), jnp.zeros_like(i)), axis=1)
    m = jnp.eye(3, dtype=jnp.float32)
    row_sums = jax.jit(jax.vmap(lambda row: jnp.sum((m @ row) ** 2)))(x)
    return np.allclose(row_sums, np.arange(n, dtype=np.float64) ** 2, rtol=1e-5)


def _dims_of_one() -> bool:
    """Return whether a sum over one of 7 dims is correct if another dim has size 1."""
    a = jnp.ones((3, 1, 2, 2, 8, 8, 8), jnp.float32)
    return bool((jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(a, a) == 2).all())


def _eight_dims() -> bool:
    """Return whether a sum over one of 8 dims is correct."""
    a, b = jnp.ones((2, 4, 6), jnp.float32), jnp.ones((2, 4, 6, 3, 3, 3, 3, 3), jnp.float32)
    return bool((jax.jit(lambda a, b: jnp.sum(a[..., None, None, None, None, None] * b, axis=2))(a, b) == 6).all())


# name -> (program, releases that are wrong without the flag on Linux and x86-64). Some processors pass the last one.
CANARIES: dict[str, tuple[Callable[[], bool], tuple[str, ...]]] = {
    "sums of products over 40,000 rows": (_sums_of_many_rows, ("0.10.2",)),
    "a sum over 7 dims, one of size 1": (_dims_of_one, ("0.10.2",)),
    "a sum over 8 dims": (_eight_dims, ("0.10.2", "0.11.0")),
}


def failing(environment: Mapping[str, str]) -> dict[str, str]:
    """Run the canaries in processes with this environment; return the failure of each one that failed, by name.

    They run concurrently, each in its own process, because a wrong compiler may kill the process.
    """
    cpu_environment = {**environment, "JAX_PLATFORMS": "cpu"}
    children = {
        # -P keeps the folder of this file out of sys.path, where its files would hide modules of the same names.
        name: subprocess.Popen([sys.executable, "-P", __file__, name], env=cpu_environment, stderr=subprocess.DEVNULL)
        for name in CANARIES
    }
    return {name: failure for name, child in children.items() if (failure := _failure(child))}


def _failure(child: subprocess.Popen) -> str:
    """Wait for a canary's process and describe its failure; "" if its result is correct."""
    try:
        status = child.wait(_CANARY_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return f"hangs, or takes longer than {_CANARY_SECONDS} s"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return {0: "", _WRONG_NUMBERS_STATUS: "wrong numbers"}.get(status, f"exit status {status}")


if __name__ == "__main__":
    sys.exit(0 if CANARIES[sys.argv[1]][0]() else _WRONG_NUMBERS_STATUS)
