"""The drills for as long as one likes: `make soak`, by default 100,000 requests. The log says which rounds are done.

SOAK_REQUESTS says how many, SOAK_LOG where the log is: started again, it goes on behind the last round in it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.chaos.checker import Verdict
from tests.chaos.cluster import running_cluster
from tests.chaos.drill import Record, drill

ROUND = 2500
FAULTS = {"kill compute": 60, "kill worker": 40, "kill scheduler": 14, "kill redis": 6, "freeze worker": 6}
ALONE = {"kill compute": 60, "kill worker": 40, "kill scheduler": 20}
"""Every fourth round has a queue in SQLite, and one gateway."""


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_soak_rounds_under_faults_lose_no_request(tmp_path: Path, record_property: Record) -> None:
    """Given round after round of work under faults, each on a new cluster, then there is never anything wrong."""
    requests, log = int(os.environ.get("SOAK_REQUESTS", 100_000)), Path(os.environ.get("SOAK_LOG", tmp_path / "log"))
    verdicts = (
        [msgspec.json.decode(line, type=Verdict) for line in log.read_bytes().splitlines()] if log.exists() else []
    )
    while sum(verdict.operations for verdict in verdicts) < requests:
        verdict = _round(tmp_path / f"round-{len(verdicts)}", len(verdicts))
        verdict.require_nothing_wrong()
        with log.open("ab") as file:
            file.write(msgspec.json.encode(verdict) + b"\n")
        verdicts.append(verdict)
        print(f"round {len(verdicts)}: {sum(one.operations for one in verdicts)} requests of {requests}", flush=True)
    for verdict in verdicts:
        record_property("chaos", msgspec.json.encode(verdict).decode())


def _round(folder: Path, number: int) -> Verdict:
    alone = number % 4 == 3
    folder.mkdir()
    with running_cluster(folder, queue="sqlite" if alone else "redis", schedulers=1 if alone else 2) as cluster:
        verdict = drill("soak", cluster, ROUND, number, ALONE if alone else FAULTS)
    shutil.rmtree(folder)
    return verdict
