"""The page docs/reference/http.md, from the routes of the gateway and their OpenAPI document."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from fastapi.routing import APIRoute

from tools.reference_errors import refusals
from tools.reference_tables import WRITTEN, code, comments, next_step, table
from unfuse.core.modalities import MODALITIES
from unfuse.core.request import StageState, Timings
from unfuse.server import auth, chat, dead_letters, images, models, monitoring, openapi_schemas, requests, videos
from unfuse.server.app import create_app
from unfuse.server.responses import COMMENT_EVERY_S

Schema = dict[str, Any]

HEAD = f"""# HTTP API

Look up here a route of the gateway: its parameters, its responses and its error codes. Each section has the method and
the path, who may call it, and what to send. [Errors](errors.md) explains the codes, and
[parameters](parameters.md) the fields of requests in detail. {WRITTEN}

The routes for images, videos, chats and models have the format of OpenAI's API: set the base URL of an OpenAI client
to `http://HOST:PORT/v1`. A running server has the same document at `/openapi.json`, and a page to try it at `/docs`.
`HEAD` works wherever `GET` does, and `OPTIONS` responds with the methods of a path.

Keys are sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. Without `--api-keys` and `--api-key`, no key is
needed, and every caller may do what an admin may. "Any key" excludes keys with `read=yes` on routes that change
something. A signed link to a result, as responses with `"response_format": "url"` contain it, needs no key.

Each response has the header `x-request-id`. An event stream has a comment line after {COMMENT_EVERY_S:g} seconds
without an event.

"""

ALWAYS = """
## Errors of all routes

These codes do not depend on the route. They are about the connection, the key, or the state of the server.

"""

OBJECTS_HEAD = """
## Objects

The objects in responses. A field with "or null" may be null.
"""

ROUTERS = (
    *((module.router, "/v1") for module in (images, videos, chat, requests, dead_letters, models)),
    (monitoring.workers_router, "/v1"),
    (monitoring.router, ""),
)
"""The routers with their prefixes, in the order of the page."""

OBJECTS: dict[str, Schema] = {
    "request": openapi_schemas.REQUEST,
    "unreadable record": openapi_schemas.DAMAGE,
    "video": openapi_schemas.VIDEO,
    "pictures": openapi_schemas.PICTURES,
    "chat completion": openapi_schemas.ANSWERED,
    "model": openapi_schemas.MODEL,
    "worker": openapi_schemas.WORKER,
    "pool": openapi_schemas.POOL,
}
"""The objects that responses have, by the title of their section."""

STAGE_FIELDS = comments(StageState) | comments(Timings)
"""The meanings of the fields of a request's stages."""

MEANINGS = {
    "id": "ID of the object",
    "object": "type of the object",
    "model": "name of the model, as the client sent it",
    "modality": "what the request generates",
    "params": "checked parameters, as the stages read them, and what the server derived from the request",
    "tenant": "tenant of the API key",
    "priority": "requests of a higher priority run first",
    "state": "`status`, or what the request waits for",
    "prompt": "prompt; null for a request without one",
    "status": "status; a queued request is in progress as soon as one of its stages runs",
    "step": "steps that are done, of the running stage, or else of the stage with the most steps",
    "steps": "number of steps of the same stage",
    "attempts": "largest number of attempts that any stage has begun",
    "webhook.state": "`waiting`, `delivered` or `given_up`",
    "stage": "name of a running stage; null: no stage runs",
    "queue_position": "tasks ahead of the first queued one; null: a stage runs, or nothing is queued",
    "eta_s": "predicted seconds until the end; null: unknown",
    "seed": "seed of the first result",
    "cost.predicted_s": "predicted seconds of compute, at acceptance",
    "cost.device_s": "used seconds by device, as far as workers have reported them",
    "cost.money": "price of these seconds, by `--price`",
    "created_at": "acceptance, in Unix seconds",
    "started_at": "first lease of a task, in Unix seconds",
    "completed_at": "end of the request, in Unix seconds",
    "stages[].name": "name of the stage",
    "stages[].pool": "pool whose workers run the stage",
    "stages[].cached": "whether the output is from the encoder cache",
    "result[].url": "signed link to the file",
    "result[].content_type": "media type of the file",
    "result[].bytes": "size of the file, in bytes",
    "result[].flagged": "the model's safety checker flagged it, so it is not delivered",
    "error.code": "code of the [error](errors.md)",
    "error.message": "one sentence for people",
    "error.stage": "stage that failed",
    "error.evidence": "traceback, or the last lines of a log; left out of `GET /v1/requests`",
    "metadata": "the strings that the client sent",
    "webhook.url": "address that is called at the end",
    "webhook.attempts": "number of calls so far",
    "webhook.reason": "why the last call failed",
    "hint": "words of the prompt that the model does not know, and what it can generate",
}
"""The meanings of fields of the request object and of fields that other objects share with it."""

FILES = {
    "result": "the file, with its media type, or the requested ranges of its bytes (206)",
    "content": "the file, with its media type, or the requested ranges of its bytes (206)",
    "preview": "the picture, as `image/jpeg`",
    "metrics": "the metrics, as text in the format of Prometheus",
}
"""What routes without a JSON response send, by the name of their function."""

ANYWHERE = [
    "bad_request",
    "bad_target",
    "bad_framing",
    "chunks_too_small",
    "headers_too_large",
    "http_version",
    "target_too_long",
    "timeout",
    "too_many_connections",
    "host_not_allowed",
    "origin_not_allowed",
    "starting",
    "invalid_api_key",
    "internal_error",
]
"""Codes that every route can have."""

QUEUED = ["unavailable", "damaged"]
READ_BODY = ["unsupported_media_type", "body_too_large", "too_many_bodies", "no_room"]
SUBMITTING = [
    "model_not_found",
    "no_model",
    "model_failed",
    "idempotency_conflict",
    "key_unavailable",
    "overloaded",
    "rate_limit_exceeded",
    "stopping",
]
WAITING = [
    "lost",
    "stage_failed",
    "model_error",
    "compute_crashed",
    "out_of_memory",
    "object_lost",
    "handed_back",
    "weights_changed",
    "moderation_blocked",
    "cancelled",
    "expired",
]
RANGES = ["precondition_failed", "range_not_satisfiable"]
LINKS = ["invalid_link", "link_expired"]

CODES: dict[str, list[str]] = {
    "generate": [*READ_BODY, *SUBMITTING, *WAITING],
    "edit": [*READ_BODY, *SUBMITTING, *WAITING],
    "create": [*READ_BODY, *SUBMITTING],
    "complete": [*READ_BODY, "context_length_exceeded", *SUBMITTING, *WAITING],
    "result": ["not_found", "moderation_blocked", *RANGES, *LINKS],
    "content": ["not_found", "not_completed", *RANGES],
    "retry": ["not_found", "not_dead", "model_not_found", "no_model", "model_failed", "overloaded", "stopping"],
    "add": [*READ_BODY, "not_yours", "model_exists", "model_leaves", "stopping"],
    "remove": ["model_not_found"],
    "ready": ["not_ready"],
}
"""The error codes of routes by the name of their function, besides those that follow from their parameters."""


IGNORED = ("", "accepted and ignored")
"""The descriptions of fields that have no effect."""


class Route(NamedTuple):
    """A route of the gateway, with its part of the OpenAPI document."""

    method: str
    path: str
    function: Any
    #: The functions that FastAPI calls before the route, such as those that check the key.
    dependencies: frozenset[Any]
    operation: Schema

    @property
    def place(self) -> tuple[Path, int]:
        """The file and the line that define it."""
        file = Path(inspect.getsourcefile(self.function) or "")
        return file.resolve(), inspect.getsourcelines(self.function)[1]

    @property
    def body(self) -> Schema:
        """The schemas of its body by content type."""
        return {kind: one["schema"] for kind, one in self.operation.get("requestBody", {}).get("content", {}).items()}


@cache
def document() -> Schema:
    """Return the OpenAPI document of a gateway with keys."""
    return dict(create_app(SimpleNamespace(keys=("key",))).openapi())  # type: ignore[arg-type]


def routes() -> Iterator[Route]:
    """Yield the routes that the OpenAPI document has."""
    paths = document()["paths"]
    for router, prefix in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            path = prefix + route.path.replace(":path}", "}")
            for method in sorted(route.methods if route.include_in_schema else ()):
                operation = paths[path][method.lower()]
                yield Route(method, path, route.endpoint, frozenset(called(route.dependant)), operation)


def called(dependant: Any) -> Iterator[Any]:
    """Yield the functions that FastAPI calls for a route."""
    for dependency in dependant.dependencies:
        yield dependency.call
        yield from called(dependency)


def undescribed() -> Iterator[tuple[Path, int, str]]:
    """Yield the parameters without a description, each with the file and line of its route."""
    ignored = {one.name for medium in MODALITIES for one in medium.parameters if one.use in ("nothing", "unused")}
    for route in routes():
        for parameter in route.operation.get("parameters", ()):
            if not parameter.get("description"):
                yield *route.place, f"the parameter {parameter['name']} of {route.path} has no description"
        for schema in route.body.values():
            for name, field in schema["properties"].items():
                if not description(field) and name not in ignored:
                    yield *route.place, f"the field {name} of {route.method} {route.path} has no description"


def page() -> str:
    """Return the whole page."""
    found = list(routes())
    index = table("route | what it does", ([f"[`{r.method} {r.path}`](#{anchor(r)})", first(r)] for r in found))
    always = table("code | status", ([f"`{name}`", statuses()[name]] for name in ANYWHERE))
    parts = [HEAD, index, *map(section, found), ALWAYS, always, OBJECTS_HEAD]
    parts += [f"\n### {title.capitalize()}\n\n{fields_of(schema)}" for title, schema in OBJECTS.items()]
    return "".join([*parts, next_step("[Events of a request](events.md)", "[Errors](errors.md)")])


def anchor(route: Route) -> str:
    """Return the anchor of a route's section."""
    text = f"{route.method} {route.path}".lower()
    return "".join(char for char in text.replace(" ", "-") if char.isalnum() or char in "-_")


def first(route: Route) -> str:
    """Return the first sentence about a route."""
    return str(route.operation["description"]).partition("\n\n")[0].replace("\n", " ")


def section(route: Route) -> str:
    """Return what the page says about a route."""
    if twins := [other for other in routes() if other.function == route.function and len(other.path) < len(route.path)]:
        same = f"[`{twins[0].method} {twins[0].path}`](#{anchor(twins[0])})"
        return f"\n## `{route.method} {route.path}`\n\nThe same as {same}.\n"
    parts = [
        f"\n## `{route.method} {route.path}`\n\n{route.operation['description']}\n\nWho may call it: {who(route)}.\n"
    ]
    if parameters := route.operation.get("parameters"):
        rows = ([code(one["name"]), one["in"], *cells(one["schema"], one), one["description"]] for one in parameters)
        parts.append("\n" + table("parameter | in | type | default | meaning", rows))
    parts += body_parts(route.body)
    parts.append("\n" + table("status | response", [*responses(route), *errors(route)]))
    parts.append("\nIt can also have the errors [of all routes](#errors-of-all-routes).\n")
    return "".join(parts)


def who(route: Route) -> str:
    """Return who may call a route."""
    if auth.admin_only in route.dependencies:
        return "a key with `admin=yes`"
    if auth.visitor_of in route.dependencies:
        return "everyone; with a key, the response has more"
    if auth.caller_of not in route.dependencies:
        return "everyone"
    if route.path.startswith("/v1/models"):
        return "any key, for the models that it may use"
    if route.body:
        return "any key"
    return "any key, for the requests of its tenant; a key with `admin=yes`, for those of all tenants"


def body_parts(body: Schema) -> Iterator[str]:
    """Yield what is said about a body: the table of its fields, and how a form differs."""
    if not body:
        return
    schema = body["application/json"]
    named = {
        name: field
        for name, field in schema["properties"].items()
        if description(field) not in ("", "accepted and ignored")
    }
    rows = (
        [code(name), *cells(field, required=name in schema["required"]), description(field)]
        for name, field in named.items()
    )
    yield f"\nBody: `{'`, or `'.join(body)}`.\n\n" + table("field | type | default | meaning", rows)
    if ignored := ", ".join(map(code, sorted(schema["properties"].keys() - named.keys()))):
        yield f"\nAccepted, but without effect: {ignored}.\n"
    form = body.get("multipart/form-data", {"properties": {}})["properties"]
    if files := [code(name) for name, field in form.items() if "binary" in json.dumps(field)]:
        yield f"\nIn a form, these fields are files: {', '.join(files)}. All others are texts.\n"


def cells(schema: Schema, parameter: Mapping[str, Any] | None = None, required: bool = False) -> tuple[str, str]:
    """Return the type and the default of a parameter or field, as cells."""
    required = required or bool(parameter and parameter.get("required"))
    plain = without_null(schema)
    default = schema.get("default", plain.get("default"))
    shown = "" if default is None else json.dumps(default).strip('"')
    return type_of(plain), "required" if required else code(shown)


def without_null(schema: Schema) -> Schema:
    """Return the schema of a value that is not null."""
    options = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    return options[0] if len(options) == 1 else schema


def description(schema: Schema) -> str:
    """Return the description of a field, which its schema for values other than null has."""
    return str(schema.get("description") or without_null(schema).get("description") or "")


def type_of(schema: Schema) -> str:
    """Return the type of a value in words, with its bounds."""
    if "enum" in schema:
        return "one of " + ", ".join(code(json.dumps(one).strip('"')) for one in schema["enum"] if one != "")
    if "const" in schema:
        return code(json.dumps(schema["const"]).strip('"'))
    if "anyOf" in schema:
        null = " or null" if {"type": "null"} in schema["anyOf"] else ""
        words = dict.fromkeys(type_of(one) for one in schema["anyOf"] if one != {"type": "null"})
        return " or ".join(words) + null
    match schema.get("type"):
        case "array":
            return f"array of {type_of(schema['items'])}"
        case "object" if "additionalProperties" in schema and "properties" not in schema:
            values = schema["additionalProperties"]
            return f"object of {type_of(values)} by name" if values else "object"
        case "string" if schema.get("format") == "binary":
            return "file"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    low = None if low is not None and abs(low) > 2**53 else low
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    bounds = f" {low} to {high}" if None not in (low, high) and high < 2**53 else "" if low is None else f" from {low}"
    lengths = f", at most {schema['maxLength']} characters" if "maxLength" in schema else ""
    return f"{schema.get('type', 'any')}{bounds}{lengths}"


def responses(route: Route) -> Iterator[list[str]]:
    """Yield the rows of a route's successful responses."""
    for status, response in sorted(route.operation["responses"].items()):
        if status[0] == "2":
            shown = [
                shown_schema(kind, one.get("schema", {}), route.function.__name__)
                for kind, one in response.get("content", {}).items()
            ]
            text = "; or ".join(filter(None, shown)) or FILES.get(route.function.__name__, "empty")
            yield [status, text[0].upper() + text[1:] + "."]


def errors(route: Route) -> Iterator[list[str]]:
    """Yield the rows of a route's error codes, by status."""
    by_status: dict[str, list[str]] = {}
    for name in error_codes(route):
        by_status.setdefault(statuses()[name], []).append(code(name))
    for status, codes in sorted(by_status.items()):
        yield [status, ", ".join(codes)]


def shown_schema(kind: str, schema: Schema, name: str) -> str:
    """Return what a response's body is: an object, a list of objects, a file or an event stream."""
    if name in FILES:
        return FILES[name]
    if kind == "text/event-stream":
        return (
            "`text/event-stream`: [events of the request](events.md)"
            if name == "events"
            else ("`text/event-stream`, with `stream`: [events](events.md#other-event-streams)")
        )
    items = schema.get("properties", {}).get("data", {}).get("items")
    if items and schema["properties"].get("object") == {"const": "list"}:
        paging = ", with `has_more`, `first_id` and `last_id`" if "has_more" in schema["properties"] else ""
        return f"list (`data`) of {' or '.join(link(one) for one in items.get('anyOf', [items]))} objects{paging}"
    if (linked := link(schema)) != "other":
        return f"{linked} object"
    fields = schema.get("properties") or {"…": schema.get("additionalProperties", {})}
    return "JSON with " + ", ".join(f"`{field}` ({type_of(one)})" for field, one in fields.items())


def link(schema: Schema) -> str:
    """Return the link to the section of an object."""
    for title, known in OBJECTS.items():
        if json.dumps(known, sort_keys=True) == json.dumps(schema, sort_keys=True):
            return f"[{title}](#{title.replace(' ', '-')})"
    return "other"


def fields_of(schema: Schema) -> str:
    """Return the table of an object's fields; those of objects in it have names with dots."""
    return table("field | type | meaning", rows_of(schema))


def rows_of(schema: Schema, prefix: str = "") -> Iterator[list[str]]:
    """Yield the rows of an object's fields."""
    for name, field in schema["properties"].items():
        plain = without_null(field)
        inner = plain.get("items", plain)
        dots = "[]." if "items" in plain else "."
        optional = "" if name in schema["required"] else ", only where it applies"
        null = " or null" if plain is not field and "anyOf" in field else ""
        kind = ("array of objects" if "items" in plain else "object") if "properties" in inner else type_of(plain)
        yield [code(prefix + name), kind + null + optional, meaning(prefix + name, field)]
        if "properties" in inner:
            yield from rows_of(inner, prefix + name + dots)


def meaning(name: str, field: Schema) -> str:
    """Return the meaning of an object's field: its own, that of the stage's comment, or that of its description."""
    in_stage = STAGE_FIELDS.get(name.removeprefix("stages[]."), "") if name.startswith("stages[].") else ""
    return MEANINGS.get(name) or in_stage or description(field)


@cache
def statuses() -> dict[str, str]:
    """Return the statuses of each error code, as text."""
    return {name: ", ".join(map(str, sorted(of))) for name, of in refusals().items()}


def error_codes(route: Route) -> list[str]:
    """Return the error codes of a route, in the order of the alphabet."""
    name = route.function.__name__
    codes = {*CODES.get(name, ())}
    is_keyed = auth.caller_of in route.dependencies and auth.visitor_of not in route.dependencies
    parameters = route.operation.get("parameters", ())
    if route.body or any(one["schema"].keys() - {"title", "description"} != {"type"} for one in parameters):
        codes.add("invalid_parameter")
    if is_keyed:
        codes |= {*QUEUED}
    if is_keyed and route.method != "GET":
        codes.add("read_only")
    if auth.admin_only in route.dependencies:
        codes.add("admin_only")
    if "/{id}" in route.path:
        codes.add("not_found")
    if "/{name}" in route.path:
        codes.add("model_not_found")
    return sorted(codes)
