"""Processes that run at the same time, as those of several hosts do, and a coordinator's table without them."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]] = (),
    stderr: int = subprocess.PIPE,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a process for each command, and kill those that still run when the block ends."""
    with contextlib.ExitStack() as stack:
        workers = []
        for command, environment in zip(commands, environments or [os.environ] * len(commands), strict=True):
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
            workers.append(stack.enter_context(worker))  # which closes its pipes, and waits for it
            stack.callback(worker.kill)
        yield workers


class Table(dict[str, str]):
    """A `Store` in this process; `is_broken` makes it fail as a coordinator that is gone."""

    is_broken = False

    def set(self, key: str, value: str) -> None:
        if self.is_broken:
            raise RuntimeError("UNAVAILABLE: Socket closed")
        self[key] = value

    def get(self, key: str) -> str | None:  # type: ignore[override]
        return super().get(key)

    def folder(self, name: str) -> dict[str, str]:
        return {key.removeprefix(f"{name}/"): value for key, value in self.items() if key.startswith(f"{name}/")}

    def wait(self, name: str, seconds: float) -> bool:
        return True
