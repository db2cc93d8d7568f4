"""Fragmented MP4 (ISO/IEC 14496-12) of one H.264 track, played as it grows: a head, then a fragment a frame.

The bytes depend on nothing but the frames: whoever has the same encoded frames writes the same stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from struct import pack, unpack

START_CODE = re.compile(rb"\x00+\x00\x01")
TYPE, IDR, SEQUENCE, PICTURE = 31, 5, 7, 8
"""The bits of a NAL unit's first byte that are its type; the types of IDR pictures and of both sets of parameters."""

MATRIX = pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)  # shown as it is: neither turned nor scaled
KEY, OTHER = 0x02000000, 0x01010000  # flags of a frame that can be decoded by itself, and of one that needs others

ONLY_TRACK = 1


def exact_rate(fps: float) -> Fraction:
    """Frames a second as videos have them."""
    return Fraction(fps).limit_denominator(1001)


class Fragments:
    """Writes a stream of frames of one size at one rate, all shown in the order in which they are decoded.

    `avcc` is the decoder configuration record (ISO/IEC 14496-15) that MP4 files have.
    """

    def __init__(self, width: int, height: int, rate: Fraction, avcc: bytes) -> None:
        self._width, self._height, self._rate, self._avcc = width, height, rate, avcc
        self._frames = 0

    def head(self) -> bytes:
        """What the stream begins with."""
        rate, numbers = self._rate.numerator, pack(">6H", 1, 0, 0, 0, 0, 0)
        movie = _full(b"mvhd", pack(">4I", 0, 0, rate, 0), pack(">IHHII", 0x10000, 0x100, 0, 0, 0), MATRIX, bytes(24),
                      pack(">I", ONLY_TRACK + 1))  # fmt: skip
        track = _full(b"tkhd", pack(">5I", 0, 0, ONLY_TRACK, 0, 0), bytes(16), MATRIX,
                      pack(">2I", self._width << 16, self._height << 16), flags=3)  # fmt: skip
        undefined = 0x55C4
        media = _full(b"mdhd", pack(">4IHH", 0, 0, rate, 0, undefined, 0))
        shown = _full(b"hdlr", bytes(4), b"vide", bytes(12), b"video\0")
        place = _box(b"dinf", _full(b"dref", pack(">I", 1), _full(b"url ", flags=1)))
        looks = pack(">HHIIIH", self._width, self._height, 0x480000, 0x480000, 0, 1) + bytes(32) + pack(">Hh", 24, -1)
        entry = _box(b"avc1", bytes(6), numbers[:2], bytes(16), looks, _box(b"avcC", self._avcc))
        none_yet = b"".join(_full(kind, bytes(4)) for kind in (b"stts", b"stsc")) + _full(b"stsz", bytes(8))
        samples = _box(b"stbl", _full(b"stsd", pack(">I", 1), entry), none_yet, _full(b"stco", bytes(4)))
        about = _box(b"minf", _full(b"vmhd", bytes(8), flags=1), place, samples)
        extends = _box(b"mvex", _full(b"trex", pack(">5I", ONLY_TRACK, 1, self._rate.denominator, 0, 0)))
        brands = b"iso5" + pack(">I", 512) + b"iso5iso6avc1mp41"
        whole = _box(b"trak", track, _box(b"mdia", media, shown, about))
        return _box(b"ftyp", brands) + _box(b"moov", movie, whole, extends)

    def fragment(self, frame: bytes) -> bytes:
        """The next frame, its NAL units each behind its length."""
        began, self._frames = self._frames * self._rate.denominator, self._frames + 1
        track = _full(b"tfhd", pack(">I", ONLY_TRACK), flags=0x20000)
        times = _full(b"tfdt", pack(">Q", began), version=1)
        run = pack(">3I", self._rate.denominator, len(frame), KEY if _begins_anew(frame) else OTHER)
        size = len(self._moof(track, times, run, 0))
        return self._moof(track, times, run, size + 8) + _box(b"mdat", frame)

    def _moof(self, track: bytes, times: bytes, run: bytes, offset: int) -> bytes:
        number = _full(b"mfhd", pack(">I", self._frames))
        samples = _full(b"trun", pack(">2I", 1, offset), run, flags=0x701)
        return _box(b"moof", number, _box(b"traf", track, times, samples))


def _begins_anew(frame: bytes) -> bool:
    """Whether no frame behind this one needs one before it: then it is coded as an IDR picture."""
    while frame:
        (size,) = unpack(">I", frame[:4])
        if frame[4] & TYPE == IDR:
            return True
        frame = frame[4 + size :]
    return False


def units(encoded: bytes) -> list[bytes]:
    """The NAL units of what an encoder made, without the start codes between them."""
    return [unit for unit in START_CODE.split(encoded) if unit]


def with_lengths(encoded: bytes) -> bytes:
    """An encoded frame as MP4 has it: each NAL unit behind its length."""
    return b"".join(pack(">I", len(unit)) + unit for unit in units(encoded))


def configuration(parameters: bytes) -> bytes:
    """The decoder configuration record of an encoder's parameters: one set of the sequence, one of pictures."""
    kinds = {unit[0] & TYPE: unit for unit in units(parameters)}
    sequence, picture = kinds[SEQUENCE], kinds[PICTURE]
    color_420_of_8_bits = b"\xfd\xf8\xf8\0" if sequence[1] >= 100 else b""
    lengths_of_4_bytes, one = b"\xff", b"\xe1"
    record = b"\1" + sequence[1:4] + lengths_of_4_bytes + one + pack(">H", len(sequence)) + sequence
    return record + b"\1" + pack(">H", len(picture)) + picture + color_420_of_8_bits


def streamed(path: Path, fps: float) -> Iterator[bytes]:
    """A finished MP4 file as the stream that was written while it was made: the head, then frame after frame."""
    import av

    with av.open(str(path)) as container:
        codec = container.streams.video[0].codec_context
        fragments = Fragments(codec.width, codec.height, exact_rate(fps), codec.extradata or b"")
        yield fragments.head()
        for packet in container.demux(video=0):
            if packet.size:
                yield fragments.fragment(bytes(packet))


def _box(kind: bytes, *content: bytes) -> bytes:
    size = 8 + sum(map(len, content))
    return pack(">I", size) + kind + b"".join(content)


def _full(kind: bytes, *content: bytes, version: int = 0, flags: int = 0) -> bytes:
    """A box with a version and flags."""
    return _box(kind, pack(">I", version << 24 | flags), *content)
