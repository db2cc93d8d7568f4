"""The shipped model: what it was trained to draw, it draws, at its own serving defaults."""

import json
from pathlib import Path

import pytest
from diffusers import WanPipeline

from tools.shapes.export import SERVING
from tools.shapes.score import generate, random_captions, score, serving_defaults

FOLDER = Path(__file__).parents[2] / "unfuse" / "models" / "shapes"
FLOORS = {"single": 0.85, "relation": 0.75, "motion": 0.7, "held-out": 0.75}
"""Of 20 captions each; docs/reference/builtin-model.md has the measured scores, well above."""


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    return WanPipeline.from_pretrained(FOLDER)


@pytest.mark.parametrize(
    "kind", [kind if kind == "single" else pytest.param(kind, marks=pytest.mark.nightly) for kind in FLOORS]
)
def test_images_and_videos_match_their_captions_above_the_score_floor(kind: str, pipeline: WanPipeline) -> None:
    captions = random_captions(kind, 20, seed=77)

    result = score(generate(pipeline, captions, 123456, serving_defaults(FOLDER, kind)), captions)

    assert result.right >= FLOORS[kind], result.misses


def test_builtin_model_is_at_most_16_mb_without_pickle_files() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in files) <= 16e6
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


def test_builtin_serving_defaults_are_within_its_limits() -> None:
    serving = json.loads((FOLDER / "serving.json").read_text())
    assert serving == SERVING, "what is shipped is not what tools/shapes/export.py writes"
    defaults, limits = serving["defaults"], serving["limits"]

    assert limits["min_size"] <= defaults["height"] == defaults["width"] <= limits["max_size"]
    assert defaults["height"] % limits["size_multiple"] == 0
    assert 1 < defaults["num_frames"] <= limits["max_frames"]
    assert defaults["num_inference_steps"] <= limits["max_steps"]
