"""Uploads of every kind of file become the pixels that a viewer shows, for edits, first frames, masks and chats."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.answers.sending import (
    Studio,
    data_url,
    edited,
    files_of,
    gradient,
    pixels_of,
    refusal,
    saved,
    studio as studio,
)

PICTURE = gradient()
GRAY = PICTURE.convert("L")
SIXTEEN_BITS = Image.fromarray(np.asarray(GRAY).astype(np.uint16) * 257)


def half_transparent(hidden: str, mode: str = "RGBA") -> Image.Image:
    """The picture, whose left half has opacity 0 and a color that nobody sees."""
    picture = PICTURE.copy()
    picture.paste(hidden, (0, 0, 16, 32))
    picture.putalpha(Image.new("L", (32, 32), 255))
    picture.getchannel("A")
    alpha = Image.new("L", (32, 32), 255)
    alpha.paste(0, (0, 0, 16, 32))
    picture.putalpha(alpha)
    return picture.convert(mode)


def flattened() -> Image.Image:
    """The picture, whose left half is white."""
    picture = PICTURE.copy()
    picture.paste("white", (0, 0, 16, 32))
    return picture


def turned(picture: Image.Image) -> bytes:
    """A file that lies on its side, and says how it is turned upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(picture.transpose(Image.Transpose.ROTATE_90), exif=exif)


def animated(form: str) -> bytes:
    """A file whose second frame is black."""
    palette = PICTURE.quantize(64)
    first = palette if form == "GIF" else PICTURE
    return saved(first, form, save_all=True, append_images=[Image.new("RGB", (32, 32))], lossless=True)


def paletted() -> Image.Image:
    """The picture in 64 colors."""
    return PICTURE.quantize(64)


def with_transparent_entry(hidden: bytes) -> bytes:
    """A palette whose first entry is transparent, with a color that nobody sees."""
    picture = Image.new("P", (32, 32), 0)
    picture.putpalette([*hidden, 0, 0, 255])
    picture.paste(1, (16, 0, 32, 32))
    return saved(picture, transparency=0)


def half_blue() -> Image.Image:
    picture = Image.new("RGB", (32, 32), "white")
    picture.paste((0, 0, 255), (16, 0, 32, 32))
    return picture


FILES: dict[str, tuple[bytes, Image.Image]] = {
    "gray of 16 bits": (saved(SIXTEEN_BITS), GRAY.convert("RGB")),
    "CMYK": (
        saved(PICTURE.convert("CMYK"), "JPEG", quality=95),
        Image.open(io.BytesIO(saved(PICTURE.convert("CMYK"), "JPEG", quality=95))).convert("RGB"),
    ),
    "palette": (saved(paletted()), paletted().convert("RGB")),
    "palette with a transparent red": (with_transparent_entry(b"\xff\0\0"), half_blue()),
    "hidden red": (saved(half_transparent("red")), flattened()),
    "hidden blue": (saved(half_transparent("blue")), flattened()),
    "hidden blue, WebP": (saved(half_transparent("blue"), "WEBP", lossless=True, exact=True), flattened()),
    "gray and alpha": (saved(half_transparent("red", "LA")), flattened().convert("L").convert("RGB")),
    "one bit": (saved(GRAY.convert("1")), GRAY.convert("1").convert("RGB")),
    "on its side": (turned(PICTURE), PICTURE),
    "GIF of two frames": (animated("GIF"), paletted().convert("RGB")),
    "PNG of two frames": (animated("PNG"), PICTURE),
    "WebP of two frames": (animated("WEBP"), PICTURE),
    "BMP": (saved(PICTURE, "BMP"), PICTURE),
}
"""Files, and the same picture in RGB of 8 bits as it is looked at."""


@pytest.mark.row("P19", "K6", "C4", "C5")
@pytest.mark.parametrize("name", FILES)
def test_edit_decodes_every_image_file_like_an_image_viewer(name: str, studio: Studio) -> None:
    """The oracle is the edit of a plain RGB file, which other tests compare with diffusers."""
    file, plain = FILES[name]
    asked = {"model": studio.sdxl, "strength": "0.5"}
    expected = edited(studio.server, saved(plain), **asked)
    white = edited(studio.server, saved(Image.new("RGB", (32, 32), "white")), **asked)

    got = edited(studio.server, file, **asked)

    assert files_of(got) == files_of(expected)
    assert files_of(got) != files_of(white)


@pytest.mark.row("C4")
def test_color_of_transparent_mask_pixels_is_ignored(studio: Studio) -> None:
    fields = {"prompt": "a cat", "seed": "5", "model": studio.sdxl, "strength": "0.8"}
    made = set()
    masks = [half_transparent("red"), half_transparent("blue"), half_transparent("blue", "LA")]
    for mask in masks:
        files = {"image": saved(PICTURE), "mask": saved(mask)}
        answer = httpx2.post(f"{studio.server.url}/v1/images/edits", data=fields, files=files, timeout=600)
        assert answer.status_code == 200, answer.text
        made.add(files_of(answer.json())[0])
    unmasked = edited(studio.server, saved(PICTURE), **fields)

    assert len(made) == 1
    assert made != set(files_of(unmasked))


def film(studio: Studio, first: bytes) -> np.ndarray[Any, Any]:
    """The frames of a video that begins with this picture."""
    fields = {"model": studio.wan, "prompt": "a cat", "seed": "5", "num_frames": "5", "output_format": "png"}
    headers = {"prefer": "respond-async"}
    answer = httpx2.post(
        f"{studio.server.url}/v1/videos", data=fields, files={"input_reference": first}, headers=headers, timeout=600
    )
    assert answer.status_code == 202, answer.text
    done = studio.server.finished(answer.json()["id"])
    assert done["status"] == "completed", done["error"]
    return np.stack([pixels_of(studio.server.result(done["id"], index)) for index in range(5)])


@pytest.mark.row("P19", "C4")
def test_transparent_first_frame_is_flattened_onto_white(studio: Studio) -> None:
    assert (film(studio, saved(half_transparent("red"))) == film(studio, saved(flattened()))).all()


def said(studio: Studio, *parts: Any, **more: Any) -> str:
    """What the model says of pictures, with the likeliest tokens."""
    body = {
        "model": studio.sees,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "the fox"}]}],
        "temperature": 0,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 3,
        **more,
    }
    answer = httpx2.post(f"{studio.server.url}/v1/chat/completions", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return str(choice["logprobs"])


def shown(url: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.row("C4", "C5", "C35")
@pytest.mark.parametrize(
    "name", ["gray of 16 bits", "hidden red", "hidden blue", "gray and alpha", "GIF of two frames", "on its side"]
)
def test_chat_decodes_every_image_file_like_an_image_viewer(name: str, studio: Studio) -> None:
    file, plain = FILES[name]

    assert said(studio, shown(data_url(file))) == said(studio, shown(data_url(saved(plain))))
    assert said(studio, shown(data_url(file))) != said(studio, shown(data_url(saved(Image.new("RGB", (32, 32))))))


@pytest.mark.row("C35", "C37", "C38")
def test_chat_accepts_every_form_of_data_url(studio: Studio) -> None:
    file = saved(PICTURE)
    plain = said(studio, shown(data_url(file)))
    urls = [
        f"data:image/png;base64,{base64.encodebytes(file).decode()}",
        data_url(file, "image/png;charset=utf-8"),
        data_url(file, "image/png;name=a.png"),
        data_url(file, "IMAGE/PNG"),
        "data:image/png," + "".join(f"%{byte:02X}" for byte in file),
    ]

    assert {said(studio, shown(url)) for url in urls} == {plain}
    assert said(studio, shown(data_url(saved(PICTURE.quantize(64), "GIF"), "image/gif")))


@pytest.mark.row("D7")
def test_chat_accepts_image_parts_and_bootstrap_fields(studio: Studio) -> None:
    """Parts of type `image`, and fields for servers that are told where encoders are."""
    url = data_url(saved(PICTURE))
    plain = said(studio, shown(url))
    bootstrap = {"bootstrap_host": "encode_host_ip", "bootstrap_port": 8998, "bootstrap_room": 12345}

    for part in ({"image": url}, {"url": url}, {"image": {"url": url}}):
        assert said(studio, {"type": "image", **part}, **bootstrap) == plain


@pytest.mark.row("P31", "K12")
def test_json_edit_equals_multipart_edit_and_rejects_file_ids(studio: Studio) -> None:
    mask = {"image_url": data_url(saved(half_transparent("red")))}
    body: dict[str, Any] = {"model": studio.sdxl, "prompt": "a cat", "seed": 5, "strength": 0.8}
    images = {"images": [{"image_url": data_url(saved(PICTURE))}]}
    edits = f"{studio.server.url}/v1/images/edits"

    whole = httpx2.post(edits, json={**body, **images}, timeout=600)
    masked = httpx2.post(edits, json={**body, **images, "mask": mask}, timeout=600)

    assert files_of(whole.json()) == files_of(edited(studio.server, saved(PICTURE), **body))
    assert masked.status_code == 200 and files_of(masked.json()) != files_of(whole.json())
    for held in ({"images": [{"file_id": "file-1"}]}, {**images, "mask": {"file_id": "file-1"}}):
        param, message = refusal(httpx2.post(edits, json={**body, **held}))
        assert param in ("image", "mask") and "stores no uploaded files: send the picture as a data: URL" in message
