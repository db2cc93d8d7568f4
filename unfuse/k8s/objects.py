"""Builds the Kubernetes objects of pipelines and pools from their specs.

No I/O with a cluster.
"""

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
from unfuse.wire.keys import generate_key_files

VERSION = "unfuse.dev/v1alpha1"
#: Optional APIs that a cluster may lack.
MONITORING, KEDA = "monitoring.coreos.com/v1", "keda.sh/v1alpha1"

POLICIES = "networking.k8s.io/v1"

#: The label of all objects that the operator creates.
MANAGED_BY = {"app.kubernetes.io/managed-by": "unfuse-operator"}

#: Seconds for a pod to unregister.
LEAVING_S = 10
#: Seconds until proxies stop sending requests to a terminating pod.
PROXY_GRACE_S = 5
#: Steps that fit into a worker's drain time. A quarter of this time is reserved for saving checkpoints.
DRAIN_STEPS = 4

#: Fields that must be equal in pipelines that share workers, beside the queue.
SHARED = ("keysSecret", "results", "envSecrets", "image", "imagePullPolicy", "imagePullSecrets", "modelCache")

#: Kinds that a pipeline may disable, with the field that does so.
OPTIONAL = {"NetworkPolicy": "networkPolicy", "ServiceMonitor": "monitoring"}


def pipeline_objects(name: str, spec: Object, apis: frozenset[str]) -> list[Object]:
    """Return the objects of a pipeline, the scheduler's Deployment last.

    apis: the optional APIs that the cluster has.
    """
    scheduler = spec["scheduler"]
    autoscaling = spec.get("autoscaling", {})
    scale_to_zero_flags = list[str]()
    if autoscaling.get("minReplicas") == 0:
        scale_to_zero_flags = [f"--scale-to-zero={pool['spec']['role']}=2" for pool in default_pools(name, spec)]
        scale_to_zero_flags.append(f"--cold-start-timeout={2 * autoscaling['coldStartSeconds']}")
    # Only a queue in Redis can be shared by the old and the new scheduler during an update.
    rolling = {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    service = spec["service"]
    policy = spec["networkPolicy"]
    monitoring = spec["monitoring"]
    values = _common(name, "scheduler", spec) | {
        "name": name,
        "replicas": scheduler["replicas"],
        "drain": scheduler["drainSeconds"],
        "grace": PROXY_GRACE_S + scheduler["drainSeconds"] + LEAVING_S,
        "max_unavailable": scheduler["maxUnavailable"],
        "service_type": service["type"],
        "service_port": service["port"],
        "service_annotations": service.get("annotations"),
        "clients": policy.get("clients"),
        "strategy": rolling if scheduler["queueBackend"] == "redis" else {"type": "Recreate"},
        "models": [*models(spec)],
        "sources": [
            f"--component-source={component}={source}" for component, source in component_sources(spec).items()
        ],
        "scale_to_zero": scale_to_zero_flags,
        "args": scheduler.get("args"),
        "queue": {"name": "UNFUSE_SERVE__QUEUE", **queue(scheduler)},
        "resources": _amounts_as_strings(scheduler["resources"]),
        "api": spec.get("apiKeysSecret", f"{name}-api"),
        "pools": [*pools(name, spec)],
    }
    disabled_kinds = {kind for kind, field in OPTIONAL.items() if not spec[field]["enabled"]}
    disabled_kinds |= {"PersistentVolumeClaim"} if "results" in spec else set()
    overrides = {
        "Deployment": {"spec": {"template": scheduler.get("podTemplate", {})}},
        "ServiceMonitor": {"metadata": {"labels": monitoring.get("labels", {})}},
    }
    objects = [item for item in _fill(_templates()["pipeline"], values) if _is_supported(item, apis)]
    return [merged(item, overrides.get(item["kind"], {})) for item in objects if item["kind"] not in disabled_kinds]


def pool_objects(
    name: str, namespace: str, spec: Object, users: Mapping[str, Object], apis: frozenset[str]
) -> list[Object]:
    """Return the objects of a pool, the StatefulSet last.

    Raises InvalidSpec if its pipelines differ in a field of SHARED or in the queue, or if several do not set the keys.

    users: the specs of the pipelines that use the pool, by name; at least one.
    apis: the optional APIs that the cluster has.
    """
    (first_user, pipeline), *others = sorted(users.items())
    for other, other_spec in others:
        differing_fields = [key for key in SHARED if pipeline.get(key) != other_spec.get(key)]
        scheduler, other_scheduler = pipeline["scheduler"], other_spec["scheduler"]
        differing_fields += [key for key in ("queue", "redis") if scheduler.get(key) != other_scheduler.get(key)]
        if differing_fields or "keysSecret" not in other_spec:
            fields = ", ".join(differing_fields) or "keysSecret, which both must set"
            raise InvalidSpec(
                "PipelinesDiffer", f"{first_user} and {other} cannot share workers: they differ in {fields}"
            )

    drain = max(spec["drainSeconds"], ceil(DRAIN_STEPS * spec["stepSeconds"]))
    model = spec.get("model", {})
    # One scheduler offers the models of its own pipeline only, so shared workers get the models of all as flags.
    all_models = dict.fromkeys(path for _, user in sorted(users.items()) for path in models(user)) if others else [None]
    paths = [model["path"]] if "path" in model else all_models
    flags = [("role", spec["role"]), ("component", model.get("component")), *(("model", path) for path in paths)]
    flags += [("device", spec["device"].replace("auto", "")), ("parallel", ranks(spec)[0])]
    flags += [("scheduler", f"tcp://{user}-scheduler:8001") for user in sorted(users)]

    disabled = {"enabled": False, "minReplicas": 0, "maxReplicas": 0, "coldStartSeconds": 0}
    autoscaling = pipeline.get("autoscaling", disabled)
    may_scale_to_zero = all(user.get("autoscaling", {}).get("minReplicas") == 0 for user in users.values())
    values = _common(first_user, "worker", pipeline) | {
        "name": name,
        "config": first_user,
        "replicas": max(spec["min"], min(spec["replicas"], spec.get("max", spec["replicas"]))),
        "flags": [f"--{flag}={value}" for flag, value in flags if value],
        "args": spec.get("args"),
        "drain": drain,
        "grace": drain + LEAVING_S,
        "starts": spec["startSeconds"] // 5,
        "resources": _amounts_as_strings(spec.get("resources", {})),
        "shared_memory": spec["sharedMemory"],
        "max_unavailable": spec["maxUnavailable"],
        "pools": sorted({pool for user, user_spec in users.items() for pool in pools(user, user_spec)}),
        # 0 only if all gateways declare that it may scale to zero: others would report it as unavailable.
        "min": max(spec["min"] if "max" in spec else autoscaling["minReplicas"], 0 if may_scale_to_zero else 1),
        "max": spec.get("max", autoscaling.get("maxReplicas")),
        "cold": autoscaling["coldStartSeconds"],
        "window": min(3600, autoscaling["coldStartSeconds"]),
        "triggers": _triggers(autoscaling, namespace, spec, sorted(users)) if autoscaling["enabled"] else None,
    }
    used_apis = apis if autoscaling["enabled"] else frozenset[str]()
    objects = [item for item in _fill(_templates()["pool"], values) if _is_supported(item, used_apis)]
    if not all(user["networkPolicy"]["enabled"] for user in users.values()):
        objects = [item for item in objects if item["kind"] != "NetworkPolicy"]
    return [*objects[:-1], merged(objects[-1], {"spec": {"template": spec.get("podTemplate", {})}})]


def merged(base: Any, overrides: Any) -> Any:
    """Return a part of an object with overrides merged into it, as `podTemplate` defines.

    Mappings are merged by key, and lists of named items by mountPath or name. Other lists are appended to.
    """
    if isinstance(base, dict) and isinstance(overrides, dict):
        return base | {key: merged(base.get(key), value) for key, value in overrides.items()}
    if not (isinstance(base, list) and isinstance(overrides, list)):
        return overrides
    if not all(isinstance(item, dict) and "name" in item for item in (*base, *overrides)):
        return [*base, *overrides]
    items = {item.get("mountPath", item["name"]): item for item in base}
    overridden = {(key := item.get("mountPath", item["name"])): merged(items.get(key), item) for item in overrides}
    return [*(items | overridden).values()]


def default_pools(name: str, spec: Object) -> list[Object]:
    """Return the DiffusionPools of a pipeline's stages, to be created if missing.

    If several stages share a pool, each field is that of the first stage that has it.
    """
    objects: list[Object] = []
    for pool, stages in pools(name, spec).items():
        pool_spec: Object = {}
        for stage in reversed(stages):
            pool_spec |= {
                key: stage[key] for key in ("replicas", "resources", "stepSeconds", "sharedMemory") if key in stage
            }
        if len(stages) == 1 and "component" in (model := stages[0].get("model", {})):
            pool_spec["model"] = {"component": model["component"]}  # its path is in the pipeline
        pool_spec["role"] = "+".join(dict.fromkeys(map(role, stages)))
        if parallelism := parallel(stages):
            pool_spec["parallel"] = parallelism
        objects.append(_object(VERSION, "DiffusionPool", pool, spec=pool_spec))
    return objects


def secrets_of(name: str, spec: Object) -> list[Object]:
    """Return the Secrets that a pipeline does not name, with new keys.

    They are only to be created, never applied, so that existing keys stay.
    """
    admin_key, metrics_key = secrets.token_urlsafe(30), secrets.token_urlsafe(30)
    lines = [
        f"{holder} sha256:{sha256(secret.encode()).hexdigest()} {permission}=yes\n"
        for holder, secret, permission in (("operator", admin_key, "admin"), ("prometheus", metrics_key, "read"))
    ]
    data_by_field = {
        "keysSecret": ("wire", {f"{side}.key": key for side, key in generate_key_files().items()}),
        "apiKeysSecret": ("api", {"key": admin_key, "metrics": metrics_key, "keys": "".join(lines)}),
    }
    missing = {suffix: data for field, (suffix, data) in data_by_field.items() if field not in spec}
    return [_object("v1", "Secret", f"{name}-{suffix}", stringData=data) for suffix, data in missing.items()]


def unmet_requests(name: str, spec: Object, roles: Mapping[str, str], apis: frozenset[str]) -> list[str]:
    """Return a sentence for each requirement of a pipeline's spec that is not met.

    roles: by existing pool, its role. apis: the optional APIs that the cluster has.
    """
    messages: list[str] = []
    for pool, stages in pools(name, spec).items():
        pool_roles = roles_of(roles.get(pool, "all"))
        for stage in stages:
            if pool_roles is not None and not (roles_of(role(stage)) or {"all"}) <= pool_roles:
                messages.append(
                    f"stage {stage['name']} requires role {role(stage)}, which the workers of pool {pool} do not have"
                )
            model = stage.get("model", {})
            path = model.get("path", models(spec)[0])
            if path not in models(spec) and component_sources(spec).get(model.get("component")) != path:
                advice = "set model.component" if len(models(spec)) == 1 else "serve only one model"
                messages.append(f"stage {stage['name']} cannot load its weights from {path}: {advice}")
    if spec.get("autoscaling", {}).get("enabled") and KEDA not in apis:
        messages.append("pools are not scaled: autoscaling requires KEDA, which this cluster does not have")
    return messages


def _amounts_as_strings(resources: Object) -> Object:
    """Return resource amounts as strings. A server-side apply of a number is refused."""
    return {section: {name: str(amount) for name, amount in amounts.items()} for section, amounts in resources.items()}


def _common(name: str, side: str, pipeline: Object) -> Object:
    """Return the template values that all pods of a pipeline share.

    side: "scheduler" or "worker".
    """
    weights = pipeline["modelCache"]
    results = pipeline.get("results", {})
    claim = results.get("claim", f"{name}-results")
    is_folder = "url" not in results
    return {
        "side": side,
        "image": pipeline["image"],
        "pull_policy": pipeline["imagePullPolicy"],
        "pulls": [{"name": secret} for secret in pipeline.get("imagePullSecrets", [])] or None,
        "wire": pipeline.get("keysSecret", f"{name}-wire"),
        "secrets": [{"secretRef": {"name": secret}} for secret in pipeline.get("envSecrets", [])],
        "weights": {"claimName": weights["claim"]} if "claim" in weights else None,
        "weights_folder": None if "claim" in weights else {"sizeLimit": weights["size"]},
        "results": results.get("url", "disk:/results"),
        "results_limit": results.get("limit", "0"),
        "results_claim": claim,
        "results_volume": {"name": "results", "persistentVolumeClaim": {"claimName": claim}} if is_folder else None,
        "results_mount": {"name": "results", "mountPath": "/results"} if is_folder else None,
    }


def _triggers(autoscaling: Object, namespace: str, spec: Object, users: Sequence[str]) -> list[Object]:
    """Return the KEDA triggers with which a pool may scale to zero.

    They are Prometheus queries on the metrics of its gateways.
    """
    roles = roles_of(spec["role"])
    component = spec.get("model", {}).get("component")
    services = f'="{users[0]}"' if len(users) == 1 else f'=~"{"|".join(users)}"'
    values = {"namespace": namespace, "services": services, "prometheus": autoscaling["prometheus"]}
    values["roles"] = ".+" if roles is None else "|".join(sorted(roles))
    values["component"] = f',component=~"{component}"' if component else ""
    triggers: list[Object] = []
    for metric in (entry["custom"] for entry in autoscaling["metrics"]):
        query = _fill(_templates()["queries"][metric["name"]], values)
        target = {"query": query, "type": metric["target"]["type"], "threshold": str(metric["target"]["value"])}
        triggers.append(_fill(_templates()["trigger"], values | target))
    return triggers


def _object(api: str, kind: str, name: str, **fields: Object) -> Object:
    """Return an object with the operator's label."""
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": MANAGED_BY}, **fields}


def _is_supported(item: Object, apis: frozenset[str]) -> bool:
    """Return whether the cluster has the API of an object."""
    return item["apiVersion"] not in {MONITORING, KEDA} or item["apiVersion"] in apis


@cache
def _templates() -> Object:
    """Return the content of objects.yaml."""
    return dict(msgspec.yaml.decode(Path(__file__).with_name("objects.yaml").read_bytes()))


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    """Return a template with its placeholders replaced by values.

    The rules are at the top of objects.yaml. A value is not a template itself: a "$" in it stays.
    """
    if isinstance(node, str):
        return values[node[1:]] if node[1:] in values and node[0] == "$" else Template(node).substitute(values)
    if isinstance(node, dict):
        fields = {key: _fill(value, values) for key, value in node.items()}
        return {key: value for key, value in fields.items() if value is not None}
    if not isinstance(node, list):
        return node
    items = [_fill(item, values) for item in node]
    item_lists = (item if isinstance(item, list) else [item] for item in items if item is not None)
    return [item for item_list in item_lists for item in item_list]
