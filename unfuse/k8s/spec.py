"""Reads the specs of DiffusionPipelines and DiffusionPools.

The API server has validated them and filled in defaults, by the definitions in deploy/kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from unfuse.core.compute_options import AUTO, parse_parallel
from unfuse.core.errors import ConfigError
from unfuse.core.plan import ALL_STAGES, roles_of

#: A Kubernetes object, or a part of one, as parsed JSON.
Object = dict[str, Any]

#: Names that can be part of the names of pods and Services.
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")

#: Names of resources that are whole GPUs.
GPU = re.compile(r"^(nvidia|amd)\.com/gpu$|^gpu\.intel\.com/(i915|xe)$")


class InvalidSpec(ConfigError):
    """A spec cannot be applied, or has a problem to report.

    reason: one word for programs, as in conditions. message: a sentence for people.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_spec(body: Object) -> Object:
    """Return the checked spec of a pipeline or pool.

    Raises ConfigError or LookupError for an object that its definition would not allow.
    """
    spec = dict(body["spec"])
    for name in (body["metadata"]["name"], *(stage["pool"] for stage in spec.get("stages", []))):
        if not NAME.fullmatch(name):
            raise InvalidSpec(
                "InvalidName",
                f"{name!r} is not a valid name: use at most 40 of a-z, 0-9 and -, beginning with a letter",
            )
    if "role" not in spec:
        roles_of("+".join(role(stage) for stage in spec.get("stages") or [{"role": "all"}]))
        queue(spec["scheduler"])
        component_sources(spec)
    if spec.get("parallel", AUTO) != AUTO:
        parse_parallel(spec["parallel"])
    for stage in spec.get("stages") or []:
        if (parallelism := parallel([stage])) != AUTO:
            parse_parallel(parallelism)
    return spec


def models(pipeline: Object) -> Sequence[str]:
    """Return the models that a pipeline serves."""
    return pipeline.get("models") or [pipeline["model"]]


def component_sources(pipeline: Object) -> dict[str, str]:
    """Return the sources of components that are not from the model itself, by component.

    A stage's `model.path` counts only in a pipeline of one model. Raises InvalidSpec for two sources of one component.
    """
    served = models(pipeline)
    sources = dict(pipeline.get("componentSources", {}))
    stage_models = [stage["model"] for stage in pipeline.get("stages") or [] if "component" in stage.get("model", {})]
    for model in stage_models if len(served) == 1 else []:
        component = model["component"]
        path = model.get("path", served[0])
        if path not in served and sources.setdefault(component, path) != path:
            raise InvalidSpec("InvalidSpec", f"component {component} has two sources: set only one")
    return sources


def pools(name: str, pipeline: Object) -> dict[str, list[Object]]:
    """Return the stages of each pool, by the pool's name.

    A pipeline without stages has one pool, with the pipeline's name.
    """
    stages_by_pool: dict[str, list[Object]] = {}
    for stage in pipeline.get("stages") or [{"name": "all", "pool": name, "replicas": 1}]:
        stages_by_pool.setdefault(stage["pool"], []).append(stage)
    return stages_by_pool


def role(stage: Object) -> str:
    """Return the role of a stage.

    It is the field `role`. Without this field, it is derived from the last word of the stage's name: the role of
    "text-encoding" is "encoder".
    """
    return str(stage.get("role") or re.sub("ing$", "er", re.split("[-_]", stage["name"])[-1]))


def parallel(stages: Sequence[Object]) -> str:
    """Return the parallelism of one pool's stages as a value of `--parallel`.

    Returns "" if none is set. Raises InvalidSpec for a stage of several roles, and for stages that differ.
    """
    by_role: dict[str, str] = {}
    for stage in (stage for stage in stages if "parallel" in stage):
        stage_role = role(stage)
        parallelism = stage["parallel"]
        if stage_role == ALL_STAGES or not stage_role.isidentifier():
            raise InvalidSpec(
                "InvalidSpec",
                f"stage {stage['name']} sets parallel {parallelism}, but {stage_role} is not a single role: "
                "set parallel in its pool",
            )
        is_different = by_role.setdefault(stage_role, parallelism) != parallelism
        if is_different or (AUTO in by_role.values()) != (parallelism == AUTO):
            values = ", ".join(dict.fromkeys([*by_role.values(), parallelism]))
            raise InvalidSpec(
                "InvalidSpec", f"stages of one pool have different values of parallel ({values}): set one"
            )
    return AUTO if AUTO in by_role.values() else ",".join(f"{name}={value}" for name, value in by_role.items())


def gpus(resources: Object) -> int:
    """Return the number of GPUs of a pod with these resources."""
    amounts = resources.get("requests", {}) | resources.get("limits", {})
    return sum(int(amount) for name, amount in amounts.items() if GPU.search(name) and str(amount).isdecimal())


def ranks(pool: Object) -> tuple[str, int | None]:
    """Return a pool's parallelism as the value of `--parallel`, and its number of ranks.

    The number is None if the spec does not determine it. The workers choose it if `parallel` is "auto", which is the
    default for several GPUs. Flags in `args` may override `parallel` or `device`.
    """
    overriding = [flag for flag in pool.get("args", []) if flag.partition("=")[0] in ("--parallel", "--device")]
    parallelism = pool.get("parallel", "")
    has_several_devices = gpus(pool.get("resources", {})) > 1 or "+" in pool["device"]
    is_open = not parallelism and not overriding and has_several_devices
    if is_open and (pool["device"] == "auto" or "+" in pool["device"]):
        parallelism = AUTO
    if overriding or parallelism == AUTO:
        return parallelism, None
    return parallelism, max((plan.size for plan in parse_parallel(parallelism).values()), default=1)


def queue(scheduler: Object) -> Object:
    """Return the environment variable that names the queue, without its name.

    scheduler: the pipeline's `scheduler` field.
    """
    if scheduler["queueBackend"] != "redis":
        return {"value": {"memory": "memory", "sqlite": "sqlite:/data/queue.db"}[scheduler["queueBackend"]]}
    if "redis" in scheduler:
        return {"value": "redis://{host}:{port}/{database}".format_map(scheduler["redis"])}
    if "secret" in scheduler["queue"]:
        return {"valueFrom": {"secretKeyRef": {"name": scheduler["queue"]["secret"], "key": "url"}}}
    return {"value": scheduler["queue"]["url"]}
