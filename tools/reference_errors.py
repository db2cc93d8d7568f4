"""The page docs/reference/errors.md, from the sources of the gateway, the retry rules and the exceptions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import unfuse
import unfuse.core.errors as errors
from tools.reference_tables import ROOT, WRITTEN, code, next_step, table
from unfuse.cli.main import exit_code
from unfuse.core.request import MODERATION_BLOCKED
from unfuse.core.retries import RULES
from unfuse.scheduler.change_builder import CODES
from unfuse.server.errors import refusal_of

ERRORS = f"""# Errors

Look up here the code of an error response, and what to do about it. The second table shows which failures of a task
are retried, and the third the exceptions of the Python client and the exit codes of the command line.

Every error is `{{"error": {{"message", "type", "param", "code"}}}}`, as in OpenAI's API. `message` describes the error,
`code` is for programs, and `param` names the field. Each response has an `x-request-id`, which is also in the lines of
the server's log. `Retry-After` is the time after which to retry (429, 503). `x-should-retry: false` means that a retry
cannot succeed. An unknown path is 404 and a wrong method 405, with the HTTP reason phrase as the code. {WRITTEN}

## By code

"""

RETRIES = """
## Retry policy

The first row that matches the exception of a failed task applies. Invalid requests are rejected before anything
runs, if this can be detected in advance. A task that fails in a batch is first run again alone, so that the other
tasks of the batch are not affected.

"""

IN_PYTHON = """
## In Python, and exit codes

Python clients raise the error from which the response was made, if it is a class of the client. The command line exits
with the exit code.

"""

STATUSES = {
    **dict.fromkeys(CODES.values(), 500),
    "stage_failed": 500,
    "model_error": 500,
    "handed_back": 500,
    "out_of_memory": 500,
    "weights_changed": 503,
    "model_failed": 503,
    MODERATION_BLOCKED: 400,
    "expired": 504,
    "cancelled": 409,
}
"""What a call gets that waited for a request which has no result."""

ADVICE = {
    "admin_only": "Use an admin key, such as one from `unfuse keys add NAME --admin`.",
    "bad_framing": (
        "Send only one of Content-Length and Transfer-Encoding. A proxy before the server may have added the other."
    ),
    "bad_request": "The data is not HTTP. Check the port, and that no TLS is sent to a port without TLS.",
    "bad_target": "Request a path. If the client uses the server as a proxy, remove it from `HTTP_PROXY`.",
    "body_too_large": (
        "Send smaller or fewer pictures. As a file in a form, a picture needs only three quarters of the bytes."
    ),
    "cancelled": "The request was cancelled, or its client disconnected. Repeat the call if that was not intended.",
    "chunks_too_small": "Send larger chunks, or a Content-Length.",
    "compute_crashed": (
        "The compute process died twice while it ran only this task, or its device failed repeatedly. `unfuse dead "
        "show ID` shows the evidence. The usual reason is too little memory: try a smaller size. If the message has a "
        "device error, see [A device fails](../operations/failing-devices.md)."
    ),
    "context_length_exceeded": (
        "Shorten the messages, request fewer tokens, or send `truncate_prompt_tokens`; the limit is `max_model_len` in "
        "`GET /v1/models`."
    ),
    "damaged": "The record of a request cannot be read, so it makes no progress. Cancel the request and send it again.",
    "expired": (
        "The request took longer than its `timeout`, or than the server allows. Reduce the request, or increase "
        "`--image-timeout` or `--video-timeout` of the server."
    ),
    "handed_back": (
        "Workers handed the task back repeatedly, because they have too little memory for it. Start them with a larger "
        "`--arena`, or request a smaller size."
    ),
    "headers_too_large": "Send fewer or shorter headers. Cookies of other pages of this host are a common reason.",
    "host_not_allowed": "Start the server with `--allowed-hosts`, as the message describes, or with `--api-keys`.",
    "http_version": "Use HTTP/1.1, or a proxy that does.",
    "idempotency_conflict": "The key was already used with another body. Use a new key for each request.",
    "internal_error": (
        "An internal error. Please report it, with the traceback from the server's log at the `x-request-id` of the "
        "response."
    ),
    "invalid_api_key": (
        "The key is missing or unknown, as the message states. Send `Authorization: Bearer KEY`, `--api-key` or "
        "`UNFUSE_API_KEY`; `unfuse keys ls` on the server's machine lists its keys."
    ),
    "invalid_parameter": (
        "The message names the field (`param`), its bounds, and often the nearest valid value. See "
        "[parameters](parameters.md)."
    ),
    "object_lost": "Stage outputs were lost several times with workers or machines. Send the request again.",
    MODERATION_BLOCKED: (
        "The model's safety checker flagged all results: change the prompt, or try another seed. If it flagged only "
        "some pictures, the request completes, and these are marked with `flagged`."
    ),
    "lost": "The queue lost the request, or the request was deleted while the call waited. Repeat the call.",
    "model_exists": "A model with this name is already served. Send another `name`, or remove that model first.",
    "model_failed": (
        "The added model cannot be served, for the reason in the message. Fix it and add the model again. `unfuse "
        "dead retry ID` then repeats its requests. To remove the model, use `unfuse models rm NAME`."
    ),
    "model_leaves": "The model is being removed. Add it again after its last requests have ended; see `Retry-After`.",
    "invalid_link": "The signature of the link is invalid. Get a new link with `GET /v1/requests/{id}`.",
    "key_unavailable": (
        "A shard of the queue that may have a request with this Idempotency-Key does not answer. Nothing was queued. "
        "Repeat the call later, or send another key if this one was never used before."
    ),
    "link_expired": (
        "Links are valid for an hour, and those in webhooks for a day. Get a new one with `GET /v1/requests/{id}`."
    ),
    "model_error": (
        "The stage failed twice with the same type of exception, usually a defect: `unfuse dead show ID` has the "
        "traceback. Please report it."
    ),
    "model_not_found": "`GET /v1/models` or `unfuse models` lists the served models.",
    "no_model": "Start a worker, or wait until starting workers have loaded their models.",
    "no_room": (
        "The storage of results or uploads is full or cannot be reached. Run `unfuse disk`, and see the "
        "[runbook](../operations/runbook.md#unfuseresultsnotwritable)."
    ),
    "not_completed": "The request has no result yet. Wait for the event `completed`.",
    "not_dead": "Only dead letters can be retried.",
    "not_found": "The request does not exist, was deleted after its retention, or belongs to another tenant.",
    "not_ready": "Only from `/ready`, which states what is missing. Wait until it is ready.",
    "not_yours": "Use a key whose line names the model, or has no `models=`.",
    "origin_not_allowed": "Start the server with `--allowed-origins`, or behind a proxy with `--trusted-proxies`.",
    "out_of_memory": (
        "The device does not have enough memory for this request, even if it is computed alone. Request a smaller "
        "size, or see [Out of memory](../operations/out-of-memory.md)."
    ),
    "overloaded": (
        "Retry after the time in `Retry-After`. The server's `--max-active`, `--max-queue` and `--max-cost` set the "
        "limits."
    ),
    "rate_limit_exceeded": "The key's limit `rate=` or `concurrent=` is reached. Retry after the `Retry-After` time.",
    "precondition_failed": "The file does not match `If-Match`. Repeat the call without that header.",
    "range_not_satisfiable": "The range begins after the end of the file. `Content-Range` has the length of the file.",
    "read_only": "Use a key without `read=yes`.",
    "stage_failed": (
        "A stage failed with an error that is never retried, or used up its retry budget (`failed N times`). "
        "The message has the last error."
    ),
    "starting": (
        "The server waits for its queue, as `/ready` reports. Start Redis, or free space on the disk of the queue. The "
        "server then continues without a restart."
    ),
    "stopping": "The server is shutting down. Repeat the call. Accepted requests continue if the queue is durable.",
    "target_too_long": "Send long values in the body.",
    "timeout": "The client sent or read too slowly. See [the limits](../guides/client-limits.md).",
    "too_many_bodies": "Retry later. Too many clients are sending large bodies.",
    "too_many_connections": "Reuse connections; `--max-connections` and `--max-connections-per-address` set the limit.",
    "weights_changed": (
        "A file of the model has changed since it was loaded. The message names it. Restart the server to load the new "
        "file, or restore the old one."
    ),
    "unavailable": "A dependency, such as Redis, does not answer. Retry, and check the server's log.",
    "unsupported_media_type": "Send JSON with its content type, or a form.",
}
"""What to do about each code."""


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


def page() -> str:
    """The page of errors."""
    rows = [[code(name), ", ".join(map(str, sorted(of))), ADVICE[name]] for name, of in sorted(refusals().items())]
    assert refusal_of(errors.NotFound("…")).code in ADVICE
    codes = table("code | status | what to do", rows)
    rules = [[rule.errors, rule.result, code(rule.code)] for rule in RULES]
    retries = table("error | what happens to the task | error code if the request fails", rules)
    classes = table("error | is a | exit code | when", tree())
    end = next_step("[Why a request was retried](../operations/why-was-it-retried.md)")
    return ERRORS + codes + RETRIES + retries + IN_PYTHON + classes + end
