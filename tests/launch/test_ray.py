"""Workers on a real Ray: the launcher's contract, and a service over several nodes of one machine."""

from __future__ import annotations

import gc
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import psutil
import pytest

from tools.server import Server, all_gone, family_of, own_run_folder, serving, until
from tools.snippets import ROOT, blocks, commands
from unfuse.client import connect
from unfuse.launch.ray import LOST
from unfuse.testing.launcher_suite import WITHIN_S, wait_until as until_so, worker_registry

PAGE = ROOT / "docs" / "operations" / "ray.md"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is installed by `make nightly`"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

CHECK = """
import asyncio
from unfuse.launch import resolve_launcher
from unfuse.testing import check_launcher
asyncio.run(check_launcher(resolve_launcher("ray")))
"""
REACHED = """
import psutil
from unfuse.launch.ray import RayCluster

RayCluster("")
us = psutil.Process()
listening = [at for one in (us, *us.children(recursive=True)) for at in one.net_connections() if at.status == "LISTEN"]
print(*{at.laddr.ip for at in listening})
"""
STARTER = """
import asyncio, msgspec, sys
from unfuse.launch import resolve_launcher
from unfuse.launch.base import WorkerSpec
from unfuse.launch.local import write_line

async def main():
    opened(specs, write_line).start()
    await asyncio.sleep(3600)

opened, specs = resolve_launcher("ray"), [msgspec.json.decode(sys.argv[1], type=WorkerSpec)]
asyncio.run(main())
"""


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What has Ray write into a folder of its own, and stay on this machine."""
    folder = mkdtemp(prefix="ray-", dir="/tmp")  # its sockets' paths are long
    own = {"RAY_TMPDIR": folder, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    yield own
    shutil.rmtree(folder, ignore_errors=True)


def program(text: str) -> str:
    """What a program prints that uses Ray, which is one to a process."""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ray_launcher_passes_the_contract_suite(variables: dict[str, str]) -> None:
    program(CHECK)


def test_own_ray_cluster_listens_only_on_loopback(variables: dict[str, str]) -> None:
    assert {*program(REACHED).split()} == {"127.0.0.1", "::ffff:127.0.0.1"}


async def test_workers_and_own_ray_cluster_end_when_starter_is_killed(
    variables: dict[str, str],
) -> None:
    async with worker_registry() as place:
        with subprocess.Popen([sys.executable, "-c", STARTER, msgspec.json.encode(place.spec())]) as starter:
            await until_so(partial(place.wait_for_workers, 1), "no worker came", WITHIN_S)
            everyone = family_of(starter.pid)
            starter.kill()
        await until_so(lambda: not place.living_workers, "the worker lives on", WITHIN_S)
        await until_so(lambda: all_gone(everyone), "Ray lives on", WITHIN_S)


def typed(*beginning: str, **places: str) -> list[str]:
    """The rest of the command of the page that begins so, with this machine's addresses."""
    found = [words for block in blocks(PAGE) for words in commands(block) if words[: len(beginning)] == [*beginning]]
    (words,) = found
    return [places.get(word, word) for word in words[1:]]


class Cluster:
    """Nodes of a Ray on this machine, each with a run folder of its own, so that their workers share no memory."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self._ray = RayCluster()
        self._ray.add_node(num_cpus=0, include_dashboard=False)
        self.address = self._ray.address
        self._nodes: dict[str, Any] = {}

    def add(self, name: str) -> None:
        """A node with room for one worker; its workers are of that node by name, too."""
        own = own_run_folder(name) | {"UNFUSE_WORKER__NODE": name}
        self._nodes[name] = self._ray.add_node(num_cpus=1, env_vars=own)

    def kill(self, name: str) -> None:
        """The node is gone, and nobody of it has a last word."""
        self._ray.remove_node(self._nodes.pop(name), allow_graceful=False)

    def drain(self, name: str) -> None:
        """As the page says."""
        words = typed("ray", "drain-node", **{"10.0.0.1:6379": self.address, "NODE": self._nodes[name].node_id})
        done = subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def behead(self) -> None:
        """The head is gone, as its machine would be."""
        self._ray.head_node.kill_all_processes(check_alive=False, allow_graceful=False)

    def close(self) -> None:
        self._ray.shutdown()
        gc.collect()  # Ray leaves a socket open, which is none of another test's business


@pytest.fixture
def cluster(variables: dict[str, str]) -> Iterator[Cluster]:
    made = Cluster()
    try:
        yield made
    finally:
        made.close()


def beginning(cluster: Cluster) -> list[str]:
    """How the page starts a server, but for where workers come in."""
    words = typed("unfuse", "serve", **{"ray:10.0.0.1:6379": f"ray:{cluster.address}"})[1:]
    at = words.index("--listen")
    return [*words[:at], *words[at + 2 :]]


def nodes(server: Server) -> set[str]:
    """Where there are healthy workers."""
    return {worker["node"] for worker in server.get("/v1/workers")["data"] if worker["healthy"]}


def made(server: Server, asked: list[str]) -> tuple[set[bytes], set[str]]:
    """The pictures of requests, and the nodes that made them. None is lost."""
    views = [server.finished(request) for request in asked]
    assert [view["status"] for view in views] == ["completed"] * len(asked)
    where = {worker["id"]: worker["node"] for worker in server.get("/v1/workers")["data"]}
    by = {where.get(stage["worker"], "gone") for view in views for stage in view["stages"]}
    return {server.result(request) for request in asked}, by


def submit(server: Server, count: int, steps: int = 60) -> list[str]:
    return [server.submit("a red circle on white", seed=7, num_inference_steps=steps) for _ in range(count)]


def running(server: Server, request: str) -> dict[str, Any]:
    """The worker that runs a request, in its midst."""
    for event in server.events(request):
        if event["type"] == "progress" and event["stage"] == "denoise.0" and event["step"] >= 3:
            break
    (name,) = (one["worker"] for one in server.get(f"/v1/requests/{request}")["stages"] if one["name"] == "denoise.0")
    found: dict[str, Any] = next(one for one in server.get("/v1/workers")["data"] if one["id"] == name)
    return found


def test_requests_survive_loss_of_ray_actor_and_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Given two nodes with a worker each, when an actor is killed amid a request, a node is drained, and one is killed,
    then every picture is made, all have the same bytes, and a worker starts wherever there is room."""
    cluster.add("a")
    cluster.add("b")
    with serving(tmp_path, *beginning(cluster), at="127.0.0.1") as server:
        until(lambda: server.get("/ready") and nodes(server) == {"a", "b"}, "workers on both nodes", server.process)
        same = {*connect(server.url).generate("a red circle on white", seed=7, num_inference_steps=60).data}
        assert made(server, submit(server, 6)) == (same, {"a", "b"})

        asked = submit(server, 4)
        killed = running(server, asked[0])
        family = family_of(killed["pid"])
        psutil.Process(killed["pid"]).parent().kill()
        until(lambda: all_gone(family), "a worker to end with its actor")
        assert made(server, asked)[0] == same
        until(lambda: nodes(server) == {"a", "b"}, "a worker in the place of the one that was killed", server.process)

        cluster.add("c")
        asked = submit(server, 4)
        cluster.drain(running(server, asked[0])["node"])
        until(lambda: "c" in nodes(server) and len(nodes(server)) == 2, "a worker to change its node", server.process)
        assert made(server, [*asked, *submit(server, 6)])[0] == same
        (left,) = nodes(server) - {"c"}

        asked = submit(server, 4)
        cluster.kill(left)
        cluster.add("d")
        assert made(server, asked)[0] == same
        until(lambda: nodes(server) == {"c", "d"}, "a worker elsewhere", server.process)
        assert made(server, submit(server, 6)) == (same, {"c", "d"})

        everyone = [one for worker in server.get("/v1/workers")["data"] for one in family_of(worker["pid"])]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(600) == 0
        assert all_gone(everyone)


def test_accepted_requests_survive_loss_of_ray_head(cluster: Cluster, tmp_path: Path) -> None:
    """When the head is killed then pictures are still made, the server says what to do before Ray ends it, and workers
    end; when it is started again, with another Ray, what was accepted is made, with the same bytes."""
    cluster.add("a")
    with serving(tmp_path, *beginning(cluster), at="127.0.0.1", RAY_gcs_rpc_server_reconnect_timeout_s="45") as server:
        until(lambda: server.get("/ready"), "a worker", server.process)
        same = {*connect(server.url).generate("a red circle on white", seed=7, num_inference_steps=60).data}
        soon = {*connect(server.url).generate("a red circle on white", seed=7, num_inference_steps=10).data}
        everyone = family_of(running(server, submit(server, 1)[0])["pid"])
        cluster.behead()
        # Ray ends the server after 45 seconds, so what is made before has to be little
        assert made(server, submit(server, 1, steps=10)) == (soon, {"a"}), "for this it needs no head"
        until(lambda: LOST in server.log(), "that to be said", server.process)
        for one in everyone[1:]:
            one.suspend()  # so that what is asked for now is not made before the end
        asked = submit(server, 4)
        assert server.process.wait(600) != 0
        for one in everyone[1:]:
            one.resume()
        until(lambda: all_gone(everyone), "its workers to end")
    again = Cluster()
    try:
        again.add("b")
        with serving(tmp_path, *beginning(again), at="127.0.0.1") as server:
            until(lambda: server.get("/ready"), "a worker", server.process)
            assert made(server, asked) == (same, {"b"})
    finally:
        again.close()
