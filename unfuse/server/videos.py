"""Videos, as the `openai` client asks for them and polls for them. Each is a request too, under the same id."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Query
from PIL import Image
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from unfuse.core.errors import InvalidParameter, NotFound, ResultsUnavailable, UnfuseError
from unfuse.core.modalities import LAST_FRAME, VIDEO
from unfuse.core.request import Event, RequestContext, RequestRecord
from unfuse.edge.access import Refusal, ResponseAborted
from unfuse.queues.base import RequestFilter
from unfuse.server.auth import Known
from unfuse.server.body import read_body
from unfuse.server.calls import CreatingCall, respond_async
from unfuse.server.gateway import Gateway, Served
from unfuse.server.openapi_schemas import CREATE, DELETED, FILMED, VIDEO as VIDEO_OBJECT, one, several
from unfuse.server.request_objects import video_object
from unfuse.server.requests import listed
from unfuse.server.responses import file_response
from unfuse.stages.fragments import streamed
from unfuse.stores.results import part_name

CHUNK_BYTES = 256 * 1024  # about so many bytes of a finished file are read at a time


class VideoStream:
    """One client's stream of one video. It keeps no bytes for a slow client, only how many it has, and their hash."""

    def __init__(self, gateway: Gateway, context: RequestContext) -> None:
        self._gateway, self._request, self._fps = gateway, context.id, float(context.request.params["fps"] or 0)
        (self._stage,) = (stage.name for stage in context.plan.stages if stage.final)
        self._attempt = self._parts = self._bytes = 0
        self._sent = hashlib.sha256()

    async def content(self) -> AsyncIterator[bytes]:
        """The bytes, as they come to be. Raises ResponseAborted when the client cannot have all of them."""
        try:
            async for event in self._gateway.queue.watch(self._request):
                while data := await self._next_part(event):
                    yield data
            record = await self._gateway.queue.load(self._request)
            if record.context.status != "completed":
                raise ResponseAborted(f"the request is {record.status}")
            rest = self._beyond(await to_thread.run_sync(self._gateway.results.path, self._request, 0))
            while data := await to_thread.run_sync(_chunk, rest):
                yield data
        except (UnfuseError, OSError) as error:
            raise ResponseAborted(str(error)) from error

    async def _next_part(self, event: Event) -> bytes:
        """The next part of those that this event tells of; b"" if there is none.

        One that cannot be read is tried again at the next event; if it is gone for good, the finished file has it.
        """
        if event.type != "progress" or event.stage != self._stage:
            return b""
        with suppress(NotFound, ResultsUnavailable):
            if event.attempt > self._attempt and event.step >= self._parts:
                await self._go_on_with(event.attempt)
            if event.attempt == self._attempt and event.step > self._parts:
                data = await self._read(event.attempt, self._parts + 1)
                self._parts, self._bytes = self._parts + 1, self._bytes + len(data)
                self._sent.update(data)
                return data
        return b""

    async def _go_on_with(self, attempt: int) -> None:
        """Have a later attempt's parts follow what was sent. Raises ResponseAborted if they do not begin with that."""
        same = hashlib.sha256()
        for step in range(1, self._parts + 1):
            same.update(await self._read(attempt, step))
        self._require(same.digest())
        self._attempt = attempt

    async def _read(self, attempt: int, step: int) -> bytes:
        return await to_thread.run_sync(self._gateway.results.attached, self._request, part_name(attempt, step))

    def _beyond(self, path: Path) -> Iterator[bytes]:
        """The finished file's stream behind what was sent. Raises ResponseAborted if it does not begin with that."""
        same, left = hashlib.sha256(), self._bytes
        for data in streamed(path, self._fps):
            known, new = data[:left], data[left:]
            same.update(known)
            left -= len(known)
            if known and not left:
                self._require(same.digest())
            if new:
                yield new
        if left:
            self._require(same.digest())

    def _require(self, digest: bytes) -> None:
        if digest != self._sent.digest():
            raise ResponseAborted("what was made again differs from what was sent")


def _chunk(rest: Iterator[bytes]) -> bytes:
    data = bytearray()
    for piece in rest:
        data += piece
        if len(data) >= CHUNK_BYTES:
            break
    return bytes(data)


router = APIRouter(prefix="/videos", tags=["videos"])

POLL_MS = 500  # how long a client waits before it asks again for a video that is not done


@router.post("", openapi_extra=CREATE, responses=FILMED)
@router.post("/generations", openapi_extra=CREATE, responses=FILMED)
async def create(request: Request, gateway: Served, asker: Known) -> Response:
    """Have a video made of a prompt, and of a picture where the model takes one. It is there once it is completed."""
    call = CreatingCall(gateway, request, asker, await read_body(request), VIDEO, "input_reference", beside=LAST_FRAME)
    record, _ = await call.accept()
    return await respond_async(call, record) or _answer(record)


@router.get("", responses=several(VIDEO_OBJECT))
async def page(
    gateway: Served,
    caller: Known,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, object]:
    """Videos, newest first or last; the next page starts `after` the last id of this one."""
    which = RequestFilter(tenant=caller.sees, video=True)
    found = await gateway.queue.list(which, after=after, limit=limit + 1, oldest_first=order == "asc")
    return listed([video_object(record) for record in found], limit)


@router.get("/{id}", responses=one(VIDEO_OBJECT))
async def show(id: str, gateway: Served, caller: Known) -> JSONResponse:
    """One video."""
    return _answer(await _load(gateway, id, caller.sees))


@router.delete("/{id}", responses=DELETED)
async def delete(id: str, gateway: Served, caller: Known) -> dict[str, object]:
    """End a video if it is not done, and forget it."""
    await _load(gateway, id, caller.sees)
    await gateway.delete(id)
    return {"id": id, "object": "video.deleted", "deleted": True}


@router.get("/{id}/content", response_class=FileResponse)
async def content(
    id: str,
    request: Request,
    gateway: Served,
    caller: Known,
    variant: Literal["video", "thumbnail", "spritesheet"] = "video",
    stream: bool = False,
) -> Response:
    """Return the file of a video, or ranges of its bytes, or its first frame as WebP.

    With `stream`, the video as fragmented MP4, also while it is being made: frames come as they are decoded.
    """
    record = await _load(gateway, id, caller.sees)
    if variant == "spritesheet":
        raise InvalidParameter("variant can be video or thumbnail; spritesheets are not made", "variant")
    if stream and (variant != "video" or record.context.request.params["output_format"] != "mp4"):
        raise InvalidParameter("what can be streamed is a video as mp4: leave stream out", "stream")
    if stream and (record.context.status == "completed" or not record.context.over):
        live = VideoStream(gateway, record.context).content()
        return StreamingResponse(live, media_type="video/mp4", headers={"cache-control": "no-store"})
    if record.context.status != "completed":
        message = f"{id} has no content, it is {record.status}: ask for it once it is completed"
        raise Refusal(409, "not_completed", message, headers={"x-should-retry": "false"})
    path = await to_thread.run_sync(gateway.results.path, id, 0)
    file = record.context.result[0]
    if variant == "thumbnail":
        return Response(await to_thread.run_sync(_thumbnail, path), media_type="image/webp")
    if len(record.context.result) > 1:
        last = len(record.context.result) - 1
        raise InvalidParameter(f"{id} is frames: read /v1/requests/{id}/result/0 to /{last}", "variant")
    return await file_response(request, path, file.content_type, file.sha256)


@router.post("/edits", include_in_schema=False)
@router.post("/extensions", include_in_schema=False)
@router.post("/characters", include_in_schema=False)
@router.post("/{id}/remix", include_in_schema=False)
async def unknown(request: Request) -> None:
    """What OpenAI can make of a video that exists, and we cannot. Always raises NotFound."""
    raise NotFound(f"{request.scope['path']} is not served: make a new video with POST /v1/videos")


async def _load(gateway: Gateway, id: str, tenant: str | None) -> RequestRecord:
    record = await gateway.load(id, tenant)
    if not record.context.video:
        raise NotFound(f"request {id} is no video: read /v1/requests/{id}")
    return record


def _answer(record: RequestRecord) -> JSONResponse:
    headers = {} if record.context.over else {"openai-poll-after-ms": str(POLL_MS)}
    return JSONResponse(video_object(record), headers=headers)


def _thumbnail(path: Path) -> bytes:
    """The first frame of a video or picture."""
    import av

    with av.open(str(path)) as container:
        frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
    file = BytesIO()
    Image.fromarray(frame).save(file, "WEBP", quality=85)
    return file.getvalue()
