"""What the documents have people type: their indented blocks, and what kind each is of."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if path.name != "log.md" and path.parent.name != "decisions"),
]
"""All pages that are kept true; the log and decisions tell of what was."""


def blocks(page: Path) -> list[str]:
    """The blocks of a page that are indented by four, or fenced, without that."""
    text = re.sub(r"^```(\S*)[^\n]*\n(.*?)^```$", _indented, page.read_text(), flags=re.M | re.S)
    found = re.findall(r"(?:^\n|\A)((?:^    .*\n(?:\n(?=    ))?)+)", text, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE).rstrip() for block in found]


def _indented(fence: re.Match[str]) -> str:
    """Return a fenced block as an indented one, and a directive, such as a list of pages, as nothing."""
    if fence[1].startswith("{"):
        return ""
    return "\n" + "".join(f"    {line}\n" for line in fence[2].splitlines()) + "\n"


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


def page_id(page: Path) -> str:
    """Return the path of a page in the repository, as the id of its tests."""
    return str(page.relative_to(ROOT))
