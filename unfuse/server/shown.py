"""What the messages of a chat show: pictures are checked, counted in tokens, and kept for those who encode them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unfuse.core.errors import InvalidParameter
from unfuse.core.parameters import choice, printable
from unfuse.core.vision import Shown, Vision
from unfuse.models.tokenizer import ChatTokenizer
from unfuse.server.uploads import read_picture, size_of

MAX_SHOWN = 64
"""The most pictures of one chat."""

MAX_PIXELS = 400_000_000
"""The most pixels of all of them: each is decoded, to be sure of it."""

SHOWS = ("image",)
"""The types of parts by which templates write tokens for what is shown."""

DETAILS = ("auto", "low", "high")

Read = tuple[list[int], str, dict[str, bytes]]


def read_shown(vision: Vision, tokenizer: ChatTokenizer, messages: Sequence[Any]) -> Read:
    """The ids of messages, what they show as JSON ("" for nothing), and the uploads of that. Takes long.

    Raises InvalidParameter for messages that are none, and for what cannot be shown to the model.
    """
    reading = _Reading(vision)
    read = [reading.message(message, number) for number, message in enumerate(messages)]
    ids = vision.expanded(tokenizer.ids(tokenizer.text(read, shows=SHOWS)), reading.shown)
    shown = msgspec.json.encode(reading.shown).decode() if reading.shown else ""
    return ids, shown, reading.uploads


class _Reading:
    """The messages of one chat: `shown` is what they have shown so far, `uploads` the bytes of it."""

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self.shown, self.uploads = list[Shown](), dict[str, bytes]()
        self._pixels = 0

    def message(self, message: Any, number: int) -> Any:
        """A message as the template reads it: with parts that only say that something is shown."""
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
            return message
        parts = message["content"]
        return {**message, "content": [self._part(part, f"messages[{number}].content[{at}]")
                                       for at, part in enumerate(parts)]}  # fmt: skip

    def _part(self, part: Any, name: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in SHOWS:
            raise InvalidParameter(f"{name}: parts of type {kind} are not read: send pictures as image_url", "messages")
        if kind != "image_url":
            return part
        if len(self.shown) == MAX_SHOWN:
            raise InvalidParameter(f"messages may show {MAX_SHOWN} pictures, and have more", "messages")
        try:
            self._picture(f"{name}.image_url", part.get("image_url"))
        except InvalidParameter as error:
            raise InvalidParameter(str(error), "messages") from error
        return {"type": "image"}

    def _picture(self, name: str, value: Any) -> None:
        given = value if isinstance(value, Mapping) else {"url": value}
        if given.get("detail") is not None:
            choice(f"{name}.detail", given["detail"], DETAILS)
        url = given.get("url")
        if not isinstance(url, str) or not url[:5].lower() == "data:":
            raise InvalidParameter(f"{name}.url must be a data: URL, for nothing is fetched here: not {printable(url)}")
        data = read_picture(f"{name}.url", url)
        width, height = size_of(data)
        self._pixels += width * height
        if self._pixels > MAX_PIXELS:
            raise InvalidParameter(f"{name}: with it, messages show more than {MAX_PIXELS} pixels in all")
        grid, digest = self._vision.picture_grid(width, height), hashlib.sha256(data).hexdigest()
        upload = f"shown-{digest[:32]}"
        self.shown.append(Shown(digest, upload, *grid, self._vision.tokens(grid)))
        self.uploads[upload] = data
