"""Text for people on other machines: without the places that files have on this one."""

from __future__ import annotations

import re

_QUOTED = re.compile(r"""(["'])(?:~|[a-z_0-9]+:)?/[^"'\n]*/([^"'\n/]*)/?\1""")
_PLAIN = re.compile(r"(?:(?<![\w./…-])/(?!/)|(?<=file://)/)[^\s\"'`:;,()<>\[\]{}|]*[^\s\"'`:;,.()<>\[\]{}|]")


def without_paths(text: str) -> str:
    """The text with nothing left of absolute paths but their last part; URLs stay, but for those of files."""
    text = _QUOTED.sub(lambda found: f"{found[1]}…/{found[2]}{found[1]}", text)
    return _PLAIN.sub(lambda found: f"…/{found[0].rstrip('/').rpartition('/')[2]}", text)
