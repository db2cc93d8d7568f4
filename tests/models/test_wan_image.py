"""Wan from a picture: what its card says, and how it is refused and loaded."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import conftest as c
from unfuse.core.checking import check_request
from unfuse.core.errors import ConfigError, InvalidParameter, PermanentError
from unfuse.core.modalities import UPLOAD, VIDEO
from unfuse.models import find
from unfuse.stages.base import StageInput


@pytest.fixture
def copy(copied: Callable[[str], Path]) -> Path:
    return copied("wan-image")


def test_model_spec_requires_an_image_and_encodes_it_beside_the_prompt(copy: Path) -> None:
    card = find(copy).model_spec("mine", copy)

    card.pipeline.validate()
    assert card.accepted_input(UPLOAD).min == 1
    assert not find(copy.parent / "wan-image").model_spec("mine", copy).pipeline.stages[1].per_sample
    assert [(stage.name, stage.inputs) for stage in card.pipeline.stages] == [
        ("text_encode", ()),
        ("image_encode", ()),
        ("denoise", ("prompt_embeds", "negative_prompt_embeds", "image_embeds", "condition")),
        ("vae_decode", ("latents",)),
    ]
    assert card.defaults["num_frames"] == 61
    assert card.defaults["guidance_scale"] == 5.0


def test_num_frames_must_be_one_more_than_a_multiple_of_four(copy: Path) -> None:
    """It takes four frames at a time, also where two make one of latents."""
    card = find(copy).model_spec("mine", copy)

    assert card.limits["frame_multiple"] == 4
    with pytest.raises(InvalidParameter, match="num_frames must be one more than a multiple of 4, not 7"):
        check_request(card, {"prompt": "p", "num_frames": 7}, VIDEO)


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("model_index.json", {"image_encoder": [None, None]}, "needs CLIP embeddings, but there is no image_encoder"),
        (
            "model_index.json",
            {"image_processor": ["transformers", "ViTImageProcessor"]},
            "supported: transformers CLIP",
        ),
        ("model_index.json", {"boundary_ratio": 0.9}, "declares component transformer_2 as [None, None]; supported:"),
        (
            "model_index.json",
            {"expand_timesteps": True},
            "the transformer takes a picture, but its class is not for image",
        ),
        (
            "transformer/config.json",
            {"image_dim": None, "in_channels": 4},
            "takes no picture, but its class is for image",
        ),
        ("transformer/config.json", {"in_channels": 9}, "its VAE requires 10"),
        ("image_encoder/config.json", {"patch_size": 0}, "image_encoder configuration: ZeroDivisionError"),
        ("image_encoder/config.json", {"hidden_size": None}, "image_encoder configuration: TypeError"),
    ],
)
def test_unsupported_components_or_configs_raise_config_error(
    file: str, changes: dict[str, Any], sentence: str, copy: Path
) -> None:
    c.edit(copy / file, **changes)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        find(copy).model_spec("mine", copy)


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("wan-image", (0, 0)),
        ("wan-image-last", (1, 1)),
        ("wan-2.2-image", (0, 1)),
        ("wan-2.2-5b-image", (0, 0)),
    ],
)
def test_model_spec_declares_whether_last_frame_is_accepted(
    kind: str, last: tuple[int, int], undivided: c.Undivided
) -> None:
    """By what the transformer sees: a place for two of CLIP's, or none of CLIP and a mask of the frames.

    The stage reads it in any case: models that differ in this may share a pool.
    """
    card = find(undivided.folder(kind)).model_spec("mine", undivided.folder(kind))

    (picture,) = (stage for stage in card.pipeline.stages if stage.kind == "image_encode")
    end = card.accepted_input("last_frame")
    assert (end.min, end.max, picture.depends_on_params[4:]) == (*last, ("last_frame",))


@pytest.mark.parametrize("name", ["CLIPImageProcessor", "CLIPImageProcessorFast"])
def test_image_processor_loads_by_plain_and_fast_class_name(
    name: str, copy: Path, undivided: c.Undivided, stages: c.Load
) -> None:
    """Published models name the first, older releases saved the second; without torchvision both are Pillow's."""
    c.edit(copy / "model_index.json", image_processor=["transformers", name])
    c.edit(copy / "image_processor" / "preprocessor_config.json", image_processor_type=name)
    params = c.image_params()
    uploads = undivided.uploads(params)

    found = c.run(stages(copy)["image_encode"], params, None, uploads).tensors

    if not _has_torchvision():
        expected = c.run(stages(undivided.folder("wan-image"))["image_encode"], params, None, uploads).tensors
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def _has_torchvision() -> bool:
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"condition": (1, 6, 3, 8, 8)}, "input image_embeds is missing"),
        ({"image_embeds": (1, 17, 24)}, "input condition is missing"),
        (
            {"image_embeds": (1, 17, 24), "condition": (1, 4, 3, 8, 8)},
            "input condition must be floating point of 1×6×any",
        ),
    ],
)
def test_missing_or_wrong_shape_inputs_are_rejected(
    tensors: dict[str, tuple[int, ...]], sentence: str, undivided: c.Undivided, stages: c.Load
) -> None:
    text = {"prompt_embeds": (1, 24, 32), "negative_prompt_embeds": (1, 24, 32)}
    made = {name: torch.zeros(shape) for name, shape in (text | tensors).items()}

    with pytest.raises(PermanentError, match=re.escape(sentence)):
        stages(undivided.folder("wan-image"))["denoise"].verify(StageInput(c.image_params(), made))
