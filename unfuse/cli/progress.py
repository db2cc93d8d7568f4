"""Shows progress on standard error: in one place of a terminal, else as a line from time to time."""

from __future__ import annotations

import threading
import time
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress as RichProgress, TaskID, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.text import Text
from typing_extensions import override

from unfuse.cli.terminal import ProgressDisplay, Status, Terminal, retried
from unfuse.core.request import Event

REFRESHES_PER_S = 4


class ProgressBars(ProgressDisplay):
    """One bar for each stage that has started, below a line on what goes on."""

    def __init__(self, terminal: Terminal, status: Status) -> None:
        self.status, self._terminal = status, terminal
        self._progress = RichProgress(
            TextColumn("{task.description:16}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=terminal.console,
        )
        self._spinner = Spinner("dots")
        self._began = time.monotonic()
        # Its own thread would take its lock before the console's, threads that write take them the other way round
        self._live = Live(Group(self, self._progress), console=terminal.console, auto_refresh=False)
        self._over = threading.Event()
        self._bars: dict[str, tuple[TaskID, int]] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line on what goes on, if there is one."""
        if text := str(self.status()):
            self._spinner.update(text=Text(f"{text}  {time.monotonic() - self._began:.0f} s"))
            yield self._spinner

    def __enter__(self) -> Self:
        with self._terminal.console:
            self._live.start()
            self._terminal.draws = True
        threading.Thread(target=self._refresh, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._terminal.console:
            self.status = str
            self._live.stop()
            self._terminal.draws = False

    def _refresh(self) -> None:
        while not self._over.wait(1 / REFRESHES_PER_S):
            with self._terminal.console:
                if self._live.is_started:
                    self._live.refresh()

    @override
    def show(self, event: Event) -> None:
        stage = event.stage
        if not stage:
            return
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=1), 1
        bar, steps = self._bars[stage]
        if event.type == "progress":
            self._bars[stage] = bar, event.steps
            self._progress.update(bar, completed=event.step, total=event.steps)
        elif event.type == "stage_completed":
            self._progress.update(bar, completed=steps)
        elif event.type == "retrying":
            self._terminal.say(retried(event))
            self._progress.reset(bar, completed=0)


SILENCE_S = 1.5  # where lines are written, the longest time without one; people should not have to wait for 2 s


def progress_on(terminal: Terminal, status: Status) -> ProgressDisplay:
    """The kind of progress for this terminal."""
    if terminal.quiet:
        return NoProgress(status)
    if not terminal.interactive:
        return ProgressLines(terminal, status)
    return ProgressBars(terminal, status)


class NoProgress(ProgressDisplay):
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
