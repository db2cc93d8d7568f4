"""What a client may ask for: every bound has a test that fails without it."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from unfuse.core.checking import check_delivery, check_request, size_from
from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.core.modalities import (
    IMAGE,
    MAX_SEED,
    MIN_SEED,
    VIDEO,
    MediaLimits,
    Modality,
    nearest_size,
    seconds_of,
    size_like,
)
from unfuse.core.model_spec import ModelSpec
from unfuse.core.parameters import nth_seed
from unfuse.core.plan import Pipeline
from unfuse.core.request import Delivery

LIMITS = MediaLimits(
    min_size=32,
    max_size=128,
    max_pixels=128 * 96,
    max_frames=17,
    max_steps=100,
    max_guidance=20.0,
    max_prompt_chars=200,
)
DEFAULTS = {
    "width": 64,
    "height": 64,
    "num_frames": 1,
    "num_inference_steps": 20,
    "guidance_scale": 3.0,
    "max_sequence_length": 16,
    "fps": 8,
}
CARD = ModelSpec("test/model", "/nowhere", "test", Pipeline(()), msgspec.structs.asdict(LIMITS), DEFAULTS, {}, {})


def refusal(**given: object) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        check_request(CARD, {"prompt": "a red circle", **given})
    return caught.value


def test_lora_scale_is_1_by_default_and_bounded() -> None:
    assert check_request(CARD, {"prompt": "x", "lora": "ink"})[0]["lora_scale"] == 1.0
    assert check_request(CARD, {"prompt": "x", "lora": "ink", "lora_scale": "-2.5"})[0]["lora_scale"] == -2.5
    assert "lora_scale" not in check_request(CARD, {"prompt": "x"})[0]
    for scale in (10.1, -11, math.nan, "loud", True):
        assert refusal(lora="ink", lora_scale=scale).param == "lora_scale"
    assert refusal(lora_scale=1.0).param == "lora_scale"
    assert refusal(lora="x" * 129).param == "lora"


def test_missing_parameters_use_model_spec_defaults() -> None:
    params, n = check_request(CARD, {"prompt": "a red circle"})
    seed = params.pop("seed")
    assert n == 1
    assert isinstance(seed, int)
    assert params == {
        **DEFAULTS,
        "prompt": "a red circle",
        "negative_prompt": "",
        "output_format": "png",
        "output_compression": 100,
    }


def test_quality_sets_the_model_spec_parameters_or_the_defaults() -> None:
    able = msgspec.structs.replace(CARD, quality={"low": {"num_inference_steps": 8}})

    assert check_request(able, {"prompt": "a", "quality": "low"})[0]["num_inference_steps"] == 8
    assert (
        check_request(able, {"prompt": "a", "quality": "low", "num_inference_steps": 9})[0]["num_inference_steps"] == 9
    )
    assert check_request(able, {"prompt": "a", "quality": "low"})[0]["quality"] == "low"
    for quality in ("auto", "low", "medium", "standard", "high", "hd"):
        params, _ = check_request(CARD, {"prompt": "a", "quality": quality, "background": "opaque"})
        assert params["num_inference_steps"] == 20
        assert not params.keys() & {"quality", "background"}


def test_strict_check_rejects_quality_without_effect() -> None:
    able = msgspec.structs.replace(CARD, quality={"low": {"num_inference_steps": 8}})

    for quality in ("auto", "low"):
        check_request(able, {"prompt": "a", "quality": quality}, strict=True)
    with pytest.raises(InvalidParameter, match="send one of auto, low") as caught:
        check_request(able, {"prompt": "a", "quality": "hd"}, strict=True)
    assert caught.value.param == "quality"


@pytest.mark.row("P33")
@pytest.mark.parametrize("name", ["style", "moderation", "input_fidelity", "complexity"])
def test_strict_check_rejects_fields_without_effect(name: str) -> None:
    check_request(CARD, {"prompt": "a", name: "low"})
    check_request(CARD, {"prompt": "a", "user": "me", "safety_identifier": "x"}, strict=True)
    with pytest.raises(InvalidParameter, match=f"{name} has no effect here: leave it out"):
        check_request(CARD, {"prompt": "a", name: "low"}, strict=True)


def test_integral_float_is_accepted_for_an_integer_parameter() -> None:
    assert repr(check_request(CARD, {"prompt": "a", "num_inference_steps": 5.0})[0]["num_inference_steps"]) == "5"


def test_null_parameter_uses_the_default() -> None:
    params, _ = check_request(CARD, {"prompt": "a", "num_inference_steps": None, "size": None, "user": None})
    assert params["num_inference_steps"] == 20


def test_form_strings_are_parsed_as_numbers() -> None:
    asked = {"n": "2", "seed": "7", "num_inference_steps": "5", "guidance_scale": "2.5", "num_frames": "1"}
    params, n = check_request(CARD, {"prompt": "a", **asked})
    assert (n, params["seed"], params["num_inference_steps"]) == (2, 7, 5)
    assert (params["guidance_scale"], params["num_frames"]) == (2.5, 1)


def test_size_is_parsed_into_width_and_height() -> None:
    params, _ = check_request(CARD, {"prompt": "a", "size": "128x96"})
    assert (params["width"], params["height"]) == (128, 96)
    assert "size" not in params


def test_size_auto_is_the_default_size() -> None:
    params, _ = check_request(CARD, {"prompt": "a", "size": "auto"})
    assert (params["width"], params["height"]) == (64, 64)


def test_out_of_bounds_error_names_the_bounds_and_the_value() -> None:
    error = refusal(num_inference_steps=1_000_000_000)
    assert str(error) == "num_inference_steps must be 1 to 100, not 1000000000"
    assert error.param == "num_inference_steps"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_inference_steps", 0),
        ("num_inference_steps", "1e9"),
        ("num_inference_steps", 5.5),
        ("num_inference_steps", 1e300),
        ("num_inference_steps", True),
        ("num_inference_steps", "٣"),
        pytest.param("num_inference_steps", 10**5000, id="5001 digits"),
        ("num_inference_steps", []),
        ("guidance_scale", float("nan")),
        ("guidance_scale", "nan"),
        ("guidance_scale", float("inf")),
        ("guidance_scale", "inf"),
        ("guidance_scale", -0.1),
        ("guidance_scale", 20.1),
        ("guidance_scale", False),
        ("guidance_scale", 10**400),
        ("seed", MIN_SEED - 1),
        ("seed", MAX_SEED + 1),
        ("seed", str(MAX_SEED + 1)),
        ("seed", True),
        ("seed", "12 "),
        ("n", 0),
        ("n", 11),
        ("n", 1.5),
        ("num_frames", 5),
        ("fps", 0),
        ("fps", 121),
        ("output_format", "gif"),
        ("output_format", ["png"]),
        ("output_compression", 101),
        ("output_compression", -1),
        ("size", "big"),
        ("size", "64X64"),
        ("size", "-64x64"),
        ("size", 64),
        ("size", "64x9999999"),
        ("quality", "best"),
        ("background", "transparent"),
        ("partial_images", 2),
        ("partial_images", 4),
        ("preview_every", 21),
        ("preview_every", -1),
        ("seconds", 1),
        ("output_format", "mp4"),
        ("negative_prompt", "x" * 201),
        ("negative_prompt", 3),
        ("prompt", 3),
        ("prompt", ""),
        ("prompt", "x" * 201),
        pytest.param("prompt", "half a pair: \ud800", id="surrogate"),
    ],
)
def test_invalid_image_parameter_error_names_the_parameter(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert name in str(error)
    assert len(str(error)) < 400
    str(error).encode()


def test_missing_prompt_raises_invalid_parameter() -> None:
    with pytest.raises(InvalidParameter, match="prompt is missing") as caught:
        check_request(CARD, {})
    assert caught.value.param == "prompt"


def test_too_long_prompt_error_has_its_length_but_not_its_text() -> None:
    assert str(refusal(prompt="x" * 1_000_000)) == "prompt must be 1 to 200 characters long, not 1000000"


def test_unsupported_size_error_names_the_nearest_size() -> None:
    error = refusal(size="100x70")
    assert error.param == "size"
    assert str(error).endswith("the nearest is 96x64")
    assert "multiple of 16 from 32 to 128" in str(error)


def video(card: ModelSpec = CARD, **given: object) -> dict[str, Any]:
    return dict(check_request(card, {"prompt": "a red circle", **given}, VIDEO)[0])


def no_video(**given: object) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        video(**given)
    return caught.value


def test_video_defaults_to_mp4_with_default_or_maximum_frames() -> None:
    assert (video()["output_format"], video()["num_frames"], video()["fps"]) == ("mp4", 17, 8)
    longer = msgspec.structs.replace(CARD, defaults={**DEFAULTS, "num_frames": 9})
    assert video(longer)["num_frames"] == 9
    odd = msgspec.structs.replace(CARD, limits={**CARD.limits, "max_frames": 19})
    assert video(odd)["num_frames"] == 17


def test_image_request_has_one_frame() -> None:
    longer = msgspec.structs.replace(CARD, defaults={**DEFAULTS, "num_frames": 9})
    assert check_request(longer, {"prompt": "a"})[0]["num_frames"] == 1


@pytest.mark.parametrize(
    ("asked", "frames"),
    [
        ({"num_frames": 17}, 17),
        ({"num_frames": "5"}, 5),
        ({"seconds": "2"}, 17),
        ({"seconds": 1}, 9),
        ({"seconds": 1.126}, 13),
        ({"seconds": 0.01}, 1),
        ({"seconds": "0.5", "fps": "24"}, 13),
        ({"seconds": 1, "num_frames": 9}, 9),
        ({"seconds": seconds_of(17, 24), "fps": 24, "num_frames": 17}, 17),
    ],
)
def test_seconds_are_rounded_up_to_a_supported_frame_count(asked: dict[str, object], frames: int) -> None:
    assert video(**asked)["num_frames"] == frames


@given(st.integers(0, 4), st.integers(1, 120))
def test_seconds_and_frame_count_round_trip(groups: int, fps: int) -> None:
    frames = 4 * groups + 1
    assert video(seconds=seconds_of(frames, fps), fps=fps)["num_frames"] == frames


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"num_frames": 18}, "num_frames", "at most 17 frames, 2.125 seconds at 8 fps"),
        ({"seconds": "4"}, "seconds", "seconds 4 is too long: the model supports at most 17 frames, 2.125 seconds"),
        ({"seconds": 2.2}, "seconds", "at most 17 frames"),
        ({"seconds": 1, "fps": 24}, "seconds", "at most 17 frames, 0.708333 seconds at 24 fps"),
        ({"num_frames": 12}, "num_frames", "the nearest below is 9"),
        ({"num_frames": 0}, "num_frames", "not 0"),
        ({"num_frames": 10**400}, "num_frames", "a number of 401 digits"),
        ({"seconds": 0}, "seconds", "not 0"),
        ({"seconds": "nan"}, "seconds", "'nan'"),
        ({"n": 2}, "n", "must be 1"),
        ({"response_format": "url"}, "response_format", "unknown parameter"),
        ({"stream": True}, "stream", "unknown parameter"),
        ({"output_format": "webp"}, "output_format", "mp4, png, not 'webp'"),
        ({"seed": b"5"}, "seed", "not a file"),
    ],
)
def test_invalid_video_parameter_raises_invalid_parameter(asked: dict[str, Any], param: str, says: str) -> None:
    error = no_video(**asked)
    assert error.param == param
    assert says in str(error)


def test_video_model_without_default_fps_raises_config_error() -> None:
    silent = msgspec.structs.replace(CARD, defaults={name: v for name, v in DEFAULTS.items() if name != "fps"})
    with pytest.raises(ConfigError, match="no default fps"):
        video(silent)
    assert video(silent, fps=12)["fps"] == 12


@pytest.mark.parametrize(
    ("asked", "every"),
    [
        ({"partial_images": 0}, None),
        ({"partial_images": 3}, 5),
        ({"partial_images": "1"}, 10),
        ({"partial_images": 3, "num_inference_steps": 3}, 1),
        ({"preview_every": 0}, None),
        ({"preview_every": "4"}, 4),
        ({"preview_every": 20}, 20),
    ],
)
def test_previews_are_at_most_the_requested_number(asked: dict[str, Any], every: int | None) -> None:
    params, _ = check_request(CARD, {"prompt": "a", "stream": True, **asked})
    assert params.get("preview_every") == every
    if every and "partial_images" in asked:
        steps = int(str(params["num_inference_steps"]))
        assert len(range(every, steps, every)) <= int(asked["partial_images"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("promt", "prompt"), ("num_steps", "num_inference_steps"), ("resolution", "size"), ("guidance", "guidance_scale")],
)
def test_unknown_parameter_error_suggests_the_nearest_name(typed: str, meant: str) -> None:
    error = refusal(**{typed: 1})
    assert str(error) == f"unknown parameter '{typed}': did you mean {meant}?"
    assert error.param == typed


def test_unknown_parameter_without_a_near_name_lists_all_names() -> None:
    assert "num_inference_steps, output_compression" in str(refusal(zzzz=1))


def test_model_internal_parameter_is_rejected() -> None:
    assert refusal(max_sequence_length=512).param == "max_sequence_length"


def test_known_unused_fields_are_accepted_and_dropped() -> None:
    unused = {"user": "u", "style": "vivid", "moderation": "low", "safety_identifier": "x"}
    params, _ = check_request(CARD, {"prompt": "a", **unused})
    assert not set(unused) & set(params)


@pytest.mark.parametrize("seed", [MIN_SEED, -2, 0, 2**53, 2**60, 2**63 - 1, MAX_SEED])
def test_any_64_bit_seed_is_accepted(seed: int) -> None:
    for sent in (seed, str(seed)):
        assert check_request(CARD, {"prompt": "a", "n": 4, "seed": sent})[0]["seed"] == seed


@pytest.mark.parametrize("sent", [-1, "-1", -1.0])
def test_seed_minus_one_draws_a_random_seed(sent: object) -> None:
    seeds = {check_request(CARD, {"prompt": "a", "seed": sent})[0]["seed"] for _ in range(8)}
    assert len(seeds) > 1 and all(isinstance(seed, int) and seed >= 0 for seed in seeds)


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (5, [5, 6, 7]),
        (-3, [-3, -2, MAX_SEED]),
        (-2, [-2, MAX_SEED, 0]),
        (MAX_SEED - 1, [MAX_SEED - 1, MAX_SEED, 0]),
    ],
)
def test_seeds_of_further_images_are_consecutive_64_bit_integers(seed: int, seeds: list[int]) -> None:
    assert [nth_seed(seed, index) for index in range(3)] == seeds


def test_missing_seed_is_drawn_at_random() -> None:
    assert len({check_request(CARD, {"prompt": "a"})[0]["seed"] for _ in range(8)}) > 1


def test_delivery_defaults_apply_without_delivery_parameters() -> None:
    assert check_delivery({"prompt": "a", "seed": 1}) == Delivery("b64_json", False, 0, None, {}, True)


def test_delivery_parameters_are_parsed() -> None:
    delivery = check_delivery({"response_format": "url", "priority": "5", "timeout": 30, "metadata": {"job": "7"}})
    assert (delivery.response_format, delivery.priority, delivery.timeout) == ("url", 5, 30.0)
    assert [check_delivery({"stream": sent}).stream for sent in (True, "true", False, "false", None)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    sent = (True, "true", False, "false", None)
    assert [check_delivery({"cache": value}).cache for value in sent] == [True, True, False, False, True]
    assert delivery.metadata == {"job": "7"}


@pytest.mark.parametrize("medium", [IMAGE, VIDEO])
def test_cache_flag_is_not_a_stage_parameter(medium: Modality) -> None:
    assert "cache" not in check_request(CARD, {"prompt": "a", "cache": False}, medium)[0]


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": "png"},
        {"response_format": ["url"]},
        {"stream": 1},
        {"stream": []},
        {"cache": 0},
        {"cache": "no"},
        {"priority": 101},
        {"priority": 0.5},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": 86_401},
        {"metadata": "x"},
        {"metadata": {"a": 1}},
        {"metadata": {"a": "x" * 513}},
        {"metadata": {"x" * 65: "a"}},
        {"metadata": {str(key): "a" for key in range(17)}},
    ],
)
def test_invalid_delivery_parameter_raises_invalid_parameter(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        check_delivery(asked)
    assert next(iter(asked)) in str(caught.value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["5", "64x64", "png"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
MEDIA = st.sampled_from([IMAGE, VIDEO])
NAMES = st.sampled_from(
    [
        "prompt",
        "negative_prompt",
        "size",
        "n",
        "seed",
        "num_inference_steps",
        "guidance_scale",
        "num_frames",
        "fps",
        "output_format",
        "output_compression",
        "response_format",
        "priority",
        "timeout",
        "metadata",
        "quality",
        "user",
        "seconds",
        "stream",
        "cache",
        "partial_images",
        "preview_every",
    ]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(NAMES, ANYTHING, max_size=4) | st.dictionaries(st.text(max_size=12), ANYTHING), st.booleans(), MEDIA
)
def test_arbitrary_input_is_within_limits_or_raises_invalid_parameter(
    asked: dict[str, object], with_prompt: bool, medium: Modality
) -> None:
    asked = {"prompt": "a red circle", **asked} if with_prompt else asked
    try:
        check_delivery(asked)
        params, n = check_request(CARD, asked, medium)
    except InvalidParameter as error:
        str(error).encode()
        assert len(str(error)) < 600
        return
    assert_within_limits(params, n)
    json.dumps(params, allow_nan=False)


def assert_within_limits(params: dict[str, Any], n: int) -> None:
    assert 1 <= len(params["prompt"]) <= LIMITS.max_prompt_chars
    assert 1 <= n <= LIMITS.max_n
    assert MIN_SEED <= params["seed"] <= MAX_SEED and params["seed"] != -1
    assert 1 <= params["num_inference_steps"] <= LIMITS.max_steps
    assert math.isfinite(params["guidance_scale"])
    assert 0 <= params["guidance_scale"] <= LIMITS.max_guidance
    assert params["num_frames"] <= LIMITS.max_frames
    assert params["num_frames"] % LIMITS.frame_multiple == 1
    assert nearest_size(LIMITS, params["width"], params["height"]) == (params["width"], params["height"])
    assert 1 <= params.pop("preview_every", 1) <= params["num_inference_steps"]
    assert set(params) == {*DEFAULTS, "prompt", "negative_prompt", "seed", "output_format", "output_compression"}


@settings(deadline=None)
@given(st.integers(0, 999_999), st.integers(0, 999_999))
def test_nearest_size_is_always_supported(width: int, height: int) -> None:
    near = nearest_size(LIMITS, width, height)
    assert nearest_size(LIMITS, *near) == near
    assert near[0] * near[1] <= LIMITS.max_pixels
    assert all(32 <= side <= 128 and side % 16 == 0 for side in near)
    params, _ = check_request(CARD, {"prompt": "a", "size": f"{near[0]}x{near[1]}"})
    assert (params["width"], params["height"]) == near


def test_model_specific_parameter_is_accepted_only_with_a_default() -> None:
    given = {"prompt": "a", "true_cfg_scale": 2}
    with pytest.raises(InvalidParameter, match="unknown parameter 'true_cfg_scale'"):
        check_request(CARD, given)
    able = msgspec.structs.replace(CARD, defaults={**CARD.defaults, "true_cfg_scale": 1.0})
    assert check_request(able, given)[0]["true_cfg_scale"] == 2.0
    assert check_request(able, {"prompt": "a"})[0]["true_cfg_scale"] == 1.0


@pytest.mark.row("P42")
@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ({"width": 96, "height": 32}, (96, 32)),
        ({"width": "96", "height": "32"}, (96, 32)),
        ({"width": 96.0}, (96, 64)),
        ({"height": 96}, (64, 96)),
        ({"size": "96x32", "width": 96, "height": 32}, (96, 32)),
        ({"size": "auto", "width": 96, "height": 32}, (96, 32)),
        ({"size": "96x32", "height": None}, (96, 32)),
    ],
)
def test_width_and_height_are_accepted_besides_size(asked: dict[str, Any], size: tuple[int, int]) -> None:
    for medium in (IMAGE, VIDEO):
        params, _ = check_request(CARD, {"prompt": "a", **asked}, medium)
        assert (params["width"], params["height"]) == size


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"size": "96x32", "width": 64}, "width", "size 96x32 contradicts width 64: send one of them"),
        ({"size": "96x32", "height": 64, "width": 96}, "height", "size 96x32 contradicts height 64: send one of them"),
        ({"width": 33, "height": 32}, "width", "size 33x32 is not supported: each side must be a multiple of 16"),
        ({"width": 32, "height": 33}, "height", "the nearest is 32x32"),
        ({"width": 0}, "width", "width must be 1 to 999999, not 0"),
        ({"width": "wide"}, "width", "width must be a whole number (1 to 999999), not 'wide'"),
        ({"height": 10**6}, "height", "not 1000000"),
    ],
)
def test_contradictory_or_unsupported_width_and_height_are_rejected(
    asked: dict[str, Any], param: str, says: str
) -> None:
    error = refusal(**asked)
    assert error.param == param and says in str(error)


@pytest.mark.row("N4")
def test_num_frames_overrides_seconds() -> None:
    assert video(seconds=1, num_frames=5)["num_frames"] == 5


LARGE = MediaLimits(max_size=2048, max_pixels=2048 * 2048)


@pytest.mark.parametrize(
    ("area", "picture", "size"),
    [
        (1024 * 1024, (1024, 1024), (1024, 1024)),
        (1024 * 1024, (500, 500), (1024, 1024)),
        (1024 * 1024, (1920, 1080), (1360, 768)),
        (1024 * 1024, (1080, 1920), (768, 1360)),
        (480 * 832, (1280, 720), (832, 464)),
        (480 * 832, (832, 480), (832, 480)),
        (480 * 832, (480, 832), (480, 832)),
        (1024 * 1024, (4096, 64), (2048, 32)),
        (1024 * 1024, (16_384, 1), (2048, 16)),
        (1, (1, 1), (16, 16)),
        (4096 * 4096, (4096, 4096), (2048, 2048)),
    ],
)
def test_size_like_preserves_aspect_ratio_and_area_within_limits(
    area: int, picture: tuple[int, int], size: tuple[int, int]
) -> None:
    """For 1280x720 the oracle is the script in diffusers' documentation of Wan, by hand: 832x464."""
    assert size_like(LARGE, area, *picture) == size


@settings(deadline=None)
@given(st.integers(1, 16_384), st.integers(1, 16_384), st.integers(1, 10**7))
def test_size_like_is_supported_for_any_image(width: int, height: int, area: int) -> None:
    made = size_like(LIMITS, area, width, height)
    assert made == nearest_size(LIMITS, *made)
    assert made[0] * made[1] <= LIMITS.max_pixels


@pytest.mark.row("K8")
def test_result_size_follows_the_input_image_without_a_requested_size() -> None:
    params: dict[str, Any] = {"width": 64, "height": 64}
    assert size_from(CARD, {}, params, (200, 100)) == {"width": 80, "height": 32}
    assert size_from(CARD, {"size": "auto"}, params, (200, 100)) == {"width": 80, "height": 32}
    for asked in ({"size": "32x32"}, {"width": 32}, {"height": "32"}):
        assert size_from(CARD, asked, params, (200, 100)) == {}
    assert size_from(msgspec.structs.replace(CARD, follows_picture=False), {}, params, (200, 100)) == {}


@pytest.mark.row("K8")
@pytest.mark.parametrize(
    ("scale", "picture", "size"),
    [
        (1, (100, 50), (96, 48)),
        (1, (400, 50), (128, 32)),
        (2, (40, 20), (64, 32)),
        (4, (400, 400), (64, 64)),
    ],
)
def test_output_size_is_the_scaled_size_of_the_input_image(
    scale: int, picture: tuple[int, int], size: tuple[int, int]
) -> None:
    own = msgspec.structs.replace(CARD, picture_scale=scale)
    assert tuple(size_from(own, {}, {"width": 64, "height": 64}, picture).values()) == size
