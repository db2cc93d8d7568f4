"""What processes of the version before say is understood: their messages were written down, and are read here.

`yesterday/messages.json` holds one message of every type, as commit 01b7458 encoded it, beside what is in it. When
the oldest version that must be understood is a later one, they are written anew with that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from unfuse.core.codec import decode
from unfuse.core.messages import ToScheduler, ToWorker

RECORDED = json.loads(Path(__file__).with_name("yesterday").joinpath("messages.json").read_text())


def missing(recorded: Any, found: Any, at: str = "") -> list[str]:
    """Where what is found lacks, or has otherwise, what was recorded; more fields are welcome."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        return [line for key, value in recorded.items() for line in missing(value, found.get(key), f"{at}.{key}")]
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = enumerate(zip(recorded, found, strict=True))
        return [line for number, pair in pairs for line in missing(*pair, f"{at}[{number}]")]
    return [] if recorded == found else [f"{at}: {recorded!r} was {found!r}"]


@pytest.mark.parametrize("message", RECORDED, ids=[entry["type"] for entry in RECORDED])
def test_a_message_of_the_version_before_means_what_it_meant(message: dict[str, Any]) -> None:
    kinds = {kind.__name__: union for union in (ToScheduler, ToWorker) for kind in get_args(union)}

    read = decode(bytes.fromhex(message["bytes"]), kinds[message["type"]])

    assert type(read).__name__ == message["type"]
    assert missing(message["holds"], json.loads(msgspec.json.encode(read))) == []


def test_every_type_of_message_was_recorded() -> None:
    kinds = {kind.__name__ for union in (ToScheduler, ToWorker) for kind in get_args(union)}

    assert {entry["type"] for entry in RECORDED} <= kinds, "types that the version before sends are gone"
    assert len({entry["type"] for entry in RECORDED}) == 14
