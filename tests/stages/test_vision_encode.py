"""Vision encoding, whatever the encoder: what it is given to see, and under which names it is kept."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from unfuse.core.codec import encode
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import PermanentError
from unfuse.core.vision import Grid, MediaItem
from unfuse.stages.base import StageInput
from unfuse.stages.media import VideoWriter, read_frames
from unfuse.stages.vision_encode import VisionEncode, VisionFeatures, VisionInput


class Looks:
    """Sees the mean of each image's first colour."""

    dtype, width, deep = "float32", 1, 1

    def encode(self, views: Sequence[VisionInput]) -> list[VisionFeatures]:
        self.grids = [(view.grid, view.video) for view in views]
        means = [[float(np.asarray(image)[..., 0].mean()) for image in view.images] for view in views]
        return [VisionFeatures(torch.tensor(mean)[:, None], [torch.zeros(len(mean), 1)]) for mean in means]


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


def film(*levels: int) -> bytes:
    recording = VideoWriter(2)
    recording.add(np.stack([np.full((32, 32, 3), level, np.uint8) for level in levels]))
    return recording.finish()[0].data


def task(data: bytes, **video: Any) -> StageInput:
    shown = replace(MediaItem("abc", "shown-abc", frames=1, rows=2, columns=4, tokens=2), **video)
    return StageInput({}, {}, {"shown-abc": data}, derived=DerivedFacts(media=(shown,)))


def seen(*tasks: StageInput) -> list[list[float]]:
    stage = VisionEncode(Looks())
    for one in tasks:
        assert stage.uploads_of(one.derived) == ("shown-abc",)
        stage.verify(one)
    made = [output.tensors for output in stage.run(tasks)]
    assert [[*tensors] for tensors in made] == [["abc", "abc.0"]] * len(tasks)
    assert stage.outline(stage.start(tasks[0])) == [(name, "float32", (2, 1)) for name in ("abc", "abc.0")]
    return [tensors["abc"].flatten().round().tolist() for tensors in made if tensors["abc"] is not None]


def test_images_frame_lists_and_video_files_are_encoded() -> None:
    frames, file = encode([png(7), png(9)]), film(10, 80, 150, 220)
    picked = task(file, images=2, frame_indexes="1,3")
    picture, listed, filed = seen(task(png(5)), task(frames, images=2), picked)
    assert (picture, listed) == ([5], [7, 9])
    assert filed == pytest.approx([80, 220], abs=6)


def test_vision_encoder_receives_the_grid_and_the_video_flag() -> None:
    looks = Looks()
    VisionEncode(looks).run([task(png(5)), task(encode([png(1)] * 2), images=2)])
    assert looks.grids == [(Grid(1, 2, 4), False), (Grid(1, 2, 4), True)]


def test_verify_rejects_a_task_without_exactly_one_image_or_video() -> None:
    with pytest.raises(PermanentError, match="must be for one picture or video, not 0"):
        VisionEncode(Looks()).verify(StageInput({}, {}))


def test_read_frames_returns_requested_frames_or_raises() -> None:
    whole = film(10, 80, 150)
    assert [np.asarray(frame).mean() > 60 for frame in read_frames(whole, [0, 1])] == [False, True]
    with pytest.raises(PermanentError, match="no frame 3: it is truncated or damaged"):
        [*read_frames(whole, [0, 3])]
    for data in (b"", png(1), whole[:100]):
        with pytest.raises(PermanentError, match="cannot be decoded"):
            [*read_frames(data, [0])]
