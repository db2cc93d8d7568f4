"""What started processes write: none waits for whoever hears of it, and none is left unheard."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from unfuse.launch import local
from unfuse.launch.local import OutputPump, write_line

FLOOD = "import sys\nfor n in range(50_000): sys.stderr.write(f'{n} ' + 'x' * 100 + '\\n')"


def run(out: OutputPump, code: str, number: int = 0) -> int:
    """Run Python code whose standard error is a pipe, to its end."""
    writing = out.pipe(number)
    try:
        return subprocess.run([sys.executable, "-c", code], stderr=writing, check=False).returncode
    finally:
        os.close(writing)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let little wait, and the end not wait for long."""
    monkeypatch.setattr(local, "WAITING", 10)
    monkeypatch.setattr(local, "LAST_S", 0.1)
    return lambda: None


@pytest.mark.slow
def test_each_output_line_is_reported_also_from_dying_process() -> None:
    told: list[tuple[int, bytes]] = []
    out = OutputPump(lambda number, line: told.append((number, line)))
    assert run(out, "import sys, os; sys.stderr.write('one\\ntwo\\n'); sys.stderr.flush(); os.abort()", 7) < 0
    run(out, "import os; os.write(2, b'no end of line')", 8)
    out.close()
    assert told == [(7, b"one"), (7, b"two"), (8, b"no end of line")]


@pytest.mark.slow
def test_blocked_reader_does_not_block_writer_and_drops_are_counted(few: Callable[[], None]) -> None:
    stuck, told = threading.Event(), []

    def hear(number: int, line: bytes) -> None:
        stuck.wait()
        told.append(line)

    out = OutputPump(hear)
    assert run(out, FLOOD) == 0, "it was not kept waiting"
    stuck.set()
    out.close()
    last = [line for line in told if line.startswith(b"49999 ")]
    assert last, "the newest lines are kept"
    lost = [line for line in told if b"were not read in time" in line]
    assert sum(int(line.split()[0]) for line in lost) == 50_000 - (len(told) - len(lost))


def test_close_does_not_wait_for_open_pipe_or_blocked_reader(few: Callable[[], None]) -> None:
    out = OutputPump(lambda number, line: threading.Event().wait())
    writing = out.pipe(0)
    os.write(writing, b"x\n")
    out.close()
    os.close(writing)


@pytest.mark.slow
def test_overlong_line_is_split() -> None:
    told: list[int] = []
    out = OutputPump(lambda number, line: told.append(len(line)))
    run(out, "import sys; sys.stderr.write('x' * 200_000)")
    out.close()
    assert told == [65536, 65536, 65536, 200_000 - 3 * 65536]


def test_lines_are_written_to_stderr_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    write_line(0, "grün \udc80".encode(errors="surrogateescape"))
    assert capsys.readouterr().err == "grün \N{REPLACEMENT CHARACTER}\n"
