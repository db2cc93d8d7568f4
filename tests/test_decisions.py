"""The list of decision records: it has each record once, and each section is in the order of numbers."""

from __future__ import annotations

import re
from pathlib import Path

DECISIONS = Path(__file__).parents[1] / "docs" / "decisions"
SECTIONS = (DECISIONS / "README.md").read_text().split("\n## ")[1:]
LISTED = {section.partition("\n")[0]: re.findall(r"^- \[(\d{3})\]\((.+?)\)", section, re.M) for section in SECTIONS}


def test_each_decision_is_listed_once_by_its_number() -> None:
    entries = [entry for section in LISTED.values() for entry in section]
    records = sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
    assert sorted(file for _, file in entries) == records
    assert [number for number, file in entries if not file.startswith(f"{number}-")] == []


def test_decisions_of_a_section_are_in_order() -> None:
    numbers = {title: [number for number, _ in section] for title, section in LISTED.items()}
    assert numbers == {title: sorted(section) for title, section in numbers.items()}
