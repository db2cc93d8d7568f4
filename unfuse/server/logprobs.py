"""Log probabilities of an answer's tokens, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unfuse.core.text import Piece, token_name


class GrowingLogprobs:
    """Returns the entries of one streamed choice, each as soon as the text of its token is final."""

    def __init__(self) -> None:
        self._pieces = list[Piece]()
        self._sent = 0

    def add(self, piece: Piece) -> dict[str, Any] | None:
        """Add a token. Returns the entries that became final; None if there are none."""
        if piece.own is None:
            return None
        self._pieces.append(piece)
        certain = self._pieces[self._sent : piece.own.certain]
        self._sent += len(certain)
        return _entries(certain) if certain else None


def logprobs_of(pieces: Sequence[Piece]) -> dict[str, Any] | None:
    """Return the entries of a complete choice; None if they were not requested.

    As in OpenAI's API, the token that ended the answer, and the tokens of a stop string, have no entry.
    """
    last = pieces[-1].own if pieces else None
    return None if last is None else _entries(pieces[: last.certain])


def _entries(pieces: Sequence[Piece]) -> dict[str, Any]:
    return {"content": [_entry(piece) for piece in pieces], "refusal": None}


def _entry(piece: Piece) -> dict[str, Any]:
    assert piece.own
    likely = zip(piece.top, piece.own.top, strict=True)
    top = [_token(data, logprob) for (_, _, logprob), data in likely]
    return {**_token(piece.own.data, piece.logprob), "top_logprobs": top}


def _token(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_name(data), "logprob": logprob, "bytes": list(data)}
