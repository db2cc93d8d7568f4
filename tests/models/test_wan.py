"""Wan: a card is made of JSON, with or without a picture to start from; what cannot be served is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.models import conftest as c
from unfuse.core.checking import check_request
from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.modalities import VIDEO
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import layout_tensors
from unfuse.models import find, resolve_source
from unfuse.stages.base import StageInput


@pytest.fixture
def copy(copied: Callable[[str], Path]) -> Path:
    return copied("wan")


def test_model_spec_without_serving_json_has_pipeline_defaults(copy: Path) -> None:
    card = find(copy).model_spec("mine", copy)

    card.pipeline.validate()
    assert (card.name, card.source, card.family) == ("mine", str(copy), "wan")
    assert card.defaults == {
        "height": 256,
        "width": 256,
        "num_frames": 63,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "max_sequence_length": 512,
        "negative_prompt": "",
        "fps": 16,
    }
    limits = VIDEO.limits_of(card.limits)
    assert (limits.size_multiple, limits.frame_multiple, limits.max_sequence_length) == (16, 2, 512)
    assert (limits.max_size, limits.max_frames) == (256, 63)


def test_full_size_model_spec_has_published_defaults_and_limits(copy: Path) -> None:
    """What the published models have: room for 1024 patches an axis, a VAE that does not name its scale factors."""
    c.edit(copy / "transformer" / "config.json", rope_max_seq_len=1024)
    vae = {"scale_factor_spatial": None, "scale_factor_temporal": None, "temperal_downsample": [False, True, True]}
    c.edit(copy / "vae" / "config.json", **vae)

    card = find(copy).model_spec("mine", copy)

    assert (card.defaults["height"], card.defaults["width"], card.defaults["num_frames"]) == (480, 832, 81)
    limits = VIDEO.limits_of(card.limits)
    assert (limits.max_size, limits.max_pixels, limits.max_frames) == (2048, 2048 * 2048, 161)
    assert (limits.size_multiple, limits.frame_multiple) == (16, 4)


def test_serving_json_overrides_defaults_and_limits(copy: Path) -> None:
    c.serve(copy, {"num_frames": 3}, {"max_size": 64})

    card = find(copy).model_spec("mine", copy)

    assert card.defaults["num_frames"] == 3
    assert card.defaults["num_inference_steps"] == 50
    assert (card.limits["max_size"], card.limits["max_pixels"], card.limits["max_frames"]) == (64, 64 * 64, 5)
    params, _ = check_request(card, {"prompt": "p", "size": "48x16", "num_frames": 5}, VIDEO)
    assert (params["width"], params["height"], params["num_frames"]) == (48, 16, 5)


def test_built_in_model_spec_follows_its_serving_json() -> None:
    folder = resolve_source("unfuse/shapes")
    said = json.loads((folder / "serving.json").read_text())

    card = find(folder).model_spec("unfuse/shapes", folder)

    assert card.defaults == said["defaults"]
    assert said["limits"].items() <= card.limits.items()


@pytest.mark.parametrize(
    ("wanted", "vae", "others"),
    [
        ("auto", "float32", "float32"),
        ("float16", "float16", "float16"),
        ("float16,vae=float32", "float32", "float16"),
    ],
)
def test_dtype_option_applies_to_all_components_not_named(wanted: str, vae: str, others: str, copy: Path) -> None:
    c.serve(copy)

    dtypes = find(copy).model_spec("mine", copy, wanted).dtypes

    assert dtypes.pop("vae") == vae
    assert set(dtypes.values()) == {others}


def test_unknown_dtype_raises_config_error(copy: Path) -> None:
    c.serve(copy)
    with pytest.raises(ConfigError, match="unknown dtype 'int4', use auto, float32"):
        find(copy).model_spec("mine", copy, "int4")


@pytest.fixture(scope="module")
def shapes_card() -> ModelSpec:
    folder = resolve_source("unfuse/shapes")
    return find(folder).model_spec("unfuse/shapes", folder)


@given(sides=st.tuples(st.integers(1, 8), st.integers(1, 8)), groups=st.integers(0, 4))
def test_declared_output_size_bounds_each_stage_output_closely(
    shapes_card: ModelSpec, sides: tuple[int, int], groups: int
) -> None:
    width, height, frames = 32 * sides[0], 32 * sides[1], 4 * groups + 1
    rooms = {
        stage.name: stage.output_size.bytes({"width": width, "height": height, "num_frames": frames})
        for stage in shapes_card.pipeline.stages
    }

    _, latents = layout_tensors([("latents", "float32", (1, 16, groups + 1, height // 16, width // 16))])
    _, embeds = layout_tensors([(name, "float32", (1, 16, 96)) for name in ("prompt_embeds", "negative_prompt_embeds")])

    assert latents <= rooms["denoise"] <= latents + 128
    assert embeds <= rooms["text_encode"] <= embeds + 128
    assert rooms["vae_decode"] == 0


def test_weights_ids_are_equal_for_copies_and_differ_after_changes(copy: Path, undivided: c.Undivided) -> None:
    original = find(copy).model_spec("a", undivided.folder("wan")).weights
    assert find(copy).model_spec("b", copy).weights == original

    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)

    changed = find(copy).model_spec("b", copy).weights
    assert {name for name in changed if changed[name] != original[name]} == {"transformer"}
    euler = find(copy).model_spec("c", undivided.folder("wan-euler")).weights
    assert {name for name in euler if euler[name] != original[name]} == {"scheduler", "transformer"}


@pytest.mark.parametrize("other", ["wan-euler", "wan-image"])
def test_pools_of_equal_components_are_shared_between_models(other: str, undivided: c.Undivided) -> None:
    """Also by models that start from a picture."""
    folders = [undivided.folder(name) for name in ("wan", other)]
    first, second = (find(folder).model_spec("mine", folder).pools() for folder in folders)

    assert first["text_encode"] == second["text_encode"]
    assert first["vae_decode"] == second["vae_decode"]
    assert first["denoise"] != second["denoise"], "another noise scheduler, or transformer, denoises otherwise"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"boundary_ratio": 0.875}, "declares component transformer_2 as [None, None]; supported:"),
        ({"scheduler": ["diffusers", "OwnScheduler"]}, "supported: diffusers UniPCMultistepScheduler or DPMSolver"),
        ({"text_encoder": ["os", "system"]}, "declares component text_encoder as ['os', 'system']; supported:"),
        ({"vae": [None, None]}, "declares component vae as [None, None]; supported: diffusers AutoencoderKLWan"),
    ],
)
def test_unsupported_components_raise_config_error(changes: dict[str, Any], sentence: str, copy: Path) -> None:
    c.edit(copy / "model_index.json", **changes)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        find(copy).model_spec("mine", copy)


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("vae/config.json", {"z_dim": 5}, "has 4 channels, but its VAE requires 5"),
        ("transformer/config.json", {"patch_size": 2}, "transformer or vae configuration"),
        ("transformer/config.json", {"image_dim": 24, "in_channels": 10}, "takes a picture, but its class is not for"),
        ("serving.json", {"defaults": {"heigth": 32}}, "serving.json is not valid"),
        ("serving.json", {"defaults": {"height": "32"}}, "Expected `int`, got `str` - at `$.defaults.height`"),
        ("serving.json", {"defaults": {**c.SMALL, "height": 40}}, "default height 40 exceeds the limits, use 48"),
        ("serving.json", {"defaults": {**c.SMALL, "num_frames": 4}}, "num_frames 4 exceeds the limits, use 3"),
        ("serving.json", {"limits": {"max_sizes": 64}}, "unknown limit 'max_sizes'"),
        ("serving.json", {"limits": {"max_size": 0.5}}, "serving.json: limits: Expected `int`"),
        ("serving.json", {"limits": {"size_multiple": 8}}, "size_multiple must be a multiple of the model's 16, not 8"),
        ("serving.json", {"limits": {"max_frames": 1001}}, "rope_max_seq_len allows 256 pixels and 63 frames"),
    ],
)
def test_contradictory_configs_raise_config_error(
    file: str, changes: dict[str, Any], sentence: str, copy: Path
) -> None:
    c.serve(copy)
    c.edit(copy / file, **changes)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        find(copy).model_spec("mine", copy)


@pytest.mark.parametrize(
    ("stage", "tensors", "sentence"),
    [
        ("denoise", {}, "input prompt_embeds is missing"),
        ("denoise", {"prompt_embeds": (1, 24, 32)}, "input negative_prompt_embeds is missing"),
        (
            "denoise",
            {"prompt_embeds": (1, 24, 33), "negative_prompt_embeds": (1, 24, 32)},
            "1×any×32, not torch.float32",
        ),
        ("vae_decode", {"latents": (1, 4, 8, 8)}, "1×4×any×any×any"),
        ("vae_decode", {"latents": (2, 4, 1, 8, 8)}, "1×4×any×any×any"),
    ],
)
def test_missing_or_wrong_shape_inputs_are_rejected(
    stage: str, tensors: dict[str, tuple[int, ...]], sentence: str, undivided: c.Undivided, stages: c.Load
) -> None:
    import torch

    loaded = stages(undivided.folder("wan"))[stage]
    params = {**c.wan_params(), "output_format": "png"}
    task = StageInput(params, {name: torch.zeros(shape) for name, shape in tensors.items()})

    with pytest.raises(PermanentError, match=re.escape(sentence)):
        loaded.verify(task)
