"""When drills may kill another compute process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.monkey import Monkey


class Requests(Cluster):
    """A cluster that is only what it says of its unfinished requests."""

    def __init__(self, unfinished: list[dict[str, Any]] | None) -> None:
        self._unfinished = unfinished

    def unfinished(self) -> list[dict[str, Any]] | None:
        return self._unfinished


def stage(status: str, crashes: int) -> dict[str, Any]:
    return {"name": "encode", "status": status, "crashes": crashes}


@pytest.mark.parametrize(
    ("unfinished", "may"),
    [
        ([{"id": "r", "stages": [stage("leased", 0)]}], True),
        ([{"id": "r", "stages": [stage("done", 1), stage("leased", 0)]}], True),
        ([{"id": "r", "stages": [stage("leased", 1)]}], False),
        ([{"id": "r", "stages": [stage("queued", 1)]}], False),
        (None, False),
    ],
)
def test_next_kill_waits_until_crashed_tasks_have_finished(unfinished: list[dict[str, Any]] | None, may: bool) -> None:
    assert Monkey(Requests(unfinished), 0)._recovered() is may
