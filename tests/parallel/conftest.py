"""Ranks as processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.forking import Forked, script as forked_script
from tests.models.conftest import Undivided, undivided as undivided

RANKS_S, TASK_S = 300.0, 5.0
"""How long ranks may take; or for each of the tasks that they are given, where that is longer."""


def begin_ranks(script: str, size: int, folder: Path, given: object, *arguments: str) -> list[Forked]:
    """Begin a script of this folder as so many ranks, which meet in `folder` and write there."""
    told = folder / "given"
    told.write_text(json.dumps(given))
    return [
        forked_script(
            f"tests.parallel.{script}",
            [str(rank), str(size), str(folder / "meet"), *arguments],
            stdin=told,
            stdout=folder / f"out{rank}",
            stderr=folder / f"log{rank}",
        )
        for rank in range(size)
    ]


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
