"""What an MP4 file says of its video, read from its boxes: sizes are known before anything is decoded, or allocated."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

PATH = (b"moov", b"trak", b"mdia")  # the boxes, each in the one before, that describe a track

MAX_BOXES = 10_000


class Film(NamedTuple):
    """Pixels of a frame, how many frames there are, and how many of them a second."""

    width: int
    height: int
    frames: int
    rate: float


def film_of(data: bytes) -> Film:
    """The first video in a file. Raises ValueError for one that is no MP4 file, or that says it in its fragments."""
    try:
        for track in _inside(memoryview(data), PATH):
            if film := _film(track):
                return film
    except (struct.error, IndexError) as error:
        raise ValueError("a box is cut short") from error
    raise ValueError("it has no video track with frames that are listed at one place")


def _film(track: memoryview) -> Film | None:
    """The video of a track; None of one that is no video."""
    handler, header = (next(_inside(track, (name,)), memoryview(b"")) for name in (b"hdlr", b"mdhd"))
    if bytes(handler[8:12]) != b"vide":
        return None
    scale, duration = struct.unpack(">IQ" if header[0] else ">II", header[20:32] if header[0] else header[12:20])
    lists = b"minf", b"stbl"
    sizes = next(_inside(track, (*lists, b"stsz")), memoryview(b""))
    looks = next(_inside(track, (*lists, b"stsd")), memoryview(b""))
    (frames,) = struct.unpack(">I", sizes[8:12])
    width, height = struct.unpack(">HH", looks[40:44])
    if not all((scale, duration, frames, width, height)):
        return None
    return Film(width, height, frames, frames * scale / duration)


def _inside(data: memoryview, path: tuple[bytes, ...]) -> Iterator[memoryview]:
    """The contents of the boxes at a path."""
    place = 0
    for _ in range(MAX_BOXES):
        if place + 8 > len(data):
            return
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        head = 8
        if size == 1:
            head, (size,) = 16, struct.unpack(">Q", data[place + 8 : place + 16])
        end = place + size if size else len(data)
        if size and size < head or end > len(data):
            raise ValueError("a box is longer than the file, or than it can be")
        if kind == path[0] and len(path) == 1:
            yield data[place + head : end]
        elif kind == path[0]:
            yield from _inside(data[place + head : end], path[1:])
        place = end
    raise ValueError(f"it has more than {MAX_BOXES} boxes")
