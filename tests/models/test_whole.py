"""Folders of pipelines without a family: what their cards say, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.once import once
from tools.tiny_whole import build
from unfuse.core.checking import check_request
from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.core.modalities import IMAGE, VIDEO
from unfuse.core.model_spec import AcceptedInput, ModelSpec
from unfuse.models import find, read_model_spec
from unfuse.models.base import RuntimeOptions
from unfuse.models.declared import declared_pipeline
from unfuse.models.undivided_family import FAMILY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        for kind in ("sd", "ltx-image", "pixart-alpha"):
            build(kind, folder / kind, serving=False)

    return once("whole", tmp_path_factory, make)


@pytest.fixture
def sd(folders: Path, tmp_path: Path) -> Path:
    """A copy of the folder, whose files can be written."""
    for file in folders.joinpath("sd").rglob("*"):
        if file.is_file():
            copy = tmp_path / file.relative_to(folders / "sd")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return tmp_path


def indexed(folder: Path, **entries: Any) -> Path:
    file = folder / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    return folder


def test_undivided_model_spec_has_one_stage_and_a_reason(folders: Path) -> None:
    card = read_model_spec("sd", folders / "sd")

    (stage,) = card.pipeline.stages
    assert (stage.kind, stage.role, stage.outputs, stage.per_sample) == ("whole", "whole", (), True)
    assert stage.components[0] == "unet" and {*stage.components} == {
        "unet",
        "vae",
        "text_encoder",
        "tokenizer",
        "scheduler",
    }
    assert "StableDiffusionPipeline" in card.undivided_reason and find(folders / "sd") is FAMILY


def test_defaults_and_limits_are_those_of_the_pipeline_call(folders: Path) -> None:
    """The defaults are those of the call; where it has none, what the model was trained on."""
    picture, video, plain = (read_model_spec(kind, folders / kind) for kind in ("sd", "ltx-image", "pixart-alpha"))

    assert picture.defaults | {"guidance_scale": 7.5, "width": 64, "num_inference_steps": 50} == picture.defaults
    assert video.defaults | {"num_frames": 161, "fps": 25, "width": 704, "max_sequence_length": 128} == video.defaults
    assert picture.defaults["negative_prompt"] is None and plain.defaults["negative_prompt"] == ""
    assert (picture.limits["max_frames"], picture.limits["size_multiple"]) == (1, 8)
    assert (video.limits["frame_multiple"], video.limits["size_multiple"]) == (4, 16)
    assert VIDEO.is_supported_by(video.limits) and not VIDEO.is_supported_by(picture.limits)


@pytest.mark.parametrize("asked", [{"preview_every": 2}, {"partial_images": 1, "stream": True}, {"strength": 1}])
def test_parameters_that_the_pipeline_call_lacks_are_rejected(asked: dict[str, object], folders: Path) -> None:
    card = read_model_spec("sd", folders / "sd")

    with pytest.raises(InvalidParameter, match=f"takes no {next(iter(asked))}|unknown parameter"):
        check_request(card, {"prompt": "a", **asked})
    params, _ = check_request(card, {"prompt": "a", "partial_images": 0, "preview_every": 0})
    assert "preview_every" not in params


def test_unsupported_parameter_is_accepted_only_with_an_empty_value() -> None:
    refused = tuple(AcceptedInput(name, max=0) for name in ("negative_prompt", "size"))
    card = ModelSpec("m", "m", "f", None, {}, {"num_inference_steps": 4}, {}, {}, accepts=refused)  # type: ignore[arg-type]

    check_request(card, {"prompt": "a", "negative_prompt": "", "size": "auto"}, IMAGE)
    for asked in ({"negative_prompt": "b"}, {"size": "32x32"}):
        with pytest.raises(InvalidParameter, match=f"model m takes no {next(iter(asked))}"):
            check_request(card, {"prompt": "a", **asked}, IMAGE)


def test_equal_folders_share_a_pool_unless_dtype_or_settings_differ(sd: Path, folders: Path) -> None:
    """Another dtype of any component, or another setting of the pipeline, is another pool."""
    usual = read_model_spec("one", folders / "sd").pools()
    assert read_model_spec("two", sd).pools() == usual
    assert read_model_spec("two", sd, "text_encoder=bfloat16").pools() != usual
    assert read_model_spec("two", indexed(sd, requires_safety_checker=True)).pools() != usual


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (
            {"_class_name": ["pipeline", "Own"]},
            "which is not supported; .* any other pipeline of the installed diffusers",
        ),
        ({"_class_name": "OwnPipeline"}, "which is not supported"),
        (
            {"unet": ["own_unet", "Own"]},
            "component unet has a custom class .*custom code of models is not run",
        ),
        ({"unet": ["../evil", "Own"]}, "has a custom class"),
        ({"_class_name": "AudioLDM2Pipeline"}, "generates neither pictures nor videos without sound"),
        ({"_class_name": "StableDiffusionInpaintPipeline"}, "takes mask_image, which requests cannot set"),
        ({"_class_name": "DDPMPipeline"}, "takes no prompt"),
        ({"_class_name": "KandinskyV22PriorPipeline"}, "generates neither pictures nor videos without sound"),
    ],
)
def test_unsupported_pipelines_raise_one_line_config_error(entries: dict[str, Any], reason: str, sd: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        read_model_spec("m", indexed(sd, **entries))
    assert "\n" not in str(refused.value)


def test_pickle_weights_raise_config_error_naming_the_component(sd: Path) -> None:
    weights = sd / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))

    with pytest.raises(ConfigError, match="component unet are .*weights that are not safetensors"):
        read_model_spec("m", sd)


@pytest.mark.skipif(bool(find_spec("torchvision")), reason="torchvision is installed, which this is to miss")
def test_missing_torchvision_raises_one_line_config_error(sd: Path) -> None:
    """As those of Qwen-Image-Edit-Plus and FLUX.2, whose folders have a tokenizer's files and no config.json."""
    (sd / "tokenizer").rename(sd / "processor")
    parts = {"tokenizer": [None, None], "processor": ["transformers", "PixtralProcessor"]}
    indexed(sd, _class_name="QwenImageEditPlusPipeline", unet=[None, None], **parts)
    card = read_model_spec("m", sd)

    with pytest.raises(ConfigError, match="component processor .* requires the Torchvision library") as refused:
        find(sd).load(card.pipeline.stages[0], sd, RuntimeOptions("cpu", card.dtypes))
    assert "\n" not in str(refused.value)


def test_python_files_in_a_model_folder_are_never_executed(sd: Path, tmp_path: Path) -> None:
    """Given files that diffusers' own loading of the folder would import."""
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')"
    for file in ("pipeline.py", "unet/diffusers.py", "unet/unet_2d_condition.py", "tokenizer/transformers.py"):
        (sd / file).write_text(trap)
    code = (
        "import sys; from pathlib import Path; from unfuse.models import read_model_spec, find\n"
        "from unfuse.models.base import RuntimeOptions\n"
        "folder = Path(sys.argv[1]); card = read_model_spec('m', folder); (spec,) = card.pipeline.stages\n"
        "find(folder).load(spec, folder, RuntimeOptions('cpu', card.dtypes))"
    )
    subprocess.run([sys.executable, "-c", code, str(sd)], check=True, capture_output=True)
    assert not (tmp_path / "ran").exists()


def test_undivided_model_spec_is_read_without_torch(folders: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from unfuse.models import read_model_spec\n"
        "read_model_spec('m', Path(sys.argv[1])); assert not {'torch', 'diffusers', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, str(folders / "sd")], check=True)


def test_components_that_stay_on_the_device_are_parsed_from_pipeline_source() -> None:
    """Those of the class, and of the classes from which it is derived."""
    names = ("StableDiffusionPipeline", "StableUnCLIPPipeline", "PixArtAlphaPipeline")
    found = [declared_pipeline(name) for name in names]
    assert [one and one.not_offloaded for one in found] == [("safety_checker",), ("prior", "image_normalizer"), ()]


@pytest.mark.parametrize(
    ("name", "medium", "loras"),
    [
        ("StableDiffusionXLPipeline", "image", True),
        ("CogVideoXPipeline", "video", True),
        ("KandinskyV22CombinedPipeline", "image", False),
        ("LTX2Pipeline", "", True),
        ("StableAudioPipeline", "", False),
    ],
)
def test_modality_and_lora_support_are_parsed_from_pipeline_source(name: str, medium: str, loras: bool) -> None:
    """LTX2 makes sound beside its video, which nobody would get."""
    found = declared_pipeline(name)
    assert found is not None and (found.modality, found.loras) == (medium, loras)
