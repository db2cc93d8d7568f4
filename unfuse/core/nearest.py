"""What somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 64
"""Characters of a name that anything is sought for: what that takes grows with its square."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like this one, if any is so alike (0: not at all, 1: the same)."""
    close = get_close_matches(name, known, 1, cutoff) if len(name) <= LONGEST else []
    return close[0] if close else None
