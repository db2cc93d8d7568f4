"""Defaults and limits: serving.json before diffusers' call signature, and neither against the other."""

import inspect
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from unfuse import models
from unfuse.core.errors import ConfigError
from unfuse.core.modalities import MediaLimits, nearest_size
from unfuse.core.registry import resolve
from unfuse.models import FAMILIES, served_classes
from unfuse.models.declared import call_defaults
from unfuse.models.defaults import RequestDefaults, ServingConfig, fit, read_serving
from unfuse.models.wan import Wan

STANDARD = {"height": 64, "width": 64, "num_frames": 9, "fps": 16, "negative_prompt": ""}
LIMITS = MediaLimits(size_multiple=16, min_size=16, max_size=64, max_pixels=4096, max_frames=9, frame_multiple=4)


@pytest.mark.parametrize("pipeline", [name for name in served_classes() if name.endswith("Pipeline")])
def test_parsed_call_defaults_equal_the_imported_signature(pipeline: str) -> None:
    import diffusers

    family = resolve(FAMILIES, pipeline, "model family")
    signature = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    expected = {
        name: parameter.default
        for name, parameter in signature.items()
        if name in RequestDefaults.__struct_fields__ and parameter.default is not None
    }

    assert len(expected) >= 2
    assert family.source[1] == pipeline
    assert call_defaults(*family.source) == expected


@pytest.mark.parametrize(("file", "pipeline"), [("pipelines/none.py", "WanPipeline"), (Wan.source[0], "NonePipeline")])
def test_pipeline_class_missing_from_diffusers_raises_config_error(file: str, pipeline: str) -> None:
    with pytest.raises(ConfigError, match="the installed diffusers has no .*install a version that has"):
        call_defaults(file, pipeline)


def test_standard_defaults_and_limits_apply_without_serving_json(tmp_path: Path) -> None:
    serving = read_serving(tmp_path, ServingConfig)

    assert serving.with_limits(LIMITS, STANDARD) == STANDARD
    assert serving.bounds(LIMITS) == LIMITS


def test_partial_serving_json_overrides_only_its_fields(tmp_path: Path) -> None:
    said = {"defaults": {"width": 32, "fps": 8}, "limits": {"max_size": 48}}
    (tmp_path / "serving.json").write_text(json.dumps(said))
    serving = read_serving(tmp_path, ServingConfig)

    limits = serving.bounds(LIMITS)

    assert (limits.max_size, limits.max_pixels, limits.max_frames) == (48, 48 * 48, 9)
    assert serving.with_limits(limits, STANDARD) == {**STANDARD, "height": 48, "width": 32, "fps": 8}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"default": {}}',
        '{"limits": {"max_size": "64"}}',
        '{"defaults": null}',
    ],
)
def test_invalid_serving_json_raises_config_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "serving.json").write_text(content)

    with pytest.raises(ConfigError, match=r"serving\.json is not valid"):
        read_serving(tmp_path, ServingConfig)


@given(width=st.integers(1, 4096), height=st.integers(1, 4096), frames=st.integers(-3, 500))
def test_fitted_defaults_are_always_within_limits(width: int, height: int, frames: int) -> None:
    fitted = fit(LIMITS, {"width": width, "height": height, "num_frames": frames, "fps": 16})

    assert nearest_size(LIMITS, int(fitted["width"]), int(fitted["height"])) == (fitted["width"], fitted["height"])
    assert fitted["num_frames"] in (1, 5, 9)
    assert fit(LIMITS, fitted) == fitted


def test_built_in_model_vocabulary_equals_its_tokenizer_words() -> None:
    """And those that its normaliser writes as others."""
    folder = Path(models.__file__).parent / "shapes"
    tokens = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    vocabulary = read_serving(folder, ServingConfig).vocabulary
    assert vocabulary
    assert {*vocabulary.words} == {word for word in tokens if not word.startswith("<")} | {"an", "grey", "colour"}
    assert vocabulary.hint("it", "An orange ring left of a blue star, on a GREY background") == ""
    assert vocabulary.hint("it", "a spaceship over a city").startswith(
        "it was not trained on spaceship, city: it generates one"
    )
    for example in re.findall(r'"([^"]+)"', vocabulary.makes):
        assert vocabulary.hint("it", example) == ""


def test_unknown_vocabulary_field_raises_config_error(tmp_path: Path) -> None:
    (tmp_path / "serving.json").write_text('{"vocabulary": {"words": ["a"], "makes": "all", "hint": ""}}')
    with pytest.raises(ConfigError, match="serving.json is not valid"):
        read_serving(tmp_path, ServingConfig)
