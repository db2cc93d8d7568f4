"""Where processes of a test, or of a bench, meet."""

import socket
from contextlib import ExitStack
from typing import Any

from msgspec.structs import replace

from unfuse.service.settings import load
from unfuse.service.worker import worker_options
from unfuse.wire.address import UNIX
from unfuse.wire.unix_socket import private_socket, server_socket
from unfuse.worker.options import WorkerOptions


def free_ports(count: int) -> list[int]:
    """TCP ports of this host at which nobody listens, each another."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def free_port() -> int:
    """A TCP port of this host at which nobody listens."""
    (port,) = free_ports(1)
    return port


def unix_address() -> str:
    """An address in the run folder at which nobody listens yet."""
    return f"{UNIX}{private_socket(load().settings.run_dir)}"


def address_of_server(port: int) -> str:
    """Where the server with that HTTP port meets its workers."""
    return f"{UNIX}{server_socket(load().settings.run_dir, port)}"


def a_worker(*schedulers: str, **changed: Any) -> WorkerOptions:
    """A worker of all stages that has every setting at its default, but for what is `changed`."""
    settings = load({"worker.scheduler": schedulers, "worker.node": "node"}).settings
    return replace(worker_options(settings), **changed)
