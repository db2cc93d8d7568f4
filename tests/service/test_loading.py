"""What is told of loading."""

from __future__ import annotations

from unfuse.service.loading import Loading


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
