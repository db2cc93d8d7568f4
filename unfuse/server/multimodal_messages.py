"""Pictures and videos in the messages of a chat: fetched where they are addresses, checked, and counted in tokens.

What an MP4 file says of its video is read from its boxes: sizes are known before anything is decoded, or allocated.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from unfuse.core.codec import MAX_UPLOAD_BYTES, encode
from unfuse.core.errors import InvalidParameter, TransientError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.parameters import choice, number, printable
from unfuse.core.pixels import MAX_SIDE, size_of
from unfuse.core.vision import Grid, MediaItem, VisionConfig
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.server.body import MAX_BYTES, as_image_url, decode_data_url, read_picture
from unfuse.server.outbound_http import OutboundHttp

MAX_SHOWN = 64  # the most pictures and videos of one chat
MAX_PIXELS = 400_000_000  # the most pixels of all pictures, those of videos too: each is decoded, to be sure of it

#: The most frames of a video file, and pixels of all of them: encoders decode them up to the last one that is shown.
MAX_FRAMES, MAX_FILM = 10_000, 10_000_000_000

SHOWS = ("image", "video")  # the types of parts by which templates write tokens for what is shown

#: OpenAI's words for how closely to look; a model's own processor decides that, whichever is sent.
DETAILS = ("auto", "low", "high", "original")

FETCHES = 8  # pictures that a gateway fetches at one time: each may take MAX_BYTES of memory
MAX_FETCHED = 16  # the most pictures that one call may have fetched; more are sent as data: URLs

PATH = (b"moov", b"trak", b"mdia")  # the boxes of an MP4 file, each in the one before, that describe a track
MAX_BOXES = 10_000


def read_shown(
    vision: VisionConfig,
    tokenizer: ChatTokenizer,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], tuple[MediaItem, ...], dict[str, bytes]]:
    """The ids of messages, what they show, and the uploads of that. Takes long.

    Raises InvalidParameter for messages that are none, and for what cannot be shown to the model.
    """
    reading = _Reading(vision)
    read = [reading.message(message, at) for at, message in enumerate(messages)]
    edit = partial(_timed, vision, tokenizer, reading.moments)
    ids = vision.expanded(tokenizer.prompt(read, tools, template_kwargs, shows=SHOWS, edit=edit), reading.shown)
    return ids, tuple(reading.shown), reading.uploads


def _timed(vision: VisionConfig, tokenizer: ChatTokenizer, moments: Sequence[Sequence[float]], text: str) -> str:
    """The text with what says when each group of a video is, and a token for each, where the model is told so."""
    begin, video, end = (tokenizer.piece(id).decode() for id in (vision.begin, vision.video, vision.end))
    parts = text.split(begin + video + end)
    if not vision.timed or len(parts) != len(moments) + 1:
        return text  # which has as many tokens as it has, and is refused for that
    made = parts[0]
    for each, part in zip(moments, parts[1:], strict=True):
        made += "".join(f"<{moment:.1f} seconds>{begin}{video}{end}" for moment in each) + part
    return made


class _Reading:
    """A chat's messages, what they have `shown`, the bytes of its `uploads`, `moments` of each video's groups."""

    def __init__(self, vision: VisionConfig) -> None:
        self._vision = vision
        self.shown, self.uploads, self.moments = list[MediaItem](), dict[str, bytes](), list[list[float]]()
        self._reads = {"image_url": self._picture, "video_url": self._file, "video": self._frames}
        self._pixels = 0

    def message(self, message: Any, at: int) -> Any:
        """A message as the template reads it: with parts that only say that something is shown."""
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
            return message
        parts = [self._part(part, f"messages[{at}].content[{place}]") for place, part in enumerate(message["content"])]
        return {**message, "content": parts}

    def _part(self, part: Any, name: str) -> Any:
        part = as_image_url(part)
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in self._reads:
            return part
        if len(self.shown) == MAX_SHOWN:
            raise InvalidParameter(f"messages may show {MAX_SHOWN} pictures and videos, and have more", "messages")
        try:
            self._reads[kind](f"{name}.{kind}", part)
        except InvalidParameter as error:
            raise InvalidParameter(str(error), "messages") from error
        return {"type": "image" if kind == "image_url" else "video"}

    def _picture(self, name: str, part: Mapping[str, Any]) -> None:
        value = part.get("image_url")
        detail = value.get("detail") if isinstance(value, Mapping) else None
        if detail is not None:
            choice(f"{name}.detail", detail, DETAILS)
        data, size = self._read(f"{name}.url", _url(value))
        self._add(data, self._vision.picture_grid(*size))

    def _read(self, name: str, url: object) -> tuple[bytes, tuple[int, int]]:
        """A picture and its size."""
        data = read_picture(name, _data_url(name, url))
        width, height = size_of(data)
        self._pixels += width * height
        if self._pixels > MAX_PIXELS:
            raise InvalidParameter(f"{name}: with it, messages show more than {MAX_PIXELS} pixels in all")
        return data, (width, height)

    def _frames(self, name: str, part: Mapping[str, Any]) -> None:
        """A video that is a list of pictures of one size, so many of them a second."""
        urls, most = part.get("video"), self._vision.images.most
        if not isinstance(urls, list) or not 2 <= len(urls) <= most:
            raise InvalidParameter(f"{name} must be a list of 2 to {most} frames, or send a file as video_url")
        rate = number(f"{name}.fps", part.get("fps", self._vision.rate), 0.01, 1000)
        read = [self._read(f"{name}[{at}]", _url(url)) for at, url in enumerate(urls)]
        if len(sizes := {size for _, size in read}) > 1:
            raise InvalidParameter(f"{name}: frames must all have one size, not {len(sizes)}")
        ((size),) = sizes
        frames = encode([data for data, _ in read], MAX_UPLOAD_BYTES)
        self._video(frames, size, [*range(len(urls))], rate, rate, "")

    def _file(self, name: str, part: Mapping[str, Any]) -> None:
        """A video that is an MP4 file, of which some frames are picked."""
        data = decode_data_url(f"{name}.url", _data_url(f"{name}.url", _url(part.get("video_url"))), "video")
        try:
            film = film_of(data)
        except ValueError as error:
            raise InvalidParameter(f"{name}.url is not an MP4 file that can be read: {error}") from error
        if film.frames > MAX_FRAMES or film.frames * film.width * film.height > MAX_FILM:
            has = f"{film.frames} frames of {film.width}x{film.height} pixels"
            raise InvalidParameter(f"{name}.url has {has}: there may be {MAX_FRAMES}, and {MAX_FILM} pixels in all")
        if max(film.width, film.height) > MAX_SIDE or film.frames < 2:
            raise InvalidParameter(f"{name}.url must have 2 frames or more, of at most {MAX_SIDE} pixels a side")
        picked = self._vision.picked(film.frames, film.rate)
        numbers = ",".join(map(str, picked))
        size = film.width, film.height
        self._video(data, size, picked, film.rate, film.rate * len(picked) / film.frames, numbers)

    def _video(
        self, data: bytes, size: tuple[int, int], picked: Sequence[int], rate: float, shown_rate: float, numbers: str
    ) -> None:
        vision, grid = self._vision, self._vision.video_grid(*size, len(picked))
        self.moments.append(vision.moments(picked, rate))
        self._add(data, grid, images=len(picked), picked=numbers, seconds=vision.group / shown_rate)

    def _add(self, data: bytes, grid: Grid, **video: Any) -> None:
        digest = hashlib.sha256(data).hexdigest()
        upload = f"shown-{digest[:32]}"
        self.shown.append(MediaItem(digest, upload, *grid, self._vision.tokens(grid), **video))
        self.uploads[upload] = data


def _url(value: object) -> object:
    """The address in what a part shows, which may be the address itself."""
    return value.get("url") if isinstance(value, Mapping) else value


def _data_url(name: str, url: object) -> str | bytes:
    """A data: URL, or what was fetched in the place of another one."""
    if isinstance(url, bytes):
        return url
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise InvalidParameter(
            f"{name} must be a data: URL, nothing is fetched here but pictures of --image-hosts: not {printable(url)}"
        )
    return url


class ImageFetcher:
    """Fetches pictures from these hosts, as `OutboundHttp` has them; from none where there are none."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._targets = OutboundHttp(hosts, "messages", "--image-hosts", "fetched from")
        self._all = asyncio.Semaphore(FETCHES)

    async def fetched(self, card: ModelSpec, fields: Mapping[str, object]) -> Mapping[str, object]:
        """Return the fields of a chat with pictures in the place of their addresses.

        Raises InvalidParameter for an address that is not allowed or cannot be fetched.
        """
        messages = fields.get("messages")
        if card.vision is None or not self._targets or not isinstance(messages, list):
            return fields
        addresses = dict.fromkeys(url for message in messages for part in _parts(message) if (url := _address(part)))
        if len(addresses) > MAX_FETCHED:
            raise InvalidParameter(
                f"messages: at most {MAX_FETCHED} pictures are fetched, send more as data: URLs", "messages"
            )
        found = dict(zip(addresses, await asyncio.gather(*map(self._fetched, addresses)), strict=True))
        return {**fields, "messages": [_filled(message, found) for message in messages]}

    async def close(self) -> None:
        """Close the connections."""
        await self._targets.close()

    async def _fetched(self, url: str) -> bytes:
        self._targets.require(url)
        async with self._all:
            try:
                return await self._targets.read(url, MAX_BYTES)
            except TransientError as error:
                raise InvalidParameter(f"messages: {url[:200]} cannot be fetched: {error}", "messages") from error


def _parts(message: object) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return [as_image_url(part) for part in content] if isinstance(content, list) else []


def _address(part: object) -> str:
    """The address that a part has fetched; "" for a part without one."""
    url = _url(part.get("image_url")) if isinstance(part, Mapping) and part.get("type") == "image_url" else ""
    return url if isinstance(url, str) and url.lower().startswith(("http:", "https:")) else ""


def _filled(message: Any, found: Mapping[str, bytes]) -> Any:
    """A message with pictures instead of their addresses."""
    parts = _parts(message)
    if not any(map(_address, parts)):
        return message
    for place, part in enumerate(parts):
        if url := _address(part):
            shown = part["image_url"] if isinstance(part["image_url"], Mapping) else {}
            parts[place] = {**part, "image_url": {**shown, "url": found[url]}}
    return {**message, "content": parts}


class VideoInfo(NamedTuple):
    """Pixels of a frame, how many frames there are, and how many of them a second."""

    width: int
    height: int
    frames: int
    rate: float


def film_of(data: bytes) -> VideoInfo:
    """The first video in a file. Raises ValueError for one that is no MP4 file, or that says it in its fragments."""
    try:
        for track in _inside(memoryview(data), PATH):
            if film := _film(track):
                return film
    except (struct.error, IndexError) as error:
        raise ValueError("a box is cut short") from error
    raise ValueError("it has no video track with frames that are listed at one place")


def _film(track: memoryview) -> VideoInfo | None:
    """The video of a track; None of one that is no video."""
    handler, header = (next(_inside(track, (name,)), memoryview(b"")) for name in (b"hdlr", b"mdhd"))
    if bytes(handler[8:12]) != b"vide":
        return None
    scale, duration = struct.unpack(">IQ" if header[0] else ">II", header[20:32] if header[0] else header[12:20])
    lists = b"minf", b"stbl"
    sizes = next(_inside(track, (*lists, b"stsz")), memoryview(b""))
    looks = next(_inside(track, (*lists, b"stsd")), memoryview(b""))
    (frames,) = struct.unpack(">I", sizes[8:12])
    width, height = struct.unpack(">HH", looks[40:44])
    if not all((scale, duration, frames, width, height)):
        return None
    return VideoInfo(width, height, frames, frames * scale / duration)


def _inside(data: memoryview, path: tuple[bytes, ...]) -> Iterator[memoryview]:
    """The contents of the boxes at a path."""
    place = 0
    for _ in range(MAX_BOXES):
        if place + 8 > len(data):
            return
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        head = 8
        if size == 1:
            head, (size,) = 16, struct.unpack(">Q", data[place + 8 : place + 16])
        end = place + size if size else len(data)
        if size and size < head or end > len(data):
            raise ValueError("a box is longer than the file, or than it can be")
        if kind == path[0] and len(path) == 1:
            yield data[place + head : end]
        elif kind == path[0]:
            yield from _inside(data[place + head : end], path[1:])
        place = end
    raise ValueError(f"it has more than {MAX_BOXES} boxes")
