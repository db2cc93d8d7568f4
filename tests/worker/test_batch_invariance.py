"""What is remembered of batches that were compared: across processes, and whatever lies in the file."""

import json
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from unfuse.core.errors import PermanentError
from unfuse.stages.base import EncodedMedia, StageOutput
from unfuse.worker.batches import MAX_ENTRIES, RECHECK_ONE_IN, TRUSTED_AFTER, InvarianceResults, _equal

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
    found.record(KEY, 2, "torch.silu")
    assert (found.largest(KEY, 2), found.find(KEY, 2).variant_function) == (1, "torch.silu")
    assert not found.must_compare(KEY, 2)
    assert InvarianceResults(tmp_path / "e.json").find(KEY, 2).variant_function == "torch.silu", (
        "also for the next process"
    )


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
    threads = [Thread(target=lambda one=one: one.record(KEY, 2, "torch.sin")) for one in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(InvarianceResults(file, str(n)).find(KEY, 2).variant_function for n in range(8))


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


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16), False),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
        (np.zeros(2), np.zeros(2), True),
        (np.zeros(2), -np.zeros(2), False),
        (StageOutput({"x": torch.ones(2)}), StageOutput({"x": torch.ones(2)}), True),
        (StageOutput({"x": torch.ones(2), "y": None}), StageOutput({"x": torch.ones(2)}), False),
        (
            StageOutput(media=(EncodedMedia("image/png", b"a"),)),
            StageOutput(media=(EncodedMedia("image/png", b"b"),)),
            False,
        ),
        (PermanentError("not finite"), PermanentError("not finite"), True),
        (PermanentError("not finite"), None, False),
    ],
)
def test_outputs_are_compared_bit_for_bit(one: object, other: object, same: bool) -> None:
    assert _equal(one, other) is same
