"""How far something is, on standard error: in one place of a terminal, else a line now and then."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from unfuse.core.event import Event

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.progress import TaskID

    from unfuse.cli.terminal import Terminal

SILENCE_S = 1.5
"""Where lines are written, the longest time without one; people should not have to wait for 2 s."""

Status = Callable[[], object]
"""Says what goes on, in a few words; empty when nothing needs to be said."""


class Progress(AbstractContextManager["Progress"], Protocol):
    """What is shown while it is open: what goes on now, and the stages of a request."""

    status: Status

    @abstractmethod
    def show(self, event: Event) -> None:
        """Take in the next event of a request."""


def progress_on(terminal: Terminal, status: Status) -> Progress:
    """Progress as that terminal shows it."""
    if terminal.quiet:
        return Hidden(status)
    return Bars(terminal, status) if terminal.interactive else Lines(terminal, status)


class Hidden(Progress):
    """No progress."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def show(self, event: Event) -> None:
        """See Progress."""

    def __exit__(self, *_: object) -> None:
        """Nothing was shown."""


class Lines(Progress):
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

    def show(self, event: Event) -> None:
        """See Progress."""
        stage, now = event.stage, time.monotonic()
        began = self._began.setdefault(stage, now)
        if event.type == "stage_completed":
            self._running = ""
            self._terminal.say(f"{stage}: done in {now - began:.1f} s")
        elif event.type == "retrying":
            self._terminal.say(_retried(event))
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


class Bars(Progress):
    """One bar for each stage that has started, below a line on what goes on."""

    def __init__(self, terminal: Terminal, status: Status) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress as RichProgress, TextColumn, TimeElapsedColumn
        from rich.spinner import Spinner

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
        self._live = Live(Group(self, self._progress), console=terminal.console)
        self._bars: dict[str, tuple[TaskID, int]] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line on what goes on, if there is one."""
        from rich.text import Text

        if text := str(self.status()):
            self._spinner.update(text=Text(f"{text}  {time.monotonic() - self._began:.0f} s"))
            yield self._spinner

    def __enter__(self) -> Self:
        self._live.start()
        self._terminal.draws = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.status = str
        self._terminal.draws = False
        self._live.stop()

    def show(self, event: Event) -> None:
        """See Progress."""
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
            self._terminal.say(_retried(event))
            self._progress.reset(bar, completed=0)


def _retried(event: Event) -> str:
    return f"{event.stage}: {event.message or 'trying again'}"
