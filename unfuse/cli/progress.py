"""A request's events as bars on standard error."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from unfuse.core.event import Event


class StageBars:
    """One bar for each stage that has started; a context manager that draws while it is open."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:16}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._bars: dict[str, tuple[TaskID, int]] = {}

    def __enter__(self) -> StageBars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """Take in the next event."""
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
            self._progress.console.print(f"{stage}: {event.message or 'trying again'}", markup=False)
            self._progress.reset(bar, completed=0)
