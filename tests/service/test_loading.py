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


def test_loading_progress_lists_each_worker_until_all_are_ready() -> None:
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


def test_loading_is_under_way_until_expected_workers_are_ready() -> None:
    loading = LoadingProgress(["one"])
    assert not loading.is_under_way
    for _ in range(2):  # workers may be started again
        loading.expect_workers(["all"])
        assert loading.is_under_way
        loading.record(0, {"event": "ready"})
        assert not loading.is_under_way


def test_download_progress_shows_bytes_and_rate() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["encoder"])
    loading.record(0, {"event": "fetching", "model": "one", "done": 1 << 20, "total": 3 << 20, "rate": float(1 << 20)})

    assert str(loading) == "loading one: encoder downloading 1.0 MiB of 3.0 MiB, 1.0 MiB/s, 0:02 left"


def test_loading_progress_shows_the_slowest_rank() -> None:
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


def test_loading_is_complete_if_no_workers_are_expected() -> None:
    ready: list[bool] = []
    LoadingProgress(["one"]).expect_workers([], lambda: ready.append(True))
    assert ready


def test_workers_with_equal_progress_are_grouped() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["all", "all", "encoder"])
    for worker in range(3):
        loading.record(worker, {"event": "importing"})
    assert str(loading) == "loading one: all importing (×2), encoder importing"


def test_loading_line_shows_only_the_first_start() -> None:
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


def test_overall_progress_is_the_earliest_phase_with_summed_bytes() -> None:
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


def test_loaded_bytes_of_ranks_are_summed() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["denoiser"])
    loading.record(0, {"event": "loading", "done": 1, "total": 4, "rank": 0})
    loading.record(0, {"event": "loading", "done": 2, "total": 4, "rank": 1})
    assert loading.earliest() == RankProgress("loading", 3, 8)


def test_malformed_progress_records_are_ignored() -> None:
    loading = LoadingProgress(["one"])
    loading.expect_workers(["denoiser"])
    for worker, record in (
        (0, {"event": "fetching", "done": "1", "total": 2}),
        (0, {"event": "?"}),
        (7, {"event": "ready"}),
    ):
        assert not loading.record(worker, record)
    assert loading.earliest() == RankProgress("starting")


def test_loading_line_is_repeated_until_all_workers_are_ready() -> None:
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


def test_local_writes_loading_progress_to_stderr(said: Callable[..., list[str]]) -> None:
    first, last = said()
    assert first == "unfuse: inspecting some/model"
    assert re.fullmatch(r"unfuse: some/model is ready in \d+ s", last)
    assert len(said()) == 2, "also the next time, though structlog is configured now, by ourselves"
    assert not [one for one in threading.enumerate() if one.name == "unfuse-loading"]


def test_loading_progress_goes_to_logging_if_it_is_configured(
    said: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "unfuse"):
        assert said(caplog.handler) == []
    assert caplog.messages[0] == "inspecting some/model" and caplog.records[0].name == "unfuse"
    assert len(caplog.messages) == 2


def test_loading_progress_goes_to_structlog_if_it_is_configured(said: Callable[..., list[str]]) -> None:
    with structlog.testing.capture_logs() as told:
        structlog.configure(processors=structlog.get_config()["processors"])
        assert said() == []
    events = [cast(str, record["event"]) for record in told]
    assert events[0] == "inspecting some/model" and len(events) == 2


@pytest.mark.parametrize("level", ["error", "warning"])
def test_log_level_above_info_silences_loading_progress(
    said: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setenv("UNFUSE_LOG__LEVEL", level)
    assert said() == []


def test_failure_before_workers_start_ends_loading_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with pytest.raises(unfuse.UnfuseError, match="none/such/model"), unfuse.local("none/such/model"):
        pytest.fail("it started")
    assert capsys.readouterr().err.splitlines() == ["unfuse: inspecting none/such/model"]
    assert not [one for one in threading.enumerate() if one.name == "unfuse-loading"]
