"""Vision encoding: a picture or video of a prompt becomes embeddings for a language model."""

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
from unfuse.stages.image_encode import read_image
from unfuse.stages.media import read_frames


@dataclass(frozen=True)
class VisionFeatures:
    """The features of one picture or video."""

    #: The embeddings of its tokens, (tokens, width).
    embeddings: torch.Tensor
    #: Added to the hidden states after the first layers of the language model (deepstack), each (tokens, width).
    deep: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class VisionInput:
    """A picture, or the frames of a video."""

    #: The picture alone, or the frames as they are decoded.
    images: Iterable[Image.Image]
    #: The grid of patches that they become.
    grid: Grid
    #: Whether they are frames of a video.
    video: bool


class VisionEncoder(Protocol):
    """What a model family provides for vision encoding: a vision tower in memory."""

    #: The dtype of the features, by torch's name.
    dtype: str
    #: The width of the features.
    width: int
    #: The number of deepstack layers.
    deep: int

    def encode(self, views: Sequence[VisionInput]) -> list[VisionFeatures]:
        """Return the features of each input.

        Raises PermanentError for a grid that does not match its pictures.
        """


class VisionEncode(Stage):
    """The vision encoder stage: an upload in, its features out.

    Features are named by the content of the upload (`MediaItem.content_hash`). Different uploads never share a batch.
    So the features of each are announced once they are computed, and their readers wait for no other upload.
    """

    kind = "vision_encode"

    def __init__(self, encoder: VisionEncoder) -> None:
        self._encoder = encoder

    @override
    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        return (_media_item(derived).upload,)

    @override
    def verify(self, task: StageInput) -> None:
        self._outline(task)

    @override
    def batch_key(self, task: StageInput) -> Hashable:
        return _media_item(task.derived).content_hash

    @override
    def outline(self, state: OneStepState) -> Outline:
        return self._outline(state.task)

    def _outline(self, task: StageInput) -> Outline:
        """Return the outline: one tensor (tokens, width) for the embeddings and each deepstack layer."""
        shape = _media_item(task.derived).tokens, self._encoder.width
        return [(name, self._encoder.dtype, shape) for name in _tensor_names(task, self._encoder.deep)]

    @override
    @torch.no_grad()
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        items = [(task, _media_item(task.derived)) for task in batch]
        views = [
            VisionInput(_decode_images(task, item), Grid(item.frames, item.rows, item.columns), item.images > 0)
            for task, item in items
        ]

        outputs = []
        for task, features in zip(batch, self._encoder.encode(views), strict=True):
            tensors = zip(_tensor_names(task, len(features.deep)), (features.embeddings, *features.deep), strict=True)
            outputs.append(StageOutput(dict(tensors)))
        return outputs


def _media_item(derived: DerivedFacts) -> MediaItem:
    """Return the one picture or video that a task encodes.

    Raises PermanentError for any other number.
    """
    if len(derived.media) != 1:
        raise PermanentError(f"a task of vision_encode must be for one picture or video, not {len(derived.media)}")
    return derived.media[0]


def _tensor_names(task: StageInput, deep: int) -> list[str]:
    """Return the names of a task's output tensors: the embeddings, then each deepstack layer."""
    name = _media_item(task.derived).content_hash
    return [name, *(f"{name}.{layer}" for layer in range(deep))]


def _decode_images(task: StageInput, item: MediaItem) -> Iterator[Image.Image]:
    """Yield the picture, or the sampled frames of the video, of a task."""
    (data,) = task.uploads.values()
    if item.frame_indexes:
        yield from read_frames(data, [int(number) for number in item.frame_indexes.split(",")])
    elif item.images:
        pictures: list[bytes] = decode(data, list[bytes], MAX_UPLOAD_BYTES)
        yield from map(read_image, pictures)
    else:
        yield read_image(data)
