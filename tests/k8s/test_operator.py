"""The operator against an API server in memory: what it makes, changes, says, and leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kmock
import kopf
import pytest

from tests.k8s.server import KINDS, MORE, PEERING, Server
from unfuse.core.errors import UsageError
from unfuse.k8s.operator import run_operator
from unfuse.k8s.reconcile import staying
from unfuse.k8s.spec import Object

SERVED: Object = {"model": "unfuse/shapes", "scheduler": {"redis": {"host": "r"}}, "results": {"url": "s3://b"}}
KEYED = SERVED | {"keysSecret": "wire"}
SPLIT = KEYED | {"stages": [{"name": "encoding", "pool": "enc"}, {"name": "denoising", "pool": "dit", "replicas": 2}]}
PIPELINE, POOL = "DiffusionPipeline", "DiffusionPool"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as found, kmock.Server(found):
        found.knows(KINDS)
        yield found


async def until(seen: Callable[[], Any]) -> Any:
    async with asyncio.timeout(60):
        while not (found := seen()):
            await asyncio.sleep(0.01)
    return found


@asynccontextmanager
async def operating(server: Server, count: int = 1) -> AsyncIterator[None]:
    """So many operators, which end together: kopf waits for whatever was begun after it, such as another one."""
    stop = asyncio.Event()
    login = lambda **_: kopf.ConnectionInfo(server=str(server.url))  # noqa: E731
    flags = [asyncio.Event() for _ in range(count)]
    tasks = [
        asyncio.create_task(run_operator(f"unfuse:{number}", [], login, ready_flag=one, stop_flag=stop))
        for number, one in enumerate(flags)
    ]
    try:
        await asyncio.gather(*(one.wait() for one in flags))
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


def told(server: Server, kind: str, name: str, which: str = "Ready") -> tuple[str, str, str]:
    """Status, reason and message of a condition."""
    status = (server.get(kind, name) or {}).get("status", {})
    one: Object = next((one for one in status.get("conditions", []) if one["type"] == which), {})
    return one.get("status", ""), one.get("reason", ""), one.get("message", "")


def is_told(server: Server, kind: str, name: str, which: str, reason: str) -> Callable[[], bool]:
    return lambda: told(server, kind, name, which)[:2] == ("False" if which == "Ready" else "True", reason)


async def ready(server: Server, pipeline: str, *pools: str) -> None:
    """Have all pods come."""
    for kind, name in (("Deployment", f"{pipeline}-scheduler"), *(("StatefulSet", pool) for pool in pools)):
        await until(lambda kind=kind, name=name: server.get(kind, name))
        await server.run(kind, name)
    await until(lambda: told(server, PIPELINE, pipeline)[:2] == ("True", "AsWanted"))


def made(server: Server) -> dict[tuple[str, str], Object]:
    """Specs and data of all that there is but events."""
    kinds = [kind for kinds in KINDS.values() for kind in kinds if kind != "Event"]
    return {
        (kind, name): {key: one.get(key) for key in ("spec", "data", "stringData")}
        for kind in kinds
        for name, one in server.every(kind).items()
    }


async def quiet(server: Server) -> None:
    """Until nothing is written any more."""
    while (before := len(server.asked)) >= 0:
        await asyncio.sleep(0.3)
        if len(server.asked) == before:
            break
    await server.collect()


async def test_pipeline_objects_are_created_updated_and_deleted(server: Server) -> None:
    """It is ready when its pods are, and says so; a second look changes nothing; a change reaches all that was made."""
    async with operating(server):
        await server.put(PIPELINE, "p", SERVED)
        await until(is_told(server, PIPELINE, "p", "Ready", "Starting"))
        await until(lambda: told(server, PIPELINE, "p", "Progressing")[2] == "0 of 2 schedulers and pools are ready")
        await ready(server, "p", "p")
        pipeline = server.get(PIPELINE, "p") or {}
        assert pipeline["status"]["url"] == "http://p.ns.svc:8000"
        assert pipeline["status"]["observedGeneration"] == pipeline["metadata"]["generation"] == 1
        pool = server.get(POOL, "p") or {}
        assert (pool["status"]["replicas"], pool["status"]["readyReplicas"]) == (1, 1)
        labels = server.get("StatefulSet", "p")["spec"]["template"]["metadata"]["labels"]
        assert dict(pair.split("=") for pair in pool["status"]["selector"].split(",")).items() <= labels.items()
        assert {*server.every("Secret")} == {"p-wire", "p-api"}
        keys = made(server)["Secret", "p-wire"]
        before, server.asked = made(server), []
        await server.put(PIPELINE, "p", metadata=pipeline["metadata"] | {"labels": {"a": "b"}})
        await quiet(server)
        assert made(server) == before and "status" not in str(server.asked)
        assert not server.every("Event"), "a pool that has said nothing yet is nobody's fault"

        await server.put(
            PIPELINE, "p", SERVED | {"image": "unfuse:2", "scheduler": SERVED["scheduler"] | {"replicas": 2}}
        )
        for kind, name in (("Deployment", "p-scheduler"), ("StatefulSet", "p")):
            await until(lambda kind=kind, name=name: "unfuse:2" in str(server.get(kind, name)))
        assert (server.get("Deployment", "p-scheduler") or {})["spec"]["replicas"] == 2
        assert made(server)["Secret", "p-wire"] == keys
        await ready(server, "p", "p")

        ending = (server.get(PIPELINE, "p") or {})["metadata"] | {"deletionTimestamp": "now"}
        await server.put(PIPELINE, "p", SERVED | {"image": "unfuse:3"}, metadata=ending)
        await quiet(server)
        assert "unfuse:3" not in str(server.get("Deployment", "p-scheduler"))
        await server.delete(PIPELINE, "p")
        await quiet(server)
        assert made(server) == {}


async def test_external_replica_changes_persist_and_drift_is_repaired(server: Server) -> None:
    """And is not fought over; what others change in what was made here is put right."""
    async with operating(server):
        await server.put(PIPELINE, "p", SPLIT)
        await ready(server, "p", "enc", "dit")
        pool = server.get(POOL, "dit") or {}
        assert pool["spec"]["replicas"] == 2 and pool["spec"]["role"] == "denoiser"
        await server.put(POOL, "dit", pool["spec"] | {"replicas": 5})
        await until(lambda: server.get("StatefulSet", "dit")["spec"]["replicas"] == 5)
        await until(lambda: told(server, POOL, "dit")[2] == "0 of 5 workers are ready")
        await ready(server, "p", "dit")
        await server.put(POOL, "dit", pool["spec"] | {"replicas": 0})
        await until(lambda: server.get("StatefulSet", "dit")["spec"]["replicas"] == 0)
        await server.run("StatefulSet", "dit")
        await until(lambda: told(server, POOL, "dit")[:2] == ("True", "Asleep"))
        await server.put(PIPELINE, "p", SPLIT | {"image": "unfuse:2"})
        await until(lambda: "unfuse:2" in str(server.get("StatefulSet", "dit")))
        assert server.get("StatefulSet", "dit")["spec"]["replicas"] == server.get(POOL, "dit")["spec"]["replicas"] == 0
        service = server.get("Service", "p")["spec"]
        await server.put("Service", "p", service | {"ports": []})
        await until(lambda: server.get("Service", "p")["spec"] == service)
        await server.delete("NetworkPolicy", "dit-pool")
        await until(lambda: server.get("NetworkPolicy", "dit-pool"))


async def test_shared_pool_is_deleted_with_its_last_pipeline(server: Server) -> None:
    async with operating(server):
        await server.put(PIPELINE, "p", SPLIT)
        await server.put(PIPELINE, "q", SPLIT | {"model": "another", "stages": [{"name": "denoising", "pool": "dit"}]})
        both = ["--scheduler=tcp://p-scheduler:8001", "--scheduler=tcp://q-scheduler:8001"]
        await until(lambda: all(one in str(server.get("StatefulSet", "dit")) for one in both))
        await until(lambda: len(server.get(POOL, "dit")["metadata"]["ownerReferences"]) == 2)
        assert not any(owner.get("controller") for owner in server.get(POOL, "dit")["metadata"]["ownerReferences"])
        await server.put(PIPELINE, "q", SPLIT | {"image": "unfuse:9", "stages": [{"name": "denoising", "pool": "dit"}]})
        await until(is_told(server, POOL, "dit", "Degraded", "PipelinesDiffer"))
        await until(lambda: "differ in image" in told(server, PIPELINE, "p", "Degraded")[2])
        assert both[1] in str(server.get("StatefulSet", "dit")), "what serves goes on as it was"
        await server.delete(PIPELINE, "q")
        await until(lambda: server.get("StatefulSet", "dit") and both[1] not in str(server.get("StatefulSet", "dit")))
        await server.put(PIPELINE, "p", SPLIT | {"stages": SPLIT["stages"][:1]})
        await until(lambda: not server.get(POOL, "dit") and not server.get("StatefulSet", "dit"))
        assert server.get("StatefulSet", "enc")


async def test_only_deleted_secrets_are_regenerated(server: Server) -> None:
    """Which is how they are rotated: the next pass makes them, and those that are there are nobody's to change."""
    async with operating(server):
        await server.put(PIPELINE, "p", SERVED)
        await ready(server, "p", "p")
        before = {name: one["stringData"] for name, one in server.every("Secret").items()}
        await server.delete("Secret", "p-wire")
    async with operating(server):
        await until(lambda: "p-wire" in server.every("Secret"))
        await quiet(server)
        after = {name: one["stringData"] for name, one in server.every("Secret").items()}
    assert after["p-api"] == before["p-api"] and after["p-wire"].keys() == before["p-wire"].keys()
    assert not set(after["p-wire"].values()) & set(before["p-wire"].values())


async def test_user_created_pool_persists_without_workers_while_unused(server: Server) -> None:
    async with operating(server):
        await server.put("StatefulSet", "db", {"replicas": 3})
        await server.put(POOL, "db", {"role": "denoiser"})
        await server.put(POOL, "dit", {"role": "denoiser", "replicas": 3})
        await until(is_told(server, POOL, "dit", "Ready", "NotUsed"))
        await until(is_told(server, POOL, "db", "Ready", "NotUsed"))
        assert server.get("StatefulSet", "db")["spec"] == {"replicas": 3}, "it is somebody else's"
        await server.put(PIPELINE, "p", SPLIT | {"stages": SPLIT["stages"][1:]})
        await ready(server, "p", "dit")
        assert "ownerReferences" not in server.get(POOL, "dit")["metadata"]
        await server.delete(PIPELINE, "p")
        await until(lambda: server.get("StatefulSet", "dit")["spec"]["replicas"] == 0)
        assert server.get(POOL, "dit")["spec"]["replicas"] == 3


BAD: list[tuple[Object, str, str]] = [
    (SPLIT | {"scheduler": {"queueBackend": "redis"}}, "InvalidSpec", "KeyError('queue')"),
    ({"scheduler": SPLIT["scheduler"]}, "InvalidSpec", "KeyError('model')"),
    (SPLIT | {"stages": [{"name": "encoding", "pool": "a.b" * 30}]}, "InvalidName", "at most 40"),
    (SPLIT | {"stages": [{"pool": "enc"}]}, "InvalidSpec", "KeyError('name')"),
    (SPLIT | {"stages": "encoder"}, "InvalidSpec", "TypeError"),
    (SPLIT | {"stages": [{"name": "a+", "pool": "enc"}]}, "InvalidSpec", "is not a role"),
]


async def test_invalid_spec_sets_degraded_and_serving_continues(server: Server) -> None:
    """Also what a definition would have refused. It is told once, as an event too, and put right it is ready again."""
    async with operating(server):
        await server.put(PIPELINE, "p", SPLIT)
        await ready(server, "p", "enc", "dit")
        served = {key: one for key, one in made(server).items() if key[0] not in {PIPELINE, POOL}}
        for spec, reason, says in BAD:
            await server.put(PIPELINE, "p", spec)
            await until(lambda says=says: says in told(server, PIPELINE, "p", "Degraded")[2])
            assert told(server, PIPELINE, "p")[:2] == ("False", reason)
            generation = server.get(PIPELINE, "p")["metadata"]["generation"]
            assert server.get(PIPELINE, "p")["status"]["observedGeneration"] == generation
        await until(is_told(server, POOL, "enc", "Degraded", "PipelineNotUnderstood"))
        await quiet(server)
        assert {key: one for key, one in made(server).items() if key[0] not in {PIPELINE, POOL}} == served
        await until(lambda: {"InvalidSpec", "InvalidName"} <= {one["reason"] for one in server.every("Event").values()})
        await server.put(PIPELINE, "p", SPLIT)
        await until(lambda: told(server, PIPELINE, "p")[:2] == ("True", "AsWanted"))
        assert told(server, PIPELINE, "p", "Degraded")[0] == "False"


async def test_pipeline_with_invalid_name_does_not_block_other_pools(server: Server) -> None:
    """It cannot have had workers, under that name, whatever it means."""
    async with operating(server):
        await server.put(PIPELINE, "q" * 41, SPLIT)
        await until(is_told(server, PIPELINE, "q" * 41, "Degraded", "InvalidName"))
        await server.put(PIPELINE, "p", SPLIT)
        await ready(server, "p", "enc", "dit")
        assert "q" * 41 not in str(server.get("StatefulSet", "dit"))


async def test_api_errors_and_name_conflicts_are_reported_and_retried(server: Server) -> None:
    async with operating(server):
        await server.put("ConfigMap", "p", data={"mine": "yes"})
        server.refuses = {"statefulsets": (403, "Forbidden", "exceeded quota: gpus")}
        await server.put(PIPELINE, "p", SPLIT)
        await until(is_told(server, PIPELINE, "p", "Degraded", "NameTaken"))
        assert (
            told(server, PIPELINE, "p")[2] == "ConfigMap p already exists and does not belong to this DiffusionPipeline"
        )
        assert server.get("ConfigMap", "p")["data"] == {"mine": "yes"}
        await until(lambda: told(server, POOL, "enc", "Degraded") == ("True", "Forbidden", "exceeded quota: gpus"))
        server.refuses = {"statefulsets": (500, "InternalError", "failed calling webhook")}
        await until(
            lambda: told(server, POOL, "enc", "Degraded") == ("True", "InternalError", "failed calling webhook")
        )
        server.refuses = {}
        await server.delete("ConfigMap", "p")
        await ready(server, "p", "enc", "dit")


async def test_pod_crash_reason_is_reported_as_condition(server: Server) -> None:
    """Such as of a model that is not there: the last line that a scheduler wrote."""
    async with operating(server):
        wrote = 'a log line\nunfuse: there is no model "nope": say one of …\n'
        waiting = {
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"message": wrote}},
        }
        await server.put(PIPELINE, "p", SPLIT)
        await server.put("Pod", "p-scheduler-1", status={"containerStatuses": [waiting]})
        await until(is_told(server, PIPELINE, "p", "Degraded", "CrashLoopBackOff"))
        assert 'there is no model "nope"' in told(server, PIPELINE, "p", "Degraded")[2]
        await server.delete("Pod", "p-scheduler-1")
        await ready(server, "p", "enc", "dit")
        assert told(server, PIPELINE, "p", "Degraded")[0] == "False"


async def test_new_operator_completes_interrupted_reconciliation(server: Server) -> None:
    """Also while the server is away: whatever was begun is ended, and no key is made twice."""
    server.stuck_at = "deployments"
    async with operating(server):
        await server.put(PIPELINE, "p", SERVED)
        await server.stuck.wait()
    assert server.get("Secret", "p-wire") and not server.get("Deployment", "p-scheduler")
    keys, server.stuck_at = made(server)["Secret", "p-wire"], ""
    async with operating(server):
        await ready(server, "p", "p")
        server.down = True
        await server.put(PIPELINE, "p", SERVED | {"image": "unfuse:2"})
        await asyncio.sleep(0.2)
        assert "unfuse:2" not in str(server.get("Deployment", "p-scheduler"))
        server.down = False
        await until(lambda: "unfuse:2" in str(server.get("Deployment", "p-scheduler")))
        server.refuses = {"services": (503, "Down", "not now")}
        await server.put(PIPELINE, "p", SERVED | {"image": "unfuse:3"})
        await asyncio.sleep(0.2)
        server.refuses = {}
        await until(lambda: "unfuse:3" in str(server.get("Deployment", "p-scheduler")))
        assert not server.every("Event"), "it is no fault of what was asked for"
    assert made(server)["Secret", "p-wire"] == keys
    before = made(server)
    async with operating(server):
        await quiet(server)
    assert made(server) == before


async def test_only_one_of_two_peered_operators_acts(server: Server) -> None:
    """They made what they know each other by. Each would have another image: who works is one, and remains it."""
    server.knows(PEERING)
    async with operating(server, 2):
        peers = await until(
            lambda: len(found := server.get("ClusterKopfPeering", "unfuse").get("status", {})) == 2 and found
        )
        assert len({peer["priority"] for peer in peers.values()}) == 2
        await quiet(server)
        await server.put(PIPELINE, "p", SERVED)
        await ready(server, "p", "p")
        image = server.get("StatefulSet", "p")["spec"]["template"]["spec"]["containers"][0]["image"]
        for count in (2, 3):
            await server.put(PIPELINE, "p", SERVED | {"scheduler": SERVED["scheduler"] | {"replicas": count}})
            await until(lambda count=count: server.get("Deployment", "p-scheduler")["spec"]["replicas"] == count)
            await quiet(server)
            for kind, name in (("Deployment", "p-scheduler"), ("StatefulSet", "p")):
                assert image in str(server.get(kind, name))


async def test_optional_crd_objects_are_created_and_deleted_when_supported(server: Server) -> None:
    """And goes when it is not asked for any more."""
    server.knows(MORE)
    scaled = SPLIT | {"autoscaling": {"maxReplicas": 3}}
    async with operating(server):
        await server.put(PIPELINE, "p", scaled)
        await ready(server, "p", "enc", "dit")
        assert {*server.every("ServiceMonitor")} == {"p"} and {*server.every("ScaledObject")} == {"enc", "dit"}
        await server.put(PIPELINE, "p", SPLIT)
        await until(lambda: not server.every("ScaledObject"))
        assert told(server, PIPELINE, "p", "Degraded")[0] == "False"
        assert {*server.every("NetworkPolicy")} == {"p-scheduler", "enc-pool", "dit-pool"}
        await server.put(PIPELINE, "p", SPLIT | {"networkPolicy": {"enabled": False}, "monitoring": {"enabled": False}})
        await until(lambda: not server.every("NetworkPolicy") and not server.every("ServiceMonitor"))


async def test_autoscaling_without_keda_is_degraded_but_ready(server: Server) -> None:
    async with operating(server):
        await server.put(PIPELINE, "p", SPLIT | {"autoscaling": {"maxReplicas": 3}})
        await ready(server, "p", "enc", "dit")
        status, reason, message = told(server, PIPELINE, "p", "Degraded")
        assert (status, reason) == ("True", "NotAsAsked") and "requires KEDA" in message


async def test_operator_waits_for_crds_that_are_defined_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all is applied at one time: kopf would look for its kinds once, find none, and do nothing for good."""
    monkeypatch.setattr("unfuse.k8s.operator.DEFINED_S", 0.1)
    async with Server() as server, kmock.Server(server):
        server.knows({api: kinds for api, kinds in KINDS.items() if "unfuse" not in api})
        asyncio.get_running_loop().call_later(0.5, server.knows, KINDS)
        async with operating(server):
            await server.put(PIPELINE, "p", SERVED)
            await ready(server, "p", "p")


@pytest.fixture
async def page(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, float]]:
    """The tasks of each node, as gateways of any name say in their metrics; without any no gateway answers."""
    tasks: dict[str, float] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        lines = [
            f'unfuse_node_{"ranks" if "ranks " in node else "tasks"}{{node="{node.removeprefix("ranks ")}"}} {count}\n'
            for node, count in tasks.items()
        ]
        if tasks and asked.startswith(b"GET http://p.ns.svc:8000/metrics "):
            writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{''.join(lines)}".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as proxy:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:{1}".format(*proxy.sockets[0].getsockname()))
        monkeypatch.setattr("unfuse.k8s.operator.LONGEST_S", 0.1)  # nothing else tells that somebody became idle
        yield tasks


async def scaled(server: Server, count: int, **more: object) -> None:
    spec = (server.get(POOL, "dit") or {})["spec"]
    await server.put(POOL, "dit", spec | {"replicas": count} | more)


def workers(server: Server) -> int:
    return int(server.get("StatefulSet", "dit")["spec"]["replicas"])


def progress(server: Server) -> tuple[str, str, str]:
    return told(server, POOL, "dit", "Progressing")


async def test_scale_down_waits_for_busy_worker_while_another_is_idle(server: Server, page: dict[str, float]) -> None:
    """A pool of four is to have two. The last three are busy, then one of them, then all that are left; and an operator
    goes on where one ended."""
    page |= {"dit-0": 0.0, "dit-1": 1.0, "dit-2": 1.0, "dit-3": 2.0, "enc-0": 0.0, "other-dit-0": 1.0}
    async with operating(server):
        await server.put(PIPELINE, "p", SPLIT)
        await until(lambda: server.get(POOL, "dit"))
        await scaled(server, 4)
        await until(lambda: server.get("StatefulSet", "dit") and workers(server) == 4)
        await ready(server, "p", "enc", "dit")
        await scaled(server, 2)
        await until(lambda: progress(server)[:2] == ("True", "WorkersFinish"))
        assert (
            progress(server)[2]
            == "scale-down from 4 to 2 workers waits: dit-3 finishes its tasks while others are idle"
        )
        assert workers(server) == 4 and told(server, POOL, "dit")[0] == "True"
        since = server.get(POOL, "dit")["status"]["waitsSince"]
        page["dit-3"] = 0.0
        await until(lambda: workers(server) == 3)
    async with operating(server):
        await until(lambda: "dit-2 finishes" in progress(server)[2])
        assert server.get(POOL, "dit")["status"]["waitsSince"] == since
        page["dit-0"] = 1.0
        await until(lambda: workers(server) == 2)
        await server.run("StatefulSet", "dit")
        await until(lambda: progress(server)[:2] == ("False", "AsWanted"))
        assert "waitsSince" not in server.get(POOL, "dit")["status"]


async def test_idle_gpus_of_workers_are_reported_as_degraded(server: Server, page: dict[str, float]) -> None:
    """Whether their stages cannot be divided so, as gateways know, or they were told to be fewer."""
    page |= {"ranks dit-0": 8.0, "ranks dit-1": 5.0, "ranks enc-0": 1.0, "dit-0": 0.0}
    eight = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    stages = [SPLIT["stages"][0], SPLIT["stages"][1] | eight]
    async with operating(server):
        await server.put(PIPELINE, "p", SPLIT | {"stages": stages})
        await ready(server, "p", "enc", "dit")
        await until(is_told(server, POOL, "dit", "Degraded", "IdleGPUs"))
        said = told(server, POOL, "dit", "Degraded")[2]
        assert said == ("its workers have 8 GPUs and use 5: its stages cannot use more ranks, so request 5 GPUs")
        assert told(server, POOL, "dit")[0] == "True", "it serves"
        assert "pool dit: its workers have 8 GPUs" in told(server, PIPELINE, "p", "Degraded")[2]
        page["ranks dit-1"] = 8.0
        spec = (server.get(POOL, "dit") or {})["spec"]
        await server.put(POOL, "dit", spec | {"parallel": "denoiser=ulysses:4"})
        await until(lambda: "use 4: parallel is denoiser=ulysses:4" in told(server, POOL, "dit", "Degraded")[2])
        await server.put(POOL, "dit", spec | {"device": "cuda:0"})
        await until(lambda: "use 1: device is cuda:0" in told(server, POOL, "dit", "Degraded")[2])
        await server.put(POOL, "dit", spec | {"parallel": "auto"})
        await until(lambda: "--parallel=auto" in str(server.get("StatefulSet", "dit")))
        await server.run("StatefulSet", "dit")
        await until(lambda: told(server, POOL, "dit", "Degraded")[0] == "False")


async def test_scale_down_waits_at_most_finish_seconds(
    server: Server, page: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for long where no gateway says who is busy, nor at all where nobody is to stay."""
    async with operating(server):
        await server.put(PIPELINE, "p", SPLIT)
        await ready(server, "p", "enc", "dit")
        await scaled(server, 1)
        await until(lambda: "no gateway reports which workers are busy" in progress(server)[2])
        assert workers(server) == 2
        monkeypatch.setattr("unfuse.k8s.reconcile.UNKNOWN_S", 0)
        await until(lambda: workers(server) == 1)
        page |= {"dit-0": 0.0, "dit-1": 0.0, "dit-2": 1.0}
        await scaled(server, 3)
        await until(lambda: workers(server) == 3)
        await scaled(server, 2)
        await until(lambda: "dit-2 finishes" in progress(server)[2])
        await scaled(server, 2, finishSeconds=1)
        await until(lambda: workers(server) == 2)
        await scaled(server, 3, finishSeconds=900)
        await until(lambda: workers(server) == 3)
        await scaled(server, 0)
        await until(lambda: workers(server) == 0)


@pytest.mark.parametrize("there", range(7))
def test_scale_down_removes_no_busy_worker_while_an_idle_one_stays(there: int) -> None:
    """Whoever is busy; and who may go goes, so that nobody is kept for nothing."""
    for bits in range(1 << there):
        has = {number for number in range(there) if bits >> number & 1}
        for wanted in range(there + 1):
            stay = staying(wanted, there, has)
            gone, idle = {*range(stay, there)}, {*range(wanted)} - has
            assert wanted <= stay <= there
            assert not idle or not gone & has
            assert stay == wanted or (stay - 1 in has and idle)


async def test_operator_without_cluster_raises_usage_error() -> None:
    with pytest.raises(UsageError, match="set KUBECONFIG"):
        await run_operator("unfuse:0", [], lambda **_: None)
