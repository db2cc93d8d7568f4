"""Which addresses control messages may be sent and received on, and who is trusted there."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from unfuse.core.codec import MAX_BYTES
from unfuse.core.errors import ConfigError, UsageError
from unfuse.wire.keys import Keys
from unfuse.wire.run_folder import MAX_PATH, open_run_folder

OUTSIDE = "192.0.2.1"
"""An address of nobody's (RFC 5737) beyond every network of ours."""

HIGH_WATER = 1000
"""Messages that may wait in one direction of one connection."""

UNIX = "unix:"

INSECURE: Final = "insecure"
"""Who reaches an address is trusted, whoever it is."""

Trust = Keys | Literal["insecure"] | None
"""Whom one believes over TCP: who holds the keys, everyone, or nobody. A unix socket is believed for its folder."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that host name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def keys_for(address: str, trust: Trust = None) -> Keys | None:
    """The keys to speak by at a control address; None where none are needed. Raises ConfigError if it must not be used.

    TCP can be reached by other users of this machine, on loopback too, so it takes keys, or INSECURE.
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
        raise UsageError(f"{address!r} is no control address: write {hint} or unix:/PATH")
    if trust is None:
        raise ConfigError(
            f"{address} can be reached by others: make keys by `unfuse keys new DIR` and give them to schedulers and "
            "workers as --keys DIR; or use a unix socket, or --insecure-listen where all who reach it may be trusted"
        )
    return trust if isinstance(trust, Keys) else None


def unix_path(address: str) -> Path | None:
    """Where the socket of a unix address lies; None for another. Raises UsageError for a path that none can have."""
    if not address.startswith(UNIX):
        return None
    path = Path(address.removeprefix(UNIX))
    if not path.is_absolute() or len(os.fsencode(path)) > MAX_PATH:
        raise UsageError(f"{address!r} is no control address: write unix:/PATH, of at most {MAX_PATH} bytes")
    return path


def endpoint(address: str) -> str:
    """A control address as the library connects to it.

    Raises ConfigError for a unix socket in a folder where another user could have made it: this is how who listens is
    known to be of this user.
    """
    if path := unix_path(address):
        open_run_folder(path.parent)
        return f"ipc://{path}"
    return address


def host_towards(*addresses: str) -> str:
    """The host by which whoever listens at these control addresses, and others there, reach this machine.

    Of several the first counts that leads beyond this machine. Raises ConfigError for one that leads nowhere from here.
    """
    outward = [one for one in addresses if not unix_path(one) and not is_loopback(urlsplit(one).hostname or "")]
    if not outward:
        return "127.0.0.1"
    parts = urlsplit(outward[0])
    host = OUTSIDE if parts.hostname == "0.0.0.0" else parts.hostname  # of all our addresses, the one that leads out
    try:
        ((family, _, _, _, there), *_) = socket.getaddrinfo(host, parts.port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(there)  # sends nothing: it only chooses the way
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no way from here to {outward[0]}: {error.strerror}") from error


def open_socket(kind: int, context: zmq.asyncio.Context | None = None) -> zmq.asyncio.Socket:
    """A ZMQ socket whose memory is bounded: message size, messages in flight, and nothing kept after close."""
    opened = (context or zmq.asyncio.Context.instance()).socket(kind)
    opened.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    opened.setsockopt(zmq.SNDHWM, HIGH_WATER)
    opened.setsockopt(zmq.RCVHWM, HIGH_WATER)
    opened.setsockopt(zmq.LINGER, 0)
    return opened
