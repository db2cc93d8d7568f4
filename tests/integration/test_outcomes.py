"""Workers of one server that make other bytes, since they compute with other numbers of threads."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pictures import digest
from tests.netns import second_host
from tools.redis_server import RedisServer
from tools.server import Server, environment, serving, unfuse, until

SHORT = {"UNFUSE_LEASE__TTL_S": "2", "UNFUSE_SERVE__CHECKPOINT": "1"}
SERVED = ("--workers", "encoder+decoder=1", "--arena", "64MiB")


def denoiser_of(request: dict[str, Any]) -> str:
    """The pool in which a request was denoised."""
    return next(str(stage["pool"]) for stage in request["stages"] if stage["name"] == "denoise.0")


def denoisers(server: Server) -> dict[str, list[str]]:
    """The workers of each pool of denoisers."""
    data = server.get("/v1/pools")["data"]
    return {pool["id"]: pool["workers"] for pool in data if pool["id"].startswith("denoise-")}


@pytest.mark.nightly
def test_request_restarts_in_a_pool_of_other_numerics_after_a_crash(tmp_path: Path) -> None:
    """Given a request that waits for a denoiser, when two of other outcomes come, then one of them has it. Given one
    that runs, when its denoiser is killed, then the other makes the whole picture, as it makes any."""
    with serving(tmp_path, *SERVED, **SHORT) as server:
        check_outcomes(server, lambda *arguments: server.worker("denoiser", *arguments))


@pytest.mark.nightly
def test_request_restarts_in_a_pool_of_other_numerics_on_another_host(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    keys = ("--keys", str(tmp_path / "keys"))
    subprocess.run(unfuse("keys", "new", keys[1]), env=environment(tmp_path), check=True, capture_output=True)
    with (
        second_host() as host,
        serving(tmp_path, *SERVED, *keys, "--queue", redis_server.url, at=host.near, **SHORT) as server,
    ):
        places = iter([list, host.enter])
        check_outcomes(server, lambda *arguments: server.worker("denoiser", *keys, *arguments, within=next(places)))


def check_outcomes(server: Server, denoiser: Callable[..., subprocess.Popen[bytes]]) -> None:
    """`denoiser` starts a worker with these arguments."""
    until(lambda: server.get("/v1/workers") and server.get("/v1/workers")["data"], "the other stages to be served")
    early = ask(server)
    (waiting,) = denoisers(server)
    assert server.get("/ready") is None

    started = [denoiser("--threads", str(threads)) for threads in (1, 2)]
    until(lambda: len(denoisers(server)) == 2, "both denoisers")
    assert denoiser_of(server.finished(early)) in denoisers(server)
    assert {pool.rpartition("-")[0] for pool in denoisers(server)} == {waiting.rpartition("-")[0]}
    assert waiting not in denoisers(server), "nobody had said yet what it makes"

    request = ask(server)
    until(lambda: server.get(f"/v1/requests/{request}")["step"], "a step to be made")
    pool = denoiser_of(server.get(f"/v1/requests/{request}"))
    (worker,) = denoisers(server)[pool]
    (other,) = denoisers(server).keys() - {pool}
    pid = next(one["pid"] for one in server.get("/v1/workers")["data"] if one["id"] == worker)
    server.killed(next(one for one in started if one.pid == pid))
    assert denoiser_of(server.finished(request)) == other
    again = ask(server)
    assert denoiser_of(server.finished(again)) == other
    assert digest(server.result(request)) == digest(server.result(again))
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        labels = rf'\{{numerics="[0-9a-f]{{8}}",pool="{other}"\}}'
        assert re.search(f"unfuse_tasks_dispatched_total{labels}", page.read().decode())


def ask(server: Server) -> str:
    return server.submit("a red circle on white", seed=4, num_inference_steps=100)
