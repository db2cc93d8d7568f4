"""Vision encoding: a picture or a video that a prompt shows becomes what its tokens are for a language model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from PIL import Image
from typing_extensions import override

from unfuse.core.codec import MAX_UPLOAD_BYTES, decode
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import PermanentError
from unfuse.core.vision import Grid, MediaItem
from unfuse.stages.base import OneStepState, Outline, Stage, StageInput, StageOutput
from unfuse.stages.image_encode import read_picture
from unfuse.stages.media import read_frames


@dataclass(frozen=True)
class VisionFeatures:
    """Embeddings (tokens, width), and of as many what is added behind each of the first layers (deepstack)."""

    embeddings: torch.Tensor
    deep: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class VisionInput:
    """A picture, or the frames of a `video`, which come as they are decoded; and the grid that they become."""

    images: Iterable[Image.Image]
    grid: Grid
    video: bool


class VisionEncoder(Protocol):
    """A family's vision tower in memory. What it makes has this dtype and width, and so many `deep` layers."""

    dtype: str
    width: int
    deep: int

    def encode(self, views: Sequence[VisionInput]) -> list[VisionFeatures]:
        """What it sees in each. Raises PermanentError for a grid that is not theirs."""


class VisionEncode(Stage):
    """An upload in, what the family sees in it out, under the name that it has by its content.

    Each is told of as soon as it is made, so that its readers may fetch it: none waits for mates.
    """

    kind = "vision_encode"

    def __init__(self, encoder: VisionEncoder) -> None:
        self._encoder = encoder

    @override
    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        return (_shown(derived).upload,)

    @override
    def verify(self, task: StageInput) -> None:
        self._shapes(task)

    @override
    def batch_key(self, task: StageInput) -> Hashable:
        return _shown(task.derived).shown

    @override
    def outline(self, state: OneStepState) -> Outline:
        return self._shapes(state.task)

    def _shapes(self, task: StageInput) -> Outline:
        shape = _shown(task.derived).tokens, self._encoder.width
        return [(name, self._encoder.dtype, shape) for name in _names(task, self._encoder.deep)]

    @override
    @torch.no_grad()
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        tasks = [(task, _shown(task.derived)) for task in batch]
        views = [VisionInput(_images(task, s), Grid(s.frames, s.rows, s.columns), s.images > 0) for task, s in tasks]
        outputs = []
        for task, seen in zip(batch, self._encoder.encode(views), strict=True):
            named = zip(_names(task, len(seen.deep)), (seen.embeddings, *seen.deep), strict=True)
            outputs.append(StageOutput(dict(named)))
        return outputs


def _shown(derived: DerivedFacts) -> MediaItem:
    """What a task encodes."""
    if len(derived.shown) != 1:
        raise PermanentError(f"a task of vision_encode must be for one picture or video, not {len(derived.shown)}")
    return derived.shown[0]


def _names(task: StageInput, deep: int) -> list[str]:
    name = _shown(task.derived).shown
    return [name, *(f"{name}.{layer}" for layer in range(deep))]


def _images(task: StageInput, shown: MediaItem) -> Iterator[Image.Image]:
    (data,) = task.uploads.values()
    if shown.picked:
        yield from read_frames(data, [int(number) for number in shown.picked.split(",")])
    elif shown.images:
        pictures: list[bytes] = decode(data, list[bytes], MAX_UPLOAD_BYTES)
        yield from map(read_picture, pictures)
    else:
        yield read_picture(data)
