"""The operator process, in which one task reconciles each pipeline or pool.

kopf watches the cluster.
"""

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
from unfuse.k8s.objects import MANAGED_BY, VERSION
from unfuse.k8s.reconcile import PIPELINE, POOL, Reconciler
from unfuse.k8s.spec import InvalidSpec, Object

#: Kinds of objects that are restored when somebody changes or deletes them.
OWNED = ("configmaps", "services", "poddisruptionbudgets", "networkpolicies", "deployments", "statefulsets")

#: The custom resources.
OWN_RESOURCES = {"diffusionpipelines", "diffusionpools"}

#: Longest pause, in seconds, before an object that is not ready is reconciled again; and the pause between checks for
#: the custom resource definitions.
LONGEST_S, DEFINED_S = 30, 2

#: The object by which operators find each other, so that one works at a time, and its API path.
PEERING: Object = {"apiVersion": "kopf.dev/v1", "kind": "ClusterKopfPeering", "metadata": {"name": "unfuse"}}
PEERS = "/apis/kopf.dev/v1/clusterkopfpeerings"

Login = Callable[..., kopf.ConnectionInfo | None]

log = structlog.get_logger(__name__)


class ReconcileTasks:
    """One task per pipeline and pool, which reconciles it after each change.

    A pipeline or pool that is not ready is reconciled again until it is ready.
    """

    def __init__(self, cluster: ClusterClient, reconciler: Reconciler) -> None:
        self._cluster = cluster
        self._reconciler = reconciler
        #: By (kind, namespace, name): the event that wakes the task, and the task.
        self._tasks: dict[tuple[str, str, str], tuple[asyncio.Event, asyncio.Task[None]]] = {}

    def wake(self, kind: str, namespace: str, name: str | None = None) -> None:
        """Reconcile one object, or all objects of a kind in a namespace.

        Without a name, these are the objects that have a task already.
        """
        if name and (kind, namespace, name) not in self._tasks:
            wakeup = asyncio.Event()
            task = asyncio.create_task(self._reconcile_until_gone(wakeup, kind, namespace, name))
            self._tasks[kind, namespace, name] = wakeup, task
        for key, (wakeup, _) in self._tasks.items():
            if key[:2] == (kind, namespace) and name in {None, key[2]}:
                wakeup.set()

    async def close(self, **_: Any) -> None:
        """Cancel all tasks and close the connections."""
        running = [task for _, task in self._tasks.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._cluster.close()

    async def _reconcile_until_gone(self, wakeup: asyncio.Event, kind: str, namespace: str, name: str) -> None:
        """Reconcile one object at each wake-up until it is deleted.

        While the object is not ready, and after an error, which is logged, it is also reconciled after pauses. They
        double up to LONGEST_S.
        """
        pause_s: float | None = None
        is_ready: bool | None = True
        while is_ready is not None or wakeup.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):  # wait_for loses a cancellation that comes with an event
                    await wakeup.wait()
                pause_s = None
            # Cleared before the object is read, so that a change during the reconciliation causes another one.
            wakeup.clear()
            try:
                is_ready = await self._reconciler.reconcile(kind, namespace, name)
            except Exception as error:  # no error may end the task
                is_bug = not isinstance(error, TransientError | InvalidSpec)
                log.warning("reconciliation failed, retrying", kind=kind, name=name, error=str(error), exc_info=is_bug)
                is_ready = False
            pause_s = None if is_ready else min(LONGEST_S, 2 * (pause_s or 0.5))
        del self._tasks[kind, namespace, name]


def credentials(**arguments: Any) -> kopf.ConnectionInfo | None:
    """Return the credentials of the pod's service account, or else those of the kubeconfig.

    None if there are neither.

    arguments: those of kopf's login functions.
    """
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


async def run_operator(image: str, namespaces: Sequence[str] = (), login: Login = credentials, **flags: Any) -> None:
    """Run the operator until it is stopped. Raises UsageError if there are no credentials.

    image: the image of pods whose pipeline names none.
    namespaces: the namespaces to watch. Empty: the whole cluster.
    login: returns the credentials.
    flags: further arguments of `kopf.operator`.
    """
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.reporting_component = "unfuse"
    settings.peering.name = PEERING["metadata"]["name"]
    settings.peering.priority = random.randrange(1, 1 << 30)  # of two operators, any one works
    settings.peering.lifetime = 20
    settings.queueing.idle_timeout = 0.1  # short, since kopf's handlers only wake a task

    def connect() -> kopf.ConnectionInfo:
        if (connection := login(settings=settings)) is None:
            raise UsageError(
                "no credentials for a cluster: run the operator in a pod with a service account, or set KUBECONFIG"
            )
        return connection

    connect()  # fails early
    cluster = ClusterClient(connect)
    while not await _are_kinds_defined(cluster):
        log.warning("waiting for the custom resource definitions: kubectl apply -f deploy/kubernetes/crds")
        await asyncio.sleep(DEFINED_S)
    registry = _registry(ReconcileTasks(cluster, Reconciler(cluster, image, kopf.warn)), login)
    flags |= {"clusterwide": not namespaces, "namespaces": namespaces}
    await kopf.operator(registry=registry, settings=settings, **flags)


async def _are_kinds_defined(cluster: ClusterClient) -> bool:
    """Return whether the cluster has the custom resource definitions. Then create the peering object.

    kopf looks for the definitions only once, at its start.
    """
    with suppress(TransientError):
        api = await cluster.call("GET", f"/apis/{VERSION}") or {}
        if {resource["name"] for resource in api.get("resources", [])} >= OWN_RESOURCES:
            with suppress(InvalidSpec):  # it exists, or this operator may not create it and works without peers
                await cluster.call("POST", PEERS, PEERING)
            return True
    return False


def _registry(tasks: ReconcileTasks, login: Login) -> kopf.OperatorRegistry:
    """Return the functions that kopf calls, as a registry: they only wake tasks."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(login)
    kopf.on.cleanup(registry=registry)(tasks.close)

    async def changed(body: kopf.Body, **_: Any) -> None:
        kind = body["kind"]
        namespace = body["metadata"]["namespace"]
        tasks.wake(kind, namespace, body["metadata"]["name"])
        # A change of a pipeline may concern all pools of the namespace, and the other way round.
        tasks.wake(POOL if kind == PIPELINE else PIPELINE, namespace)

    async def owned(body: kopf.Body, **_: Any) -> None:
        for owner in body["metadata"].get("ownerReferences", []):
            tasks.wake(owner["kind"], body["metadata"]["namespace"], owner["name"])

    for plural in sorted(OWN_RESOURCES):
        kopf.on.event(VERSION, plural, registry=registry)(changed)
    for plural in OWNED:
        kopf.on.event(plural, labels=MANAGED_BY, registry=registry)(owned)
    return registry
