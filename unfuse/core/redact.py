"""Removes the paths of this machine's files from text that people on other machines read."""

from __future__ import annotations

import re

_QUOTED = re.compile(r"""(["'])(?:~|[a-z_0-9]+:)?/[^"'\n]*/([^"'\n/]*)/?\1""")
_PLAIN = re.compile(r"(?:(?<![\w./…-])/(?!/)|(?<=file://)/)[^\s\"'`:;,()<>\[\]{}|]*[^\s\"'`:;,.()<>\[\]{}|]")


def without_paths(text: str) -> str:
    """The text with absolute paths, and file: URLs, shortened to their last part. Other URLs stay."""
    text = _QUOTED.sub(lambda found: f"{found[1]}…/{found[2]}{found[1]}", text)
    return _PLAIN.sub(lambda found: f"…/{found[0].rstrip('/').rpartition('/')[2]}", text)
