"""Sizes: results follow the picture that they start from, limits hold for what is made, answers say what was made."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.answers.sending import (
    Studio,
    data_url,
    edited,
    files_of,
    gradient,
    pixels_of,
    refusal,
    saved,
    studio as studio,
)

SD_STEPS: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0}


def size_of(data: bytes) -> str:
    """Width and height of a file."""
    return "{}x{}".format(*Image.open(BytesIO(data)).size)


def drawn(pipeline: Any, picture: Image.Image, **call: Any) -> np.ndarray[Any, Any]:
    """What diffusers makes of a picture, as pixels."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(5)
    made = pipeline(prompt="a cat", image=picture, generator=generator, output_type="np", **SD_STEPS, **call).images
    return (made[0] * 255).round().astype(np.int16)


@pytest.mark.row("P22", "K8")
@pytest.mark.parametrize("size", [(48, 32), (32, 48), (53, 38)])
def test_undivided_edit_has_and_reports_the_size_of_its_input_image(size: tuple[int, int], studio: Studio) -> None:
    from diffusers import StableDiffusionImg2ImgPipeline

    picture = gradient(*size)
    answer = edited(studio.server, saved(picture), model=studio.sd_image, guidance_scale="5")
    request = studio.server.get(f"/v1/requests/{answer['id']}")
    expected = drawn(StableDiffusionImg2ImgPipeline.from_pretrained(studio.sd_image), picture)

    (file,) = files_of(answer)
    assert np.abs(pixels_of(file) - expected).max() <= 1
    assert answer["size"] == size_of(file) == f"{request['params']['width']}x{request['params']['height']}"


@pytest.mark.row("P22")
def test_undivided_edit_stream_reports_the_image_size(studio: Studio) -> None:
    form = {"model": studio.sd_image, "prompt": "a cat", "seed": "5", "stream": "true"}
    files = {"image": saved(gradient(48, 32))}
    answer = httpx2.post(f"{studio.server.url}/v1/images/edits", data=form, files=files, timeout=600)

    lines = [line[5:] for line in answer.text.splitlines() if line.startswith("data:")]
    last = [json.loads(line) for line in lines if line.strip() != "[DONE]"][-1]
    assert (last["type"], last["size"]) == ("image_edit.completed", "48x32")


@pytest.mark.row("P22", "P42")
def test_undivided_edit_has_the_requested_size(studio: Studio) -> None:
    from diffusers import StableDiffusionImg2ImgPipeline

    picture = gradient(48, 32)
    expected = drawn(
        StableDiffusionImg2ImgPipeline.from_pretrained(studio.sd_image),
        picture.resize((40, 24), Image.Resampling.LANCZOS),
    )

    for said in ({"size": "40x24"}, {"width": "40", "height": "24"}):
        answer = edited(studio.server, saved(picture), model=studio.sd_image, guidance_scale="5", **said)
        assert answer["size"] == size_of(files_of(answer)[0]) == "40x24"
        assert np.abs(pixels_of(files_of(answer)[0]) - expected).max() <= 1


@pytest.mark.row("P23", "K8")
def test_input_image_over_the_limits_is_downscaled_in_proportion(studio: Studio) -> None:
    """Of 4096x64, which is 2048x32 at the most; a picture of 40 megapixels would take too long to try."""
    fields = {"model": studio.sd_image, "num_inference_steps": "1", "strength": "1"}
    answer = edited(studio.server, saved(gradient(4096, 64)), **fields)

    assert answer["size"] == size_of(files_of(answer)[0]) == "2048x32"


@pytest.mark.row("K8")
@pytest.mark.parametrize(("given", "made"), [((48, 32), (32, 24)), ((90, 160), (24, 40)), ((64, 64), (32, 32))])
def test_edit_has_the_aspect_ratio_of_its_input_image(
    given: tuple[int, int], made: tuple[int, int], studio: Studio
) -> None:
    """The model's own area is 32x32 pixels, and its sides are multiples of 8."""
    from diffusers import StableDiffusionXLImg2ImgPipeline

    picture = gradient(*given)
    fields = {"model": studio.sdxl, "guidance_scale": "5", "strength": "0.5"}
    answers = [edited(studio.server, saved(picture), **fields, **said) for said in ({}, {"size": "auto"})]
    pipeline = StableDiffusionXLImg2ImgPipeline.from_pretrained(studio.sdxl)
    expected = drawn(pipeline, picture.resize(made, Image.Resampling.LANCZOS), strength=0.5)

    for answer in answers:
        (file,) = files_of(answer)
        assert answer["size"] == size_of(file) == "{}x{}".format(*made)
        assert np.abs(pixels_of(file) - expected).max() <= 1


@pytest.mark.row("K8")
def test_video_has_the_aspect_ratio_of_its_first_frame(studio: Studio) -> None:
    form = {"model": studio.wan, "prompt": "a cat", "num_frames": "5", "output_format": "png"}
    files = {"input_reference": saved(gradient(90, 160))}
    video = httpx2.post(f"{studio.server.url}/v1/videos", data=form, files=files, timeout=600).json()

    done = studio.server.finished(video["id"])

    assert done["status"] == "completed", done["error"]
    assert video["size"] == size_of(studio.server.result(video["id"])) == "16x32"


@pytest.mark.row("P42", "D7", "N4")
def test_width_and_height_are_accepted_and_must_agree_with_size(studio: Studio) -> None:
    server, prompt = studio.server, "a cat"
    body: dict[str, Any] = {"model": studio.sdxl, "prompt": prompt, "seed": 5}
    made = [
        server.post("/v1/images/generations", {**body, **said})
        for said in ({"size": "48x32"}, {"width": 48, "height": 32}, {"width": "48", "height": 32, "size": "48x32"})
    ]
    assert {one["size"] for one in made} == {"48x32"} and len({files_of(one)[0] for one in made}) == 1

    images = f"{server.url}/v1/images/generations"
    for said, wrong in (
        ({"width": 48, "size": "32x32"}, "width"),
        ({"height": 48, "width": 32, "size": "32x32"}, "height"),
        ({"width": 33, "height": 32}, "width"),
        ({"width": 0}, "width"),
        ({"height": "tall"}, "height"),
    ):
        param, message = refusal(httpx2.post(images, json={**body, **said}))
        assert param == wrong and len(message) < 300

    seeds = {"num_frames": 5, "height": 32, "width": 16, "num_inference_steps": 2, "guidance_scale": 1.5, "seed": 42}
    picture = {"input_reference": {"image_url": data_url(saved(gradient()))}}
    body = {"model": studio.wan, "prompt": "A curious raccoon", **seeds, **picture}
    video = server.post("/v1/videos/generations", {**body, "seconds": "4"})
    assert (video["size"], video["num_frames"]) == ("16x32", 5)
