"""On a real API server: what is applied becomes pods and pictures, sleeps, is woken, and leaves nothing behind.

What it is, and what stands in for the rest of a cluster, is in tests/integration/kube.py.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import yaml
from PIL import Image

from tests.integration.kube import Kube, Kubelet, answers
from tests.integration.test_chart_runs import seconds
from tools.helm import CHART, Object
from tools.redis_server import RedisServer
from tools.server import until
from unfuse.wire.keys import make

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
KEDA: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "scaledobjects.keda.sh"},
    "spec": {
        "group": "keda.sh", "scope": "Namespaced",
        "names": {"kind": "ScaledObject", "plural": "scaledobjects", "singular": "scaledobject"},
        "versions": [{"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {
            "type": "object", "x-kubernetes-preserve-unknown-fields": True,
        }}}],
    },
}  # fmt: skip
PIPELINE: Object = {
    "apiVersion": "unfuse.dev/v1alpha1",
    "kind": "DiffusionPipeline",
    "metadata": {"name": "shapes"},
    "spec": {
        "model": "unfuse/shapes",
        "scheduler": {"replicas": 2, "queueBackend": "redis"},
        "stages": [
            {"name": "text-encoding", "pool": "shapes-text"},
            {"name": "denoising", "pool": "shapes-rest", "role": "denoiser"},
            {"name": "vae-decoding", "pool": "shapes-rest", "role": "decoder"},
        ],
        "autoscaling": {"minReplicas": 0, "maxReplicas": 2},
    },
}  # fmt: skip
ALL = (
    "dp,dpool,deployments,replicasets,statefulsets,controllerrevisions,pods,configmaps,secrets,services,endpoints,"
    "poddisruptionbudgets,networkpolicies,persistentvolumeclaims,scaledobjects"
)
LEFT = ALL.replace("dp,dpool,", "serviceaccounts,").replace("persistentvolumeclaims,scaledobjects", "jobs")
WORKERS = [{"name": "every", "role": "all", "replicas": 1, "arena": "64MiB"}]


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    with tempfile.TemporaryDirectory(prefix="kube-") as folder:
        kube = Kube(Path(folder))
        try:
            kube.kubectl("apply", "--validate=false", "-f", str(DEPLOY / "crds"))
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
        print(kube.kubectl("-n", namespace, "get", "dp,dpool,pods,events", "-o", "wide"))
        raise
    node.close()


@contextmanager
def operating(kube: Kube, folder: Path) -> Iterator[None]:
    """The operator of the manifest, with its account's own rights."""
    with pytest.raises(AssertionError, match='no matches for kind "ClusterKopfPeering"'):
        kube.kubectl("apply", "-f", str(DEPLOY / "operator.yaml"))
    kube.kubectl("wait", "--for=condition=established", "crd/clusterkopfpeerings.kopf.dev")
    kube.kubectl("apply", "-f", str(DEPLOY / "operator.yaml"))  # once more, as its first lines say
    token = kube.kubectl("-n", "unfuse", "create", "token", "unfuse-operator").strip()
    own = {"KUBECONFIG": str(kube.config("operator", token)), "HOME": str(folder), "PATH": os.environ["PATH"]}
    with (log := folder / "operator.log").open("wb") as file:
        command = [sys.executable, "-m", "unfuse", "operator", "--image=unfuse:0.1.0"]
        process = subprocess.Popen(command, env=own, stdout=file, stderr=file, cwd=Path(__file__).parents[2])
    try:
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


def test_a_pipeline_is_served_sleeps_is_woken_and_leaves_nothing_behind(kube: Kube, tmp_path: Path) -> None:
    """`kubectl apply` → operator → pods → a picture; `kubectl scale` to 0, and a request waits until its ScaledObject,
    asked as KEDA would, has the pool scaled up; `kubectl delete`, and all that was made is gone."""
    redis = RedisServer(tmp_path)
    try:
        with nodes(kube, "pictures", tmp_path, os.getpid() % 100) as node, operating(kube, tmp_path):
            before = kube.kubectl("-n", "pictures", "get", ALL, "-o", "name")
            spec = PIPELINE["spec"] | {"scheduler": PIPELINE["spec"]["scheduler"] | {"queue": {"url": redis.url}}}
            kube.kubectl("-n", "pictures", "apply", "-f", "-", text=json.dumps(PIPELINE | {"spec": spec}))
            until(lambda: is_ready(kube, "pictures"), "all conditions to be Ready")
            print(kube.kubectl("-n", "pictures", "get", "dp,dpool,pods"))
            at, key = node.addresses["shapes"], node.secret("shapes-api", "key").decode()
            assert picture(at, key) == (64, 64)
            with httpx2.Client(base_url=f"http://{at}:8000", headers={"authorization": f"Bearer {key}"}) as client:
                sleep_and_wake(kube, node, client)
            kube.kubectl("-n", "pictures", "delete", "dp", "shapes")
            until(lambda: kube.kubectl("-n", "pictures", "get", ALL, "-o", "name") == before, "all to be gone")
            assert node.pods == [] and node.failed == []
    finally:
        redis.stop()


def sleep_and_wake(kube: Kube, node: Kubelet, client: httpx2.Client) -> None:
    """The pool of denoisers goes to 0; what asks it is `waking`, and is made once its ScaledObject was heeded."""
    kube.kubectl("-n", "pictures", "scale", "dpool/shapes-rest", "--replicas=0")
    until(lambda: {pod.called for pod in node.pods if "rest" in pod.called} == set(), "the workers to go")
    until(lambda: "asleep" in {one["state"] for one in client.get("/v1/pools").json()["data"]}, "the pool to sleep")
    body = {"prompt": "a blue square", "model": "unfuse/shapes"}
    asked = client.post("/v1/images/generations", json=body, headers={"prefer": "respond-async"}).json()
    assert asked["state"] == "waking"
    (scaled,) = (one for one in found(kube, "pictures", "scaledobjects") if one["metadata"]["name"] == "shapes-rest")
    target, (trigger,) = scaled["spec"]["scaleTargetRef"], scaled["spec"]["triggers"]
    assert target == {"apiVersion": "unfuse.dev/v1alpha1", "kind": "DiffusionPool", "name": "shapes-rest"}
    query = trigger["metadata"]["query"]
    schedulers = [pod for pod in node.pods if "scheduler" in pod.called]
    until(lambda: len(schedulers) == 2 and all(seconds(pod, query) > 0 for pod in schedulers), "work to be seen")
    kube.kubectl("-n", "pictures", "scale", "dpool/shapes-rest", "--replicas=1")
    until(lambda: client.get(f"/v1/requests/{asked['id']}").json()["status"] == "completed", "the picture")
    until(lambda: is_ready(kube, "pictures"), "all to be Ready again")


def test_the_chart_is_installed_tested_and_taken_away(kube: Kube, tmp_path: Path) -> None:
    """`helm install` with a Redis → pods → a picture; `helm test`: another; `helm uninstall` leaves claims alone."""
    make(keys := tmp_path / "keys")
    values = {"redis": {"trial": True}, "wireKeys": {"existingSecret": "wire"}, "workers": WORKERS}
    with nodes(kube, "chart", tmp_path, 100 + os.getpid() % 100) as node:
        kube.kubectl("-n", "chart", "create", "secret", "generic", "wire", f"--from-file={keys}")
        before = kube.kubectl("-n", "chart", "get", LEFT, "-o", "name")
        helm = partial(kube.kubectl, "--namespace=chart", program="helm")
        print(helm("install", "u", str(CHART), "--values=-", text=yaml.safe_dump(values)))
        until(lambda: len(node.pods) == 4 and all(map(answers, node.pods)), "all pods to be ready")
        assert picture(node.addresses["u"], node.secret("u-api", "key").decode()) == (64, 64)
        assert "Succeeded" in helm("test", "u", "--timeout=10m")
        helm("upgrade", "u", str(CHART), "--values=-", text=yaml.safe_dump(values | {"scheduler": {"replicas": 3}}))
        until(lambda: len(node.pods) == 5 and all(map(answers, node.pods)), "another scheduler")
        assert picture(node.addresses["u"], node.secret("u-api", "key").decode()) == (64, 64), "the key is kept"
        helm("uninstall", "u")
        until(lambda: kube.kubectl("-n", "chart", "get", LEFT, "-o", "name") == before, "all but claims to be gone")
        assert {one["metadata"]["name"] for one in found(kube, "chart", "pvc")} == {"u-results", "data-u-redis-0"}
