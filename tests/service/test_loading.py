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


def test_loading_is_under_way_from_when_workers_are_expected_until_they_are_ready() -> None:
    loading = Loading(["one"])
    assert not loading.is_under_way
    for _ in range(2):  # workers may be started again
        loading.expect(["all"])
        assert loading.is_under_way
        loading.hear(0, {"event": "ready"})
        assert not loading.is_under_way


def test_a_download_is_told_in_bytes_and_rate() -> None:
    loading = Loading(["one"])
    loading.expect(["encoder"])
    loading.hear(0, {"event": "fetching", "model": "one", "done": 1 << 20, "total": 3 << 20, "rate": float(1 << 20)})

    assert str(loading) == "loading one: encoder fetches 1.0 MiB of 3.0 MiB, 1.0 MiB/s, 0:02 left"


def test_of_ranks_the_one_that_has_loaded_least_is_told() -> None:
    loading = Loading(["one"])
    loading.expect(["denoiser"])

    def told(event: str, rank: int, **more: int) -> str:
        loading.hear(0, {"event": event, "rank": rank, **more})
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
    Loading(["one"]).expect([], lambda: ready.append(True))
    assert ready


def test_workers_that_are_equally_far_are_one_part_of_the_line() -> None:
    loading = Loading(["one"])
    loading.expect(["all", "all", "encoder"])
    for worker in range(3):
        loading.hear(worker, {"event": "importing"})
    assert str(loading) == "loading one: all importing (×2), encoder importing"


def test_only_the_first_start_is_shown_in_the_line_and_it_is_ready_once() -> None:
    ready: list[bool] = []
    loading = Loading(["one"])
    loading.expect(["all"], lambda: ready.append(True))
    assert loading.hear(0, {"event": "importing"})
    assert not loading.hear(0, {"event": "task failed"})
    assert loading.hear(0, {"event": "ready"}), "the line has shown it until then"
    assert not loading.hear(1, {"event": "importing"}), "of a model that was added"
    assert not loading.hear(0, {"event": "importing"}), "a worker that is started again is news for the log"
    assert not loading.hear(0, {"event": "ready"})
    assert ready == [True]
