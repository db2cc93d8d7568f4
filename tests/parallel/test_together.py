"""Weights in memory that the first rank fills and the others open: here ranks are threads, with files of their own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.descriptors import descriptors
from unfuse.core.errors import ConfigError
from unfuse.parallel.weights import gather_files

RANKS, WAIT_S = 3, 20.0


class Rank:
    """One of the ranks of a test."""

    said = [b""] * RANKS

    def __init__(self, rank: int, barrier: threading.Barrier) -> None:
        self.rank, self._barrier = rank, barrier

    def exchange(self, own: bytes) -> list[bytes]:
        self.said[self.rank] = own
        self._barrier.wait(WAIT_S)
        found = [*self.said]
        self._barrier.wait(WAIT_S)
        return found


def on_all(load: Callable[[], dict[str, torch.Tensor]]) -> list[Any]:
    """What each rank has of it: tensors, None where it is to load for itself, or the reason why there is nothing."""
    barrier = threading.Barrier(RANKS)

    def one(rank: int) -> Any:
        try:
            with gather_files(Rank(rank, barrier), load) as file:  # type: ignore[arg-type]
                return load_file(file) if file else None
        except ConfigError as error:
            return str(error)

    before = descriptors()
    with ThreadPoolExecutor(RANKS) as ranks:
        found = [*ranks.map(one, range(RANKS))]
    assert descriptors() <= before, "nothing stays open"
    return found


def tensors() -> dict[str, torch.Tensor]:
    time.sleep(0.2)  # the others wait
    odd, even = torch.arange(3, dtype=torch.bfloat16), torch.arange(64.0).view(8, 8)
    return {"odd": odd, "even": even, "even.again": even, "count": torch.tensor(5), "none": torch.zeros(0, 4)}


def test_all_ranks_receive_the_tensors_that_rank_0_loaded() -> None:
    wanted = tensors()
    del wanted["even.again"]
    for found in on_all(tensors):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in wanted.items())


def test_each_rank_loads_its_own_weights_if_rank_0_shares_none() -> None:
    assert on_all(dict) == [None] * RANKS


def test_load_error_of_rank_0_is_raised_on_all_ranks() -> None:
    def fails() -> dict[str, torch.Tensor]:
        raise ValueError("weights lack proj_out")

    assert on_all(fails) == ["weights lack proj_out"] * RANKS


def test_each_rank_loads_its_own_weights_if_one_cannot_open_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, once = os.open, iter([True])

    def refused(path: Any, *more: Any) -> int:
        if str(path).startswith("/proc/") and next(once, False):
            raise PermissionError(path)
        return opened(path, *more)

    monkeypatch.setattr(os, "open", refused)
    assert on_all(tensors) == [None] * RANKS


def test_exit_of_rank_0_during_loading_is_reported_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.parallel.weights._fill", lambda file, load: None)
    assert on_all(tensors) == ["rank 0 exited while it loaded weights"] * RANKS
