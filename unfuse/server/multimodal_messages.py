"""Multimodal messages: fetch, check and count the pictures and videos of a chat.

The size of a video is read from the boxes of its MP4 file (ISO 14496-12), before anything is decoded or allocated.
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
from unfuse.server.body import MAX_BYTES, as_image_url, decode_data_url, read_image
from unfuse.server.outbound_http import OutboundHttp

#: The most pictures and videos of one chat.
MAX_MEDIA = 64

#: The most pixels of all pictures, including those of videos that are lists of pictures. Each is decoded to check it.
MAX_PIXELS = 400_000_000

#: The most frames of a video file, and pixels of all of them: encoders decode all frames up to the last sampled one.
MAX_FRAMES, MAX_VIDEO_PIXELS = 10_000, 10_000_000_000

#: The types of content parts for which chat templates write placeholder tokens.
PLACEHOLDER_TYPES = ("image", "video")

#: OpenAI's values of `detail`. They are accepted without effect: the processor of the model decides the resolution.
DETAILS = ("auto", "low", "high", "original")

#: The most pictures that a gateway fetches at one time. Each may take MAX_BYTES of memory.
FETCHES = 8

#: The most pictures that are fetched for one call. More can be sent as data: URLs.
MAX_FETCHED = 16

#: The boxes of an MP4 file, each in the one before, that describe a track.
PATH = (b"moov", b"trak", b"mdia")

#: The most boxes in one box, and at the top of a file.
MAX_BOXES = 10_000


def read_messages(
    vision: VisionConfig,
    tokenizer: ChatTokenizer,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], tuple[MediaItem, ...], dict[str, bytes]]:
    """Return the token ids of messages, their pictures and videos, and the uploads.

    The uploads are the bytes of the pictures and videos, by the name of their attachment.

    tools, template_kwargs: inputs of the chat template.

    Pictures are decoded, which is too slow for the event loop. Raises InvalidParameter for malformed messages, and for
    pictures and videos that the model does not support.
    """
    reader = _MessageReader(vision)
    template_messages = [reader.message(message, index) for index, message in enumerate(messages)]
    edit = partial(_with_timestamps, vision, tokenizer, reader.group_times)
    ids = tokenizer.prompt(template_messages, tools, template_kwargs, media_types=PLACEHOLDER_TYPES, edit=edit)
    ids = vision.expand_placeholders(ids, reader.media)
    return ids, tuple(reader.media), reader.uploads


def _with_timestamps(
    vision: VisionConfig, tokenizer: ChatTokenizer, group_times: Sequence[Sequence[float]], text: str
) -> str:
    """Return a prompt with a timestamp and a placeholder for each group of frames.

    Models without timestamps have one placeholder for each video.

    group_times: of each video, the times of its groups of frames, in seconds.
    """
    begin_mark, video_mark, end_mark = (
        tokenizer.piece(id).decode() for id in (vision.begin_id, vision.video, vision.end_id)
    )
    parts = text.split(begin_mark + video_mark + end_mark)
    if not vision.timed or len(parts) != len(group_times) + 1:
        return text  # a wrong number of placeholders is refused by `VisionConfig.expand_placeholders`
    timed_text = parts[0]
    for video_times, part in zip(group_times, parts[1:], strict=True):
        timed_text += (
            "".join(f"<{seconds:.1f} seconds>{begin_mark}{video_mark}{end_mark}" for seconds in video_times) + part
        )
    return timed_text


class _MessageReader:
    """Reads the messages of one chat, and collects their pictures and videos."""

    def __init__(self, vision: VisionConfig) -> None:
        self._vision = vision
        self.media = list[MediaItem]()  # pictures and videos in their order
        self.uploads = dict[str, bytes]()  # their bytes, by the name of their attachment
        self.group_times = list[list[float]]()  # of each video, the times of its groups of frames, in seconds
        self._readers = {"image_url": self._read_image, "video_url": self._read_video_file, "video": self._read_frames}
        self._pixels = 0

    def message(self, message: Any, index: int) -> Any:
        """Return a message for the chat template, in which pictures and videos are only placeholders."""
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
            return message
        name = f"messages[{index}].content"
        parts = [self._part(part, f"{name}[{part_index}]") for part_index, part in enumerate(message["content"])]
        return {**message, "content": parts}

    def _part(self, part: Any, name: str) -> Any:
        """Return a content part for the chat template.

        name: its path in the body, for errors.
        """
        part = as_image_url(part)
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in self._readers:
            return part
        if len(self.media) == MAX_MEDIA:
            raise InvalidParameter(f"messages have more than {MAX_MEDIA} pictures and videos", "messages")
        try:
            self._readers[kind](f"{name}.{kind}", part)
        except InvalidParameter as error:
            raise InvalidParameter(str(error), "messages") from error
        return {"type": "image" if kind == "image_url" else "video"}

    def _read_image(self, name: str, part: Mapping[str, Any]) -> None:
        """Add the picture of an `image_url` part."""
        value = part.get("image_url")
        detail = value.get("detail") if isinstance(value, Mapping) else None
        if detail is not None:
            choice(f"{name}.detail", detail, DETAILS)
        data, size = self._read_picture(f"{name}.url", _url(value))
        self._add(data, self._vision.picture_grid(*size))

    def _read_picture(self, name: str, url: object) -> tuple[bytes, tuple[int, int]]:
        """Return the bytes of a picture, and its width and height in pixels."""
        data = read_image(name, _data_url(name, url))
        width, height = size_of(data)
        self._pixels += width * height
        if self._pixels > MAX_PIXELS:
            raise InvalidParameter(f"{name}: with it, the pictures of all messages have more than {MAX_PIXELS} pixels")
        return data, (width, height)

    def _read_frames(self, name: str, part: Mapping[str, Any]) -> None:
        """Add a video that is a list of pictures of equal size.

        The field `fps` is the number of pictures a second.
        """
        urls, max_frames = part.get("video"), self._vision.images.max_pixels
        if not isinstance(urls, list) or not 2 <= len(urls) <= max_frames:
            raise InvalidParameter(f"{name} must be a list of 2 to {max_frames} frames, or send a file as video_url")
        rate = number(f"{name}.fps", part.get("fps", self._vision.rate), 0.01, 1000)

        pictures = [self._read_picture(f"{name}[{index}]", _url(url)) for index, url in enumerate(urls)]
        if len(sizes := {size for _, size in pictures}) > 1:
            raise InvalidParameter(f"{name}: all frames must have the same size, not {len(sizes)} sizes")
        (size,) = sizes
        frames = encode([data for data, _ in pictures], MAX_UPLOAD_BYTES)
        self._add_video(frames, size, [*range(len(urls))], rate, rate, "")

    def _read_video_file(self, name: str, part: Mapping[str, Any]) -> None:
        """Add a video that is an MP4 file, from which frames are sampled."""
        data = decode_data_url(f"{name}.url", _data_url(f"{name}.url", _url(part.get("video_url"))), "video")
        try:
            video = read_video_info(data)
        except ValueError as error:
            raise InvalidParameter(f"{name}.url is not an MP4 file that can be read: {error}") from error
        if video.frames > MAX_FRAMES or video.frames * video.width * video.height > MAX_VIDEO_PIXELS:
            actual = f"{video.frames} frames of {video.width}x{video.height} pixels"
            raise InvalidParameter(
                f"{name}.url has {actual}: it may have {MAX_FRAMES} frames, and {MAX_VIDEO_PIXELS} pixels in all frames"
            )
        if max(video.width, video.height) > MAX_SIDE or video.frames < 2:
            raise InvalidParameter(f"{name}.url must have 2 frames or more, of at most {MAX_SIDE} pixels a side")

        sampled = self._vision.sample_frames(video.frames, video.rate)
        numbers = ",".join(map(str, sampled))
        size = video.width, video.height
        self._add_video(data, size, sampled, video.rate, video.rate * len(sampled) / video.frames, numbers)

    def _add_video(
        self, data: bytes, size: tuple[int, int], sampled: Sequence[int], rate: float, sample_rate: float, numbers: str
    ) -> None:
        """Add a video.

        data: the bytes of its file, or of all its pictures.
        size: width and height of its frames, in pixels.
        sampled: the indices of the frames that the model gets.
        rate: frames a second of the video. sample_rate: sampled frames a second.
        numbers: the sampled indices for the decoder, separated by commas; "" if `data` has only these frames.
        """
        vision = self._vision
        grid = vision.video_grid(*size, len(sampled))
        self.group_times.append(vision.frame_times(sampled, rate))
        self._add(data, grid, images=len(sampled), frame_indexes=numbers, seconds=vision.group / sample_rate)

    def _add(self, data: bytes, grid: Grid, **video: Any) -> None:
        """Add a picture, or a video with these further fields of its MediaItem.

        Equal bytes are uploaded once.
        """
        digest = hashlib.sha256(data).hexdigest()
        upload = f"shown-{digest[:32]}"
        self.media.append(MediaItem(digest, upload, *grid, self._vision.tokens(grid), **video))
        self.uploads[upload] = data


def _url(value: object) -> object:
    """Return the URL in the value of a content part.

    The value is an object with `url`, or the URL itself.
    """
    return value.get("url") if isinstance(value, Mapping) else value


def _data_url(name: str, url: object) -> str | bytes:
    """Return a data: URL, or the bytes that were fetched. Raises InvalidParameter for another URL."""
    if isinstance(url, bytes):
        return url
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise InvalidParameter(
            f"{name} must be a data: URL, not {printable(url)}: only pictures from --image-hosts are fetched"
        )
    return url


class ImageFetcher:
    """Fetches the pictures of chats from allowed hosts.

    hosts: the allowed hosts, as in `OutboundHttp`. Without any, no picture is fetched.
    """

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._http = OutboundHttp(hosts, "messages", "--image-hosts", "fetched from")
        self._limit = asyncio.Semaphore(FETCHES)

    async def fetched(self, spec: ModelSpec, fields: Mapping[str, object]) -> Mapping[str, object]:
        """Return the fields of a chat with the bytes of pictures instead of their URLs.

        Each URL is fetched once. Raises InvalidParameter for a URL that is not allowed or cannot be fetched.
        """
        messages = fields.get("messages")
        if spec.vision is None or not self._http or not isinstance(messages, list):
            return fields
        urls = dict.fromkeys(url for message in messages for part in _parts(message) if (url := _http_url(part)))
        if len(urls) > MAX_FETCHED:
            raise InvalidParameter(
                f"messages: at most {MAX_FETCHED} pictures are fetched: send more as data: URLs", "messages"
            )

        pictures = dict(zip(urls, await asyncio.gather(*map(self._fetch, urls)), strict=True))
        return {**fields, "messages": [_with_pictures(message, pictures) for message in messages]}

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def _fetch(self, url: str) -> bytes:
        """Return the bytes of a picture. Raises InvalidParameter."""
        self._http.require(url)
        async with self._limit:
            try:
                return await self._http.read(url, MAX_BYTES)
            except TransientError as error:
                raise InvalidParameter(f"messages: {url[:200]} cannot be fetched: {error}", "messages") from error


def _parts(message: object) -> list[Any]:
    """Return the content parts of a message; none for a text.

    Parts with pictures are converted to the form `image_url`.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    return [as_image_url(part) for part in content] if isinstance(content, list) else []


def _http_url(part: object) -> str:
    """Return the http or https URL of the picture in a content part, or ""."""
    url = _url(part.get("image_url")) if isinstance(part, Mapping) and part.get("type") == "image_url" else ""
    return url if isinstance(url, str) and url.lower().startswith(("http:", "https:")) else ""


def _with_pictures(message: Any, pictures: Mapping[str, bytes]) -> Any:
    """Return a message with the bytes of pictures instead of their URLs."""
    parts = _parts(message)
    if not any(map(_http_url, parts)):
        return message
    for index, part in enumerate(parts):
        if url := _http_url(part):
            image_url = part["image_url"] if isinstance(part["image_url"], Mapping) else {}
            parts[index] = {**part, "image_url": {**image_url, "url": pictures[url]}}
    return {**message, "content": parts}


class VideoInfo(NamedTuple):
    """The size and the frame rate of a video, from the header of its file."""

    #: Width of a frame, in pixels.
    width: int
    #: Height of a frame, in pixels.
    height: int
    #: The number of frames.
    frames: int
    #: Frames a second, on average.
    rate: float


def read_video_info(data: bytes) -> VideoInfo:
    """Return the size of the first video in an MP4 file.

    Raises ValueError for another or a damaged file, and for a fragmented one, whose header does not list its frames.
    """
    try:
        for track in _boxes_at(memoryview(data), PATH):
            if video := _video_of_track(track):
                return video
    except (struct.error, IndexError) as error:
        raise ValueError("a box is truncated") from error
    raise ValueError("it has no video track whose header lists its frames; fragmented files are not supported")


def _video_of_track(track: memoryview) -> VideoInfo | None:
    """Return the video of a track; None if it is empty, or no video.

    track: the contents of its `mdia` box.
    """
    hdlr, mdhd = (next(_boxes_at(track, (name,)), memoryview(b"")) for name in (b"hdlr", b"mdhd"))
    if bytes(hdlr[8:12]) != b"vide":
        return None

    # `mdhd` has the duration in units of 1/scale seconds. In version 1 its times have 64 bits.
    scale, duration = struct.unpack(">IQ" if mdhd[0] else ">II", mdhd[20:32] if mdhd[0] else mdhd[12:20])
    sample_table = b"minf", b"stbl"
    sizes = next(_boxes_at(track, (*sample_table, b"stsz")), memoryview(b""))
    descriptions = next(_boxes_at(track, (*sample_table, b"stsd")), memoryview(b""))
    (frames,) = struct.unpack(">I", sizes[8:12])
    width, height = struct.unpack(">HH", descriptions[40:44])
    if not all((scale, duration, frames, width, height)):
        return None
    return VideoInfo(width, height, frames, frames * scale / duration)


def _boxes_at(data: memoryview, path: tuple[bytes, ...]) -> Iterator[memoryview]:
    """Yield the contents of all boxes at a path of box types.

    Raises ValueError for a malformed box.
    """
    start = 0
    for _ in range(MAX_BOXES):
        if start + 8 > len(data):
            return
        size, kind = struct.unpack(">I4s", data[start : start + 8])
        header_bytes = 8
        if size == 1:  # the size follows the type, with 64 bits
            header_bytes = 16
            (size,) = struct.unpack(">Q", data[start + 8 : start + 16])
        end = start + size if size else len(data)  # a size of 0 means all that follows
        if size and size < header_bytes or end > len(data):
            raise ValueError("a box has an invalid size")
        if kind == path[0] and len(path) == 1:
            yield data[start + header_bytes : end]
        elif kind == path[0]:
            yield from _boxes_at(data[start + header_bytes : end], path[1:])
        start = end
    raise ValueError(f"it has more than {MAX_BOXES} boxes")
