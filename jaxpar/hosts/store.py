"""The table of keys that all processes of a run share. JAX's coordinator stores it, in process 0.

It connects the processes without a device, and so works where their programs differ.
"""

from __future__ import annotations

from typing import Protocol

import jax
from jax._src import distributed  # the public module starts and ends the client, but does not expose it


class Store(Protocol):
    """Keys and values that all processes read and write.

    If the coordinator is gone or silent, every call may raise, or never return.
    """

    def set(self, key: str, value: str) -> None:
        """Set a key; a later call overwrites its value."""
        ...

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it is not set."""
        ...

    def folder(self, name: str) -> dict[str, str]:
        """Return all keys below `name/`, without that prefix, and their values."""
        ...

    def wait(self, name: str, seconds: float) -> bool:
        """Wait until every process has called this with the same name, once each; return whether all did in time."""
        ...


class Coordinator:
    """The `Store` of JAX's coordinator; `jax.distributed.initialize` comes before it."""

    def __init__(self) -> None:
        assert distributed.global_state.client is not None
        self._client = distributed.global_state.client

    def set(self, key: str, value: str) -> None:
        """Set a key; see `Store`."""
        self._client.key_value_set(f"jaxpar/{key}", value, allow_overwrite=True)

    def get(self, key: str) -> str | None:
        """Return the value of a key; see `Store`."""
        try:
            return self._client.key_value_try_get(f"jaxpar/{key}")
        except jax.errors.JaxRuntimeError as error:
            # The client has no other way to say that a key is not set.
            if "NOT_FOUND" in str(error):
                return None
            raise

    def folder(self, name: str) -> dict[str, str]:
        """Return all keys below `name/`; see `Store`."""
        prefix = f"jaxpar/{name}/"
        return {key.removeprefix(prefix): value for key, value in self._client.key_value_dir_get(prefix)}

    def wait(self, name: str, seconds: float) -> bool:
        """Wait at a barrier of this name; see `Store`."""
        try:
            self._client.wait_at_barrier(f"jaxpar/{name}", round(1000 * seconds))
        except jax.errors.JaxRuntimeError:  # a process has failed or is late; the watchdog says which
            return False
        return True
