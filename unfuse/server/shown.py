"""What the messages of a chat show: it is checked, counted in tokens, and kept for those who encode it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from unfuse.core.codec import MAX_UPLOAD_BYTES, encode
from unfuse.core.errors import InvalidParameter
from unfuse.core.parameters import choice, number, printable
from unfuse.core.pixels import MAX_SIDE, size_of
from unfuse.core.vision import Grid, Shown, Vision
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.server.mp4 import film_of
from unfuse.server.uploads import as_image_url, decode_data_url, read_picture

MAX_SHOWN = 64  # the most pictures and videos of one chat
MAX_PIXELS = 400_000_000  # the most pixels of all pictures, those of videos too: each is decoded, to be sure of it

MAX_FRAMES, MAX_FILM = 10_000, 10_000_000_000
"""The most frames of a video file, and pixels of all of them: encoders decode them up to the last one that is shown."""

SHOWS = ("image", "video")  # the types of parts by which templates write tokens for what is shown

DETAILS = ("auto", "low", "high", "original")
"""OpenAI's words for how closely to look; a model's own processor decides that, whichever is sent."""

Read = tuple[list[int], tuple[Shown, ...], dict[str, bytes]]


def read_shown(
    vision: Vision,
    tokenizer: ChatTokenizer,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Read:
    """The ids of messages, what they show, and the uploads of that. Takes long.

    Raises InvalidParameter for messages that are none, and for what cannot be shown to the model.
    """
    reading = _Reading(vision)
    read = [reading.message(message, at) for at, message in enumerate(messages)]
    edit = partial(_timed, vision, tokenizer, reading.moments)
    ids = vision.expanded(tokenizer.prompt(read, tools, template_kwargs, shows=SHOWS, edit=edit), reading.shown)
    return ids, tuple(reading.shown), reading.uploads


def _timed(vision: Vision, tokenizer: ChatTokenizer, moments: Sequence[Sequence[float]], text: str) -> str:
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

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self.shown, self.uploads, self.moments = list[Shown](), dict[str, bytes](), list[list[float]]()
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
        self.shown.append(Shown(digest, upload, *grid, self._vision.tokens(grid), **video))
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
