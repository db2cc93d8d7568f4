"""An API server in memory, by kmock, with what an operator needs beside: server-side apply, uids, generations, defaults
of our own kinds, and the end of what nobody owns any more.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import aiohttp.web
import kmock
import yaml

from unfuse.k8s.spec import Object

CRDS = Path(__file__).parents[2] / "deploy" / "kubernetes" / "crds"
SCHEMAS = {
    crd["spec"]["names"]["plural"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path in sorted(CRDS.glob("diffusion*.yaml"))
    for crd in yaml.safe_load_all(path.read_text())
}
KINDS = {
    "unfuse.dev/v1alpha1": ["DiffusionPipeline", "DiffusionPool"],
    "v1": ["Service", "ConfigMap", "Secret", "PersistentVolumeClaim", "Pod", "Event", "Namespace"],
    "apps/v1": ["Deployment", "StatefulSet"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "apiextensions.k8s.io/v1": ["CustomResourceDefinition"],
}
PEERING = {"kopf.dev/v1": ["ClusterKopfPeering"]}
MORE = {"monitoring.coreos.com/v1": ["ServiceMonitor"], "keda.sh/v1alpha1": ["ScaledObject"]}


def plural(kind: str) -> str:
    return f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s"


def completed(value: Any, node: Object) -> Any:
    """A value with the defaults of its schema."""
    if isinstance(value, dict) and "properties" in node:
        value = {key: inner["default"] for key, inner in node["properties"].items() if "default" in inner} | value
        return {key: completed(one, node["properties"].get(key, {})) for key, one in value.items()}
    return [completed(one, node["items"]) for one in value] if isinstance(value, list) and "items" in node else value


def merged(old: Any, new: Any) -> Any:
    """A merge patch, carried out."""
    if not isinstance(new, dict):
        return new
    kept = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        kept[key] = merged(kept.get(key), value)
        if kept[key] is None:
            del kept[key]
    return kept


class Server(kmock.KubernetesEmulator):
    """The server; `refuses` are kinds of which it takes nothing, `stuck_at` one of which it never answers, and `asked`
    is what it was asked for beside reading.
    """

    uids = itertools.count(1)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.refuses: dict[str, tuple[int, str, str]] = {}
        self.asked: list[tuple[str, str]] = []
        self.down = self.more = False
        self.stuck_at, self.stuck = "", asyncio.Event()

    def knows(self, kinds: dict[str, list[str]]) -> None:
        self.more = self.more or kinds is MORE
        for api, names in kinds.items():
            group, _, version = api.rpartition("/")
            for kind in names:
                key = kmock.resource(group=group, version=version, plural=plural(kind))
                self.resources[key] = kmock.ResourceInfo(
                    kind=kind,
                    singular=kind.lower(),
                    namespaced=not kind.startswith("Cluster"),
                    subresources={"status"},
                    verbs={"get", "list", "watch", "create", "update", "patch", "delete"},
                )

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        its = request.resource.plural if request.resource is not None else ""
        verb, writes = request.method.value, request.method != kmock.method.GET
        if writes:
            self.asked.append((verb, request.url.path))
        if self.down or (writes and its in self.refuses):
            code, reason, message = self.refuses.get(its, (503, "Down", "the server is away"))
            return aiohttp.web.json_response({"reason": reason, "message": message, "code": code}, status=code)
        if writes and its == self.stuck_at:
            self.stuck.set()
            while (pipe := request._raw_request.transport) is not None and not pipe.is_closing():
                await asyncio.sleep(0.01)
        if request.action == kmock.action.FETCH or request.url.path in {f"/apis/{api}" for api in MORE}:
            answer = self._fetch(request)
        elif request.action == kmock.action.LIST and its:
            found = [one.raw for key, one in self._objects.items() if key[0] == request.resource and not one.deleted]
            answer = aiohttp.web.json_response({"metadata": {"resourceVersion": "1"}, "items": found})
        elif request.action == kmock.action.UPDATE and request.name:
            answer = await self._patch((request.resource, request.namespace, request.name), request)
        elif request.action == kmock.action.CREATE and its:
            answer = await self._create(request)
        else:
            answer = await super()._handle(request)
        if request.action == kmock.action.DELETE:
            await self.collect()
        return answer

    def _fetch(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        """An object, or an API that a cluster may lack. kmock itself takes 50 ms for an answer, by its filters."""
        key = (request.resource, request.namespace, request.name)
        if not request.name and not self.more:
            return aiohttp.web.Response(text="404 page not found\n", status=404)
        found = self.get_at(key) if request.name else {"groups": []} if self.more else None
        return aiohttp.web.json_response(
            found or {"reason": "NotFound", "message": "no", "code": 404}, status=200 if found else 404
        )

    async def _patch(self, key: Any, request: kmock.Request) -> aiohttp.web.StreamResponse:
        """A merge of objects, which an apply makes where there is none. What changes nothing is no event."""
        old = self.get_at(key)
        if old is None and request.params.get("force") != "true":
            return await super()._handle(request)
        new = merged(old or {}, request.data)
        if old is None or new != old:
            new = await self._put(key, new, "MODIFIED" if old else "ADDED")
        return aiohttp.web.json_response(new)

    async def _create(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        name = request.data["metadata"].get("name", f"e{next(self.uids)}")
        key = (request.resource, request.namespace, name)
        if self.get_at(key) is not None:
            said = {"reason": "AlreadyExists", "message": f"{name} already exists", "code": 409}
            return aiohttp.web.json_response(said, status=409)
        made = merged(request.data, {"metadata": {"name": name}})
        return aiohttp.web.json_response(await self._put(key, made, "ADDED"), status=201)

    async def _put(self, key: Any, raw: Object, event: str) -> Object:
        """Store an object as the server does, and tell who watches."""
        resource, namespace, name = key
        old = self.get_at(key) or {}
        spec = (
            completed(raw.get("spec"), SCHEMAS[resource.plural]["properties"]["spec"])
            if resource.plural in SCHEMAS
            else raw.get("spec")
        )
        metadata = {
            "uid": f"uid-{next(self.uids)}",
            "generation": 0,
            **raw["metadata"],
            "namespace": namespace,
            "name": name,
        }
        if old.get("spec") != spec:
            metadata["generation"] += 1
        info = self.resources[resource]
        api = f"{resource.group}/{resource.version}" if resource.group else resource.version
        whole = (
            raw
            | {"apiVersion": api, "kind": info.kind, "metadata": metadata}
            | ({"spec": spec} if spec is not None else {})
        )
        if key in self._objects and self._objects[key].deleted:
            self._objects[key].create(whole)
        elif key in self._objects:
            self._objects[key].update(whole)
        else:
            self._objects[key] = whole
        await self._buses[resource].put({"type": event, "object": whole})
        return whole

    async def collect(self) -> None:
        """Delete what was owned and is not any more."""
        gone = True
        while gone:
            live = {key: one.raw for key, one in self._objects.items() if not one.deleted}
            uids = {one["metadata"]["uid"] for one in live.values()}
            gone = False
            for key, one in live.items():
                owners = one["metadata"].get("ownerReferences", [])
                if owners and not uids & {owner["uid"] for owner in owners}:
                    self._objects[key].delete()
                    await self._buses[key[0]].put({"type": "DELETED", "object": one})
                    gone = True

    # what a person, or a controller of Kubernetes, does

    def key(self, kind: str, name: str) -> Any:
        (api,) = (api for api, kinds in (KINDS | MORE | PEERING).items() if kind in kinds)
        group, _, version = api.rpartition("/")
        return (
            kmock.resource(group=group, version=version, plural=plural(kind)),
            None if kind.startswith("Cluster") else "ns",
            name,
        )

    def get_at(self, key: Any) -> Object | None:
        return dict(self._objects[key].raw) if key in self._objects and not self._objects[key].deleted else None

    def get(self, kind: str, name: str) -> Object | None:
        return self.get_at(self.key(kind, name))

    def every(self, kind: str) -> dict[str, Object]:
        return {
            key[2]: dict(one.raw)
            for key, one in self._objects.items()
            if key[0].plural == plural(kind) and not one.deleted
        }

    async def put(self, kind: str, name: str, spec: Object | None = None, **more: Any) -> None:
        """Make an object, or give it another spec."""
        old = self.get(kind, name)
        raw = (old or {"metadata": {"name": name}}) | ({"spec": spec} if spec is not None else {}) | more
        await self._put(self.key(kind, name), raw, "MODIFIED" if old else "ADDED")

    async def delete(self, kind: str, name: str) -> None:
        key = self.key(kind, name)
        raw = self._objects[key].raw
        self._objects[key].delete()
        await self._buses[key[0]].put({"type": "DELETED", "object": raw})
        await self.collect()

    async def run(self, kind: str, name: str) -> None:
        """Have a workload have all pods that it wants, ready, as its controller and the nodes would."""
        one = self.get(kind, name)
        assert one
        count, seen = one["spec"]["replicas"], one["metadata"]["generation"]
        status = {"observedGeneration": seen, "replicas": count, "readyReplicas": count, "updatedReplicas": count}
        await self.put(kind, name, status=status)
