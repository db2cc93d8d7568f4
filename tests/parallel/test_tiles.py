"""Ranks encode and decode together what the undivided pipeline does in tiles, and each tile is made once."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.models import conftest as c
from tests.parallel.conftest import run_ranks
from unfuse.parallel.tiles import TileCall, Tiles, assign_calls

ALONE = [(job.name, 0) for job in c.TILED]
ONE_TILE, IN_A_BATCH = ("tiled-one", 0), ("tiled-flux", 2)
TASKS = [*ALONE, IN_A_BATCH]
PICTURED = {"tiled-picture": 3 * 5 * 32 * (256 + 256 + 64), "tiled-first": 12 * 16 * (256 + 256 + 64)}
"""What starts from a picture, and the numbers that its tiles have; the VAE of the second takes pixels by fours."""
Work = dict[tuple[str, int], np.ndarray]


def worked(size: int, undivided: c.Undivided, folder: Path) -> Work:
    """How many numbers each rank encoded and decoded for each task, a row a rank. What they make of it is the
    undivided pipeline's on every rank, and so are the latents that begin with a picture.
    """
    codes = run_ranks("decoding", size, folder, TASKS, str(undivided.root))
    assert codes == [0] * size, "\n".join((folder / f"log{rank}").read_text()[-2000:] for rank in range(size))
    for number, (name, mates) in enumerate(TASKS):
        wanted = undivided.result(name)
        for rank, kind in product(range(size), ("pixels", "latents") if name in PICTURED else ("pixels",)):
            with np.load(folder / f"{number} {rank}.npz") as made:
                assert np.array_equal(made[kind], wanted[kind]), (name, mates, rank, kind)
    said = [np.loadtxt(folder / f"out{rank}", int) for rank in range(size)]
    return {task: np.stack([own[number] for own in said]) for number, task in enumerate(TASKS)}


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_share_vae_tiles_and_match_the_undivided_pipeline(undivided: c.Undivided, tmp_path: Path) -> None:
    work = worked(2, undivided, tmp_path)

    assert work.pop(ONE_TILE).tolist() == [[0, 4 * 12 * 8], [0, 0]]
    for task, ranks in work.items():
        encoded, decoded = ranks.T
        assert 0.4 < decoded[0] / sum(decoded) < 0.6, task
        assert sum(encoded) == PICTURED.get(task[0], 0), task
        assert not any(encoded) or 0.4 < encoded[0] / sum(encoded) < 0.6, task


@pytest.mark.slow
@pytest.mark.nightly
def test_each_vae_tile_is_computed_once_with_two_or_three_ranks(undivided: c.Undivided, tmp_path: Path) -> None:
    for size in (2, 3):
        (tmp_path / str(size)).mkdir()
    two, three = (worked(size, undivided, tmp_path / str(size)) for size in (2, 3))

    assert {task: work.sum(0).tolist() for task, work in two.items()} == {
        task: work.sum(0).tolist() for task, work in three.items()
    }


@given(sides=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1), ranks=st.integers(1, 5))
def test_each_tile_is_assigned_to_one_rank_and_loads_are_balanced(sides: list[tuple[int, int]], ranks: int) -> None:
    memories = [{"feat_cache": [side]} for side, _ in sides]
    tiles = [memory for memory, (_, frames) in zip(memories, sides, strict=True) for _ in range(frames)]
    calls = [TileCall((torch.zeros(1, *memory["feat_cache"]),), memory) for memory in tiles]

    owners = assign_calls(calls, ranks)

    assert len({(id(tile), owner) for tile, owner in zip(tiles, owners, strict=True)}) == len(sides)
    loads = Counter(dict.fromkeys(range(ranks), 0))
    for call, owner in zip(calls, owners, strict=True):
        loads[owner] += call.tensor.numel()
    assert max(loads.values()) - min(loads.values()) <= max(side * frames for side, frames in sides)


class Full(torch.nn.Module):
    """A decoder that doubles, on a device that is full at its second call."""

    calls = 0

    def forward(self, tile: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("the device is full")
        return 2 * tile


class Alone:
    """An axis of one rank."""

    rank, size = 0, 1

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]


def test_tiled_decode_can_be_retried_after_out_of_memory() -> None:
    decoder, grid = Full(), torch.arange(5.0).view(1, 5)
    axis: Any = Alone()
    decode = Tiles(lambda grid: torch.cat([decoder(grid[:, :3]), decoder(grid[:, 3:])], 1), decoder, axis)

    with pytest.raises(torch.OutOfMemoryError):
        decode(grid)

    assert torch.equal(decode(grid), 2 * grid)
