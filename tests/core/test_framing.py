"""Messages in a stream of bytes: none is lost or made up, and a length is a claim until it is checked."""

from __future__ import annotations

from io import BytesIO

import pytest
from hypothesis import given, strategies as st

from unfuse.core.codec import HEADER_BYTES, frame, length_of, read_message, split_message
from unfuse.core.errors import ProtocolError

MOST = 300


@given(st.lists(st.binary(max_size=MOST)), st.integers(1, 50))
def test_messages_come_back_however_the_stream_is_cut(sent: list[bytes], piece: int) -> None:
    stream, received, found = b"".join(map(frame, sent)), bytearray(), []
    for at in range(0, len(stream), piece):
        received += stream[at : at + piece]
        while (data := split_message(received, MOST)) is not None:
            found.append(data)
    assert (found, received) == (sent, bytearray())
    read = BytesIO(stream).read
    assert [read_message(read, MOST) for _ in sent] == sent


def test_no_room_is_made_for_what_is_too_long() -> None:
    """Given a header alone, then it is refused at once, and nothing more is read."""
    asked: list[int] = []

    def read(count: int) -> bytes:
        asked.append(count)
        return (MOST + 1).to_bytes(HEADER_BYTES, "big")

    for refused in (
        lambda: read_message(read, MOST),
        lambda: split_message(bytearray(read(4)), MOST),
        lambda: length_of(read(4), MOST),
    ):
        with pytest.raises(ProtocolError, match=f"{MOST + 1} bytes.*at most {MOST}"):
            refused()
    assert asked == [HEADER_BYTES] * 3
