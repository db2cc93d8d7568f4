"""Routes for videos, in the format of the `openai` client, which polls for them.

A video is also a request, with the same id.
"""

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
from unfuse.edge.access import ApiError, ResponseAborted
from unfuse.queues.base import RequestFilter
from unfuse.server.auth import CallerDep
from unfuse.server.body import read_body
from unfuse.server.calls import GenerationCall, respond_async
from unfuse.server.gateway import Gateway, GatewayDep
from unfuse.server.openapi_schemas import (
    CREATE,
    DELETED,
    VIDEO as VIDEO_OBJECT,
    VIDEO_RESPONSE,
    list_response,
    object_response,
)
from unfuse.server.request_objects import video_object
from unfuse.server.requests import listed
from unfuse.server.responses import file_response
from unfuse.server.route_parameters import After, VideoId
from unfuse.stages.fragments import streamed
from unfuse.stores.results import fragment_name

#: About how many bytes of a finished file are read at a time.
CHUNK_BYTES = 256 * 1024

#: Milliseconds until a client should ask again for a video that is not done.
POLL_MS = 500

router = APIRouter(prefix="/videos", tags=["videos"])


class VideoStream:
    """Streams one video to one client as fragmented MP4, while its fragments are made.

    It buffers nothing for a slow client: it only counts and hashes the bytes that were sent. With the hash it checks
    that the fragments of a later attempt, and the finished file, continue what was sent.
    """

    def __init__(self, gateway: Gateway, context: RequestContext) -> None:
        self._gateway = gateway
        self._request = context.id
        self._fps = float(context.request.params["fps"] or 0)
        (self._stage,) = (stage.name for stage in context.plan.stages if stage.final)
        self._attempt = 0  # the attempt whose fragments are sent
        self._sent_fragments = 0
        self._sent_bytes = 0
        self._sent_hash = hashlib.sha256()

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the video as they are made.

        Raises ResponseAborted if not all of them can be sent.
        """
        try:
            async for event in self._gateway.queue.watch(self._request):
                # One event may report several fragments.
                while data := await self._next_fragment(event):
                    yield data

            record = await self._gateway.queue.load(self._request)
            if record.context.status != "completed":
                raise ResponseAborted(f"the request is {record.status}")
            remaining_data = self._unsent(await to_thread.run_sync(self._gateway.results.path, self._request, 0))
            while data := await to_thread.run_sync(_read_chunk, remaining_data):
                yield data
        except (UnfuseError, OSError) as error:
            raise ResponseAborted(str(error)) from error

    async def _next_fragment(self, event: Event) -> bytes:
        """Return the next unsent fragment that this event reports, or b"".

        A fragment that cannot be read is tried again at the next event. If it was deleted, the finished file has it.
        """
        if event.type != "progress" or event.stage != self._stage:
            return b""
        with suppress(NotFound, ResultsUnavailable):
            if event.attempt > self._attempt and event.step >= self._sent_fragments:
                await self._switch_to(event.attempt)
            if event.attempt == self._attempt and event.step > self._sent_fragments:
                data = await self._read(event.attempt, self._sent_fragments + 1)
                self._sent_fragments += 1
                self._sent_bytes += len(data)
                self._sent_hash.update(data)
                return data
        return b""

    async def _switch_to(self, attempt: int) -> None:
        """Continue with the fragments of a later attempt.

        Raises ResponseAborted if its first fragments are not the bytes that were sent.
        """
        repeated_hash = hashlib.sha256()
        for step in range(1, self._sent_fragments + 1):
            repeated_hash.update(await self._read(attempt, step))
        self._require_same_bytes(repeated_hash.digest())
        self._attempt = attempt

    async def _read(self, attempt: int, step: int) -> bytes:
        return await to_thread.run_sync(self._gateway.results.attached, self._request, fragment_name(attempt, step))

    def _unsent(self, path: Path) -> Iterator[bytes]:
        """Yield the bytes of the finished file, as fragmented MP4, after those that were sent.

        Raises ResponseAborted if the stream does not begin with the bytes that were sent.
        """
        repeated_hash = hashlib.sha256()
        uncompared_bytes = self._sent_bytes
        for data in streamed(path, self._fps):
            repeated, new = data[:uncompared_bytes], data[uncompared_bytes:]
            repeated_hash.update(repeated)
            uncompared_bytes -= len(repeated)
            if repeated and not uncompared_bytes:
                self._require_same_bytes(repeated_hash.digest())
            if new:
                yield new

        if uncompared_bytes:
            self._require_same_bytes(repeated_hash.digest())

    def _require_same_bytes(self, digest: bytes) -> None:
        """Raise ResponseAborted unless this is the hash of the bytes that were sent."""
        if digest != self._sent_hash.digest():
            raise ResponseAborted("the video of a later attempt differs from the bytes that were sent")


def _read_chunk(stream: Iterator[bytes]) -> bytes:
    """Return about CHUNK_BYTES of a stream; b"" at its end."""
    chunk = bytearray()
    for data in stream:
        chunk += data
        if len(chunk) >= CHUNK_BYTES:
            break
    return bytes(chunk)


@router.post("", openapi_extra=CREATE, responses=VIDEO_RESPONSE)
@router.post("/generations", openapi_extra=CREATE, responses=VIDEO_RESPONSE)
async def create(request: Request, gateway: GatewayDep, asker: CallerDep) -> Response:
    """Create a video from a prompt, and from an image where the model takes one.

    The response does not wait for the video: it is available once its status is completed.
    """
    call = GenerationCall(
        gateway, request, asker, await read_body(request), VIDEO, "input_reference", second_image_field=LAST_FRAME
    )
    record, _ = await call.accept()
    return await respond_async(call, record) or _answer(record)


@router.get("", responses=list_response(VIDEO_OBJECT))
async def page(
    gateway: GatewayDep,
    caller: CallerDep,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100, description="Maximum number of videos.")] = 20,
    order: Annotated[
        Literal["asc", "desc"], Query(description="Order by creation: desc is newest first, asc oldest first.")
    ] = "desc",
) -> dict[str, object]:
    """The videos, newest first or last.

    The next page starts `after` the last id of this one.
    """
    videos = RequestFilter(tenant=caller.visible_tenant, video=True)
    records = await gateway.queue.list(videos, after=after, limit=limit + 1, oldest_first=order == "asc")
    return listed([video_object(record) for record in records], limit)


@router.get("/{id}", responses=object_response(VIDEO_OBJECT))
async def show(id: VideoId, gateway: GatewayDep, caller: CallerDep) -> JSONResponse:
    """One video."""
    return _answer(await _load(gateway, id, caller.visible_tenant))


@router.delete("/{id}", responses=DELETED)
async def delete(id: VideoId, gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """Cancel a video if it has not ended, and delete it."""
    await _load(gateway, id, caller.visible_tenant)
    await gateway.delete(id)
    return {"id": id, "object": "video.deleted", "deleted": True}


@router.get("/{id}/content", response_class=FileResponse)
async def content(
    id: VideoId,
    request: Request,
    gateway: GatewayDep,
    caller: CallerDep,
    variant: Annotated[
        Literal["video", "thumbnail", "spritesheet"],
        Query(description="The whole file, or its first frame as WebP (thumbnail). spritesheet is refused."),
    ] = "video",
    stream: Annotated[
        bool, Query(description="Send the video as fragmented MP4, even while it is generated; only for mp4.")
    ] = False,
) -> Response:
    """Return a video's file, ranges of its bytes, or its first frame as WebP.

    With `stream`, the video is sent as fragmented MP4, even while it is generated: frames are sent as they are decoded.
    """
    record = await _load(gateway, id, caller.visible_tenant)
    if variant == "spritesheet":
        raise InvalidParameter("variant must be video or thumbnail: spritesheets are not supported", "variant")
    if stream and (variant != "video" or record.context.request.params["output_format"] != "mp4"):
        raise InvalidParameter("only a video in mp4 can be streamed: leave stream out", "stream")
    if stream and (record.context.status == "completed" or not record.context.is_over):
        stream_bytes = VideoStream(gateway, record.context).content()
        return StreamingResponse(stream_bytes, media_type="video/mp4", headers={"cache-control": "no-store"})

    if record.context.status != "completed":
        message = f"{id} has no content, because it is {record.status}: repeat the call when it is completed"
        raise ApiError(409, "not_completed", message, headers={"x-should-retry": "false"})
    path = await to_thread.run_sync(gateway.results.path, id, 0)
    file = record.context.result[0]
    if variant == "thumbnail":
        return Response(await to_thread.run_sync(_thumbnail, path), media_type="image/webp")
    if len(record.context.result) > 1:
        last = len(record.context.result) - 1
        raise InvalidParameter(f"{id} is stored as frames: read /v1/requests/{id}/result/0 to /{last}", "variant")
    return await file_response(request, path, file.content_type, file.sha256)


@router.post("/edits", include_in_schema=False)
@router.post("/extensions", include_in_schema=False)
@router.post("/characters", include_in_schema=False)
@router.post("/{id}/remix", include_in_schema=False)
async def unknown(request: Request) -> None:
    """Refuse OpenAI's operations on existing videos, which this server does not have. Always raises NotFound."""
    raise NotFound(f"{request.scope['path']} is not supported: create a new video with POST /v1/videos")


async def _load(gateway: Gateway, id: str, tenant: str | None) -> RequestRecord:
    """Return the record of a video.

    Raises NotFound if it is unknown, another tenant's, or no video.
    """
    record = await gateway.load(id, tenant)
    if not record.context.video:
        raise NotFound(f"request {id} is not a video: see /v1/requests/{id}")
    return record


def _answer(record: RequestRecord) -> JSONResponse:
    """Return the response with a video object.

    It has a polling interval while the video is not done.
    """
    headers = {} if record.context.is_over else {"openai-poll-after-ms": str(POLL_MS)}
    return JSONResponse(video_object(record), headers=headers)


def _thumbnail(path: Path) -> bytes:
    """Return the first frame of a video or picture, as WebP."""
    import av

    with av.open(str(path)) as container:
        frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
    webp = BytesIO()
    Image.fromarray(frame).save(webp, "WEBP", quality=85)
    return webp.getvalue()
