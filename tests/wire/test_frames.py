"""The cut into frames: the same whatever pieces the bytes come in, and no further than the first bad one."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tests.wire.zmtp import COMMAND, GREETING, LONG, MORE, READY, SIGNATURE, frame, header
from unfuse.wire.frames import FrameReader, ProtocolViolation

FRAMES = st.lists(st.tuples(st.sampled_from([0, MORE, COMMAND]), st.binary(max_size=600)), max_size=8)


@given(FRAMES, st.lists(st.integers(1, 100), min_size=1))
def test_frames_do_not_depend_on_how_the_bytes_are_chunked(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = GREETING + b"".join(frame(body, flags) for flags, body in frames)
    reader, found = FrameReader(1000), []
    while data:
        piece, data = data[: cuts[0]], data[cuts[0] :]
        cuts = cuts[1:] + cuts[:1]
        found += reader.read(piece)
    assert [(flags & ~LONG, length) for flags, length in found] == [(flags, len(body)) for flags, body in frames]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak ZMTP"),
        (b"\x01\x00", "does not speak ZMTP"),
        (b"\xff" * 10, "does not speak ZMTP"),
        (SIGNATURE + b"\x01", "old ZMTP"),
        (SIGNATURE + b"\x00", "old ZMTP"),
        (GREETING + b"\x08\x00", "does not speak ZMTP"),
        (GREETING + b"\xff", "does not speak ZMTP"),
        (GREETING + READY + header(1001), "too large"),
        (GREETING + bytes([LONG]) + (1 << 63).to_bytes(8, "big"), "too large"),
        (GREETING + bytes([LONG]) + b"\xff" * 8, "too large"),
    ],
)
def test_invalid_zmtp_bytes_are_rejected_at_any_chunk_size(data: bytes, reason: str) -> None:
    for pace in (1, len(data)):
        reader = FrameReader(1000)
        with pytest.raises(ProtocolViolation, match=reason):
            for at in range(0, len(data), pace):
                list(reader.read(data[at : at + pace]))
