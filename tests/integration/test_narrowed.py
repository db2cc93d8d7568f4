"""An edge whose tensors are narrowed: every worker counts that in, and pictures show what they should."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from tools.server import serving


@pytest.mark.nightly
def test_captions_in_four_bits_are_still_drawn_and_are_part_of_what_bytes_depend_on(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "split", "--arena", "64MiB", "--encode", "text_encode=int4") as server:
        request = server.ready().submit("a red circle on white", seed=1)
        ended = server.finished(request)
        picture = Image.open(io.BytesIO(server.result(request))).convert("RGB")
        outcomes = [worker["outcome"] for worker in server.get("/v1/workers")["data"]]
    assert ended["status"] == "completed"
    assert [outcome["encode-text_encode"] for outcome in outcomes] == ["int4"] * 3
    (red, green, blue), corner = picture.getpixel((64, 64)), picture.getpixel((1, 1))
    assert red > 150 > max(green, blue) and min(corner) > 200
