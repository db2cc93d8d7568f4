"""Qwen-Image: what its card says, what is refused, and how texts of different length share a forward."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import conftest as c
from unfuse.core.errors import ConfigError
from unfuse.core.modalities import UPLOAD, VIDEO
from unfuse.models import find
from unfuse.stages.base import StageInput, next_states


@pytest.fixture
def copy(copied: Callable[[str], Path]) -> Path:
    return copied("qwen-image")


def test_model_spec_without_serving_json_has_pipeline_defaults(copy: Path) -> None:
    """The defaults of the pipeline's call, and its default size for a VAE of factor 4."""
    card = find(copy).model_spec("mine", copy)

    card.pipeline.validate()
    assert (card.family, card.accepted_input(UPLOAD).min, VIDEO.is_supported_by(card.limits)) == (
        "qwen_image",
        0,
        False,
    )
    assert card.defaults == {
        "height": 512,
        "width": 512,
        "num_frames": 1,
        "num_inference_steps": 50,
        "true_cfg_scale": 4.0,
        "max_sequence_length": 512,
        "negative_prompt": None,
    }
    assert (card.limits["size_multiple"], card.limits["min_size"], card.limits["max_size"]) == (8, 8, 2048)


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        (
            "model_index.json",
            {"text_encoder": [None, None]},
            "supported: transformers Qwen2_5_VLForConditionalGeneration",
        ),
        ("transformer/config.json", {"in_channels": 64}, "its VAE requires 16"),
        (
            "transformer/config.json",
            {"guidance_embeds": True},
            "is guidance-distilled, which diffusers does not support",
        ),
        ("vae/config.json", {"temperal_downsample": None}, "vae configuration: TypeError"),
    ],
)
def test_unsupported_components_or_configs_raise_config_error(
    file: str, changes: dict[str, Any], sentence: str, copy: Path
) -> None:
    c.edit(copy / file, **changes)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        find(copy).model_spec("mine", copy)


def test_prompt_embeds_are_zero_padded_and_masked_by_text_length(undivided: c.Undivided, stages: c.Load) -> None:
    """What is behind a text is zero, so that a request's bytes do not depend on whom it was encoded with."""
    encode = stages(undivided.folder("qwen-image"))["text_encode"]
    tasks = [StageInput(c.qwen_params(prompt=prompt), {}) for prompt in ("b", "a red circle", c.LONG)]

    outputs = [output.tensors for output in encode.run(tasks)]

    for output in outputs:
        embeds, mask = output["prompt_embeds"], output["prompt_embeds_mask"]
        assert (embeds.shape, mask.shape, mask.dtype) == ((1, 24, 32), (1, 24), torch.int64)
        assert torch.equal(embeds.abs().sum(-1) > 0, mask > 0)
        assert output["negative_prompt_embeds_mask"] is None
    assert [int(output["prompt_embeds_mask"].sum()) for output in outputs] == [3, 14, 24]


def test_single_request_runs_without_padding_or_attention_mask(
    undivided: c.Undivided, stages: c.Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor padding: with either, another attention kernel makes other bits. Beside a longer text it meets both."""
    denoise: Any = stages(undivided.folder("qwen-image"))["denoise"]
    met: list[tuple[int, bool]] = []
    forward = type(denoise._denoiser._transformer).forward

    def watched(self: Any, **given: Any) -> Any:
        met.append((given["encoder_hidden_states"].shape[1], given["encoder_hidden_states_mask"] is not None))
        return forward(self, **given)

    monkeypatch.setattr(type(denoise._denoiser._transformer), "forward", watched)
    states = []
    for prompt in ("b", "a red circle"):
        params = c.qwen_params(prompt=prompt)
        states.append(denoise.start(StageInput(params, c.encode(stages(undivided.folder("qwen-image")), params, {}))))
    (state,) = next_states(denoise, states[:1])
    next_states(denoise, [state, states[1]])

    assert met == [(3, False), (14, True)]
