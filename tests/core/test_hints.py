"""A hint for an unknown field is near in meaning, or there is none."""

import pytest

from unfuse.core.checking import hint_for
from unfuse.core.media import IMAGE, VIDEO
from unfuse.core.parameters import Medium
from unfuse.core.words import TEXT

FILES = {IMAGE: ("image", "mask"), VIDEO: ("input_reference", "last_frame"), TEXT: ()}


def hint(medium: Medium, name: str) -> str:
    return hint_for(name, [one.name for one in medium.parameters], FILES[medium])


@pytest.mark.row("P46", "K19")
@pytest.mark.parametrize(("medium", "name", "meant"), [
    (IMAGE, "steps", "num_inference_steps"), (IMAGE, "cfg_scale", "guidance_scale"), (IMAGE, "cfg", "guidance_scale"),
    (IMAGE, "resolution", "size"), (IMAGE, "num_images", "n"), (IMAGE, "batch_size", "n"),
    (IMAGE, "denoising_strength", "strength"), (IMAGE, "negativePrompt", "negative_prompt"),
    (IMAGE, "guidanceScale", "guidance_scale"), (IMAGE, "loras", "lora"), (IMAGE, "init_image", "image"),
    (VIDEO, "duration", "seconds"), (VIDEO, "length", "seconds"), (VIDEO, "image", "input_reference"),
    (VIDEO, "first_frame", "input_reference"), (VIDEO, "end_image", "last_frame"), (VIDEO, "frame_rate", "fps"),
    (TEXT, "max_new_tokens", "max_tokens"), (TEXT, "prompt", "messages"),
    (TEXT, "repeat_penalty", "repetition_penalty"), (IMAGE, "lora_weight", "lora_scale"),
    (IMAGE, "lora_strength", "lora_scale"), (IMAGE, "image_urls", "image"), (IMAGE, "text_prompt", "prompt"),
    (IMAGE, "count", "n"), (IMAGE, "model_name", "model"), (VIDEO, "first_frame_image", "input_reference"),
    (VIDEO, "last_frame_image", "last_frame"), (VIDEO, "target_fps", "fps"), (TEXT, "model_id", "model"),
])  # fmt: skip
def test_a_name_from_elsewhere_is_told_the_field_of_the_same_meaning(medium: Medium, name: str, meant: str) -> None:
    assert hint(medium, name) == f"did you mean {meant}?"


@pytest.mark.parametrize(("name", "meant"), [
    ("promt", "prompt"), ("prompts", "prompt"), ("guidence_scale", "guidance_scale"), ("widht", "width"),
    ("num_inference_step", "num_inference_steps"), ("stepps", "num_inference_steps"), ("qaulity", "quality"),
])  # fmt: skip
def test_one_wrong_letter_is_found(name: str, meant: str) -> None:
    assert hint(IMAGE, name) == f"did you mean {meant}?"


@pytest.mark.row("P46")
@pytest.mark.parametrize("name", ["sampler", "sampler_name", "scheduler", "sample_solver", "flow_shift"])
def test_a_noise_scheduler_is_the_folder_s_affair(name: str) -> None:
    assert hint(IMAGE, name) == "the noise scheduler is set in the model's folder, a request cannot change it"


@pytest.mark.parametrize("name", [
    "clip_skip", "eta", "guidance_rescale", "vae_tiling", "foo", "x", "style_preset", "top_a", "hires_fix", "see",
])  # fmt: skip
def test_what_has_no_field_has_no_hint(name: str) -> None:
    assert hint(IMAGE, name) == hint(VIDEO, name) == ""
    assert hint(TEXT, name) == ""


def test_pictures_for_a_prompt_alone_are_sent_elsewhere() -> None:
    for name in ("image", "mask", "init_image", "images"):
        assert hint_for(name, [one.name for one in IMAGE.parameters]).endswith("to /v1/images/edits")


def test_a_long_name_takes_no_time() -> None:
    assert hint(IMAGE, "n" * 1_000_000) == ""
