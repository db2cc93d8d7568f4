"""Ranks decode together what the undivided pipeline decodes in tiles, and each tile is decoded once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models import conftest as c
from tests.parallel.conftest import run_ranks

pytestmark = pytest.mark.slow

NAMES = [job.name for job in c.TILED]
ONE_TILE = "tiled-one"


def decoded(size: int, undivided: c.Undivided, folder: Path) -> dict[str, list[int]]:
    """How many latents each rank decoded for each job, whose frames are the undivided pipeline's on every rank."""
    codes = run_ranks("decoding", size, folder, NAMES, str(undivided.root))
    assert codes == [0] * size, "\n".join((folder / f"log{rank}").read_text()[-2000:] for rank in range(size))
    for name in NAMES:
        wanted = undivided.result(name)["pixels"]
        for rank in range(size):
            assert np.array_equal(np.load(folder / f"{name} {rank}.npy"), wanted), (name, rank)
    said = [(folder / f"out{rank}").read_text().split() for rank in range(size)]
    return {name: [int(own[number]) for own in said] for number, name in enumerate(NAMES)}


def test_two_ranks_decode_in_tiles_what_one_does(undivided: c.Undivided, tmp_path: Path) -> None:
    work = decoded(2, undivided, tmp_path)

    assert sorted(work.pop(ONE_TILE)) == [0, 4 * 12 * 8]
    for name, (first, second) in work.items():
        assert 0.4 < first / (first + second) < 0.67, name


@pytest.mark.nightly
def test_each_tile_is_decoded_once_by_however_many(undivided: c.Undivided, tmp_path: Path) -> None:
    for size in (2, 3):
        (tmp_path / str(size)).mkdir()
    two, three = (decoded(size, undivided, tmp_path / str(size)) for size in (2, 3))

    assert {name: sum(work) for name, work in two.items()} == {name: sum(work) for name, work in three.items()}
