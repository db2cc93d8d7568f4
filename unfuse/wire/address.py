"""Control addresses: how they are parsed, and which peers are trusted there."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import zmq

from unfuse.core.codec import MAX_BYTES
from unfuse.core.errors import ConfigError, UsageError
from unfuse.wire.keys import Keys
from unfuse.wire.run_folder import MAX_PATH, open_run_folder

OUTSIDE = "192.0.2.1"  # a documentation address (RFC 5737), which is outside of every real network
HIGH_WATER = 1000  # the most messages that wait in one direction of one connection

UNIX = "unix:"

INSECURE: Final = "insecure"  # trust everyone who can reach an address

Trust = Keys | Literal["insecure"] | None
"""Peers that are trusted over TCP: those with the keys, all, or none. A unix socket is trusted by its folder."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this host name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def keys_for(address: str, trust: Trust = None) -> Keys | None:
    """The keys to use at a control address; None where none are needed.

    Raises UsageError for a malformed address, and ConfigError for TCP without trust. TCP needs keys, or INSECURE,
    because other users of this machine can reach it, on loopback too.
    """
    if unix_path(address):
        return None
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme == "tcp" and parts.hostname and parts.port is not None
    except ValueError:
        is_valid = False
    if not is_valid:
        hint = f"tcp://{address}" if address.count(":") == 1 and "/" not in address else "tcp://127.0.0.1:8001"
        raise UsageError(f"{address!r} is not a control address: write {hint} or unix:/PATH")
    if trust is None:
        raise ConfigError(
            f"{address} can be reached by others: make keys by `unfuse keys new DIR` and give them to schedulers and "
            "workers as --keys DIR; or use a unix socket, or --insecure-listen where all who reach it may be trusted"
        )
    return trust if isinstance(trust, Keys) else None


def unix_path(address: str) -> Path | None:
    """The path of a unix address; None for other addresses.

    Raises UsageError for a path that no socket can have.
    """
    if not address.startswith(UNIX):
        return None
    path = Path(address.removeprefix(UNIX))
    if not path.is_absolute() or len(os.fsencode(path)) > MAX_PATH:
        raise UsageError(f"{address!r} is not a control address: write unix:/PATH, of at most {MAX_PATH} bytes")
    return path


def endpoint(address: str) -> str:
    """A control address as ZMQ connects to it.

    Raises ConfigError for a unix socket in a folder where another user could have created it. So the process that
    listens there belongs to this user.
    """
    if path := unix_path(address):
        open_run_folder(path.parent)
        return f"ipc://{path}"
    return address


def host_towards(*addresses: str) -> str:
    """The address of this machine that the first remote control address can reach.

    127.0.0.1 if all addresses are on this machine. Raises ConfigError if there is no route to it.
    """
    remote_addresses = [
        address for address in addresses if not unix_path(address) and not is_loopback(urlsplit(address).hostname or "")
    ]
    if not remote_addresses:
        return "127.0.0.1"
    parts = urlsplit(remote_addresses[0])
    # of all our addresses, the one that leads out; "::" also accepts connections over IPv4
    host = OUTSIDE if parts.hostname in ("0.0.0.0", "::") else parts.hostname
    try:
        ((family, _, _, _, destination), *_) = socket.getaddrinfo(host, parts.port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no route from here to {remote_addresses[0]}: {error.strerror}") from error


def open_socket(kind: int, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A ZMQ socket with bounded memory.

    The size of a message and the number of queued messages are limited, and unsent messages are dropped on close.
    """
    zmq_socket = context.socket(kind)
    zmq_socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    zmq_socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    zmq_socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    zmq_socket.setsockopt(zmq.LINGER, 0)
    return zmq_socket
