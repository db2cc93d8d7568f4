"""Progress in one place of a terminal."""

from __future__ import annotations

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


class Bars(ProgressDisplay):
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
        self._live = Live(Group(self, self._progress), console=terminal.console)
        self._bars: dict[str, tuple[TaskID, int]] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line on what goes on, if there is one."""
        if text := str(self.status()):
            self._spinner.update(text=Text(f"{text}  {time.monotonic() - self._began:.0f} s"))
            yield self._spinner

    def __enter__(self) -> Self:
        self._live.start()
        self._terminal.draws = True
        return self

    def __exit__(self, *_: object) -> None:
        self.status = str
        self._terminal.draws = False
        self._live.stop()

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
