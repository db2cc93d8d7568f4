"""How the command ends: signals at any moment, readers that leave, disks that are full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "unfuse"]

HIT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Hit(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            {hit}

class Last:
    def __del__(self):
        os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Hit())
sys.argv = ["unfuse", "config", "show"]
from unfuse.cli.main import main
main()
"""
"""Runs the command, which gets a signal as soon as a module is about to be imported."""


WHERE = """
import atexit, os, sys
from pathlib import Path
from unfuse.cli.main import main
atexit.register(lambda: Path({file!r}).write_text(os.readlink("/proc/self/fd/2")))
sys.argv = ["unfuse", "config", "show"]
main()
"""
"""Runs the command, which notes at its end what its standard error is."""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["unfuse.cli.app", "typer", "unfuse.service.settings"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_during_import_exits_without_output(module: str, number: int, code: int) -> None:
    program = HIT.format(module=module, number=int(number), hit=f"os.kill(os.getpid(), {int(number)})")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_during_object_finalization_exits_without_output(number: int, code: int) -> None:
    """A signal that comes while something is being forgotten, as modules' locks are all the time, is not lost."""
    program = HIT.format(module="typer", number=int(number), hit="Last()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["config", "show"], ["--help"], ["version"]])
def test_closed_stdout_pipe_exits_1_without_traceback(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_full_disk_exits_1_with_a_one_line_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "unfuse: No space left on device\n")


@pytest.mark.slow
def test_unwritable_stderr_does_not_change_the_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "models", "--server", "x"], stderr=full, stdout=full, check=False)
    assert done.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_replaced_by_dev_null(closed: str, tmp_path: Path) -> None:
    """Given a start without standard error, as by some service managers, then no file gets its number."""
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, WHERE.format(file=str(tmp_path / "two"))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, b"data_dir" in done.stdout) == (0, closed == "2>&-")
    assert (tmp_path / "two").read_text() == os.devnull
