"""HunyuanVideo: what its card says, what is refused, and that masks are whole numbers."""

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
from unfuse.stages.base import StageInput


@pytest.fixture
def copy(copied: Callable[[str], Path]) -> Path:
    return copied("hunyuan-video")


def test_model_spec_without_serving_json_has_pipeline_defaults(copy: Path) -> None:
    """The defaults of the pipeline's call; sizes that neither the pipeline nor the patches refuse."""
    card = find(copy).model_spec("mine", copy)

    card.pipeline.validate()
    assert (card.family, card.accepted_input(UPLOAD).min, VIDEO.is_supported_by(card.limits)) == (
        "hunyuan_video",
        0,
        True,
    )
    assert card.defaults == {
        "height": 720,
        "width": 1280,
        "num_frames": 129,
        "num_inference_steps": 50,
        "guidance_scale": 6.0,
        "true_cfg_scale": 1.0,
        "max_sequence_length": 256,
        "negative_prompt": None,
        "fps": 24,
    }
    assert (card.limits["size_multiple"], card.limits["frame_multiple"], card.limits["max_frames"]) == (16, 4, 257)


def test_llama_and_clip_run_in_parallel_and_denoise_reads_all_outputs(copy: Path) -> None:
    llama, clip, denoise, _ = find(copy).model_spec("mine", copy).pipeline.stages

    assert [(stage.kind, stage.inputs) for stage in (llama, clip)] == [("text_encode", ()), ("text_encode_2", ())]
    assert set(denoise.inputs) == {*llama.outputs, *clip.outputs}
    assert {"prompt_attention_mask", "negative_prompt_attention_mask"} < set(llama.outputs)


def test_num_frames_of_vae_multiple_plus_one_is_accepted(copy: Path) -> None:
    params, _ = check_request(
        find(copy).model_spec("mine", copy), {"prompt": "p", "num_frames": 9, "size": "48x32"}, VIDEO
    )

    assert (params["num_frames"], params["width"], params["height"]) == (9, 48, 32)


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("model_index.json", {"text_encoder": ["transformers", "GemmaModel"]}, "supported: transformers LlamaModel"),
        ("transformer/config.json", {"in_channels": 33}, "its VAE requires 4"),
        ("transformer/config.json", {"patch_size": None}, "transformer or vae configuration: TypeError"),
        ("vae/config.json", {"latent_channels": "four"}, "transformer or vae configuration: ValueError"),
    ],
)
def test_unsupported_components_or_configs_raise_config_error(
    file: str, changes: dict[str, Any], sentence: str, copy: Path
) -> None:
    c.edit(copy / file, **changes)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        find(copy).model_spec("mine", copy)


TEXT = {"prompt_embeds": torch.zeros(1, 24, 32), "pooled_prompt_embeds": torch.zeros(1, 24)}
MASK = {"prompt_attention_mask": torch.ones(1, 24, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("params", "tensors", "sentence"),
    [
        ({}, TEXT, "input prompt_attention_mask is missing"),
        (
            {},
            TEXT | {"prompt_attention_mask": torch.ones(1, 24)},
            "must be integer of 1×any, not torch.float32 of (1, 24)",
        ),
        ({}, TEXT | {"prompt_attention_mask": MASK["prompt_attention_mask"][0]}, "must be integer of 1×any"),
        ({}, {**MASK, **TEXT, "pooled_prompt_embeds": torch.ones(1, 24, dtype=torch.int64)}, "floating point of 1×24"),
        ({"negative_prompt": "", "true_cfg_scale": 2.0}, TEXT | MASK, "input negative_prompt_embeds is missing"),
        ({"guidance_scale": None}, TEXT | MASK, "parameter guidance_scale must be of type float, not None"),
    ],
)
def test_denoise_rejects_missing_inputs_and_invalid_parameters(
    params: dict[str, Any], tensors: dict[str, Any], sentence: str, undivided: c.Undivided, stages: c.Load
) -> None:
    task = StageInput({**c.hunyuan_params(), **params}, tensors)

    with pytest.raises(PermanentError, match=re.escape(sentence)):
        stages(undivided.folder("hunyuan-video"))["denoise"].verify(task)
