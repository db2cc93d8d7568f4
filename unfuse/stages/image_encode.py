"""Image encoding: the picture that a request brings becomes what its denoising starts from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import torch
from PIL import Image
from typing_extensions import override

from unfuse.core.derived import Derived
from unfuse.core.errors import InvalidParameter, PermanentError
from unfuse.core.media import MASK, UPLOAD
from unfuse.core.pixels import read_alpha, read_rgb
from unfuse.core.plan import Params
from unfuse.stages.base import Stage, StageInput, StageOutput, Tensors


class ImageEncoder(Protocol):
    """What a family says about pictures: image encoder, VAE, or both in memory."""

    def verify(self, params: Params) -> None:
        """Raise PermanentError unless the parameters hold what `encode` reads."""

    def encode(self, pictures: Mapping[str, Sequence[Image.Image]], params: Params) -> Tensors:
        """Tensors by name, with a batch axis of one row a request.

        `pictures` has those of each request, in order, by the name of the upload. `params` are any request's: sizes
        agree.
        """


class ImageEncode(Stage):
    """The upload `image` in, and others that a request has beside it; whatever the family makes of them out."""

    kind = "image_encode"
    uploads = (UPLOAD,)
    beside: Sequence[str] = ()
    """Uploads that a request may bring beside that one; what its pipeline says it reads."""
    each = False
    """Whether pictures are encoded one by one, in sizes of their own, whatever size is asked for."""

    @override
    def batch_key(self, task: StageInput) -> Hashable:
        brings = self.uploads_of(task.derived)
        return brings if self.each else (brings, super().batch_key(task))

    @override
    def uploads_of(self, derived: Derived) -> Sequence[str]:
        return (UPLOAD, *(name for name in self.beside if name in derived.pictures))

    def __init__(self, encoder: ImageEncoder) -> None:
        self._encoder = encoder

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless there is an upload, and the parameters the family reads."""
        if UPLOAD not in task.uploads:
            raise PermanentError(f"upload {UPLOAD} is missing")
        self._encoder.verify(task.params)

    @torch.no_grad()
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Encode all at once, or one by one."""
        if self.each and len(batch) > 1:
            return [output for task in batch for output in self.run([task])]
        names = [name for name in self.uploads_of(batch[0].derived) if name != MASK]
        pictures = {name: [read_picture(task.uploads[name]) for task in batch] for name in names}
        together = self._encoder.encode(pictures, batch[0].params)
        rows = [slice(row, row + 1) for row in range(len(batch))]
        return [
            StageOutput({name: value if value is None else value[row] for name, value in together.items()})
            for row in rows
        ]


def read_picture(data: bytes) -> Image.Image:
    """Return an upload as RGB, composited on white, with EXIF rotation applied.

    Raises PermanentError if it is not a complete picture.
    """
    return _read(read_rgb, data, "the picture")


def read_mask(data: bytes) -> Image.Image:
    """Return the alpha channel of an upload (mode L). Raises PermanentError as `read_picture` does."""
    return _read(read_alpha, data, "the mask")


def _read(read: Callable[[bytes, str], Image.Image], data: bytes, name: str) -> Image.Image:
    try:
        return read(data, name)
    except InvalidParameter as error:
        raise PermanentError(str(error)) from error
