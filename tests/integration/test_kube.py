"""On a real API server: what is applied becomes pods and pictures, sleeps, is woken, and leaves nothing behind.

What it is, and what stands in for the rest of a cluster, is in tests/integration/kube.py.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import yaml
from PIL import Image

from tests.integration.kube import Kube, Kubelet, answers, named
from tests.integration.test_chart_runs import seconds
from tools.helm import CHART, Object, packed
from tools.redis_server import RedisServer
from tools.server import family_of, until

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
KEDA: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "scaledobjects.keda.sh"},
    "spec": {
        "group": "keda.sh",
        "scope": "Namespaced",
        "names": {"kind": "ScaledObject", "plural": "scaledobjects", "singular": "scaledobject"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}
PIPELINE: Object = {
    "apiVersion": "unfuse.dev/v1alpha1",
    "kind": "DiffusionPipeline",
    "metadata": {"name": "shapes"},
    "spec": {
        "model": "unfuse/shapes",
        "scheduler": {"replicas": 2, "queueBackend": "redis"},
        "stages": [
            {"name": "text-encoding", "pool": "shapes-text"},
            {"name": "denoising", "pool": "shapes-rest", "role": "denoiser", "resources": {"requests": {"cpu": 1}}},
            {"name": "vae-decoding", "pool": "shapes-rest", "role": "decoder"},
        ],
        "autoscaling": {"minReplicas": 0, "maxReplicas": 2},
    },
}
ALL = (
    "dp,dpool,deployments,replicasets,statefulsets,controllerrevisions,pods,configmaps,secrets,services,endpoints,"
    "poddisruptionbudgets,networkpolicies,persistentvolumeclaims,scaledobjects"
)
DEFINED = ("diffusionpipelines.unfuse.dev", "diffusionpools.unfuse.dev", "clusterkopfpeerings.kopf.dev")
LEFT = ALL.replace("dp,dpool,", "serviceaccounts,roles,rolebindings,")
LEFT = LEFT.replace("persistentvolumeclaims,scaledobjects", "jobs")


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    with tempfile.TemporaryDirectory(prefix="kube-") as folder:
        kube = Kube(Path(folder))
        try:
            kube.kubectl("apply", "-f", "-", text=json.dumps(KEDA))
            yield kube
        finally:
            kube.close()


@contextmanager
def nodes(kube: Kube, namespace: str, folder: Path, network: int) -> Iterator[Kubelet]:
    """A namespace, and what runs its pods; what they said is printed if anything fails."""
    kube.kubectl("create", "namespace", namespace)
    (folder / "node").mkdir()
    node = Kubelet(kube, namespace, folder / "node", network)
    try:
        yield node
    except BaseException:
        node.close()
        print(*node.logs, *node.failed, sep="\n")
        print(kube.kubectl("-n", namespace, "get", "pods,events", "-o", "wide"))
        with suppress(AssertionError):  # where nobody defined them yet
            print(kube.kubectl("-n", namespace, "get", "dp,dpool", "-o", "wide"))
        raise
    node.close()


@contextmanager
def by_manifest(kube: Kube) -> Iterator[str]:
    """The operator, installed before the definitions are there. Yields its namespace."""
    kube.kubectl("apply", "-f", str(DEPLOY / "operator.yaml"))
    try:
        yield "unfuse"
    finally:
        kube.kubectl("delete", "--wait=false", "-f", str(DEPLOY / "operator.yaml"))


@contextmanager
def by_chart(kube: Kube) -> Iterator[str]:
    """The operator of the whole cluster, as the chart has it, of which nothing is left. Yields its namespace."""
    alone = ("--set=operator.clusterWide=true", "--set=serving.enabled=false")
    helm = partial(kube.kubectl, "--namespace=by-chart", program="helm")
    print(helm("install", "o", str(CHART), "--create-namespace", *alone))
    yield "by-chart"
    helm("uninstall", "o")
    left = partial(kube.kubectl, "-n", "by-chart", "get", f"{LEFT},clusterroles,clusterrolebindings", "-o", "name")
    until(lambda: "unfuse-" not in left(), "all of the operator to be gone")


@contextmanager
def operating(
    kube: Kube,
    folder: Path,
    node: Kubelet,
    installed: Callable[[Kube], AbstractContextManager[str]] = by_manifest,
) -> Iterator[None]:
    """The operator, with the rights of the account that was installed for it."""
    with installed(kube) as namespace:
        token = kube.kubectl("-n", namespace, "create", "token", "unfuse-operator").strip()
        with operator(kube, folder, node, token):
            yield


@contextmanager
def operator(kube: Kube, folder: Path, node: Kubelet, token: str) -> Iterator[None]:
    """The operator as a process, of whoever has this token."""
    own = {"KUBECONFIG": str(kube.config("operator", token)), "HOME": str(folder), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "unfuse", "operator", "--image=unfuse:0.1.0"]
    with named(node) as names, (log := folder / "operator.log").open("wb") as file:
        own["http_proxy"] = names
        process = subprocess.Popen(command, env=own, stdout=file, stderr=file, cwd=Path(__file__).parents[2])
        try:
            kube.kubectl("apply", "--validate=false", "-f", str(DEPLOY / "crds"))
            yield
            assert process.poll() is None
        except BaseException:
            print(log.read_text()[-6000:])
            raise
        finally:
            process.terminate()
            process.wait()


def found(kube: Kube, namespace: str, what: str) -> list[Any]:
    return list(json.loads(kube.kubectl("-n", namespace, "get", what, "-o", "json"))["items"])


def typed(kube: Kube, line: str) -> str:
    """What a line of the chart's notes prints when it is typed into a shell."""
    own = {"KUBECONFIG": str(kube.admin), "HOME": str(kube.admin.parent)}
    own["PATH"] = f"{packed('kubectl').parent}:{os.environ['PATH']}"
    return subprocess.run(["sh", "-c", line], env=own, capture_output=True, text=True, check=True).stdout


def is_ready(kube: Kube, namespace: str) -> bool:
    """Whether all pipelines and pools say that they are, and nothing is wrong."""
    ones = found(kube, namespace, "dp,dpool")
    said = [{one["type"]: one["status"] for one in body.get("status", {}).get("conditions", [])} for body in ones]
    wanted = {"Ready": "True", "Progressing": "False", "Degraded": "False"}
    return len(ones) > 1 and said == [wanted] * len(ones)


def picture(at: str, key: str) -> tuple[int, int]:
    """The size of a picture that the `openai` client is given."""
    with openai.OpenAI(base_url=f"http://{at}:8000/v1", api_key=key, max_retries=0) as ai:
        (one,) = ai.images.generate(model="unfuse/shapes", prompt="a red circle", size="64x64").data or []
    with Image.open(io.BytesIO(b64decode(one.b64_json or ""))) as shown:
        return shown.size


def test_pipeline_scales_to_zero_and_back_and_is_deleted_completely(kube: Kube, tmp_path: Path) -> None:
    """`kubectl apply` → operator → pods → a picture; `kubectl scale` to 0, and a request waits until its ScaledObject,
    asked as KEDA would, has the pool scaled up; to 2, and to 1 again while the second works and the first does not; a
    node is gone with its worker; `kubectl delete`, and all that was made is gone."""
    redis = RedisServer(tmp_path)
    try:
        with nodes(kube, "pictures", tmp_path, os.getpid() % 100) as node, operating(kube, tmp_path, node):
            before = kube.kubectl("-n", "pictures", "get", ALL, "-o", "name")
            spec = PIPELINE["spec"] | {"scheduler": PIPELINE["spec"]["scheduler"] | {"queue": {"url": redis.url}}}
            kube.kubectl("-n", "pictures", "apply", "-f", "-", text=json.dumps(PIPELINE | {"spec": spec}))
            until(lambda: is_ready(kube, "pictures"), "all conditions to be Ready")
            print(kube.kubectl("-n", "pictures", "get", "dp,dpool,pods"))
            at, key = node.addresses["shapes"], node.secret("shapes-api", "key").decode()
            assert picture(at, key) == (64, 64)
            own = {"authorization": f"Bearer {key}"}
            with httpx2.Client(base_url=f"http://{at}:8000", headers=own, timeout=120) as client:
                sleep_and_wake(kube, node, client)
                shrink(kube, node, client)
                lose(kube, node, client)
            kube.kubectl("-n", "pictures", "delete", "dp", "shapes")
            until(lambda: kube.kubectl("-n", "pictures", "get", ALL, "-o", "name") == before, "all to be gone")
            assert node.pods == [] and node.failed == []
    finally:
        redis.stop()


def sleep_and_wake(kube: Kube, node: Kubelet, client: httpx2.Client) -> None:
    """The pool of denoisers goes to 0; what asks it is `cold_start`, and is made once its ScaledObject was heeded."""
    kube.kubectl("-n", "pictures", "scale", "dpool/shapes-rest", "--replicas=0")
    until(lambda: {pod.called for pod in node.pods if "rest" in pod.called} == set(), "the workers to go")
    until(
        lambda: "scaled_to_zero" in {one["state"] for one in client.get("/v1/pools").json()["data"]},
        "the pool to sleep",
    )
    body = {"prompt": "a blue square", "model": "unfuse/shapes"}
    asked = client.post("/v1/images/generations", json=body, headers={"prefer": "respond-async"}).json()
    assert asked["state"] == "cold_start"
    (scaled,) = (one for one in found(kube, "pictures", "scaledobjects") if one["metadata"]["name"] == "shapes-rest")
    target, (trigger,) = scaled["spec"]["scaleTargetRef"], scaled["spec"]["triggers"]
    assert target == {"apiVersion": "unfuse.dev/v1alpha1", "kind": "DiffusionPool", "name": "shapes-rest"}
    query = trigger["metadata"]["query"]
    schedulers = [pod for pod in node.pods if "scheduler" in pod.called]
    until(lambda: len(schedulers) == 2 and all(seconds(pod, query) > 0 for pod in schedulers), "work to be seen")
    kube.kubectl("-n", "pictures", "scale", "dpool/shapes-rest", "--replicas=1")
    until(lambda: client.get(f"/v1/requests/{asked['id']}").json()["status"] == "completed", "the picture")
    until(lambda: is_ready(kube, "pictures"), "all to be Ready again")


def asked(client: httpx2.Client, size: str = "256x256", at: str = "") -> str:
    """A request that takes a while, and is not waited for. Those of two sizes share no forward."""
    body = {"prompt": "a blue square", "model": "unfuse/shapes", "num_inference_steps": 100, "num_frames": 17}
    answer = client.post(f"{at}/v1/videos", json=body | {"size": size})
    assert answer.is_success, answer.text
    return str(answer.json()["id"])


def denoised(client: httpx2.Client, request: str) -> Any:
    """How the denoising of a request is."""
    (stage,) = (one for one in client.get(f"/v1/requests/{request}").json()["stages"] if "denoise" in one["name"])
    return stage


def workers(client: httpx2.Client, what: str) -> dict[str, int]:
    """What each worker says of itself, such as how many tasks it holds, by its pod."""
    return {one["node"]: one[what] for one in client.get("/v1/workers").json()["data"] if one["healthy"]}


def worker_of(client: httpx2.Client, request: str) -> str:
    """The pod where its denoising runs, or ran."""
    by = {one["id"]: one["node"] for one in client.get("/v1/workers").json()["data"]}
    return str(by.get(denoised(client, request)["worker"], ""))


def completed(client: httpx2.Client, request: str) -> bool:
    return bool(client.get(f"/v1/requests/{request}").json()["status"] == "completed")


def shrink(kube: Kube, node: Kubelet, client: httpx2.Client) -> None:
    """A pool of two: the second works, the first does not. The second goes when it has ended that, and nothing sooner;
    `kubectl get` says why."""
    few_slots = '--patch={"spec":{"replicas":2,"args":["--max-batch=1"]}}'  # or the first may take all that there is
    kube.kubectl("-n", "pictures", "patch", "dpool/shapes-rest", "--type=merge", few_slots)
    two = {"shapes-rest-0": 2, "shapes-rest-1": 2}
    until(lambda: workers(client, "slots").items() >= two.items() and is_ready(kube, "pictures"), "both workers")
    schedulers = [f"http://{pod.address}:8000" for pod in node.pods if "scheduler" in pod.called]
    sizes = ("256x256", "256x224", "224x256", "224x224")
    every = [asked(client, size, at) for size, at in zip(sizes, 2 * schedulers, strict=True)]
    until(lambda: any(worker_of(client, one) == "shapes-rest-1" for one in every), "the second to work")
    (pod,) = (one for one in node.pods if one.called == "shapes-rest-1")
    assert pod.process
    compute = family_of(pod.process.pid)[1:]
    for one in compute:
        one.suspend()  # so that it is busy for as long as that is looked at
    (second, *_) = (one for one in every if worker_of(client, one) == "shapes-rest-1")
    for other in {*every} - {second}:
        client.post(f"/v1/requests/{other}/cancel")
    until(
        lambda: (workers(client, "leased")["shapes-rest-0"], denoised(client, second)["status"]) == (0, "leased"),
        "the first to idle",
    )
    kube.kubectl("-n", "pictures", "scale", "dpool/shapes-rest", "--replicas=1")
    progress = '-o=jsonpath={.status.conditions[?(@.type=="Progressing")].message}'
    why = "scale-down from 2 to 1 workers waits: shapes-rest-1 finishes its tasks while others are idle"
    until(lambda: kube.kubectl("-n", "pictures", "get", "dpool/shapes-rest", progress) == why, "the operator to wait")
    print(kube.kubectl("-n", "pictures", "get", "dpool/shapes-rest", "-o=jsonpath={.status}"))
    count = partial(kube.kubectl, "-n", "pictures", "get", "statefulset/shapes-rest", "-o=jsonpath={.spec.replicas}")
    assert (count(), denoised(client, second)["status"]) == ("2", "leased")
    for one in compute:
        one.resume()
    until(lambda: count() == "1", "the second to be let go")
    stage = denoised(client, second)
    assert (stage["status"], stage["attempt"]) == ("done", 1)
    until(lambda: completed(client, second), "its picture")
    until(lambda: "shapes-rest-1" not in kube.kubectl("-n", "pictures", "get", "pods"), "its end")
    until(lambda: is_ready(kube, "pictures"), "all to be as wanted")


def lose(kube: Kube, node: Kubelet, client: httpx2.Client) -> None:
    """The node of a worker is gone in the midst of a request: its processes have no last word, and its pod is deleted
    as a cluster deletes those of a node that it gave up. The next pod of that name ends the request."""
    request = asked(client)
    until(lambda: denoised(client, request)["status"] == "leased", "it to work")
    node.lost.append("shapes-rest-0")
    until(lambda: not is_ready(kube, "pictures"), "that to be seen")
    until(lambda: completed(client, request), "the picture")
    assert denoised(client, request)["attempt"] > 1
    until(lambda: is_ready(kube, "pictures"), "all to be as wanted")


def test_invalid_pipelines_are_rejected_or_reported_as_degraded(kube: Kube, tmp_path: Path) -> None:
    """A model that is not there, of a name that would be more than one anywhere else; a name of which none can be made,
    which this server's rules let in; a field that there is not; one of another kind. The operator is of the chart."""
    alone = {"scheduler": {"replicas": 1, "queueBackend": "memory"}}
    name = 'no/such "model"\n- --port=1 {{ .Values }} $name'
    with nodes(kube, "wrong", tmp_path, 200 + os.getpid() % 50) as node, operating(kube, tmp_path, node, by_chart):
        apply = partial(kube.kubectl, "-n", "wrong", "apply", "-f", "-")

        def degraded(which: str) -> str:
            (one,) = (one for one in found(kube, "wrong", "dp") if one["metadata"]["name"] == which)
            said = {one["type"]: one for one in one.get("status", {}).get("conditions", [])}
            return str(said["Degraded"]["message"]) if said.get("Degraded", {}).get("status") == "True" else ""

        def pipeline(which: str, spec: Object) -> str:
            return json.dumps(PIPELINE | {"metadata": {"name": which}, "spec": spec})

        until(lambda: "unfuse.dev" in kube.kubectl("get", "--raw", "/openapi/v2"), "fields to be known by name")
        for spec in (alone | {"model": "a", "modle": "b"}, alone | {"model": ["a"]}, {"model": "a"}):
            with pytest.raises(AssertionError, match=r"modle|spec\.model|scheduler"):
                apply(text=pipeline("refused", spec))
        apply(text=pipeline("long" * 12, alone | {"model": "unfuse/shapes"}))
        apply(text=pipeline("lost", alone | {"model": name}))
        until(lambda: "at most 40" in degraded("long" * 12), "a name to be said to be too long")
        until(lambda: "no/such" in degraded("lost"), "a model to be said to be missing")
        assert "is valid" not in degraded("lost")
        until(lambda: len(found(kube, "wrong", "pods")) == 2, "its worker, which would wait for it")
        print(degraded("lost"))
        (pod,) = (one for one in found(kube, "wrong", "pods") if "scheduler" in one["metadata"]["name"])
        assert pod["spec"]["containers"][0]["args"][1] == name
        assert {one["metadata"]["name"] for one in found(kube, "wrong", "deployments")} == {"lost-scheduler"}
        kube.kubectl("-n", "wrong", "delete", "dp", "--all")
        until(lambda: not found(kube, "wrong", "pods") and not found(kube, "wrong", "statefulsets"), "all to be gone")


def test_helm_install_test_upgrade_rollback_and_uninstall_work(kube: Kube, tmp_path: Path) -> None:
    """`helm install` with no values → definitions, an operator, which has rights in its namespace alone, and pods → a
    picture, for the key that the notes show; `helm test`: another; `helm upgrade`, `helm rollback`; `helm uninstall`,
    which ends the operator too, leaves the claim of Redis alone, which the next installation goes on with; and what
    the notes say about that claim takes it away. Another release needs no operator of its own, and is refused one."""
    kube.kubectl("delete", "crd", "--ignore-not-found", *DEFINED)  # which an operator of another test came with
    with nodes(kube, "chart", tmp_path, 100 + os.getpid() % 100) as node:
        before = kube.kubectl("-n", "chart", "get", LEFT, "-o", "name")
        helm = partial(kube.kubectl, "--namespace=chart", program="helm")

        def key(notes: str) -> str:
            (export,) = re.findall(r"^  (export UNFUSE_API_KEY=.*)$", notes, re.MULTILINE)
            return typed(kube, f'{export}; printf %s "$UNFUSE_API_KEY"')

        def serve(pods: int) -> None:
            until(lambda: len(node.pods) == pods and all(map(answers, node.pods)), f"{pods} pods to be ready")

        print(notes := helm("install", "u", str(CHART)))
        assert {*DEFINED} <= {one["metadata"]["name"] for one in found(kube, "chart", "crd")}
        serve(pods=5)
        assert picture(node.addresses["u"], first := key(notes)) == (64, 64)
        (look,) = re.findall(r"^  (kubectl .* get diffusionpipelines.*)$", notes, re.MULTILINE)
        until(lambda: typed(kube, look).count(" 1/1 ") == 5, "all pods to be shown as ready")
        until(lambda: is_ready(kube, "chart"), "pipeline and pool to be Ready")
        assert "Succeeded" in helm("test", "u", "--timeout=10m")
        with pytest.raises(AssertionError, match="unfuse-operator.*exists and cannot be imported"):
            helm("install", "v", str(CHART))
        three = yaml.safe_dump({"pipeline": {"scheduler": {"replicas": 3}}})
        notes = helm("upgrade", "u", str(CHART), "--values=-", text=three)
        serve(pods=6)
        assert key(notes) == first and picture(node.addresses["u"], first) == (64, 64)
        helm("rollback", "u", "1")
        serve(pods=5)

        def uninstall() -> None:
            helm("uninstall", "u")
            until(lambda: not found(kube, "chart", "dp,dpool"), "pipeline and pool to be gone")
            until(lambda: kube.kubectl("-n", "chart", "get", LEFT, "-o", "name") == before, "all but claims to be gone")
            until(lambda: not node.pods, "all pods to end")
            assert {one["metadata"]["name"] for one in found(kube, "chart", "pvc")} == {"data-u-redis-0"}

        uninstall()
        notes = helm("install", "u", str(CHART))
        serve(pods=5)
        assert picture(node.addresses["u"], key(notes)) == (64, 64)
        uninstall()
        (delete,) = re.findall(r"delete the claim: (kubectl .*)$", notes, re.MULTILINE)
        typed(kube, delete)
        assert not found(kube, "chart", "pvc")
        assert node.failed == []
