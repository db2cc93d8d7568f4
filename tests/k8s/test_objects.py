"""What a pipeline and a pool become, without any cluster: objects that Kubernetes takes, commands that parse."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.integration.test_deploy import known, parsed
from tests.k8s.server import SCHEMAS, completed
from unfuse.core.errors import ConfigError
from unfuse.edge.keys import ApiKey, ApiKeys
from unfuse.k8s.objects import (
    KEDA,
    MONITORING,
    default_pools,
    pipeline_objects,
    pool_objects,
    secrets_of,
    unmet_requests,
)
from unfuse.k8s.spec import InvalidSpec, Object, ranks, read_spec
from unfuse.service.worker_groups import LEAVING_S
from unfuse.wire.keys import read_keys
from unfuse.worker.worker import SAVING

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
SEED, VAE = yaml.safe_load_all((DEPLOY / "examples" / "wan.yaml").read_text())
VERSIONS = ("1.30.0", "1.34.0", "1.37.0")
EVERY = frozenset({MONITORING, KEDA})
NASTY = 'it\'s "quoted"\n- $name ${x} {{ .Values }}\n---\nkind: Pod #: &a *b %s \\ \t日本'
LEAST: Object = {"model": "unfuse/shapes", "scheduler": {"redis": {"host": "r"}}}
KEYED = LEAST | {"keysSecret": "wire"}
FULL: Object = {
    "models": ["a", "b"],
    "image": "registry.example/unfuse:2",
    "imagePullSecrets": ["registry"],
    "envSecrets": ["s3", "hub"],
    "modelCache": {"claim": "models"},
    "keysSecret": "wire",
    "apiKeysSecret": "api",
    "scheduler": {
        "replicas": 3,
        "queue": {"secret": "redis"},
        "args": ["--order=fair"],
        "resources": {"limits": {"memory": "4Gi"}},
    },
    "stages": [
        {"name": "text-encoding", "pool": "enc", "replicas": 2, "model": {"component": "text_encoder"}},
        {
            "name": "denoising",
            "pool": "dit",
            "stepSeconds": 30,
            "sharedMemory": "16Gi",
            "resources": {"limits": {"nvidia.com/gpu": 8}},
        },
        {"name": "vae-decoding", "pool": "dit"},
    ],
    "results": {"url": "s3://b/p"},
    "autoscaling": {"maxReplicas": 8},
}
POOL: Object = {"role": "denoiser"}
PLACED: Object = POOL | {
    "parallel": "denoiser=ulysses:2",
    "device": "cuda:0+cuda:1",
    "stepSeconds": 30,
    "args": ["--max-batch=2"],
    "min": 1,
    "max": 4,
    "model": {"path": "a", "component": "transformer"},
}


def pipeline(spec: Object, name: str = "p") -> Object:
    """The spec, as the server has it, and as it is read."""
    body = {"metadata": {"name": name}, "spec": spec}
    return {"image": "unfuse:1"} | read_spec(completed(body, SCHEMAS["diffusionpipelines"]))


def pool(spec: Object) -> Object:
    return read_spec(completed({"metadata": {"name": "w"}, "spec": spec}, SCHEMAS["diffusionpools"]))


def made(spec: Object, name: str = "p") -> list[Object]:
    return pipeline_objects(name, pipeline(spec, name), EVERY)


def workers(spec: Object, serves: Object = LEAST, **more: Object) -> list[Object]:
    users = {"p": pipeline(serves)} | {name: pipeline(one) for name, one in more.items()}
    return pool_objects("w", "ns", pool(spec), users, EVERY)


CASES = {"least": [*made(LEAST), *workers(POOL)], "full": [*made(FULL), *workers(PLACED, FULL)]}
CASES["example"] = [*made(SEED["spec"]), *workers(VAE["spec"], SEED["spec"])]
CASES["example"] += secrets_of("p", pipeline(LEAST))


def pods(objects: list[Object]) -> list[Object]:
    return [one["spec"]["template"]["spec"] for one in objects if one["kind"] in {"Deployment", "StatefulSet"}]


def arguments(objects: list[Object]) -> list[str]:
    (container,) = pods(objects)[-1]["containers"]
    return list(container["args"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_validate_against_kubernetes_schemas(case: str, version: str) -> None:
    kinds = {one["kind"] for one in CASES[case]}
    assert kinds >= {"Deployment", "StatefulSet", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"}
    for one in CASES[case]:
        if one["apiVersion"] not in EVERY:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_pods_have_valid_commands_and_settings_and_are_unprivileged(case: str) -> None:
    (settings,) = (one["data"] for one in CASES[case] if one["kind"] == "ConfigMap")
    assert known([*settings])
    for spec in pods(CASES[case]):
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        assert "serviceAccountName" not in spec and spec["securityContext"]["runAsNonRoot"]
        for container in chain(spec["initContainers"], spec["containers"]):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= {one["name"] for one in spec["volumes"]}
        for container in spec["containers"]:
            assert known([variable["name"] for variable in container["env"]])
            parsed(container["args"])


@pytest.mark.parametrize("case", CASES)
def test_selectors_match_exactly_one_workload(case: str) -> None:
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in CASES[case]
        if one["kind"] in {"Deployment", "StatefulSet"}
    ]
    for one in CASES[case]:
        spec = one.get("spec", {})
        by = spec.get("podSelector") or (spec.get("selector") if one["kind"] != "ServiceMonitor" else None)
        if by:
            assert sum(by.get("matchLabels", by).items() <= its.items() for its in labels) == 1, one["kind"]
    (monitor,) = (one for one in CASES[case] if one["kind"] == "ServiceMonitor")
    chosen = monitor["spec"]["selector"]["matchLabels"]
    (gateway,) = (
        one for one in CASES[case] if one["kind"] == "Service" and chosen.items() <= one["metadata"]["labels"].items()
    )
    assert gateway["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "unfuse"
    (secret,) = (
        volume["secret"]["secretName"]
        for one in CASES[case]
        if one["kind"] == "Deployment"
        for volume in one["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "api"
    )
    credentials = monitor["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert credentials == {"name": secret, "key": "metrics"}


def test_objects_of_missing_crds_are_omitted() -> None:
    assert not {KEDA, MONITORING} & {one["apiVersion"] for one in pipeline_objects("p", pipeline(FULL), frozenset())}
    kinds = {one["kind"] for one in pool_objects("w", "ns", pool(POOL), {"p": pipeline(FULL)}, frozenset())}
    assert "ScaledObject" not in kinds and "StatefulSet" in kinds


def test_special_characters_in_values_are_not_interpreted() -> None:
    spec = LEAST | {"model": NASTY, "scheduler": LEAST["scheduler"] | {"args": [NASTY, "$name"]}, "envSecrets": ["$x"]}
    objects = [
        *made(spec),
        *workers(POOL | {"model": {"path": NASTY}, "args": ["$drain"], "podTemplate": {"spec": {"a": "$b"}}}, spec),
    ]
    assert [one["kind"] for one in objects if one["kind"] != "ScaledObject"] == [one["kind"] for one in CASES["least"]]
    scheduler, worker = (one["containers"][0] for one in pods(objects))
    assert scheduler["args"][1] == NASTY and scheduler["args"][-2:] == [NASTY, "$name"]
    assert f"--model={NASTY}" in worker["args"] and worker["args"][-1] == "$drain"
    assert scheduler["envFrom"][1] == {"secretRef": {"name": "$x"}}
    assert not [text for text in strings(CASES["full"]) if "$" in text]


def strings(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in strings(one)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize(
    ("scheduler", "queue", "strategy"),
    [
        ({"redis": {"host": "r", "port": 1, "database": 2}}, {"value": "redis://r:1/2"}, None),
        ({"queue": {"url": "rediss://r:6380/0"}}, {"value": "rediss://r:6380/0"}, None),
        ({"queue": {"secret": "s"}}, {"valueFrom": {"secretKeyRef": {"name": "s", "key": "url"}}}, None),
        ({"queueBackend": "sqlite"}, {"value": "sqlite:/data/queue.db"}, "Recreate"),
        ({"queueBackend": "memory"}, {"value": "memory"}, "Recreate"),
    ],
)
def test_queue_setting_and_rollout_strategy_follow_the_spec(
    scheduler: Object, queue: Object, strategy: str | None
) -> None:
    """Two schedulers at one time would each have a queue of its own, where it is no Redis."""
    deployment = made(LEAST | {"scheduler": scheduler})[-1]["spec"]
    (variable,) = deployment["template"]["spec"]["containers"][0]["env"]
    assert variable == {"name": "UNFUSE_SERVE__QUEUE"} | queue
    assert deployment["strategy"].get("type") == strategy


@pytest.mark.parametrize(
    ("results", "kept"), [(None, "p-results"), ({"claim": "mine"}, "mine"), ({"url": "s3://b", "limit": "1GB"}, "")]
)
def test_results_location_is_shared_by_all_pods(results: Object | None, kept: str) -> None:
    spec = LEAST | ({"results": results} if results else {})
    objects = [*made(spec), *workers(POOL, spec)]
    (settings,) = (one["data"] for one in objects if one["kind"] == "ConfigMap")
    assert settings["UNFUSE_SERVE__RESULTS"] == ("disk:/results" if kept else "s3://b")
    assert settings["UNFUSE_SERVE__RESULTS_LIMIT"] == ("0" if kept else "1GB")
    assert [one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"] == [
        "p-results" for _ in range(results is None)
    ]
    for one in pods(objects):
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in one["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert claims == [kept] * bool(kept)


def test_resource_quantities_are_strings() -> None:
    """Kubernetes' schemas have both; a server that is to apply a number says that it expected a string."""
    asked = {"limits": {"nvidia.com/gpu": 8, "memory": "16Gi"}, "requests": {"cpu": 1}}
    said = {"limits": {"nvidia.com/gpu": "8", "memory": "16Gi"}, "requests": {"cpu": "1"}}
    own = LEAST["scheduler"] | {"resources": asked}
    for objects in (made(LEAST | {"scheduler": own}), workers(POOL | {"resources": asked})):
        assert pods(objects)[0]["containers"][0]["resources"] == said


def test_pod_annotations_change_with_settings() -> None:
    for before, after in zip((made(LEAST), workers(POOL)), (made(FULL), workers(POOL, FULL)), strict=True):
        notes = [one[-1]["spec"]["template"]["metadata"]["annotations"] for one in (before, after)]
        assert notes[0] != notes[1]


@pytest.mark.parametrize(
    ("step", "asked", "drain"), [(1, 20, 20), (5, 20, 20), (6, 20, 24), (30, 20, 120), (1, 60, 60), (30, 1, 120)]
)
def test_drain_and_grace_period_cover_a_running_step(step: int, asked: int, drain: int) -> None:
    objects = workers(POOL | {"stepSeconds": step, "drainSeconds": asked})
    assert f"--drain-timeout={drain}" in arguments(objects)
    assert pods(objects)[0]["terminationGracePeriodSeconds"] == drain + LEAVING_S
    assert SAVING * drain >= step


def test_worker_replicas_are_clamped_to_min_and_max() -> None:
    for said, count in (
        ({}, 5),
        ({"max": 3}, 3),
        ({"replicas": 0}, 0),
        ({"replicas": 0, "min": 2}, 2),
        ({"max": 9}, 5),
    ):
        assert workers(POOL | {"replicas": 5} | said)[-1]["spec"]["replicas"] == count


def test_worker_arguments_name_role_model_device_and_schedulers() -> None:
    said = arguments(workers(PLACED, KEYED, q=KEYED))
    assert said[1:8] == [
        "--role=denoiser",
        "--component=transformer",
        "--model=a",
        "--device=cuda:0+cuda:1",
        "--parallel=denoiser=ulysses:2",
        "--scheduler=tcp://p-scheduler:8001",
        "--scheduler=tcp://q-scheduler:8001",
    ]
    assert said[-1] == "--max-batch=2"


def test_pod_template_is_merged_into_pods() -> None:
    """By name into containers, variables and mounts; other lists grow, and nothing that was there is lost."""
    before = (made(LEAST), workers(POOL))
    for objects, side in zip(before, ("scheduler", "worker"), strict=True):
        own = {"name": "A", "value": NASTY}
        container = {"name": side, "env": [own], "envFrom": [{"secretRef": {"name": "s3"}}], "args": ["--slots=3"]}
        container["volumeMounts"] = [{"name": "more", "mountPath": at} for at in ("/a", "/b")]
        spec: Object = {"containers": [container], "nodeSelector": {"gpu": "h100"}, "serviceAccountName": "pictures"}
        spec["volumes"] = [{"name": "models", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "more", "emptyDir": {}}]
        spec["securityContext"] = {"runAsUser": 7}
        said = {"podTemplate": {"metadata": {"annotations": {"a": "b"}}, "spec": spec}}
        after = made(LEAST | {"scheduler": LEAST["scheduler"] | said}) if side == "scheduler" else workers(POOL | said)
        kubernetes_validate.validate(after[-1], VERSIONS[-1], strict=True)
        (old,), (new,) = (pods(its) for its in (objects, after))
        (was,), (now,) = old["containers"], new["containers"]
        assert now["env"] == [*was["env"], own] and now["envFrom"] == [*was["envFrom"], *container["envFrom"]]
        assert now["args"] == [*was["args"], "--slots=3"]
        assert now["volumeMounts"] == [*was["volumeMounts"], *container["volumeMounts"]]
        assert now["image"] == was["image"] and new["serviceAccountName"] == "pictures"
        assert new["securityContext"] == old["securityContext"] | {"runAsUser": 7}
        assert {one["name"]: one for one in new["volumes"]}["models"]["emptyDir"] == {"sizeLimit": "1Gi"}
        assert len(new["volumes"]) == len(old["volumes"]) + 1
        assert after[-1]["spec"]["template"]["metadata"]["annotations"].items() >= {"a": "b"}.items()


def test_service_policy_monitor_and_budget_follow_the_spec() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"name": "web"}}}]
    spec = LEAST | {
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
        "networkPolicy": {"clients": clients},
        "monitoring": {"labels": {"release": "prometheus"}},
        "scheduler": LEAST["scheduler"] | {"drainSeconds": 60, "maxUnavailable": "50%"},
        "imagePullPolicy": "Always",
    }
    found = {
        (one["kind"], one["metadata"]["name"]): one for one in [*made(spec), *workers(POOL | {"maxUnavailable": 2})]
    }
    service, monitor = found["Service", "p"], found["ServiceMonitor", "p"]
    assert (service["spec"]["type"], service["metadata"]["annotations"]) == ("LoadBalancer", {"a": "b"})
    assert [port["port"] for port in service["spec"]["ports"]] == [80]
    assert found["NetworkPolicy", "p-scheduler"]["spec"]["ingress"][0]["from"] == clients
    assert monitor["metadata"]["labels"].items() >= {"release": "prometheus"}.items()
    assert found["PodDisruptionBudget", "p-scheduler"]["spec"]["maxUnavailable"] == "50%"
    assert found["PodDisruptionBudget", "w-pool"]["spec"]["maxUnavailable"] == 2
    pod = found["Deployment", "p-scheduler"]["spec"]["template"]["spec"]
    assert "--drain-timeout=60" in pod["containers"][0]["args"] and pod["terminationGracePeriodSeconds"] == 75
    assert {one["imagePullPolicy"] for one in (*pod["containers"], *pod["initContainers"])} == {"Always"}
    none = LEAST | {"networkPolicy": {"enabled": False}, "monitoring": {"enabled": False}}
    kinds = {one["kind"] for one in [*made(none), *workers(POOL, none)]}
    assert not kinds & {"NetworkPolicy", "ServiceMonitor"}


def test_wan_example_creates_pools_by_stage_names() -> None:
    """Its stages have names and no roles."""
    spec = pipeline(SEED["spec"])
    found = {one["metadata"]["name"]: one["spec"] for one in default_pools("p", spec)}
    assert [(name, one["role"], one["replicas"]) for name, one in found.items()] == [
        ("wan-t5-encoder-pool", "encoder", 2),
        ("wan-14b-t2v-dit-pool", "denoiser", 4),
        ("wan-vae-pool", "decoder", 2),
    ]
    assert found["wan-vae-pool"]["model"] == {"component": "vae"} and "model" not in found["wan-t5-encoder-pool"]
    assert found["wan-14b-t2v-dit-pool"]["resources"] == {"limits": {"nvidia.com/gpu": 8, "memory": "320Gi"}}
    (trigger,) = next(one for one in CASES["example"] if one["kind"] == "ScaledObject")["spec"]["triggers"]
    assert trigger["metricType"] == "Value" and trigger["metadata"]["threshold"] == "100"
    assert trigger["metadata"]["query"] == (
        'sum(max by (role, component) (unfuse_role_queue_size{namespace="ns",service="p",'
        'role=~"decoder",component=~"vae"}))'
    )


def test_stages_naming_one_pool_are_merged_into_one_pool() -> None:
    whole, encoder = (
        {one["metadata"]["name"]: one["spec"] for one in default_pools("p", pipeline(spec))} for spec in (LEAST, FULL)
    )
    assert whole == {"p": {"role": "all", "replicas": 1}}
    assert encoder["dit"] == {
        "role": "denoiser+decoder",
        "replicas": 1,
        "stepSeconds": 30,
        "sharedMemory": "16Gi",
        "resources": {"limits": {"nvidia.com/gpu": 8}},
    }
    assert encoder["enc"]["model"] == {"component": "text_encoder"}


def test_scaled_object_queries_work_of_roles_within_bounds() -> None:
    def scaled(spec: Object, serves: Object = FULL) -> Object:
        (found,) = (one["spec"] for one in workers(spec, serves) if one["kind"] == "ScaledObject")
        return dict(found)

    def window(one: Object) -> int:
        behavior = one["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        return int(behavior["scaleDown"]["stabilizationWindowSeconds"])

    one = scaled(POOL | {"role": "language+vision", "model": {"component": "text_model"}})
    assert one["triggers"][0]["metadata"]["query"] == (
        'sum(max by (role, component) (unfuse_role_predicted_seconds{namespace="ns",service="p",'
        'role=~"decode|prefill|vision",component=~"text_model"}))'
    )
    assert one["triggers"][0]["metadata"]["threshold"] == "30"
    assert (one["minReplicaCount"], one["maxReplicaCount"]) == (1, 8)
    own = scaled(POOL | {"min": 2, "max": 3})
    assert (own["minReplicaCount"], own["maxReplicaCount"]) == (2, 3)
    assert 'role=~".+"' in scaled({"role": "all"})["triggers"][0]["metadata"]["query"]
    assert one["scaleTargetRef"] == {"apiVersion": "unfuse.dev/v1alpha1", "kind": "DiffusionPool", "name": "w"}
    assert (one["cooldownPeriod"], window(one)) == (300, 300)
    slow = scaled(POOL, FULL | {"autoscaling": {"maxReplicas": 8, "coldStartSeconds": 7200}})
    assert (slow["cooldownPeriod"], window(slow)) == (7200, 3600)
    off = FULL | {"autoscaling": {"enabled": False}}
    assert "ScaledObject" not in {one["kind"] for one in workers(POOL, off)}


@pytest.mark.parametrize(
    ("own", "all_least", "least"),
    [
        ({"max": 3}, [1], 1),
        ({"max": 3}, [0], 0),
        ({"min": 2, "max": 3}, [0], 2),
        ({}, [0], 0),
        ({}, [0, 1], 1),
        ({"max": 3}, [0, None], 1),
        ({"max": 3}, [0, 0], 0),
    ],
)
def test_pool_scales_to_zero_only_if_all_pipelines_allow(own: Object, all_least: list[int | None], least: int) -> None:
    """A pool's `min` is 0 where it says none, and a gateway calls one without workers missing, in an alert that wakes
    people, unless its pipeline said that pools may sleep."""
    users: list[Object] = [
        KEYED | ({} if one is None else {"autoscaling": {"minReplicas": one, "maxReplicas": 8}}) for one in all_least
    ]
    objects = workers(POOL | own, users[0], **{f"q{at}": one for at, one in enumerate(users[1:])})
    (scaled,) = (one["spec"] for one in objects if one["kind"] == "ScaledObject")
    assert scaled["minReplicaCount"] == least
    asleep = ["--scale-to-zero=all=2" in arguments(made(one)) for one in users]
    assert asleep == [one == 0 for one in all_least]


def test_shared_pool_serves_and_scales_for_all_its_pipelines() -> None:
    """A scheduler tells its workers of its own models alone, and who asks the other pipeline would wait for ever."""
    scaled, other = KEYED | {"autoscaling": {"maxReplicas": 8}}, {"models": ["z", "unfuse/shapes"]}
    other |= {key: value for key, value in KEYED.items() if key != "model"}
    shared = workers(POOL, scaled, q=other)
    assert [one for one in arguments(shared) if "--model" in one] == ["--model=unfuse/shapes", "--model=z"]
    (trigger,) = (one["spec"]["triggers"][0] for one in shared if one["kind"] == "ScaledObject")
    assert 'service=~"p|q",' in trigger["metadata"]["query"]
    assert not [one for one in arguments(workers(POOL, scaled)) if "--model" in one]
    of_one = arguments(workers(POOL | {"model": {"path": "z"}}, scaled, q=other))
    assert [one for one in of_one if "--model" in one] == ["--model=z"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"image": "x:2"}, "image"),
        ({"results": {"url": "s3://c"}}, "results"),
        ({"keysSecret": "k"}, "keysSecret"),
        ({"scheduler": {"redis": {"host": "s"}}}, "redis"),
        ({"scheduler": {"queue": {"url": "redis://r"}}}, "queue"),
        ({"envSecrets": ["s"]}, "envSecrets"),
        ({"modelCache": {"claim": "c"}}, "modelCache"),
    ],
)
def test_pipelines_with_different_pod_settings_cannot_share_workers(other: Object, says: str) -> None:
    assert len(workers(POOL, KEYED, q=KEYED | {"model": "another"})) == 4
    with pytest.raises(InvalidSpec, match=f"p and q cannot share workers: they differ in .*{says}"):
        workers(POOL, KEYED, q=KEYED | other)
    with pytest.raises(InvalidSpec, match="keysSecret, which both must set"):
        workers(POOL, LEAST, q=LEAST)


def test_network_policy_admits_only_pools_of_same_pipelines() -> None:
    def let_in(objects: list[Object], port: int) -> list[str]:
        (policy,) = (one["spec"]["ingress"] for one in objects if one["kind"] == "NetworkPolicy")
        return list(policy[port]["from"][0]["podSelector"]["matchExpressions"][0]["values"])

    assert let_in(made(FULL), 1) == ["enc", "dit"] and let_in(workers(POOL, FULL), 0) == ["dit", "enc"]
    near = {"q": KEYED | {"stages": [{"name": "all", "pool": "z"}]}}
    assert let_in(workers(POOL, KEYED, **near), 0) == ["p", "z"]


def test_keys_are_generated_when_pipeline_names_no_secret(tmp_path: Path) -> None:
    wire, api = secrets_of("p", pipeline(LEAST))
    assert secrets_of("p", pipeline(FULL)) == []
    for name, text in wire["stringData"].items():
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text)
    sides = [read_keys(str(tmp_path), side) for side in ("scheduler", "worker")]
    assert all(sides) and sides[0] != sides[1]
    (tmp_path / "keys").write_text(api["stringData"]["keys"])
    keys = ApiKeys(files=[str(tmp_path / "keys")])
    assert keys.find(api["stringData"]["key"]) == ApiKey("operator", admin=True) and keys.warning == ""
    assert keys.find(api["stringData"]["metrics"]) == ApiKey("prometheus", read_only=True)
    assert secrets_of("p", pipeline(LEAST))[0] != wire


@pytest.mark.parametrize("name", ["a" * 41, "A", "a.b", "1a", "a\n", 'a"', "-a", "a-", "x" * 64, ""])
def test_invalid_pipeline_and_pool_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidSpec, match="at most 40"):
        pipeline(LEAST, name)
    with pytest.raises(InvalidSpec, match="at most 40"):
        pipeline(LEAST | {"stages": [{"name": "all", "pool": name}]})


def test_derived_object_names_are_unique_and_within_length_limit() -> None:
    name = "n" * 40
    objects = [*made(LEAST, name), *pool_objects(name, "ns", pool(POOL), {name: pipeline(LEAST, name)}, EVERY)]
    objects += [*secrets_of(name, pipeline(LEAST)), *default_pools(name, pipeline(LEAST, name))]
    assert max(len(one["metadata"]["name"]) for one in objects) <= 52
    named = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len({*named}) == len(named), "a pool may have its pipeline's name"


def test_component_source_is_read_from_stage_model_path() -> None:
    """As in a pipeline of which one encoder is another repository's."""
    stages = [
        {"name": "text-encoding", "pool": "enc", "model": {"path": "owner/t5", "component": "text_encoder_2"}},
        {"name": "denoising", "pool": "dit", "model": {"path": "unfuse/shapes", "component": "transformer"}},
    ]
    spec = pipeline(LEAST | {"stages": stages})
    said = [flag for flag in arguments(pipeline_objects("p", spec, EVERY)) if "component-source" in flag]
    assert said == ["--component-source=text_encoder_2=owner/t5"]
    assert unmet_requests("p", spec, {"enc": "encoder", "dit": "denoiser"}, EVERY) == []
    assert not [flag for flag in arguments(made(LEAST)) if "component-source" in flag]
    other = stages[0] | {"pool": "enc2", "model": {"path": "owner/other", "component": "text_encoder_2"}}
    with pytest.raises(InvalidSpec, match="component text_encoder_2 has two sources"):
        pipeline(LEAST | {"stages": [*stages, other]})
    sources = {"vae": "owner/vae", "text_encoder_2": "/models/t5 xxl"}
    said = arguments(made(LEAST | {"componentSources": sources}))
    assert said[-2:] == ["--component-source=vae=owner/vae", "--component-source=text_encoder_2=/models/t5 xxl"]
    parsed(said)


def test_unmet_requests_are_listed() -> None:
    spec = pipeline(FULL | {"stages": [*FULL["stages"], {"name": "all", "pool": "enc", "model": {"path": "c"}}]})
    assert unmet_requests("p", spec, {"enc": "encoder", "dit": "all"}, frozenset()) == [
        "stage all requires role all, which the workers of pool enc do not have",
        "stage all cannot load its weights from c: serve only one model",
        "pools are not scaled: autoscaling requires KEDA, which this cluster does not have",
    ]
    assert unmet_requests("p", pipeline(LEAST), {}, frozenset()) == []
    one = pipeline(LEAST | {"stages": [{"name": "encoding", "pool": "enc", "model": {"path": "c"}}]})
    assert unmet_requests("p", one, {"enc": "encoder"}, EVERY) == [
        "stage encoding cannot load its weights from c: set model.component"
    ]
    assert unmet_requests("p", pipeline(FULL), {"dit": "decoder"}, EVERY) == [
        "stage denoising requires role denoiser, which the workers of pool dit do not have"
    ]


EIGHT: Object = {"resources": {"limits": {"nvidia.com/gpu": 8}}}


@pytest.mark.parametrize(
    ("spec", "said", "count"),
    [
        (EIGHT, "auto", None),
        ({"resources": {"requests": {"amd.com/gpu": "2"}}}, "auto", None),
        ({"resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 8}}}, "", 1),
        ({}, "", 1),
        (EIGHT | {"parallel": "denoiser=ulysses:4+cfg:2"}, "denoiser=ulysses:4+cfg:2", 8),
        (EIGHT | {"parallel": "denoiser=ulysses:4"}, "denoiser=ulysses:4", 4),
        (EIGHT | {"parallel": "auto"}, "auto", None),
        (EIGHT | {"device": "cuda:0"}, "", 1),
        (EIGHT | {"device": "cuda:0+cuda:1"}, "auto", None),
        (EIGHT | {"args": ["--parallel=denoiser=ring:8"]}, "", None),
        (EIGHT | {"args": ["--parallel", "denoiser=ring:8"]}, "", None),
    ],
)
def test_pod_with_several_gpus_defaults_to_parallel_auto(spec: Object, said: str, count: int | None) -> None:
    asked = pool(POOL | spec)
    assert ranks(asked) == (said, count)
    flags = [
        flag
        for flag in arguments(workers(POOL | spec))
        if flag.startswith("--parallel=") and flag not in spec.get("args", [])
    ]
    assert flags == [f"--parallel={said}"] * bool(said)


def test_wan_example_denoiser_uses_all_its_gpus() -> None:
    spec = pipeline(SEED["spec"])
    made_pools = {one["metadata"]["name"]: one["spec"] for one in default_pools("p", spec)}
    objects = pool_objects("dit", "ns", pool(made_pools["wan-14b-t2v-dit-pool"]), {"p": spec}, EVERY)
    assert "--parallel=auto" in arguments(objects)
    objects = pool_objects("t5", "ns", pool(made_pools["wan-t5-encoder-pool"]), {"p": spec}, EVERY)
    assert not [flag for flag in arguments(objects) if "parallel" in flag], "it has one"


def test_parallel_of_stages_is_merged_per_role() -> None:
    stages = [
        {"name": "denoising", "pool": "dit", "parallel": "ulysses:4+cfg:2"},
        {"name": "vae-decoding", "pool": "dit", "parallel": "tiles:8"},
        {"name": "encoding", "pool": "enc", "parallel": "auto"},
    ]
    found = {one["metadata"]["name"]: one["spec"] for one in default_pools("p", pipeline(LEAST | {"stages": stages}))}
    assert found["dit"]["parallel"] == "denoiser=ulysses:4+cfg:2,decoder=tiles:8" and found["enc"]["parallel"] == "auto"
    assert pool(found["dit"])["parallel"] == found["dit"]["parallel"]


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([{"name": "all", "pool": "a", "parallel": "ulysses:2"}], "all is not a single role"),
        ([{"name": "x", "role": "encoder+decoder", "pool": "a", "parallel": "tiles:2"}], "is not a single role"),
        ([{"name": "denoising", "pool": "a", "parallel": "nonsense:2"}], "nonsense"),
        (
            [
                {"name": "a-encoding", "pool": "a", "parallel": "tensor:2"},
                {"name": "b-encoding", "pool": "a", "parallel": "tensor:4"},
            ],
            r"\(tensor:2, tensor:4\)",
        ),
        (
            [
                {"name": "denoising", "pool": "a", "parallel": "auto"},
                {"name": "decoding", "pool": "a", "parallel": "tiles:4"},
            ],
            r"\(auto, tiles:4\)",
        ),
    ],
)
def test_invalid_parallel_of_stages_raises_config_error(stages: list[Object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        default_pools("p", pipeline(LEAST | {"stages": stages}))


def test_unknown_parallel_kind_of_pool_is_rejected() -> None:
    with pytest.raises(Exception, match="nonsense"):
        pool(POOL | {"parallel": "denoiser=nonsense:2"})


@pytest.mark.parametrize(
    "spec", [LEAST | {"scheduler": {}}, {"scheduler": LEAST["scheduler"]}, LEAST | {"stages": [{"name": "a"}]}]
)
def test_spec_without_required_fields_raises_key_error(spec: Object) -> None:
    with pytest.raises(KeyError):
        pipeline(spec)
