"""What the chart makes, run as processes: several schedulers over its Redis, pools that come and go, and its test."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.kubelet import Node, Pod
from tools.helm import made
from tools.server import until
from unfuse.client import connect
from unfuse.wire.keys import make

POOLS = [
    {
        "name": name, "role": role, "replicas": 1, "arena": "64MiB",
        "autoscaling": {"min": 0, "max": 2, "seconds": 1},
    }
    for name, role in (("enc", "encoder"), ("rest", "denoiser+decoder"))
]  # fmt: skip
VALUES = {"redis": {"trial": True}, "wireKeys": {"existingSecret": "wire"}, "workers": POOLS}


@contextmanager
def running(tmp_path: Path) -> Iterator[Node]:
    """A node for pods, whose last words are printed if anything fails."""
    make(keys := tmp_path / "keys")
    wire = {path.name: path.read_bytes() for path in keys.iterdir()}
    (folder := tmp_path / "node").mkdir()
    node = Node(folder, made(VALUES), {"wire": wire}, os.getpid() % 250)
    try:
        yield node
    except BaseException:
        print(*(f"== {pod.called}\n{pod.log()[-3000:]}" for pod in node.pods), sep="\n")
        raise
    finally:
        node.close()


def seconds(scheduler: Pod, query: str) -> float:
    """What KEDA's query gives of what that scheduler says, which alone is scraped."""
    found = re.fullmatch(r'sum\(max by \(role, component\) \((\w+){.*,role=~"([^"]*)"}\)\)', query)
    assert found
    with urllib.request.urlopen(f"http://{scheduler.address}:8000/metrics", timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == found[1]]
    return sum(sample.value for sample in samples if re.fullmatch(found[2], sample.labels["role"]))


def test_what_the_chart_makes_serves_sleeps_and_is_upgraded(tmp_path: Path) -> None:
    """Given two schedulers and no worker, when one is asked for a picture then it waits, and the query of each pool
    says that there is work; when workers come to the other scheduler then it is made, and nothing is left. When that
    scheduler and all workers are replaced while pictures are asked for then none is lost, and all have the same bytes.
    The chart's own test passes, and every pod ends by itself when it is told to."""
    with running(tmp_path) as node:
        serve_and_upgrade(node)


def serve_and_upgrade(node: Node) -> None:
    redis = node.pod("u-redis")
    until(lambda: "Ready to accept" in redis.log(), "its Redis", redis.process)
    first, second = (node.pod("u-scheduler", {"u-redis": redis.address}).started() for _ in range(2))
    gateway, control = node.service(8000, first, second), node.service(8001, second, first)
    key = node.secret("u-api", "key").decode()
    queries = {
        name: one["spec"]["triggers"][0]["metadata"]["query"] for name, one in node.made.of("ScaledObject").items()
    }
    with connect(f"http://{gateway.address}:8000", key) as client:
        request = client.submit("a red circle on white", seed=1)
        assert all(seconds(scheduler, query) > 0 for query in queries.values() for scheduler in (first, second))
        workers = [node.pod(name, {"u-scheduler": control.address}) for name in queries]
        assert {worker.probe("readinessProbe") for worker in workers} <= {0, 503}
        made_once = request.result().data
        for worker in workers:
            assert worker.started().probe("livenessProbe") == worker.probe("readinessProbe") == 200
        until(lambda: not any(seconds(first, query) for query in queries.values()), "nothing to be left")

        again = [client.submit("a red circle on white", seed=1) for _ in range(8)]
        third = node.pod("u-scheduler", {"u-redis": redis.address}).started()
        control.pods.append(third)
        assert second.stop() == 0
        more = [node.pod(name, {"u-scheduler": control.address}).started() for name in queries]
        assert [worker.stop() for worker in workers] == [0, 0]
        assert [one.result().data for one in again] == [made_once] * 8
    test = node.pod("u-picture", {"u": gateway.address})
    assert test.ended() == 0, test.log()
    (picture,) = test.folder.rglob("out.png")
    with Image.open(picture) as shown:
        assert shown.format == "PNG"
    assert [pod.stop() for pod in (*more, first, third, redis)] == [0] * 5
