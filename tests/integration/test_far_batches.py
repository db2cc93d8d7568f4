"""Exact batches and streamed videos with all that may stand between: a queue in Redis, and stages on two hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.integration.test_families import frames
from tests.integration.test_nodes import keys, moved, other_host
from tests.integration.test_stream import begun, content, decoder_of, film, frames as frames_of, stopped, whole
from tests.netns import SecondHost
from tools.redis_server import RedisServer
from tools.server import Server, computes_of, serving, until
from tools.tiny import SERVING, build

__all__ = ["keys", "other_host"]
pytestmark = pytest.mark.nightly

MIXED = [
    {"prompt": f"a red circle {'and on ' * (n % 3)}", "seed": n, "num_inference_steps": 8 + n % 3} for n in range(16)
]


@contextmanager
def far(
    folder: Path, kind: str, away: str, host: SecondHost, keys: list[str], redis: RedisServer, **defaults: int
) -> Iterator[Server]:
    """A server over Redis of which the workers of one role are on that host."""
    model = build(kind, folder / kind)
    (model / "serving.json").write_text(json.dumps({"defaults": SERVING | defaults}))
    others = ["--workers", ",".join(f"{role}=1" for role in ("encoder", "denoiser", "decoder") if role != away)]
    options = [*keys, "--queue", redis.url, "--arena", "64MiB", *others]
    with serving(folder, str(model), *options, at=host.near) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker(away, *keys, "--engine", "tcp", within=host.enter)
        yield server.ready()


def test_batches_on_another_host_are_byte_identical_after_crashes(
    tmp_path: Path, other_host: SecondHost, keys: list[str], redis_server: RedisServer
) -> None:
    """Given requests that share forwards on another host, also when the compute processes are killed amid them."""
    with far(tmp_path, "flux", "denoiser", other_host, keys, redis_server) as server:
        alone = [frames(server, server.submit(**case)) for case in MIXED]  # type: ignore[arg-type]
        at_once = [server.submit(**case) for case in MIXED]  # type: ignore[arg-type]
        assert [frames(server, request) for request in at_once] == alone
        batches = [server.get(f"/v1/requests/{request}")["stages"] for request in at_once]
        assert max(stage["batch"] for stages in batches for stage in stages if stage["name"] == "denoise.0") > 1
        assert moved(server).get("tcp", 0) > 0

        killed = [server.submit(**case) for case in MIXED]  # type: ignore[arg-type]
        assert any(event["type"] == "progress" for event in server.events(killed[0]))
        for compute in computes_of(*(worker["pid"] for worker in server.get("/v1/workers")["data"])):
            compute.kill()
        assert [frames(server, request) for request in killed] == alone


def test_video_streams_while_another_host_decodes_it(
    tmp_path: Path, other_host: SecondHost, keys: list[str], redis_server: RedisServer
) -> None:
    """Given a decoder on another host that shares the results' folder, then its frames come while it works, are those
    of the file, and go on when its compute process is killed."""
    with far(tmp_path, "wan", "decoder", other_host, keys, redis_server, num_frames=41) as server:
        calm = whole(server, film(server), "?stream=1")
        id = film(server, seed=6)
        with content(server, id, "?stream=1") as answer:
            data = begun(answer)
            with stopped(decoder_of(server, id)):
                assert server.get(f"/v1/videos/{id}")["status"] == "in_progress"
            data += answer.read()
        assert np.array_equal(frames_of(data), frames_of(whole(server, id)))

        id = film(server)
        with content(server, id, "?stream=1") as answer:
            data = begun(answer)
            decoder_of(server, id).kill()
            data += answer.read()
        assert data == calm
        until(lambda: moved(server).get("tcp", 0) > 0, "what was pulled to be told")
