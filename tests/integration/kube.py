"""A real API server with its controllers, as `tools/kube_api.sh` builds them, and a kubelet for its pods.

The server is Kubernetes 1.20. `Newer` makes up for what it lacks: it calls PodDisruptionBudgets policy/v1, and itself
1.30, and drops rules of custom resources (CEL). There are no nodes, images and scheduler: `Kubelet` binds each pod to
one node and runs it as tests/integration/kubelet.py does.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import SkipTest

import httpx2

from tests.integration.kubelet import Node, Pod, Service
from tools.addresses import free_ports
from tools.helm import Made, Object, packed
from tools.programs import program
from tools.server import all_gone, family_of, until

CACHE = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
PROGRAMS = Path(os.environ.get("KUBE_PROGRAMS") or Path(CACHE, "unfuse-kube"), "bin")
ADMIN = "admin-of-a-test"
NODE = "here"
OLD, NEW = b"policy/v1beta1", b"policy/v1"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def built(name: str) -> str:
    """Where a program of the cluster is. Raises SkipTest."""
    if not (path := PROGRAMS / name).exists():
        raise SkipTest(f"no {name} in {PROGRAMS}: sh tools/kube_api.sh")
    return str(path)


class Newer(BaseHTTPRequestHandler):
    """One request handed on to the server, and what it lacks made up for."""

    server: Front

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0))).replace(b'"policy/v1"', b'"policy/v1beta1"')
        path = re.sub(r"^/apis/policy/v1(?![a-z])", "/apis/policy/v1beta1", self.path)
        if body and path.startswith(DEFINITIONS):
            body = json.dumps(without_rules(json.loads(body))).encode()
        headers = {key.lower(): value for key, value in self.headers.items()}
        headers |= {"content-length": str(len(body)), "accept-encoding": "identity"}
        accepted = [one for one in headers.get("accept", "*/*").split(",") if "protobuf" not in one]
        if is_said := not path.startswith("/openapi"):  # which kubectl reads as protobuf
            headers["accept"] = ",".join(accepted) or "application/json"
        asked = HTTPSConnection("127.0.0.1", self.server.behind, context=self.server.trusted)
        with suppress(OSError), closing(asked):  # whoever asked, or the server, may have gone
            asked.request(self.command, path, body or None, headers)
            answer = asked.getresponse()
            self.send_response(answer.status)
            for key in ("content-type", "retry-after"):
                if value := answer.getheader(key):
                    self.send_header(key, value)
            self.end_headers()
            for line in answer if "watch=" in path else self._lines(answer.read()):
                self.wfile.write(line.replace(OLD, NEW) if is_said else line)
                self.wfile.flush()
            answer.close()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass  # noqa: N815

    def _lines(self, text: bytes) -> Iterator[bytes]:
        """An answer, as a newer server gives it."""
        if self.path.startswith("/version"):
            text = json.dumps(json.loads(text) | {"minor": "30", "gitVersion": "v1.30.0"}).encode()
        if self.path.partition("?")[0] in {"/apis", "/apis/"}:
            (said := json.loads(text))["groups"] = [renamed(group) for group in json.loads(text)["groups"]]
            text = json.dumps(said).encode()
        yield text

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """What was asked is not told."""


def without_rules(value: Any) -> Any:
    """A part of a definition without its rules in CEL."""
    if isinstance(value, dict):
        return {key: without_rules(one) for key, one in value.items() if key != "x-kubernetes-validations"}
    return [without_rules(one) for one in value] if isinstance(value, list) else value


def renamed(group: Object) -> Object:
    """A group of APIs with the version that a newer server has of it."""
    one = {"groupVersion": "policy/v1", "version": "v1"}
    return group | {"versions": [one], "preferredVersion": one} if group["name"] == "policy" else group


class Front(ThreadingHTTPServer):
    """Stands before the server, with its certificate."""

    daemon_threads = True

    def __init__(self, port: int, behind: int, certificates: Path) -> None:
        self.behind, crt = behind, certificates / "apiserver.crt"
        self.trusted = ssl.create_default_context(cafile=str(crt))
        self._own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._own.load_cert_chain(crt, certificates / "apiserver.key")
        super().__init__(("127.0.0.1", port), Newer)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError), self._own.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Names(BaseHTTPRequestHandler):
    """A proxy by which Services are found by their names, as nodes of a cluster find them."""

    def do_GET(self) -> None:
        at = httpx2.URL(self.path)
        if address := self.server.node.addresses.get(at.host.partition(".")[0]):  # type: ignore[attr-defined]
            with suppress(httpx2.HTTPError), httpx2.Client(trust_env=False, timeout=30) as asked:
                answer = asked.get(at.copy_with(host=address))
                self.send_response(answer.status_code)
                self.end_headers()
                self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """What was asked is not told."""


@contextmanager
def named(node: Kubelet) -> Iterator[str]:
    """The address of a proxy that knows the Services of this node."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Names) as proxy:
        proxy.node = node  # type: ignore[attr-defined]
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()


class Kube:
    """etcd, the API server and its controllers, and calls of it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        self._ports = etcd, peer, behind, port, control = free_ports(5)
        self._front: Front | None = None
        self.url, self._crt = f"https://127.0.0.1:{port}", folder / "certificates" / "apiserver.crt"
        programs = [built(name) for name in ("etcd", "kube-apiserver", "kube-controller-manager")]
        subprocess.run(
            [program("openssl"), "genrsa", "-out", folder / "sa.key", "2048"], capture_output=True, check=True
        )
        (folder / "tokens.csv").write_text(f'{ADMIN},admin,1,"system:masters"\n')
        at, key = f"http://127.0.0.1:{etcd}", folder / "sa.key"
        to_peers = f"http://127.0.0.1:{peer}"
        try:
            self._run(
                programs[0],
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={at}",
                f"--advertise-client-urls={at}",
                f"--listen-peer-urls={to_peers}",
                f"--initial-advertise-peer-urls={to_peers}",
                f"--initial-cluster=default={to_peers}",
                "--unsafe-no-fsync",
            )
            self._run(
                programs[1],
                f"--etcd-servers={at}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={behind}",
                f"--cert-dir={self._crt.parent}",
                f"--token-auth-file={folder / 'tokens.csv'}",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.96.0.0/24",
                f"--service-account-key-file={key}",
                "--service-account-issuer=https://127.0.0.1",
                f"--service-account-signing-key-file={key}",
                "--disable-admission-plugins=ServiceAccount",
                "--endpoint-reconciler-type=none",
            )
            until(lambda: self._healthy(behind), "the API server", self._processes[-1])
            trusted = ssl.create_default_context(cafile=str(self._crt))
            self._client = httpx2.Client(
                base_url=self.url,
                headers={"authorization": f"Bearer {ADMIN}"},
                verify=trusted,
                trust_env=False,
                timeout=60,
            )
            self._front = Front(port, behind, self._crt.parent)
            straight = self.config("controllers", ADMIN, f"https://127.0.0.1:{behind}")
            self._run(
                programs[2],
                f"--kubeconfig={straight}",
                "--leader-elect=false",
                f"--service-account-private-key-file={key}",
                "--bind-address=127.0.0.1",
                f"--secure-port={control}",
                f"--cert-dir={folder / 'controllers-crt'}",
                "--controllers=*,-nodelifecycle,-nodeipam,-cloud-node-lifecycle,-attachdetach,-ttl",
            )
            self.admin = self.config("admin", ADMIN)
            until(lambda: self.ask("GET", "/api/v1/namespaces/default/serviceaccounts/default"), "its controllers")
            self.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        except BaseException:
            self.close()
            raise

    def _run(self, *command: str) -> None:
        name = Path(command[0]).name
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder))

    def _healthy(self, port: int) -> bool:
        with suppress(OSError):
            trusted = ssl.create_default_context(cafile=str(self._crt))
            with closing(HTTPSConnection("127.0.0.1", port, context=trusted)) as asked:
                asked.request("GET", "/readyz", headers={"authorization": f"Bearer {ADMIN}"})
                with asked.getresponse() as answer:
                    return answer.status == 200
        return False

    def close(self) -> None:
        """End them, and wait until they ended."""
        if self._front:
            self._client.close()
            self._front.close()
        for process in reversed(self._processes):
            process.kill()  # none of them has anything to keep, and the server would wait for a minute
            process.wait()

    def config(self, name: str, token: str, server: str = "") -> Path:
        """A KUBECONFIG with this token."""
        where = {"server": server or self.url, "certificate-authority": str(self._crt)}
        made = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": where}],
            "users": [{"name": "it", "user": {"token": token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        (path := self._folder / f"{name}.json").write_text(json.dumps(made))
        return path

    def ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """What the server answers; None where nothing is. Raises AssertionError for what it refuses."""
        content = None if body is None else json.dumps(body)
        answer = self._client.request(method, path, content=content, headers={"content-type": kind})
        assert answer.is_success or answer.status_code == 404, f"{method} {path}: {answer.text}"
        return answer.json() if answer.is_success else None

    def kubectl(self, *arguments: str, text: str | None = None, program: str = "kubectl") -> str:
        """What kubectl prints. Raises AssertionError with what it says."""
        own = {"KUBECONFIG": str(self.admin), "HOME": str(self._folder), "PATH": os.environ["PATH"]}
        command = [str(packed(program)), *arguments]
        ran = subprocess.run(command, env=own, input=text, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{arguments}: {ran.stdout}{ran.stderr}"
        return ran.stdout


class Live(Made):
    """What is in a namespace, asked anew each time."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        super().__init__()
        self._kube, self._namespace = kube, namespace

    def of(self, kind: str) -> dict[str, Object]:
        found = self._kube.ask("GET", f"/api/v1/namespaces/{self._namespace}/{kind.lower().rstrip('s')}s")
        return {one["metadata"]["name"]: one for one in found["items"]}


def answers(pod: Pod) -> bool:
    """Whether its readiness probe says so; a pod without one is ready as it runs."""
    asked = pod.container.get("readinessProbe", {})
    if "tcpSocket" in asked:
        (port,) = (one["containerPort"] for one in pod.container["ports"] if one["name"] == asked["tcpSocket"]["port"])
        with suppress(OSError), socket.create_connection((pod.address, port), 5):
            return True
        return False
    return not asked or pod.probe("readinessProbe") == 200


class Kubelet(Node):
    """Runs the pods of a namespace as the server has them, tells it how they are, and ends those that are deleted."""

    def __init__(self, kube: Kube, namespace: str, folder: Path, network: int) -> None:
        super().__init__(folder, Live(kube, namespace), {}, network)
        self._namespace = namespace
        self._kube, self._at, self._net = kube, f"/api/v1/namespaces/{namespace}", network
        self._running: dict[str, Pod] = {}
        self._told: dict[str, Object] = {}
        self._fronts: dict[str, Service] = {}
        self._restarts: dict[str, int] = {}
        self._wrote: dict[str, str] = {}
        self.logs, self.failed = list[str](), list[BaseException]()
        self.lost = list[str]()
        """Pods to end without a word, and to delete as a cluster deletes those of a node that it gave up."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    @property
    def addresses(self) -> dict[str, str]:
        """Of the Services, by name."""
        return {name: front.address for name, front in self._fronts.items()}

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        for pod in self._running.values():
            self.logs.append(f"== {pod.called}\n{pod.log()[-3000:]}")
        super().close()

    def _work(self) -> None:
        while not self._ends.wait(0.3):
            try:
                while self.lost:
                    self._vanish(self.lost.pop())
                self._connect()
                pods = [*self.made.of("Pod").values()]
                for uid in self._running.keys() - {pod["metadata"]["uid"] for pod in pods}:
                    self._remove(uid)  # one that had ended is deleted at once, and never seen to be about to go
                for pod in pods:
                    self._look(pod)
            except BaseException as error:  # told by the test
                self.failed.append(error)

    def _connect(self) -> None:
        """Give each Service an address, and the pods that the server says are behind it."""
        ends, by_ip = self.made.of("Endpoints"), {self._ip(pod): pod for pod in self._running.values()}
        for name, one in self.made.of("Service").items():
            if one["spec"].get("clusterIP") == "None" or not one["spec"].get("selector"):
                continue
            if name not in self._fronts:
                self._fronts[name] = self.service(one["spec"]["ports"][0]["port"])
            subsets = ends.get(name, {}).get("subsets") or []
            ips = [at["ip"] for at in chain.from_iterable(its.get("addresses") or [] for its in subsets)]
            self._fronts[name].pods[:] = [by_ip[ip] for ip in ips if ip in by_ip]

    def _look(self, body: Object) -> None:
        metadata, spec = body["metadata"], body["spec"]
        uid, path = metadata["uid"], f"{self._at}/pods/{metadata['name']}"
        pod = self._running.get(uid)
        if "deletionTimestamp" in metadata:
            self._end(pod, uid, path)
        elif pod is None:
            if "nodeName" not in spec:
                target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
                named = {
                    "apiVersion": "v1",
                    "kind": "Binding",
                    "metadata": {"name": metadata["name"]},
                    "target": target,
                }
                self._kube.ask("POST", f"{path}/binding", named)
            if self._may_start(spec):
                number = next(self.numbers)
                address = f"127.77.{self._net}.{number}"
                self._running[uid] = pod = Pod(self, metadata["name"], spec, address, self.addresses)
                self.pods.append(pod.start())
        else:
            assert pod.process
            if pod.process.poll() is not None and spec.get("restartPolicy") != "Never":
                self.logs.append(f"== {pod.called} ended with {pod.process.poll()}\n{pod.log()[-3000:]}")
                self._restarts[uid], self._wrote[uid] = self._restarts.get(uid, 0) + 1, pod.log()[-1000:]
                pod.start()
            self._tell(pod, uid, path)

    def _vanish(self, name: str) -> None:
        (uid,) = (uid for uid, pod in self._running.items() if pod.called == name)
        self._remove(uid)
        self._kube.ask("DELETE", f"{self._at}/pods/{name}?gracePeriodSeconds=0")

    def _remove(self, uid: str) -> None:
        self._running[uid].kill()
        shutil.rmtree(self._running[uid].folder)
        self.pods.remove(self._running.pop(uid))

    def _may_start(self, spec: Object) -> bool:
        """Whether all that it names is there: a name server would say so later."""
        named = re.findall(r"//([a-z][-a-z0-9]*):", json.dumps(spec["containers"]))
        kept = [one["secret"]["secretName"] for one in spec.get("volumes", []) if "secret" in one]
        return {*named} <= self._fronts.keys() and {*kept} <= self.made.of("Secret").keys()

    def _end(self, pod: Pod | None, uid: str, path: str) -> None:
        if pod and pod.process and pod.process.poll() is None:
            if self._told.get(uid) is not None:
                self._told.pop(uid)
                pod.process.send_signal(signal.SIGTERM)
            return
        if pod:
            self.logs.append(f"== {pod.called} ended with {pod.process and pod.process.poll()}\n{pod.log()[-3000:]}")
            everyone = family_of(pod.process.pid) if pod.process else []
            until(lambda: all_gone(everyone), "the processes of a pod to end")
            shutil.rmtree(pod.folder)
            self.pods.remove(self._running.pop(uid))
        self._kube.ask("DELETE", f"{path}?gracePeriodSeconds=0")

    def _tell(self, pod: Pod, uid: str, path: str) -> None:
        assert pod.process
        ended = pod.process.poll()
        ready = ended is None and answers(pod)
        if ended is None:
            phase, state = "Running", {"running": {}}
        else:
            phase, state = ("Failed" if ended else "Succeeded"), {"terminated": {"exitCode": ended}}
        before: Object = {}
        if self._restarts.get(uid) and not ready:
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
            before = {"terminated": {"exitCode": 1, "message": self._wrote[uid]}}
        known = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
        one = {
            "name": pod.container["name"],
            "image": pod.container["image"],
            "imageID": "",
            "ready": ready,
            "started": ready,
            "restartCount": self._restarts.get(uid, 0),
            "state": state,
            "lastState": before,
        }
        said = {
            "phase": phase,
            "podIP": self._ip(pod),
            "podIPs": [{"ip": self._ip(pod)}],
            "containerStatuses": [one],
            "conditions": [{"type": name, "status": str(is_so)} for name, is_so in known.items()],
        }
        if said != self._told.get(uid):
            self._kube.ask("PATCH", f"{path}/status", {"status": said}, "application/strategic-merge-patch+json")
            self._told[uid] = said

    def _ip(self, pod: Pod) -> str:
        """What the server is told: it takes no address of loopback."""
        return pod.address.replace("127.", "10.", 1)

    def credentials(self, pod: Object) -> dict[str, str]:
        if not pod.get("automountServiceAccountToken", True) or "serviceAccountName" not in pod:
            return {}
        account, namespace = pod["serviceAccountName"], self._namespace
        token = self._kube.kubectl("-n", namespace, "create", "token", account).strip()
        return {"KUBECONFIG": str(self._kube.config(f"{namespace}-{account}", token))}

    def secret(self, name: str, key: str) -> bytes:
        return base64.b64decode(self.made.of("Secret")[name]["data"][key])
