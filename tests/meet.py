"""Where processes of a test, or of a bench, meet."""

from typing import Any

from msgspec.structs import replace

from unfuse.service.settings import load
from unfuse.service.worker import worker_options
from unfuse.wire.address import UNIX
from unfuse.wire.unix_socket import private_socket, server_socket
from unfuse.worker.worker import WorkerOptions


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
