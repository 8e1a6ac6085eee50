"""gRPC with messages of `wire.py`: no generated code, one service of methods from bytes to bytes.

gRPC brings what a protocol of our own would have to: frames over TCP, deadlines, many calls on one connection, and a
status that says whether the other end is dead, late, or has refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .clocks import Lost
from .wire import Fields, decode, encode

Method = Callable[[Fields, list[np.ndarray]], bytes]
_SERVICE = "jaxpar.AsyncServer"
_LARGEST = 2**31 - 1  # bytes of one gRPC message: its length is an int32


def grpc() -> Any:
    """The package, which only who uses this needs."""
    try:
        return importlib.import_module("grpc")
    except ImportError as error:
        raise ValueError("the asynchronous server needs grpcio, which is not installed: pip install grpcio") from error


def check_size(count: int) -> None:
    """Raises ValueError where parameters of so many bytes do not fit into one message."""
    if count > _LARGEST - 2**20:
        raise ValueError(
            f"the parameters are {count:,} bytes, and a gRPC message holds {_LARGEST:,}; "
            "train such a model with a strategy that shards it, such as fsdp"
        )


def _options() -> list[tuple[str, int]]:
    lengths = [(f"grpc.max_{way}_message_length", _LARGEST) for way in ("send", "receive")]
    # A proxy of the environment is for the web, not for hosts of one run. Two servers on one port would share workers.
    return [*lengths, ("grpc.enable_http_proxy", 0), ("grpc.so_reuseport", 0)]


def serve(address: str, methods: Mapping[str, Method], threads: int) -> tuple[Any, str]:
    """Starts a server that answers to `methods`: it, and its address with the port that it got for port 0.

    A method's ValueError is the caller's fault, and `Lost` says that it takes part no more; both travel as sentences.
    Raises OSError where the address cannot be bound.
    """
    rpc = grpc()

    def handler(method: Method) -> Any:
        def answer(message: bytes, context: Any) -> bytes:
            try:
                return method(*decode(message))
            except Lost as error:
                context.abort(rpc.StatusCode.ABORTED, str(error))
            except ValueError as error:
                context.abort(rpc.StatusCode.INVALID_ARGUMENT, str(error))
            except (KeyError, TypeError) as error:  # a field is missing, or of another type
                context.abort(rpc.StatusCode.INVALID_ARGUMENT, f"this message cannot be: {error!r}")
            raise AssertionError  # abort raises

        return rpc.unary_unary_rpc_method_handler(answer)

    handlers = {name: handler(method) for name, method in methods.items()}
    server = rpc.server(ThreadPoolExecutor(threads, "jaxpar-async"), options=_options())
    server.add_generic_rpc_handlers((rpc.method_handlers_generic_handler(_SERVICE, handlers),))
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address={address!r} needs a host and a port, as in 127.0.0.1:0")
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"{address} cannot be bound ({error}); use another port, or 0 for a free one") from error
    server.start()
    return server, f"{host}:{bound}"


class Client:
    """Calls of one worker to the server at `address`, each of which ends within `deadline` seconds.

    `who` begins the sentences of its errors: ConnectionError where the server does not answer or has given this worker
    up, ValueError where it refuses.
    """

    def __init__(self, address: str, deadline: float, who: str):
        self.address, self.deadline, self.who = address, deadline, who
        self._rpc = grpc()
        self._channel = self._rpc.insecure_channel(address, options=_options())

    def __call__(
        self, method: str, fields: Fields, arrays: Sequence[np.ndarray] = (), wait: bool = False
    ) -> tuple[Fields, list[np.ndarray]]:
        """The answer's fields and arrays. `wait` for a server that has not started yet, until the deadline."""
        codes = self._rpc.StatusCode
        call = self._channel.unary_unary(f"/{_SERVICE}/{method}")
        try:
            return decode(call(encode(fields, arrays), timeout=self.deadline, wait_for_ready=wait))
        except self._rpc.RpcError as error:
            if error.code() == codes.INVALID_ARGUMENT:
                raise ValueError(f"{self.who}: {error.details()}") from error
            if error.code() == codes.ABORTED:
                raise ConnectionError(f"{self.who}: {error.details()}") from error
            reason = {
                codes.DEADLINE_EXCEEDED: f"does not answer within {self.deadline:g} s",
                codes.UNAVAILABLE: "cannot be reached",
                codes.CANCELLED: "has stopped",
            }.get(error.code(), f"failed ({error.code().name}: {error.details()})")
            raise ConnectionError(
                f"{self.who}: the server at {self.address} {reason} ({method}); see what it printed last, start it "
                "again, then its workers"
            ) from error

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()
