"""A denoiser of several ranks with all that may stand between: a queue in Redis, another host, another spread."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.test_nodes import keys, moved, other_host
from tests.integration.test_ranks import alike
from tests.netns import SecondHost
from tools.redis_server import RedisServer
from tools.server import Server, all_gone, serving, until

__all__ = ["keys", "other_host"]
pytestmark = pytest.mark.nightly

RANKS = "--parallel", "denoiser=ulysses:2", "--collective-s", "5", "--threads", "1"


@contextmanager
def without_denoiser(folder: Path, host: SecondHost, keys: list[str], redis: RedisServer) -> Iterator[Server]:
    options = [*keys, "--queue", redis.url, "--arena", "64MiB", "--workers", "encoder=1,decoder=1", "--threads", "1"]
    with serving(folder, *options, at=host.near) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        yield server


def picture(server: Server, seed: int, **more: object) -> bytes:
    request = server.submit("a red circle on white", seed=seed, num_inference_steps=30, **more)
    assert server.finished(request)["status"] == "completed"
    return server.result(request)


def test_ranks_on_another_host_match_one_rank_also_after_a_rank_crash(
    tmp_path: Path, other_host: SecondHost, keys: list[str], redis_server: RedisServer
) -> None:
    with without_denoiser(tmp_path, other_host, keys, redis_server) as server:
        alone = server.worker("denoiser", *keys, "--threads", "1")
        server.ready()
        undivided = [picture(server, seed) for seed in range(2)]
        server.killed(alone)
        away = server.worker("denoiser", *keys, "--engine", "tcp", *RANKS, within=other_host.enter)
        calm = [picture(server, seed) for seed in range(2)]
        assert all(map(alike, calm, undivided))
        assert moved(server).get("tcp", 0) > 0
        for how in (signal.SIGKILL, signal.SIGSTOP):
            request = server.submit("a red circle on white", seed=1, num_inference_steps=30)
            for event in server.events(request):
                if event["type"] == "progress" and event["stage"] == "denoise.0":
                    break
            (parent, *_) = (one for one in psutil.Process(away.pid).children(recursive=True) if "compute" in one.name())
            os.kill(parent.pid, how)
            assert server.finished(request)["status"] == "completed"
            assert server.result(request) == calm[1]
        everyone = psutil.Process(away.pid).children(recursive=True)
        server.killed(away)
        until(lambda: all_gone(everyone), "the ranks to end")


def test_pools_of_different_parallelism_share_the_requests(
    tmp_path: Path, other_host: SecondHost, keys: list[str], redis_server: RedisServer
) -> None:
    with without_denoiser(tmp_path, other_host, keys, redis_server) as server:
        server.worker("denoiser", *keys, "--threads", "1")
        server.ready()
        calm = {seed: picture(server, seed) for seed in range(3)}
        server.worker("denoiser", *keys, "--engine", "tcp", *RANKS, within=other_host.enter)

        def pools() -> list[str]:
            return [
                one["id"]
                for one in server.get("/v1/pools")["data"]
                if one["id"].startswith("denoise") and one["workers"]
            ]

        until(lambda: len(pools()) == 2, "both to be there")
        asked = [
            (seed % 3, server.submit("a red circle on white", seed=seed % 3, num_inference_steps=30))
            for seed in range(16)
        ]
        took = set()
        for seed, request in asked:
            shown = server.finished(request)
            assert alike(server.result(request), calm[seed])
            took |= {stage["pool"] for stage in shown["stages"] if stage["name"] == "denoise.0"}
        assert took == {*pools()}, "neither stood idle while the other had a line"
