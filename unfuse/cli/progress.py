"""Show progress on standard error: as bars on a terminal, else as occasional lines."""

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

#: How often bars are redrawn.
REFRESHES_PER_S = 4

#: Without a terminal, the most seconds between two lines. The next one should follow in less than 2 s.
SILENCE_S = 1.5


class ProgressBars(ProgressDisplay):
    """One bar for each started stage, below a line on the current activity."""

    def __init__(self, terminal: Terminal, status: Status) -> None:
        self.status = status
        self._terminal = terminal
        self._progress = RichProgress(
            TextColumn("{task.description:16}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=terminal.console,
        )
        self._spinner = Spinner("dots")
        self._opened_at = time.monotonic()
        # No automatic refresh: rich's thread acquires the lock of Live before the console's, threads that write acquire
        # them the other way round, and both would deadlock.
        self._live = Live(Group(self, self._progress), console=terminal.console, auto_refresh=False)
        self._closed = threading.Event()
        #: By stage, its bar and its number of steps.
        self._bars: dict[str, tuple[TaskID, int]] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the line on the current activity, if there is one."""
        if text := str(self.status()):
            self._spinner.update(text=Text(f"{text}  {time.monotonic() - self._opened_at:.0f} s"))
            yield self._spinner

    def __enter__(self) -> Self:
        with self._terminal.console:
            self._live.start()
            self._terminal.draws = True
        threading.Thread(target=self._refresh, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with self._terminal.console:
            self.status = str  # str() is "": no activity is shown
            self._live.stop()
            self._terminal.draws = False

    def _refresh(self) -> None:
        """Redraw the bars until this is closed."""
        while not self._closed.wait(1 / REFRESHES_PER_S):
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
            self._terminal.write_line(retried(event))
            self._progress.reset(bar, completed=0)


def progress_on(terminal: Terminal, status: Status) -> ProgressDisplay:
    """Return the progress display that suits this terminal."""
    if terminal.quiet:
        return NoProgress(status)
    if not terminal.interactive:
        return ProgressLines(terminal, status)
    return ProgressBars(terminal, status)


class NoProgress(ProgressDisplay):
    """A display that shows nothing, for --quiet."""

    def __init__(self, status: Status) -> None:
        self.status = status

    @override
    def show(self, event: Event) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class ProgressLines(ProgressDisplay):
    """A line for each completed stage, and lines on the current activity in between.

    The latter are written after SILENCE_S seconds without a line.
    """

    def __init__(self, terminal: Terminal, status: Status) -> None:
        self.status = status
        self._terminal = terminal
        #: The monotonic time of each stage's first event.
        self._started_at: dict[str, float] = {}
        #: The running stage and its progress, as text.
        self._running = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill_silence, daemon=True)

    def __enter__(self) -> Self:
        self._terminal.write_line(str(self.status()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    @override
    def show(self, event: Event) -> None:
        stage, now = event.stage, time.monotonic()
        started_at = self._started_at.setdefault(stage, now)
        if event.type == "stage_completed":
            self._running = ""
            self._terminal.write_line(f"{stage}: done in {now - started_at:.1f} s")
        elif event.type == "retrying":
            self._terminal.write_line(retried(event))
        elif event.type == "progress":
            self._running = f"{stage}: {event.step} of {event.steps} steps"
        elif event.type == "stage_started":
            self._running = f"{stage}: running"

    def _fill_silence(self) -> None:
        """Write a line whenever none was written for SILENCE_S seconds, until this is closed."""
        opened_at = time.monotonic()
        while not self._closed.wait(max(0.0, self._terminal.wrote_at + SILENCE_S - time.monotonic())):
            if time.monotonic() - self._terminal.wrote_at >= SILENCE_S:
                text = self._running or str(self.status()) or "working"
                self._terminal.write_line(f"{text} ({time.monotonic() - opened_at:.0f} s)")
