"""Outputs, copies and results elsewhere than in arenas and on a disk: the same pictures, and nothing is left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.pictures import made_pair
from tests.stores.servers import S3Server
from tools.redis_server import RedisServer
from tools.server import own_run_folder, serving, unfuse, until
from unfuse.stores.blobs import open_blobs


def kept(url: str) -> list[str]:
    """What is in a place, and not a result."""
    return [f"{entry.folder}/{entry.name}" for entry in open_blobs(url).entries()]


def test_redis_outputs_and_s3_copies_are_deleted_after_completion(
    tmp_path: Path, redis_server: RedisServer, s3_server: S3Server, expected_pair: list[str]
) -> None:
    """Given a server whose workers keep outputs in Redis, copies of every stage and results in S3, when pictures are
    made, then they are the undivided pipeline's, and once their requests are over only results are left."""
    bucket, query = s3_server.url.split("?")
    copies, results = f"{bucket}/copies?{query}", f"{bucket}/results?{query}"
    places = ["--store", redis_server.url, "--durable", copies, "--results", results]
    stages = ["--durable-stages", "denoise", "--durable-stages", "text_encode"]
    with serving(
        tmp_path, "--arena", "64MiB", "--workers", "encoder+decoder=1", "--threads", "1", *places, *stages
    ) as server:
        server.worker("denoiser", "--node", "other")
        assert made_pair(server.ready()) == expected_pair
        until(lambda: not kept(redis_server.url) and not kept(copies), "outputs and copies to be dropped")
        assert len(kept(results)) == 2


@pytest.mark.nightly
def test_spilled_outputs_are_pulled_from_another_node(tmp_path: Path, expected_pair: list[str]) -> None:
    """Given an encoder whose arena spills everything at once, when its reader is on another node, then the owner takes
    back what it moved, pictures are the undivided pipeline's, and nothing was made twice."""
    slow = tmp_path / "slow"
    keys = ["--keys", str(tmp_path / "keys")]
    subprocess.run(unfuse("keys", "new", keys[1]), check=True, capture_output=True)
    spilling = ["--store", f"spill:shared_memory+disk:{slow}", "--workers", "none", *keys]
    with serving(tmp_path, *spilling, UNFUSE_SPILL__THRESHOLD="0.00001") as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("encoder", *keys, **own_run_folder("a"))
        ids = [server.submit(f"a red circle on {ground}", seed=seed) for seed, ground in enumerate(("white", "black"))]
        until(lambda: any(slow.rglob("*.*")), "the first output to be moved when the second comes")
        for role in ("denoiser", "decoder"):
            server.worker(role, *keys, **own_run_folder("b"))
        for id in ids:
            assert {stage["attempt"] for stage in server.finished(id)["stages"]} == {1}
        assert made_pair(server) == expected_pair
        until(lambda: not [path for path in slow.rglob("*") if path.is_file()], "what was moved to be dropped")
