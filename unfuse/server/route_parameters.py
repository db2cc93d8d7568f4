"""Parameters that several routes share, with their descriptions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query

#: The most characters of an Idempotency-Key.
MAX_KEY = 255

#: A client sends this header, with the value `true`, with an Idempotency-Key that it never used before.
NEW_KEY = "unfuse-new-key"

#: The id of a request in a path.
RequestId = Annotated[str, Path(description="ID of the request.")]

#: The id of a dead request in a path.
DeadId = Annotated[str, Path(description="ID of the dead request.")]

#: The id of a video in a path.
VideoId = Annotated[str, Path(description="ID of the video, which is also that of its request.")]

#: The number of a result in a path.
ResultIndex = Annotated[int, Path(description="Number of the result within its request, from 0.")]

#: The name of a model in a path.
ModelName = Annotated[str, Path(description="Name of the model, as `GET /v1/models` lists it; may contain slashes.")]

#: The end of the page before the requested one.
After = Annotated[
    str | None, Query(description="ID of the last object of the page before; without it, the first page.")
]

#: The length of a page of requests.
PageLimit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of objects.")]


def _header(name: str, description: str, **limits: int) -> dict[str, Any]:
    """Return the documentation of an optional header."""
    return {"name": name, "in": "header", "description": description, "schema": {"type": "string", **limits}}


#: The headers of calls that create a request, as in OpenAPI.
CREATING_HEADERS = [
    _header(
        "Idempotency-Key",
        "Identifies a repeat of this call: a second call with the same key and body gets the first one's request.",
        maxLength=MAX_KEY,
    ),
    _header(
        NEW_KEY,
        "`true`: the Idempotency-Key was never used before, so no earlier request is looked up.",
    ),
    _header("Prefer", "`respond-async`: respond at once with 202 and the request object, without its result."),
]

#: The header that resumes the stream of a chat.
CHAT_RESUMPTION = _header(
    "Last-Event-ID",
    "With an Idempotency-Key and `stream`: the id of the last event that was received. The stream continues after it.",
)
