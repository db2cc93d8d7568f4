"""Writes docs/reference-*.md from the code: parameters, metrics and errors. `python -m tools.references`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import unfuse
import unfuse.core.errors as errors
from unfuse.cli.main import exit_code
from unfuse.core.modalities import IMAGE, MEDIA, VIDEO
from unfuse.core.parameters import Parameter
from unfuse.core.registry import resolve
from unfuse.core.request import MODERATION_BLOCKED
from unfuse.core.retries import RULES
from unfuse.models import FAMILIES
from unfuse.models.declared import call_defaults
from unfuse.scheduler.change_builder import CODES
from unfuse.server.errors import refusal_of
from unfuse.server.metrics_table import METRICS as METRIC_SPECS, MetricSpec

ROOT = Path(__file__).parents[1]
MADE = (*IMAGE.parameters, *VIDEO.parameters)
DOCS = ROOT / "docs"
WRITTEN = "This page is written by `python -m tools.references`."

KINDS = {
    "text": "text", "integer": "integer", "number": "number", "choice": "one of", "flag": "true or false",
    "form": "text", "texts": "object of texts", "scaled": "names with scales", "any": "any",
}  # fmt: skip

PARAMETERS = f"""# Parameters

What requests may say, by medium, as JSON or form values. What is left out is the model's own default (`serving.json`,
else the pipeline's call, below), else the one named here. Any other field is refused by name. {WRITTEN}
"""

METRICS = f"""# Metrics

What `/metrics` has. Where keys are configured, metrics that name a tenant, money or a model need a key: `read=yes` or
`admin=yes` for those of all tenants ([keys](serving.md#api-keys-and-tenants)). Counters count since the gateway
started; each gateway has its own, and gauges are of the whole queue. `pool` is a pool's declared name: stage kind,
first digits of a hash of the weights, and dtype, as in `denoise:edcc212e02d1:float32`; `unfuse pools` lists the
models of each. `outcome` is the hash of everything else that its bytes depend on. `model` is the name that clients
use. What to watch is in [the alerts](../deploy/prometheus/alerts.yml), with a [runbook](runbook.md). {WRITTEN}

"""

ERRORS = f"""# Errors

Every refusal is `{{"error": {{"message", "type", "param", "code"}}}}`, as OpenAI's are: the message says what is wrong
with what was sent, `code` is for programs, `param` names the field. Each answer has an `x-request-id`, under which the
server's log has more. `Retry-After` says when to come again (429, 503); `x-should-retry: false` that it is in vain.
Paths and methods that are not there are 404 and 405, with their phrase as the code. {WRITTEN}

## By code

"""

RETRIES = """
## Retry policy

The first row that matches the exception of a failed task decides. Wrong requests are refused before anything runs, if
this can be detected in advance. A task that fails in a batch is first run again alone, so that the other tasks of the
batch are not affected.

"""

IN_PYTHON = """
## In Python, and exit codes

Clients raise the error that an answer was made from, as far as they know it; the command ends with the exit code.

"""

STATUSES = {
    **dict.fromkeys(CODES.values(), 500), "stage_failed": 500, "model_error": 500, "handed_back": 500,
    "weights_changed": 503, "model_failed": 503, MODERATION_BLOCKED: 400, "expired": 504, "cancelled": 409,
}  # fmt: skip
"""What a call gets that waited for a request which has no result."""

ADVICE = {
    "admin_only": "Ask with an admin's key, or have yours made one (`unfuse keys add NAME --admin`).",
    "bad_framing": (
        "Send one of Content-Length and Transfer-Encoding: a proxy before the server may have added the other."
    ),
    "bad_request": "What was sent is no HTTP: look at the port, and whether TLS goes to a port without it.",
    "bad_target": "Ask for a path. A client that takes the server for its proxy has it in `HTTP_PROXY`.",
    "body_too_large": (
        "Send smaller or fewer pictures. As a file in a form, a picture takes three quarters of the bytes."
    ),
    "cancelled": "Somebody cancelled the request, or its client disconnected. Ask again if that was wrong.",
    "chunks_too_small": "Send larger chunks, or a Content-Length.",
    "compute_crashed": (
        "Its compute process died twice while it ran only this task: `unfuse dead show ID` shows the evidence. Often "
        "memory is short: try a smaller size."
    ),
    "context_length_exceeded": (
        "Shorten the messages, ask for fewer tokens, or send `truncate_prompt_tokens`; the limit is `max_model_len` in "
        "`GET /v1/models`."
    ),
    "damaged": "A record cannot be read. Its request makes no progress; cancel it, and ask again.",
    "expired": (
        "It took longer than its `timeout`, or than the server allows: ask for less, or have `--image-timeout` or "
        "`--video-timeout` raised."
    ),
    "handed_back": (
        "Workers gave it back again and again, as they lack room for it: a larger `--arena`, or a smaller size."
    ),
    "headers_too_large": "Send fewer or shorter headers: cookies of other pages of this host are a usual reason.",
    "host_not_allowed": "Start the server with `--allowed-hosts`, as the message says, or give it keys.",
    "http_version": "Speak HTTP/1.1 to it, or have a proxy do that.",
    "idempotency_conflict": "The key was used for another body: make a new one for each request.",
    "internal_error": (
        "A defect: the server's log has a traceback under the `x-request-id` of the answer. Please report it."
    ),
    "invalid_api_key": (
        "No key was sent, or an unknown one; the message says which. Send `Authorization: Bearer KEY`, `--api-key` or "
        "`UNFUSE_API_KEY`; `unfuse keys ls` on the server's machine lists its keys."
    ),
    "invalid_parameter": (
        "The message names the field (`param`), its bounds, and often the nearest value that goes. See "
        "[parameters](reference-parameters.md)."
    ),
    "object_lost": "What stages had made was lost several times with workers or machines: ask again.",
    MODERATION_BLOCKED: (
        "The model's safety checker flagged all results: change the prompt, or try another seed. If it flagged only "
        "some pictures, the request completes, and these are marked with `flagged`."
    ),
    "lost": "The queue has lost the data of the request, or it was deleted while the call waited: repeat the call.",
    "model_exists": "A model of this name is served: send another `name`, or remove that one first.",
    "model_failed": (
        "The model was added and cannot be served; the message says why. Once that is mended, add it again; `unfuse "
        "dead retry ID` repeats its requests, and `unfuse models rm NAME` forgets it."
    ),
    "model_leaves": "It is being removed: add it again once its last requests are done, as `Retry-After` says.",
    "invalid_link": "The signature of the link is wrong: get a new link with `GET /v1/requests/{id}`.",
    "key_unavailable": (
        "A shard of the queue that may have a request with this Idempotency-Key is away, and nothing was queued: "
        "repeat the call later, or send another key if this one was never used before."
    ),
    "link_expired": (
        "Links are valid for an hour, those in webhooks for a day: get a new one with `GET /v1/requests/{id}`."
    ),
    "model_error": (
        "The stage failed twice with the same type of exception, usually a defect: `unfuse dead show ID` has the "
        "traceback. Please report it."
    ),
    "model_not_found": "`GET /v1/models`, or `unfuse models`, lists what is served.",
    "no_model": "Start a worker, or wait until those that start have loaded.",
    "no_room": (
        "The disk of results or uploads is full, or not reachable: `unfuse disk`, and the "
        "[runbook](runbook.md#unfuseresultsnotwritable)."
    ),
    "not_completed": "The result is not there yet: wait for the event `completed`.",
    "not_dead": "Only what was given up can be asked for again.",
    "not_found": "No such request, or its retention is over, or it is another tenant's.",
    "not_ready": "Wait: of `/ready` alone, which says what is missing.",
    "not_yours": "Ask with a key whose line names the model, or has no `models=`.",
    "origin_not_allowed": "Start the server with `--allowed-origins`, or behind a proxy with `--trusted-proxies`.",
    "overloaded": (
        "Wait for as long as `Retry-After` says; the server's `--max-active`, `--max-queue` and `--max-cost` set the "
        "limit."
    ),
    "rate_limit_exceeded": "The key's `rate=` or `concurrent=` is reached: wait for as long as `Retry-After` says.",
    "precondition_failed": "The file is not the one that `If-Match` names: send the call without that header.",
    "range_not_satisfiable": "The range begins after the end of the file: `Content-Range` has the file's length.",
    "read_only": "Ask with a key without `read=yes`.",
    "stage_failed": (
        "A stage had an error that is never retried, or used up its retry budget (`given up after N times`): the "
        "message has the last error."
    ),
    "starting": (
        "The server waits for its queue, as `/ready` says: start Redis, or make room on the disk of the queue; it goes "
        "on by itself."
    ),
    "stopping": "The server ends. Ask again: the request itself goes on where the queue is kept.",
    "target_too_long": "Send what is long in the body.",
    "timeout": (
        "The client was too slow to send, or to read: see bounds in [serving](serving.md#network-access-and-tls)."
    ),
    "too_many_bodies": "Try again: many clients are sending pictures.",
    "too_many_connections": "Reuse connections; `--max-connections` and `--max-connections-per-address` set the limit.",
    "weights_changed": (
        "A file of the model has changed since it was loaded; the message names it. Restart the server to load the new "
        "file, or restore the old one."
    ),
    "unavailable": "A part such as Redis does not answer: try again, and look at the server's log.",
    "unsupported_media_type": "Send JSON with its content type, or a form.",
}  # fmt: skip
"""What to do about each code."""


NOT_USED = ("nothing", "unused", "refused")
"""Uses of parameters that change nothing."""


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown; `head` has its titles between bars."""
    count = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * count]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def code(value: object) -> str:
    return f"`{value}`" if value not in (None, "") else ""


def parameters() -> str:
    """The page of request parameters."""
    parts = [PARAMETERS]
    for medium in MEDIA:
        ignored = [one for one in medium.parameters if one.use in ("nothing", "unused")]
        usual = [one for one in medium.parameters if one.use not in NOT_USED and one.description]
        parts.append(f"\n## {medium.plural.capitalize()}\n\n")
        parts.append(table("name | type | default | flag of `generate` | what | models", map(row, usual)))
        said = ", ".join(code(one.name) + (f" ({one.bounds})" if one.choices else "") for one in ignored)
        parts.append(f"\nAccepted and without effect: {said}.\n")
    parts.append(f"\n## Defaults by family\n\nAs the installed diffusers has them ({diffusers()}).\n\n")
    return "".join(parts) + table("family | steps | guidance | true CFG | size | frames | adapters", families())


def diffusers() -> str:
    from importlib.metadata import version

    return f"diffusers {version('diffusers')}"


def row(one: Parameter) -> list[str]:
    kind = f"{KINDS[one.kind]} {one.bounds}".strip() if one.kind != "form" else one.form[1]
    default = "required" if one.required else code(one.default)
    flag = code(one.flag or "--" + one.name.replace("_", "-")) if one.offered and one in MADE else ""
    models = (", ".join(takers(one.name)) or "those that say so") if one.by_model else "all"
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
    return METRICS + table("name | type | labels | what", sorted(map(metric, METRIC_SPECS)))


def metric(one: MetricSpec) -> list[str]:
    return [code(one.name), one.kind, ", ".join(map(code, one.labels)), one.help]


def refusals() -> dict[str, set[int]]:
    """The statuses by code of all that the gateway refuses, as its sources have them."""
    found: dict[str, set[int]] = {name: {status} for name, status in STATUSES.items()}
    for path in sorted(
        path for folder in ("edge", "server", "service") for path in (ROOT / "unfuse" / folder).glob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(args=[ast.Constant(int(status)), ast.Constant(str(said)), *_]) if 400 <= status < 600:
                    found.setdefault(said, set()).add(status)
    for name in ("overloaded", "rate_limit_exceeded"):
        found[name] = {429}
    return found


def tree() -> Iterator[list[str]]:
    """The errors of Python, and what they become."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.UnfuseError):
            made = errors.ArenaFull(1, 0, 1) if kind is errors.ArenaFull else kind("…")
            parents = [one.__name__ for one in kind.__mro__[1:-1] if issubclass(one, errors.UnfuseError)]
            says = " ".join((kind.__doc__ or "").split())
            public = f"`unfuse.{kind.__name__}`" if kind.__name__ in unfuse.__all__ else code(kind.__name__)
            yield [public, code(parents[0]) if parents else "", str(exit_code(made)), says]


def refused() -> str:
    """The page of errors."""
    rows = [[code(name), ", ".join(map(str, sorted(of))), ADVICE[name]] for name, of in sorted(refusals().items())]
    assert refusal_of(errors.NotFound("…")).code in ADVICE
    codes = table("code | status | what to do", rows)
    rules = [[rule.errors, rule.outcome, code(rule.code)] for rule in RULES]
    retries = table("error | what happens to the task | error code if the request fails", rules)
    return ERRORS + codes + RETRIES + retries + IN_PYTHON + table("error | is a | exit code | when", tree())


PAGES = {"reference-parameters.md": parameters, "reference-metrics.md": metrics, "reference-errors.md": refused}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
