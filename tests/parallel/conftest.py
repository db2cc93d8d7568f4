"""Ranks as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.models.conftest import Undivided, undivided as undivided

HERE = Path(__file__).parent
RANKS_S, TASK_S = 300.0, 5.0
"""How long ranks may take; or for each of the tasks that they are given, where that is longer."""


def begin_ranks(script: str, size: int, folder: Path, given: object, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """Begin a script of this folder as so many ranks, which meet in `folder` and write there."""
    told = folder / "given"
    told.write_text(json.dumps(given))
    ranks = []
    for rank in range(size):
        command = [sys.executable, "-m", f"tests.parallel.{script}", str(rank), str(size), str(folder / "meet")]
        with told.open() as read, (folder / f"out{rank}").open("w") as out, (folder / f"log{rank}").open("w") as log:
            begun = subprocess.Popen([*command, *arguments], stdin=read, stdout=out, stderr=log, cwd=HERE.parents[1])
        ranks.append(begun)
    return ranks


def run_ranks(script: str, size: int, folder: Path, given: object, *arguments: str) -> list[int]:
    """The same, until all have ended. Returns their exit codes."""
    patience = max(RANKS_S, TASK_S * len(given)) if isinstance(given, Sequence) else RANKS_S
    return [rank.wait(patience) for rank in begin_ranks(script, size, folder, given, *arguments)]


@pytest.fixture(scope="module")
def latents(
    undivided: Undivided, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, Sequence[tuple[str, str]]], Path]:
    """A folder with the latents of (spread, job)s, made by so many ranks together."""

    def make(size: int, tasks: Sequence[tuple[str, str]]) -> Path:
        folder = tmp_path_factory.mktemp("latents")
        codes = run_ranks("rank", size, folder, tasks, str(undivided.root))
        assert codes == [0] * size, "\n".join((folder / f"log{rank}").read_text()[-2000:] for rank in range(size))
        return folder

    return make
