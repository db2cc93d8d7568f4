"""The manifest by which an operator runs, and the operator that the chart installs: their pods and rights."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.integration.operated import operated
from tests.integration.test_deploy import known, parsed
from tests.k8s.server import KINDS, MORE, plural
from tools.helm import Made, Object, made
from unfuse.k8s import cluster, operator, reconcile

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "operator.yaml"
IMAGE: Object = {"repository": "registry.example/unfuse", "tag": "2"}


def manifest() -> Made:
    return Made([*yaml.safe_load_all(MANIFEST.read_text())])


def peers() -> Object:
    """The definition of that by which operators know of each other."""
    return dict(yaml.safe_load((MANIFEST.parent / "crds" / "clusterkopfpeerings.yaml").read_text()))


@pytest.mark.parametrize("release", ["1.30.0", "1.34.0", "1.37.0"])
def test_operator_manifest_matches_the_kubernetes_schemas(release: str) -> None:
    """And can take all of it at one time: nothing in it is of a kind that something else in it defines."""
    for one in (*manifest().objects, peers()):
        kubernetes_validate.validate(one, release, strict=True)
    assert not manifest().of("CustomResourceDefinition")


def test_operator_pod_has_restricted_permissions_and_a_valid_command() -> None:
    spec = manifest().pods()["unfuse-operator"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert known([variable["name"] for variable in container["env"]])
    parsed(container["args"])
    its, names = operator.PEERING, peers()["spec"]["names"]
    assert (its["kind"], operator.PEERS) == (names["kind"], f"/apis/{its['apiVersion']}/{names['plural']}")


def allowed() -> dict[str, set[str]]:
    role = manifest().of("ClusterRole")["unfuse-operator"]
    return {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}


def test_operator_role_has_only_needed_rights_and_cannot_read_secrets() -> None:
    rights = allowed()
    scaled = {"pipeline": {"autoscaling": {"maxReplicas": 2}}}
    ours = [one for one in operated(made(scaled)).objects if "unfuse-operator" in str(one["metadata"].get("labels"))]
    applied = {one["kind"] for one in ours} - {"Secret", "ServiceAccount", "Role", "RoleBinding"}
    for kind in applied | {"PersistentVolumeClaim"}:
        assert rights[plural(kind)] >= {"get", "create", "patch"}, kind
    for resource in (*operator.OWNED, "diffusionpipelines", "diffusionpools"):
        assert rights[resource] >= {"get", "list", "watch"}, resource
    assert rights["secrets"] == rights["events"] == {"create"} and rights["pods"] == {"list"}
    assert rights["diffusionpools"] >= {"create", "patch", "delete"} and "patch" not in rights["diffusionpipelines"]
    assert rights["diffusionpools/status"] == rights["diffusionpipelines/status"] == {"patch"}
    deleting = {resource for resource, verbs in rights.items() if "delete" in verbs}
    assert deleting == {"diffusionpools", "scaledobjects", "networkpolicies", "servicemonitors"}
    assert rights["clusterkopfpeerings"] == {"get", "list", "watch", "create", "patch"}
    assert "*" not in str(rights)
    kinds = {plural(kind) for its in (KINDS | MORE).values() for kind in its}
    own = {"diffusionpools/status", "diffusionpipelines/status", "clusterkopfpeerings"}
    assert rights.keys() <= kinds | own, "there is a right for what is never asked for"


def test_operator_code_uses_only_get_patch_and_delete() -> None:
    """No right is for PUT."""
    source = "".join(Path(module.__file__ or "").read_text() for module in (cluster, reconcile))
    verbs = [
        node.args[0].value
        for node in ast.walk(ast.parse(Path(reconcile.__file__).read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "call"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert set(verbs) == {"GET", "PATCH", "DELETE"} and not re.search("PUT", source)


def of_chart(**values: object) -> Made:
    """The operator that the chart installs."""
    return made({"operator": values, "serving": {"enabled": False}, "image": IMAGE})


@pytest.mark.parametrize("wide", [False, True])
def test_chart_operator_matches_the_manifest(wide: bool) -> None:
    """In the namespace of the release, for that alone and with no rights elsewhere, or for the whole cluster."""
    theirs, ours, prefix = of_chart(clusterWide=wide), manifest(), "Cluster" * wide
    for one in theirs.objects:
        kubernetes_validate.validate(one, "1.30.0", strict=True)
        assert ("namespace" in one["metadata"]) is not one["kind"].startswith("Cluster")
    assert theirs.kinds() == {"ServiceAccount", f"{prefix}Role", f"{prefix}RoleBinding", "Deployment"}
    role, rights = theirs.of(f"{prefix}Role")["unfuse-operator"], ours.of("ClusterRole")["unfuse-operator"]
    assert role["rules"] == [rule for rule in rights["rules"] if wide or rule["apiGroups"] != ["kopf.dev"]]
    assert ("unfuse-edit" in theirs.of("ClusterRole")) is wide
    (binding,) = theirs.of(f"{prefix}RoleBinding").values()
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (f"{prefix}Role", "unfuse-operator")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "unfuse-operator", "namespace": "default"}]
    pod, own = theirs.pods()["unfuse-operator"], ours.pods()["unfuse-operator"]
    image = "registry.example/unfuse:2"
    (container,), (expected,) = pod["spec"]["containers"], own["spec"]["containers"]
    arguments = ["operator", f"--image={image}", "--health=0.0.0.0:8003", *["--namespace=default"] * (not wide)]
    expected |= {"image": image, "args": arguments}
    parsed(arguments)
    assert container == expected and pod["spec"] == own["spec"] | {"containers": [expected]}


def test_namespace_edit_role_includes_unfuse_resources() -> None:
    role = manifest().of("ClusterRole")["unfuse-edit"]
    assert "rbac.authorization.k8s.io/aggregate-to-edit" in role["metadata"]["labels"]
    (rule,) = role["rules"]
    assert rule["apiGroups"] == ["unfuse.dev"] and "diffusionpools/scale" in rule["resources"]
