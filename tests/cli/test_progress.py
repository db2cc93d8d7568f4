"""Progress where lines are written, and what is told of loading."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from unfuse.cli import progress
from unfuse.cli.progress import Hidden, Lines, progress_on
from unfuse.cli.terminal import Terminal
from unfuse.core.event import Event
from unfuse.service.loading import Loading


class Heard(Terminal):
    """A terminal that keeps what is said, and tells when there was enough of it."""

    def __init__(self, until: Callable[[list[str]], bool] = lambda said: False, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self.said: list[str] = []
        self.enough = threading.Event()
        self._until = until

    def write(self, text: str) -> int:
        self.said.append(text.rstrip("\n"))
        if self._until(self.said):
            self.enough.set()
        return len(text)


def test_a_stage_is_a_line() -> None:
    terminal = Heard()
    with progress_on(terminal, lambda: "loading") as shown:
        assert isinstance(shown, Lines)
        for event in (
            Event("queued"),
            Event("stage_started", stage="denoise.0"),
            Event("progress", stage="denoise.0", step=1, steps=2),
            Event("retrying", stage="denoise.0", message="it died"),
            Event("progress", stage="denoise.0", step=2, steps=2),
            Event("stage_completed", stage="denoise.0"),
        ):
            shown.show(event)
    assert terminal.said[:2] == ["loading", "denoise.0: it died"]
    assert terminal.said[2].startswith("denoise.0: done in ")
    assert len(terminal.said) == 3


def test_silence_is_filled_with_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.01)
    terminal = Heard(lambda said: any("7 of 9 steps" in line for line in said))
    with progress_on(terminal, lambda: "") as shown:
        shown.show(Event("stage_started", stage="denoise.0"))
        shown.show(Event("progress", stage="denoise.0", step=7, steps=9))
        assert terminal.enough.wait(60)


def test_quiet_shows_nothing() -> None:
    terminal = Heard(quiet=True)
    with progress_on(terminal, lambda: "loading") as shown:
        assert isinstance(shown, Hidden)
        shown.show(Event("stage_completed", stage="denoise.0"))
    assert terminal.said == []


def test_loading_tells_each_worker_s_part_and_when_all_is_there() -> None:
    ready: list[bool] = []
    loading = Loading(["one", "two"])
    assert str(loading) == "looking into one, two"
    loading.expect(["encoder", "denoiser"], lambda: ready.append(True))
    loading.hear(0, {"event": "importing"})
    loading.hear(1, {"event": "loading", "stage": "denoise", "done": 0, "total": 15 << 20})
    loading.hear(1, {"event": "loaded", "component": "transformer", "done": 12 << 20, "total": 15 << 20})
    assert str(loading) == "loading one, two: encoder importing, denoiser 12.0 MiB of 15.0 MiB"
    loading.hear(1, {"event": "ready"})
    loading.hear(0, {"event": "loaded", "done": "much", "total": None})
    assert not ready
    loading.hear(0, {"event": "ready"})
    assert ready
    assert str(loading) == "", "and nothing needs to be said any more"


def test_who_starts_no_worker_has_nothing_to_wait_for() -> None:
    ready: list[bool] = []
    Loading(["one"]).expect([], lambda: ready.append(True))
    assert ready
