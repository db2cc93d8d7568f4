"""Fragmented MP4 (ISO/IEC 14496-12) with one H.264 track: streamed while it is encoded.

The stream is a header, then one fragment per frame. Its bytes depend on the encoded frames only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from struct import pack, unpack

#: The start code between NAL units.
START_CODE = re.compile(rb"\x00+\x00\x01")

#: The bits of a NAL unit's first byte that are its type.
TYPE = 31
#: The NAL unit type of IDR pictures.
IDR = 5
#: The NAL unit types of sequence and picture parameter sets.
SEQUENCE, PICTURE = 7, 8

#: The identity: frames are neither rotated nor scaled.
MATRIX = pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
#: Sample flags of a frame that can be decoded by itself, and of one that needs others.
KEY, OTHER = 0x02000000, 0x01010000

#: The id of the track.
ONLY_TRACK = 1


def exact_rate(fps: float) -> Fraction:
    """Return frames per second as the exact fraction that videos use."""
    return Fraction(fps).limit_denominator(1001)


class Fragments:
    """Writes a stream of frames of one size at one rate, in display order.

    `rate`: frames per second.
    `avcc`: the decoder configuration record of MP4 files (ISO/IEC 14496-15).
    """

    def __init__(self, width: int, height: int, rate: Fraction, avcc: bytes) -> None:
        self._width = width
        self._height = height
        self._rate = rate
        self._avcc = avcc
        self._frames = 0

    def head(self) -> bytes:
        """Return the header of the stream: the boxes `ftyp` and `moov`."""
        rate, reserved = self._rate.numerator, pack(">6H", 1, 0, 0, 0, 0, 0)

        times = pack(">4I", 0, 0, rate, 0)
        rate_and_volume = pack(">IHHII", 0x10000, 0x100, 0, 0, 0)
        mvhd = _full_box(b"mvhd", times, rate_and_volume, MATRIX, bytes(24), pack(">I", ONLY_TRACK + 1))

        ids = pack(">5I", 0, 0, ONLY_TRACK, 0, 0)
        size = pack(">2I", self._width << 16, self._height << 16)
        tkhd = _full_box(b"tkhd", ids, bytes(16), MATRIX, size, flags=3)

        undefined_language = 0x55C4
        mdhd = _full_box(b"mdhd", pack(">4IHH", 0, 0, rate, 0, undefined_language, 0))
        hdlr = _full_box(b"hdlr", bytes(4), b"vide", bytes(12), b"video\0")
        dinf = _box(b"dinf", _full_box(b"dref", pack(">I", 1), _full_box(b"url ", flags=1)))

        # 0x480000 is 72 dpi, 24 are the bits per pixel. Both are fixed by the standard.
        visual_entry = (
            pack(">HHIIIH", self._width, self._height, 0x480000, 0x480000, 0, 1) + bytes(32) + pack(">Hh", 24, -1)
        )

        avc1 = _box(b"avc1", bytes(6), reserved[:2], bytes(16), visual_entry, _box(b"avcC", self._avcc))

        # The tables are empty, because all samples are in fragments.
        empty_tables = b"".join(_full_box(kind, bytes(4)) for kind in (b"stts", b"stsc")) + _full_box(b"stsz", bytes(8))
        stbl = _box(b"stbl", _full_box(b"stsd", pack(">I", 1), avc1), empty_tables, _full_box(b"stco", bytes(4)))
        minf = _box(b"minf", _full_box(b"vmhd", bytes(8), flags=1), dinf, stbl)
        mvex = _box(b"mvex", _full_box(b"trex", pack(">5I", ONLY_TRACK, 1, self._rate.denominator, 0, 0)))

        brands = b"iso5" + pack(">I", 512) + b"iso5iso6avc1mp41"
        trak = _box(b"trak", tkhd, _box(b"mdia", mdhd, hdlr, minf))
        return _box(b"ftyp", brands) + _box(b"moov", mvhd, trak, mvex)

    def fragment(self, frame: bytes) -> bytes:
        """Return the next frame as a fragment: the boxes `moof` and `mdat`.

        `frame`: NAL units, each after its length in 4 bytes.
        """
        decode_time = self._frames * self._rate.denominator
        self._frames += 1

        tfhd = _full_box(b"tfhd", pack(">I", ONLY_TRACK), flags=0x20000)
        tfdt = _full_box(b"tfdt", pack(">Q", decode_time), version=1)
        sample = pack(">3I", self._rate.denominator, len(frame), KEY if _is_key_frame(frame) else OTHER)

        # The data begins after this box and the header of `mdat`, 8 bytes. The offset has a fixed width, so a pass with
        # offset 0 gives the size of the box.
        moof_size = len(self._moof(tfhd, tfdt, sample, 0))
        return self._moof(tfhd, tfdt, sample, moof_size + 8) + _box(b"mdat", frame)

    def _moof(self, tfhd: bytes, tfdt: bytes, sample: bytes, offset: int) -> bytes:
        """Return the `moof` box of the current frame.

        `offset`: bytes from its start to the frame's data.
        """
        mfhd = _full_box(b"mfhd", pack(">I", self._frames))
        trun = _full_box(b"trun", pack(">2I", 1, offset), sample, flags=0x701)
        return _box(b"moof", mfhd, _box(b"traf", tfhd, tfdt, trun))


def _is_key_frame(frame: bytes) -> bool:
    """Return whether a frame is a random access point: an IDR picture."""
    while frame:
        (size,) = unpack(">I", frame[:4])
        if frame[4] & TYPE == IDR:
            return True
        frame = frame[4 + size :]
    return False


def units(encoded: bytes) -> list[bytes]:
    """Return the NAL units of encoded data, without the start codes between them."""
    return [unit for unit in START_CODE.split(encoded) if unit]


def with_lengths(encoded: bytes) -> bytes:
    """Return an encoded frame as MP4 stores it: each NAL unit after its length.

    Lengths have 4 bytes.
    """
    return b"".join(pack(">I", len(unit)) + unit for unit in units(encoded))


def configuration(parameters: bytes) -> bytes:
    """Return the decoder configuration record for an encoder's parameter sets.

    `parameters`: one sequence parameter set and one picture parameter set, with start codes.
    """
    kinds = {unit[0] & TYPE: unit for unit in units(parameters)}
    sequence, picture = kinds[SEQUENCE], kinds[PICTURE]
    high_profile_fields = b"\xfd\xf8\xf8\0" if sequence[1] >= 100 else b""
    lengths_of_4_bytes, one_set = b"\xff", b"\xe1"
    record = b"\1" + sequence[1:4] + lengths_of_4_bytes + one_set + pack(">H", len(sequence)) + sequence
    return record + b"\1" + pack(">H", len(picture)) + picture + high_profile_fields


def streamed(path: Path, fps: float) -> Iterator[bytes]:
    """Yield a finished MP4 file as the stream that was written while it was encoded.

    The header first, then one fragment per frame.
    """
    import av

    with av.open(str(path)) as container:
        codec = container.streams.video[0].codec_context
        fragments = Fragments(codec.width, codec.height, exact_rate(fps), codec.extradata or b"")
        yield fragments.head()
        for packet in container.demux(video=0):
            if packet.size:
                yield fragments.fragment(bytes(packet))


def _box(kind: bytes, *content: bytes) -> bytes:
    """Return a box: its size, its type and its content."""
    size = 8 + sum(map(len, content))
    return pack(">I", size) + kind + b"".join(content)


def _full_box(kind: bytes, *content: bytes, version: int = 0, flags: int = 0) -> bytes:
    """Return a full box: one with a version and flags."""
    return _box(kind, pack(">I", version << 24 | flags), *content)
