"""A pool has one name, which can be read: in /v1/pools, on /metrics, in requests and in the log."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.pictures import SHAPES
from tools.redis_server import RedisServer
from tools.server import Server, serving, until

STARTS = {
    "text_encode": "text-encode-umt5-encoder-f32-",
    "denoise.0": "denoise-wan-transformer-3d-f32-",
    "vae_decode.0": "vae-decode-autoencoder-kl-wan-f32-",
}
"""How the name of the pool begins that runs each stage of a picture of the built-in model."""


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two gateways over one queue, which serve one folder under different paths and names. One starts a worker."""
    folder = tmp_path_factory.mktemp("readable")
    redis = RedisServer(folder)
    shared = ["--arena", "64MiB", "--queue", redis.url, "--results", f"disk:{folder}/results", "--log-level", "debug"]
    models = [str(shutil.copytree(SHAPES, folder / "model")), str(folder / "link")]
    (folder / "link").symlink_to(folder / "model")
    for name in ("one", "other"):
        (folder / name).mkdir()
    try:
        with serving(folder / "one", models[0], *shared, "--served-model-name", "one", "--workers", "all=1") as one:
            until(lambda: (one.get("/v1/workers") or {"data": []})["data"], "the first gateway's worker", one.process)
            # the second starts later, since the declaration of the last start is the one that all gateways list
            own = ["--served-model-name", "other", "--workers", "none"]
            with serving(folder / "other", models[1], *shared, *own) as other:
                until(lambda: other.get("/health"), "the gateway without workers", other.process)
                yield one, other
    finally:
        redis.stop()


def models_of(server: Server) -> set[str]:
    return {model["id"] for model in server.get("/v1/models")["data"]}


def workers_by_pool(server: Server) -> dict[str, list[str]]:
    return {pool["id"]: pool["workers"] for pool in server.get("/v1/pools")["data"]}


def pools_of(server: Server, request: str) -> dict[str, str]:
    """The pool of each stage of a request, when it is over."""
    ended = server.finished(request)
    assert ended["status"] == "completed"
    return {stage["name"]: stage["pool"] for stage in ended["stages"]}


def test_gateways_serving_one_folder_under_different_names_share_pools(
    gateways: tuple[Server, Server],
) -> None:
    """Given a gateway without workers, then its pictures are made in the pools of the other, whose names it tells."""
    one, other = gateways
    # a gateway also lists the models of other gateways of its queue
    until(lambda: models_of(one) == {"one", "link"} and models_of(other) == {"other", "model"}, "both lists of models")
    until(lambda: workers_by_pool(one) == workers_by_pool(other), "both to tell of the same pools")
    (worker,) = one.get("/v1/workers")["data"]
    assert list(workers_by_pool(one).values()) == [[worker["id"]]] * 3

    made = {
        server: pools_of(server, server.submit("a red circle on white", model=name, seed=3))
        for server, name in zip(gateways, ("one", "other"), strict=True)
    }
    assert made[one] == made[other]
    assert {*made[one].values()} == {*workers_by_pool(one)} == {*worker["pools"]}
    assert not any(word in pool for pool in made[one].values() for word in ("one", "other", "model", "link"))


def test_pool_name_is_same_in_api_metrics_and_logs(gateways: tuple[Server, Server]) -> None:
    """Given a served picture, then its pools have one name in its stages, /v1/pools, models, /metrics and the log."""
    server, _ = gateways
    request = server.submit("a blue square on white", model="one", seed=5)
    pools = pools_of(server, request)
    assert all(re.fullmatch(STARTS[stage] + "[0-9a-f]{8}", pool) for stage, pool in pools.items()), pools
    assert {*pools.values()} == {*workers_by_pool(server)}
    assert {*server.get("/v1/models")["data"][0]["stages"].values()} == {*pools.values()}

    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
        labels = [sample.labels for family in families for sample in family.samples if "pool" in sample.labels]
    assert {found["pool"] for found in labels} == {*pools.values()}
    assert {len(found["numerics"]) for found in labels} == {8}

    logged = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    leased = {
        line["stage"]: line["pool"] for line in logged if line["event"] == "task leased" and line["request"] == request
    }
    assert leased == pools
    (ready,) = (line["pools"] for line in logged if line["event"] == "ready" and "pools" in line)
    assert {*ready} == {*pools.values()}
