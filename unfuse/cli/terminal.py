"""The terminal of a verb: what is written stands above the progress that is drawn there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unfuse.service.groups import Log
from unfuse.service.logs import Logs

if TYPE_CHECKING:
    from rich.console import Console


class Terminal(Logs):
    """Standard error of a verb, and what was said of it; `flags` are the settings that flags gave."""

    def __init__(
        self, log: Log | None = None, usual: str = "warning", *, quiet: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(log, usual, quiet=quiet)
        self.flags = flags or {}
        self.wrote_at = time.monotonic()
        """When something was written last."""
        self.draws = False
        """Whether progress is being drawn, above which everything else goes."""

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
