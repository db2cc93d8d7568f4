"""How pipelines and pools are, as conditions."""

from __future__ import annotations

import pytest

from unfuse.k8s.reconcile import ObservedStatus, condition, conditions, workload_status
from unfuse.k8s.spec import InvalidSpec, Object

BODY: Object = {"metadata": {"name": "p", "generation": 3}}


def told(found: ObservedStatus, body: Object = BODY, now: str = "then") -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in conditions(body, found, "workers", now)}


@pytest.mark.parametrize(
    ("found", "ready", "progressing", "degraded"),
    [
        (ObservedStatus(2, 2, 2), ("True", "AsWanted"), ("False", "AsWanted"), ("False", "AsWanted")),
        (ObservedStatus(2, 2, 1), ("False", "Starting"), ("True", "Starting"), ("False", "AsWanted")),
        (ObservedStatus(0, 1, 1), ("True", "Asleep"), ("False", "Asleep"), ("False", "AsWanted")),
        (
            ObservedStatus(2, 2, 2, (InvalidSpec("Odd", "it is"),)),
            ("True", "AsWanted"),
            ("False", "AsWanted"),
            ("True", "Odd"),
        ),
        (
            ObservedStatus(2, 2, 1, (InvalidSpec("Odd", "it is"),)),
            ("False", "Starting"),
            ("False", "Starting"),
            ("True", "Odd"),
        ),
        (
            ObservedStatus(2, 3, 3, waiting_reason="w-2"),
            ("True", "AsWanted"),
            ("True", "WorkersFinish"),
            ("False", "AsWanted"),
        ),
        (
            ObservedStatus(3, 3, 2, waiting_reason="w-2"),
            ("False", "Starting"),
            ("True", "WorkersFinish"),
            ("False", "AsWanted"),
        ),
        (
            ObservedStatus(2, 3, 3, (InvalidSpec("Odd", "it is"),), waiting_reason="w-2"),
            ("True", "AsWanted"),
            ("False", "WorkersFinish"),
            ("True", "Odd"),
        ),
        (
            ObservedStatus(rejection=InvalidSpec("Bad", "it is")),
            ("False", "Bad"),
            ("False", "Starting"),
            ("True", "Bad"),
        ),
    ],
)
def test_conditions_follow_replicas_and_problems(
    found: ObservedStatus, ready: tuple[str, str], progressing: tuple[str, str], degraded: tuple[str, str]
) -> None:
    assert told(found) == {"Ready": ready, "Progressing": progressing, "Degraded": degraded}


def test_transition_time_changes_only_with_condition_status() -> None:
    before = conditions(BODY, ObservedStatus(2, 2, 1), "workers", "then")
    body = BODY | {"status": {"conditions": before}}
    same, other = (
        {"status": {"conditions": conditions(body, found, "workers", "now")}}
        for found in (ObservedStatus(3, 2, 1), ObservedStatus(2, 2, 2))
    )
    times = [condition(one, "Ready")["lastTransitionTime"] for one in (same, other)]
    assert times == ["then", "now"] and condition(other, "Degraded")["lastTransitionTime"] == "then"
    assert condition(same, "Ready")["message"] == "1 of 3 workers are ready"
    assert {one["observedGeneration"] for one in before} == {3}
    assert condition({}, "Ready") == {}


def test_degraded_message_lists_all_problems() -> None:
    found = ObservedStatus(1, 1, 1, (InvalidSpec("One", "first"), InvalidSpec("Two", "second")))
    (degraded,) = (one for one in conditions(BODY, found, "workers", "then") if one["type"] == "Degraded")
    assert (degraded["reason"], degraded["message"]) == ("One", "first; second")


def workload(**status: int) -> Object:
    return {"metadata": {"generation": 2}, "spec": {"replicas": 3}, "status": status}


@pytest.mark.parametrize(
    ("status", "ready"),
    [
        ({}, 0),
        ({"observedGeneration": 2, "readyReplicas": 3, "updatedReplicas": 3}, 3),
        ({"observedGeneration": 2, "readyReplicas": 3, "updatedReplicas": 1}, 1),
        ({"observedGeneration": 1, "readyReplicas": 3, "updatedReplicas": 3}, 0),
    ],
)
def test_pods_of_older_template_are_not_counted_ready(status: dict[str, int], ready: int) -> None:
    assert workload_status(workload(**status), []).ready == ready


def test_reason_of_each_failing_pod_is_reported() -> None:
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes have a GPU"}
    keys = {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "wire" not found'}}}
    coming = {"state": {"waiting": {"reason": "PodInitializing"}}}
    pods: list[Object] = [
        {"metadata": {"name": "a"}, "status": {"conditions": [unplaced]}},
        {"metadata": {"name": "b"}, "status": {"initContainerStatuses": [keys]}},
        {"metadata": {"name": "c"}, "status": {"containerStatuses": [coming]}},
        {"metadata": {"name": "d"}, "status": {"containerStatuses": [{"state": {"running": {}}}]}},
        {"metadata": {"name": "e"}},
    ]
    assert [(one.reason, str(one)) for one in workload_status(workload(), pods).problems] == [
        ("Unschedulable", "pod a cannot be scheduled: 0/3 nodes have a GPU"),
        ("CreateContainerConfigError", 'pod b does not run (CreateContainerConfigError): secret "wire" not found'),
    ]
