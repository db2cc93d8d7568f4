"""What is not a picture that can be held is refused with what is wrong, before anything of its size is allocated."""

from __future__ import annotations

import base64
import io
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from tests.examples import examples
from tests.server.served import MOVING, Served, picture
from unfuse.core.errors import InvalidParameter
from unfuse.core.pixels import MAX_PIXELS, MAX_SIDE
from unfuse.queues.base import RequestFilter
from unfuse.server.body import MAX_BYTES, MAX_FORM, MAX_MEDIA_BODY, MAX_TEXT, decode_data_url, read_image

ASKED = {"model": MOVING.name, "prompt": "a red circle"}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG that says it has that size; what it really holds are `rows`."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def saved(form: str, size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    noise = Image.frombytes("RGB", size, random.Random(5).randbytes(3 * size[0] * size[1]))
    return written(noise, form, **options)


def written(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def animated(form: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 100, 200)]
    return written(frames[0], form, save_all=True, append_images=frames[1:])


def text_bomb() -> bytes:
    """A PNG with a comment of 100 MB, compressed to 100 kB."""
    whole = saved("png")
    return whole[:33] + chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(100_000_000))) + whole[33:]


def run_length_bmp() -> bytes:
    """A BMP whose rows are runs of one color, which takes Pillow long to read."""
    head = struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 8, 1, 16, 0, 0, 256, 0) + bytes(1024)
    rows = bytes([8, 0, 0, 0] * 8)
    return b"BM" + struct.pack("<IHHI", 14 + len(head) + len(rows), 0, 0, 14 + len(head)) + head + rows


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "1 to 20971520 bytes, not 0"),
    "too many bytes": (lambda: bytes(MAX_BYTES + 1), f"not {MAX_BYTES + 1}"),
    "50,000 wide": (lambda: png(50_000, 100), "is 50000x100 pixels; at most 16384 a side"),
    "too many pixels": (lambda: png(8_000, 8_000), "40000000 in all"),
    "more pixels": (lambda: png(10_000, 10_000), "40000000"),
    "bomb": (lambda: png(16_000, 16_000), "more than 40000000 pixels"),
    "comment bomb": (text_bomb, "cannot be decoded"),
    "truncated png": (lambda: saved("png")[:-200], "truncated or damaged"),
    "truncated jpeg": (lambda: saved("jpeg")[:-200], "truncated or damaged"),
    "truncated webp": (lambda: saved("webp")[:-200], "truncated or damaged"),
    "header alone": (lambda: saved("png")[:33], "is not a PNG, JPEG, WebP, GIF, BMP or AVIF picture"),
    "no pixels": (lambda: png(64, 64), "truncated or damaged"),
    "truncated gif": (lambda: saved("gif")[:-200], "truncated or damaged"),
    "truncated bmp": (lambda: saved("bmp")[:-200], "truncated or damaged"),
    "truncated avif": (lambda: saved("avif")[:-200], "truncated or damaged"),
    "large gif": (lambda: b"GIF89a" + struct.pack("<2H", 50_000, 100) + saved("gif")[10:], "is 50000x100 pixels"),
    "compressed bmp": (run_length_bmp, "is a compressed BMP picture: send it as PNG"),
    "tiff": (lambda: saved("tiff"), "is not a PNG, JPEG, WebP, GIF, BMP or AVIF picture"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not a PNG, JPEG"),
    "text": (lambda: b"not a picture at all", "is not a PNG, JPEG"),
}


@pytest.mark.parametrize(("make", "says"), BAD.values(), ids=BAD)
def test_invalid_image_raises_invalid_parameter_with_the_reason(make: Callable[[], bytes], says: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read_image("image", make())
    assert caught.value.param == "image"
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("form", ["png", "jpeg", "webp", "gif", "bmp", "avif"])
def test_supported_image_formats_are_accepted_unchanged(form: str) -> None:
    assert read_image("image", saved(form)) == saved(form)
    assert read_image("image", [saved(form)]) == saved(form)


@pytest.mark.parametrize("form", ["gif", "png", "webp"])
def test_animated_image_is_accepted(form: str) -> None:
    assert read_image("image", animated(form)) == animated(form)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_every_pixel_mode_is_accepted(mode: str) -> None:
    data = written(Image.new(mode, (9, 7)), "jpeg" if mode == "CMYK" else "png")
    assert read_image("image", data) == data


def test_mpo_jpeg_with_an_embedded_image_is_accepted() -> None:
    """Phones write such JPEG files; Pillow calls them MPO."""
    small = Image.new("RGB", (8, 8), "red")
    data = written(Image.new("RGB", (64, 64), "blue"), "mpo", save_all=True, append_images=[small])
    assert read_image("image", data) == data


def test_image_of_the_maximum_size_is_accepted() -> None:
    data = written(Image.new("1", (MAX_SIDE, MAX_PIXELS // MAX_SIDE)), "png")
    assert read_image("image", data) == data


def test_oversized_image_is_rejected_before_memory_is_allocated() -> None:
    data = png(6_400, 6_400)
    tracemalloc.start()
    with pytest.raises(InvalidParameter):
        read_image("image", data)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


GOOD = [saved("png"), saved("jpeg"), saved("webp"), written(Image.new("P", (9, 9)), "png")]


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=4)), max_size=4))
def test_damaged_image_is_accepted_or_raises_invalid_parameter(good: bytes, damage: list[tuple[int, bytes]]) -> None:
    data = bytearray(good)
    for place, other in damage:
        place %= len(data)
        data[place : place + len(other)] = other
    try:
        assert read_image("image", bytes(data)) == bytes(data)
    except InvalidParameter as error:
        str(error).encode()


@pytest.mark.parametrize(
    "value",
    [
        "http://127.0.0.1/secret.png",
        "https://example.com/a.png",
        "file:///etc/passwd",
        {"image_url": "http://127.0.0.1/"},
        7,
        True,
        {},
        [],
        [b"", b""],
    ],
)
def test_http_and_file_urls_of_images_are_rejected(value: object) -> None:
    with pytest.raises(InvalidParameter, match=r"not fetched|one picture, not") as caught:
        read_image("input_reference", value)
    assert caught.value.param == "input_reference"


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


DATA_URLS: dict[str, Callable[[bytes], str]] = {
    "plain": lambda data: f"data:image/png;base64,{as_base64(data)}",
    "lines of 76": lambda data: f"data:image/png;base64,{base64.encodebytes(data).decode()}",
    "Windows' lines": lambda data: f"data:image/png;base64,\r\n {as_base64(data)}\r\n",
    "charset": lambda data: f"data:image/png;charset=utf-8;base64,{as_base64(data)}",
    "name": lambda data: f"data:image/png;name=a.png;base64,{as_base64(data)}",
    "capitals": lambda data: f"DATA:IMAGE/PNG;BASE64,{as_base64(data)}",
    "another type of picture": lambda data: f"data:image/jpg;base64,{as_base64(data)}",
    "type without subtype": lambda data: f"data:image;base64,{as_base64(data)}",
    "no padding": lambda data: f"data:image/png;base64,{as_base64(data).rstrip('=')}",
    "escaped base64": lambda data: f"data:image/png;base64,{quote(as_base64(data), safe='')}",
    "a file of no known type": lambda data: f"data:application/octet-stream;base64,{as_base64(data)}",
    "a stored file": lambda data: f"data:binary/octet-stream;base64,{as_base64(data)}",
    "no type": lambda data: f"data:;base64,{as_base64(data)}",
    "percent-coded": lambda data: f"data:image/png,{quote(data)}",
    "percent-coded with parameters": lambda data: f"data:image/png;charset=utf-8,{quote(data)}",
}


@pytest.mark.row("C37", "C38")
@pytest.mark.parametrize("make", DATA_URLS.values(), ids=DATA_URLS)
def test_every_form_of_a_data_url_is_accepted(make: Callable[[bytes], str]) -> None:
    data = saved("png", (5, 4))
    assert read_image("image", make(data)) == data
    assert read_image("image", {"image_url": make(data)}) == data


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:text/html;base64,AAAA", "is a data: URL of type 'text/html': send one of image/png"),
        ("data:,AAAA", "is a data: URL of type ''"),
        ("data:image/png,AAAA", "is not a PNG, JPEG"),
        ("data:image/png;base64", "not fetched"),
    ],
)
def test_data_url_of_another_type_raises_invalid_parameter(url: str, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says):
        read_image("image", url)


def test_video_data_url_must_have_a_video_type() -> None:
    assert decode_data_url("video", "data:video/mp4;base64,AAAA", "video") == bytes(3)
    with pytest.raises(InvalidParameter, match="send one of video/mp4"):
        decode_data_url("video", "data:image/png;base64,AAAA", "video")


def test_file_id_raises_invalid_parameter() -> None:
    for held in ({"file_id": "file-1"}, {"image_url": "data:image/png;base64,AAAA", "file_id": "file-1"}):
        with pytest.raises(InvalidParameter, match="names a file by file_id, but this server stores no uploaded files"):
            read_image("mask", held)


@pytest.mark.parametrize("text", ["%%%", "A", "AA=A"])
def test_invalid_base64_raises_invalid_parameter(text: str) -> None:
    with pytest.raises(InvalidParameter, match="is not base64"):
        read_image("image", f"data:image/png;base64,{text}")


@pytest.fixture
def unchanged(studio: Served) -> Iterator[None]:
    """Nothing is queued, and nothing kept, by what a test sends."""

    def now() -> tuple[int, list[str]]:
        queued = studio.run(studio.queue.list(RequestFilter(), limit=10_000))
        return len(queued), sorted(path.name for path in studio.folder.iterdir())

    before = now()
    yield
    assert now() == before


def message(response: httpx2.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


@pytest.mark.usefixtures("unchanged")
def test_oversized_image_returns_400_on_every_endpoint(film_set: httpx2.Client) -> None:
    for url, field in (("/v1/videos", "input_reference"), ("/v1/images/edits", "image")):
        answer = film_set.post(url, data=ASKED, files={field: png(50_000, 100)})
        assert "50000x100" in message(answer)
        assert answer.json()["error"]["param"] == field


@pytest.mark.usefixtures("unchanged")
def test_malformed_multipart_form_is_rejected(film_set: httpx2.Client) -> None:
    kind = {"content-type": "multipart/form-data; boundary=x"}
    part = b'--x\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    whole = part % (b"prompt", b"a") + part % (b"seed", b"5") + b"--x--\r\n"
    for body, says in (
        (b"", "cannot be read"),
        (b"no form", "cannot be read"),
        (whole[:-20], "before its last boundary"),
        (whole.replace(b"name=", b"other="), "must be provided"),
    ):
        assert says in message(film_set.post("/v1/videos", content=body, headers=kind))
    assert "boundary" in message(
        film_set.post("/v1/videos", content=whole, headers={"content-type": "multipart/form-data"})
    )
    assert (
        film_set.post(
            "/v1/videos", content="a=b", headers={"content-type": "application/x-www-form-urlencoded"}
        ).status_code
        == 415
    )


@pytest.mark.usefixtures("unchanged")
def test_too_many_duplicate_or_oversized_form_parts_return_400(film_set: httpx2.Client) -> None:
    form = {name: (None, value) for name, value in {**ASKED, "model": "test/pictures"}.items()}
    many = [(f"metadata[k{index}]", (None, "x")) for index in range(100)]
    assert "Too many fields" in message(film_set.post("/v1/videos", files=[*form.items(), *many]))
    files = [(f"image{index}", ("a", b"x")) for index in range(20)]
    assert "Too many files" in message(film_set.post("/v1/videos", files=[*form.items(), *files]))
    twice = [*form.items(), ("seed", (None, "1")), ("seed", (None, "2"))]
    assert "seed must be a whole number" in message(film_set.post("/v1/videos", files=twice))
    for pair in (("metadata[a]", "metadata[a]"), ("metadata", "metadata[a]")):
        twice = [*form.items(), *((name, (None, "1")) for name in pair)]
        assert "sent twice" in message(film_set.post("/v1/videos", files=twice))
    file = film_set.post("/v1/videos", data=ASKED, files={"seed": b"5", "input_reference": picture(9)})
    assert "seed must be a whole number" in message(file)
    long = {"prompt": (None, "x" * MAX_TEXT + "x")}
    assert "Part exceeded maximum size" in message(film_set.post("/v1/videos", files=long))


@pytest.mark.usefixtures("unchanged")
def test_body_over_the_limit_returns_413(film_set: httpx2.Client) -> None:
    def more_than_is_read() -> Iterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="input_reference"; filename="a"\r\n\r\n'
        yield from [bytes(1 << 20)] * (1 + MAX_FORM // (1 << 20))

    kind = {"content-type": "multipart/form-data; boundary=x"}
    for answer, bound in (
        (film_set.post("/v1/videos", content=more_than_is_read(), headers=kind), MAX_FORM),
        (film_set.post("/v1/images/edits", json={"prompt": "x" * MAX_MEDIA_BODY}), MAX_MEDIA_BODY),
    ):
        assert f"larger than the limit of {bound} bytes" in message(answer, 413)
        assert answer.json()["error"]["code"] == "body_too_large"
