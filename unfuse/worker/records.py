"""Log lines between processes: a child writes records, one a line, and its parent logs them."""

from __future__ import annotations

import logging
from typing import Any, TextIO

import msgspec
import structlog

LEVELS = {name.lower(): level for name, level in logging.getLevelNamesMapping().items() if level}

MUTED = "torchao", "torch.utils._pytree", "diffusers.quantizers"
"""Loggers of libraries that warn, whenever torchao is imported, of kernels that it has for other versions of torch."""

Record = dict[str, Any]  # one log line: `event`, `level` by name, `timestamp`, and the fields that were logged with it


class RecordLoggers(structlog.WriteLoggerFactory):
    """What `write_records` configures, so that it can be told from what a program configured."""


def is_configured_elsewhere() -> bool:
    """Return whether structlog was configured by the program that uses this library, and not by `write_records`."""
    return structlog.is_configured() and not isinstance(structlog.get_config()["logger_factory"], RecordLoggers)


def write_records(stream: TextIO, level: int = logging.DEBUG) -> None:
    """Make this process write its log, from this level on, as JSON, one record a line."""
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
    logging.lastResort = _Libraries(logging.WARNING)


def mute_libraries() -> None:
    """Leave out warnings that libraries give at every import, whatever is done with them. To be called before it."""
    for name in MUTED:
        logging.getLogger(name).setLevel(logging.ERROR)


def read_record(line: bytes) -> Record | None:
    """The record in a line; None for a line that is not a record."""
    if not line.startswith(b"{"):
        return None
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    event, level = record.get("event"), record.get("level")
    return record if isinstance(event, str) and isinstance(level, str) and level in LEVELS else None


def relog(record: Record) -> None:
    """Log the record of another process as if it were our own."""
    said = {name: value for name, value in record.items() if name not in ("event", "level", "timestamp")}
    structlog.get_logger().log(LEVELS[record["level"]], record["event"], **said)


class _Libraries(logging.Handler):
    """Logs what libraries write to Python's own logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record of a library."""
        log = structlog.get_logger()
        log.log(record.levelno, record.getMessage(), library=record.name, exc_info=record.exc_info)
