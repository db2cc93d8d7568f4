"""A pytest plugin: `--part 3/8` runs the third of eight parts of the chosen tests.

The parts take about the same time, and each file is in one of them, as its tests may share what is expensive to set
up. How long a file takes is read from `tests/nightly_seconds.json`, which `python -m tools.run_part REPORT...` updates
from JUnit reports of pytest.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

SECONDS_FILE = "tests/nightly_seconds.json"

UNKNOWN_S = 10.0
"""Seconds that a test is taken for whose file is not in SECONDS_FILE."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parts")
    group.addoption("--part", metavar="K/N", type=part_of, help="run the K-th of N parts of the tests, of equal length")


def part_of(text: str) -> tuple[int, int]:
    """The two numbers of K/N. Raises ValueError if there is no such part."""
    which, number = (int(word) for word in text.split("/"))
    if not 1 <= which <= number:
        raise ValueError(f"there is no part {text}")
    return which, number


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts."""
    if config.option.part is None:
        return
    which, number = config.option.part
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.path.relative_to(config.rootpath).as_posix()].append(item)
    known = json.loads((config.rootpath / SECONDS_FILE).read_text())
    seconds = {file: known.get(file, UNKNOWN_S * len(found)) for file, found in tests.items()}
    chosen = parts(seconds, number)[which - 1]
    others = [item for file, found in tests.items() if file not in chosen for item in found]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A part may have no tests, where there are fewer files than parts."""
    if session.config.option.part and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def parts(seconds: Mapping[str, float], number: int) -> list[set[str]]:
    """Divide files by how long they take: the longest first, each to the part that is shortest so far."""
    divided = [set[str]() for _ in range(number)]
    totals = [0.0] * number
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        shortest = totals.index(min(totals))
        divided[shortest].add(file)
        totals[shortest] += seconds[file]
    return divided


def seconds_of(reports: Iterable[Path]) -> dict[str, float]:
    """How long the tests of each file took, by JUnit reports."""
    found: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            words = case.attrib["classname"].split(".")
            while words and not Path(*words).with_suffix(".py").is_file():
                words.pop()
            if words:
                found[Path(*words).with_suffix(".py").as_posix()] += float(case.attrib["time"])
    return {file: round(found[file], 1) for file in sorted(found)}


def main() -> None:
    file = Path(SECONDS_FILE)
    known = json.loads(file.read_text()) | seconds_of(map(Path, sys.argv[1:]))
    file.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")


if __name__ == "__main__":
    main()
