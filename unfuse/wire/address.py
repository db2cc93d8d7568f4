"""Which addresses control messages may be sent and received on."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from unfuse.core.codec import MAX_BYTES
from unfuse.core.errors import ConfigError
from unfuse.wire.keys import Keys

OUTSIDE = "192.0.2.1"
"""An address of nobody's (RFC 5737) beyond every network of ours."""

HIGH_WATER = 1000
"""Messages that may wait in one direction of one connection."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that host name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check(address: str, keys: Keys | None = None) -> str:
    """Return a control address that may be used, beyond this machine only with keys; raises ConfigError otherwise."""
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or parts.port is None:
        raise ConfigError(f"{address!r} is no control address: write tcp://127.0.0.1:8001")
    if not is_loopback(parts.hostname) and keys is None:
        raise ConfigError(
            f"{address} can be reached from other machines: make keys by `unfuse keys new DIR` and give them to "
            "schedulers and workers as --keys DIR, or use 127.0.0.1"
        )
    return address


def host_towards(address: str) -> str:
    """The host by which whoever listens at a control address, and others there, reach this machine.

    Raises ConfigError for an address that leads nowhere from here.
    """
    parts = urlsplit(address)
    host = OUTSIDE if parts.hostname == "0.0.0.0" else parts.hostname  # of all our addresses, the one that leads out
    try:
        ((family, _, _, _, there), *_) = socket.getaddrinfo(host, parts.port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(there)  # sends nothing: it only chooses the way
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no way from here to {address}: {error.strerror}") from error


def open_socket(kind: int, context: zmq.asyncio.Context | None = None) -> zmq.asyncio.Socket:
    """A ZMQ socket whose memory is bounded: message size, messages in flight, and nothing kept after close."""
    opened = (context or zmq.asyncio.Context.instance()).socket(kind)
    opened.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    opened.setsockopt(zmq.SNDHWM, HIGH_WATER)
    opened.setsockopt(zmq.RCVHWM, HIGH_WATER)
    opened.setsockopt(zmq.LINGER, 0)
    return opened
