"""Control addresses: where control messages are sent and received, and whom each side trusts there."""

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
"""Who is trusted over TCP: who holds the keys, everyone, or nobody. A unix socket is trusted because of its folder."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this host name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def keys_for(address: str, trust: Trust = None) -> Keys | None:
    """The keys to use at a control address; None where none are needed. Raises ConfigError if it must not be used.

    TCP needs keys, or INSECURE, because other users of this machine can reach it, on loopback too.
    """
    if unix_path(address):
        return None
    try:
        parts = urlsplit(address)
        known = parts.scheme == "tcp" and parts.hostname and parts.port is not None
    except ValueError:
        known = False
    if not known:
        hint = f"tcp://{address}" if address.count(":") == 1 and "/" not in address else "tcp://127.0.0.1:8001"
        raise UsageError(f"{address!r} is not a control address: write {hint} or unix:/PATH")
    if trust is None:
        raise ConfigError(
            f"{address} can be reached by others: make keys by `unfuse keys new DIR` and give them to schedulers and "
            "workers as --keys DIR; or use a unix socket, or --insecure-listen where all who reach it may be trusted"
        )
    return trust if isinstance(trust, Keys) else None


def unix_path(address: str) -> Path | None:
    """The path of a unix address; None for other addresses. Raises UsageError for a path that no socket can have."""
    if not address.startswith(UNIX):
        return None
    path = Path(address.removeprefix(UNIX))
    if not path.is_absolute() or len(os.fsencode(path)) > MAX_PATH:
        raise UsageError(f"{address!r} is not a control address: write unix:/PATH, of at most {MAX_PATH} bytes")
    return path


def endpoint(address: str) -> str:
    """A control address as ZMQ connects to it.

    Raises ConfigError for a unix socket in a folder where another user could have made it. So whoever listens there is
    this user.
    """
    if path := unix_path(address):
        open_run_folder(path.parent)
        return f"ipc://{path}"
    return address


def host_towards(*addresses: str) -> str:
    """The address of this machine on the network of the first of these control addresses that is not on this machine.

    127.0.0.1 if all are. Raises ConfigError if there is no route to it.
    """
    outward = [one for one in addresses if not unix_path(one) and not is_loopback(urlsplit(one).hostname or "")]
    if not outward:
        return "127.0.0.1"
    parts = urlsplit(outward[0])
    host = OUTSIDE if parts.hostname == "0.0.0.0" else parts.hostname  # of all our addresses, the one that leads out
    try:
        ((family, _, _, _, there), *_) = socket.getaddrinfo(host, parts.port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(there)  # sends nothing: it only chooses the route
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no route from here to {outward[0]}: {error.strerror}") from error


def open_socket(kind: int, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A ZMQ socket whose memory is bounded: message size, messages in flight, and nothing kept after close."""
    opened = context.socket(kind)
    opened.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    opened.setsockopt(zmq.SNDHWM, HIGH_WATER)
    opened.setsockopt(zmq.RCVHWM, HIGH_WATER)
    opened.setsockopt(zmq.LINGER, 0)
    return opened
