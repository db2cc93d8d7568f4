"""Has pipelines and pools be as they say, and says how they are. A pass reads all it needs anew, and may be cut off."""

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
from unfuse.k8s.cluster import MERGE, ClusterClient, owns, place
from unfuse.k8s.objects import KEDA, MADE, MONITORING, POLICIES, VERSION
from unfuse.k8s.spec import NAME, InvalidSpec, Object, gpus, pools as pools_in, ranks, read

PIPELINE, POOL = "DiffusionPipeline", "DiffusionPool"

NOT_AS_DEFINED = (ConfigError, LookupError, TypeError, AttributeError)
"""What comes of objects that a server let in against their definition."""

Named = tuple[str, str, str]
"""The API, kind and name of an object."""

Tell = Callable[..., None]
"""Called with an object, and a reason and a message by name, when something is newly wrong with it."""


class Reconciler:
    """What is done about one object at a time."""

    def __init__(self, cluster: ClusterClient, image: str, tell: Tell) -> None:
        self._cluster, self._usual, self._tell = cluster, {"image": image}, tell

    async def reconcile(self, kind: str, namespace: str, name: str) -> bool | None:
        """Do it. Returns whether all is as wanted, None if there is no such object. Raises TransientError."""
        path = place(VERSION, kind, namespace, name)
        body = await self._cluster.ask("GET", path)
        if body is None or "deletionTimestamp" in body["metadata"]:
            return None
        more: Object = {}
        try:
            found, more = await (self._pipeline if kind == PIPELINE else self._pool)(body, namespace)
        except InvalidSpec as error:
            found = ObservedStatus(refused=error)
        except NOT_AS_DEFINED as error:
            found = ObservedStatus(refused=InvalidSpec("InvalidSpec", f"its definition does not allow this: {error!r}"))
        what = "schedulers and pools" if kind == PIPELINE else "workers"
        said = more | {"observedGeneration": body["metadata"].get("generation", 0)}
        said["conditions"] = conditions(body, found, what, now())
        if body.get("status", {}) | said != body.get("status", {}):
            degraded = condition({"status": said}, "Degraded")
            if degraded["status"] == "True" and degraded["reason"] != condition(body, "Degraded").get("reason"):
                self._tell(body, reason=degraded["reason"], message=degraded["message"])
            await self._cluster.ask("PATCH", f"{path}/status", {"status": said}, MERGE)
        return found.ready >= found.wanted and not (found.refused or found.waits)

    async def _pipeline(self, body: Object, namespace: str) -> tuple[ObservedStatus, Object]:
        name, asked, apis = body["metadata"]["name"], self._usual | read(body), await self._apis()
        pools, owner = pools_in(name, asked), owner_of(body)
        for made in (*objects.secrets_of(name, asked), *objects.pools_of(name, asked)):
            controls = made["kind"] == "Secret"
            await self._cluster.create(made, namespace, owner | ({"controller": True} if controls else {}))
        ours = objects.of_pipeline(name, asked, apis)
        optional = {(POLICIES, "NetworkPolicy", f"{name}-scheduler"), (MONITORING, "ServiceMonitor", name)}
        await self._drop(optional, ours, apis, body)
        found = await self._applied(ours, body, namespace)
        there = await self._cluster.every(VERSION, POOL, namespace)
        roles = {pool: one["spec"]["role"] for pool, one in there.items()}
        troubles = [InvalidSpec("NotAsAsked", said) for said in objects.unmet(name, asked, roles, apis)]
        ready = found.ready
        for pool in pools:
            ready += condition(there.get(pool, {}), "Ready").get("status") == "True"
            its = condition(there.get(pool, {}), "Degraded")
            if its.get("status") == "True":
                troubles.append(InvalidSpec(its["reason"], f"pool {pool}: {its['message']}"))
        whole = ObservedStatus(found.wanted + len(pools), found.there, ready, (*found.troubles, *troubles))
        return whole, {"url": at(name, namespace, asked)}

    async def _pool(self, body: Object, namespace: str) -> tuple[ObservedStatus, Object]:
        name, asked = body["metadata"]["name"], read(body)
        users: dict[str, Object] = {}
        there = await self._cluster.every(VERSION, PIPELINE, namespace)
        pipelines = {user: one for user, one in there.items() if NAME.fullmatch(user)}  # others never have workers
        for user, one in pipelines.items():
            try:
                if name in pools_in(user, its := self._usual | read(one)):
                    users[user] = its
            except NOT_AS_DEFINED as error:  # which may mean this pool: what serves goes on
                raise InvalidSpec("PipelineNotUnderstood", f"it stays as it is until {user} is understood") from error
        if MADE.items() <= body["metadata"].get("labels", {}).items():
            await self._keep(body, namespace, [pipelines[user] for user in users])
        if not users:
            path = place("apps/v1", "StatefulSet", namespace, name)
            if (workload := await self._cluster.ask("GET", path)) and owns(owner_of(body), workload):
                await self._cluster.ask("PATCH", path, {"spec": {"replicas": 0}}, MERGE)
            raise InvalidSpec("NotUsed", "no pipeline names it, so it has no workers")
        made = objects.of_pool(name, namespace, asked, users, apis := await self._apis())
        gateways = [at(one, namespace, its) for one, its in sorted(users.items())]
        since, waits = await self._shrink(body, made[-1], asked["finishSeconds"], gateways)
        optional = {(POLICIES, "NetworkPolicy", f"{name}-pool"), (KEDA, "ScaledObject", name)}
        await self._drop(optional, made, apis, body)
        found = (await self._applied(made, body, namespace))._replace(waits=waits)
        idle = await idle_gpus(name, asked, gateways if found.ready else [])
        found = found._replace(troubles=(*found.troubles, *idle))
        told = {"replicas": found.there, "readyReplicas": found.ready, "selector": chosen(made[-1])}
        return found, told | ({"waitsSince": since} if since or "waitsSince" in body.get("status", {}) else {})

    async def _shrink(self, body: Object, made: Object, longest: int, gateways: list[str]) -> tuple[str | None, str]:
        """Have a StatefulSet be as small as its workers allow now; returns since when that waits, and for whom."""
        name, namespace, wanted = made["metadata"]["name"], body["metadata"]["namespace"], made["spec"]["replicas"]
        there = await self._cluster.ask("GET", place("apps/v1", "StatefulSet", namespace, name))
        count = there["spec"]["replicas"] if there and owns(owner_of(body), there) else 0
        if not 0 < wanted < count:
            return None, ""
        if (tasks := await busy(name, gateways)) is None:
            stay, longest, why = count, min(longest, UNKNOWN_S), "no gateway says who is busy"
        else:
            stay = staying(wanted, count, tasks)
            why = f"{name}-{stay - 1} ends what it does, as others are idle"
        since = body.get("status", {}).get("waitsSince") or now()
        if stay == wanted or datetime.now(UTC) - datetime.fromisoformat(since) >= timedelta(seconds=longest):
            return None, ""
        made["spec"]["replicas"] = stay
        return since, f"{stay} workers are to be {wanted}: {why}"

    async def _drop(self, optional: set[Named], made: list[Object], apis: frozenset[str], body: Object) -> None:
        """Delete those of these objects that are not to be made any more."""
        kept = {(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in made}
        for api, kind, name in sorted(optional - kept):
            if api in apis | {POLICIES}:
                await self._cluster.delete(api, kind, body["metadata"]["namespace"], name, owner_of(body))

    async def _applied(self, made: list[Object], body: Object, namespace: str) -> ObservedStatus:
        """Apply objects of which the last is a workload, and see how that is."""
        owner, workload = owner_of(body) | {"controller": True}, made[-1]
        for one in made:
            workload = await self._cluster.apply(one, namespace, owner)
        pods = await self._cluster.every("v1", "Pod", namespace, f"?labelSelector={chosen(made[-1])}")
        return of_workload(workload, pods.values())

    async def _keep(self, body: Object, namespace: str, users: list[Object]) -> None:
        """Have a pool that was made here be owned by those that name it; it goes with the last of them."""
        path, owners = place(VERSION, POOL, namespace, body["metadata"]["name"]), [*map(owner_of, users)]
        if not owners:
            await self._cluster.ask("DELETE", path)
        elif owners != body["metadata"].get("ownerReferences"):
            await self._cluster.ask("PATCH", path, {"metadata": {"ownerReferences": owners}}, MERGE)

    async def _apis(self) -> frozenset[str]:
        return frozenset([api for api in (MONITORING, KEDA) if await self._cluster.ask("GET", f"/apis/{api}")])


async def idle_gpus(name: str, pool: Object, gateways: list[str]) -> list[InvalidSpec]:
    """What is wrong where workers of a pool have more GPUs than ranks, as they were told to or their gateways say."""
    there = gpus(pool.get("resources", {}))
    if there < 2:
        return []
    said, count = ranks(pool)
    count = await fewest_ranks(name, gateways) if count is None else count
    if count is None or count >= there:
        return []
    told = f"device is {pool['device']}" if pool["device"] != "auto" else "its args say so"
    most = f"its stages cannot be divided by more, so ask for {count} GPUs"
    why = most if said == AUTO else f"parallel is {said}" if said else told
    return [InvalidSpec("IdleGPUs", f"its workers have {there} GPUs and compute on {count}: {why}")]


def owner_of(body: Object) -> Object:
    """What says that an object is owned by this one."""
    kind = POOL if "role" in body["spec"] else PIPELINE  # lists leave it out
    return {"apiVersion": VERSION, "kind": kind, "name": body["metadata"]["name"], "uid": body["metadata"]["uid"]}


def at(pipeline: str, namespace: str, spec: Object) -> str:
    """Where the gateway of a pipeline is."""
    return f"http://{pipeline}.{namespace}.svc:{spec['service']['port']}"


def now() -> str:
    """The time, as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def chosen(workload: Object) -> str:
    """The labels by which the pods of a workload are found."""
    return ",".join(f"{key}={value}" for key, value in workload["spec"]["selector"]["matchLabels"].items())


ASK_S, UNKNOWN_S = 5.0, 30
"""Seconds in which a gateway answers; and for how long none need say who is busy before that is not asked for."""

TASKS = re.compile(r'^unfuse_node_tasks\{node="(.+)-(\d+)"\} (?!0\.0$)', re.MULTILINE)
RANKS = re.compile(r'^unfuse_node_ranks\{node="(.+)-\d+"\} (\d+)\.0$', re.MULTILINE)


async def busy(pool: str, gateways: Iterable[str]) -> frozenset[int] | None:
    """The numbers of the workers that have tasks, as the first of these gateways says that answers; else None."""
    if (page := await _metrics(gateways)) is None:
        return None
    return frozenset(int(number) for name, number in TASKS.findall(page) if name == pool)


async def fewest_ranks(pool: str, gateways: Iterable[str]) -> int | None:
    """The ranks of the pool's worker that has fewest; None where no gateway answers, or knows one."""
    found = RANKS.findall(await _metrics(gateways) or "")
    return min((int(count) for name, count in found if name == pool), default=None)


async def _metrics(gateways: Iterable[str]) -> str | None:
    """What the first of these gateways says that answers; else None."""
    async with httpx2.AsyncClient(timeout=ASK_S) as client:
        for gateway in gateways:
            with suppress(httpx2.HTTPError):
                return (await client.get(f"{gateway}/metrics")).raise_for_status().text
    return None


def staying(wanted: int, there: int, has: Collection[int]) -> int:
    """How many of those that are `there` stay for now, with these that have tasks: a StatefulSet's last ones go."""
    late = [number for number in range(wanted, there) if number in has]
    idle = any(number not in has for number in range(wanted))
    return late[-1] + 1 if late and idle else wanted


COMING = {"", "ContainerCreating", "PodInitializing"}
"""Reasons to wait that pass by themselves."""


class ObservedStatus(NamedTuple):
    """How many are wanted, there, and ready; what is wrong all the same; why nothing was done, if that is so; and for
    what it waits before it is as wanted.
    """

    wanted: int = 0
    there: int = 0
    ready: int = 0
    troubles: tuple[InvalidSpec, ...] = ()
    refused: InvalidSpec | None = None
    waits: str = ""


def of_workload(made: Object, pods: Iterable[Object]) -> ObservedStatus:
    """What a workload, as the server returned it, and its pods say. Pods of an older template do not count as ready."""
    status, wanted = made.get("status", {}), made["spec"]["replicas"]
    known = status.get("observedGeneration", 0) >= made["metadata"].get("generation", 0)
    ready = min(status.get("readyReplicas", 0), status.get("updatedReplicas", 0)) if known else 0
    return ObservedStatus(wanted, status.get("replicas", 0), ready, (*_troubles(pods),))


def _troubles(pods: Iterable[Object]) -> Iterator[InvalidSpec]:
    """Why pods do not run: no node takes them, or a container does not start, with the last line that it wrote."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for one in status.get("conditions", []):
            if one["type"] == "PodScheduled" and one["status"] == "False":
                yield InvalidSpec(one.get("reason", "Unschedulable"), f"{name} finds no node: {one.get('message', '')}")
        for one in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
            waiting = one.get("state", {}).get("waiting", {})
            if (reason := waiting.get("reason", "")) not in COMING:
                wrote = one.get("lastState", {}).get("terminated", {}).get("message", "").strip().splitlines()
                yield InvalidSpec(
                    reason, f"{name} does not run ({reason}): {(wrote or [waiting.get('message', '')])[-1]}"
                )


def conditions(body: Object, found: ObservedStatus, what: str, now: str) -> list[Object]:
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
