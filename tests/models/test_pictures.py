"""Stable Diffusion XL and 3.5, Z-Image, LTX-Video and FLUX.1 Kontext: cards, what stays undivided, what is read."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.models import conftest as c
from unfuse.core.checking import check_request
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.modalities import UPLOAD, VIDEO
from unfuse.models import find, read_model_spec
from unfuse.models.undivided_family import FAMILY as WHOLE
from unfuse.stages.base import StageInput, SteppedStage, next_states

KINDS = ("sdxl", "sd3", "z-image", "ltx", "kontext")
JOBS = {job.name: job for job in c.JOBS}


@pytest.mark.parametrize(
    ("kind", "defaults", "limits"),
    [
        ("sdxl", {"width": 64, "num_inference_steps": 50, "guidance_scale": 5.0, "max_sequence_length": 20}, (8, 2048)),
        ("sd3", {"width": 64, "num_inference_steps": 28, "guidance_scale": 7.0, "max_sequence_length": 256}, (8, 768)),
        (
            "z-image",
            {"width": 512, "num_inference_steps": 50, "guidance_scale": 5.0, "max_sequence_length": 512},
            (8, 512),
        ),
        ("ltx", {"width": 704, "num_frames": 161, "fps": 25, "max_sequence_length": 128}, (32, 2048)),
        (
            "kontext",
            {"width": 2048, "num_inference_steps": 28, "guidance_scale": 3.5, "true_cfg_scale": 1.0},
            (32, 2048),
        ),
    ],
)
def test_model_specs_have_the_defaults_of_the_pipeline_calls(
    kind: str, defaults: dict[str, Any], limits: tuple[int, int], undivided: c.Undivided
) -> None:
    card = read_model_spec("mine", undivided.folder(kind))

    assert not card.undivided_reason and card.takes_lora and card.accepted_input(UPLOAD).min == (kind == "kontext")
    assert VIDEO.is_supported_by(card.limits) == (kind == "ltx")
    assert card.defaults | defaults == card.defaults and card.defaults["negative_prompt"] is None
    assert (card.limits["size_multiple"], card.limits["max_size"]) == limits
    assert card.defaults["width"] <= card.limits["max_size"]


@pytest.mark.parametrize(
    ("kind", "file", "changes"),
    [
        ("sdxl", "model_index.json", {"scheduler": ["diffusers", "EulerAncestralDiscreteScheduler"]}),
        ("sdxl", "model_index.json", {"text_encoder": [None, None], "tokenizer": [None, None]}),
        ("sdxl", "unet/config.json", {"in_channels": 9}),
        ("sdxl", "unet/config.json", {"time_cond_proj_dim": 256}),
        ("sdxl", "vae/config.json", {"latents_mean": [0.0, 0.0, 0.0, 0.0]}),
        ("sd3", "model_index.json", {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}),
        ("z-image", "transformer/config.json", {"siglip_feat_dim": 1152}),
        ("z-image", "transformer/config.json", {"all_patch_size": [4]}),
        ("ltx", "vae/config.json", {"decoder_inject_noise": [True, False, False, False, False]}),
        ("ltx", "transformer/config.json", {"patch_size": 2}),
        ("kontext", "model_index.json", {"scheduler": ["diffusers", "FlowMatchHeunDiscreteScheduler"]}),
    ],
)
def test_unsupported_model_config_is_served_undivided(
    kind: str, file: str, changes: dict[str, Any], copied: Callable[[str], Path]
) -> None:
    folder = copied(kind)
    assert find(folder) is not WHOLE

    c.edit(folder / file, **changes)

    assert find(folder) is WHOLE


def test_folder_with_missing_components_still_maps_to_its_family(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """As on a machine that runs only some of the stages."""
    folder = copied("sdxl")
    (folder / "unet").rename(tmp_path / "elsewhere")

    assert find(folder) is not WHOLE
    with pytest.raises(ConfigError, match="unet"):
        read_model_spec("m", folder)


def test_force_zeros_for_empty_prompt_is_applied_and_changes_pools(copied: Callable[[str], Path]) -> None:
    """Pools are told apart by it."""
    folder = copied("sdxl")
    pools = read_model_spec("m", folder).pools()
    c.edit(folder / "model_index.json", force_zeros_for_empty_prompt=False)
    other = read_model_spec("m", folder).pools()
    assert {name for name in pools if pools[name] != other[name]} == {"text_encode", "text_encode_2"}

    family = find(folder)
    spec = next(spec for spec in family.model_spec("m", folder).pipeline.stages if spec.name == "text_encode")
    stage = family.load(spec, folder, c.RuntimeOptions("cpu", {"text_encoder": "float32"}))
    params = c.guided_params()
    made = c.run(stage, params).tensors["negative_prompt_embeds"]
    assert torch.equal(made, c.run(stage, {**params, "negative_prompt": ""}).tensors["negative_prompt_embeds"])
    assert made.abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_omitted_negative_prompt_is_none(kind: str, copied: Callable[[str], Path]) -> None:
    folder = copied(kind)
    c.serve(folder)
    card = read_model_spec("mine", folder)

    plain, _ = check_request(card, {"prompt": "p"})
    empty, _ = check_request(card, {"prompt": "p", "negative_prompt": ""})

    assert (plain["negative_prompt"], empty["negative_prompt"]) == (None, "")


def test_ltx_vae_pool_depends_on_the_text_encoder_dtype(undivided: c.Undivided) -> None:
    """By which latents are rounded."""
    folder = undivided.folder("ltx")
    usual, half = (read_model_spec("m", folder, dtype).pools() for dtype in ("float32", "text_encoder=bfloat16"))

    assert {name for name in usual if usual[name] != half[name]} == {"text_encode", "vae_decode"}


def test_kontext_shares_only_text_encoder_pools_with_flux(undivided: c.Undivided) -> None:
    flux, kontext = (read_model_spec("m", undivided.folder(kind)).pools() for kind in ("flux", "kontext"))

    assert {name for name in flux if flux[name] == kontext.get(name)} == {"text_encode", "text_encode_2"}


def test_reference_image_smaller_than_32x32_is_rejected(undivided: c.Undivided, stages: c.Load) -> None:
    Image.new("RGB", (300, 31)).save(file := io.BytesIO(), "PNG")

    with pytest.raises(PermanentError, match="smaller than 32×32: send a larger one"):
        c.run(stages(undivided.folder("kontext"))["image_encode"], c.kontext_params(), None, {"image": file.getvalue()})


def test_reference_images_of_different_shapes_share_a_batch_not_a_forward(
    undivided: c.Undivided, stages: c.Load
) -> None:
    """In batched pools requests with references of two shapes come together; each has the latents it has alone."""
    loaded = stages(undivided.folder("kontext"), "float32", ComputeOptions(batching="batched"))
    denoise, params = loaded["denoise"], {**c.kontext_params(), "output_format": "png"}
    assert isinstance(denoise, SteppedStage)
    names = ("wall.jpg", "glass.webp")
    uploads = [undivided.uploads({"image": name}) for name in names]
    encoded = [c.encode(loaded, params, files) for files in uploads]
    assert encoded[0]["condition"].shape != encoded[1]["condition"].shape
    tasks = [StageInput(params, tensors) for tensors in encoded]
    assert len({denoise.batch_key(task) for task in tasks}) == 1

    together = next_states(denoise, [denoise.start(task) for task in tasks])

    for state, task in zip(together, tasks, strict=True):
        (alone,) = next_states(denoise, [denoise.start(task)])
        assert torch.allclose(state.latents, alone.latents, atol=1e-5)
    assert denoise.exact_batch_key(together[0]) != denoise.exact_batch_key(together[1])


@pytest.mark.parametrize(
    ("kind", "params", "sentence"),
    [
        ("sdxl", {"guidance_scale": None}, "parameter guidance_scale must be of type float"),
        ("sd3", {"height": None}, "parameter height must be of type int"),
        ("ltx", {"fps": None}, "parameter fps must be of type int"),
        ("z-image", {}, "input prompt_embeds is missing"),
        ("kontext", {}, "input pooled_prompt_embeds is missing"),
    ],
)
def test_denoise_rejects_missing_inputs_and_invalid_parameters(
    kind: str, params: dict[str, Any], sentence: str, undivided: c.Undivided, stages: c.Load
) -> None:
    usual = next(job for job in c.JOBS if job.model == kind).params

    with pytest.raises(PermanentError, match=re.escape(sentence)):
        stages(undivided.folder(kind))["denoise"].verify(StageInput({**usual, **params}, {}))
