"""What chart and operator make, run as processes: schedulers over a Redis, pools that come and go, the chart's test."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.kubelet import Node, Pod, confines
from tests.integration.operated import operated
from tools.helm import Object, made
from tools.server import until
from unfuse.client import connect

SMALL = {"args": ["--arena=64MiB"]}
UNDIVIDED = [SMALL | {"name": "every", "role": "all"}]
SPLIT = [SMALL | {"name": "enc", "role": "encoder"}, SMALL | {"name": "rest", "role": "denoiser+decoder"}]


@contextmanager
def running(tmp_path: Path, pools: list[Object]) -> Iterator[Node]:
    """A node for pods, whose last words are printed if anything fails."""
    (folder := tmp_path / "node").mkdir()
    scaled = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2}}
    node = Node(folder, operated(made({"pipeline": scaled, "pools": pools})), {}, os.getpid() % 250)
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


class Release:
    """A Redis and two schedulers, behind the Services that the chart has, and what its pools are scaled by."""

    def __init__(self, node: Node) -> None:
        self._node, self.redis = node, node.pod("u-redis")
        until(lambda: "Ready to accept" in self.redis.log(), "its Redis", self.redis.process)
        self.schedulers = [self.scheduler(), self.scheduler()]
        first, second = self.schedulers
        self.gateway, self.control = node.service(8000, first, second), node.service(8001, second, first)
        self.client = connect(f"http://{self.gateway.address}:8000", node.secret("u-api", "key").decode())
        scaled = node.made.of("ScaledObject")
        self.queries = {name: one["spec"]["triggers"][0]["metadata"]["query"] for name, one in scaled.items()}

    def scheduler(self) -> Pod:
        return self._node.pod("u-scheduler", {"u-redis": self.redis.address}).started()

    def workers(self) -> list[Pod]:
        """One of each pool."""
        names = {"u-scheduler": self.control.address, "u-redis": self.redis.address}
        return [self._node.pod(name, names) for name in self.queries]

    def wanted(self, scheduler: Pod) -> list[float]:
        """What the query of each pool gives of what that scheduler says, which alone is scraped."""
        return [seconds(scheduler, query) for query in self.queries.values()]


def test_queued_request_scales_a_pool_from_zero(tmp_path: Path) -> None:
    """Given two schedulers and no worker, when one is asked for a picture then it waits, and either says that there is
    work; when a worker comes to the other one then it is made, and nothing is left."""
    with running(tmp_path, UNDIVIDED) as node:
        release = Release(node)
        with release.client as client:
            request = client.submit("a red circle on white", seed=1)
            assert all(release.wanted(scheduler)[0] > 0 for scheduler in release.schedulers)
            (worker,) = release.workers()
            assert worker.probe("readinessProbe") in {0, 503}
            assert request.result().data
            assert worker.started().probe("livenessProbe") == worker.probe("readinessProbe") == 200
            until(lambda: release.wanted(release.schedulers[0]) == [0.0], "nothing to be left")


@pytest.mark.nightly
def test_rolling_replacement_of_scheduler_and_workers_loses_no_request(tmp_path: Path) -> None:
    """When a scheduler and all workers are replaced one after the other then no picture is lost, and all have the same
    bytes; the chart's own test passes, and every pod ends by itself when it is told to."""
    with running(tmp_path, SPLIT) as node:
        release = Release(node)
        with release.client as client:
            workers = [worker.started() for worker in release.workers()]
            before = client.generate("a red circle on white", seed=1).data
            requests = [client.submit("a red circle on white", seed=1) for _ in range(8)]
            third = release.scheduler()
            release.control.pods.append(third)
            first, second = release.schedulers
            assert second.stop() == 0
            more = [worker.started() for worker in release.workers()]
            assert [worker.stop() for worker in workers] == [0, 0]
            assert [one.result().data for one in requests] == [before] * 8
        test = node.pod("u-picture", {"u": release.gateway.address})
        assert test.ended() == 0, test.log()
        (picture,) = test.folder.rglob("out.png")
        with Image.open(picture) as shown:
            assert shown.format == "PNG"
        assert [pod.stop() for pod in (*more, first, third, release.redis)] == [0] * 5


def test_pods_write_only_to_their_volumes(tmp_path: Path) -> None:
    """Or else it would prove nothing that those of the chart run so."""
    if not confines():
        pytest.skip("only root takes the right to write away")
    elsewhere = Path("/etc", tmp_path.name)  # on the root file system, wherever these tests lie
    with running(tmp_path, UNDIVIDED) as node:
        (container,) = node.made.pods()["u-scheduler"]["spec"]["containers"]
        container["command"] = ["sh", "-c", f"touch /data/in && ! touch {elsewhere} && ! chown 1:1 /data/in"]
        node.made.pods()["u-scheduler"]["spec"]["containers"] = [container]
        pod = node.pod("u-scheduler", {})
        assert pod.ended() == 0, pod.log()
        assert not elsewhere.exists() and "Read-only file system" in pod.log()
