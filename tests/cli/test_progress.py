"""Progress: lines, and bars on a terminal."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable

import pytest

from tests.integration.test_terminal import screen
from unfuse.cli import progress
from unfuse.cli.progress import NoProgress, ProgressBars, ProgressLines, progress_on
from unfuse.cli.terminal import Terminal
from unfuse.core.request import Event


class Heard(Terminal):
    """A terminal that keeps what is said, and tells when there was enough of it."""

    def __init__(self, until: Callable[[list[str]], bool] = lambda said: False, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self.said: list[str] = []
        self.enough = threading.Event()
        self._until = until

    def write(self, text: str) -> int:
        self.said.append(text.rstrip("\n"))
        if self._until(self.said):
            self.enough.set()
        return len(text)


def test_each_completed_stage_prints_one_line() -> None:
    terminal = Heard()
    with progress_on(terminal, lambda: "loading") as shown:
        assert isinstance(shown, ProgressLines)
        for event in (
            Event("queued"),
            Event("stage_started", stage="denoise.0"),
            Event("progress", stage="denoise.0", step=1, steps=2),
            Event("retrying", stage="denoise.0", message="it died"),
            Event("progress", stage="denoise.0", step=2, steps=2),
            Event("stage_completed", stage="denoise.0"),
        ):
            shown.show(event)
    assert terminal.said[:2] == ["loading", "denoise.0: it died"]
    assert terminal.said[2].startswith("denoise.0: done in ")
    assert len(terminal.said) == 3


def test_running_step_is_printed_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.01)
    terminal = Heard(lambda said: any("7 of 9 steps" in line for line in said))
    with progress_on(terminal, lambda: "") as shown:
        shown.show(Event("stage_started", stage="denoise.0"))
        shown.show(Event("progress", stage="denoise.0", step=7, steps=9))
        assert terminal.enough.wait(60)


def test_quiet_shows_nothing() -> None:
    terminal = Heard(quiet=True)
    with progress_on(terminal, lambda: "loading") as shown:
        assert isinstance(shown, NoProgress)
        shown.show(Event("stage_completed", stage="denoise.0"))
    assert terminal.said == []


class TerminalFile(io.StringIO):
    """Keeps what is written on a terminal."""

    def isatty(self) -> bool:
        return True


def test_concurrent_writes_do_not_duplicate_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread writes while another one draws: it waits, else both move the cursor up by the same number of lines."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", file := TerminalFile())
    terminal = Terminal()
    others: list[threading.Thread] = []

    def status() -> str:
        if len(others) == 1 and not others[0].ident:
            others[0].start()
            others[0].join(0.5)
        return "loading"

    with progress_on(terminal, status) as shown:
        assert isinstance(shown, ProgressBars)
        shown.show(Event("stage_started", stage="text_encode"))
        terminal.write_line("first")
        shown.show(Event("stage_started", stage="denoise.0"))
        others.append(threading.Thread(target=terminal.write_line, args=["third"]))
        terminal.write_line("second")
        others[0].join()
    lines = screen(file.getvalue())
    assert [line.split()[0] for line in lines if line] == ["first", "second", "third", "text_encode", "denoise.0"]
