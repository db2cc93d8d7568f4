"""What the Helm chart makes of values, and the operator of that: objects that Kubernetes takes.

No cluster is here. Objects are checked against the schemas of Kubernetes' versions, and among each other.
"""

from __future__ import annotations

import json
import re
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.integration.operated import operated
from tests.integration.test_custom_resources import wrong
from tests.integration.test_deploy import known, parsed
from tools.chart_schema import SCHEMA, written
from tools.helm import CHART, Made, Object, Refused, call, made
from tools.packages import next_release

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.30.0", "1.34.0", "1.37.0")
SPLIT: Object = {
    "pipeline": {
        "model": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "scheduler": {
            "replicas": 3,
            "args": ["--order=fair"],
            "queue": {"secret": "redis"},
            "podTemplate": {"spec": {"containers": [{"name": "scheduler", "env": [{"name": "A", "value": "b"}]}]}},
        },
        "results": {"url": "s3://pictures/here"},
        "keysSecret": "wire",
        "modelCache": {"claim": "models"},
        "envSecrets": ["hub"],
        "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"name": "web"}}}]},
        "autoscaling": {"minReplicas": 0, "maxReplicas": 10, "coldStartSeconds": 600},
    },
    "imagePullSecrets": [{"name": "registry"}],
    "pools": [
        {
            "name": "encoder",
            "role": "encoder",
            "model": {"component": "text_encoder"},
            "min": 2,
            "max": 2,
            "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}},
        },
        {
            "name": "dit",
            "role": "denoiser",
            "stepSeconds": 30,
            "sharedMemory": "16Gi",
            "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "320Gi"}},
            "podTemplate": {"spec": {"nodeSelector": {"gpu": "h100"}, "runtimeClassName": "nvidia"}},
        },
        {"name": "vae", "role": "decoder", "drainSeconds": 60},
    ],
}
WITH_CLAIM: Object = {"results": {"size": "1Gi"}}
POOL: Object = {"name": "x", "role": "all"}
NONE: Object = {}
CASES = {"none": NONE, "claim": WITH_CLAIM, "split": SPLIT}


@cache
def chart(case: str) -> Made:
    """What the chart makes."""
    return made(CASES[case])


@cache
def cluster(case: str) -> Made:
    """What is there once the operator has acted on it."""
    return operated(chart(case))


def notes(values: Object) -> str:
    """What Helm prints behind an installation in a cluster that knows Kubernetes' own kinds alone."""
    told = call("install", "u", str(CHART), "--dry-run=client", "--output", "json", values=values)
    return str(json.loads(told)["info"]["notes"])


UNITS = {"m": 1e-3, "": 1.0, "mb": 2.0**20, "Mi": 2.0**20, "Gi": 2.0**30}


def amount(text: str) -> float:
    """An amount as Kubernetes or Redis reads it, in bytes or CPUs."""
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", text).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


@pytest.mark.parametrize("case", CASES)
def test_helm_lint_strict_passes(case: str) -> None:
    assert "0 chart(s) failed" in call("lint", str(CHART), "--strict", values=CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_rendered_objects_match_the_kubernetes_and_crd_schemas(case: str) -> None:
    """Those of its own kinds by its schemas, ours by their definitions and rules."""
    for one in chart(case).objects:
        if one["apiVersion"].startswith("unfuse.dev"):
            assert wrong(one["kind"], one["spec"], name=one["metadata"]["name"]) == []
        elif not one["apiVersion"].startswith("monitoring."):
            for version in VERSIONS:
                kubernetes_validate.validate(one, version, strict=True)


def test_values_schema_is_generated_from_the_crds() -> None:
    assert SCHEMA.read_text() == written(), "python -m tools.chart_schema"


def test_chart_values_become_the_pipeline_and_pool_specs() -> None:
    """Of the pipeline, but for where this chart puts things; and of the pools, but for their names."""
    own = chart("split").of("DiffusionPipeline")["u"]["spec"]
    said = {key: value for key, value in SPLIT["pipeline"].items() if key != "networkPolicy"}
    assert {key: own[key] for key in said} == said and "models" not in own
    assert own["imagePullSecrets"] == ["registry"] and own["image"] == f"unfuse:{next_release()}"
    assert [(one["name"], one["pool"], one["role"]) for one in own["stages"]] == [
        (pool["name"], f"u-{pool['name']}", pool["role"]) for pool in SPLIT["pools"]
    ]
    for pool in SPLIT["pools"]:
        spec = {key: value for key, value in pool.items() if key != "name"}
        assert chart("split").of("DiffusionPool")[f"u-{pool['name']}"]["spec"] == spec
    (web, test) = own["networkPolicy"]["clients"]
    assert web == SPLIT["pipeline"]["networkPolicy"]["clients"][0]
    labels = chart("split").pods()["u-picture"]["metadata"]["labels"]
    assert test["podSelector"]["matchLabels"].items() <= labels.items(), "the chart's own test is let in too"


def test_objects_of_missing_api_kinds_are_omitted() -> None:
    assert "PrometheusRule" in chart("split").kinds() and "PrometheusRule" not in made(SPLIT, apis=set()).kinds()
    told = notes(SPLIT)
    assert "Pools are not scaled: autoscaling requires KEDA" in told and "no Prometheus operator" in told
    assert "KEDA" not in notes(NONE)


def test_chart_version_and_app_version_are_the_next_release() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == next_release()


@pytest.mark.parametrize("case", CASES)
def test_pods_have_restricted_permissions_and_valid_commands(case: str) -> None:
    """None but the operator has a token of the cluster, or any right in it."""
    for name, pod in cluster(case).pods().items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is (name == "unfuse-operator")
        assert spec["enableServiceLinks"] is False and ("serviceAccountName" in spec) is (name == "unfuse-operator")
        secure = spec["securityContext"]
        assert (secure["runAsNonRoot"], secure["runAsUser"]) == (True, 10001)
        assert secure["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
            assert own["capabilities"] == {"drop": ["ALL"]}
        for container in spec["containers"]:
            assert known([variable["name"] for variable in container.get("env", [])])
            if container["name"] != "redis":
                parsed(container["args"])


@pytest.mark.parametrize("case", CASES)
def test_referenced_objects_exist_and_selectors_match_one_pod(case: str) -> None:
    """Claims, Secrets and ConfigMaps, but for those that values say exist; hosts; and who is selected."""
    objects = cluster(case)
    given = {"wire", "redis", "hub", "models", "registry"}
    there = {name for kind in ("Secret", "ConfigMap", "PersistentVolumeClaim") for name in objects.of(kind)} | given
    for pod in objects.pods().values():
        named = set(re.findall(r"'(?:secretName|claimName)': '([^']*)'", str(pod)))
        refs = r"'(?:configMapRef|secretKeyRef|secretRef)': {'(?:key': '\w+', ')?name': '([^']*)'"
        assert named | set(re.findall(refs, str(pod))) <= there
        hosts = set(re.findall(r"'(?:--scheduler=tcp|http|redis)://([a-z][-a-z0-9]*):", str(pod)))
        assert hosts <= objects.of("Service").keys()
    labels = {name: pod["metadata"]["labels"] for name, pod in objects.pods().items()}

    def selected(by: dict[str, str]) -> set[str]:
        return {name for name, own in labels.items() if by.items() <= own.items()}

    for name, service in objects.of("Service").items():
        assert len(selected(service["spec"]["selector"])) == 1, name
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for name, one in objects.of(kind).items():
            by = one["spec"].get("selector") or one["spec"]["podSelector"]
            assert len(selected(by["matchLabels"])) == 1, name
    for name, one in (objects.of("Deployment") | objects.of("StatefulSet")).items():
        assert selected(one["spec"]["selector"]["matchLabels"]) == {name}


def test_chart_dashboards_and_alerts_match_the_deploy_folder() -> None:
    """The chart links to them, so what is packaged is equal; as a PrometheusRule they are the same groups."""
    rules = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    boards = {path.name: path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
    maps = chart("none").of("ConfigMap")
    assert maps["u-alerts"]["data"] == {"alerts.yml": rules} and maps["u-dashboards"]["data"] == boards
    assert chart("none").of("PrometheusRule")["u"]["spec"] == yaml.safe_load(rules)
    assert 'job="unfuse"' in rules


def test_helm_package_contains_the_symlinked_files(tmp_path: Path) -> None:
    """Among them the definitions, which Helm makes before anything else."""
    call("package", str(CHART), "--destination", str(tmp_path))
    linked = {
        "files/alerts.yml": "prometheus/alerts.yml",
        "files/dashboards/unfuse.json": "grafana/dashboards/unfuse.json",
    }
    linked |= {"files/operator.yaml": "kubernetes/operator.yaml"}
    linked |= {
        f"crds/{path.name}": f"kubernetes/crds/{path.name}" for path in (ROOT / "deploy/kubernetes/crds").iterdir()
    }
    with tarfile.open(tmp_path / f"unfuse-{next_release()}.tgz") as packed:
        for inside, there in linked.items():
            found = packed.extractfile(f"unfuse/{inside}")
            assert found and found.read() == (ROOT / "deploy" / there).read_bytes()


NASTY = 'it\'s "quoted"\n- {{ .Values.image }}\n---\nkind: Pod #: &a *b %s \\ \t日本'


def test_values_with_yaml_and_template_syntax_are_escaped() -> None:
    values: Object = {
        "pipeline": {"models": [NASTY], "scheduler": {"args": [NASTY]}, "service": {"annotations": {"b": NASTY}}},
        "redis": {"image": NASTY},
        "monitoring": {"labels": {"c": NASTY}},
        "pools": [POOL | {"args": [NASTY], "stepSeconds": 900}],
    }
    objects = made(values)
    assert objects.kinds() == chart("none").kinds() and len(objects.objects) == len(chart("none").objects)
    spec = objects.of("DiffusionPipeline")["u"]["spec"]
    assert spec["models"] == spec["scheduler"]["args"] == [NASTY] and spec["service"]["annotations"] == {"b": NASTY}
    assert objects.of("DiffusionPool")["u-x"]["spec"]["args"] == [NASTY]
    assert objects.of("StatefulSet")["u-redis"]["spec"]["template"]["spec"]["containers"][0]["image"] == NASTY
    assert objects.of("PrometheusRule")["u"]["metadata"]["labels"]["c"] == NASTY
    assert objects.of("Pod")["u-picture"]["spec"]["containers"][0]["args"][2] == f"--model={NASTY}"


@pytest.mark.parametrize("release", ["a" * 53, "r" * 40 + "-1", "x.y" + "z" * 30])
def test_object_names_of_long_releases_fit_52_characters_and_differ(release: str) -> None:
    """A pod of a StatefulSet has a label of its name and eleven characters more. Releases and pools stay apart."""
    pools = [{"name": "p" * 19 + end, "role": "all"} for end in "ab"]
    values: Object = {"pools": pools}
    objects = made(values, release=release)
    names = {one["metadata"]["name"] for one in operated(objects).objects}
    assert max(map(len, names)) <= 52 and all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", one) for one in names)
    assert len(objects.of("DiffusionPool")) == 2
    other = made(values, release=release[:-1] + "0")
    assert objects.of("DiffusionPool").keys().isdisjoint(other.of("DiffusionPool"))


@pytest.mark.parametrize("release", ["on", "no", "true", "null"])
def test_release_names_that_are_yaml_keywords_stay_strings(release: str) -> None:
    names = [one["metadata"]["name"] for one in made(NONE, release=release).objects]
    assert {type(name) for name in names} == {str} and release in names


def test_operator_resource_quantities_are_rendered_as_strings() -> None:
    amounts = {"limits": {"cpu": 1, "memory": "1Gi"}, "requests": {"memory": 2**27}}
    (container,) = made({"operator": {"resources": amounts}}).pods()["unfuse-operator"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}
    assert float(container["resources"]["requests"]["memory"]) == 2**27


PLACES = [
    (name,) for name, value in yaml.safe_load((CHART / "values.yaml").read_text()).items() if isinstance(value, dict)
]


@pytest.mark.parametrize("place", [(), *PLACES, ("pipeline", "scheduler"), ("pipeline", "autoscaling")], ids=".".join)
def test_unknown_values_are_rejected(place: tuple[str, ...]) -> None:
    values: dict[str, Any] = {}
    inner = values
    for name in place:
        inner = inner.setdefault(name, {})
    inner["colour"] = "red"
    with pytest.raises(Refused, match="additional properties 'colour' not allowed"):
        made(values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"pools": [POOL | {"replica": 1}]}, "additional properties 'replica'"),
        ({"pools": [POOL | {"name": "x" * 21}]}, "does not match pattern"),
        ({"pools": [POOL | {"name": "X y"}]}, "does not match pattern"),
        ({"pools": [POOL | {"replicas": "1"}]}, "got string, want integer"),
        ({"pools": [POOL | {"replicas": -1}]}, "minimum"),
        ({"pools": [POOL | {"parallel": "ulysses:8"}]}, "does not match pattern"),
        ({"pools": [{"name": "x"}]}, "missing property 'role'"),
        ({"pools": []}, "minItems"),
        ({"pools": [POOL, POOL]}, "the pool name x is already used"),
        ({"pools": [POOL | {"name": "scheduler"}]}, "the pool name scheduler is already used"),
        ({"redis": {"trial": False}}, "no queue is configured"),
        ({"pipeline": {"scheduler": {"queue": {"url": "redis://me:pass@r:6379/0"}}}}, "queue"),
        ({"pipeline": {"scheduler": {"queue": {"url": "memory"}}}}, "queue"),
        ({"pipeline": {"results": {"url": "disk:/here"}}}, "results"),
        ({"pipeline": {"stages": []}}, "additional properties 'stages'"),
        ({"pipeline": {"models": []}}, "minItems"),
        ({"pipeline": {"models": ["--port=1"]}}, "does not match pattern"),
        ({"pipeline": {"componentSources": {"vae": "a#b"}}}, "does not match pattern"),
        ({"pipeline": {"service": {"port": 70000}}}, "maximum"),
        ({"pipeline": {"scheduler": {"maxUnavailable": "half"}}}, "does not match pattern"),
        ({"serving": {"enabled": False}, "operator": {"enabled": False}}, "nothing would be installed"),
        ({"fullnameOverride": "Name"}, "fullnameOverride"),
        ({"image": {"tag": "a b"}}, "does not match pattern"),
    ],
)
def test_invalid_values_are_rejected_with_a_reason(values: Object, says: str) -> None:
    with pytest.raises(Refused, match=re.escape(says)):
        made(values)


def test_release_name_that_starts_with_a_digit_is_rejected() -> None:
    with pytest.raises(Refused, match="must begin with a letter, and 2024 does not: set fullnameOverride"):
        made(NONE, release="2024")
    assert made({"fullnameOverride": "pictures"}, release="2024").of("DiffusionPipeline")["pictures"]


def test_default_values_store_queue_and_results_in_the_trial_redis() -> None:
    """No claim that needs a class of volumes which many pods write to; and the Redis lets in who needs it."""
    objects = cluster("none")
    settings = objects.of("ConfigMap")["u"]["data"]
    assert settings["UNFUSE_SERVE__RESULTS"] == "redis://u-redis:6379/1"
    assert settings["UNFUSE_SERVE__RESULTS_LIMIT"] == "256MiB"
    (scheduler,) = objects.pods()["u-scheduler"]["spec"]["containers"]
    assert {"name": "UNFUSE_SERVE__QUEUE", "value": "redis://u-redis:6379/0"} in scheduler["env"]
    assert not objects.of("PersistentVolumeClaim")
    for case, callers in (("none", {"u-scheduler", "u-all"}), ("claim", {"u-scheduler"})):
        let_in = cluster(case).of("NetworkPolicy")["u-redis"]["spec"]["ingress"][0]["from"]
        chosen = [one["podSelector"]["matchLabels"].items() for one in let_in]
        pods = cluster(case).pods()
        assert {
            name for name, pod in pods.items() for by in chosen if by <= pod["metadata"]["labels"].items()
        } == callers


def test_notes_warn_about_the_trial_redis_of_default_values() -> None:
    warnings = ("a trial Redis: one pod without a password", "Results are stored in that Redis too")
    assert all(warning in notes(NONE) for warning in warnings)
    assert not any(warning in notes(SPLIT) for warning in warnings)
    assert "has no operator" in notes({"operator": {"enabled": False}}) and "has no operator" not in notes(NONE)
    assert "of all namespaces" in notes({"operator": {"clusterWide": True}})


def test_notes_show_the_docker_build_command_for_a_local_image() -> None:
    """As the Dockerfile has it, under the name by which the pods ask for it."""
    build = f"docker build -f deploy/docker/cpu.Dockerfile -t unfuse:{next_release()} ."
    assert f"  make dist\n  {build}\n" in notes(NONE)
    assert (ROOT / "deploy/docker/cpu.Dockerfile").read_text().partition("\n")[0].endswith(f"  {build}")
    assert "docker build" not in notes({"image": {"repository": "registry.example/unfuse"}})


def test_default_resource_requests_fit_a_minikube_node() -> None:
    """minikube has two CPUs and 4 GiB if it is told nothing, of which its own pods ask for 0.75 and 0.2."""
    objects = cluster("none")
    asked = [
        (one["spec"]["replicas"], container["resources"]["requests"])
        for one in (*objects.of("Deployment").values(), *objects.of("StatefulSet").values())
        for container in one["spec"]["template"]["spec"]["containers"]
    ]
    assert len(asked) == 4
    assert sum(replicas * amount(requests["cpu"]) for replicas, requests in asked) <= 1.15
    assert sum(replicas * amount(requests["memory"]) for replicas, requests in asked) <= 2.3 * UNITS["Gi"]


def test_trial_redis_maxmemory_fits_its_memory_limit_and_volume() -> None:
    """In memory, also while it writes its file anew, and on its disk, where the old file then is beside the new."""
    spec = chart("none").of("StatefulSet")["u-redis"]["spec"]
    (redis,), (claim,) = spec["template"]["spec"]["containers"], spec["volumeClaimTemplates"]
    flags = dict(zip(redis["args"][1::2], redis["args"][2::2], strict=True))
    assert (flags["--appendonly"], flags["--save"], flags["--maxmemory-policy"]) == ("yes", "", "noeviction")
    most = amount(flags["--maxmemory"])
    assert 2 * amount("256Mi") < most < 0.75 * amount(redis["resources"]["limits"]["memory"])
    assert 3 * most < amount(claim["spec"]["resources"]["requests"]["storage"])


def test_every_pod_uses_the_configured_image_and_pull_secrets() -> None:
    secrets = [{"name": "registry"}]
    image = {"repository": "registry.example/unfuse", "tag": "2", "pullPolicy": "Always"}
    pods = operated(made({"imagePullSecrets": secrets, "image": image})).pods()
    assert {*pods} == {"u-scheduler", "u-all", "u-redis", "u-picture", "unfuse-operator"}
    assert [pod["spec"].get("imagePullSecrets") for pod in pods.values()] == [secrets] * 5
    found = {
        (one["image"], one.get("imagePullPolicy"))
        for name, pod in pods.items()
        if name != "u-redis"
        for one in containers(pod)
    }
    assert found == {("registry.example/unfuse:2", "Always")}


@pytest.mark.parametrize(
    ("values", "place", "limit", "claims"),
    [
        (WITH_CLAIM, "disk:/results", "0", {"u-results"}),
        ({"pipeline": {"results": {"claim": "mine", "limit": "1GB"}}}, "disk:/results", "1GB", set()),
        ({"pipeline": {"results": {"limit": "1GB"}}}, "redis://u-redis:6379/1", "1GB", set()),
        ({"pipeline": {"scheduler": {"queue": {"url": "redis://r:6379/0"}}}}, "disk:/results", "0", {"u-results"}),
        ({"pipeline": {"results": {"url": "s3://b/p"}}}, "s3://b/p", "0", set()),
    ],
)
def test_result_storage_follows_values_and_its_claim_is_retained(
    values: Object, place: str, limit: str, claims: set[str]
) -> None:
    """A claim that the chart makes is kept when its release goes."""
    objects = operated(made(values))
    settings = objects.of("ConfigMap")["u"]["data"]
    assert (settings["UNFUSE_SERVE__RESULTS"], settings["UNFUSE_SERVE__RESULTS_LIMIT"]) == (place, limit)
    assert {*objects.of("PersistentVolumeClaim")} == claims
    for claim in objects.of("PersistentVolumeClaim").values():
        assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert ("u-redis" in objects.of("StatefulSet")) == ("queue" not in str(values))


def test_no_object_has_a_finalizer() -> None:
    """`helm uninstall` ends the operator first, and what it made goes all the same, by its owners."""
    assert "finalizers" not in str(cluster("split").objects)
    source = "".join(path.read_text() for path in (ROOT / "unfuse/k8s").iterdir() if path.is_file())
    assert "finalizers" not in source
