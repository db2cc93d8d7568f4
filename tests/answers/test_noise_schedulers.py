"""Folders with any noise scheduler of diffusers: diffusers' pictures, and one picture for one seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.answers.sampled import BY_DAY, SCHEDULED, SIZE, TOGETHER, called, drawn, pixels_of
from tools.server import Server

Sampled = Callable[[str], Path]

pytestmark = pytest.mark.slow

ROWS = {
    "wan-dpm": ("P26", "K10"),
    "wan-deis": ("P26",),
    "flux-unipc": ("P27",),
    "flux-dpm": ("P27",),
    "sd3-lcm": ("P16", "K5"),
    "lumina-stochastic": ("P17",),
}
VIDEOS = ("hunyuan", "ltx")


def _case(name: str) -> object:
    marks = [pytest.mark.row(*ROWS[name])] if name in ROWS else []
    return pytest.param(name, marks=marks if name in BY_DAY else [*marks, pytest.mark.nightly])


@pytest.mark.parametrize("name", [_case(name) for name in SCHEDULED if not name.startswith(VIDEOS)])
def test_other_noise_schedulers_produce_the_pixels_of_diffusers(
    name: str, sampled: Sampled, served: Callable[..., Server], tmp_path: Path
) -> None:
    """The same bytes each time, also where the noise scheduler draws random numbers."""
    there = served(*map(sampled, TOGETHER if name in BY_DAY else [name]))
    asked = {} if name.startswith("wan") else {"guidance_scale": 3.0}

    answers = [
        drawn(there, sampled(name), size="32x32", num_inference_steps=4, **asked)[0]["b64_json"] for _ in range(3)
    ]
    other = drawn(there, sampled(name), size="32x32", num_inference_steps=4, seed=6, **asked)[0]["b64_json"]

    assert len({*answers}) == 1 and other != answers[0]
    params = {"prompt": "cats", **SIZE, "num_frames": 1, "max_sequence_length": 24, **asked}
    wanted = called(tmp_path, [{"name": name, "folder": str(sampled(name)), "params": params}])[name][0]
    assert np.array_equal(pixels_of({"b64_json": answers[0]}), wanted[0])
