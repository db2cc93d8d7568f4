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

from unfuse.service.groups import LogSettings

if TYPE_CHECKING:
    from structlog.typing import EventDict

    from unfuse.worker.records import Record


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

PLAIN = ("dumb", "unknown")  # values of TERM for terminals that cannot move the cursor


def harmless(text: str) -> str:
    """Text with control characters and line breaks escaped, since a client may have sent it."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class Logs:
    """What this process and those it starts log on standard error, by default from level `usual` on. Never fails."""

    def __init__(self, log: LogSettings | None = None, usual: str = "warning", *, quiet: bool = False) -> None:
        log = log or LogSettings()
        self.quiet = quiet
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self.interactive = is_terminal and os.environ.get("TERM", "").lower() not in PLAIN
        self.text = log.format == "text" or (log.format == "auto" and self.interactive)
        self.heard: Callable[[int, Record], bool] = lambda worker, record: False
        """Called with each worker's number and log record, logged or not. Returns whether progress shows it."""
        self._level = ("error" if quiet else usual) if log.level == "auto" else log.level

    @property
    def is_detailed(self) -> bool:
        """Whether details are logged, such as what progress shows already."""
        return self._level == "debug"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of child processes, so that they write records for `relay`."""
        return {"UNFUSE_LOG__FORMAT": "json", "UNFUSE_LOG__LEVEL": "debug" if self.is_detailed else "info"}

    def open_log(self) -> None:
        """Write this process's log here from now on."""
        import structlog

        from unfuse.worker.records import LEVELS, write_records

        write_records(cast(TextIO, self), LEVELS[self._level])
        if self.text:
            *first, _ = structlog.get_config()["processors"]
            structlog.configure(processors=[*first, lambda _, __, event: self._rendered(event)])

    def relay(self, worker: int, line: bytes) -> None:
        """Show a line that a worker wrote: a record according to its level, any other line as it is.

        A record that progress shows, such as that weights were loaded, is a detail.
        """
        from unfuse.worker.records import LEVELS, read_record

        record = read_record(line)
        if record:
            in_progress = self.heard(worker, record)
            if LEVELS[record["level"]] < LEVELS[self._level] or record.get("passing"):  # shown as what goes on
                return
            if in_progress and not self.is_detailed:
                return
        text = line.decode(errors="replace").rstrip("\r\n")
        if self.text:
            text = self._rendered(record) if record else harmless(text)
        elif record is None:
            text = json.dumps({"event": text, "level": "warning", "worker": worker})
        self.write(f"{text}\n")

    def say(self, text: str) -> None:
        """Write a line that is not part of the log, unless quiet."""
        if not self.quiet:
            self.write(f"{text}\n")

    def write(self, text: str) -> int:
        """Write whole lines. Errors, such as a closed terminal, are ignored."""
        with suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush standard error."""
        with suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.flush()

    def _rendered(self, record: EventDict) -> str:
        """A record as a line for people, in local time."""
        import structlog

        shown = {name: round(value, 2) if isinstance(value, float) else value for name, value in record.items()}
        shown["event"] = harmless(record["event"])
        with suppress(KeyError, TypeError, ValueError):
            shown["timestamp"] = f"{datetime.fromisoformat(record['timestamp']).astimezone():%H:%M:%S}"
        colours = self.interactive and not os.environ.get("NO_COLOR")
        render = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
        return render(None, "", shown)
