"""What is told of loading, and what `unfuse.local` says meanwhile, and to whom."""

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
from unfuse.service.loading import EVERY_S, LoadingProgress, LoadLines, RankProgress
from unfuse.service.logs import Logs
from unfuse.service.settings import LoadedSettings

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
def pools(loaded: LoadedSettings, logs: Logs, loading: LoadingProgress | None = None) -> Iterator[Client]:
    """Stand in for `private_pools`: one worker, which is ready at once."""
    if loading:
        loading.expect_workers(["all"])
    logs.relay(0, READY)
    with connect("http://127.0.0.1:9") as client:
        yield client


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return what runs `unfuse.local` with such workers, and returns the lines on standard error.

    Python's own logging has these handlers meanwhile.
    """
    monkeypatch.setattr("unfuse.service.service.private_pools", pools)

    def run(*handlers: logging.Handler) -> list[str]:
        with monkeypatch.context() as patched:
            patched.setattr(logging.getLogger(), "handlers", [*handlers])
            with unfuse.local("some/model"):
                pass
        return capsys.readouterr().err.splitlines()

    return run


def test_loading_tells_each_worker_s_part_and_when_all_is_there() -> None:
    ready: list[bool] = []
    loading = LoadingProgress(["one", "two"])
    assert str(loading) == "inspecting one, two"
    loading.expect_workers(["encoder", "denoiser"], lambda: ready.append(True))
    loading.record(0, {"event": "importing"})
    loading.record(1, {"event": "loading", "stage": "denoise", "done": 0, "total": 15 << 20})
    loading.record(1, {"event": "loaded", "component": "transformer", "done": 12 << 20, "total": 15 << 20})
    assert str(loading) == "loading one, two: encoder importing, denoiser 12.0 MiB of 15.0 MiB"
    loading.record(1, {"event": "ready"})
    loading.record(0, {"event": "loaded", "done": "much", "total": None})
    assert not ready
    loading.record(0, {"event": "ready"})
    assert ready
    assert str(loading) == "", "and nothing needs to be said any more"


def test_loading_is_under_way_from_when_workers_are_expected_until_they_are_ready() -> None:
    loading = LoadingProgress(["one"])
    assert not loading.is_under_way
    for _ in range(2):  # workers may be started again
        loading.expect_workers(["all"])
        assert loading.is_under_way
        loading.record(0, {"event": "ready"})
        assert not loading.is_under_way


def test_a_download_is_told_in_bytes_and_rate() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["encoder"])
    loading.record(0, {"event": "fetching", "model": "one", "done": 1 << 20, "total": 3 << 20, "rate": float(1 << 20)})

    assert str(loading) == "loading one: encoder downloading 1.0 MiB of 3.0 MiB, 1.0 MiB/s, 0:02 left"


def test_of_ranks_the_one_that_has_loaded_least_is_told() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["denoiser"])

    def told(event: str, rank: int, **more: int) -> str:
        loading.record(0, {"event": event, "rank": rank, **more})
        return str(loading).removeprefix("loading one: denoiser ")

    assert (told("importing", 0), told("importing", 1)) == ("importing", "importing")
    assert told("loading", 1, done=0, total=8 << 20) == "importing"
    assert told("loading", 0, done=0, total=8 << 20) == "0 B of 8.0 MiB"
    assert told("loaded", 1, done=8 << 20, total=8 << 20) == "0 B of 8.0 MiB"
    assert told("loaded", 0, done=2 << 20, total=8 << 20) == "2.0 MiB of 8.0 MiB"
    assert told("loaded", 0, done=8 << 20, total=8 << 20) == "8.0 MiB of 8.0 MiB"
    assert told("importing", 0) == "importing", "when they are started again"


def test_who_starts_no_worker_has_nothing_to_wait_for() -> None:
    ready: list[bool] = []
    LoadingProgress(["one"]).expect_workers([], lambda: ready.append(True))
    assert ready


def test_workers_that_are_equally_far_are_one_part_of_the_line() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["all", "all", "encoder"])
    for worker in range(3):
        loading.record(worker, {"event": "importing"})
    assert str(loading) == "loading one: all importing (×2), encoder importing"


def test_only_the_first_start_is_shown_in_the_line_and_it_is_ready_once() -> None:
    ready: list[bool] = []
    loading = LoadingProgress(["one"])
    loading.expect_workers(["all"], lambda: ready.append(True))
    assert loading.record(0, {"event": "importing"})
    assert not loading.record(0, {"event": "task failed"})
    assert loading.record(0, {"event": "ready"}), "the line has shown it until then"
    assert not loading.record(1, {"event": "importing"}), "of a model that was added"
    assert not loading.record(0, {"event": "importing"}), "a worker that is started again is news for the log"
    assert not loading.record(0, {"event": "ready"})
    assert ready == [True]


def test_the_earliest_phase_of_all_workers_counts_with_its_bytes() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["encoder", "denoiser"])
    assert loading.earliest() == RankProgress("starting")
    loading.record(0, {"event": "fetching", "done": 3, "total": 10, "rate": 1.0})
    assert loading.earliest() == RankProgress("starting"), "the other one has said nothing yet"
    loading.record(1, {"event": "fetching", "done": 4, "total": 10, "rate": 1.0})
    assert loading.earliest() == RankProgress("fetching", 7, 20)
    for worker in (0, 1):
        loading.record(worker, {"event": "importing"})
    loading.record(0, {"event": "loading", "done": 5, "total": 8})
    assert loading.earliest() == RankProgress("importing")
    loading.record(1, {"event": "loaded", "done": 8, "total": 8})
    assert loading.earliest() == RankProgress("loading", 13, 16)
    for worker in (0, 1):
        loading.record(worker, {"event": "ready"})
    assert loading.earliest() is None


def test_bytes_of_ranks_are_added_up() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["denoiser"])
    loading.record(0, {"event": "loading", "done": 1, "total": 4, "rank": 0})
    loading.record(0, {"event": "loading", "done": 2, "total": 4, "rank": 1})
    assert loading.earliest() == RankProgress("loading", 3, 8)


def test_what_is_not_understood_changes_nothing() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["denoiser"])
    for worker, record in (
        (0, {"event": "fetching", "done": "1", "total": 2}),
        (0, {"event": "?"}),
        (7, {"event": "ready"}),
    ):
        assert not loading.record(worker, record)
    assert loading.earliest() == RankProgress("starting")


def test_a_line_is_said_every_few_seconds_until_all_workers_are_ready() -> None:
    now, lines, loading = [100.0], list[str](), LoadingProgress(["one"])
    progress = LoadLines("one", loading, lines.append, lambda: now[0])
    loading.expect_workers(["encoder", "denoiser"])
    loading.record(0, {"event": "ready"})
    loading.record(1, {"event": "importing"})
    assert progress.write_if_due() and not lines
    now[0] += EVERY_S
    assert progress.write_if_due() and progress.write_if_due()
    assert lines == ["loading one: encoder ready, denoiser importing (5 s)"]
    now[0] += 2
    loading.record(1, {"event": "ready"})
    assert not progress.write_if_due()
    assert lines[1:] == ["one is ready in 7 s"]


def test_a_program_hears_on_standard_error_how_far_its_workers_are(said: Callable[..., list[str]]) -> None:
    first, last = said()
    assert first == "unfuse: inspecting some/model"
    assert re.fullmatch(r"unfuse: some/model is ready in \d+ s", last)
    assert len(said()) == 2, "also the next time, though structlog is configured now, by ourselves"
    assert not [one for one in threading.enumerate() if one.name == "unfuse-loading"]


def test_a_program_that_configures_logging_gets_the_lines_in_its_log(
    said: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "unfuse"):
        assert said(caplog.handler) == []
    assert caplog.messages[0] == "inspecting some/model" and caplog.records[0].name == "unfuse"
    assert len(caplog.messages) == 2


def test_a_program_that_configures_structlog_gets_the_lines_there(said: Callable[..., list[str]]) -> None:
    with structlog.testing.capture_logs() as told:
        structlog.configure(processors=structlog.get_config()["processors"])
        assert said() == []
    events = [cast(str, record["event"]) for record in told]
    assert events[0] == "inspecting some/model" and len(events) == 2


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
    assert capsys.readouterr().err.splitlines() == ["unfuse: inspecting none/such/model"]
    assert not [one for one in threading.enumerate() if one.name == "unfuse-loading"]
