"""Pictures that messages name by their address: fetched from hosts that are allowed, before the messages are read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from unfuse.core.card import ModelCard
from unfuse.core.errors import InvalidParameter, TransientError
from unfuse.server.targets import Targets
from unfuse.server.uploads import MAX_BYTES, as_image_url

AT_ONCE = 8  # pictures that a gateway fetches at one time: each may take MAX_BYTES of memory
MOST = 16  # the most pictures that one call may have fetched; more are sent as data: URLs

SCHEMES = ("http:", "https:")


class Fetching:
    """Fetches pictures from these hosts, as `Targets` has them; from none where there are none."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._targets = Targets(hosts, "messages", "--image-hosts", "fetched from")
        self._all = asyncio.Semaphore(AT_ONCE)

    async def fetched(self, card: ModelCard, fields: Mapping[str, object]) -> Mapping[str, object]:
        """Return the fields of a chat with pictures in the place of their addresses.

        Raises InvalidParameter for an address that is not allowed or cannot be fetched.
        """
        messages = fields.get("messages")
        if card.vision is None or not self._targets or not isinstance(messages, list):
            return fields
        addresses = dict.fromkeys(url for message in messages for part in _parts(message) if (url := _address(part)))
        if len(addresses) > MOST:
            raise InvalidParameter(
                f"messages: at most {MOST} pictures are fetched, send more as data: URLs", "messages"
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


def _parts(message: object) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return [as_image_url(part) for part in content] if isinstance(content, list) else ()


def _address(part: object) -> str:
    """The address that a part has fetched; "" for a part without one."""
    shown = part.get("image_url") if isinstance(part, Mapping) and part.get("type") == "image_url" else None
    url = shown.get("url") if isinstance(shown, Mapping) else shown
    return url if isinstance(url, str) and url.lower().startswith(SCHEMES) else ""


def _filled(message: Any, found: Mapping[str, bytes]) -> Any:
    """A message with pictures instead of their addresses."""
    parts = _parts(message)
    if not any(map(_address, parts)):
        return message
    parts = [_filled_part(part, found[url]) if (url := _address(part)) else part for part in parts]
    return {**message, "content": parts}


def _filled_part(part: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    shown = part["image_url"]
    return {**part, "image_url": {**shown, "url": data} if isinstance(shown, Mapping) else data}
