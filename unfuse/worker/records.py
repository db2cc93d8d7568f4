"""Log records between processes: a child writes JSON lines, and its parent logs them."""

from __future__ import annotations

import logging
from typing import Any, TextIO

import msgspec
import structlog

#: Log levels by lower-case name.
LEVELS = {name.lower(): level for name, level in logging.getLevelNamesMapping().items() if level}

#: Loggers that are muted. At every import of torchao, they warn about its kernels for other versions of torch.
MUTED = "torchao", "torch.utils._pytree", "diffusers.quantizers"

#: One log record: `event`, `level` by name, `timestamp`, and the logged fields.
Record = dict[str, Any]


class RecordLoggers(structlog.WriteLoggerFactory):
    """The logger factory of `write_records`, as a type of its own.

    The type distinguishes the configuration of `write_records` from a program's own.
    """


def is_configured_elsewhere() -> bool:
    """Whether structlog was configured by the program that uses this library, not by `write_records`."""
    return structlog.is_configured() and not isinstance(structlog.get_config()["logger_factory"], RecordLoggers)


def write_records(stream: TextIO, level: int = logging.DEBUG) -> None:
    """Make this process write its log as JSON lines, from this level on."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=RecordLoggers(stream),
    )

    # Python uses this one only if no handler is configured, so a library that configures logging is not overridden.
    logging.lastResort = _LibraryLog(logging.WARNING)


def mute_libraries() -> None:
    """Suppress warnings that libraries log at every import. Call this before the import."""
    for name in MUTED:
        logging.getLogger(name).setLevel(logging.ERROR)


def read_record(line: bytes) -> Record | None:
    """Return the record in a line; None if the line is not a record."""
    if not line.startswith(b"{"):
        return None
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):  # a library may print anything that begins with a brace
        return None
    event, level = record.get("event"), record.get("level")
    return record if isinstance(event, str) and isinstance(level, str) and level in LEVELS else None


def relog(record: Record) -> None:
    """Log the record of another process as if it were logged here."""
    fields = {name: value for name, value in record.items() if name not in ("event", "level", "timestamp")}
    structlog.get_logger().log(LEVELS[record["level"]], record["event"], **fields)


class _LibraryLog(logging.Handler):
    """Logs the records that libraries send to Python's own logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record of a library."""
        log = structlog.get_logger()
        log.log(record.levelno, record.getMessage(), library=record.name, exc_info=record.exc_info)
