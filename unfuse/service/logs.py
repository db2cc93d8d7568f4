"""Write the log lines of this process and its workers to standard error."""

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


#: A control character.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

#: Values of the variable TERM for terminals that cannot move the cursor.
PLAIN = ("dumb", "unknown")


def escape_control(text: str) -> str:
    """Return text with control characters and line breaks escaped.

    A client may have sent the text. Its control characters could change the terminal, and its line breaks fake a log
    line.
    """
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


class Logs:
    """Writes the log of this process and its workers to standard error. Never fails.

    `log`: the settings of the log.
    `default_level`: the level for the setting "auto".
    `quiet`: write only errors.
    """

    def __init__(self, log: LogSettings | None = None, default_level: str = "warning", *, quiet: bool = False) -> None:
        log = log or LogSettings()
        self.quiet = quiet
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        #: Whether standard error is a terminal that can move the cursor.
        self.interactive = is_terminal and os.environ.get("TERM", "").lower() not in PLAIN

        #: Whether records are written as text, not as JSON.
        self.text = log.format == "text" or (log.format == "auto" and self.interactive)

        #: Called with the worker's number and each of its log records, also below the level. Returns whether the
        #: progress display shows the record.
        self.on_record: Callable[[int, Record], bool] = lambda worker, record: False
        self._level = ("error" if quiet else default_level) if log.level == "auto" else log.level

    @property
    def is_detailed(self) -> bool:
        """Whether debug records are logged, and records that the progress display shows already."""
        return self._level == "debug"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make child processes write records for `relay`."""
        return {"UNFUSE_LOG__FORMAT": "json", "UNFUSE_LOG__LEVEL": "debug" if self.is_detailed else "info"}

    def open_log(self) -> None:
        """Send the log records of this process to this log from now on."""
        import structlog

        from unfuse.worker.records import LEVELS, write_records

        write_records(cast(TextIO, self), LEVELS[self._level])
        if self.text:
            # The last processor renders JSON.
            *processors, _ = structlog.get_config()["processors"]
            structlog.configure(processors=[*processors, lambda _, __, event: self._render(event)])

    def relay(self, worker: int, line: bytes) -> None:
        """Write a line of a worker.

        A record is written according to its level. A record that the progress display shows, such as that weights were
        loaded, is written only at the level debug. A line that is not a record is always written.
        """
        from unfuse.worker.records import LEVELS, read_record

        record = read_record(line)
        if record:
            is_shown_as_progress = self.on_record(worker, record)
            if LEVELS[record["level"]] < LEVELS[self._level] or record.get("passing"):  # "passing": only for progress
                return
            if is_shown_as_progress and not self.is_detailed:
                return
        text = line.decode(errors="replace").rstrip("\r\n")
        if self.text:
            text = self._render(record) if record else escape_control(text)
        elif record is None:
            text = json.dumps({"event": text, "level": "warning", "worker": worker})
        self.write(f"{text}\n")

    def write_line(self, text: str) -> None:
        """Write a line that is not part of the log, unless quiet."""
        if not self.quiet:
            self.write(f"{text}\n")

    def write(self, text: str) -> int:
        """Write whole lines, and return the number of characters. Errors are ignored."""
        with suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush standard error."""
        with suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.flush()

    def _render(self, record: EventDict) -> str:
        """Return a record as a line of text, in local time."""
        import structlog

        fields = {name: round(value, 2) if isinstance(value, float) else value for name, value in record.items()}
        fields["event"] = escape_control(record["event"])
        with suppress(KeyError, TypeError, ValueError):
            fields["timestamp"] = f"{datetime.fromisoformat(record['timestamp']).astimezone():%H:%M:%S}"
        has_colours = self.interactive and not os.environ.get("NO_COLOR")
        render = structlog.dev.ConsoleRenderer(colors=has_colours, exception_formatter=structlog.dev.plain_traceback)
        return render(None, "", fields)
