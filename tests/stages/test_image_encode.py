"""Image encoding, whatever the encoder: which pictures are read, how, and what becomes of those that are none."""

import io
import zlib
from collections.abc import Hashable, Mapping, Sequence
from struct import pack

import pytest
import torch
from PIL import Image
from torch import Tensor

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import Stage, StageInput, need
from unfuse.stages.image_encode import ImageEncode, read_image

PARAMS: Params = {"width": 4, "height": 2, "num_frames": 1}


class Pixels:
    """An encoder whose encoding of a picture is its first pixel; it would keep gradients."""

    one_by_one, extra_uploads, vae = False, (), None

    def __init__(self) -> None:
        self.weight = torch.ones(1, requires_grad=True)

    def verify(self, params: Params) -> None:
        need(params, "width", int)

    def size(self, pictures: Mapping[str, Sequence[Image.Image]], params: Params) -> tuple[int, int]:
        return 2, 4

    def encode(self, pictures: Mapping[str, Sequence[Image.Image]], params: Params) -> dict[str, Tensor | None]:
        first = torch.tensor([picture.getpixel((0, 0)) for picture in pictures["image"]], dtype=torch.float32)
        return {"first": self.weight * first, "nothing": None}


def file(colour: object = (1, 2, 3), mode: str = "RGB", form: str = "PNG", **options: object) -> bytes:
    data = io.BytesIO()
    Image.new(mode, (4, 2), colour).save(data, form, **options)
    return data.getvalue()


def task(data: bytes, **params: object) -> StageInput:
    return StageInput({**PARAMS, **params}, {}, {"image": data})


def test_each_image_of_a_batch_gets_its_own_encoding() -> None:
    stage = ImageEncode(Pixels())
    tasks = [task(file((number, 0, 9))) for number in range(3)]
    for one in tasks:
        stage.verify(one)

    outputs = stage.run(tasks)

    assert [output.tensors["first"].tolist() for output in outputs] == [[[number, 0, 9]] for number in range(3)]
    assert all(output.tensors["nothing"] is None for output in outputs)
    assert not any(output.tensors["first"].requires_grad for output in outputs)


def key(stage: Stage, params: Params) -> Hashable:
    return stage.batch_key(StageInput(params, {}))


def test_batch_key_groups_images_of_equal_size_and_length() -> None:
    stage = ImageEncode(Pixels())

    assert stage.uploads == ("image",)
    assert key(stage, {**PARAMS, "seed": 1}) == stage.batch_key(StageInput({**PARAMS, "seed": 2}, {}))
    assert key(stage, PARAMS) != key(stage, {**PARAMS, "num_frames": 5})


def test_verify_rejects_a_missing_image_or_parameter() -> None:
    stage = ImageEncode(Pixels())

    with pytest.raises(PermanentError, match="upload image is missing"):
        stage.verify(StageInput(PARAMS, {}))
    with pytest.raises(PermanentError, match="parameter width must be of type int"):
        stage.verify(task(file(), width=None))


@pytest.mark.parametrize(
    ("data", "pixel"),
    [
        (file((1, 2, 3)), (1, 2, 3)),
        (file((9, 8, 7, 0), "RGBA"), (255, 255, 255)),
        (file((9, 8, 7, 51), "RGBA"), (206, 206, 205)),
        (file((70, 0), "LA"), (255, 255, 255)),
        (file(40 * 257, "I;16"), (40, 40, 40)),
        (file((5, 6, 7), form="GIF"), (5, 6, 7)),
        (file((5, 6, 7), form="BMP"), (5, 6, 7)),
        (file(70, "L"), (70, 70, 70)),
        (file(1, "1"), (255, 255, 255)),
        (file((5, 60, 200), form="WEBP", lossless=True), (5, 60, 200)),
        (file(80, "L", "JPEG"), (80, 80, 80)),
    ],
)
def test_uploaded_images_are_converted_to_rgb(data: bytes, pixel: tuple[int, int, int]) -> None:
    picture = read_image(data)

    assert (picture.mode, picture.size) == ("RGB", (4, 2))
    assert picture.getpixel((0, 0)) == pixel


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_exif_rotation_is_applied_to_uploaded_images(form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6

    assert read_image(file(form=form, exif=exif)).size == (2, 4)


def chunk(kind: bytes, data: bytes) -> bytes:
    return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A few bytes that say they are a picture of that size."""
    head = chunk(b"IHDR", pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no picture",
        file()[:50],
        file()[:20],
        file(form="GIF")[:30],
        file(form="BMP")[:60],
        file(form="TIFF"),
        file(form="JPEG")[:200],
        bomb(64, 64),
        bomb(30_000, 30_000),
        bomb(2**31 - 1, 2**31 - 1),
        bomb(0, 0),
    ],
)
def test_invalid_or_oversized_image_raises_permanent_error(data: bytes) -> None:
    with pytest.raises(
        PermanentError, match="the picture (cannot be decoded|is not a PNG|is 30000x30000|has more than 40000000)"
    ):
        ImageEncode(Pixels()).run([task(data)])
