"""Standard error: what is shown of log lines, and how."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from unfuse.service.groups import LogSettings
from unfuse.service.logs import Logs
from unfuse.worker.records import Record, read_record, relog

INFO = b'{"event": "ready", "level": "info", "role": "encoder", "timestamp": "2026-01-01T00:00:00Z"}\n'
WARNING = b'{"event": "task failed", "level": "warning", "reason": "a\\u001b[2Jb\\nunfuse: all is well"}\n'


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """Leave logging as it was."""
    last = logging.lastResort
    yield
    structlog.reset_defaults()
    logging.lastResort = last


@pytest.mark.parametrize(("level", "shown"), [("error", 0), ("warning", 1), ("info", 2)])
def test_worker_log_records_are_filtered_by_level(capsys: pytest.CaptureFixture[str], level: str, shown: int) -> None:
    logs = Logs(LogSettings(level, "json"))
    logs.relay(0, INFO)
    logs.relay(0, WARNING)
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["ready", "task failed"][2 - shown :]


def test_text_log_escapes_newlines_and_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    logs = Logs(LogSettings("info", "text"))
    logs.relay(0, WARNING)
    logs.relay(0, b'{"event": "a\\u001b[2Jb\\nc", "level": "error"}')
    logs.relay(0, b"\x1b[2Jraw\n")
    first, second, third = capsys.readouterr().err.splitlines()
    assert "task failed" in first
    assert "a\\x1b[2Jb\\nunfuse: all is well" in first
    assert "a\\x1b[2Jb\\nc" in second
    assert third == "\\x1b[2Jraw"


def test_json_log_wraps_a_plain_line_in_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    Logs(LogSettings(format="json"), quiet=True).relay(3, b"Segmentation fault\n")
    assert json.loads(capsys.readouterr().err) == {"event": "Segmentation fault", "level": "warning", "worker": 3}


def test_logging_without_stderr_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    logs = Logs(LogSettings("info", "text"))
    logs.relay(0, INFO)
    logs.write_line("a line")
    logs.flush()
    assert not logs.interactive


def test_on_record_receives_records_below_the_log_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs = Logs(LogSettings("error"))
    heard: list[tuple[int, str]] = []

    def hear(worker: int, record: Record) -> bool:
        heard.append((worker, record["event"]))
        return False

    logs.on_record = hear
    logs.relay(2, INFO)
    logs.relay(2, b"no record")
    assert heard == [(2, "ready")]
    assert "ready" not in capsys.readouterr().err


@pytest.mark.parametrize(("level", "shown"), [("info", 0), ("debug", 1)])
def test_records_shown_as_progress_are_logged_at_debug_level(
    capsys: pytest.CaptureFixture[str], level: str, shown: int
) -> None:
    logs = Logs(LogSettings(level, "json"))
    logs.on_record = lambda worker, record: record["event"] == "ready"
    logs.relay(0, INFO)
    logs.relay(0, WARNING)
    events = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert events == ["ready", "task failed"][1 - shown :]


def test_text_log_rounds_seconds_to_two_digits(capsys: pytest.CaptureFixture[str]) -> None:
    logs = Logs(LogSettings("info", "text"))
    logs.relay(0, b'{"event": "loaded", "level": "info", "seconds": 0.019943501999932778, "bytes": 3158}')
    line = capsys.readouterr().err
    assert "seconds=0.02" in line and "bytes=3158" in line and "0.0199" not in line


@pytest.mark.parametrize(
    "line", [b"[1]", b"{}", b'{"event": 1, "level": "info"}', b'{"event": "x", "level": []}', b"{" * 5000]
)
def test_invalid_log_record_is_not_parsed(line: bytes) -> None:
    assert read_record(line) is None


def test_relayed_log_record_keeps_its_level(capsys: pytest.CaptureFixture[str]) -> None:
    Logs(LogSettings("warning", "json")).open_log()
    for line in (INFO, WARNING):
        record = read_record(line)
        assert record
        relog(record)
    (told,) = capsys.readouterr().err.splitlines()
    assert json.loads(told)["reason"].startswith("a\x1b")


def test_log_records_of_libraries_are_included(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Logs(LogSettings("info", "json")).open_log()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger("some.library").warning("watch %s", "out")
    told = json.loads(capsys.readouterr().err)
    assert (told["event"], told["level"], told["library"]) == ("watch out", "warning", "some.library")


def test_broken_stderr_pipe_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def isatty(self) -> bool:
            return False

        def write(self, _: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Gone())
    logs = Logs(LogSettings("info", "json"))
    logs.open_log()
    structlog.get_logger().warning("nobody hears this")
    logs.relay(0, WARNING)


def test_workers_are_started_with_json_logs_and_a_matching_level() -> None:
    assert Logs(LogSettings("error")).environment == {"UNFUSE_LOG__FORMAT": "json", "UNFUSE_LOG__LEVEL": "info"}
    assert Logs(LogSettings("debug", "text")).environment["UNFUSE_LOG__LEVEL"] == "debug"


def test_quiet_hides_everything_below_error_unless_a_level_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Logs(quiet=True)
    quiet.write_line("making it")
    quiet.relay(0, WARNING)
    Logs(LogSettings("warning", "json"), quiet=True).relay(0, WARNING)
    assert capsys.readouterr().err.count("\n") == 1
