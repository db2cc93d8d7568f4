"""What clients ask for is checked against a table, as of a medium that is no picture; an unknown name gets a hint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.core.test_media import CARD
from unfuse.core import modalities
from unfuse.core.checking import check_bounds, check_request, hint_for
from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.core.modalities import IMAGE, VIDEO, OutputSize, Workload, modality_for
from unfuse.core.model_spec import AcceptedInput, ModelSpec
from unfuse.core.parameters import Modality, Parameter, Params
from unfuse.core.plan import Pipeline, StageSpec, compile_plan
from unfuse.core.request import GenerationRequest, RequestRecord, new_request_id
from unfuse.core.text_parameters import TEXT
from unfuse.scheduler.lifecycle import admit
from unfuse.server.request_objects import request_object
from unfuse.testing.queue_samples import request_context


class Lengths(msgspec.Struct, frozen=True):
    max_tokens: int = 16
    max_chars: int = 100


def settle(limits: Lengths, params: Params, read: Mapping[str, Any], _: object) -> Params:
    return {"max_tokens": read.get("max_tokens", limits.max_tokens)}


TOLD = Modality(
    "tale",
    "tales",
    "tale_",
    "max_tokens",
    1,
    Lengths,
    settle,
    (
        Parameter("opening", "text", 1, "max_chars", description="how it begins", required=True),
        Parameter("max_tokens", "integer", 1, "max_tokens", use="request", description="how long it is"),
        Parameter("temperature", "number", 0, 2, default=1.0, description="how wild it is"),
    ),
    size=(),
)
WRITE = StageSpec(
    "write",
    "write",
    ("pen",),
    per_sample=True,
    output_size=OutputSize(10, 4.0, 8, ("max_tokens",)),
    work=Workload("max_tokens", size=()),
)
TELLER = ModelSpec(
    "teller", "/nowhere", "test", Pipeline((WRITE,)), {"max_tokens": 32}, {}, {"pen": "p" * 32}, {"pen": "float32"}
)


def test_custom_modality_is_checked_by_its_own_parameters_and_limits() -> None:
    params, n = check_request(TELLER, {"opening": "Once", "temperature": "0.5"}, TOLD)

    assert n == 1
    assert isinstance(params.pop("seed"), int)
    assert params == {"opening": "Once", "temperature": 0.5, "max_tokens": 32}
    for asked, said in (
        ({"max_tokens": 33}, "max_tokens must be 1 to 32, not 33"),
        ({"opening": "x" * 101}, "opening must be 1 to 100 characters long, not 101"),
        ({"size": "64x64"}, "unknown parameter 'size': the parameters are max_tokens, opening, temperature"),
    ):
        with pytest.raises(InvalidParameter, match=said):
            check_request(TELLER, {"opening": "Once", **asked}, TOLD)
    with pytest.raises(InvalidParameter, match="opening is missing: send how it begins"):
        check_request(TELLER, {}, TOLD)


def test_request_of_a_custom_modality_needs_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modalities, "MODALITIES", (IMAGE, VIDEO, TOLD))
    params, _ = check_request(TELLER, {"opening": "Once", "max_tokens": 12, "temperature": 1}, TOLD)
    plan = compile_plan(TELLER.pipeline, TELLER.pools(), params, [{"index": 0}])
    context = request_context(GenerationRequest(new_request_id(TOLD), TELLER.name, params), plan)

    change = admit(context, time.time())

    assert plan.stages[0].output_size == 10 + 4 * 2
    assert plan.stages[0].work == (12.0, 1.0)
    assert [task.affinity for task in change.push] == [""]
    view = request_object(RequestRecord(change.context), "http://here")
    assert (view["modality"], view["id"]) == ("tale", context.id)
    assert view["params"] == {name: value for name, value in params.items() if name != "prompt"}


def test_limits_of_a_model_determine_its_modalities() -> None:
    made = {
        card.name: [one.name for one in (IMAGE, VIDEO, TOLD) if one.is_supported_by(card.limits)]
        for card in (CARD, TELLER)
    }

    assert made == {"test/model": ["image", "video"], "teller": ["tale"]}
    assert not VIDEO.is_supported_by({**CARD.limits, "max_frames": 1})


def test_invalid_limits_of_a_model_raise_config_error() -> None:
    broken = msgspec.structs.replace(CARD, limits={**CARD.limits, "max_size": 64.5})

    with pytest.raises(ConfigError, match="the model's limits are not valid"):
        check_request(broken, {"prompt": "a"})
    assert check_request(msgspec.structs.replace(CARD, limits={"max_size": 64}), {"prompt": "a"})


@pytest.mark.parametrize(
    ("asked", "medium"),
    [
        ({}, IMAGE),
        ({"n": 2}, IMAGE),
        ({"num_frames": 1}, IMAGE),
        ({"num_frames": None, "seconds": None}, IMAGE),
        ({"num_frames": 9}, VIDEO),
        ({"seconds": 2}, VIDEO),
        ({"output_format": "mp4"}, VIDEO),
        ({"output_format": "webp", "num_frames": 9}, VIDEO),
        ({"nobody": "knows"}, IMAGE),
    ],
)
def test_request_parameters_determine_the_modality(asked: dict[str, object], medium: Modality) -> None:
    assert modality_for(asked) is medium


def test_model_independent_bounds_are_checked_without_a_model() -> None:
    check_bounds({"num_inference_steps": 10**9, "prompt": "x" * 10**6, "fps": 120, "unheard": 1}, VIDEO)
    for asked in ({"fps": 121}, {"n": 2}, {"size": "big"}, {"output_format": "webp"}):
        with pytest.raises(InvalidParameter, match=next(iter(asked))):
            check_bounds(asked, VIDEO)


REDRAWN = (AcceptedInput("image", "redraw", strength=0.6), AcceptedInput("mask", "redraw", strength=0.9))
STARTS = msgspec.structs.replace(CARD, accepts=REDRAWN)


@pytest.mark.parametrize(
    ("given", "uploads", "strength"),
    [
        ({}, ("image",), 0.6),
        ({}, ("image", "mask"), 0.9),
        ({"strength": "0.5"}, ("image",), 0.5),
        ({"strength": 1}, ("image", "mask"), 1.0),
    ],
)
def test_edit_strength_is_the_requested_or_the_default_of_its_input(
    given: dict[str, object], uploads: tuple[str, ...], strength: float
) -> None:
    params, _ = check_request(STARTS, {"prompt": "a", **given}, uploads=uploads)
    assert params["strength"] == strength


def test_default_strength_applies_only_to_requests_with_an_image() -> None:
    card = msgspec.structs.replace(STARTS, defaults={**CARD.defaults, "strength": 0.7})
    assert check_request(card, {"prompt": "a"}, uploads=("image", "mask"))[0]["strength"] == 0.7
    assert check_request(card, {"prompt": "a"})[0]["strength"] is None


@pytest.mark.parametrize(
    ("card", "given", "uploads", "says"),
    [
        (STARTS, {"strength": 1.01}, ("image",), "strength must be 0 to 1, not 1.01"),
        (STARTS, {"strength": 0}, ("image",), "less than one step"),
        (
            STARTS,
            {"strength": 0.3, "num_inference_steps": 3},
            ("image",),
            "strength 0.3 of 3 steps is less than one step",
        ),
        (STARTS, {"strength": 0.3}, (), "send it as image to /v1/images/edits"),
        (CARD, {"strength": 0.3}, ("image",), "takes no strength"),
    ],
)
def test_strength_without_effect_or_out_of_bounds_is_rejected(
    card: ModelSpec, given: dict[str, object], uploads: tuple[str, ...], says: str
) -> None:
    with pytest.raises(InvalidParameter, match=says) as caught:
        check_request(card, {"prompt": "a", **given}, uploads=uploads)
    assert caught.value.param == "strength"


FILES = {IMAGE: ("image", "mask"), VIDEO: ("input_reference", "last_frame"), TEXT: ()}


def hint(medium: Modality, name: str) -> str:
    return hint_for(name, [one.name for one in medium.parameters], FILES[medium])


@pytest.mark.row("P46", "K19")
@pytest.mark.parametrize(
    ("medium", "name", "meant"),
    [
        (IMAGE, "steps", "num_inference_steps"),
        (IMAGE, "cfg_scale", "guidance_scale"),
        (IMAGE, "cfg", "guidance_scale"),
        (IMAGE, "resolution", "size"),
        (IMAGE, "num_images", "n"),
        (IMAGE, "batch_size", "n"),
        (IMAGE, "denoising_strength", "strength"),
        (IMAGE, "negativePrompt", "negative_prompt"),
        (IMAGE, "guidanceScale", "guidance_scale"),
        (IMAGE, "loras", "lora"),
        (IMAGE, "init_image", "image"),
        (VIDEO, "duration", "seconds"),
        (VIDEO, "length", "seconds"),
        (VIDEO, "image", "input_reference"),
        (VIDEO, "first_frame", "input_reference"),
        (VIDEO, "end_image", "last_frame"),
        (VIDEO, "frame_rate", "fps"),
        (TEXT, "max_new_tokens", "max_tokens"),
        (TEXT, "prompt", "messages"),
        (TEXT, "repeat_penalty", "repetition_penalty"),
        (IMAGE, "lora_weight", "lora_scale"),
        (IMAGE, "lora_strength", "lora_scale"),
        (IMAGE, "image_urls", "image"),
        (IMAGE, "text_prompt", "prompt"),
        (IMAGE, "count", "n"),
        (IMAGE, "model_name", "model"),
        (VIDEO, "first_frame_image", "input_reference"),
        (VIDEO, "last_frame_image", "last_frame"),
        (VIDEO, "target_fps", "fps"),
        (TEXT, "model_id", "model"),
    ],
)
def test_parameter_names_of_other_tools_get_a_hint(medium: Modality, name: str, meant: str) -> None:
    assert hint(medium, name) == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("promt", "prompt"),
        ("prompts", "prompt"),
        ("guidence_scale", "guidance_scale"),
        ("widht", "width"),
        ("num_inference_step", "num_inference_steps"),
        ("stepps", "num_inference_steps"),
        ("qaulity", "quality"),
    ],
)
def test_misspelled_parameter_name_gets_a_hint(name: str, meant: str) -> None:
    assert hint(IMAGE, name) == f"did you mean {meant}?"


@pytest.mark.row("P46")
@pytest.mark.parametrize("name", ["sampler", "sampler_name", "scheduler", "sample_solver", "flow_shift"])
def test_noise_scheduler_parameters_get_a_hint_to_the_model_folder(name: str) -> None:
    assert hint(IMAGE, name) == "the noise scheduler is set in the model's folder, a request cannot change it"


@pytest.mark.parametrize(
    "name",
    [
        "clip_skip",
        "eta",
        "guidance_rescale",
        "vae_tiling",
        "foo",
        "x",
        "style_preset",
        "top_a",
        "hires_fix",
        "see",
    ],
)
def test_unrelated_parameter_names_get_no_hint(name: str) -> None:
    assert hint(IMAGE, name) == hint(VIDEO, name) == ""
    assert hint(TEXT, name) == ""


def test_image_fields_without_uploads_get_a_hint_to_images_edits() -> None:
    for name in ("image", "mask", "init_image", "images"):
        assert hint_for(name, [one.name for one in IMAGE.parameters]).endswith("to /v1/images/edits")


def test_long_parameter_name_gets_no_hint() -> None:
    assert hint(IMAGE, "n" * 1_000_000) == ""
