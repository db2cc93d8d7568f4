"""Wan 2.2: two transformers or a timestep for each token, as model_index.json says; what its card says of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import conftest as c
from unfuse.core.checking import check_request
from unfuse.core.errors import InvalidParameter, PermanentError
from unfuse.models import find
from unfuse.stages.base import StageInput


def test_both_transformers_belong_to_the_denoise_stage_and_its_pool(copied: Callable[[str], Path]) -> None:
    folder = copied("wan-2.2")
    card = find(folder).model_spec("mine", folder)
    c.edit(folder / "transformer_2" / "config.json", eps=1e-5)
    changed = find(folder).model_spec("mine", folder)

    denoise = card.pipeline.stages[1]
    assert denoise.components == ("transformer", "transformer_2", "scheduler")
    assert set(card.dtypes) >= {"transformer", "transformer_2"}
    assert {name for name in card.pools() if card.pools()[name] != changed.pools()[name]} == {"denoise"}


def test_boundary_ratio_changes_the_denoise_pool(copied: Callable[[str], Path]) -> None:
    """It stands in model_index.json, which is in no component's folder."""
    folder = copied("wan-2.2")
    before = find(folder).model_spec("mine", folder).pools()
    c.edit(folder / "model_index.json", boundary_ratio=0.5)

    after = find(folder).model_spec("mine", folder).pools()

    assert {name for name in after if after[name] != before[name]} == {"denoise"}


def test_guidance_scale_2_is_accepted_only_with_two_transformers(copied: Callable[[str], Path]) -> None:
    folder, plain = copied("wan-2.2"), copied("wan")
    card = find(folder).model_spec("mine", folder)

    assert card.defaults["guidance_scale_2"] is None
    assert check_request(card, {"prompt": "p", "guidance_scale_2": 3})[0]["guidance_scale_2"] == 3.0
    with pytest.raises(InvalidParameter, match="unknown parameter 'guidance_scale_2'"):
        check_request(find(plain).model_spec("mine", plain), {"prompt": "p", "guidance_scale_2": 3})
    c.serve(folder, {"guidance_scale_2": 3.0})
    assert find(folder).model_spec("mine", folder).defaults["guidance_scale_2"] == 3.0


def test_second_transformer_is_unused_without_boundary_ratio(
    copied: Callable[[str], Path], undivided: c.Undivided, stages: c.Load
) -> None:
    """As undivided: the first takes every step."""
    folder = copied("wan-2.2")
    c.edit(folder / "model_index.json", boundary_ratio=None)
    card = find(folder).model_spec("mine", folder)

    assert "transformer_2" not in card.dtypes
    assert card.pools() == find(folder).model_spec("m", undivided.folder("wan")).pools()


def test_wan22_5b_model_spec_has_its_own_fps_and_size_multiple(copied: Callable[[str], Path]) -> None:
    """A VAE of factor 16 whose latents the transformer takes two by two."""
    folder = copied("wan-2.2-5b")
    card = find(folder).model_spec("mine", folder)

    assert (card.defaults["fps"], card.accepts) == (24, ())
    assert (card.limits["size_multiple"], card.limits["frame_multiple"]) == (32, 4)


@pytest.mark.parametrize(
    ("kind", "outputs", "components"),
    [
        ("wan-2.2-image", ("condition",), ("vae",)),
        ("wan-2.2-5b-image", ("condition",), ("vae",)),
        ("wan-image", ("image_embeds", "condition"), ("image_encoder", "image_processor", "vae")),
    ],
)
def test_image_encode_uses_clip_only_if_the_model_has_it(
    kind: str, outputs: tuple[str, ...], components: tuple[str, ...], undivided: c.Undivided
) -> None:
    folder = undivided.folder(kind)
    encode = find(folder).model_spec("mine", folder).pipeline.stages[1]

    assert (encode.kind, encode.outputs, encode.components) == ("image_encode", outputs, components)


def test_text_encode_pool_is_shared_and_denoise_pools_are_separate(undivided: c.Undivided) -> None:
    kinds = ("wan", "wan-2.2", "wan-2.2-image", "wan-2.2-5b", "wan-2.2-5b-image")
    pools = {kind: find(folder).model_spec("m", folder).pools() for kind in kinds if (folder := undivided.folder(kind))}

    assert len({found["text_encode"] for found in pools.values()}) == 1
    assert pools["wan"]["vae_decode"] == pools["wan-2.2-image"]["vae_decode"]
    assert len({found["denoise"] for found in pools.values()}) == len(kinds), (
        "the same weights, with or without a frame"
    )


def test_denoise_rejects_invalid_parameters_and_inputs(undivided: c.Undivided, stages: c.Load) -> None:
    text: dict[str, Any] = {name: torch.zeros(1, 24, 32) for name in ("prompt_embeds", "negative_prompt_embeds")}
    latents = {"condition": torch.zeros(1, 6, 1, 2, 2)}

    with pytest.raises(PermanentError, match="parameter guidance_scale_2 must be of type float, not 'high'"):
        task = StageInput(c.wan_params(guidance_scale_2="high"), text)
        stages(undivided.folder("wan-2.2"))["denoise"].verify(task)
    with pytest.raises(PermanentError, match="input condition must be floating point of 1×4×any"):
        stages(undivided.folder("wan-2.2-5b-image"))["denoise"].verify(StageInput(c.image_params(), text | latents))
