"""The operator: kopf hears what changes in a cluster, and one task for each pipeline and pool has it be as it says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import kopf
import structlog

from unfuse.core.errors import TransientError, UsageError
from unfuse.k8s.cluster import ClusterClient
from unfuse.k8s.objects import MADE, VERSION
from unfuse.k8s.reconcile import PIPELINE, POOL, Reconciler
from unfuse.k8s.spec import InvalidSpec, Object

OWNED = ("configmaps", "services", "poddisruptionbudgets", "networkpolicies", "deployments", "statefulsets")
"""Kinds whose objects are put right when somebody changes or deletes them."""

OURS = {"diffusionpipelines", "diffusionpools"}

LONGEST_S, DEFINED_S = 30, 2
"""The longest time after which what is not ready yet, or was refused, is looked at again; and until our kinds are."""

PEERING: Object = {"apiVersion": "kopf.dev/v1", "kind": "ClusterKopfPeering", "metadata": {"name": "unfuse"}}
PEERS = "/apis/kopf.dev/v1/clusterkopfpeerings"
"""That by which operators know of each other, and where it is."""

Login = Callable[..., kopf.ConnectionInfo | None]

log = structlog.get_logger(__name__)


class ReconcileTasks:
    """A task for each object, which is woken when anything changed, and by itself until all is as wanted."""

    def __init__(self, cluster: ClusterClient, reconciler: Reconciler) -> None:
        self._cluster, self._reconciler = cluster, reconciler
        self._tasks: dict[tuple[str, str, str], tuple[asyncio.Event, asyncio.Task[None]]] = {}

    def wake(self, kind: str, namespace: str, name: str | None = None) -> None:
        """Look at an object, or again at all of a kind in a namespace."""
        if name and (kind, namespace, name) not in self._tasks:
            woken = asyncio.Event()
            task = asyncio.create_task(self._keep(woken, kind, namespace, name))
            self._tasks[kind, namespace, name] = woken, task
        for key, (woken, _) in self._tasks.items():
            if key[:2] == (kind, namespace) and name in {None, key[2]}:
                woken.set()

    async def close(self, **_: Any) -> None:
        """Stop, in the middle of whatever is done."""
        running = [task for _, task in self._tasks.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._cluster.close()

    async def _keep(self, woken: asyncio.Event, kind: str, namespace: str, name: str) -> None:
        pause: float | None = None
        done: bool | None = True
        while done is not None or woken.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):  # wait_for loses a cancellation that comes with an event
                    await woken.wait()
                pause = None
            woken.clear()
            try:
                done = await self._reconciler.reconcile(kind, namespace, name)
            except Exception as error:  # others go on, and so does this one
                is_bug = not isinstance(error, TransientError | InvalidSpec)
                log.warning("tried in vain, and will again", kind=kind, name=name, error=str(error), exc_info=is_bug)
                done = False
            pause = None if done else min(LONGEST_S, 2 * (pause or 0.5))
        del self._tasks[kind, namespace, name]


def credentials(**given: Any) -> kopf.ConnectionInfo | None:
    """Those of the pod's own account; else those of the person who is here."""
    return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)


async def operate(image: str, namespaces: Sequence[str] = (), login: Login = credentials, **flags: Any) -> None:
    """Work for these namespaces (none: for all) until it is told to end; `flags` are kopf's. Raises UsageError.

    Pods are of `image` where their pipeline names none.
    """
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.reporting_component, settings.peering.name = "unfuse", PEERING["metadata"]["name"]
    settings.peering.priority = random.randrange(1, 1 << 30)  # of two one works, whichever
    settings.peering.lifetime = 20
    settings.queueing.idle_timeout = 0.1  # of kopf's own queues: to wake a task takes no time

    def found() -> kopf.ConnectionInfo:
        if (known := login(settings=settings)) is None:
            raise UsageError("no cluster is known here: run it in a pod that has an account, or set KUBECONFIG")
        return known

    found()
    cluster = ClusterClient(found)
    while not await _introduced(cluster):
        log.warning("waits until the cluster knows pipelines and pools: kubectl apply -f deploy/kubernetes/crds")
        await asyncio.sleep(DEFINED_S)
    registry = _registry(ReconcileTasks(cluster, Reconciler(cluster, image, kopf.warn)), login)
    flags |= {"clusterwide": not namespaces, "namespaces": namespaces}
    await kopf.operator(registry=registry, settings=settings, **flags)


async def _introduced(cluster: ClusterClient) -> bool:
    """Whether the cluster knows our kinds, which kopf looks for once; then others can hear of this operator too."""
    with suppress(TransientError):
        said = await cluster.ask("GET", f"/apis/{VERSION}") or {}
        if {one["name"] for one in said.get("resources", [])} >= OURS:
            with suppress(InvalidSpec):  # it is there; or this one may not make it, and works by itself
                await cluster.ask("POST", PEERS, PEERING)
            return True
    return False


def _registry(tasks: ReconcileTasks, login: Login) -> kopf.OperatorRegistry:
    """What kopf calls."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(login)
    kopf.on.cleanup(registry=made)(tasks.close)

    async def changed(body: kopf.Body, **_: Any) -> None:
        kind, where = body["kind"], body["metadata"]["namespace"]
        tasks.wake(kind, where, body["metadata"]["name"])
        tasks.wake(POOL if kind == PIPELINE else PIPELINE, where)

    async def owned(body: kopf.Body, **_: Any) -> None:
        for owner in body["metadata"].get("ownerReferences", []):
            tasks.wake(owner["kind"], body["metadata"]["namespace"], owner["name"])

    for plural in sorted(OURS):
        kopf.on.event(VERSION, plural, registry=made)(changed)
    for plural in OWNED:
        kopf.on.event(plural, labels=MADE, registry=made)(owned)
    return made
