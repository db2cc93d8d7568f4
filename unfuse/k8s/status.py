"""How pipelines and pools are, as conditions: of what their workloads and pods say, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from unfuse.k8s.spec import Object, Wrong

COMING = {"", "ContainerCreating", "PodInitializing"}
"""Reasons to wait that pass by themselves."""


class Found(NamedTuple):
    """How many are wanted, there, and ready; what is wrong all the same; why nothing was done, if that is so; and for
    what it waits before it is as wanted.
    """

    wanted: int = 0
    there: int = 0
    ready: int = 0
    troubles: tuple[Wrong, ...] = ()
    refused: Wrong | None = None
    waits: str = ""


def of_workload(made: Object, pods: Iterable[Object]) -> Found:
    """What a workload, as the server returned it, and its pods say. Pods of an older template do not count as ready."""
    status, wanted = made.get("status", {}), made["spec"]["replicas"]
    known = status.get("observedGeneration", 0) >= made["metadata"].get("generation", 0)
    ready = min(status.get("readyReplicas", 0), status.get("updatedReplicas", 0)) if known else 0
    return Found(wanted, status.get("replicas", 0), ready, (*_troubles(pods),))


def _troubles(pods: Iterable[Object]) -> Iterator[Wrong]:
    """Why pods do not run: no node takes them, or a container does not start, with the last line that it wrote."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for one in status.get("conditions", []):
            if one["type"] == "PodScheduled" and one["status"] == "False":
                yield Wrong(one.get("reason", "Unschedulable"), f"{name} finds no node: {one.get('message', '')}")
        for one in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
            waiting = one.get("state", {}).get("waiting", {})
            if (reason := waiting.get("reason", "")) not in COMING:
                wrote = one.get("lastState", {}).get("terminated", {}).get("message", "").strip().splitlines()
                yield Wrong(reason, f"{name} does not run ({reason}): {(wrote or [waiting.get('message', '')])[-1]}")


def conditions(body: Object, found: Found, what: str, now: str) -> list[Object]:
    """Ready, Progressing and Degraded of an object; each keeps its time while it stays as it was."""
    enough = found.ready >= found.wanted and not found.refused
    wrong = [found.refused] if found.refused else found.troubles
    state = "Starting" if not enough else "AsWanted" if found.wanted else "Asleep"
    amount = str(found.refused or f"{found.ready} of {found.wanted} {what} are ready")
    moves = ("WorkersFinish", found.waits) if found.waits else (state, amount)
    said = {
        "Ready": (enough, found.refused.reason if found.refused else state, amount),
        "Progressing": (not wrong and (not enough or found.waits != ""), *moves),
        "Degraded": (bool(wrong), wrong[0].reason if wrong else "AsWanted", "; ".join(map(str, wrong)) or amount),
    }
    told: list[Object] = []
    for name, (is_so, reason, message) in said.items():
        old = condition(body, name)
        told.append({
            "type": name, "status": str(is_so), "reason": reason, "message": message[:4096],
            "observedGeneration": body["metadata"].get("generation", 0),
            "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == str(is_so) else now,
        })  # fmt: skip
    return told


def condition(body: Object, name: str) -> Object:
    """A condition of an object; empty if nobody has told it yet."""
    return next((one for one in body.get("status", {}).get("conditions", []) if one["type"] == name), {})
