"""A peer that speaks ZMTP by hand, so that it can say what no library would."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4


def header(length: int, flags: int = 0) -> bytes:
    """What goes before so many bytes."""
    return bytes([flags | LONG]) + length.to_bytes(8, "big") if length > 255 else bytes([flags, length])


def frame(body: bytes, flags: int = 0) -> bytes:
    return header(len(body), flags) + body


def message(*parts: bytes) -> bytes:
    return b"".join(frame(part, MORE) for part in parts[:-1]) + frame(parts[-1])


def metadata(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


READY = frame(b"\x05READY" + metadata(b"Socket-Type", b"DEALER") + metadata(b"Identity", b""), COMMAND)
PING = frame(b"\x04PING\0\0context", COMMAND)
PONG = frame(b"\x04PONGcontext", COMMAND)


class Peer:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def at(cls, address: str, introduced: bool = False) -> Peer:
        """A connection to a control address, through the handshake if asked."""
        parts = urlsplit(address)
        if parts.scheme == "unix":
            peer = cls(*await asyncio.open_unix_connection(parts.path))
        else:
            peer = cls(*await asyncio.open_connection(parts.hostname, parts.port))
        if introduced:
            peer.say(GREETING + READY)
            await peer.reader.readexactly(len(GREETING))
            await peer.hear()
        return peer

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self) -> bytes:
        """The body of the next frame."""
        flags, length = await self.reader.readexactly(2)
        if flags & LONG:
            length = int.from_bytes(bytes([length]) + await self.reader.readexactly(7), "big")
        return await self.reader.readexactly(length)

    async def gone(self) -> bool:
        """Wait until the other end has ended it."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
        self.close()
        return True

    def deaf(self) -> None:
        """Read nothing any more."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    @property
    def ended(self) -> bool:
        """Whether that showed as it wrote."""
        return self._writer.transport.is_closing()

    def close(self) -> None:
        self._writer.close()
