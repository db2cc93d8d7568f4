"""What the launcher for Ray does with actors that come and go, over nodes that are a stand-in's: no Ray is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from unfuse.core.errors import ConfigError, TransientError
from unfuse.launch import resolve_launcher
from unfuse.launch.base import WorkerSpec
from unfuse.launch.ray import LOST, RayLauncher, RayWorker, renumbered, required_resources

SPEC = WorkerSpec("encoder", flags={"threads": "2"})


class Place:
    """A place on a node: what the actor there says is put into `says`, lines and why it is over, or an error."""

    def __init__(self, node: str) -> None:
        self.given, self.node = node, ""
        self.leaves: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.says: asyncio.Queue[tuple[list[bytes], str | None] | Exception] = asyncio.Queue()
        self.spec: WorkerSpec | None = None
        self.stopped: list[float] = []
        self.may_end, self.released = asyncio.Event(), False
        self.may_end.set()

    async def start_worker(self, spec: WorkerSpec) -> None:
        if not self.given:
            await asyncio.Event().wait()
        self.node, self.spec = self.given, spec

    async def read_lines(self) -> tuple[list[bytes], str | None]:
        said = await self.says.get()
        if isinstance(said, Exception):
            raise said
        return said

    async def stop(self, drain_timeout: float) -> None:
        self.stopped.append(drain_timeout)
        await self.may_end.wait()
        self.says.put_nowait(([b"its last words"], ""))

    async def release(self) -> None:
        self.released = True


class Few:
    """Nodes that are given out in that order; "" has no room, and so has whatever comes after them."""

    def __init__(self, *nodes: str) -> None:
        self._nodes = iter(nodes)
        self.places: list[Place] = []
        self.ends: dict[str, float] = {}
        self.head = asyncio.Event()
        self.head.set()

    def reserve(self, cpus: int, gpus: int) -> Place:
        self.places.append(Place(next(self._nodes, "")))
        return self.places[-1]

    async def draining_nodes(self) -> dict[str, float]:
        await self.head.wait()
        return self.ends


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("unfuse.launch.local.RESTART_S", "unfuse.launch.ray.LOOK_S"):
        monkeypatch.setattr(name, 0.01)
    monkeypatch.setattr("unfuse.launch.local.RESTART_MOST_S", 0.04)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def launched(nodes: Few) -> tuple[RayLauncher, list[tuple[int, bytes]]]:
    lines: list[tuple[int, bytes]] = []
    launcher = RayLauncher(nodes, [SPEC], lambda number, line: lines.append((number, line)))  # type: ignore[arg-type]
    launcher.start()
    return launcher, lines


async def test_lost_actor_is_replaced_with_backoff() -> None:
    nodes = Few("a", "b", "c", "d", "e")
    with structlog.testing.capture_logs() as logs:
        launcher, lines = launched(nodes)
        for number in range(4):
            await until(lambda number=number: len(nodes.places) == number + 1 and nodes.places[number].spec)
            nodes.places[number].says.put_nowait(([b"hello"], None))
            nodes.places[number].says.put_nowait(TransientError("the node died"))
        await until(lambda: len(nodes.places) == 5 and nodes.places[4].spec)
        await launcher.stop(7)
    assert [line["pause_s"] for line in logs if "pause_s" in line] == [0.01, 0.02, 0.04, 0.04]
    assert {line["reason"] for line in logs if "pause_s" in line} == {"the node died"}
    assert lines == [(0, b"hello")] * 4 + [(0, b"its last words")]
    assert [place.released for place in nodes.places] == [True] * 5
    assert nodes.places[4].stopped == [7]


async def test_replacement_starts_before_worker_of_drained_node_ends() -> None:
    nodes = Few("a", "b")
    launcher, lines = launched(nodes)
    await until(lambda: nodes.places and nodes.places[0].spec)
    nodes.places[0].may_end.clear()
    nodes.ends = {"a": 300.0, "z": 1.0}
    await until(lambda: len(nodes.places) == 2 and nodes.places[1].spec)
    assert (nodes.places[0].stopped, nodes.places[0].released, lines) == ([300.0], False, [])

    nodes.places[0].may_end.set()
    await until(lambda: nodes.places[0].released)
    await until(lambda: lines == [(0, b"its last words")])
    assert (nodes.places[1].stopped, launcher.failed.done()) == ([], False)
    await launcher.stop(0)
    assert (len(nodes.places), nodes.places[1].released) == (2, True)


async def test_start_failure_is_fatal_only_for_the_first_actor() -> None:
    nodes = Few("a")
    launcher, _ = launched(nodes)
    await until(lambda: nodes.places and nodes.places[0].spec)
    nodes.places[0].says.put_nowait(([], "exit code 1"))
    with pytest.raises(ConfigError, match="exit code 1"):
        await asyncio.shield(launcher.failed)
    await launcher.stop(0)
    assert (len(nodes.places), nodes.places[0].released) == (1, True)

    nodes = Few("a", "b", "c")
    launcher, _ = launched(nodes)
    for number, over in enumerate((TransientError("gone"), ([], "exit code 1"))):
        await until(lambda number=number: len(nodes.places) == number + 1 and nodes.places[number].spec)
        nodes.places[number].says.put_nowait(over)
    await until(lambda: len(nodes.places) == 3 and nodes.places[2].spec)
    await launcher.stop(0)
    assert launcher.failed.cancelled()


async def test_wait_for_free_resources_is_logged_and_ends_on_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unfuse.launch.ray.ROOM_S", 0.01)
    nodes = Few()
    with structlog.testing.capture_logs() as logs:
        launcher, _ = launched(nodes)
        await until(lambda: any("with free resources" in line["event"] for line in logs))
        await launcher.stop(5)
    assert [line["cpus_and_gpus"] for line in logs] == [(2, 0)]
    assert (nodes.places[0].stopped, nodes.places[0].released) == ([], True)


async def test_unresponsive_ray_head_is_logged_and_workers_are_unaffected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may come again; else Ray ends the server, without a word."""
    monkeypatch.setattr("unfuse.launch.ray.LOST_S", 0.01)
    nodes = Few("a", "b")
    with structlog.testing.capture_logs() as logs:
        launcher, _ = launched(nodes)
        await until(lambda: nodes.places and nodes.places[0].spec)
        assert LOST not in [line["event"] for line in logs]
        nodes.head.clear()
        await until(lambda: LOST in [line["event"] for line in logs])
        assert len(nodes.places) == 1 and not nodes.places[0].stopped
        nodes.ends["a"] = 7
        nodes.head.set()
        await until(lambda: len(nodes.places) == 2 and nodes.places[0].stopped == [7])
        await launcher.stop(7)


def test_worker_requires_cpus_by_threads_and_one_gpu_per_rank() -> None:
    assert required_resources(WorkerSpec("encoder")) == (1, 0)
    assert required_resources(WorkerSpec("denoiser", "cpu+cpu", {"threads": "3"})) == (6, 0)
    assert required_resources(WorkerSpec("denoiser", "cuda:4+cuda:5", {"threads": "3"})) == (2, 2)


def test_gpus_are_renumbered_from_zero_for_worker() -> None:
    smaller = (WorkerSpec("denoiser", "cuda:2"), WorkerSpec("denoiser", "cuda:5"))
    seen = renumbered(WorkerSpec("denoiser", "cuda:2+cuda:5", smaller=smaller))
    assert [one.device for one in (seen, *seen.smaller)] == ["cuda:0+cuda:1", "cuda:0", "cuda:1"]
    assert renumbered(SPEC) == SPEC


def test_missing_ray_and_invalid_launcher_raise_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unfuse.launch.ray.find_spec", lambda name: None)
    for url, said in (
        ("ray", "pip install 'unfuse\\[ray\\]'"),
        ("ray:10.0.0.1:6379", "pip install 'unfuse\\[ray\\]'"),
        ("ray:10.0.0.1", "use ray:HOST:PORT"),
        ("ray::6379", "use ray:HOST:PORT"),
        ("ray:host:port", "use ray:HOST:PORT"),
        ("rya", "unknown launcher 'rya': did you mean ray"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve_launcher(url)
    assert resolve_launcher("local") is None


def test_third_party_launcher_is_resolved_by_name() -> None:
    assert resolve_launcher(f"{__name__}:outside") == ("opened at", "")


def outside(address: str) -> tuple[str, str]:
    return "opened at", address


@pytest.mark.slow
async def test_actor_reports_its_output_and_start_failure_of_worker() -> None:
    """Without Ray an actor is an object like others."""
    actor, said = RayWorker(), list[bytes]()
    try:
        await actor.start_worker(WorkerSpec("encoder+", flags={"scheduler": "unix:/nobody/there"}))
        structlog.get_logger().warning("of the actor itself")
        over = None
        while over is None:
            lines, over = await actor.read_lines()
            said += lines
        assert "exit code 1" in over
        assert any(b"of the actor itself" in line for line in said)
        assert any(b"encoder+" in line for line in said)
        await actor.stop(0)
    finally:
        structlog.reset_defaults()
