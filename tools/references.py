"""Writes the generated pages of docs/reference/: `python -m tools.references`.

Parameters and metrics are here. The other pages have modules of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools import reference_cli, reference_errors, reference_events, reference_http, settings_page
from tools.reference_tables import DOCS, WRITTEN, code, next_step, table
from unfuse.core.modalities import IMAGE, MODALITIES, VIDEO
from unfuse.core.parameters import Parameter
from unfuse.core.registry import resolve
from unfuse.models import FAMILIES
from unfuse.models.declared import call_defaults
from unfuse.server.metrics_table import METRICS as METRIC_SPECS, MetricSpec

MADE = (*IMAGE.parameters, *VIDEO.parameters)

KINDS = {
    "text": "text",
    "integer": "integer",
    "number": "number",
    "choice": "one of",
    "flag": "true or false",
    "form": "text",
    "texts": "object of texts",
    "scaled": "names with scales",
    "any": "any",
}

PARAMETERS = f"""# Parameters

Look up here the name, the type, the bounds and the default of a request parameter. There is a table for each medium.
The column "models" names the families that accept the parameter. The flag is that of `unfuse generate`.

Parameters are JSON or form values. A parameter that is not set has the default of the model
(from `serving.json`, or from the call of its pipeline, below), or else the default in the table. Any other field is
rejected with an error that names it. {WRITTEN}
"""

METRICS = f"""# Metrics

Look up here the name, the type and the labels of a metric of `GET /metrics`. The table is sorted by name. A name
that ends in `_seconds` or `_bytes` has that unit, and `_total` marks a counter.

If API keys are configured, metrics with a tenant, money or a model require a key: one with
`read=yes` or `admin=yes` for those of all tenants ([keys](../guides/keys.md)). Counters start at 0 with
each gateway, and every gateway has its own. Gauges describe the whole queue. The label `pool` is a pool's name: stage
kind, component class, dtype, and a hash of weights and numerics, as in `denoise-flux-transformer-2d-bf16-3049ab12`.
`unfuse pools` lists the models of each pool. `numerics` is the hash of the numerics alone. `model` is the name that
clients use. See [the alerts](../../deploy/prometheus/alerts.yml) and the [runbook](../operations/runbook.md) for what
to monitor.
{WRITTEN}

"""

NOT_USED = ("nothing", "unused", "refused")
"""Uses of parameters that change nothing."""


def parameters() -> str:
    """The page of request parameters."""
    parts = [PARAMETERS]
    for medium in MODALITIES:
        ignored = [one for one in medium.parameters if one.use in ("nothing", "unused")]
        usual = [one for one in medium.parameters if one.use not in NOT_USED and one.description]
        parts.append(f"\n## {medium.plural.capitalize()}\n\n")
        parts.append(table("name | type | default | flag of `generate` | what | models", map(row, usual)))
        said = ", ".join(code(one.name) + (f" ({one.bounds})" if one.choices else "") for one in ignored)
        parts.append(f"\nAccepted, but without effect: {said}.\n")
    parts.append(f"\n## Defaults by family\n\nFrom the installed version of diffusers ({diffusers()}).\n\n")
    parts.append(table("family | steps | guidance | true CFG | size | frames | adapters", families()))
    return "".join(parts) + next_step("[HTTP API](http.md)", "[Model families](families.md)")


def diffusers() -> str:
    from importlib.metadata import version

    return f"diffusers {version('diffusers')}"


def row(one: Parameter) -> list[str]:
    kind = f"{KINDS[one.kind]} {one.bounds}".strip() if one.kind != "form" else one.form[1]
    default = "required" if one.required else code(one.default)
    flag = code(one.flag or "--" + one.name.replace("_", "-")) if one.offered and one in MADE else ""
    models = (", ".join(takers(one.name)) or "those that support it") if one.by_model else "all"
    return [code(one.name), kind, default, flag, one.description, models]


def pipelines() -> Iterator[tuple[str, Any]]:
    """Families that are pipelines of diffusers, by class."""
    for name in sorted(FAMILIES):
        family = resolve(FAMILIES, name, "model family")
        if hasattr(family, "source"):
            yield name, family


def takers(parameter: str) -> list[str]:
    """The families that take a parameter which is for some: those whose pipeline's call has it."""
    if parameter == "feature_cache":
        return ["where `--feature-cache` is set"]
    return [name for name, family in pipelines() if parameter in arguments(*family.source)]


def arguments(file: str, pipeline: str) -> set[str]:
    """The names that a pipeline's call takes."""
    spec = find_spec("diffusers")
    text = Path((spec and spec.origin) or "").parent.joinpath(file).read_text()
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == pipeline]
    calls = [part for node in classes for part in node.body if getattr(part, "name", "") == "__call__"]
    return {one.arg for call in calls if isinstance(call, ast.FunctionDef) for one in call.args.args}


def families() -> Iterator[list[str]]:
    for name, family in pipelines():
        has = call_defaults(*family.source)
        size = f"{has['width']}x{has['height']}" if "width" in has else ""
        shown = [has.get(key) for key in ("num_inference_steps", "guidance_scale", "true_cfg_scale")]
        lora = "yes" if family.takes_lora else ""
        yield [name, *("" if one is None else f"{one:g}" for one in shown), size, str(has.get("num_frames", "")), lora]


def metrics() -> str:
    """The page of metrics, by name."""
    rows = table("name | type | labels | what", sorted(map(metric, METRIC_SPECS)))
    return METRICS + rows + next_step("[Runbook](../operations/runbook.md)")


def metric(one: MetricSpec) -> list[str]:
    return [code(one.name), one.kind, ", ".join(map(code, one.labels)), one.help]


PAGES = {
    "settings.md": settings_page.page,
    "command-line.md": reference_cli.page,
    "parameters.md": parameters,
    "http.md": reference_http.page,
    "events.md": reference_events.page,
    "errors.md": reference_errors.page,
    "metrics.md": metrics,
}
"""The generated pages, by file."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        DOCS.joinpath(name).write_text(page())
