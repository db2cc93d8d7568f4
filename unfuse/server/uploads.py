"""Reads the pictures that clients send, and checks them before they are stored."""

from __future__ import annotations

import base64
import re
import struct
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from unfuse.core.errors import InvalidParameter

MAX_BYTES = 20 * 1024 * 1024
MAX_SIDE = 16_384
MAX_PIXELS = 40_000_000
FORMATS = ("PNG", "JPEG", "WEBP")

ORIENTATION, ASIDE = 0x0112, (5, 6, 7, 8)
"""The entry of a picture's metadata that says how it lies, and its values for those that lie on a side."""

EXAMPLES = {"image": "image/png", "video": "video/mp4"}

_DATA_URL = re.compile(r"data:(image|video)/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error)
"""The errors of Pillow for damaged pictures."""


def read_picture(name: str, value: object) -> bytes:
    """The bytes of the one picture that a field holds, as a file or as a data: URL. Takes long: not for the event loop.

    Raises InvalidParameter unless it is a whole PNG, JPEG or WebP picture of a size that can be held.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        raise InvalidParameter(f"{name} must be one picture, not {len(value)}", name)
    if isinstance(value, dict) and value.keys() == {"image_url"}:
        value = value["image_url"]
    data = value if isinstance(value, bytes) else decoded(name, value)
    if not 0 < len(data) <= MAX_BYTES:
        raise InvalidParameter(f"{name} must have 1 to {MAX_BYTES} bytes, not {len(data)}", name)
    _check(name, data)
    return data


def read_mask(value: object, picture: bytes) -> bytes:
    """A mask's bytes: as large as its picture, transparent where that may change. Raises InvalidParameter."""
    data = read_picture("mask", value)
    sizes = ["{}x{}".format(*size_of(one)) for one in (data, picture)]
    if sizes[0] != sizes[1]:
        raise InvalidParameter(f"mask is {sizes[0]} pixels, image {sizes[1]}: send one of the same size", "mask")
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        if not image.has_transparency_data:
            raise InvalidParameter("mask has no transparency: make it transparent where image is to change", "mask")
    return data


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height of a picture that was read, the right way up."""
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        turned = image.getexif().get(ORIENTATION, 1) in ASIDE
        return image.size[::-1] if turned else image.size


def decoded(name: str, value: object, kind: str = "image") -> bytes:
    """The bytes in a data: URL of this kind. Raises InvalidParameter."""
    scheme = _DATA_URL.match(value) if isinstance(value, str) else None
    scheme = scheme if scheme and scheme[1].lower() == kind else None
    if not isinstance(value, str) or scheme is None:
        only = f"a file, or a data:{EXAMPLES[kind]};base64,… URL"
        rest = "other addresses are not fetched, files not kept to refer to"
        raise InvalidParameter(f"{name} must be {only} ({rest})", name)
    try:
        return base64.b64decode(value[scheme.end() :], validate=True)
    except ValueError as error:
        raise InvalidParameter(f"{name} is not base64: {error}", name) from error


def _check(name: str, data: bytes) -> None:
    """Read the size before anything of that size is allocated, then decode the picture, to be sure of it."""
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
                bound = f"at most {MAX_SIDE} a side and {MAX_PIXELS} in all"
                raise InvalidParameter(f"{name} is {width}x{height} pixels; there may be {bound}", name)
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise InvalidParameter(f"{name} is animated: send one still picture", name)
            image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidParameter(f"{name} has more than {MAX_PIXELS} pixels, the most there may be", name) from error
    except UnidentifiedImageError as error:
        raise InvalidParameter(f"{name} is not a PNG, JPEG or WebP picture", name) from error
    except _BROKEN as error:
        raise InvalidParameter(f"{name} cannot be decoded, it is cut or damaged: {error}", name) from error
