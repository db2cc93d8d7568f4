"""A stand-in for the kubelet: what a pod says, as processes of this machine.

Environment, volumes and probes are as the pod has them, the address of a pod is one of loopback's, and paths of
mounts are those of folders. Where this user is root, nothing but the volumes can be written to, as on a root that is
read-only, and there are no capabilities. Not here: images, other users, limits, NetworkPolicies and name servers.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from urllib.error import HTTPError

from tools.helm import Made, Object
from tools.programs import program
from tools.server import RUN_DIR, all_gone, family_of, until

CONFINE = """
for folder in $VOLUMES; do mount --bind $folder $folder; done
for place in / /tmp; do if mountpoint -q $place; then mount -o remount,bind,ro $place; fi; done
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""

UNFUSE = [sys.executable, "-m", "unfuse"]
"""The entry point of the image."""


@cache
def confines() -> bool:
    """Whether this user may take the right to write away from processes."""
    if os.geteuid() or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


class Pod:
    """One pod, which runs once it was started. `names` are addresses by the names of Services."""

    def __init__(self, node: Node, called: str, spec: Object, address: str, names: dict[str, str]) -> None:
        self.called, self.address, self._spec, self._names, self._node = called, address, spec, names, node
        self.folder = node.folder / called
        self.folder.mkdir()
        self._volumes = {volume["name"]: self._volume(volume) for volume in spec.get("volumes", [])}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def container(self) -> Object:
        """Its only container, beside those that run before it."""
        (one,) = self._spec["containers"]
        return dict(one)

    def start(self) -> Pod:
        for before in self._spec.get("initContainers", []):
            subprocess.run(self._confined(before), env=self._environment(before), check=True)
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self._confined(self.container),
                env=self._environment(self.container),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def probe(self, which: str) -> int:
        """The status of a probe by HTTP; 0 while nobody answers."""
        asked = self.container[which]["httpGet"]
        (port,) = (one["containerPort"] for one in self.container["ports"] if one["name"] == asked["port"])
        try:
            with urllib.request.urlopen(f"http://{self.address}:{port}{asked['path']}", timeout=5) as answer:
                return int(answer.status)
        except HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return 0

    def started(self) -> Pod:
        """Wait for its startup probe."""
        until(lambda: self.probe("startupProbe") == 200, f"{self.called} to start", self.process)
        return self

    def ended(self) -> int:
        """What it ends with by itself."""
        assert self.process
        return self.process.wait(600)

    def stop(self) -> int:
        """As it is deleted: SIGTERM. Returns what it ended with by itself."""
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def kill(self) -> None:
        everyone = family_of(self.process.pid) if self.process else []
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        until(lambda: all_gone(everyone), "the processes of a pod to end")

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def _volume(self, volume: Object) -> Path:
        path = self.folder / str(volume["name"])
        if "persistentVolumeClaim" in volume:
            path = self._node.folder / f"claim-{volume['persistentVolumeClaim']['claimName']}"
        elif volume["name"] == "run":  # the path of a socket is short
            path = Path(os.environ[RUN_DIR], f"{self.called[-8:]}{next(self._node.numbers)}")
        path.mkdir(exist_ok=True)
        if secret := volume.get("secret"):
            for item in secret["items"]:
                (file := path / item["path"]).write_bytes(self._node.secret(secret["secretName"], item["key"]))
                file.chmod(0o440)  # as for a pod with a group of its own
        return path

    def _confined(self, container: Object) -> list[str]:
        if not confines():
            return self._command(container)
        assert container["securityContext"]["readOnlyRootFilesystem"]
        return ["unshare", "--mount", "sh", "-ec", CONFINE, "pod", *self._command(container)]

    def _command(self, container: Object) -> list[str]:
        said = container.get("command") or container["args"]
        image: list[str] = [] if "command" in container else UNFUSE
        if container["name"] == "redis":
            image, said = [program("redis-server")], [*said[1:], "--bind", self.address]
        return [*image, *(self._here(word, container) for word in said)]

    def _environment(self, container: Object) -> dict[str, str]:
        image = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
        own = {"TMPDIR": "/tmp"}
        for source in container.get("envFrom", []):
            own |= self._node.made.of("ConfigMap")[source["configMapRef"]["name"]]["data"]
        for variable in container.get("env", []):
            own[variable["name"]] = variable["value"] if "value" in variable else self._valued(variable["valueFrom"])
        written = (mount["name"] for mount in container.get("volumeMounts", []) if not mount.get("readOnly"))
        volumes = {str(self._volumes.get(name, self.folder)) for name in written}
        own = {name: self._here(text, container) for name, text in own.items()}
        return {**image, **own, **self._node.credentials(self._spec), "VOLUMES": " ".join(volumes)}

    def _valued(self, source: Object) -> str:
        if key := source.get("secretKeyRef"):
            return self._node.secret(key["name"], key["key"]).decode()
        return {"status.podIP": self.address, "metadata.name": self.called}[source["fieldRef"]["fieldPath"]]

    def _here(self, text: str, container: Object) -> str:
        """A word of the pod with paths and addresses of this machine."""
        there = {
            mount["mountPath"]: str(self._volumes.get(mount["name"], self.folder))
            for mount in container.get("volumeMounts", [])
        }
        paths = "|".join(map(re.escape, sorted(there, key=len, reverse=True)))
        text = re.sub(rf"(?<![\w./])({paths})(?![\w.])", lambda found: there[found[0].rstrip("/")], text)
        text = text.replace("0.0.0.0", self.address)
        for name, address in self._names.items():
            text = re.sub(rf"(?<=//){re.escape(name)}(?=:)", address, text)
        return text


class Service:
    """An address of its own, from which each connection goes to the first pod of these that takes it."""

    def __init__(self, address: str, port: int, pods: list[Pod]) -> None:
        self.address, self.pods, self._port = address, pods, port
        self._socket = socket.create_server((address, port), backlog=128)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                if pod := self._taken():
                    for ends in ((caller, pod), (pod, caller)):
                        threading.Thread(target=_pump, args=ends, daemon=True).start()
                else:
                    caller.close()

    def _taken(self) -> socket.socket | None:
        for pod in self.pods:
            with suppress(OSError):
                return socket.create_connection((pod.address, self._port))
        return None


def _pump(source: socket.socket, to: socket.socket) -> None:
    """Hand on what comes, until there is no more; then both ends are closed by whoever hands on the other way."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            to.sendall(data)
    for end in (source, to):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


class Node:
    """Runs pods of what a chart made; `secrets` are Secrets that are there already."""

    def __init__(self, folder: Path, made: Made, secrets: dict[str, dict[str, bytes]], network: int) -> None:
        self.folder, self.made, self._secrets = folder, made, secrets
        self.numbers, self._network = count(1), network
        self.pods: list[Pod] = []
        self.services: list[Service] = []

    def secret(self, name: str, key: str) -> bytes:
        if name in self._secrets:
            return self._secrets[name][key]
        return base64.b64decode(self.made.of("Secret")[name]["data"][key])

    def credentials(self, pod: Object) -> dict[str, str]:
        """Variables by which a pod that has a token of the cluster finds it."""
        return {}

    def pod(self, workload: str, names: dict[str, str] | None = None) -> Pod:
        """A pod of a workload, with an address of its own, which finds these Services."""
        number = next(self.numbers)
        spec = self.made.pods()[workload]["spec"]
        self.pods.append(Pod(self, f"{workload}-{number}", spec, f"127.77.{self._network}.{number}", names or {}))
        return self.pods[-1].start()

    def service(self, port: int, *pods: Pod) -> Service:
        """A Service in front of these pods, in this order."""
        address = f"127.77.{self._network}.{next(self.numbers)}"
        self.services.append(Service(address, port, list(pods)))
        return self.services[-1]

    def close(self) -> None:
        for service in self.services:
            service.close()
        for pod in reversed(self.pods):
            pod.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
