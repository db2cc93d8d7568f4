"""Where log lines go: standard error, so that standard output is data alone."""

from __future__ import annotations

import sys
from logging import INFO as INFO, WARNING as WARNING


def to_stderr(level: int = INFO) -> None:
    """Have log lines of at least this level written to standard error: for people on a terminal, else as JSON."""
    import structlog

    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),
            *([] if terminal else [structlog.processors.format_exc_info]),
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
