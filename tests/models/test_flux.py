"""FLUX: what its card says, how its parameters are read, what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import conftest as c
from unfuse.core.checking import check_request
from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.modalities import UPLOAD, VIDEO
from unfuse.models import find
from unfuse.models.base import weights_ids
from unfuse.models.components import true_cfg_scale
from unfuse.stages.base import StageInput
from unfuse.weights.folder import ModelFolder


@pytest.fixture
def copy(copied: Callable[[str], Path]) -> Path:
    return copied("flux")


def test_model_spec_without_serving_json_has_pipeline_defaults(copy: Path) -> None:
    """The defaults of the pipeline's call, and its default size for a VAE of factor 4."""
    card = find(copy).model_spec("mine", copy)

    card.pipeline.validate()
    assert (card.name, card.family, card.accepted_input(UPLOAD).min, VIDEO.is_supported_by(card.limits)) == (
        "mine",
        "flux",
        0,
        False,
    )
    assert card.defaults == {
        "height": 512,
        "width": 512,
        "num_frames": 1,
        "num_inference_steps": 28,
        "guidance_scale": 3.5,
        "true_cfg_scale": 1.0,
        "max_sequence_length": 512,
        "negative_prompt": None,
    }
    assert (card.limits["size_multiple"], card.limits["min_size"], card.limits["max_size"]) == (8, 8, 2048)


def test_text_encoders_run_in_parallel_once_per_request(copy: Path) -> None:
    redraw, clip, t5, denoise, decode = find(copy).model_spec("mine", copy).pipeline.stages

    assert [(stage.kind, stage.inputs, stage.per_sample) for stage in (clip, t5)] == [
        ("text_encode", (), False),
        ("text_encode_2", (), False),
    ]
    assert set(denoise.inputs) == {*clip.outputs, *t5.outputs, *redraw.outputs}
    assert denoise.per_sample and decode.per_sample


def test_omitted_negative_prompt_is_none_and_disables_true_cfg(copy: Path) -> None:
    """As in FluxPipeline, where an empty negative prompt is one."""
    c.serve(copy)
    card = find(copy).model_spec("mine", copy)

    plain, _ = check_request(card, {"prompt": "p"})
    empty, _ = check_request(card, {"prompt": "p", "negative_prompt": ""})

    assert (plain["negative_prompt"], empty["negative_prompt"]) == (None, "")
    assert true_cfg_scale({**plain, "true_cfg_scale": 4.0}) == 1.0
    assert true_cfg_scale({**empty, "true_cfg_scale": 4.0}) == 4.0


def test_serving_json_can_enable_true_cfg_by_default(copy: Path) -> None:
    c.serve(copy, {"true_cfg_scale": 3.0, "negative_prompt": "blurred", "num_inference_steps": 4})

    defaults = find(copy).model_spec("mine", copy).defaults

    assert true_cfg_scale(defaults) == 3.0


def test_dev_and_schnell_share_all_pools_but_denoise(undivided: c.Undivided) -> None:
    dev, schnell = (
        find(folder).model_spec("mine", folder).pools()
        for folder in (undivided.folder("flux"), undivided.folder("flux-schnell"))
    )

    assert {name for name in dev if dev[name] != schnell[name]} == {"denoise"}


def test_weights_ids_of_equal_components_differ_between_families(copy: Path) -> None:
    pipeline, folder = find(copy).model_spec("mine", copy).pipeline, ModelFolder(copy)

    ours, other = weights_ids(folder, pipeline, "flux"), weights_ids(folder, pipeline, "other")

    assert ours == weights_ids(folder, pipeline, "flux")
    assert not set(ours.values()) & set(other.values())


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("model_index.json", {"text_encoder_2": [None, None]}, "component text_encoder_2 as [None, None]; supported:"),
        (
            "model_index.json",
            {"tokenizer": ["transformers", "T5Tokenizer"]},
            "supported: transformers CLIPTokenizer or",
        ),
        ("model_index.json", {"scheduler": ["diffusers", "OwnScheduler"]}, "supported: diffusers FlowMatchEuler"),
        ("transformer/config.json", {"in_channels": 64}, "its VAE requires 16"),
        ("transformer/config.json", {"joint_attention_dim": None}, "transformer configuration: TypeError"),
        ("vae/config.json", {"latent_channels": "four"}, "vae configuration: ValueError"),
    ],
)
def test_unsupported_components_or_configs_raise_config_error(
    file: str, changes: dict[str, Any], sentence: str, copy: Path
) -> None:
    c.edit(copy / file, **changes)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        find(copy).model_spec("mine", copy)


TEXT = {"pooled_prompt_embeds": (1, 24), "prompt_embeds": (1, 24, 32)}


@pytest.mark.parametrize(
    ("params", "tensors", "sentence"),
    [
        ({}, {"prompt_embeds": (1, 24, 32)}, "input pooled_prompt_embeds is missing"),
        ({}, {**TEXT, "pooled_prompt_embeds": (1, 32)}, "input pooled_prompt_embeds must be floating point of 1×24"),
        ({"negative_prompt": "", "true_cfg_scale": 2.0}, TEXT, "input negative_pooled_prompt_embeds is missing"),
        ({"guidance_scale": None}, TEXT, "parameter guidance_scale must be of type float, not None"),
        ({"negative_prompt": "", "true_cfg_scale": None}, TEXT, "parameter true_cfg_scale must be of type float"),
        ({"height": None}, TEXT, "parameter height must be of type int"),
    ],
)
def test_denoise_rejects_missing_inputs_and_invalid_parameters(
    params: dict[str, Any], tensors: dict[str, tuple[int, ...]], sentence: str, undivided: c.Undivided, stages: c.Load
) -> None:
    made = {name: torch.zeros(shape) for name, shape in tensors.items()}
    task = StageInput({**c.flux_params(), **params}, made)

    with pytest.raises(PermanentError, match=re.escape(sentence)):
        stages(undivided.folder("flux"))["denoise"].verify(task)
