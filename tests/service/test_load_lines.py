"""What `unfuse.local` says while its workers load, and to whom."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import structlog

import unfuse
from unfuse.client import Client, connect
from unfuse.service.load_lines import EVERY_S, LoadLines
from unfuse.service.loading import Loading
from unfuse.service.logs import Logs
from unfuse.service.settings import Loaded

READY = b'{"event": "ready", "level": "info"}'


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """Start with a program that has not configured structlog, and leave logging as it was."""
    last = logging.lastResort
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    logging.lastResort = last


@contextmanager
def pools(loaded: Loaded, logs: Logs, loading: Loading | None = None) -> Iterator[Client]:
    """Stand in for `own_pools`: one worker, which is ready at once."""
    if loading:
        loading.expect(["all"])
    logs.relay(0, READY)
    with connect("http://127.0.0.1:9") as client:
        yield client


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return what runs `unfuse.local` with such workers, and returns the lines on standard error.

    Python's own logging has these handlers meanwhile.
    """
    monkeypatch.setattr("unfuse.service.local.own_pools", pools)

    def run(*handlers: logging.Handler) -> list[str]:
        with monkeypatch.context() as patched:
            patched.setattr(logging.getLogger(), "handlers", [*handlers])
            with unfuse.local("some/model"):
                pass
        return capsys.readouterr().err.splitlines()

    return run


def test_a_line_is_said_every_few_seconds_until_all_workers_are_ready() -> None:
    now, lines, loading = [100.0], list[str](), Loading(["one"])
    progress = LoadLines("one", loading, lines.append, lambda: now[0])
    loading.expect(["encoder", "denoiser"])
    loading.hear(0, {"event": "ready"})
    loading.hear(1, {"event": "importing"})
    assert progress.look() and not lines
    now[0] += EVERY_S
    assert progress.look() and progress.look()
    assert lines == ["loading one: encoder ready, denoiser importing (5 s)"]
    now[0] += 2
    loading.hear(1, {"event": "ready"})
    assert not progress.look()
    assert lines[1:] == ["one is ready in 7 s"]


def test_a_program_hears_on_standard_error_how_far_its_workers_are(said: Callable[..., list[str]]) -> None:
    first, last = said()
    assert first == "unfuse: looking into some/model"
    assert re.fullmatch(r"unfuse: some/model is ready in \d+ s", last)
    assert len(said()) == 2, "also the next time, though structlog is configured now, by ourselves"
    assert not [one for one in threading.enumerate() if one.name == "unfuse-loading"]


def test_a_program_that_configures_logging_gets_the_lines_in_its_log(
    said: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "unfuse"):
        assert said(caplog.handler) == []
    assert caplog.messages[0] == "looking into some/model" and caplog.records[0].name == "unfuse"
    assert len(caplog.messages) == 2


def test_a_program_that_configures_structlog_gets_the_lines_there(said: Callable[..., list[str]]) -> None:
    with structlog.testing.capture_logs() as told:
        structlog.configure(processors=structlog.get_config()["processors"])
        assert said() == []
    events = [cast(str, record["event"]) for record in told]
    assert events[0] == "looking into some/model" and len(events) == 2


@pytest.mark.parametrize("level", ["error", "warning"])
def test_who_sets_the_level_of_the_log_hears_no_more_than_that(
    said: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setenv("UNFUSE_LOG__LEVEL", level)
    assert said() == []


def test_what_fails_before_any_worker_starts_ends_the_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with pytest.raises(unfuse.UnfuseError, match="none/such/model"), unfuse.local("none/such/model"):
        pytest.fail("it started")
    assert capsys.readouterr().err.splitlines() == ["unfuse: looking into none/such/model"]
    assert not [one for one in threading.enumerate() if one.name == "unfuse-loading"]
