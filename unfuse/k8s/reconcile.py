"""Reconciles pipelines and pools with the cluster and writes their status.

Each pass reads all that it needs again, and may be cancelled at any point.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import httpx2

from unfuse.core.compute_options import AUTO
from unfuse.core.errors import ConfigError
from unfuse.k8s import objects
from unfuse.k8s.cluster import MERGE, ClusterClient, object_path, owns
from unfuse.k8s.objects import KEDA, MANAGED_BY, MONITORING, POLICIES, VERSION
from unfuse.k8s.spec import NAME, InvalidSpec, Object, gpus, pools as pools_in, ranks, read_spec

PIPELINE, POOL = "DiffusionPipeline", "DiffusionPool"

#: Errors that are raised for an object that does not match its definition, although the server accepted it.
NOT_AS_DEFINED = (ConfigError, LookupError, TypeError, AttributeError)

#: The API, kind and name of an object.
Named = tuple[str, str, str]

#: `(object, reason=, message=)`: called when an object has a new problem.
EventRecorder = Callable[..., None]

#: Seconds that a gateway has to answer; and the longest wait, in seconds, for idle workers if no gateway answers.
ASK_S, UNKNOWN_S = 5.0, 30

#: Lines of a gateway's /metrics page: workers with tasks, and the number of ranks of each worker.
TASKS = re.compile(r'^unfuse_node_tasks\{node="(.+)-(\d+)"\} (?!0\.0$)', re.MULTILINE)
RANKS = re.compile(r'^unfuse_node_ranks\{node="(.+)-\d+"\} (\d+)\.0$', re.MULTILINE)

#: Reasons of waiting containers that pass by themselves.
COMING = {"", "ContainerCreating", "PodInitializing"}


class Reconciler:
    """Reconciles one object at a time.

    image: the image of pods whose pipeline names none.
    publish: called with each new problem of an object, to publish it as an event.
    """

    def __init__(self, cluster: ClusterClient, image: str, publish: EventRecorder) -> None:
        self._cluster = cluster
        self._defaults = {"image": image}
        self._publish = publish

    async def reconcile(self, kind: str, namespace: str, name: str) -> bool | None:
        """Apply the objects of a pipeline or pool and update its status.

        Returns whether it is ready, or None if it does not exist or is being deleted. Raises TransientError.
        """
        path = object_path(VERSION, kind, namespace, name)
        body = await self._cluster.call("GET", path)
        if body is None or "deletionTimestamp" in body["metadata"]:
            return None

        fields: Object = {}
        try:
            reconcile_kind = self._reconcile_pipeline if kind == PIPELINE else self._reconcile_pool
            observed, fields = await reconcile_kind(body, namespace)
        except InvalidSpec as error:
            observed = ObservedStatus(rejection=error)
        except NOT_AS_DEFINED as error:
            reason = f"the spec does not match its definition: {error!r}"
            observed = ObservedStatus(rejection=InvalidSpec("InvalidSpec", reason))

        noun = "schedulers and pools" if kind == PIPELINE else "workers"
        status = fields | {"observedGeneration": body["metadata"].get("generation", 0)}
        status["conditions"] = conditions(body, observed, noun, now())
        if body.get("status", {}) | status != body.get("status", {}):
            degraded = condition({"status": status}, "Degraded")
            # The event is published once for each reason, not at each reconciliation.
            if degraded["status"] == "True" and degraded["reason"] != condition(body, "Degraded").get("reason"):
                self._publish(body, reason=degraded["reason"], message=degraded["message"])
            await self._cluster.call("PATCH", f"{path}/status", {"status": status}, MERGE)
        return observed.ready >= observed.desired_replicas and not (observed.rejection or observed.waiting_reason)

    async def _reconcile_pipeline(self, body: Object, namespace: str) -> tuple[ObservedStatus, Object]:
        """Apply the objects of a pipeline.

        Returns the observed status, and further fields of the pipeline's status.
        """
        name = body["metadata"]["name"]
        spec = self._defaults | read_spec(body)
        apis = await self._apis()
        pools = pools_in(name, spec)
        owner = owner_of(body)
        for item in (*objects.secrets_of(name, spec), *objects.default_pools(name, spec)):
            is_controller = item["kind"] == "Secret"
            await self._cluster.create(item, namespace, owner | ({"controller": True} if is_controller else {}))

        items = objects.pipeline_objects(name, spec, apis)
        optional = {(POLICIES, "NetworkPolicy", f"{name}-scheduler"), (MONITORING, "ServiceMonitor", name)}
        await self._delete_unused(optional, items, apis, body)
        observed = await self._apply(items, body, namespace)

        existing = await self._cluster.every(VERSION, POOL, namespace)
        roles = {pool: item["spec"]["role"] for pool, item in existing.items()}
        problems = [InvalidSpec("NotAsAsked", message) for message in objects.unmet_requests(name, spec, roles, apis)]
        ready = observed.ready
        for pool in pools:
            ready += condition(existing.get(pool, {}), "Ready").get("status") == "True"
            degraded = condition(existing.get(pool, {}), "Degraded")
            if degraded.get("status") == "True":
                problems.append(InvalidSpec(degraded["reason"], f"pool {pool}: {degraded['message']}"))
        desired_replicas = observed.desired_replicas + len(pools)
        status = ObservedStatus(desired_replicas, observed.replicas, ready, (*observed.problems, *problems))
        return status, {"url": gateway_url(name, namespace, spec)}

    async def _reconcile_pool(self, body: Object, namespace: str) -> tuple[ObservedStatus, Object]:
        """Apply the objects of a pool.

        Returns the observed status, and further fields of the pool's status.
        """
        name = body["metadata"]["name"]
        spec = read_spec(body)
        users: dict[str, Object] = {}
        existing = await self._cluster.every(VERSION, PIPELINE, namespace)
        pipelines = {user: item for user, item in existing.items() if NAME.fullmatch(user)}  # others have no workers
        for user, item in pipelines.items():
            try:
                if name in pools_in(user, user_spec := self._defaults | read_spec(item)):
                    users[user] = user_spec
            except NOT_AS_DEFINED as error:  # it may use this pool, so the pool must not be changed
                raise InvalidSpec(
                    "PipelineNotUnderstood", f"it is not changed until the spec of pipeline {user} is valid"
                ) from error

        if MANAGED_BY.items() <= body["metadata"].get("labels", {}).items():
            await self._update_owners(body, namespace, [pipelines[user] for user in users])
        if not users:
            path = object_path("apps/v1", "StatefulSet", namespace, name)
            if (workload := await self._cluster.call("GET", path)) and owns(owner_of(body), workload):
                await self._cluster.call("PATCH", path, {"spec": {"replicas": 0}}, MERGE)
            raise InvalidSpec("NotUsed", "no pipeline uses the pool, so it has no workers")

        apis = await self._apis()
        items = objects.pool_objects(name, namespace, spec, users, apis)
        gateways = [gateway_url(user, namespace, user_spec) for user, user_spec in sorted(users.items())]
        since, waiting_reason = await self._delay_scale_down(body, items[-1], spec["finishSeconds"], gateways)
        optional = {(POLICIES, "NetworkPolicy", f"{name}-pool"), (KEDA, "ScaledObject", name)}
        await self._delete_unused(optional, items, apis, body)
        observed = (await self._apply(items, body, namespace))._replace(waiting_reason=waiting_reason)

        idle = await idle_gpus(name, spec, gateways if observed.ready else [])
        observed = observed._replace(problems=(*observed.problems, *idle))
        fields = {"replicas": observed.replicas, "readyReplicas": observed.ready, "selector": chosen(items[-1])}
        is_waiting = since or "waitsSince" in body.get("status", {})
        return observed, fields | ({"waitsSince": since} if is_waiting else {})

    async def _delay_scale_down(
        self, body: Object, workload: Object, limit_s: int, gateways: list[str]
    ) -> tuple[str | None, str]:
        """Raise a StatefulSet's replicas while workers that a scale-down would remove are busy.

        Changes `workload`. Returns since when the scale-down waits, and why; None and "" if it does not wait.

        limit_s: longest wait, in seconds. Then the scale-down is done, and draining saves the work.
        """
        name = workload["metadata"]["name"]
        desired = workload["spec"]["replicas"]
        existing = await self._cluster.call(
            "GET", object_path("apps/v1", "StatefulSet", body["metadata"]["namespace"], name)
        )
        count = existing["spec"]["replicas"] if existing and owns(owner_of(body), existing) else 0
        if not 0 < desired < count:
            return None, ""

        if (tasks := await busy(name, gateways)) is None:
            remaining = count
            limit_s = min(limit_s, UNKNOWN_S)
            reason = "no gateway reports which workers are busy"
        else:
            remaining = staying(desired, count, tasks)
            reason = f"{name}-{remaining - 1} finishes its tasks while others are idle"

        # From the status, so that a new operator does not start the wait again.
        since = body.get("status", {}).get("waitsSince") or now()
        if remaining == desired or datetime.now(UTC) - datetime.fromisoformat(since) >= timedelta(seconds=limit_s):
            return None, ""
        workload["spec"]["replicas"] = remaining
        return since, f"scale-down from {remaining} to {desired} workers waits: {reason}"

    async def _delete_unused(
        self, optional: set[Named], items: list[Object], apis: frozenset[str], body: Object
    ) -> None:
        """Delete the optional objects that are not among the items to apply."""
        used = {(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in items}
        for api, kind, name in sorted(optional - used):
            if api in apis | {POLICIES}:
                await self._cluster.delete(api, kind, body["metadata"]["namespace"], name, owner_of(body))

    async def _apply(self, items: list[Object], body: Object, namespace: str) -> ObservedStatus:
        """Apply objects, the last of which is a workload, and return the workload's status."""
        owner = owner_of(body) | {"controller": True}
        workload = items[-1]
        for item in items:
            workload = await self._cluster.apply(item, namespace, owner)
        pods = await self._cluster.every("v1", "Pod", namespace, f"?labelSelector={chosen(items[-1])}")
        return workload_status(workload, pods.values())

    async def _update_owners(self, body: Object, namespace: str, users: list[Object]) -> None:
        """Set the owner references of a pool to the pipelines that use it.

        The pool is one that the operator created. Without pipelines, it is deleted.
        """
        path = object_path(VERSION, POOL, namespace, body["metadata"]["name"])
        owners = [*map(owner_of, users)]
        if not owners:
            await self._cluster.call("DELETE", path)
        elif owners != body["metadata"].get("ownerReferences"):
            await self._cluster.call("PATCH", path, {"metadata": {"ownerReferences": owners}}, MERGE)

    async def _apis(self) -> frozenset[str]:
        """Return the optional APIs that the cluster has."""
        return frozenset([api for api in (MONITORING, KEDA) if await self._cluster.call("GET", f"/apis/{api}")])


async def idle_gpus(name: str, pool: Object, gateways: list[str]) -> list[InvalidSpec]:
    """Return a problem if a pool's workers have more GPUs than ranks, else nothing.

    If the spec leaves the number of ranks to the workers, the gateways report it.
    """
    gpu_count = gpus(pool.get("resources", {}))
    if gpu_count < 2:
        return []
    parallelism, rank_count = ranks(pool)
    rank_count = await fewest_ranks(name, gateways) if rank_count is None else rank_count
    if rank_count is None or rank_count >= gpu_count:
        return []

    if parallelism == AUTO:
        reason = f"its stages cannot use more ranks, so request {rank_count} GPUs"
    elif parallelism:
        reason = f"parallel is {parallelism}"
    else:
        reason = f"device is {pool['device']}" if pool["device"] != "auto" else "set by args"
    return [InvalidSpec("IdleGPUs", f"its workers have {gpu_count} GPUs and use {rank_count}: {reason}")]


def owner_of(body: Object) -> Object:
    """Return the owner reference to a pipeline or pool."""
    kind = POOL if "role" in body["spec"] else PIPELINE  # lists leave it out
    return {"apiVersion": VERSION, "kind": kind, "name": body["metadata"]["name"], "uid": body["metadata"]["uid"]}


def gateway_url(pipeline: str, namespace: str, spec: Object) -> str:
    """Return the URL of a pipeline's gateway."""
    return f"http://{pipeline}.{namespace}.svc:{spec['service']['port']}"


def now() -> str:
    """Return the present time in the format of Kubernetes."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def chosen(workload: Object) -> str:
    """Return the label selector of a workload's pods."""
    return ",".join(f"{key}={value}" for key, value in workload["spec"]["selector"]["matchLabels"].items())


async def busy(pool: str, gateways: Iterable[str]) -> frozenset[int] | None:
    """Return the ordinals of a pool's workers with tasks, or None if no gateway answers."""
    if (page := await _metrics(gateways)) is None:
        return None
    return frozenset(int(number) for name, number in TASKS.findall(page) if name == pool)


async def fewest_ranks(pool: str, gateways: Iterable[str]) -> int | None:
    """Return the lowest rank count of a pool's workers. None if no gateway reports one."""
    rank_counts = RANKS.findall(await _metrics(gateways) or "")
    return min((int(count) for name, count in rank_counts if name == pool), default=None)


async def _metrics(gateways: Iterable[str]) -> str | None:
    """Return the metrics page of the first gateway that answers, or None."""
    async with httpx2.AsyncClient(timeout=ASK_S) as client:
        for gateway in gateways:
            with suppress(httpx2.HTTPError):
                return (await client.get(f"{gateway}/metrics")).raise_for_status().text
    return None


def staying(desired: int, current: int, busy_ordinals: Collection[int]) -> int:
    """Return how many workers a scale-down to `desired` leaves for now.

    A StatefulSet removes its last pods first. While one of the first `desired` workers is idle, the busy workers behind
    them stay until their tasks end.

    current: the present number of workers. busy_ordinals: ordinals of the workers with tasks.
    """
    busy_surplus = [number for number in range(desired, current) if number in busy_ordinals]
    has_idle = any(number not in busy_ordinals for number in range(desired))
    return busy_surplus[-1] + 1 if busy_surplus and has_idle else desired


class ObservedStatus(NamedTuple):
    """The observed status of a pipeline or pool."""

    #: Number of replicas that its spec asks for; for a pipeline, its pools are added.
    desired_replicas: int = 0
    #: Number of existing replicas.
    replicas: int = 0
    #: Number of replicas, and of pools, that are ready.
    ready: int = 0
    #: Problems that do not stop the reconciliation.
    problems: tuple[InvalidSpec, ...] = ()
    #: Why its spec was not applied. None if it was.
    rejection: InvalidSpec | None = None
    #: Why a scale-down waits. Empty if none does.
    waiting_reason: str = ""


def workload_status(workload: Object, pods: Iterable[Object]) -> ObservedStatus:
    """Return the status of a workload and its pods.

    Pods of an older template do not count as ready.

    workload: the object, as the server returned it.
    """
    status = workload.get("status", {})
    desired = workload["spec"]["replicas"]
    is_observed = status.get("observedGeneration", 0) >= workload["metadata"].get("generation", 0)
    ready = min(status.get("readyReplicas", 0), status.get("updatedReplicas", 0)) if is_observed else 0
    return ObservedStatus(desired, status.get("replicas", 0), ready, (*_pod_problems(pods),))


def _pod_problems(pods: Iterable[Object]) -> Iterator[InvalidSpec]:
    """Yield a problem for each unschedulable pod and each container that does not start.

    For a container, the message has the last line of its termination message.
    """
    for pod in pods:
        name = pod["metadata"]["name"]
        status = pod.get("status", {})
        for entry in status.get("conditions", []):
            if entry["type"] == "PodScheduled" and entry["status"] == "False":
                message = f"pod {name} cannot be scheduled: {entry.get('message', '')}"
                yield InvalidSpec(entry.get("reason", "Unschedulable"), message)
        for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
            waiting = container.get("state", {}).get("waiting", {})
            if (reason := waiting.get("reason", "")) not in COMING:
                last_state = container.get("lastState", {})
                lines = last_state.get("terminated", {}).get("message", "").strip().splitlines()
                last_line = (lines or [waiting.get("message", "")])[-1]
                yield InvalidSpec(reason, f"pod {name} does not run ({reason}): {last_line}")


def conditions(body: Object, observed: ObservedStatus, noun: str, now: str) -> list[Object]:
    """Return the conditions Ready, Progressing and Degraded of an object.

    A condition whose status did not change keeps its transition time.

    noun: the noun of its replicas, for messages. now: the time, see `now`.
    """
    is_ready = observed.ready >= observed.desired_replicas and not observed.rejection
    problems = [observed.rejection] if observed.rejection else observed.problems
    state = "Starting" if not is_ready else "AsWanted" if observed.desired_replicas else "Asleep"
    amount = str(observed.rejection or f"{observed.ready} of {observed.desired_replicas} {noun} are ready")
    progress = ("WorkersFinish", observed.waiting_reason) if observed.waiting_reason else (state, amount)
    states = {
        "Ready": (is_ready, observed.rejection.reason if observed.rejection else state, amount),
        "Progressing": (not problems and (not is_ready or observed.waiting_reason != ""), *progress),
        "Degraded": (
            bool(problems),
            problems[0].reason if problems else "AsWanted",
            "; ".join(map(str, problems)) or amount,
        ),
    }
    entries: list[Object] = []
    for name, (is_true, reason, message) in states.items():
        previous = condition(body, name)
        is_unchanged = previous.get("status") == str(is_true)
        entries.append(
            {
                "type": name,
                "status": str(is_true),
                "reason": reason,
                "message": message[:4096],
                "observedGeneration": body["metadata"].get("generation", 0),
                "lastTransitionTime": previous["lastTransitionTime"] if is_unchanged else now,
            }
        )
    return entries


def condition(body: Object, name: str) -> Object:
    """Return a condition of an object, or an empty one if it was never set."""
    return next((entry for entry in body.get("status", {}).get("conditions", []) if entry["type"] == name), {})
