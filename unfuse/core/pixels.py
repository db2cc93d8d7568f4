"""Decodes uploaded pictures: edits, masks, first and last frames, and pictures in chats.

This is the only decoder. The size is read from the file's header and checked before memory is allocated. Color
profiles, comments and further frames are ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from PIL import Image, ImageMath, PngImagePlugin, UnidentifiedImageError

from unfuse.core.errors import InvalidParameter

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF")
"""The accepted formats. TIFF is not: its decoders have many vulnerabilities, and its value range is not defined."""

FORMAT_NAMES = "PNG, JPEG, WebP, GIF, BMP or AVIF"

MAX_SIDE = 16_384  # pixels
MAX_PIXELS = 40_000_000

ORIENTATION = 0x0112
"""The EXIF tag with the orientation of a picture."""

TRANSPOSING_ORIENTATIONS = (5, 6, 7, 8)
"""Values of ORIENTATION that swap width and height."""

ROTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that makes a picture upright, for each value of ORIENTATION."""

RUN_LENGTHS = (1, 2)
"""Values of a BMP file's compression field for run-length encoding, which Pillow decodes slowly."""

PngImagePlugin.MAX_TEXT_CHUNK = 16 * 1024 * 1024
"""The most bytes of a color profile or comment in a PNG file. Many have more than Pillow's limit of 1 MiB."""

_KEY_SCALES = {"L;2": 85, "L;4": 17}
"""Pillow scales gray values of 2 and 4 bits by these factors, but not the value of the transparent color."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error)
"""Errors that Pillow raises for damaged pictures."""


def check_picture(data: bytes, name: str) -> None:
    """Raise InvalidParameter unless `data` is a complete picture within the size limits.

    The error names the field `name`.
    """
    with _opened(data, name) as image:
        image.load()


def size_of(data: bytes, name: str = "image") -> tuple[int, int]:
    """Return width and height from the header, with EXIF rotation applied. Raises as `check_picture` does."""
    with _opened(data, name) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in TRANSPOSING_ORIENTATIONS else (width, height)


def has_transparency(data: bytes, name: str = "mask") -> bool:
    """Return whether the picture has an alpha channel or a transparent color.

    Raises as `check_picture` does.
    """
    with _opened(data, name) as image:
        return _has_transparency(image)


def read_rgb(data: bytes, name: str = "image") -> Image.Image:
    """Return the first frame in 8-bit RGB, with EXIF rotation applied. Raises as `check_picture` does.

    Transparent pixels are composited on white, as transformers' image processors do. Gray of 16 bits is divided by 257.
    """
    with _opened(data, name) as image:
        pixels = _eight_bits(image)
        if pixels.mode == "RGB":
            return pixels
        background = Image.new("RGBA", pixels.size, "white")
        return Image.alpha_composite(background, pixels).convert("RGB")


def read_alpha(data: bytes, name: str = "mask") -> Image.Image:
    """Return the first frame's alpha channel, 0 to 255 (mode L), upright by EXIF.

    Raises as `check_picture` does.
    """
    with _opened(data, name) as image:
        return _eight_bits(image).convert("RGBA").getchannel("A")


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[Image.Image]:
    """Open a picture of an accepted format and size. Its pixels are not decoded yet."""
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
                allowed = f"at most {MAX_SIDE} a side and {MAX_PIXELS} in all are allowed"
                raise InvalidParameter(f"{name} is {width}x{height} pixels; {allowed}: send a smaller one", name)
            if image.format == "BMP" and image.info.get("compression") in RUN_LENGTHS:
                raise InvalidParameter(f"{name} is a compressed BMP picture: send it as PNG", name)
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidParameter(f"{name} has more than {MAX_PIXELS} pixels: send a smaller one", name) from error
    except UnidentifiedImageError as error:
        raise InvalidParameter(f"{name} is not a {FORMAT_NAMES} picture", name) from error
    except _BROKEN as error:
        raise InvalidParameter(f"{name} cannot be decoded, it is truncated or damaged: {error}", name) from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return the picture as RGBA or RGB, with EXIF rotation applied.

    It is RGBA if it has transparency.
    """
    # load() empties `tile`, which has the mode of the stored pixels
    tiles = getattr(image, "tile", None)
    raw_mode = str(tiles[0].args) if tiles else ""
    key = image.info.get("transparency")
    if isinstance(key, int) and raw_mode in _KEY_SCALES:
        image.info["transparency"] = key * _KEY_SCALES[raw_mode]
    if isinstance(key, tuple) and raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(part >> 8 for part in key)

    image.load()
    transposition = ROTATIONS.get(_orientation(image))
    upright = image if transposition is None else image.transpose(transposition)
    if upright.mode.startswith("I"):
        return _from_sixteen_bits(upright, key)
    return upright.convert("RGBA" if _has_transparency(image) else "RGB")


def _orientation(image: Image.Image) -> int:
    """Return the value of ORIENTATION; 1 (no change) if there is none.

    EXIF data that cannot be read counts as none.
    """
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except _BROKEN:
        return 1


def _has_transparency(image: Image.Image) -> bool:
    """Return whether the picture has an alpha channel or a transparent color.

    A BMP file whose pixels are all transparent counts as opaque: programs without transparency write zeros there.
    """
    is_all_transparent = image.format == "BMP" and image.mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0)
    return image.has_transparency_data and not is_all_transparent


def _from_sixteen_bits(image: Image.Image, key: object) -> Image.Image:
    """Return 16-bit gray as RGB; as RGBA if the value `key` is transparent."""
    wide = image.convert("I")
    # Pillow allows only a scale and an offset for 32-bit pixels; 0.5 rounds
    gray = wide.point(lambda value: value * (1 / 257) + 0.5).convert("L")
    if not isinstance(key, int):
        return gray.convert("RGB")
    opaque = ImageMath.lambda_eval(lambda names: names["wide"] != key, wide=wide).convert("L")
    return Image.merge("RGBA", (gray, gray, gray, opaque.point(lambda value: 255 * value)))
