"""Shows progress on standard error: in one place of a terminal, else as a line from time to time."""

from __future__ import annotations

import threading
import time
from typing import Self

from typing_extensions import override

from unfuse.cli.terminal import ProgressDisplay, Status, Terminal, retried
from unfuse.core.request import Event

SILENCE_S = 1.5  # where lines are written, the longest time without one; people should not have to wait for 2 s


def progress_on(terminal: Terminal, status: Status) -> ProgressDisplay:
    """The kind of progress for this terminal."""
    if terminal.quiet:
        return Hidden(status)
    if not terminal.interactive:
        return ProgressLines(terminal, status)
    from unfuse.cli.bars import Bars

    return Bars(terminal, status)


class Hidden(ProgressDisplay):
    """No progress."""

    def __init__(self, status: Status) -> None:
        self.status = status

    @override
    def show(self, event: Event) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        """Nothing was shown."""


class ProgressLines(ProgressDisplay):
    """A line for each stage that ends, and one on what goes on whenever there was none for a while."""

    def __init__(self, terminal: Terminal, status: Status) -> None:
        self.status, self._terminal = status, terminal
        self._began: dict[str, float] = {}
        self._running = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fill_silence, daemon=True)

    def __enter__(self) -> Self:
        self._terminal.say(str(self.status()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @override
    def show(self, event: Event) -> None:
        stage, now = event.stage, time.monotonic()
        began = self._began.setdefault(stage, now)
        if event.type == "stage_completed":
            self._running = ""
            self._terminal.say(f"{stage}: done in {now - began:.1f} s")
        elif event.type == "retrying":
            self._terminal.say(retried(event))
        elif event.type == "progress":
            self._running = f"{stage}: {event.step} of {event.steps} steps"
        elif event.type == "stage_started":
            self._running = f"{stage}: running"

    def _fill_silence(self) -> None:
        opened = time.monotonic()
        while not self._over.wait(max(0.0, self._terminal.wrote_at + SILENCE_S - time.monotonic())):
            if time.monotonic() - self._terminal.wrote_at >= SILENCE_S:
                text = self._running or str(self.status()) or "working"
                self._terminal.say(f"{text} ({time.monotonic() - opened:.0f} s)")
