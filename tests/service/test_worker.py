"""What `unfuse worker` makes of its settings: where it is near, and who may pull from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from unfuse.transfer.base import TransferEngine
from unfuse.wire.keys import make
from unfuse.wire.run_folder import machine_id
from unfuse.worker.options import WorkerOptions


@pytest.fixture
def composed(unfuse: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The worker of a command line, with a data folder that holds no keys: its options and engines."""
    monkeypatch.setenv("UNFUSE_DATA_DIR", str(tmp_path / "data"))
    made: list[tuple[WorkerOptions, Mapping[str, TransferEngine]]] = []

    async def work(options: WorkerOptions, engines: Mapping[str, TransferEngine], *descriptors: int | None) -> None:
        del descriptors
        made.append((options, engines))

    def call(*arguments: str) -> tuple[WorkerOptions, Mapping[str, TransferEngine]]:
        monkeypatch.setattr("unfuse.service.worker.work", work)
        code, _, err = unfuse("worker", "--scheduler", "unix:/run/nobody", *arguments)
        assert code == 0, err
        for engine in made[-1][1].values():
            engine.close()
        return made.pop()

    return call


def test_nodes_are_told_apart_by_the_run_folder_and_not_by_the_host_s_name(
    composed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(os.environ["UNFUSE_RUN_DIR"])
    one, _ = composed()
    again, _ = composed("--role", "encoder")
    monkeypatch.setenv("UNFUSE_RUN_DIR", f"{here}/other")
    elsewhere, _ = composed()

    assert (one.node, one.run_dir) == (again.node, again.run_dir) == (machine_id(here), str(here))
    assert elsewhere.node != one.node != os.uname().nodename
    assert elsewhere.run_dir == f"{here}/other"
    assert composed("--node", "rack 3")[0].node == "rack 3"


def test_a_worker_is_pulled_from_only_by_who_has_its_keys(composed: Any, tmp_path: Path) -> None:
    options, engines = composed()
    assert engines == {} and not options.transfer.authentic

    options, engines = composed("--insecure-listen")
    assert set(engines) == {"tcp", "zmq"} and options.transfer.insecure and not options.transfer.secret

    make(tmp_path / "keys")
    options, engines = composed("--keys", str(tmp_path / "keys"))
    assert set(engines) == {"tcp", "zmq"} and options.transfer.authentic
