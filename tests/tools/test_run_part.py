"""`--part K/N` divides tests by files into parts of equal length."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tools.run_part import SECONDS_FILE, part_of, parts, seconds_of

ROOT = Path(__file__).parents[2]

FILES = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(0, 600), max_size=20)


@given(FILES, st.integers(1, 8))
def test_each_test_file_is_in_exactly_one_part(seconds: dict[str, float], number: int) -> None:
    divided = parts(seconds, number)
    assert len(divided) == number
    assert sorted(file for part in divided for file in part) == sorted(seconds)


@given(FILES, st.integers(1, 8))
def test_part_durations_differ_by_at_most_one_file(seconds: dict[str, float], number: int) -> None:
    totals = [sum(seconds[file] for file in part) for part in parts(seconds, number)]
    assert max(totals) - min(totals) <= max(seconds.values(), default=0) + 1e-6


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Three files with tests, of which one takes as long as the others together."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tools.run_part"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / SECONDS_FILE).write_text('{"test_long.py": 60, "test_a.py": 30}')
    (tmp_path / "test_long.py").write_text("def test_long(): pass\n")
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n")
    (tmp_path / "test_new.py").write_text("def test_new(): pass\ndef test_newer(): pass\n")
    return tmp_path


def ran(project: Path, *options: str) -> set[str]:
    """The names of the tests that pytest runs with these options."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *options]
    done = subprocess.run(command, cwd=project, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"^PASSED \S+::(\w+)$", done.stdout, re.MULTILINE))


def test_parts_of_a_run_cover_all_tests(project: Path) -> None:
    assert ran(project, "--part", "1/2") == {"test_long"}
    assert ran(project, "--part", "2/2") == {"test_a", "test_new", "test_newer"}
    assert ran(project, "--part", "4/4") == set()
    assert ran(project) == {"test_long", "test_a", "test_new", "test_newer"}


@pytest.mark.parametrize("part", ["0/8", "9/8", "1", "a/b"])
def test_invalid_part_raises_value_error(part: str) -> None:
    with pytest.raises(ValueError):
        part_of(part)


def test_file_durations_are_read_from_junit_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").touch()
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.test_it" name="a" time="1.5"/>'
        '<testcase classname="tests.test_it.TestMore" name="b" time="2"/>'
        '<testcase classname="tests.test_gone" name="c" time="9"/></testsuite></testsuites>'
    )
    assert seconds_of([Path("report.xml")]) == {"tests/test_it.py": 3.5}
