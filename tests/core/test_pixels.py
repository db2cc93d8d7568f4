"""Files become the pixels that a viewer shows: each depth, mode and way of saying what is transparent."""

from __future__ import annotations

import io
import zlib
from struct import pack
from typing import Any

import pytest
from PIL import Image

from unfuse.core.errors import InvalidParameter
from unfuse.core.pixels import check_picture, has_transparency, read_alpha, read_rgb, size_of

WHITE = (255, 255, 255)

GRAY, RGB, GRAY_ALPHA = 0, 2, 4


def chunk(kind: bytes, data: bytes) -> bytes:
    return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))


def png(depth: int, color: int, row: bytes, width: int = 2, key: bytes = b"") -> bytes:
    """A PNG of one row, written by hand; pixels of the value `key` are transparent."""
    head = chunk(b"IHDR", pack(">IIBBBBB", width, 1, depth, color, 0, 0, 0))
    key = chunk(b"tRNS", key) if key else b""
    return b"\x89PNG\r\n\x1a\n" + head + key + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def row_of(image: Image.Image, width: int = 2) -> list[Any]:
    return [image.getpixel((column, 0)) for column in range(width)]


@pytest.mark.parametrize(("value", "level"), [(0, 0), (128, 0), (129, 1), (257, 1), (32_896, 128), (65_535, 255)])
def test_16_bit_gray_is_scaled_to_8_bits_with_rounding(value: int, level: int) -> None:
    data = png(16, GRAY, pack(">2H", value, 0))
    assert row_of(read_rgb(data)) == [(level,) * 3, (0, 0, 0)]
    assert row_of(read_alpha(data)) == [255, 255]


KEYED: dict[str, tuple[bytes, list[tuple[int, ...]]]] = {
    "1 bit": (png(1, GRAY, b"\x40", key=pack(">H", 0)), [WHITE, WHITE]),
    "2 bits": (png(2, GRAY, b"\x60", key=pack(">H", 1)), [WHITE, (170,) * 3]),
    "4 bits": (png(4, GRAY, b"\x01", key=pack(">H", 0)), [WHITE, (17,) * 3]),
    "8 bits": (png(8, GRAY, b"\x05\x06", key=pack(">H", 5)), [WHITE, (6,) * 3]),
    "16 bits": (png(16, GRAY, pack(">2H", 1285, 1286), key=pack(">H", 1285)), [WHITE, (5,) * 3]),
    "8 bits, RGB": (png(8, RGB, b"\1\2\3\4\5\6", key=pack(">3H", 1, 2, 3)), [WHITE, (4, 5, 6)]),
    "16 bits, RGB": (
        png(16, RGB, pack(">6H", 257, 514, 771, 1028, 1285, 1542), key=pack(">3H", 257, 514, 771)),
        [WHITE, (4, 5, 6)],
    ),
    "16 bits, gray and alpha": (png(16, GRAY_ALPHA, pack(">4H", 1285, 0, 1542, 65_535)), [WHITE, (6,) * 3]),
}


@pytest.mark.parametrize("name", KEYED)
def test_transparent_pixels_become_white_at_every_bit_depth(name: str) -> None:
    data, colors = KEYED[name]
    assert row_of(read_rgb(data)) == colors
    assert row_of(read_alpha(data)) == [0, 255]
    assert has_transparency(data)


@pytest.mark.parametrize("opacities", [0, b"\0\xff", b"\0"])
def test_transparent_palette_entries_become_white(opacities: object) -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    data = saved(palette, transparency=opacities)
    assert row_of(read_rgb(data)) == [WHITE, (0, 0, 255)]


def test_partially_transparent_pixels_are_blended_with_white() -> None:
    assert read_rgb(saved(Image.new("RGBA", (1, 1), (9, 8, 7, 51)))).getpixel((0, 0)) == (206, 206, 205)


@pytest.mark.parametrize("marked", [True, False])
def test_cmyk_jpeg_is_decoded_like_in_browsers(marked: bool) -> None:
    """Cyan alone: without the mark of Adobe's programs too, values are stored inverted."""
    data = saved(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=100)
    start = data.index(b"Adobe") - 4
    length = 2 + int.from_bytes(data[start + 2 : start + 4])
    data = data if marked else data[:start] + data[start + length :]
    assert read_rgb(data).getpixel((0, 0)) == (0, 255, 255)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "AVIF"])
def test_first_frame_of_an_animation_is_read(form: str) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("white", "black", "black")]
    data = saved(frames[0], form, save_all=True, append_images=frames[1:])
    check_picture(data, "image")
    assert read_rgb(data).getpixel((8, 8)) == WHITE


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "AVIF"])
def test_exif_orientation_is_applied_by_every_reader(form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    data = saved(Image.new("RGB", (16, 8)), form, exif=exif)
    assert size_of(data) == read_rgb(data).size == read_alpha(data).size == (8, 16)


@pytest.mark.parametrize(("mode", "form"), [("1", "BMP"), ("L", "BMP"), ("P", "BMP"), ("RGB", "BMP"), ("RGB", "AVIF")])
def test_bmp_and_avif_images_are_read(mode: str, form: str) -> None:
    picture = Image.new("RGB", (8, 8), "white").convert(mode)
    assert read_rgb(saved(picture, form)).getpixel((0, 0)) == WHITE


def test_every_image_error_names_the_field() -> None:
    for data in (b"", b"GIF89a", saved(Image.new("F", (2, 2)), "TIFF"), png(16, GRAY, b"")):
        for read in (check_picture, size_of, read_rgb, read_alpha, has_transparency):
            if data.startswith(b"\x89PNG") and read in (size_of, has_transparency):
                continue  # they read the header alone
            with pytest.raises(InvalidParameter, match=r"^last_frame ") as refused:
                read(data, "last_frame")
            assert refused.value.param == "last_frame"


def bitfields_bmp(*opacities: int) -> bytes:
    """A red BMP of 32 bits with a mask for each channel, as GIMP and Windows write it."""
    row = b"".join(bytes([0, 0, 255, opacity]) for opacity in opacities)
    masks = pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    head = pack("<IiiHHIIiiII", 108, len(opacities), 1, 1, 32, 3, len(row), 0, 0, 0, 0) + masks + b"BGRs" + bytes(48)
    return b"BM" + pack("<IHHI", 14 + len(head) + len(row), 0, 0, 14 + len(head)) + head + row


def test_bmp_with_channel_bit_masks_is_read() -> None:
    data = bitfields_bmp(0, 255)
    assert row_of(read_rgb(data)) == [WHITE, (255, 0, 0)]
    assert has_transparency(data)


def test_fully_transparent_bmp_is_opaque_like_in_browsers() -> None:
    data = bitfields_bmp(0, 0)
    assert row_of(read_rgb(data)) == [(255, 0, 0)] * 2
    assert row_of(read_alpha(data)) == [255, 255]
    assert not has_transparency(data)


def with_chunk(kind: bytes, data: bytes) -> bytes:
    whole = png(8, GRAY, b"\x05\x06")
    return whole[:33] + chunk(kind, data) + whole[33:]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "data",
    [
        with_chunk(b"eXIf", b"no EXIF data"),
        with_chunk(b"eXIf", b"II*\0\x08\0\0\0\xff\xff" + bytes(9)),
        with_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 3\nno digits\n"),
        with_chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(3_000_000))),
        with_chunk(b"zTXt", b"workflow\0\0" + zlib.compress(b"{}" * 2_000_000)),
    ],
    ids=["EXIF of no format", "EXIF that is cut", "EXIF as text", "large profile", "large comment"],
)
def test_invalid_or_large_image_metadata_is_ignored(data: bytes) -> None:
    check_picture(data, "image")
    assert size_of(data) == (2, 1)
    assert row_of(read_rgb(data)) == [(5,) * 3, (6,) * 3]
