"""Where processes of a test, or of a bench, meet."""

from unfuse.service.settings import load
from unfuse.wire.address import UNIX
from unfuse.wire.unix_socket import private_socket, server_socket


def unix_address() -> str:
    """An address in the run folder at which nobody listens yet."""
    return f"{UNIX}{private_socket(load().settings.run_dir)}"


def address_of_server(port: int) -> str:
    """Where the server with that HTTP port meets its workers."""
    return f"{UNIX}{server_socket(load().settings.run_dir, port)}"
