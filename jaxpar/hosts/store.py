"""The table of keys that all processes of a run share: JAX's coordinator keeps it, in process 0.

It is the one way between processes that needs no device, and so works where their programs differ.
"""

from __future__ import annotations

from typing import Protocol

import jax
from jax._src import distributed  # the public module starts and ends it, and shows it nowhere


class Store(Protocol):
    """Keys and values of all processes. Where the coordinator is gone or silent, calls raise, or do not return."""

    def set(self, key: str, value: str) -> None:
        """Sets a key, again if need be."""
        ...

    def get(self, key: str) -> str | None:
        """The value of a key, None while it has none."""
        ...

    def folder(self, name: str) -> dict[str, str]:
        """All keys below `name/`, without it, and their values."""
        ...

    def wait(self, name: str, seconds: float) -> bool:
        """Waits until all processes have called it with this name, once each. Whether they have, within the time."""
        ...


class Coordinator:
    """JAX's table; `jax.distributed.initialize` has been called."""

    def __init__(self) -> None:
        assert distributed.global_state.client is not None
        self._client = distributed.global_state.client

    def set(self, key: str, value: str) -> None:
        """See `Store`."""
        self._client.key_value_set(f"jaxpar/{key}", value, allow_overwrite=True)

    def get(self, key: str) -> str | None:
        """See `Store`."""
        try:
            return self._client.key_value_try_get(f"jaxpar/{key}")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def folder(self, name: str) -> dict[str, str]:
        """See `Store`."""
        start = f"jaxpar/{name}/"
        return {key.removeprefix(start): value for key, value in self._client.key_value_dir_get(start)}

    def wait(self, name: str, seconds: float) -> bool:
        """See `Store`."""
        try:
            self._client.wait_at_barrier(f"jaxpar/{name}", round(1000 * seconds))
        except jax.errors.JaxRuntimeError:  # one has failed, or is late; the watchdog says which
            return False
        return True
