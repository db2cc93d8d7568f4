"""What custom resources say. The API server has checked and completed it, by the definitions in deploy/kubernetes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from unfuse.core.compute_options import AUTO, parse_parallel
from unfuse.core.errors import ConfigError
from unfuse.core.plan import ALL, roles_of

Object = dict[str, Any]
"""An object of Kubernetes, or a part of one, as JSON has it."""

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Names of which those of pods and Services can be made."""


GPU = re.compile(r"^(nvidia|amd)\.com/gpu$|^gpu\.intel\.com/(i915|xe)$")
"""Names of resources that are whole GPUs."""


class InvalidSpec(ConfigError):
    """An object asks for what cannot be; `reason` is a word for programs, the message a sentence for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read(body: Object) -> Object:
    """What a pipeline or a pool asks for. Raises ConfigError or LookupError where more was let in than is defined."""
    spec = dict(body["spec"])
    for name in (body["metadata"]["name"], *(stage["pool"] for stage in spec.get("stages", []))):
        if not NAME.fullmatch(name):
            raise InvalidSpec("InvalidName", f"{name!r} is not at most 40 of a-z, 0-9 and -, beginning with a letter")
    if "role" not in spec:
        roles_of("+".join(role(stage) for stage in spec.get("stages") or [{"role": "all"}]))
        queue(spec["scheduler"])
        component_sources(spec)
    if spec.get("parallel", AUTO) != AUTO:
        parse_parallel(spec["parallel"])
    for stage in spec.get("stages") or []:
        if (how := parallel([stage])) != AUTO:
            parse_parallel(how)
    return spec


def models(pipeline: Object) -> Sequence[str]:
    """What a pipeline serves."""
    return pipeline.get("models") or [pipeline["model"]]


def component_sources(pipeline: Object) -> dict[str, str]:
    """Where components of the pipeline's one model come from that are not its own."""
    served, found = models(pipeline), dict(pipeline.get("componentSources", {}))
    named = [stage["model"] for stage in pipeline.get("stages") or [] if "component" in stage.get("model", {})]
    for model in named if len(served) == 1 else []:
        component, path = model["component"], model.get("path", served[0])
        if path not in served and found.setdefault(component, path) != path:
            raise InvalidSpec("InvalidSpec", f"two sources of component {component} are said: say one")
    return found


def pools(name: str, pipeline: Object) -> dict[str, list[Object]]:
    """The stages of each pool; without any, all of them are in a pool of the pipeline's own name."""
    found: dict[str, list[Object]] = {}
    for stage in pipeline.get("stages") or [{"name": "all", "pool": name, "replicas": 1}]:
        found.setdefault(stage["pool"], []).append(stage)
    return found


def role(stage: Object) -> str:
    """The role of a stage: what it says, or what the last word of its name does, as in text-encoding."""
    return str(stage.get("role") or re.sub("ing$", "er", re.split("[-_]", stage["name"])[-1]))


def parallel(stages: Sequence[Object]) -> str:
    """How the stages of one pool are spread, as `--parallel` says it; "" where they say nothing. Raises Wrong."""
    said: dict[str, str] = {}
    for stage in (one for one in stages if "parallel" in one):
        its, how = role(stage), stage["parallel"]
        if its == ALL or not its.isidentifier():
            raise InvalidSpec(
                "InvalidSpec",
                f"stage {stage['name']} is spread by {how}, and its role {its} is several: set parallel in its pool",
            )
        if said.setdefault(its, how) != how or (AUTO in said.values()) != (how == AUTO):
            raise InvalidSpec(
                "InvalidSpec", f"stages of one pool are spread in two ways, {how} and {said[its]}: say one"
            )
    return AUTO if AUTO in said.values() else ",".join(f"{its}={how}" for its, how in said.items())


def gpus(resources: Object) -> int:
    """How many GPUs a pod with these resources has."""
    amounts = resources.get("requests", {}) | resources.get("limits", {})
    return sum(int(amount) for name, amount in amounts.items() if GPU.search(name) and str(amount).isdecimal())


def ranks(pool: Object) -> tuple[str, int | None]:
    """How a pool's workers are spread, as `--parallel` says it, and over how many ranks; None where they choose.

    A pool that says nothing has its workers choose where they have several GPUs. Flags in `args` go before both.
    """
    own = [flag for flag in pool.get("args", []) if flag.partition("=")[0] in ("--parallel", "--device")]
    asked = pool.get("parallel", "")
    several = gpus(pool.get("resources", {})) > 1 or "+" in pool["device"]
    if not asked and not own and several and (pool["device"] == "auto" or "+" in pool["device"]):
        asked = AUTO
    if own or asked == AUTO:
        return asked, None
    return asked, max((spread.size for spread in parse_parallel(asked).values()), default=1)


def queue(own: Object) -> Object:
    """The value of the variable that says where tasks wait."""
    if own["queueBackend"] != "redis":
        return {"value": {"memory": "memory", "sqlite": "sqlite:/data/queue.db"}[own["queueBackend"]]}
    if "redis" in own:
        return {"value": "redis://{host}:{port}/{database}".format_map(own["redis"])}
    if "secret" in own["queue"]:
        return {"valueFrom": {"secretKeyRef": {"name": own["queue"]["secret"], "key": "url"}}}
    return {"value": own["queue"]["url"]}
