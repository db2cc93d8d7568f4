"""How many examples a property is tried on: some by day, ten times as many by night."""

from __future__ import annotations

import os


def examples(by_day: int) -> int:
    """By night `make` says EXAMPLES=10."""
    return by_day * int(os.environ.get("EXAMPLES", "1"))
