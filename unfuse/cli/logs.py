"""Standard error: log lines of this process and of those that it started, above whatever progress is shown there."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO, cast

from unfuse.cli.show import harmless
from unfuse.service.groups import Log

if TYPE_CHECKING:
    from rich.console import Console
    from structlog.typing import EventDict

    from unfuse.worker.records import Record


class Terminal:
    """Standard error of a verb, and what was said of it: how much is logged, how, and whether progress is shown.

    `usual` is the level where none is set; `flags` are the settings that flags gave. Writing to it never fails.
    """

    def __init__(
        self, log: Log | None = None, usual: str = "warning", *, quiet: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        log = log or Log()
        self.quiet, self.flags = quiet, flags or {}
        self.interactive = sys.stderr.isatty() and not self.console.is_dumb_terminal
        self.text = log.format == "text" or (log.format == "auto" and self.interactive)
        self.heard: Callable[[int, Record], None] = lambda worker, record: None
        """Is told what each worker logs, by its number, whatever is shown of it."""
        self.wrote_at = time.monotonic()
        """When something was written last."""
        self.draws = False
        """Whether progress is being drawn, above which everything else goes."""
        self._level = ("error" if quiet else usual) if log.level == "auto" else log.level

    @cached_property
    def console(self) -> Console:
        """Standard error for what has colours and moves."""
        from rich.console import Console

        return Console(stderr=True, highlight=False)

    @property
    def environment(self) -> dict[str, str]:
        """What the processes that this one starts are told: they write records, for `relay`."""
        return {"UNFUSE_LOG__FORMAT": "json", "UNFUSE_LOG__LEVEL": "debug" if self._level == "debug" else "info"}

    def open_log(self) -> None:
        """Have what this process logs written here from now on."""
        import structlog

        from unfuse.worker.records import LEVELS, write_records

        write_records(cast(TextIO, self), LEVELS[self._level])
        if self.text:
            *first, _ = structlog.get_config()["processors"]
            structlog.configure(processors=[*first, lambda _, __, event: self._rendered(event)])

    def relay(self, worker: int, line: bytes) -> None:
        """Take in a line that a worker wrote: what it logged is shown by its level, anything else as it is."""
        from unfuse.worker.records import LEVELS, read_record

        record = read_record(line)
        if record:
            self.heard(worker, record)
            if LEVELS[record["level"]] < LEVELS[self._level]:
                return
        text = line.decode(errors="replace").rstrip("\r\n")
        if self.text:
            text = self._rendered(record) if record else harmless(text)
        elif record is None:
            text = json.dumps({"event": text, "level": "warning", "worker": worker})
        self.write(f"{text}\n")

    def say(self, text: str) -> None:
        """Tell something that is no log line, unless it is to be quiet."""
        if not self.quiet:
            self.write(f"{text}\n")

    def write(self, text: str) -> int:
        """Write whole lines, above the progress that is shown. One that nobody reads is lost, and harms nothing."""
        self.wrote_at = time.monotonic()
        with suppress(OSError, ValueError):
            if self.draws:
                from rich.text import Text

                self.console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
            else:
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Have what was written leave this process."""
        with suppress(OSError, ValueError):
            sys.stderr.flush()

    def _rendered(self, record: EventDict) -> str:
        """A record as a line for people, by the clock on their wall."""
        import structlog

        shown = {**record, "event": harmless(record["event"])}
        with suppress(KeyError, TypeError, ValueError):
            shown["timestamp"] = f"{datetime.fromisoformat(record['timestamp']).astimezone():%H:%M:%S}"
        colours = self.interactive and not self.console.no_color
        render = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
        return render(None, "", shown)
