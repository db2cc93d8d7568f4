"""Text encoders that are language models: they keep no keys and values, and are padded on either side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import cache_utils

from tools import tiny
from unfuse.core.plan import Params
from unfuse.models import find
from unfuse.models.base import RuntimeOptions
from unfuse.stages.base import Stage, StageInput

PROMPT: Params = {
    "prompt": "a red circle",
    "negative_prompt": "a blue square over a green line",
    "max_sequence_length": 24,
    "guidance_scale": 3.0,
    "true_cfg_scale": 3.0,
}


def text_encoder(kind: str, folder: Path) -> Stage:
    tiny.build(kind, folder)
    family = find(folder)
    spec = family.model_spec("model", folder, "float32")
    stage = next(stage for stage in spec.pipeline.stages if stage.kind == "text_encode")
    return family.load(stage, folder, RuntimeOptions("cpu", spec.dtypes))


def encoded(stage: Stage) -> Mapping[str, Any]:
    (output,) = stage.run([StageInput(PROMPT, {})])
    return output.tensors


@pytest.mark.parametrize("kind", ["hunyuan-video", "qwen-image", "z-image", "klein", "krea"])
def test_language_model_encodes_a_text_without_keys_and_values(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = text_encoder(kind, tmp_path / kind)
    writes: list[object] = []
    update = cache_utils.DynamicLayer.update

    def count(layer: Any, *args: Any, **kwargs: Any) -> Any:
        writes.append(layer)
        return update(layer, *args, **kwargs)

    monkeypatch.setattr(cache_utils.DynamicLayer, "update", count)
    assert encoded(stage)
    assert not writes


def test_tokens_of_a_text_are_found_on_either_side_of_its_padding(tmp_path: Path) -> None:
    stage: Any = text_encoder("z-image", tmp_path / "z-image")
    right = encoded(stage)
    stage._encoder._tokenizer.padding_side = "left"
    left = encoded(stage)
    for name, tensor in right.items():
        assert torch.allclose(tensor, left[name], atol=1e-5), name
    assert 0 < int(right["prompt_embeds_mask"].sum()) < right["prompt_embeds_mask"].numel()
