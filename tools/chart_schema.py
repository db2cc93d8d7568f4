"""Writes the schema of the chart's values, from that of custom resources. `python -m tools.chart_schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
SCHEMA = DEPLOY / "helm" / "unfuse" / "values.schema.json"

Node = dict[str, Any]

OF_THE_CHART = {"stages", "image", "imagePullPolicy", "imagePullSecrets"}
"""Fields of a pipeline that the chart sets."""

KUBERNETES_ONLY = "x-kubernetes-"
"""How names of what JSON Schema does not have begin."""

POOL_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,18}[a-z0-9])?$"}
RESOURCE_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"}
RELEASE_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
AMOUNT = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?([KMGTP]i|[kMGTP])?$"}
TEXT = {"type": "string", "minLength": 1}
YES_OR_NO = {"type": "boolean"}


def main() -> None:
    """Write it."""
    SCHEMA.write_text(written())


def written() -> str:
    """The file, as it should be."""
    pipeline, pool = (spec_of(name) for name in ("diffusionpipelines", "diffusionpools"))
    for name in OF_THE_CHART:
        del pipeline["properties"][name]
    pool["properties"] = {"name": POOL_NAME, **pool["properties"]}
    pool["required"] = ["name", *pool["required"]]
    values = _object(
        image=_object(
            repository={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:/-]*$"},
            tag={"type": "string", "pattern": "^[A-Za-z0-9._-]*$"},
            pullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
        ),
        imagePullSecrets={"type": "array", "items": _object(name=RESOURCE_NAME)},
        fullnameOverride=_or_empty(RELEASE_NAME),
        serving=_object(enabled=YES_OR_NO),
        pipeline=pipeline,
        pools={"type": "array", "minItems": 1, "items": pool},
        redis=_object(trial=YES_OR_NO, image=TEXT, storage=AMOUNT, storageClass=_or_empty(RESOURCE_NAME)),
        results=_object(
            size=_or_empty(AMOUNT),
            storageClass=_or_empty(RESOURCE_NAME),
            accessMode={"enum": ["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]},
        ),
        monitoring=_object(
            rules=YES_OR_NO,
            dashboards=YES_OR_NO,
            labels={"type": "object", "additionalProperties": {"type": "string"}},
        ),
        operator=_object(enabled=YES_OR_NO, clusterWide=YES_OR_NO, resources=pool["properties"]["resources"]),
    )
    values["properties"]["global"] = {"type": "object"}  # which Helm adds where this is a part of another chart
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart unfuse", **values}
    return json.dumps(whole, indent=1) + "\n"


def spec_of(name: str) -> Node:
    """The schema of the spec of a custom resource, without what only Kubernetes knows."""
    definition = yaml.safe_load((DEPLOY / "kubernetes" / "crds" / f"{name}.yaml").read_text())
    (version,) = definition["spec"]["versions"]
    return _plain(version["schema"]["openAPIV3Schema"]["properties"]["spec"])


def _plain(node: Node) -> Node:
    """A structural schema as JSON Schema, in which unknown fields are refused as `kubectl apply` refuses them."""
    made = {key: value for key, value in node.items() if not key.startswith(KUBERNETES_ONLY) and key != "default"}
    if "properties" in node:
        made["properties"] = {name: _plain(inner) for name, inner in node["properties"].items()}
        made["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if key in node:
            made[key] = _plain(node[key])
    return made


def _object(**properties: Node) -> Node:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": [*properties],
    }


def _or_empty(node: Node) -> Node:
    return {"anyOf": [{"const": ""}, node]}


if __name__ == "__main__":
    main()
