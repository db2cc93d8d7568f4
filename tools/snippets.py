"""What the documents have people type: their indented blocks, and what kind each is of."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "log.md"),
    *sorted((ROOT / "docs" / "howto").glob("*.md")),
]
"""All pages that are kept true; the log and decisions tell of what was."""


def blocks(page: Path) -> list[str]:
    """The blocks of a page that are indented by four, or fenced, without that."""
    text = re.sub(r"^```\w*\n(.*?)^```$", lambda found: _indented(found[1]), page.read_text(), flags=re.M | re.S)
    found = re.findall(r"(?:^\n|\A)((?:^    .*\n(?:\n(?=    ))?)+)", text, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE).rstrip() for block in found]


def _indented(text: str) -> str:
    return "\n" + "".join(f"    {line}\n" for line in text.splitlines()) + "\n"


def is_python(block: str) -> bool:
    """Whether it is Python that begins with what it imports."""
    return re.match(r"(import|from) \w", block) is not None


def commands(block: str) -> Iterator[list[str]]:
    """The commands of a block, in words; what a command prints is none."""
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        line = re.sub(r"^([A-Z_]+=\S+ )+", "", line.removeprefix("$ "))  # variables before a command
        if (
            re.match(r"(\S*/)?(unfuse|pip|python3?|curl|make|ssh|scp|openssl|systemctl|helm|kubectl|ray) ", line)
            and ": `" not in line
        ):
            yield shlex.split(line, comments=True)
