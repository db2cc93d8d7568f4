"""What a pipeline and a pool become: ordinary objects, of their specs alone. Nothing here asks a cluster."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from math import ceil
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from unfuse.core.plan import roles_of
from unfuse.k8s.spec import InvalidSpec, Object, component_sources, models, parallel, pools, queue, ranks, role
from unfuse.wire.keys import new

VERSION = "unfuse.dev/v1alpha1"
MONITORING, KEDA = "monitoring.coreos.com/v1", "keda.sh/v1alpha1"
"""APIs that a cluster may lack."""

POLICIES = "networking.k8s.io/v1"

MADE = {"app.kubernetes.io/managed-by": "unfuse-operator"}
"""The label of all that is made here."""

LEAVING_S, HEARD_S, STEPS = 10, 5, 4
"""Seconds for a pod to sign off, and for proxies to hear that it goes; and how many steps fit into a worker's drain
time, of which a quarter is kept for saving."""

SHARED = ("keysSecret", "results", "envSecrets", "image", "imagePullPolicy", "imagePullSecrets", "modelCache")
"""In what pipelines that share workers have to agree, beside the queue."""

OPTIONAL = {"NetworkPolicy": "networkPolicy", "ServiceMonitor": "monitoring"}
"""Kinds that a pipeline may leave out, by the field that says so."""


def of_pipeline(name: str, spec: Object, apis: frozenset[str]) -> list[Object]:
    """Its objects, the Deployment last; `apis` are those that a cluster may lack and this one has."""
    own, scaled, asleep = spec["scheduler"], spec.get("autoscaling", {}), list[str]()
    if scaled.get("minReplicas") == 0:
        asleep = [f"--asleep={one['spec']['role']}=2" for one in pools_of(name, spec)]
        asleep.append(f"--wake-limit={2 * scaled['coldStartSeconds']}")
    rolling = {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    service, policy, monitoring = spec["service"], spec["networkPolicy"], spec["monitoring"]
    blanks = _common(name, "scheduler", spec) | {
        "name": name,
        "replicas": own["replicas"],
        "drain": own["drainSeconds"],
        "grace": HEARD_S + own["drainSeconds"] + LEAVING_S,
        "max_unavailable": own["maxUnavailable"],
        "service_type": service["type"],
        "service_port": service["port"],
        "service_annotations": service.get("annotations"),
        "clients": policy.get("clients"),
        "strategy": rolling if own["queueBackend"] == "redis" else {"type": "Recreate"},
        "models": [*models(spec)],
        "sources": [f"--component-source={part}={path}" for part, path in component_sources(spec).items()],
        "asleep": asleep,
        "args": own.get("args"),
        "queue": {"name": "UNFUSE_SERVE__QUEUE", **queue(own)},
        "resources": _amounts(own["resources"]),
        "api": spec.get("apiKeysSecret", f"{name}-api"),
        "pools": [*pools(name, spec)],
    }
    left_out = {kind for kind, part in OPTIONAL.items() if not spec[part]["enabled"]}
    left_out |= {"PersistentVolumeClaim"} if "results" in spec else set()
    over = {
        "Deployment": {"spec": {"template": own.get("podTemplate", {})}},
        "ServiceMonitor": {"metadata": {"labels": monitoring.get("labels", {})}},
    }
    made = [one for one in _filled(_templates()["pipeline"], blanks) if _fits(one, apis)]
    return [merged(one, over.get(one["kind"], {})) for one in made if one["kind"] not in left_out]


def of_pool(name: str, namespace: str, spec: Object, users: Mapping[str, Object], apis: frozenset[str]) -> list[Object]:
    """The objects of a pool that serves these pipelines, the StatefulSet last. Raises Wrong if they differ."""
    (first, pipeline), *others = sorted(users.items())
    for other, its in others:
        differ = [key for key in SHARED if pipeline.get(key) != its.get(key)]
        differ += [key for key in ("queue", "redis") if pipeline["scheduler"].get(key) != its["scheduler"].get(key)]
        if differ or "keysSecret" not in its:
            said = ", ".join(differ) or "keysSecret, which both have to name"
            raise InvalidSpec("PipelinesDiffer", f"{first} and {other} cannot share workers: they differ in {said}")
    drain, model = max(spec["drainSeconds"], ceil(STEPS * spec["stepSeconds"])), spec.get("model", {})
    # what one scheduler tells its workers to load is its own pipeline's
    both = dict.fromkeys(one for _, its in sorted(users.items()) for one in models(its)) if others else [None]
    paths = [model["path"]] if "path" in model else both
    flags = [("role", spec["role"]), ("component", model.get("component")), *(("model", path) for path in paths)]
    flags += [("device", spec["device"].replace("auto", "")), ("parallel", ranks(spec)[0])]
    flags += [("scheduler", f"tcp://{user}-scheduler:8001") for user in sorted(users)]
    scaled = pipeline.get("autoscaling", {"enabled": False, "minReplicas": 0, "maxReplicas": 0, "coldStartSeconds": 0})
    sleeps = all(its.get("autoscaling", {}).get("minReplicas") == 0 for its in users.values())
    blanks = _common(first, "worker", pipeline) | {
        "name": name,
        "config": first,
        "replicas": max(spec["min"], min(spec["replicas"], spec.get("max", spec["replicas"]))),
        "said": [f"--{flag}={value}" for flag, value in flags if value],
        "args": spec.get("args"),
        "drain": drain,
        "grace": drain + LEAVING_S,
        "starts": spec["startSeconds"] // 5,
        "resources": _amounts(spec.get("resources", {})),
        "shared_memory": spec["sharedMemory"],
        "max_unavailable": spec["maxUnavailable"],
        "pools": sorted({one for user, its in users.items() for one in pools(user, its)}),
        # to 0 only where all gateways know that it may sleep: to others it would be missing
        "min": max(spec["min"] if "max" in spec else scaled["minReplicas"], 0 if sleeps else 1),
        "max": spec.get("max", scaled.get("maxReplicas")),
        "cold": scaled["coldStartSeconds"],
        "window": min(3600, scaled["coldStartSeconds"]),
        "triggers": _triggers(scaled, namespace, spec, sorted(users)) if scaled["enabled"] else None,
    }
    made = [one for one in _filled(_templates()["pool"], blanks) if _fits(one, apis if scaled["enabled"] else set())]
    if not all(its["networkPolicy"]["enabled"] for its in users.values()):
        made = [one for one in made if one["kind"] != "NetworkPolicy"]
    return [*made[:-1], merged(made[-1], {"spec": {"template": spec.get("podTemplate", {})}})]


def merged(made: Any, over: Any) -> Any:
    """A part of an object with another part merged into it, as podTemplate of a definition says."""
    if isinstance(made, dict) and isinstance(over, dict):
        return made | {key: merged(made.get(key), value) for key, value in over.items()}
    if not (isinstance(made, list) and isinstance(over, list)):
        return over
    if not all(isinstance(one, dict) and "name" in one for one in (*made, *over)):
        return [*made, *over]
    named = {one.get("mountPath", one["name"]): one for one in made}
    return [
        *(named | {(key := one.get("mountPath", one["name"])): merged(named.get(key), one) for one in over}).values()
    ]


def pools_of(name: str, spec: Object) -> list[Object]:
    """The pools of a pipeline, as they are made where there are none: of what stages that share one say, the first."""
    made: list[Object] = []
    for pool, stages in pools(name, spec).items():
        said: Object = {}
        for stage in reversed(stages):
            said |= {
                key: stage[key] for key in ("replicas", "resources", "stepSeconds", "sharedMemory") if key in stage
            }
        if len(stages) == 1 and "component" in (model := stages[0].get("model", {})):
            said["model"] = {"component": model["component"]}  # of which model it is, the pipeline says
        said["role"] = "+".join(dict.fromkeys(map(role, stages)))
        if how := parallel(stages):
            said["parallel"] = how
        made.append(_object(VERSION, "DiffusionPool", pool, spec=said))
    return made


def secrets_of(name: str, spec: Object) -> list[Object]:
    """The Secrets that a pipeline does not name, with new keys: only the first ever made of them counts."""
    key, metrics = secrets.token_urlsafe(30), secrets.token_urlsafe(30)
    lines = [
        f"{holder} sha256:{sha256(secret.encode()).hexdigest()} {right}=yes\n"
        for holder, secret, right in (("operator", key, "admin"), ("prometheus", metrics, "read"))
    ]
    texts = {
        "keysSecret": ("wire", {f"{side}.key": text for side, text in new().items()}),
        "apiKeysSecret": ("api", {"key": key, "metrics": metrics, "keys": "".join(lines)}),
    }
    asked = {end: text for field, (end, text) in texts.items() if field not in spec}
    return [_object("v1", "Secret", f"{name}-{end}", stringData=text) for end, text in asked.items()]


def unmet(name: str, spec: Object, roles: Mapping[str, str], apis: frozenset[str]) -> list[str]:
    """What a pipeline asks for and does not get, though it serves, with the roles of the pools that are there."""
    said: list[str] = []
    for pool, stages in pools(name, spec).items():
        has = roles_of(roles.get(pool, "all"))
        for stage in stages:
            if has is not None and not (roles_of(role(stage)) or {"all"}) <= has:
                said.append(f"workers of pool {pool} do not run {role(stage)}, which stage {stage['name']} needs")
            model = stage.get("model", {})
            path = model.get("path", models(spec)[0])
            if path not in models(spec) and component_sources(spec).get(model.get("component")) != path:
                does = "name its component in model.component" if len(models(spec)) == 1 else "serve one model alone"
                said.append(f"stage {stage['name']} does not take its weights from {path}: {does}")
    if spec.get("autoscaling", {}).get("enabled") and KEDA not in apis:
        said.append("nothing scales its pools: that takes KEDA, which this cluster does not have")
    return said


def _amounts(resources: Object) -> Object:
    """Amounts as words: a server that is to apply a number refuses the whole object."""
    return {part: {name: str(amount) for name, amount in each.items()} for part, each in resources.items()}


def _common(name: str, side: str, pipeline: Object) -> Object:
    """The blanks of all pods of a pipeline of that name."""
    weights, results = pipeline["modelCache"], pipeline.get("results", {})
    claim, is_folder = results.get("claim", f"{name}-results"), "url" not in results
    return {
        "side": side,
        "image": pipeline["image"],
        "pull_policy": pipeline["imagePullPolicy"],
        "pulls": [{"name": one} for one in pipeline.get("imagePullSecrets", [])] or None,
        "wire": pipeline.get("keysSecret", f"{name}-wire"),
        "secrets": [{"secretRef": {"name": one}} for one in pipeline.get("envSecrets", [])],
        "weights": {"claimName": weights["claim"]} if "claim" in weights else None,
        "weights_folder": None if "claim" in weights else {"sizeLimit": weights["size"]},
        "results": results.get("url", "disk:/results"),
        "results_limit": results.get("limit", "0"),
        "results_claim": claim,
        "results_volume": {"name": "results", "persistentVolumeClaim": {"claimName": claim}} if is_folder else None,
        "results_mount": {"name": "results", "mountPath": "/results"} if is_folder else None,
    }


def _triggers(scaled: Object, namespace: str, spec: Object, users: Sequence[str]) -> list[Object]:
    """What scales a pool, by what its gateways tell Prometheus."""
    roles, component = roles_of(spec["role"]), spec.get("model", {}).get("component")
    services = f'="{users[0]}"' if len(users) == 1 else f'=~"{"|".join(users)}"'
    blanks = {"namespace": namespace, "services": services, "prometheus": scaled["prometheus"]}
    blanks["roles"] = ".+" if roles is None else "|".join(sorted(roles))
    blanks["component"] = f',component=~"{component}"' if component else ""
    made: list[Object] = []
    for metric in (asked["custom"] for asked in scaled["metrics"]):
        query = _filled(_templates()["queries"][metric["name"]], blanks)
        own = {"query": query, "type": metric["target"]["type"], "threshold": str(metric["target"]["value"])}
        made.append(_filled(_templates()["trigger"], blanks | own))
    return made


def _object(api: str, kind: str, name: str, **more: Object) -> Object:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": MADE}, **more}


def _fits(made: Object, apis: frozenset[str] | set[str]) -> bool:
    return made["apiVersion"] not in {MONITORING, KEDA} or made["apiVersion"] in apis


@cache
def _templates() -> Object:
    return dict(msgspec.yaml.decode(Path(__file__).with_name("objects.yaml").read_bytes()))


def _filled(node: Any, blanks: Mapping[str, Any]) -> Any:
    """A template with its blanks filled, as objects.yaml says; what fills them is not looked into."""
    if isinstance(node, str):
        return blanks[node[1:]] if node[1:] in blanks and node[0] == "$" else Template(node).substitute(blanks)
    if isinstance(node, dict):
        whole = {key: _filled(value, blanks) for key, value in node.items()}
        return {key: value for key, value in whole.items() if value is not None}
    if not isinstance(node, list):
        return node
    each = [_filled(one, blanks) for one in node]
    spliced = (one if isinstance(one, list) else [one] for one in each if one is not None)
    return [one for several in spliced for one in several]
