"""Pictures as files and data: URLs, and calls that send them, for tests of whole answers."""

from __future__ import annotations

import base64
import io
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.answers.conftest import Folder, Serve
from tests.once import once
from tools.server import Server
from tools.tiny_vision import KINDS, make_vision_model


def gradient(width: int = 32, height: int = 32) -> Image.Image:
    """An RGB picture whose left and right, top and bottom differ."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([columns * 255 // width, rows * 255 // height, (rows + columns) * 127 // (width + height)], 2)
    return Image.fromarray(pixels.astype(np.uint8))


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A picture's file as text."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def pixels_of(data: bytes) -> NDArray[np.int16]:
    """Height, width and RGB values of a file, in a type whose differences do not wrap."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(np.int16)


def edited(server: Server, image: bytes, **fields: Any) -> dict[str, Any]:
    """The answer to an edit of one picture, sent as a form. Fails unless it is 200."""
    form = {"prompt": "a cat", "seed": "5", **fields}
    answer = httpx2.post(f"{server.url}/v1/images/edits", data=form, files={"image": image}, timeout=600)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def files_of(answer: dict[str, Any]) -> list[bytes]:
    """The files in an answer."""
    return [base64.b64decode(one["b64_json"]) for one in answer["data"]]


def refusal(answer: httpx2.Response) -> tuple[str, str]:
    """The parameter and the sentence of a 400."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


class Studio(NamedTuple):
    """A server with defaults, and the names of its models."""

    server: Server
    sdxl: str
    sd_image: str
    wan: str
    sees: str


@pytest.fixture
def studio(served: Serve, folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Studio:
    """Return a server of a model that redraws, one that is not split, one for videos, and one that sees."""
    models = [folder(kind) for kind in ("sdxl", "sd-image", "wan-image")]
    models.append(once("tiny-sees", tmp_path_factory, lambda unfinished: make_vision_model(unfinished, KINDS[0])))
    return Studio(served(*models), *map(str, models))
