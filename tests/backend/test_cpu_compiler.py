"""XLA's CPU compiler is correct as jaxpar starts it, and wrong without the flag in just the listed releases."""

import os
import platform
import subprocess
import sys

import jax
import jaxlib
import pytest

import jaxpar as jp
from jaxpar.backend import cpu_compiler

NEEDED = pytest.mark.skipif(not cpu_compiler.is_wrong(), reason=f"jaxlib {jaxlib.__version__} is right without")

# The backend starts before jaxpar is imported. The compiler gets the loss wrong under the user's `jit`, not in a step.
LATE = """
import warnings
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_num_cpu_devices", 2)
jax.devices()
import jaxpar as jp

n = 80_000  # rows, 40,000 on each device
x = (np.stack((np.arange(n) % 40_000, np.zeros(n), np.zeros(n)), axis=1) / 40_000).astype(np.float32)

def rows(m, x):
    return jax.vmap(lambda row: jnp.sum((m @ row) ** 2))(x)

def loss(params, batch, key=None):
    return rows(params["m"], batch).mean()

model = jp.Model(init=lambda key: {"m": jnp.eye(3)}, loss=loss)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step = jp.make_train_step(model, optax.sgd(0.0), jp.Strategy.parse("ddp"))
    assert jp.verify(model, "ddp", x).ok
messages = [str(w.message) for w in caught if "wrong numbers in silence" in str(w.message)]
assert len(messages) == 1, messages
assert messages[0].endswith("XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce"), messages
error = abs(float(step.evaluate(step.init(jax.random.key(0)), x)["loss"]) / (x.astype(np.float64) ** 2).sum() * n - 1)
assert error < 1e-6, error  # 8e-4 without the flag
users_result = jax.jit(rows)(jnp.eye(3), x[:40_000])
print("own jit is right:", np.allclose(users_result, (x[:40_000] ** 2).sum(1), rtol=1e-5))
"""


def without_flag() -> dict[str, str]:
    """Return this process's environment as it was before jaxpar added the flag."""
    flags = os.environ["XLA_FLAGS"].split()
    return {**os.environ, "XLA_FLAGS": " ".join(f for f in flags if cpu_compiler.NAME not in f)}


@pytest.mark.parametrize("name", list(cpu_compiler.CANARIES))
def test_the_tests_compile_it_right(name: str) -> None:
    """A plain `jit` in this process is correct, as all tests need; two of the canaries once killed the process."""
    assert cpu_compiler.CANARIES[name][0]()


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="the kernels are known to be wrong only for Linux on x86-64",
)
def test_it_is_wrong_without_the_flag_in_just_these_releases() -> None:
    """This test fails when no release needs the flag any more, or when another release does."""
    wrong = {name for name, (_, releases) in cpu_compiler.CANARIES.items() if jaxlib.__version__ in releases}
    assert bool(wrong) == cpu_compiler.is_wrong()
    failures = cpu_compiler.failing(without_flag()).keys()
    # On some processors the sum over 8 dims of one release is correct.
    assert failures == wrong or failures == wrong - {"a sum over 8 dims"}


@NEEDED
def test_a_step_is_right_where_the_flag_came_too_late_and_says_so() -> None:
    """Steps are compiled with the option that replaces the flag; a user's own `jit` is not."""
    process = subprocess.run(
        [sys.executable, "-c", LATE], env=without_flag(), capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "own jit is right: False"


@NEEDED
@pytest.mark.parametrize(
    ("initial", "expected"),
    [
        (None, cpu_compiler.FLAG),
        ("--xla_cpu_enable_fast_math=false", f"--xla_cpu_enable_fast_math=false {cpu_compiler.FLAG}"),
        (f"--{cpu_compiler.NAME}=", f"--{cpu_compiler.NAME}="),
        ("/etc/flags", "/etc/flags"),
    ],
)
def test_what_xla_flags_says_already_stays(initial: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compiler, "backends_are_initialized", lambda: False)
    monkeypatch.delenv("XLA_FLAGS")
    if initial is not None:
        monkeypatch.setenv("XLA_FLAGS", initial)
    cpu_compiler.set_flag()
    assert os.environ["XLA_FLAGS"] == expected


def test_simulate_sets_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`jp.simulate` adds the flag again if XLA_FLAGS was overwritten after the import."""
    monkeypatch.setattr(cpu_compiler, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jaxlib, "__version__", cpu_compiler.WRONG[0])
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    jp.simulate(len(jax.devices()))
    assert cpu_compiler.FLAG in os.environ["XLA_FLAGS"]


def test_a_release_that_is_right_gets_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later release may not know the flag, and XLA ends a process with an unknown flag."""
    monkeypatch.setattr(cpu_compiler, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jaxlib, "__version__", "0.12.0")
    monkeypatch.delenv("XLA_FLAGS")
    cpu_compiler.set_flag()
    assert "XLA_FLAGS" not in os.environ
    assert cpu_compiler.cpu_options("cpu") is None


def test_flags_that_were_written_over_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's file may set XLA_FLAGS for its devices, and so overwrite the flag."""
    monkeypatch.setattr(jaxlib, "__version__", cpu_compiler.WRONG[0])
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with pytest.warns(UserWarning, match="XLA_FLAGS was written anew after jaxpar had set the flag"):
        cpu_compiler.warn_unset.__wrapped__()


def test_options_are_for_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxlib, "__version__", cpu_compiler.WRONG[0])
    monkeypatch.delenv("XLA_FLAGS")
    assert set(cpu_compiler.cpu_options("cpu") or {}) == {cpu_compiler.NAME}
    assert cpu_compiler.cpu_options("gpu") is None
    assert jax.default_backend() == "cpu"
    assert cpu_compiler.cpu_options() == cpu_compiler.cpu_options("cpu")
