"""The terminal of a verb: progress stays in one place, and everything else is written above it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from unfuse.core.request import Event
from unfuse.service.groups import Log
from unfuse.service.logs import Logs

if TYPE_CHECKING:
    from rich.console import Console


Status = Callable[[], object]  # returns what goes on, in a few words; "" if there is nothing to show


class Terminal(Logs):
    """Standard error of a verb, and what was said of it; `flags` are the settings that flags gave."""

    def __init__(
        self, log: Log | None = None, usual: str = "warning", *, quiet: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(log, usual, quiet=quiet)
        self.flags = flags or {}
        self.wrote_at = time.monotonic()  # the time at which something was last written
        self.draws = False  # whether progress is being drawn, above which everything else goes

    @cached_property
    def console(self) -> Console:
        """Standard error for what has colours and moves."""
        from rich.console import Console

        return Console(stderr=True, highlight=False)

    def write(self, text: str) -> int:
        """Write whole lines, above the progress that is shown."""
        self.wrote_at = time.monotonic()
        if not self.draws:
            return super().write(text)
        from rich.text import Text

        with suppress(OSError, ValueError):
            self.console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
        return len(text)


class ProgressDisplay(AbstractContextManager["ProgressDisplay"], Protocol):
    """What is shown while it is open: what goes on now, and the stages of a request."""

    status: Status

    @abstractmethod
    def show(self, event: Event) -> None:
        """Handle the next event of a request."""

    def close(self) -> None:
        """Show nothing from now on."""
        self.__exit__(None, None, None)


def retried(event: Event) -> str:
    """Why a stage runs again."""
    return f"{event.stage}: {event.message or 'trying again'}"
