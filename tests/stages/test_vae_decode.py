"""VAE decoding, whatever the VAE: pixels as diffusers rounds them, and a file at the end."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import StageInput
from unfuse.stages.vae_decode import VaeDecode, to_pixels

PARAMS: Params = {"output_format": "png"}


class Same:
    """A decoder whose pixels are its latents."""

    latents = (1, 3, None, None, None)

    def __init__(self) -> None:
        self.weight = torch.ones(1, requires_grad=True)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        return latents

    def decode(self, grid: Tensor) -> Tensor:
        return self.weight * grid


def test_each_frame_becomes_a_picture_without_loss() -> None:
    video = torch.rand(1, 3, 3, 8, 16) * 2 - 1
    stage = VaeDecode(Same())
    task = StageInput(PARAMS, {"latents": video})
    stage.verify(task)

    (output,) = stage.run([task])

    pictures = [np.asarray(Image.open(io.BytesIO(media.data))) for media in output.media]
    assert output.tensors == {}
    assert {media.content_type for media in output.media} == {"image/png"}
    assert np.array_equal(np.stack(pictures), to_pixels(video[0]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_are_rounded_as_diffusers_rounds_them(dtype: torch.dtype) -> None:
    """Among the values are all exact halves, which go to the even neighbour, and some outside −1 to 1."""
    from diffusers.video_processor import VideoProcessor

    halves = (torch.arange(256) + 0.5) / 255 * 2 - 1
    values = torch.cat([halves, torch.linspace(-1.2, 1.2, 3 * 2 * 16 * 16 - 256)])
    video = values.to(dtype).reshape(1, 3, 2, 16, 16)

    expected = VideoProcessor().postprocess_video(video, output_type="pil")[0]

    assert np.array_equal(to_pixels(video[0]), np.stack([np.asarray(frame) for frame in expected]))


def test_pixels_that_are_no_numbers_are_refused() -> None:
    video = torch.zeros(1, 3, 1, 8, 8)
    video[0, 1, 0, 2, 3] = math.nan

    with pytest.raises(PermanentError, match="pixels that are not finite"):
        VaeDecode(Same()).run([StageInput(PARAMS, {"latents": video})])


@pytest.mark.parametrize(("params", "tensors", "sentence"), [
    (PARAMS, {}, "input latents is missing"),
    (PARAMS, {"latents": None}, "input latents is missing"),
    (PARAMS, {"latents": torch.zeros(1, 4, 1, 8, 8)}, "input latents must be floating point of 1×3×any×any×any"),
    ({}, {"latents": torch.zeros(1, 3, 1, 8, 8)}, "parameter output_format must be of type str"),
    ({"output_format": "gif"}, {"latents": torch.zeros(1, 3, 1, 8, 8)}, "output_format must be png, jpeg, webp, mp4"),
])  # fmt: skip
def test_a_task_that_lacks_something_is_refused(
    params: Params, tensors: dict[str, Tensor | None], sentence: str
) -> None:
    with pytest.raises(PermanentError, match=sentence):
        VaeDecode(Same()).verify(StageInput(params, tensors))


def test_a_batch_of_one_size_is_decoded_together_and_each_gets_its_own_file() -> None:
    videos = [torch.rand(1, 3, 1, 8, 16) * 2 - 1 for _ in range(3)]
    forms = ("png", "webp", "png")
    tasks = [StageInput({"output_format": f}, {"latents": v}) for f, v in zip(forms, videos, strict=True)]

    outputs = VaeDecode(Same()).run(tasks)

    assert [output.media[0].content_type for output in outputs] == ["image/png", "image/webp", "image/png"]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(outputs[2].media[0].data))), to_pixels(videos[2][0])[0])
