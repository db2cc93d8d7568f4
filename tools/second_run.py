"""A pytest plugin: `--second-run` runs failed tests once more, alone, and forgives those that pass then.

A forgiven test is flaky. Its name is printed as `flaky: NAME` and appended to `tests/flaky.txt`, and the run can be
green. A test gets no second run if it is listed in that file already, or if its file is new or changed in this
landing (`landing_base`). Nothing is forgiven in a run that was interrupted, that could not load a file, or in which
a process of pytest-xdist crashed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

FLAKY_FILE = "tests/flaky.txt"

BASE_VARIABLE = "LANDING_BASE"
"""The environment variable that names the commit before this landing."""

MAIN_BRANCHES = ("origin/HEAD", "origin/main")

LANDING_S = 12 * 60 * 60
"""On the main branch, commits up to this many seconds older than the newest one belong to its landing."""

MAX_TESTS = 50
"""With more failed tests than this there is no second run: so many are not flaky."""

PHASES = ("setup", "call", "teardown")
"""Of a test. The report of a test whose process crashed has another one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("second run")
    group.addoption("--second-run", action="store_true", help="run failed tests once more, alone")
    group.addoption("--record-outcomes", metavar="FILE", help="write the outcome of each test to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which reports to the one that decides
        return
    if config.option.second_run:
        config.pluginmanager.register(SecondRun(config), "second-run")
    if config.option.record_outcomes:
        config.pluginmanager.register(Recorder(Path(config.option.record_outcomes)), "record-outcomes")


class Recorder:
    """Writes each test's outcome to a file: passed only if no phase of it failed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_worse = report.outcome != "passed" and self._outcomes.get(report.nodeid) != "failed"
        if is_worse or (report.when == "call" and report.nodeid not in self._outcomes):
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._outcomes))


class SecondRun:
    """Collects the failures of a run, and decides at its end what becomes of them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._flaky_file = config.rootpath / FLAKY_FILE
        #: Names of failed tests, in the order in which they failed.
        self._failed: dict[str, None] = {}
        #: Why nothing of this run can be forgiven.
        self._refusals: list[str] = []
        self._lines: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._refusals.append(f"{report.nodeid} could not be loaded")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            self._refusals.append(f"the test process {node.gateway.id} crashed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        self._failed[report.nodeid] = None
        if report.when not in PHASES:
            self._refusals.append(f"the test process of {report.nodeid} crashed")

    @pytest.hookimpl(wrapper=True, trylast=True)  # after pytest-xdist ended its processes, before the summary
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        result = yield
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and self._failed:
            if session.shouldfail or session.shouldstop:
                self._refusals.append("the run was stopped before its end")
            self._decide(session)
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._lines:
            return
        terminalreporter.section("second run of failed tests")
        for report in terminalreporter.stats.get("flaky", []):
            terminalreporter.write_sep("_", f"{report.nodeid}, the first time")
            terminalreporter.write_line(report.longreprtext)
        terminalreporter.write_line("\n".join(self._lines))

    def _decide(self, session: pytest.Session) -> None:
        if len(self._failed) > MAX_TESTS:
            self._refusals.append(f"{len(self._failed)} tests failed, more than {MAX_TESTS}")
        if self._refusals:
            self._lines = [f"no second run: {reason}" for reason in dict.fromkeys(self._refusals)]
            return

        again = self._eligible()
        if not again:
            return
        flaky = [name for name, outcome in self._run_again(again).items() if outcome == "passed"]
        self._lines += [f"flaky: {name}" for name in flaky]
        if not flaky:
            return

        add_to_list(self._flaky_file, flaky)
        self._move_reports(set(flaky))
        if set(flaky) == set(self._failed):
            session.exitstatus = pytest.ExitCode.OK

    def _eligible(self) -> list[str]:
        """Return the failed tests that get a second run, and note why others do not."""
        listed = {function_of(name) for name in read_list(self._flaky_file)}
        root = self._config.rootpath
        base, problem = landing_base(root)
        changed = changed_files(root, base) if base else set()
        eligible = []
        for name in self._failed:
            file = name.partition("::")[0]
            if function_of(name) in listed:
                self._lines.append(f"no second run: {name} is listed in {FLAKY_FILE}")
            elif not base:
                self._lines.append(f"no second run: {file} may be new, {problem}; set {BASE_VARIABLE}")
            elif (root / file).resolve() in changed:
                self._lines.append(f"no second run: {name} is new or changed since {base[:12]}")
            else:
                eligible.append(name)
        return eligible

    def _run_again(self, names: Sequence[str]) -> dict[str, str]:
        """Run these tests in one new process, print what it prints, and return their outcomes by name."""
        config = self._config
        reporter: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
        with tempfile.TemporaryDirectory(prefix="second-run-") as folder:
            outcomes = Path(folder) / "outcomes.json"
            command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-v"]
            command += ["--rootdir", str(config.rootpath), *(["-c", str(config.inipath)] if config.inipath else [])]
            command += ["--record-outcomes", str(outcomes), "-m", config.option.markexpr, *names]
            environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
            if reporter:
                reporter.section(f"running {len(names)} failed tests once more")
            with subprocess.Popen(
                command, cwd=config.rootpath, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as process:
                assert process.stdout
                for line in process.stdout:
                    if reporter:
                        reporter.write(line.decode(errors="replace"))
            found: dict[str, str] = json.loads(outcomes.read_text()) if outcomes.exists() else {}
        return {name: found.get(name, "not run") for name in names}

    def _move_reports(self, flaky: set[str]) -> None:
        """Count the first failures of flaky tests as flaky, not as failed, in pytest's summary."""
        reporter: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        for category in ("failed", "error"):
            reports = reporter.stats.pop(category, [])
            kept = [report for report in reports if report.nodeid not in flaky]
            if kept:
                reporter.stats[category] = kept
            reporter.stats.setdefault("flaky", []).extend(report for report in reports if report.nodeid in flaky)
        reporter._set_main_color()  # or the closing line goes by the categories that there were before


def function_of(name: str) -> str:
    """Return a test's name without its parameters."""
    return name.partition("[")[0]


def read_list(file: Path) -> list[str]:
    """Return the names listed in this file. Empty lines and lines that begin with # are comments."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def add_to_list(file: Path, names: Iterable[str]) -> None:
    """Append names to this file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as written:
        written.writelines(f"{name}\n" for name in names)


def landing_base(root: Path) -> tuple[str, str]:
    """Return the commit before this landing; or "", and why it is unknown.

    It is the one that LANDING_BASE names. Else, on a branch, it is where the branch left the main branch of `origin`.
    Else, on the main branch or without one, it is the last commit that is half a day older than the newest.
    """
    if named := os.environ.get(BASE_VARIABLE):
        found = git(root, "rev-parse", "--verify", "--quiet", f"{named}^{{commit}}")
        return found, "" if found else f"{named} is no commit here"
    newest = git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    if not newest:
        return "", "this is no git repository"
    for branch in MAIN_BRANCHES:
        left = git(root, "merge-base", "HEAD", branch)
        if left and left != newest:
            return left, ""
    before = int(git(root, "show", "--no-patch", "--format=%ct", "HEAD")) - LANDING_S
    older = git(root, "rev-list", "--first-parent", "--max-count=1", f"--before={before}", "HEAD")
    return older, "" if older else "the history here is shorter than half a day"


def changed_files(root: Path, base: str) -> set[Path]:
    """Return the files that differ from this commit, and those that git does not know."""
    top = Path(git(root, "rev-parse", "--show-toplevel"))
    changed = git(top, "diff", "--name-only", "-z", "--no-renames", base)
    unknown = git(top, "ls-files", "-z", "--others", "--exclude-standard")
    return {(top / name).resolve() for name in (changed + unknown).split("\0") if name}


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints, or "" if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
