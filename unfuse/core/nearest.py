"""Suggests the name that somebody probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 64
"""The longest name, in characters, that is looked up: the time grows with the square of the length."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most similar to `name`, if its similarity (0 to 1) is at least `cutoff`."""
    close = get_close_matches(name, known, 1, cutoff) if len(name) <= LONGEST else []
    return close[0] if close else None
