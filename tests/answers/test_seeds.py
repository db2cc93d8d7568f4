"""Seeds are any integer of 64 bits, as diffusers' scripts pass them to torch; -1 is drawn."""

from __future__ import annotations

from typing import Any

import httpx2
import numpy as np
import pytest

from tests.answers.sending import Studio, edited, files_of, gradient, pixels_of, refusal, saved, studio as studio

LEAST, MOST = -(2**63), 2**64 - 1


@pytest.mark.row("C5:seeds", "C22")
@pytest.mark.parametrize("seed", [2**60, MOST, LEAST])
def test_image_seed_matches_torch_manual_seed_in_diffusers(seed: int, studio: Studio) -> None:
    import torch
    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(studio.sdxl)
    pipeline.set_progress_bar_config(disable=True)
    steps: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0, "height": 32, "width": 32}
    generator = torch.Generator().manual_seed(seed)
    expected = (pipeline("a cat", generator=generator, output_type="np", **steps).images[0] * 255).round()
    body = {"model": studio.sdxl, "prompt": "a cat", "seed": seed, "size": "32x32", "guidance_scale": 5}

    answer = studio.server.post("/v1/images/generations", body)

    assert np.abs(pixels_of(files_of(answer)[0]) - expected).max() <= 1
    assert answer["data"][0]["seed"] == seed
    assert studio.server.get(f"/v1/requests/{answer['id']}")["seed"] == seed


@pytest.mark.row("C5:seeds")
def test_consecutive_image_seeds_wrap_and_reproduce_each_image(studio: Studio) -> None:
    body = {"model": studio.sdxl, "prompt": "a cat"}
    several = studio.server.post("/v1/images/generations", {**body, "seed": str(MOST), "n": 2})
    seeds = [one["seed"] for one in several["data"]]
    again = [studio.server.post("/v1/images/generations", {**body, "seed": seed}) for seed in seeds]

    assert seeds == [MOST, 0]
    assert files_of(several) == [file for one in again for file in files_of(one)]


@pytest.mark.row("C5:seeds")
def test_seed_minus_one_draws_a_random_seed_and_reports_the_value(studio: Studio) -> None:
    fields = {"model": studio.sd_image, "strength": "0.8"}
    drawn = [edited(studio.server, saved(gradient()), **{**fields, "seed": "-1"}) for _ in range(2)]
    seeds = [one["data"][0]["seed"] for one in drawn]
    again = edited(studio.server, saved(gradient()), **{**fields, "seed": str(seeds[0])})

    assert seeds[0] != seeds[1] and min(seeds) >= 0
    assert files_of(again) == files_of(drawn[0]) != files_of(drawn[1])


@pytest.mark.row("C22")
def test_chat_accepts_any_64_bit_seed_and_is_reproducible(studio: Studio) -> None:
    def said(seed: object) -> dict[str, Any]:
        body = {"model": studio.sees, "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 8}
        answer: dict[str, Any] = studio.server.post("/v1/chat/completions", {**body, "seed": seed, "n": 2})
        return answer

    texts = set()
    for seed in (LEAST, -2, 2**53, 2**63 - 1, MOST):
        first, second = said(seed), said(seed)
        assert first["seed"] == seed
        assert [one["message"] for one in first["choices"]] == [one["message"] for one in second["choices"]]
        texts.add(first["choices"][0]["message"]["content"])
    assert len(texts) == 5
    drawn = said(-1)
    assert said(drawn["seed"])["choices"][1]["message"] == drawn["choices"][1]["message"]


@pytest.mark.row("C22")
@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "seven", True])
def test_invalid_seed_is_rejected_with_the_bounds(seed: object, studio: Studio) -> None:
    body = {"model": studio.sdxl, "prompt": "a cat", "seed": seed}
    param, message = refusal(httpx2.post(f"{studio.server.url}/v1/images/generations", json=body))
    assert param == "seed" and str(LEAST) in message and str(MOST) in message
