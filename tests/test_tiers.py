"""`make quick` stays quick: what starts a process or imports diffusers, and does not say that it is slow, fails."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
DAY = "not nightly and not gpu"
TESTS = """
import subprocess, sys, threading
import pytest

def start_one():
    subprocess.run([sys.executable, "--version"], check=True)

@pytest.fixture(scope="module")
def start():
    start_one()

@pytest.fixture(scope="module")
def unlisted():
    start_one()

def test_by_a_fixture_that_is_listed(start): pass
def test_by_one_that_is_not(unlisted): pass
def test_computes(): pass
def test_in_a_thread():
    thread = threading.Thread(target=start_one)
    thread.start()
    thread.join()
def test_imports_diffusers(): import diffusers
def test_starts_a_process(): start_one()

@pytest.mark.slow
def test_says_so(): start_one()
"""
NOT_QUICK = {"test_by_one_that_is_not", "test_imports_diffusers", "test_in_a_thread", "test_starts_a_process"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with our conftest.py, tests of every sort, and a folder of slow tests that cannot even be loaded."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "diffusers.py").touch()
    (tmp_path / "test_sorts.py").write_text(TESTS)
    (tmp_path / "tests" / "integration").mkdir(parents=True)
    (tmp_path / "tests" / "integration" / "test_loaded.py").write_text("import missing")
    return tmp_path


def said_by_pytest(project: Path, *arguments: str) -> str:
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(project), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True).stdout


def failed(project: Path, expression: str, *which: str) -> tuple[set[str], set[str]]:
    """The names of the tests that passed, and of those that did not."""
    said = said_by_pytest(project, "-rA", "-m", expression, *which)
    bad = set(re.findall(r"^(?:ERROR|FAILED) .*?(test_\w+)(?:\.py)?(?: - .*)?$", said, re.M))
    return set(re.findall(r"^PASSED .*?::(test_\w+)", said, re.M)) - bad, bad


@pytest.mark.slow
def test_slow_test_without_a_slow_mark_fails(project: Path) -> None:
    passed, bad = failed(project, DAY, "test_sorts.py")
    assert (passed, bad) == ({"test_by_a_fixture_that_is_listed", "test_computes", "test_says_so"}, NOT_QUICK)


@pytest.mark.slow
def test_quick_run_skips_slow_tests_and_their_folders(project: Path) -> None:
    assert failed(project, f"{DAY} and not slow", ".") == ({"test_computes"}, NOT_QUICK)


@pytest.mark.slow
def test_quick_test_module_importing_diffusers_fails(project: Path) -> None:
    (project / "test_sorts.py").write_text("import diffusers\ndef test_computes(): pass\n")
    assert failed(project, f"{DAY} and not slow", ".") == (set(), {"test_sorts"})


@pytest.mark.slow
def test_files_with_slow_tests_come_first(project: Path) -> None:
    (project / "test_early.py").write_text("def test_computes(): pass\n")
    said = said_by_pytest(project, "--collect-only", "-q", "test_early.py", "test_sorts.py")
    files = [line.partition("::")[0] for line in said.splitlines() if "::" in line]
    assert list(dict.fromkeys(files)) == ["test_sorts.py", "test_early.py"]


def test_make_targets_cover_every_test() -> None:
    made = (ROOT / "Makefile").read_text()
    assert f"DAY := {DAY}\n" in made
    runs = re.findall(r"^\t.*(?:\$\(PYTEST\)|\$\(NIGHTLY\)).* -m \"(.*?)\"(.*?)(?: \|\| failed=1; \\)?$", made, re.M)
    assert runs == [
        ("$(DAY) and not slow", ""),
        ("$(DAY)", " --second-run"),
        ("nightly or hypothesis", " $(addprefix --ignore=,$(DRILLS))"),
    ]
    drills = r"^\t.*\$\(NIGHTLY\) \$\(DRILLS\) \|\| failed=1; \\$"
    assert re.search(drills, made, re.M), "all of what the third one leaves out"


def test_hypothesis_examples_have_no_deadline() -> None:
    """Else what is right fails where the machine is busy, as Hypothesis gives each example 0.2 seconds."""
    assert settings.default is not None and settings.default.deadline is None
