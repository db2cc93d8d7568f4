"""The shipped model: what it was trained to draw, it draws, at its own serving defaults."""

import json
from pathlib import Path

import pytest
from diffusers import WanPipeline

from tools.shapes.score import Score, generate, random_captions, score, serving_defaults

FOLDER = Path(__file__).parents[2] / "unfuse" / "models" / "shapes"
FLOOR = 0.87  # of 24 pictures; docs/builtin-model.md has the measured score, well above


@pytest.fixture(scope="module")
def result() -> Score:
    """The score of 24 captions never used to choose the model."""
    captions = random_captions("single", 24, seed=77)
    made = generate(WanPipeline.from_pretrained(FOLDER), captions, 123456, serving_defaults(FOLDER, "single"))
    return score(made, captions)


def test_pictures_show_what_was_asked(result: Score) -> None:
    assert result.right >= FLOOR, result.misses


def test_the_folder_is_small_and_holds_no_pickle() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in files) <= 12e6
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


def test_serving_defaults_lie_within_the_limits() -> None:
    serving = json.loads((FOLDER / "serving.json").read_text())
    defaults, limits = serving["defaults"], serving["limits"]

    assert limits["min_size"] <= defaults["height"] == defaults["width"] <= limits["max_size"]
    assert defaults["height"] % limits["size_multiple"] == 0
    assert defaults["num_frames"] <= limits["max_frames"]
    assert defaults["num_inference_steps"] <= limits["max_steps"]
