"""Tells paths from secrets, so that the path of a missing file is never taken for the secret itself."""

from __future__ import annotations

import os
import re

_PATH = re.compile(r"(/|\./|\.\./|~/).*|.*\.[A-Za-z]{1,5}")


def is_path_like(text: str) -> bool:
    """Return whether a text is the path of something that exists, could exist, or is written like a path."""
    parent = os.path.dirname(text)
    return bool(_PATH.fullmatch(text)) or os.path.exists(text) or bool(parent) and os.path.isdir(parent)
