"""Standard error: log lines of this process and of those that it started."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, TextIO, cast

from unfuse.service.groups import Log

if TYPE_CHECKING:
    from structlog.typing import EventDict

    from unfuse.worker.records import Record


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

PLAIN = ("dumb", "unknown")
"""Terminals, by TERM, that only write."""


def harmless(text: str) -> str:
    """Text with what makes a terminal do something, or a line look like two, spelled out: a client may have sent it."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class Logs:
    """Standard error of this process and of those it starts: how much is logged there, and how.

    `usual` is the level where none is set. Writing to it never fails.
    """

    def __init__(self, log: Log | None = None, usual: str = "warning", *, quiet: bool = False) -> None:
        log = log or Log()
        self.quiet = quiet
        self.interactive = sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in PLAIN
        self.text = log.format == "text" or (log.format == "auto" and self.interactive)
        self.heard: Callable[[int, Record], None] = lambda worker, record: None
        """Is told what each worker logs, by its number, whatever is shown of it."""
        self._level = ("error" if quiet else usual) if log.level == "auto" else log.level

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
        """Write whole lines. One that nobody reads is lost, and harms nothing."""
        with suppress(OSError, ValueError):
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
        colours = self.interactive and not os.environ.get("NO_COLOR")
        render = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
        return render(None, "", shown)
