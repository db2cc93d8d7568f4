"""Pictures and chats that show them, for tests, and what the undivided model makes of these in a process of its own."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.forking import isolated

UNDIVIDED = Path(__file__).parents[2] / "tools" / "sees_undivided.py"
SIZES = ((200, 100), (90, 130))


def draw(file: Path, width: int, height: int, seed: int = 0) -> Path:
    """A picture of large patches of colour."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(colours).resize((width, height)).save(file)
    return file


def data_url(file: Path) -> str:
    kind = {".jpg": "image/jpeg", ".mp4": "video/mp4"}.get(file.suffix, f"image/{file.suffix[1:]}")
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def shown(file: Path) -> dict[str, Any]:
    """A part of a message that shows a picture."""
    return {"type": "image_url", "image_url": {"url": data_url(file), "detail": "auto"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def as_templates_read(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = {"image_url": "image", "video_url": "video", "video": "video"}
    return [
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [
                part if part["type"] == "text" else {"type": kinds[part["type"]]} for part in message["content"]
            ],
        }
        for message in messages
    ]


def undivided(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What transformers makes of these: ids of the prompt and of the answer, its text, and the logits of each."""
    with tempfile.TemporaryDirectory() as folder:
        made: list[dict[str, Any]] = json.loads(isolated(UNDIVIDED, folder=Path(folder), given=json.dumps(cases)))
    return made
