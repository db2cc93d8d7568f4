"""Floods a control address until it is ended: `python -m tests.integration.flood ADDRESS KIND [KEYS]`.

Writes a line for each connection that was dropped. Kinds: `tiny` frames, `large` ones, and `asked`, which reads every
answer before it asks again as fast as it can.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from threading import Thread
from urllib.parse import urlsplit

import zmq

from tests.wire.zmtp import GREETING, READY, frame, message
from unfuse.core.codec import MAX_BYTES, encode
from unfuse.core.messages import Heartbeat
from unfuse.wire.keys import Keys, read_keys

THREADS = 4
ASKED = message(b"1", encode(Heartbeat())) * 30
FLOODS = {
    "tiny": frame(b"x") * 20_000,
    "large": message(b"1", b"\x01" + bytes(MAX_BYTES - 1)),
    "asked": ASKED,
}


def told() -> None:
    """Write a whole line at once: there are several threads."""
    os.write(1, b"dropped\n")


def plain(address: str, kind: str) -> None:
    """One connection after another, by hand."""
    parts = urlsplit(address)
    while True:
        with socket.socket(socket.AF_UNIX if parts.scheme == "unix" else socket.AF_INET) as peer, suppress(OSError):
            peer.settimeout(60)
            peer.connect(parts.path if parts.scheme == "unix" else (parts.hostname, parts.port))
            peer.sendall(GREETING + READY)
            peer.recv(len(GREETING), socket.MSG_WAITALL)
            while True:
                peer.sendall(FLOODS[kind])
                if kind == "asked" and not peer.recv(1 << 16):
                    break
        told()


def keyed(address: str, kind: str, keys: Keys) -> None:
    """The same by the library, which connects again by itself."""
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.setsockopt(zmq.RECONNECT_IVL, 1)
    keys.secure(peer, server=False)  # type: ignore[arg-type]
    events = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.connect(address)
    body = b"x" if kind == "tiny" else b"\x01" + bytes(MAX_BYTES - 1)
    while True:
        peer.send_multipart([b"1", body])
        while events.poll(0):
            events.recv_multipart()
            told()


def main() -> None:
    address, kind, *folder = sys.argv[1:]
    keys = read_keys(folder[0], "worker") if folder else None
    floods = [
        Thread(target=keyed, args=(address, kind, keys)) if keys else Thread(target=plain, args=(address, kind))
        for _ in range(THREADS)
    ]
    for flood in floods:
        flood.start()


main()
