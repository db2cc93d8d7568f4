"""`make test` runs failed tests once more, alone: it forgives and lists those that pass then, and no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.second_run import BASE_VARIABLE, FLAKY_FILE, MAX_TESTS, changed_files, landing_base

ROOT = Path(__file__).parents[2]

OLD = "2020-01-01T00:00:00Z"
NEW = "2020-02-01T00:00:00Z"

HELPERS = """
import os, pathlib, pytest

def first_time(name):
    mark = pathlib.Path(__file__).with_name(f"{name}.ran")
    if mark.exists():
        return False
    mark.touch()
    return True
"""
PASSES = "def test_passes(): pass\n"
FLAKY = "def test_flaky(): assert not first_time('flaky')\n"
BROKEN = "def test_broken(): assert False\n"
EVERY_SORT = """
@pytest.fixture
def unsteady():
    assert not first_time("setup")

@pytest.fixture
def untidy():
    yield
    assert not first_time("teardown")

def test_flaky_setup(unsteady): pass
def test_flaky_teardown(untidy): pass
@pytest.mark.parametrize("value", ["a b", "c::d[e]"])
def test_flaky_parameters(value): assert not first_time(f"parameters {value[0]}")
def test_skipped_then():
    if not first_time("skipped"): pytest.skip("what it needs is gone")
    assert False
"""
CRASHES = "def test_crashes():\n    if first_time('crash'): os._exit(1)\n"
INTERRUPTED = "def test_interrupted(): raise KeyboardInterrupt\n"
UNLOADABLE = "raise RuntimeError\n"


@dataclass
class Run:
    """What a run of pytest printed, and its exit status."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        return self.output.rstrip().splitlines()[-1]

    @property
    def flaky(self) -> list[str]:
        return re.findall(r"^flaky: tests/(.*)$", self.output, re.M)

    @property
    def refused(self) -> list[str]:
        return re.findall(r"^no second run: (.*)$", self.output, re.M)


class Project:
    """A git repository of tests; what is committed last is its newest landing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "tests").mkdir()
        (root / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers = nightly\n")
        (root / "conftest.py").write_text('pytest_plugins = ["tools.second_run"]\n')
        (root / ".gitignore").write_text("*.ran\n__pycache__\n")
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *arguments: str, date: str = NEW) -> str:
        who = ["-c", "user.name=A", "-c", "user.email=a@b.invalid"]
        environment = {**os.environ, "GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date}
        command = ["git", *who, *arguments]
        done = subprocess.run(command, cwd=self.root, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def write(self, file: str, *texts: str) -> None:
        (self.root / "tests" / file).write_text(HELPERS + "".join(texts))

    def commit(self, date: str = NEW) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "a landing", date=date)
        return self.git("rev-parse", "HEAD")

    def written_long_ago(self, *texts: str, listed: str = "") -> None:
        """Commit these tests, and after them a landing that does not change them."""
        self.write("test_old.py", *texts)
        (self.root / FLAKY_FILE).write_text(f"# said once\n{listed}")
        self.commit(OLD)
        self.commit()

    def run(self, *arguments: str, **variables: str) -> Run:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-ra", "--second-run", "-m", "not nightly", *arguments],
            cwd=self.root,
            env={**clean, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Run(done.returncode, done.stdout)

    def listed(self) -> list[str]:
        return (self.root / FLAKY_FILE).read_text().splitlines()[1:]


@pytest.fixture(autouse=True)
def no_base_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BASE_VARIABLE, raising=False)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


TWO_PROCESSES = ("-p", "xdist.plugin", "-n", "2", "--dist", "loadfile")


@pytest.mark.parametrize("processes", [(), TWO_PROCESSES], ids=["one process", "two processes"])
def test_failed_test_passing_on_rerun_is_listed_as_flaky(project: Project, processes: tuple[str]) -> None:
    project.written_long_ago(PASSES, FLAKY)
    first = project.run(*processes)
    assert (first.code, first.flaky) == (0, ["test_old.py::test_flaky"]), first.output
    assert re.search(r"1 passed, 1 flaky in ", first.last_line)
    assert "FAILED" not in first.output.partition("short test summary")[2]
    assert project.listed() == ["tests/test_old.py::test_flaky"]


def test_each_failed_test_is_rerun_and_judged_separately(project: Project) -> None:
    project.written_long_ago(PASSES, FLAKY, BROKEN, EVERY_SORT)
    run = project.run()
    assert run.code == 1
    names = ["flaky", "flaky_setup", "flaky_teardown", "flaky_parameters[a b]", "flaky_parameters[c::d[e]]"]
    assert run.flaky == [f"test_old.py::test_{name}" for name in names], run.output
    assert run.refused == []
    failed = re.findall(r"^FAILED tests/test_old.py::(\w+)", run.output.rpartition("short test summary")[2], re.M)
    assert failed == ["test_broken", "test_skipped_then"]
    assert re.search(r"2 failed, 2 passed, 5 flaky in ", run.last_line)
    assert project.listed() == [f"tests/{name}" for name in run.flaky]


def test_listed_flaky_tests_are_not_rerun(project: Project) -> None:
    project.written_long_ago(EVERY_SORT, listed="tests/test_old.py::test_flaky_parameters[other]\n")
    run = project.run("-k", "parameters")
    assert (run.code, run.flaky) == (1, [])
    assert len(run.refused) == 2 and all(f"is listed in {FLAKY_FILE}" in line for line in run.refused)
    assert project.listed() == ["tests/test_old.py::test_flaky_parameters[other]"]


@pytest.mark.parametrize("state", ["new", "committed", "changed"])
def test_new_or_changed_tests_are_not_rerun(project: Project, state: str) -> None:
    project.written_long_ago(PASSES)
    project.write("test_old.py" if state == "changed" else "test_new.py", FLAKY)
    if state == "committed":
        project.commit()
    run = project.run()
    assert (run.code, run.flaky, len(run.refused)) == (1, [], 1)
    assert "is new or changed since" in run.refused[0]
    assert project.listed() == []


def test_failed_tests_are_not_rerun_without_git_history(project: Project) -> None:
    project.write("test_old.py", FLAKY)
    project.commit()
    run = project.run()
    assert (run.code, run.flaky) == (1, [])
    assert f"set {BASE_VARIABLE}" in run.refused[0]


def test_crashed_test_process_fails_the_run(project: Project) -> None:
    project.written_long_ago(PASSES, FLAKY, CRASHES)
    run = project.run(*TWO_PROCESSES)
    assert (run.code, run.flaky) == (1, [])
    assert any("crashed" in line for line in run.refused), run.output


@pytest.mark.parametrize("processes", [(), TWO_PROCESSES], ids=["one process", "two processes"])
def test_unloadable_test_file_fails_the_run(project: Project, processes: tuple[str]) -> None:
    project.write("test_unloadable.py", UNLOADABLE)
    project.written_long_ago(FLAKY)
    run = project.run("--continue-on-collection-errors", *processes)
    assert (run.code, run.flaky, project.listed()) == (1, [], [])
    assert "error" in run.last_line
    assert run.refused == (["tests/test_unloadable.py could not be loaded"] if "1 failed" in run.last_line else [])


def test_interrupted_run_is_not_rerun(project: Project) -> None:
    project.written_long_ago(FLAKY, INTERRUPTED)
    run = project.run()
    assert (run.code, run.flaky, run.refused) == (2, [], [])


def test_run_stopped_at_its_first_failure_is_not_rerun(project: Project) -> None:
    project.written_long_ago(FLAKY, BROKEN)
    run = project.run("-x")
    assert (run.code, run.flaky, run.refused) == (1, [], ["the run was stopped before its end"])


def test_too_many_failures_are_not_rerun(project: Project) -> None:
    many = f"@pytest.mark.parametrize('n', range({MAX_TESTS + 1}))\ndef test_many(n): assert not first_time(str(n))\n"
    project.written_long_ago(many)
    run = project.run()
    assert (run.code, run.flaky) == (1, [])
    assert run.refused == [f"{MAX_TESTS + 1} tests failed, more than {MAX_TESTS}"]


def test_failed_tests_are_not_rerun_without_the_option(project: Project) -> None:
    project.written_long_ago(FLAKY)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    assert subprocess.run(command, cwd=project.root, stdout=subprocess.DEVNULL).returncode == 1


def test_branch_changes_start_at_the_merge_base_with_main(project: Project, tmp_path: Path) -> None:
    base = project.commit()
    project.git("switch", "--quiet", "--create", "topic")
    project.write("test_topic.py", PASSES)
    project.commit()
    clone = tmp_path / "clone"
    project.git("clone", "--quiet", str(project.root), str(clone))
    project.git("-C", str(clone), "remote", "set-head", "origin", "main")
    assert landing_base(clone) == (base, "")
    assert changed_files(clone, base) == {clone / "tests" / "test_topic.py"}


def test_changes_on_main_start_half_a_day_before_the_last_commit(project: Project) -> None:
    base = project.commit("2020-01-31T11:59:59Z")
    project.commit("2020-01-31T12:00:01Z")
    project.commit("2020-02-01T00:00:00Z")
    assert landing_base(project.root) == (base, "")


def test_base_variable_overrides_the_base_commit(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    base = project.commit(NEW)
    project.commit(NEW)
    monkeypatch.setenv(BASE_VARIABLE, "HEAD~1")
    assert landing_base(project.root) == (base, "")
    monkeypatch.setenv(BASE_VARIABLE, "nothing")
    assert landing_base(project.root) == ("", "nothing is no commit here")


def test_base_commit_is_unknown_outside_a_git_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert landing_base(tmp_path) == ("", "this is no git repository")


def test_listed_flaky_tests_exist() -> None:
    for name in (ROOT / FLAKY_FILE).read_text().splitlines():
        if name and not name.startswith("#"):
            file, _, test = name.partition("::")
            function = test.rpartition("::")[2].partition("[")[0]
            assert f"def {function}(" in (ROOT / file).read_text(), f"{FLAKY_FILE} names {name}, which is gone"
