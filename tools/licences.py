"""Writes docs/reference/licences.md from the metadata of what is installed: `python -m tools.licences`.

Run it where `unfuse[serve]` is installed with constraints.txt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "licences.md"
BEGIN, END = "<!-- written by `python -m tools.licences` -->\n", "<!-- end of what is written -->\n"

SHORT_NAMES = {
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""Short names of the licences that old metadata spells out."""

LONGEST = 60
"""Characters of a licence's name; a field with more has the text of the licence."""


class Licence(NamedTuple):
    """A row of the page."""

    name: str
    version: str
    licence: str


def licence_of(found: Distribution) -> str:
    """The licence that a distribution's metadata names: as an expression, by classifiers, or in a free field."""
    if expression := found.metadata.get("License-Expression"):
        return str(expression)
    named = (line.rpartition(" :: ")[2] for line in found.metadata.get_all("Classifier", ()) if "License ::" in line)
    if classified := [SHORT_NAMES.get(name, name) for name in named if name != "OSI Approved"]:
        return " AND ".join(classified)
    field = str(found.metadata.get("License", "")).strip()
    return SHORT_NAMES.get(field, field) if 0 < len(field) <= LONGEST and "\n" not in field else "see its files"


def asked_by(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """What a distribution requires on this machine, with these extras."""
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            yield requirement


def closure(extras: Iterable[str]) -> list[Licence]:
    """All that `unfuse` with these extras brings, directly or not, by name; without unfuse."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [("unfuse", frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        waiting += [(canonicalize_name(one.name), frozenset(one.extras)) for one in asked_by(name, wanted)]
    return [row(name) for name in sorted({name for name, _ in seen} - {"unfuse"})]


def row(name: str) -> Licence:
    """One installed distribution; versions are without the local part, as in 2.13.0+cpu."""
    found = distribution(name)
    return Licence(name, found.version.partition("+")[0], re.sub(r"\s+", " ", licence_of(found)))


def table(rows: Iterable[Licence]) -> str:
    lines = (f"| {name} | {version} | {licence} |\n" for name, version, licence in rows)
    return "| package | version | licence |\n|---|---|---|\n" + "".join(lines)


def written() -> str:
    """The two tables of the page."""
    client = closure(())
    server = [one for one in closure(["serve"]) if one not in client]
    return (
        f"\n## `unfuse`\n\nA client has these {len(client)} packages.\n\n{table(client)}"
        f"\n## `unfuse[serve]`\n\nA server has these {len(server)} packages too.\n\n{table(server)}\n"
    )


def main() -> None:
    """Replace the tables of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    try:
        PAGE.write_text(before + BEGIN + written() + END + after)
    except PackageNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed: make .venv/installed") from error


if __name__ == "__main__":
    main()
