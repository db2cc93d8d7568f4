"""The terminal of a verb: progress in one place, and all other lines above it."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.text import Text
from typing_extensions import override

from unfuse.core.request import Event
from unfuse.service.groups import LogSettings
from unfuse.service.logs import Logs

#: Returns the current activity as a short text; "" if there is nothing to show.
Status = Callable[[], object]


class LockedConsole(Console):
    """A console on which one thread draws at a time.

    `rich.live.Live` moves the cursor up by the height of its last drawing, and only then renders the next one. Two
    threads that do so at once move it by the same height, and leave lines behind.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._drawing = threading.RLock()

    @override
    def __enter__(self) -> Self:
        self._drawing.acquire()
        super().__enter__()
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)  # writes the buffered output
        finally:
            self._drawing.release()


class Terminal(Logs):
    """Standard error of a verb: its log, and its progress.

    `flags`: the values of the flags that all verbs have, by the dotted name of their setting.
    The other parameters are those of `Logs`.
    """

    def __init__(
        self,
        log: LogSettings | None = None,
        default_level: str = "warning",
        *,
        quiet: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(log, default_level, quiet=quiet)
        self.flags = flags or {}

        #: The monotonic time of the last written line.
        self.wrote_at = time.monotonic()

        #: Whether progress is drawn; lines are then written above it.
        self.draws = False

    @cached_property
    def console(self) -> Console:
        """The console on standard error, for colours and progress."""
        return LockedConsole(stderr=True, highlight=False)

    def write(self, text: str) -> int:
        """Write whole lines, above the progress if it is drawn."""
        self.wrote_at = time.monotonic()
        if not self.draws:
            return super().write(text)
        with suppress(OSError, ValueError):
            self.console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
        return len(text)


class ProgressDisplay(AbstractContextManager["ProgressDisplay"], Protocol):
    """Shows progress while it is open: the current activity, and the stages of a request."""

    #: Returns the current activity. It is called at each refresh.
    status: Status

    @abstractmethod
    def show(self, event: Event) -> None:
        """Show the next event of a request."""

    def close(self) -> None:
        """Stop showing progress."""
        self.__exit__(None, None, None)


def retried(event: Event) -> str:
    """Return the line that reports a retry of a stage, with the reason."""
    return f"{event.stage}: {event.message or 'trying again'}"
