"""Targets by name, their numbers against data sheets, and that each kind's compiler makes a program for it."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.hardware import devices as targets
from jaxpar.hardware import kinds
from jaxpar.hardware.devices import target
from jaxpar.hardware.hardware import DTYPES, KINDS, Hardware, peak_flops, peaks_of
from jaxpar.hardware.kinds import capture, load, to_toml

GPUS = ["A100-40GB", "A100-80GB", "H100", "H100-PCIe", "H200", "B200"]
Write = Callable[[str], Path]

# The data sheets' numbers: GB, TB/s, links both ways in GB/s, network in Gb/s, then TFLOP/s of bf16, TF32 and FP8 with
# sparsity, and FP32.
SHEETS = {
    "A100-40GB": (40, 1.555, 600, 200, 624, 312, None, 19.5),
    "A100-80GB": (80, 2.039, 600, 200, 624, 312, None, 19.5),
    "H100": (80, 3.35, 900, 400, 1979, 989, 3958, 67),
    "H100-PCIe": (80, 2.0, 128, 400, 1513, 756, 3026, 51),
    "H200": (141, 4.8, 900, 400, 1979, 989, 3958, 67),
    "B200": (180, 7.7, 1800, 400, 4500, 2200, 9000, 75),
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str, name: str = "cluster.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def no_compiler_needed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Make targets without a compiler, and record the options that it would have been given."""
    requests = []

    def topology(name: str, platform: str, **options: Any) -> SimpleNamespace:
        requests.append(options)
        _, hosts, devices = (int(part) for part in options["topology"].split("x"))
        return SimpleNamespace(devices=list(range(hosts * devices)))

    monkeypatch.setattr(targets, "missing_compiler", lambda: "")
    monkeypatch.setattr(targets.topologies, "get_topology_desc", topology)
    return requests


@pytest.mark.parametrize("kind", GPUS)
def test_numbers_are_those_of_the_data_sheets(kind: str) -> None:
    hardware = KINDS[kind]
    gigabytes, terabytes, links, gigabits, bf16, tf32, fp8, f32 = SHEETS[kind]
    assert hardware.memory_bytes == pytest.approx(gigabytes * 1e9, rel=0.07)  # GB or GiB, and what the driver keeps
    assert hardware.memory_bandwidth == pytest.approx(terabytes * 1e12, rel=0.02)
    assert hardware.link_bandwidth == links * 1e9 / 2
    assert hardware.network_bandwidth == gigabits * 1e9 / 8
    for dtype, sparse in {"bf16": bf16, "f16": bf16, "tf32": tf32, "fp8": fp8}.items():
        peak = hardware.peak(dtype)
        assert peak == (None if sparse is None else pytest.approx(sparse * 1e12 / 2, rel=1e-3)), dtype
    assert hardware.peak("f32") == pytest.approx(f32 * 1e12, rel=2e-3)
    assert 0.7 < hardware.link_efficiency < 0.9
    assert hardware.link_latency < hardware.network_latency
    # The compiler's description agrees: cores, and bf16 FLOP per clock and core that the chip's white paper has.
    text = hardware.target_config
    assert text == hardware.config
    assert f'device_description_str: "{hardware.device_kind}"' in text
    cores, clock = (float(re.findall(rf"{name}: ([\d.]+)", text)[0]) for name in ("core_count", "clock_rate_ghz"))
    per_clock = {"A": 2048, "H": 4096, "B": 8192}[kind[0]]
    # Tensor cores of Hoppers and Blackwells run at up to 8 % less than the highest clock.
    assert 0.9 < hardware.peak("bf16") / (cores * per_clock * clock * 1e9) < 1.01


def test_peaks_by_device_kind() -> None:
    assert {kind for kind, hardware in KINDS.items() if hardware.config} == set(GPUS)
    assert peaks_of("NVIDIA A100-PCIE-40GB") == KINDS["A100-40GB"].peaks
    assert peak_flops("NVIDIA H200 NVL", "bf16") == 835.5e12  # not the SXM's, whose name is the beginning of its own
    assert peak_flops("NVIDIA B200", "f32") == KINDS["B200"].peak("tf32")
    assert peak_flops("TPU v5 lite", "bf16") == 197e12
    assert peak_flops("TPU v5 lite", "f16") is None
    with pytest.raises(ValueError, match=r"peak\('float8'\): the dtype must be one of bf16, f16, tf32, f32, fp8"):
        KINDS["H100"].peak("float8")
    assert all(set(hardware.peaks) <= set(DTYPES) for hardware in KINDS.values())


@pytest.mark.parametrize(
    ("name", "kind", "hosts", "per_host"),
    [
        ("8xH100", "H100", 1, 8),
        ("3xA100-80GB", "A100-80GB", 1, 3),
        ("64xH100-PCIe", "H100-PCIe", 8, 8),
        ("32x8xB200", "B200", 32, 8),
        ("5x4xH200", "H200", 5, 4),
        ("1x16xA100-40GB", "A100-40GB", 1, 16),
    ],
)
def test_names(no_compiler_needed: list[dict[str, Any]], name: str, kind: str, hosts: int, per_host: int) -> None:
    gpus = target(name)
    assert (gpus.name, gpus.kind, gpus.hosts, gpus.per_host) == (name, kind, hosts, per_host)
    assert gpus.hardware is KINDS[kind]
    assert len(gpus.devices) == hosts * per_host
    assert no_compiler_needed == [{"target_config": KINDS[kind].config, "topology": f"1x{hosts}x{per_host}"}]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("H100", "'H100' is not a count and a known kind; use for example '8xH100', '32x8xH100'"),
        ("0xH100", "'0xH100' is not a count and a known kind"),
        ("8xH10", "'H10' is not a known kind; did you mean H100"),
        ("8xa100-80gb", "'a100-80gb' is not a known kind; did you mean A100-80GB or A100-40GB"),
        ("8xMI300X", r"'MI300X' is not a known kind; known are A100-40GB, .* in a file, and name it: '8xcluster.toml'"),
        ("v9:2x2", "'v9' is not a known kind"),
        ("12xH100", "12 devices do not fill hosts of 8; use 8 or 16"),
        ("8xv5e", "v5e has no config for the compiler; name a slice of TPUs by its shape, as 'v5e:4x4'"),
        ("H100:4x4", "H100 are not TPUs, which have shapes; use '4x4xH100'"),
        ("cpu:9", r"there are 8 CPU devices; call jaxpar.simulate\(9\) right after"),
        ("cpu:0", "there are 8 CPU devices"),
    ],
)
def test_names_that_are_wrong(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        target(name)


def test_missing_compilers_say_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'jax_cuda12_plugin is not installed; pip install "jax\[cuda12\]=='):
        target("4xB200")
    with pytest.raises(ImportError, match=r'libtpu is not installed; pip install "jax\[tpu\]=='):
        target("v5e:4x4")


def test_simulated_devices_are_those_of_this_process() -> None:
    gpus = target("cpu:5")
    assert (gpus.kind, gpus.hosts, gpus.per_host, len(gpus.devices)) == ("cpu", 1, 5, 5)
    assert gpus.hardware.peak("bf16") is None
    assert gpus.devices == jax.devices()[:5]


def test_load_takes_the_rest_from_another(write: Write, no_compiler_needed: list[dict[str, Any]]) -> None:
    path = write('kind = "mine"\nlike = "H100"\nmemory_bytes = 40e9\nper_host = 4\npeaks = {bf16 = 9e14}\n')
    hardware, base = load(path), KINDS["H100"]
    assert (hardware.kind, hardware.memory_bytes, hardware.per_host) == ("mine", 40_000_000_000, 4)
    assert (hardware.peak("bf16"), hardware.peak("fp8")) == (9e14, base.peak("fp8"))
    assert (hardware.link_bandwidth, hardware.device_kind) == (base.link_bandwidth, base.device_kind)
    assert hardware.config == base.config
    assert "device_memory_size: 40000000000\n" in hardware.target_config
    by_name, by_value = target(f"12x{path}"), target("12xmine", hardware)
    assert (by_name.hosts, by_name.per_host, by_name.hardware) == (3, 4, hardware)
    assert by_value.hardware is hardware
    assert no_compiler_needed[0]["target_config"] == hardware.target_config
    with pytest.raises(ValueError, match="names 'H200', but hardware is 'mine'; use one kind in both"):
        target("12xH200", hardware)


def test_load_reads_a_config_beside_it(write: Write) -> None:
    write("gpu_device_info { core_count: 7 }", "own.txtpb")
    hardware = load(write('kind = "own"\nconfig = "own.txtpb"'))
    assert hardware.config == hardware.target_config == "gpu_device_info { core_count: 7 }"
    assert (hardware.device_kind, hardware.memory_bytes, hardware.per_host) == ("own", None, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_survive_a_file(write: Write, kind: str) -> None:
    assert load(write(to_toml(KINDS[kind]))) == KINDS[kind]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("= 3", r"cluster.toml cannot be read as TOML: Invalid statement.*; give a file that describes a kind"),
        ('kind = "a"\nlike = 3', "like=3 is not a known kind; known are"),
        ('like = "H100"', r'gives no kind; name it, as in kind = "H100-96GB"'),
        ('kind = "a"\nlike = "H10"', r"like='H10' is not a known kind; did you mean H100"),
        ('kind = "a"\nmemory_byte = 3', "'memory_byte' is not a field; did you mean memory_bytes?"),
        ('kind = "a"\nnvlink = 3', "'nvlink' is not a field; it takes like, kind"),
        ('kind = "a"\nmemory_bytes = 1.5', "memory_bytes=1.5 must be a whole number above 0"),
        ('kind = "a"\nlink_bandwidth = -1e9', "link_bandwidth=-1000000000.0 must be a number above 0"),
        ('kind = "a"\nlink_bandwidth = "9"', "link_bandwidth='9' must be a number above 0"),
        ('kind = "a"\nlink_bandwidth = {a = 1}', "link_bandwidth={'a': 1} must be a number above 0"),
        ('kind = "a"\npeaks = {int8 = 1e12}', "peaks={'int8': 1000000000000.0} must give FLOP/s by dtype, of bf16"),
        ('kind = "a"\npeaks = {bf16 = 0}', "bf16=0 must be a number above 0"),
        ("kind = 3", r'kind=3 is not a string; write kind = "..."'),
    ],
)
def test_files_that_are_wrong(write: Write, text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        load(write(text))


def test_capture_of_an_attached_gpu(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    with pytest.raises(ValueError, match=r"capture\('attached'\) needs a GPU, and JAX runs on 'cpu'; describe it in"):
        capture()

    def attach(device_kind: str) -> None:
        stats = {"bytes_limit": 63_693_553_665}
        gpu = SimpleNamespace(platform="gpu", device_kind=device_kind, memory_stats=lambda: stats)
        monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
        monkeypatch.setattr(kinds, "_config_of", lambda device: "gpu_device_info { device_memory_size: 84942979072 }\n")

    attach("NVIDIA H100 80GB HBM3")
    h100 = capture("h100")
    assert h100.target_config == "gpu_device_info { device_memory_size: 63693553665 }\n"
    assert (h100.kind, h100.link_bandwidth, h100.peak("bf16")) == ("h100", 450e9, 989.4e12)
    attach("NVIDIA H200 NVL")  # the table has its peaks, but not its links
    nvl = capture()
    assert (nvl.kind, nvl.link_bandwidth, nvl.peak("bf16")) == ("attached", None, 835.5e12)
    assert nvl.memory_bytes == 63_693_553_665
    assert load(write(to_toml(nvl))) == nvl


def compile_matmul(devices: list[jax.Device], dtype: Any, **options: Any) -> tuple[str, Any]:
    """Compile a matmul whose contracted dim is sharded over the devices; return the program's text and memory."""
    count = len(devices)
    mesh = Mesh(np.array(devices), ("a",), axis_types=(AxisType.Auto,))
    specs = (P(None, "a"), P("a", None))
    step = jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "a"), mesh=mesh, in_specs=specs, out_specs=P())
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(56, 24 * count), (24 * count, 40)], specs, strict=True)
    ]
    platform = "tpu" if devices[0].platform == "tpu" else "cuda"
    program = jax.jit(step).trace(*arguments).lower(lowering_platforms=(platform,)).compile(compiler_options=options)
    return program.as_text(), program.memory_analysis()


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("kind", GPUS)
def test_every_kind_compiles(kind: str, tmp_path: Path) -> None:
    gpus = target(f"2x3x{kind}")
    assert [device.process_index for device in gpus.devices] == [0, 0, 0, 1, 1, 1]
    assert {device.device_kind for device in gpus.devices} == {gpus.hardware.device_kind}
    text, memory = compile_matmul(gpus.devices, jnp.bfloat16, xla_dump_to=str(tmp_path))
    assert re.search(r"all-reduce(-start)?\(", text)
    assert memory.argument_size_in_bytes == 2 * (56 * 24 + 24 * 40)
    assembly = [path.read_text() for path in tmp_path.glob("*.ptx")]
    if assembly:  # newer compilers do not write it
        architectures = {line for text in assembly for line in re.findall(r"^\.target (\w+)", text, re.M)}
        assert architectures == {{"A": "sm_80", "H": "sm_90a", "B": "sm_100a"}[kind[0]]}


@pytest.mark.cuda_compiler
def test_a_kind_from_a_file_compiles(write: Write) -> None:
    gpus = target(f"4x{write(to_toml(KINDS['B200']).replace('B200', 'mine', 1))}")
    assert gpus.kind == "mine"
    text, _ = compile_matmul(gpus.devices, jnp.float32)
    assert "all-reduce" in text


@pytest.mark.cuda_compiler
def test_thousands_of_devices() -> None:
    gpus = target("4096xH100")
    assert (gpus.hosts, gpus.per_host, len(gpus.devices)) == (512, 8, 4096)
    assert [device.process_index for device in gpus.devices] == [device // 8 for device in range(4096)]
    text, memory = compile_matmul(gpus.devices, jnp.bfloat16)
    assert "num_partitions=4096" in text
    assert memory.argument_size_in_bytes == 2 * (56 * 24 + 24 * 40)


@pytest.mark.cuda_compiler
def test_config_is_read_from_a_client() -> None:
    # The attribute that `capture` reads; a compile-only client has it as one of an attached GPU does.
    (device, _) = target("2xH100-PCIe").devices
    config = kinds._config_of(device)
    assert "core_count: 114\n" in config
    hardware = Hardware(kind="mine", device_kind="NVIDIA H100 PCIe", config=config, memory_bytes=7 * 2**30)
    assert "device_memory_size: 7516192768\n" in hardware.target_config
    assert len(target("2xmine", hardware).devices) == 2


@pytest.mark.cuda_compiler
def test_a_step_for_devices_that_are_not_here_does_not_begin(tmp_path: Path) -> None:
    """jax raised `'Executable' object has no attribute 'local_devices'`."""
    model = jp.Model(init=lambda key: {"w": jnp.ones((8, 4))}, loss=lambda p, b, key: (b["x"] @ p["w"]).mean())
    local_step = jp.make_train_step(model, optax.sgd(0.1), "fsdp")
    state = local_step.init(jax.random.key(0))
    local_step.save(tmp_path, state).wait()
    step = jp.make_train_step(model, optax.sgd(0.1), "fsdp", mesh=target("8xH100").devices)
    for begin in (
        lambda: step.init(jax.random.key(0)),
        lambda: step.init(jax.random.key(0), params=local_step.params(state)),
        lambda: step.restore(tmp_path),
        lambda: step.restore(tmp_path, weights_only=True),
    ):
        with pytest.raises(ValueError, match=r"the step is for 8 x NVIDIA H100.*, which are not here: .*mesh="):
            begin()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_slices_of_tpus() -> None:
    gpus = target("v5e:4x4")
    assert (gpus.kind, gpus.hosts, gpus.per_host, len(gpus.devices)) == ("v5e", 4, 4, 16)
    for kind, shape in {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}.items():
        assert target(f"{kind}:{shape}").devices[0].device_kind == KINDS[kind].device_kind
    text, _ = compile_matmul(gpus.devices, jnp.bfloat16)
    assert "all-reduce" in text
    with pytest.raises(ValueError, match="target='v5e:3x5' is not a slice that the compiler knows: "):
        target("v5e:3x5")
