"""Where processes of a test, or of a bench, meet."""

import secrets
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from unfuse.service.settings import load
from unfuse.service.worker import worker_options
from unfuse.wire.address import UNIX
from unfuse.wire.unix_socket import private_socket, server_socket
from unfuse.worker.registration import WorkerOptions

LOWEST, MOST = 10_240, 65_535

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that the system gives to whoever asks for any, and to outgoing connections."""


def free_ports(count: int) -> list[int]:
    """TCP ports of this host at which nobody listens, each another.

    They lie below those that the system gives away, since another process could be given one of these meanwhile; unless
    it gives away nearly all.
    """
    lowest_given = int(EPHEMERAL.read_text().split()[0])
    highest = lowest_given - 1 if lowest_given > 2 * LOWEST else MOST
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port = LOWEST + secrets.randbelow(highest - LOWEST)
            try:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue  # somebody listens there
            ports.append(port)
    return ports


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
