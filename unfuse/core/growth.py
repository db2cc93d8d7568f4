"""Output that is read while it grows: numbered pieces, such as the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unfuse.core.errors import ProtocolError
from unfuse.core.task import Claim

PIECE_BYTES = 8192  # the most bytes of a piece
MOST_PIECES = 1 << 20  # the most pieces of a stage
PIECES_AT_ONCE = 512  # the most pieces in one call, and in one answer: all of them fit into a message


class Grown(msgspec.Struct, frozen=True, tag=True):
    """Pieces of what the task under a claim makes, from number `offset` on; the first of all is number 0."""

    claim: Claim
    offset: int
    pieces: tuple[bytes, ...]


def check_growth(grown: Sequence[Grown]) -> None:
    """Raise ProtocolError for what no queue records in one call: see the bounds above. A task is in it once."""
    if sum(len(one.pieces) for one in grown) > PIECES_AT_ONCE:
        raise ProtocolError(f"more than {PIECES_AT_ONCE} pieces at once")
    if len({one.claim.key for one in grown}) < len(grown):
        raise ProtocolError("two parts of one task at once")
    for one in grown:
        if not 0 <= one.offset <= MOST_PIECES - len(one.pieces):
            raise ProtocolError(f"pieces from number {one.offset} on: a stage has up to {MOST_PIECES}")
        if (size := max(map(len, one.pieces), default=0)) > PIECE_BYTES:
            raise ProtocolError(f"a piece of {size} bytes: up to {PIECE_BYTES} are recorded")


def check_gap(grown: Grown, recorded: int) -> None:
    """Raise ProtocolError if pieces are missing between the `recorded` ones and these."""
    if grown.offset > recorded:
        stage = f"{grown.claim.stage} of {grown.claim.request}"
        raise ProtocolError(f"pieces of {stage} from number {grown.offset} on, but only {recorded} are recorded")
