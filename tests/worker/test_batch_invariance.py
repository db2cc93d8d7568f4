"""What is remembered of batches that were compared: across processes, and whatever lies in the file."""

import json
from functools import reduce
from operator import or_
from pathlib import Path
from threading import Thread

import pytest
from structlog.testing import capture_logs

from unfuse.core.worker_status import BatchInvarianceStats
from unfuse.worker.batch_invariance import (
    DIFFERENT,
    MAX_ENTRIES,
    RECHECK_ONE_IN,
    SETTLED_AFTER,
    TRUSTED_AFTER,
    InvarianceResults,
)

KEY = ("pool", (64, 64), ())


def trusted(file: Path | None, scope: str = "", size: int = 2) -> InvarianceResults:
    found = InvarianceResults(file, scope, lambda: 1.0)
    for _ in range(TRUSTED_AFTER):
        assert found.must_compare(KEY, size)
        found.record(KEY, size, "")
    return found


def test_batch_size_is_trusted_after_enough_equal_comparisons(tmp_path: Path) -> None:
    found = trusted(tmp_path / "e.json")
    assert not found.must_compare(KEY, 2)
    assert found.must_compare(KEY, 3) and found.must_compare(("other", (64, 64), ()), 2)


def test_number_of_stored_invariance_results_is_bounded() -> None:
    found = InvarianceResults(None)
    for width in range(MAX_ENTRIES + 10):
        found.record(("pool", (width, 64), ()), 2, "")
    assert len(found._verdicts) == MAX_ENTRIES
    assert found.find(("pool", (MAX_ENTRIES + 9, 64), ()), 2).equal == 1


def test_one_difference_revokes_a_trusted_batch_size(tmp_path: Path) -> None:
    found = trusted(tmp_path / "e.json")
    found.record(KEY, 2, DIFFERENT)
    assert (found.largest(KEY, 2), found.find(KEY, 2).difference) == (1, DIFFERENT)
    assert not found.must_compare(KEY, 2)
    assert InvarianceResults(tmp_path / "e.json").find(KEY, 2).difference == DIFFERENT, "also for the next process"


def test_difference_in_a_file_of_an_older_version_is_known(tmp_path: Path) -> None:
    old = {f"device {KEY!r} 2": {"equal": 3, "variant_function": "torch.silu", "pool": "pool", "size": 2}}
    (tmp_path / "e.json").write_text(json.dumps(old))
    found = InvarianceResults(tmp_path / "e.json", "device")
    assert (found.find(KEY, 2).difference, found.must_compare(KEY, 2)) == ("torch.silu", False)


def test_difference_in_the_file_is_known_to_an_older_version(tmp_path: Path) -> None:
    InvarianceResults(tmp_path / "e.json").record(KEY, 2, DIFFERENT)
    assert [row["variant_function"] for row in json.loads((tmp_path / "e.json").read_bytes()).values()] == [DIFFERENT]


def test_trusted_batch_size_is_rechecked_at_random() -> None:
    found = trusted(None)
    draws = iter([1.5 / RECHECK_ONE_IN, 0.5 / RECHECK_ONE_IN])
    found._chance = lambda: next(draws)
    assert [found.must_compare(KEY, 2), found.must_compare(KEY, 2)] == [False, True]


def test_invariance_results_apply_only_to_their_device_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "e.json"
    trusted(file, "this device")
    assert InvarianceResults(file, "this device").find(KEY, 2).is_trusted
    assert not InvarianceResults(file, "another").find(KEY, 2).is_trusted


def test_concurrent_processes_lose_no_invariance_results(tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    own = [InvarianceResults(file, str(n)) for n in range(8)]
    threads = [Thread(target=lambda one=one: one.record(KEY, 2, DIFFERENT)) for one in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(InvarianceResults(file, str(n)).find(KEY, 2).difference for n in range(8))


@pytest.mark.parametrize("garbage", [b"", b"\xff\x00", b"[]", b'{"a": 1}', b'{"a": {"equal": "many"}}'])
def test_corrupt_invariance_file_is_replaced(tmp_path: Path, garbage: bytes) -> None:
    file = tmp_path / "e.json"
    file.write_bytes(garbage)
    trusted(file)
    assert len(json.loads(file.read_bytes())) == 1
    assert not InvarianceResults(file, "", lambda: 1.0).must_compare(KEY, 2)


def test_unwritable_folder_does_not_break_invariance_checks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not trusted(tmp_path / "file" / "e.json").must_compare(KEY, 2)


def record_differences(found: InvarianceResults, keys: int, pool: str = "pool", size: int = 2) -> None:
    for width in range(keys):
        found.record((pool, (width, 64), ()), size, DIFFERENT)


def test_three_keys_with_a_difference_settle_their_pool() -> None:
    found = InvarianceResults(None)
    record_differences(found, SETTLED_AFTER - 1)
    record_differences(found, SETTLED_AFTER - 1, size=4)
    record_differences(found, SETTLED_AFTER - 1, "other")
    assert not found.is_settled("pool"), "differences of one key at several sizes count once"
    record_differences(found, SETTLED_AFTER)
    assert found.is_settled("pool") and not found.is_settled("other")


def test_settled_pool_is_known_after_a_restart_on_the_same_device_only(tmp_path: Path) -> None:
    record_differences(InvarianceResults(tmp_path / "e.json", "this device"), SETTLED_AFTER)
    assert InvarianceResults(tmp_path / "e.json", "this device").is_settled("pool")
    assert not InvarianceResults(tmp_path / "e.json", "this").is_settled("pool")
    assert not InvarianceResults(tmp_path / "e.json").is_settled("pool")


def test_differences_of_several_processes_settle_a_pool_at_the_next_start(tmp_path: Path) -> None:
    for width in range(SETTLED_AFTER):
        InvarianceResults(tmp_path / "e.json").record(("pool", (width, 64)), 2, DIFFERENT)
    assert InvarianceResults(tmp_path / "e.json").is_settled("pool")


@pytest.mark.parametrize(
    ("or_batched", "consequence"),
    [
        (False, "each request has a forward of its own"),
        (True, "requests share forwards, with results equal within a tolerance"),
    ],
)
def test_settled_pool_is_logged_once(or_batched: bool, consequence: str) -> None:
    found = InvarianceResults(None, or_batched=or_batched)
    with capture_logs() as records:
        record_differences(found, SETTLED_AFTER + 2)
    assert [record["from_now_on"] for record in records if record["event"] == "this pool compares no more batches"] == [
        consequence
    ]


def test_pool_of_several_workers_has_the_weakest_of_their_modes() -> None:
    stats = [BatchInvarianceStats(4), BatchInvarianceStats(mode="batched"), BatchInvarianceStats(mode="alone")]
    assert reduce(or_, stats) == BatchInvarianceStats(4, mode="batched")
    assert reduce(or_, stats[::2]) == BatchInvarianceStats(4, mode="alone")
