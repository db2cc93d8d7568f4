"""Custom resources, as an API server would take, complete and refuse them. No server is here: schemas are checked by
Kubernetes' own for definitions, objects by the schemas, rules by an implementation of CEL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from tests.k8s.server import completed
from tools.helm import Object
from unfuse.core.compute_options import parse_parallel
from unfuse.core.errors import ConfigError
from unfuse.core.plan import roles_of

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
DEFINED: dict[str, Object] = {
    found["spec"]["names"]["kind"]: found
    for path in sorted((DEPLOY / "crds").glob("diffusion*.yaml"))
    for found in yaml.safe_load_all(path.read_text())
}
EXAMPLE, VAE = yaml.safe_load_all((DEPLOY / "examples" / "wan.yaml").read_text())
PIPELINE: Object = {"model": "unfuse/shapes", "scheduler": {"redis": {"host": "r"}}}
POOL: Object = {"role": "denoiser"}


def version(kind: str) -> Object:
    (one,) = DEFINED[kind]["spec"]["versions"]
    return dict(one)


def schema(kind: str) -> Object:
    return dict(version(kind)["schema"]["openAPIV3Schema"])


def parts(node: Object, at: str = "") -> Iterator[tuple[str, Object]]:
    """Every schema inside a schema, with its path."""
    yield at, node
    for name, inner in node.get("properties", {}).items():
        yield from parts(inner, f"{at}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from parts(node[key], f"{at}[]")


def closed(node: Object) -> Object:
    """The schema under which unknown fields are refused, as `kubectl` has them refused."""
    node = deepcopy(node)
    for _, part in parts(node):
        if "properties" in part and part["properties"]:
            part["additionalProperties"] = False
    return node


@cache
def program(rule: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def broken(value: Any, node: Object, old: Any = None) -> Iterator[str]:
    """What rules say is wrong with a value; those of transitions where there is an old one."""
    for rule in node.get("x-kubernetes-validations", []):
        given = {"self": celpy.json_to_cel(value)} | ({} if old is None else {"oldSelf": celpy.json_to_cel(old)})
        if ("oldSelf" not in rule["rule"] or old is not None) and not program(rule["rule"]).evaluate(given):
            yield rule["message"]
    if isinstance(value, dict):
        for name, inner in node.get("properties", {}).items():
            if name in value:
                yield from broken(value[name], inner, (old or {}).get(name))
    if isinstance(value, list) and "items" in node:
        for one in value:
            yield from broken(one, node["items"])


def wrong(kind: str, spec: Object, old: Object | None = None, name: str = "a") -> list[str]:
    """All that is wrong with an object of that spec, which replaces an older one."""
    node = schema(kind)
    one = {"apiVersion": "unfuse.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    stored = completed(one, node)
    if refused := [error.message for error in jsonschema_rs.Draft7Validator(closed(node)).iter_errors(stored)]:
        return refused
    return [*broken(stored, node, None if old is None else completed(one | {"spec": old}, node))]


@pytest.mark.parametrize("kind", DEFINED)
@pytest.mark.parametrize("release", ["1.30.0", "1.37.0"])
def test_crds_match_the_kubernetes_schemas(kind: str, release: str) -> None:
    kubernetes_validate.validate(DEFINED[kind], release, strict=True)
    names = DEFINED[kind]["spec"]["names"]
    assert DEFINED[kind]["metadata"]["name"] == f"{names['plural']}.{DEFINED[kind]['spec']['group']}"


@pytest.mark.parametrize("kind", DEFINED)
def test_crd_schemas_are_structural_and_bounded(kind: str) -> None:
    """Each part says its type, lists what it has or of what it is, is bounded, and has defaults that it would take."""
    for at, part in parts(schema(kind)):
        assert part.get("type") or part.get("x-kubernetes-int-or-string"), at
        assert not {"$ref", "definitions", "not", "oneOf", "patternProperties"} & part.keys(), at
        assert not ("properties" in part and "additionalProperties" in part), at
        if "default" in part:
            jsonschema_rs.Draft7Validator(part).validate(part["default"])
        if ".spec" in at and part.get("type") == "string":
            assert "maxLength" in part or "enum" in part, f"{at} may be of any length, which rules pay for"
        if ".spec" in at and part.get("type") == "array":
            assert "maxItems" in part, at
        if keys := part.get("x-kubernetes-list-map-keys"):
            assert set(keys) <= set(part["items"]["required"]), at


@pytest.mark.parametrize("kind", DEFINED)
def test_printer_columns_and_scale_paths_exist_in_the_schema(kind: str) -> None:
    known = {at for at, _ in parts(schema(kind))} | {".metadata.creationTimestamp"}
    paths = [column["jsonPath"] for column in version(kind)["additionalPrinterColumns"]]
    paths += version(kind)["subresources"].get("scale", {}).values()
    assert {re.sub(r"\[.*?\]", "[]", path) for path in paths} <= known
    states = next(part for at, part in parts(schema(kind)) if at == ".status.conditions[].type")
    assert states["enum"] == ["Ready", "Progressing", "Degraded"]


def test_example_resources_are_valid_and_stored_unchanged() -> None:
    """The example has every field of a pipeline that is taken apart, as people write it elsewhere."""
    assert wrong("DiffusionPipeline", EXAMPLE["spec"], name=EXAMPLE["metadata"]["name"]) == []
    assert wrong("DiffusionPool", VAE["spec"], name=VAE["metadata"]["name"]) == []
    assert completed(EXAMPLE, schema("DiffusionPipeline"))["spec"]["scheduler"]["redis"] == {
        "host": "redis-master",
        "port": 6379,
        "database": 0,
    }
    assert VAE["metadata"]["name"] in {stage["pool"] for stage in EXAMPLE["spec"]["stages"]}


def test_omitted_fields_get_their_defaults() -> None:
    assert wrong("DiffusionPipeline", PIPELINE) == wrong("DiffusionPool", POOL) == []
    stored = completed({"spec": PIPELINE | {"stages": [{"name": "s", "pool": "p"}]}}, schema("DiffusionPipeline"))
    assert stored["spec"]["scheduler"] == {
        "redis": {"host": "r", "port": 6379, "database": 0},
        "replicas": 1,
        "queueBackend": "redis",
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "drainSeconds": 20,
        "maxUnavailable": 1,
    }
    assert stored["spec"]["modelCache"] == {"size": "100Gi"}
    assert stored["spec"]["stages"] == [{"name": "s", "pool": "p", "replicas": 1}]
    assert completed({"spec": POOL}, schema("DiffusionPool"))["spec"] == {
        "role": "denoiser",
        "replicas": 1,
        "min": 0,
        "device": "auto",
        "stepSeconds": 2,
        "startSeconds": 3600,
        "drainSeconds": 20,
        "maxUnavailable": 1,
        "sharedMemory": "1Gi",
        "finishSeconds": 900,
    }


def stages(*pools: tuple[str, int]) -> list[Object]:
    return [{"name": f"s{number}", "pool": pool, "replicas": count} for number, (pool, count) in enumerate(pools)]


REDIS = {"redis": {"host": "r"}}
STAGE = {"name": "s", "pool": "p"}
RULED: list[tuple[str, Object, str]] = [
    ("DiffusionPipeline", {"scheduler": REDIS}, "exactly one of model and models"),
    ("DiffusionPipeline", PIPELINE | {"models": ["a"]}, "exactly one of model and models"),
    (
        "DiffusionPipeline",
        {"models": ["a", "b"], "scheduler": {"redis": {"host": "r"}}, "componentSources": {"vae": "c"}},
        "componentSources requires a single model",
    ),
    ("DiffusionPipeline", PIPELINE | {"stages": stages(("p", 1), ("q", 1), ("p", 2))}, "must have the same replicas"),
    ("DiffusionPipeline", PIPELINE | {"scheduler": {}}, "exactly one of queue and redis"),
    (
        "DiffusionPipeline",
        PIPELINE | {"scheduler": REDIS | {"queue": {"secret": "s"}}},
        "exactly one of queue and redis",
    ),
    (
        "DiffusionPipeline",
        PIPELINE | {"scheduler": REDIS | {"queueBackend": "memory"}},
        "queue and redis require queueBackend redis",
    ),
    ("DiffusionPipeline", PIPELINE | {"scheduler": {"queueBackend": "sqlite", "replicas": 2}}, "more than one replica"),
    ("DiffusionPipeline", PIPELINE | {"scheduler": {"queue": {}}}, "exactly one of url and secret"),
    ("DiffusionPipeline", PIPELINE | {"results": {"url": "s3://b", "claim": "c"}}, "exactly one of url and claim"),
    ("DiffusionPipeline", PIPELINE | {"results": {}}, "exactly one of url and claim"),
    ("DiffusionPipeline", PIPELINE | {"autoscaling": {}}, "autoscaling needs maxReplicas"),
    ("DiffusionPipeline", PIPELINE | {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas is above"),
    ("DiffusionPool", POOL | {"min": 3, "max": 2}, "min is above max"),
    ("DiffusionPool", {"role": "all", "model": {"component": "vae"}}, "role all cannot be combined"),
]


@pytest.mark.parametrize(("kind", "spec", "says"), RULED)
def test_contradictory_specs_are_rejected_by_cel_rules(kind: str, spec: Object, says: str) -> None:
    (told,) = wrong(kind, spec)
    assert says in told


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("DiffusionPipeline", PIPELINE | {"stages": stages(("p", 1), ("q", 2), ("p", 1))}),
        ("DiffusionPipeline", {"models": ["a", "b"], "scheduler": {"queue": {"url": "redis://r:6379/0"}}}),
        (
            "DiffusionPipeline",
            PIPELINE | {"scheduler": {"queue": {"url": "redis+sentinel://a:1,b:2/tasks?replicas=1"}}},
        ),
        ("DiffusionPipeline", PIPELINE | {"scheduler": {"queue": {"url": "redis+cluster://a:1,b:2?shards=8"}}}),
        ("DiffusionPipeline", PIPELINE | {"stages": [STAGE | {"role": "encoder,denoiser"}]}),
        ("DiffusionPool", {"role": "encoder,denoiser"}),
        ("DiffusionPipeline", PIPELINE | {"scheduler": {"queueBackend": "memory"}}),
        ("DiffusionPipeline", PIPELINE | {"autoscaling": {"enabled": False}}),
        ("DiffusionPipeline", PIPELINE | {"image": "r.example/unfuse@sha256:0", "imagePullSecrets": ["r"]}),
        ("DiffusionPipeline", PIPELINE | {"envSecrets": ["s3", "hub"], "modelCache": {"claim": "c"}}),
        ("DiffusionPipeline", PIPELINE | {"apiKeysSecret": "a", "stages": [STAGE | {"role": "encoder+decoder"}]}),
        ("DiffusionPipeline", PIPELINE | {"stages": [STAGE | {"stepSeconds": 30, "sharedMemory": "16Gi"}]}),
        ("DiffusionPool", POOL | {"stepSeconds": 30, "startSeconds": 60, "sharedMemory": "1Gi", "args": ["--slots=3"]}),
        ("DiffusionPool", POOL | {"podTemplate": {"spec": {"nodeSelector": {"gpu": "h100"}}}, "maxUnavailable": "10%"}),
        ("DiffusionPipeline", PIPELINE | {"results": {"url": "redis://r:6379/1", "limit": "256MiB"}}),
        ("DiffusionPipeline", PIPELINE | {"service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}}}),
        ("DiffusionPipeline", PIPELINE | {"networkPolicy": {"clients": [{"podSelector": {}}]}}),
        ("DiffusionPipeline", PIPELINE | {"componentSources": {"text_encoder_2": "owner/t5"}}),
        ("DiffusionPool", POOL | {"replicas": 0, "max": 1}),
        ("DiffusionPool", POOL | {"parallel": "denoiser=ulysses:2+cfg:2,decoder=tiles:2", "device": "cuda:0+cuda:1"}),
        ("DiffusionPool", POOL | {"parallel": "auto"}),
        ("DiffusionPipeline", PIPELINE | {"stages": [STAGE | {"parallel": "ulysses:4+cfg:2"}]}),
        ("DiffusionPipeline", PIPELINE | {"stages": [STAGE | {"parallel": "auto"}]}),
        ("DiffusionPool", {"role": "all", "model": {"path": "unfuse/shapes"}}),
    ],
)
def test_consistent_specs_are_accepted(kind: str, spec: Object) -> None:
    assert wrong(kind, spec) == []


def test_name_and_role_rules_apply_and_every_cel_rule_is_tested() -> None:
    """A pool keeps its role; `kubectl scale` changes replicas, as anything else may change."""
    for kind, spec in (("DiffusionPipeline", PIPELINE), ("DiffusionPool", POOL)):
        assert wrong(kind, spec, name="a" * 40) == []
        for name in ("a" * 41, "a" * 64, "a.b", "1a", "a-"):
            assert "at most 40" in wrong(kind, spec, name=name)[0]
    assert wrong("DiffusionPool", POOL | {"role": "encoder"}, old=POOL) == ["role is immutable: create another pool"]
    assert wrong("DiffusionPool", POOL | {"replicas": 0}, old=POOL | {"replicas": 5}) == []
    rules = {
        rule["message"]
        for kind in DEFINED
        for _, part in parts(schema(kind))
        for rule in part.get("x-kubernetes-validations", [])
    }
    shown = [*(says for _, _, says in RULED), "at most 40", "role is immutable"]
    assert {rule for rule in rules if not any(says in rule for says in shown)} == set()


NASTY: Sequence[Any] = ("", "a b", 'a"b', "a\nb", "a\n", "-a", "A" * 600, 7, None, ["a"], {"a": 1})


PLACES = ["keysSecret", "stages", "autoscaling", "results", "scheduler", "modle", "apiKeysSecret", "modelCache"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", NASTY, ids=repr)
def test_malformed_pipeline_fields_are_rejected(place: str, value: Any) -> None:
    assert wrong("DiffusionPipeline", PIPELINE | {place: value})


@pytest.mark.parametrize(
    "spec",
    [
        {"role": "a+"},
        {"role": "Encoder"},
        {"role": "x", "parallel": "denoiser"},
        {"role": "x", "device": "cuda:x"},
        {"role": "x", "replicas": -1},
        {"role": "x", "replicas": "1"},
        {"role": "x", "max": 0},
        {"replicas": 1},
        {"role": "x", "resources": {"limits": {"memory": "much"}}},
        {"role": "x", "resources": {"limit": {}}},
        {"role": "x", "model": {"component": "a b"}},
        {"role": "x", "colour": "red"},
        {"role": "x", "stepSeconds": 0},
        {"role": "x", "stepSeconds": 901},
        {"role": "x", "startSeconds": 4},
        {"role": "x", "sharedMemory": "much"},
        {"role": "x", "args": [""]},
        {"role": "x", "podTemplate": []},
        {"role": "x", "maxUnavailable": "half"},
    ],
)
def test_malformed_pool_specs_are_rejected(spec: Object) -> None:
    assert wrong("DiffusionPool", spec)


def test_pool_schema_agrees_with_worker_flags_on_roles_and_parallel() -> None:
    """And what it may not, a worker would refuse: found here, where `kubectl apply` is told so."""
    for role in ("all", "encoder", "encoder+decoder", "language"):
        assert wrong("DiffusionPool", {"role": role}) == []
        roles_of(role)
    with pytest.raises(ConfigError):
        roles_of("a+")
    assert {*parse_parallel("denoiser=ulysses:2+cfg:2")} == {"denoiser"}
    for text in ("denoiser", "denoiser=ulysses", "=ulysses:2"):
        assert wrong("DiffusionPool", POOL | {"parallel": text})
        with pytest.raises(ConfigError):
            parse_parallel(text)
