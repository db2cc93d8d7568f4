"""An edge whose tensors are narrowed: every worker counts that in, and pictures show what they should."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from tests.integration.seen import draw, said, shown
from tools.server import serving
from tools.tiny_vision import KINDS, make_vision_model


@pytest.mark.nightly
def test_int4_text_encodings_are_usable_and_listed_in_numerics(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "split", "--arena", "64MiB", "--encode", "text_encode=int4") as server:
        request = server.ready().submit("a red circle on white", seed=1)
        ended = server.finished(request)
        picture = Image.open(io.BytesIO(server.result(request))).convert("RGB")
        outcomes = [worker["numerics"] for worker in server.get("/v1/workers")["data"]]
    assert ended["status"] == "completed"
    assert [outcome["encode-text_encode"] for outcome in outcomes] == ["int4"] * 3
    (red, green, blue), corner = picture.getpixel((64, 64)), picture.getpixel((1, 1))
    assert red > 150 > max(green, blue) and min(corner) > 200


@pytest.mark.nightly
def test_int4_image_embeddings_and_kv_are_usable_in_a_chat(tmp_path: Path) -> None:
    """Given a chat that shows a picture, when both edges are narrowed, then it is answered; every worker says so."""
    folder = make_vision_model(tmp_path / "tiny", KINDS[1])
    picture = draw(tmp_path / "one.png", 128, 128)
    encode = "--encode", "vision_encode=int4", "--encode", "prefill=int4"
    flags = "--workers", "vision=1,prefill=1,decode=1", "--threads", "1", "--arena", "64MiB", "--kv", "16MiB"
    body = {
        "messages": [{"role": "user", "content": [shown(picture), said("what is the fox")]}],
        "max_tokens": 8,
        "temperature": 0,
        "logit_bias": {"2": -100},
    }
    with serving(tmp_path, str(folder), *flags, *encode) as server:
        made = server.ready().post("/v1/chat/completions", body)
        outcomes = [worker["numerics"] for worker in server.get("/v1/workers")["data"]]

    assert made["usage"]["completion_tokens"] == 8
    told = [(outcome["encode-vision_encode"], outcome["encode-prefill"]) for outcome in outcomes]
    assert told == [("int4", "int4")] * 3
