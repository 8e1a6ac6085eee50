"""What XLA's CPU compiler gets wrong, the flag with which it does not, and programs that show either.

From jaxlib 0.10.2 on it gives matrix products, and reductions with the products before them, to kernels of YNNPACK. Two
releases have bugs in reductions: wrong numbers, in silence, and a process that is killed or hangs (jax's issues 39103,
39257, 40412 at github.com/jax-ml/jax). The flag says which operations YNNPACK gets: all but reductions, which XLA's own
code computes, as before. None at all would be as right, and a step of llama-tiny takes 1.25 times as long.

Every release from 0.10.2 to 0.12.0 knows the flag, as do the plugins for CUDA and TPUs of the same release; 0.11.1 and
later are right without it. XLA ends a process whose XLA_FLAGS has a name that it does not know, so it is set for these
two alone. It is read once, when the first backend starts.

Run as a script, with the name of a canary, it runs that program as this environment compiles it: status 0 if right.
"""

import functools
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src.xla_bridge import backends_are_initialized  # JAX's public API does not tell

WRONG = ("0.10.2", "0.11.0")
NAME = "xla_cpu_experimental_ynn_fusion_type"
FLAG = f"--{NAME}=-reduce"
# The same as an option of one program: what is left without reductions.
_OPTION: dict[str, bool | int | str] = {NAME: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# Whether the first backend had started without the flag before jaxpar was imported.
_TOO_LATE = backends_are_initialized() and NAME not in os.environ.get("XLA_FLAGS", "")
_MISTAKEN = 3  # exit status of a canary whose numbers are wrong


def is_wrong() -> bool:
    """Whether this jaxlib's CPU compiler is wrong without the flag."""
    return jaxlib.__version__ in WRONG


def is_unset() -> bool:
    """Whether this jaxlib needs the flag, and programs are compiled without it."""
    return is_wrong() and (_TOO_LATE or NAME not in os.environ.get("XLA_FLAGS", ""))


def set_flag() -> None:
    """Adds the flag to XLA_FLAGS where this jaxlib needs it and no backend has started; subprocesses inherit it.

    What XLA_FLAGS says of these fusions already stays. So does the name of a file with flags, which it may be.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if is_wrong() and NAME not in flags and (not flags or flags.startswith("-")) and not backends_are_initialized():
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()


def cpu_options(platform: str | None = None) -> dict[str, bool | int | str] | None:
    """For `jax.jit(compiler_options=)` of a program on devices of `platform`, or of the default one: the flag, where
    it is needed and XLA_FLAGS has come too late for it; else None.

    XLA takes options of whole programs alone: what has them cannot be called within a `jit`.
    """
    return _OPTION if is_unset() and (platform or jax.default_backend()) == "cpu" else None


@functools.cache
def warn_unset() -> None:
    """Warns, once, where programs of the user's own may be wrong on CPU devices."""
    if is_unset():
        why = "it started before jaxpar could set" if _TOO_LATE else "XLA_FLAGS was written anew after jaxpar had set"
        warnings.warn(
            f"jax's CPU compiler (jaxlib {jaxlib.__version__}) can compute wrong numbers in silence, and {why} the "
            "flag that prevents it. The steps of jaxpar are right; for a jit of your own "
            f"import jaxpar before the first array, or set XLA_FLAGS={FLAG}",
            stacklevel=3,
        )


def _rows() -> bool:
    n = 40_000  # 7,232 rows are wrong; from 32,769 to 65,535 rows some are
    i = jnp.arange(n, dtype=jnp.float32)
    x = jnp.stack((i, jnp.zeros_like(i), jnp.zeros_like(i)), axis=1)
    m = jnp.eye(3, dtype=jnp.float32)
    found = jax.jit(jax.vmap(lambda row: jnp.sum((m @ row) ** 2)))(x)
    return np.allclose(found, np.arange(n, dtype=np.float64) ** 2, rtol=1e-5)


def _dims_of_one() -> bool:
    a = jnp.ones((3, 1, 2, 2, 8, 8, 8), jnp.float32)
    return bool((jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(a, a) == 2).all())


def _eight_dims() -> bool:
    a, b = jnp.ones((2, 4, 6), jnp.float32), jnp.ones((2, 4, 6, 3, 3, 3, 3, 3), jnp.float32)
    return bool((jax.jit(lambda a, b: jnp.sum(a[..., None, None, None, None, None] * b, axis=2))(a, b) == 6).all())


# name -> the program, and the releases that are wrong without the flag, on Linux and x86-64; some processors pass one
CANARIES: dict[str, tuple[Callable[[], bool], tuple[str, ...]]] = {
    "sums of products over 40,000 rows": (_rows, ("0.10.2",)),
    "a sum over 7 dims, one of size 1": (_dims_of_one, ("0.10.2",)),
    "a sum over 8 dims": (_eight_dims, ("0.10.2", "0.11.0")),
}


def failing(
    environment: Mapping[str, str], names: Iterable[str] = tuple(CANARIES), seconds: float = 300
) -> dict[str, str]:
    """Runs canaries side by side, each in a process of its own with that environment; name -> what went wrong.

    One that takes longer than `seconds` is taken to hang.
    """
    own = {**environment, "JAX_PLATFORMS": "cpu"}
    children = {
        name: subprocess.Popen([sys.executable, "-P", __file__, name], env=own, stderr=subprocess.DEVNULL)
        for name in names
    }
    return {name: wrong for name, child in children.items() if (wrong := _outcome(child, seconds))}


def _outcome(child: subprocess.Popen, seconds: float) -> str:
    """What went wrong in a canary's process; "" if nothing did."""
    try:
        status = child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return f"hangs, or takes longer than {seconds:g} s"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return {0: "", _MISTAKEN: "wrong numbers"}.get(status, f"exit status {status}")


if __name__ == "__main__":
    sys.exit(0 if CANARIES[sys.argv[1]][0]() else _MISTAKEN)
