"""Cancelling a request ends it once, wherever it is, and gives its memory back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.cluster import LEASE_S, Cluster, running_cluster, until
from tests.chaos.history import Asked, events_of
from tests.chaos.monkey import drained
from tests.integration.test_several import stream, submit


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker of each role, the denoiser one that hands back what does not end at once."""
    hasty = {"UNFUSE_SERVE__DRAIN_TIMEOUT": "1"}
    with running_cluster(tmp_path_factory.mktemp("cancel"), schedulers=1, workers=1, **hasty) as cluster:
        yield cluster


def ask(cluster: Cluster, name: str, order: str, steps: int = 4) -> str:
    return submit(cluster.gateways[0], Asked(f"{name} [{order}]", 1, width=128, height=128, steps=steps), name)


def stage_of(cluster: Cluster, request: str, name: str) -> dict[str, Any]:
    view = cluster.get(f"/v1/requests/{request}")
    return next(stage for stage in view["stages"] if stage["name"] == name)


def leased(cluster: Cluster, request: str, stage: str) -> dict[str, Any]:
    """Wait until a worker has it."""
    until(lambda: stage_of(cluster, request, stage)["status"] == "leased", f"{stage} to be leased")
    return stage_of(cluster, request, stage)


def at_a_step(cluster: Cluster, request: str) -> None:
    """Wait until its denoiser has reported steps."""
    for event in stream(cluster.gateways[0], request, 0):
        if event["type"] == "progress" and event["stage"] == "denoise.0":
            return
    raise AssertionError("it was over before it was seen to run")


def denoiser(cluster: Cluster) -> Any:
    (found,) = (worker for worker in cluster.workers if worker.name.startswith("denoiser"))
    return found


def cancelled(cluster: Cluster, *requests: str) -> None:
    """Cancel, twice, and see that it ended once and left nothing."""
    call = cluster.gateways[0].post
    for request in requests:
        assert call(f"/v1/requests/{request}/cancel")["status"] == "cancelled"
        assert call(f"/v1/requests/{request}/cancel")["status"] == "cancelled"
    assert not drained(cluster).any
    ended_once(cluster, *requests)


def ended_once(cluster: Cluster, *requests: str) -> None:
    for request in requests:
        types = [event["type"] for event in events_of(cluster.gateways[0].url, request)]
        assert types[-1] == "cancelled"
        assert sum(type in ("completed", "failed", "cancelled") for type in types) == 1
        assert cluster.get(f"/v1/requests/{request}")["status"] == "cancelled"


def test_queued_request_is_cancelled_without_running(cluster: Cluster) -> None:
    ahead = [ask(cluster, f"ahead {number}", "sleep=1@text_encode") for number in range(6)]
    request = ask(cluster, "waits", "sleep=0@denoise")
    assert cluster.get(f"/v1/requests/{request}")["queue_position"] is not None
    cancelled(cluster, request, *ahead)
    assert [event["type"] for event in events_of(cluster.gateways[0].url, request)] == ["queued", "cancelled"]


@pytest.mark.parametrize(("stage", "kind"), [("encode", "text_encode"), ("decode.0", "vae_decode")])
def test_request_is_cancelled_during_a_single_step_stage(cluster: Cluster, stage: str, kind: str) -> None:
    request = ask(cluster, f"in {stage}", f"sleep=1@{kind}")
    leased(cluster, request, stage)
    cancelled(cluster, request)


def test_request_is_cancelled_between_denoising_steps(cluster: Cluster) -> None:
    request = ask(cluster, "at a step", "sleep=0.1@denoise", steps=500)
    at_a_step(cluster, request)
    cancelled(cluster, request)


def test_request_is_cancelled_after_a_drained_worker_requeued_its_task(cluster: Cluster) -> None:
    """Given a denoiser that leaves before it is done, and no other, then the task waits again, uncharged."""
    request = ask(cluster, "handed back", "sleep=0.1@denoise", steps=500)
    at_a_step(cluster, request)
    denoiser(cluster).send(signal.SIGTERM)
    assert denoiser(cluster).popen.wait(600) == 0
    stage = stage_of(cluster, request, "denoise.0")
    assert (stage["status"], cluster.get(f"/v1/requests/{request}")["queue_position"]) == ("queued", 0)
    cancelled(cluster, request)
    denoiser(cluster).start()
    cluster.ready()
    ended_once(cluster, request)


def test_request_is_cancelled_once_after_its_worker_was_killed(cluster: Cluster) -> None:
    """Given a lease whose holder will never be heard of again, then it ends with the request, and nothing follows."""
    request = ask(cluster, "dead worker", "sleep=0.1@denoise", steps=500)
    at_a_step(cluster, request)
    denoiser(cluster).kill()
    cancelled(cluster, request)
    denoiser(cluster).start()
    cluster.ready()
    # what comes later was leased after the dead one's lease had ended
    later = ask(cluster, "later", f"sleep={LEASE_S / 4}@denoise", steps=8)
    until(lambda: cluster.get(f"/v1/requests/{later}")["status"] == "completed", "a later request")
    ended_once(cluster, request)


def test_reports_of_a_resumed_worker_do_not_change_a_cancelled_request(cluster: Cluster) -> None:
    """Given a worker that goes on after its request has ended, then what it reports of it changes nothing."""
    request = ask(cluster, "stopped worker", "sleep=0.1@denoise", steps=500)
    at_a_step(cluster, request)
    denoiser(cluster).send(signal.SIGSTOP)
    assert cluster.gateways[0].post(f"/v1/requests/{request}/cancel")["status"] == "cancelled"
    until(lambda: denoiser(cluster).pid not in cluster.members(), "the worker to be missed")
    denoiser(cluster).send(signal.SIGCONT)
    cluster.ready()
    cancelled(cluster, request)
