"""The operator and the chart make the same pods of the same settings; and the manifest by which an operator runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.integration.test_deploy import known, parsed
from tests.k8s.server import KINDS, MORE, SCHEMAS, completed, plural
from tools.helm import Made, Object, made
from unfuse.k8s import cluster, objects, operator, reconcile
from unfuse.k8s.spec import read

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "operator.yaml"
EVERY = frozenset({objects.KEDA, objects.MONITORING})
IMAGE: Object = {"repository": "registry.example/unfuse", "tag": "2"}
SAME: list[tuple[Object, Object, Object]] = [
    (
        {"wireKeys": {"existingSecret": "wire"}, "results": {"size": "50Gi"}},
        {"model": "unfuse/shapes", "keysSecret": "wire", "scheduler": {"replicas": 2, "redis": {"host": "u-redis"}}},
        {"role": "all", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}},
    ),
    (
        {
            "models": ["a", "b"], "queue": {"existingSecret": "redis"}, "results": {"url": "s3://b"}, "image": IMAGE,
            "wireKeys": {"existingSecret": "wire"}, "apiKeys": {"existingSecret": "api"},
            "imagePullSecrets": [{"name": "registry"}], "modelCache": {"existingClaim": "models"},
            "scheduler": {"replicas": 3, "args": ["--order=fair"], "envFrom": [{"secretRef": {"name": "s3"}}]},
            "workers": [{
                "name": "all", "role": "denoiser", "replicas": 4, "components": ["transformer"], "models": ["a"],
                "args": ["--max-batch=2"], "stepSeconds": 30, "sharedMemory": "16Gi", "startSeconds": 60,
                "nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "runtimeClassName": "nvidia", "envFrom": [{"secretRef": {"name": "s3"}}],
                "resources": {"limits": {"nvidia.com/gpu": 8}},
                "autoscaling": {"min": 0, "max": 9, "seconds": 30, "coldStartSeconds": 4000},
            }],
        },
        {
            "models": ["a", "b"], "image": "registry.example/unfuse:2", "imagePullSecrets": ["registry"],
            "scheduler": {"replicas": 3, "queue": {"secret": "redis"}, "args": ["--order=fair"]},
            "results": {"url": "s3://b"}, "keysSecret": "wire", "apiKeysSecret": "api", "envSecrets": ["s3"],
            "modelCache": {"claim": "models"},
            "autoscaling": {"minReplicas": 0, "maxReplicas": 9, "coldStartSeconds": 4000},
        },
        {
            "role": "denoiser", "replicas": 4, "model": {"path": "a", "component": "transformer"}, "stepSeconds": 30,
            "args": ["--max-batch=2"], "sharedMemory": "16Gi", "startSeconds": 60, "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}], "runtimeClassName": "nvidia",
            "resources": {"limits": {"nvidia.com/gpu": 8}},
        },
    ),
]  # fmt: skip


@cache
def both(case: int) -> tuple[Made, Made]:
    """What the chart makes of a release u, and the operator of a pipeline u with a pool u-all."""
    values, pipeline, pool = SAME[case]
    stages = [{"name": "all", "pool": "u-all", "role": pool["role"]}]
    body = {"metadata": {"name": "u"}, "spec": pipeline | {"stages": stages}}
    spec = {"image": "unfuse:0.1.0"} | read(completed(body, SCHEMAS["diffusionpipelines"]))
    its = read(completed({"metadata": {"name": "u-all"}, "spec": pool}, SCHEMAS["diffusionpools"]))
    ours = objects.of_pipeline("u", spec, EVERY) + objects.of_pool("u-all", "default", its, {"u": spec}, EVERY)
    return made(values), Made(ours)


def sorted_args(pod: Object) -> Object:
    """A pod whose flags are in one order, and without what the chart alone has: an account."""
    pod = {key: value for key, value in pod.items() if key != "serviceAccountName"}
    first = pod["containers"][0]
    verb, *flags = first["args"]
    return pod | {"containers": [first | {"args": [verb, *sorted(flags)]}]}


def without_labels(value: Any) -> Any:
    """A part of an object, without the labels by which others are found."""
    if isinstance(value, dict):
        skipped = {"matchLabels", "matchExpressions", "labels"}
        return {key: without_labels(one) for key, one in value.items() if key not in skipped}
    return [without_labels(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", range(len(SAME)))
@pytest.mark.parametrize("workload", ["u-scheduler", "u-all"])
def test_pods_are_those_of_the_chart(case: int, workload: str) -> None:
    """Commands, variables, probes, rights, ports, volumes, time to end: all that a pod has but its account."""
    chart, ours = both(case)
    one, other = (without_labels(sorted_args(its.pods()[workload]["spec"])) for its in (chart, ours))
    assert other == one


@pytest.mark.parametrize("case", range(len(SAME)))
def test_so_is_what_stands_around_them(case: int) -> None:
    chart, ours = both(case)
    assert ours.of("ConfigMap")["u"]["data"] == chart.of("ConfigMap")["u"]["data"]
    ports = [{name: one["spec"]["ports"] for name, one in its.of("Service").items()} for its in (chart, ours)]
    assert (ports[1]["u"], ports[1]["u-scheduler"]) == (ports[0]["u"], ports[0]["u-scheduler"])
    assert ports[1]["u-all-workers"] == ports[0]["u-workers"]
    for kind, name, own in (
        ("PodDisruptionBudget", "u-scheduler", "u-scheduler"), ("PodDisruptionBudget", "u-all", "u-all-pool"),
        ("NetworkPolicy", "u-scheduler", "u-scheduler"), ("NetworkPolicy", "u-workers", "u-all-pool"),
        ("ServiceMonitor", "u", "u"),
    ):  # fmt: skip
        assert without_labels(ours.of(kind)[own]["spec"]) == without_labels(chart.of(kind)[name]["spec"])
    for kind in ("Deployment", "StatefulSet"):
        for name, one in ours.of(kind).items():
            theirs = chart.of(kind)[name]["spec"]
            for key in ("replicas", "strategy", "podManagementPolicy"):
                assert key not in theirs or one["spec"].get(key) == theirs[key]


def test_a_pool_is_scaled_by_the_same_question() -> None:
    """The chart's writes to the StatefulSet, the operator's to the pool."""
    chart, ours = (its.of("ScaledObject")["u-all"]["spec"] for its in both(1))
    (theirs,), (own,) = chart.pop("triggers"), ours.pop("triggers")
    assert own["metadata"] == theirs["metadata"] and own["metricType"] == "AverageValue"
    assert chart.pop("scaleTargetRef") != ours.pop("scaleTargetRef")
    assert ours == chart


def manifest() -> Made:
    return Made([*yaml.safe_load_all(MANIFEST.read_text())])


def peers() -> Object:
    """The definition of that by which operators know of each other."""
    return dict(yaml.safe_load((MANIFEST.parent / "crds" / "clusterkopfpeerings.yaml").read_text()))


@pytest.mark.parametrize("release", ["1.30.0", "1.34.0", "1.37.0"])
def test_kubernetes_takes_the_manifest(release: str) -> None:
    """And can take all of it at one time: nothing in it is of a kind that something else in it defines."""
    for one in (*manifest().objects, peers()):
        kubernetes_validate.validate(one, release, strict=True)
    assert not manifest().of("CustomResourceDefinition")


def test_the_operators_pod_may_do_little_and_its_command_parses() -> None:
    spec = manifest().pods()["unfuse-operator"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert known([variable["name"] for variable in container["env"]])
    parsed(container["args"])
    its, names = operator.PEERING, peers()["spec"]["names"]
    assert (its["kind"], operator.PEERS) == (names["kind"], f"/apis/{its['apiVersion']}/{names['plural']}")


def allowed() -> dict[str, set[str]]:
    (role,) = manifest().of("ClusterRole").values()
    return {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}


def test_it_may_do_what_it_does_and_reads_no_secret() -> None:
    rights = allowed()
    applied = {one["kind"] for case in range(len(SAME)) for one in both(case)[1].objects} | {"PersistentVolumeClaim"}
    for kind in applied:
        assert rights[plural(kind)] >= {"get", "create", "patch"}, kind
    for resource in (*operator.OWNED, "diffusionpipelines", "diffusionpools"):
        assert rights[resource] >= {"get", "list", "watch"}, resource
    assert rights["secrets"] == rights["events"] == {"create"} and rights["pods"] == {"list"}
    assert rights["diffusionpools"] >= {"create", "patch", "delete"} and "patch" not in rights["diffusionpipelines"]
    assert rights["diffusionpools/status"] == rights["diffusionpipelines/status"] == {"patch"}
    deleting = {resource for resource, verbs in rights.items() if "delete" in verbs}
    assert deleting == {"diffusionpools", "scaledobjects"}
    assert rights["clusterkopfpeerings"] == {"get", "list", "watch", "create", "patch"}
    assert "*" not in str(rights)
    kinds = {plural(kind) for its in (KINDS | MORE).values() for kind in its}
    own = {"diffusionpools/status", "diffusionpipelines/status", "clusterkopfpeerings"}
    assert rights.keys() <= kinds | own, "there is a right for what is never asked for"


def test_verbs_that_it_asks_with_are_those_that_it_may_use() -> None:
    """No right is for PUT, and the only deletes are of pools and of what scales them."""
    source = "".join(Path(module.__file__ or "").read_text() for module in (cluster, reconcile))
    verbs = [
        node.args[0].value for node in ast.walk(ast.parse(Path(reconcile.__file__).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "ask"
        and isinstance(node.args[0], ast.Constant)
    ]  # fmt: skip
    assert set(verbs) == {"GET", "PATCH", "DELETE"} and not re.search("PUT", source)


def of_chart(**values: object) -> Made:
    """The operator that the chart installs."""
    return made({"operator": {"enabled": True} | values, "serving": {"enabled": False}, "image": IMAGE})


@pytest.mark.parametrize("release", ["1.30.0", "1.37.0"])
def test_the_chart_installs_the_operator_of_the_manifest(release: str) -> None:
    """Its rights, and its pod but for the image; all of it bound together, in the namespace of the release."""
    theirs, ours = of_chart(), manifest()
    for one in theirs.objects:
        kubernetes_validate.validate(one, release, strict=True)
        assert one["metadata"]["name"] == "u-operator"
        assert one["metadata"].get("namespace", "default") == "default"
    (role,), (rights,) = theirs.of("ClusterRole").values(), ours.of("ClusterRole").values()
    assert role["rules"] == rights["rules"]
    (binding,) = theirs.of("ClusterRoleBinding").values()
    assert binding["roleRef"]["name"] == "u-operator"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "u-operator", "namespace": "default"}]
    pod, own = theirs.pods()["u-operator"], ours.pods()["unfuse-operator"]
    (deployment,) = theirs.of("Deployment").values()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    image = "registry.example/unfuse:2"
    (container,), (expected,) = pod["spec"]["containers"], own["spec"]["containers"]
    expected |= {"image": image, "args": ["operator", f"--image={image}", "--health=0.0.0.0:8003"]}
    assert container == expected
    assert pod["spec"] == own["spec"] | {"serviceAccountName": "u-operator", "containers": [expected]}


def test_the_charts_operator_works_for_the_namespaces_that_it_is_given() -> None:
    (container,) = of_chart(namespaces=["pictures", "films"]).pods()["u-operator"]["spec"]["containers"]
    assert container["args"][-2:] == ["--namespace=pictures", "--namespace=films"]
    parsed(container["args"])
