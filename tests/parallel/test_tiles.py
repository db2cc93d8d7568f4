"""Ranks decode together what the undivided pipeline decodes in tiles, and each tile is decoded once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models import conftest as c
from tests.parallel.conftest import run_ranks

pytestmark = pytest.mark.slow

ALONE = [(job.name, 0) for job in c.TILED]
ONE_TILE, IN_A_BATCH = ("tiled-one", 0), ("tiled-flux", 2)
TASKS = [*ALONE, IN_A_BATCH]
Work = dict[tuple[str, int], list[int]]


def decoded(size: int, undivided: c.Undivided, folder: Path) -> Work:
    """How many latents each rank decoded for each task, whose frames are the undivided pipeline's on every rank."""
    codes = run_ranks("decoding", size, folder, TASKS, str(undivided.root))
    assert codes == [0] * size, "\n".join((folder / f"log{rank}").read_text()[-2000:] for rank in range(size))
    for number, (name, mates) in enumerate(TASKS):
        wanted = undivided.result(name)["pixels"]
        for rank in range(size):
            assert np.array_equal(np.load(folder / f"{number} {rank}.npy"), wanted), (name, mates, rank)
    said = [(folder / f"out{rank}").read_text().split() for rank in range(size)]
    return {task: [int(own[number]) for own in said] for number, task in enumerate(TASKS)}


def test_two_ranks_decode_in_tiles_what_one_does(undivided: c.Undivided, tmp_path: Path) -> None:
    work = decoded(2, undivided, tmp_path)

    assert work.pop(ONE_TILE) == [4 * 12 * 8, 0]
    for task, (first, second) in work.items():
        assert 0.4 < first / (first + second) < 0.6, task


@pytest.mark.nightly
def test_each_tile_is_decoded_once_by_however_many(undivided: c.Undivided, tmp_path: Path) -> None:
    for size in (2, 3):
        (tmp_path / str(size)).mkdir()
    two, three = (decoded(size, undivided, tmp_path / str(size)) for size in (2, 3))

    assert {task: sum(work) for task, work in two.items()} == {task: sum(work) for task, work in three.items()}
