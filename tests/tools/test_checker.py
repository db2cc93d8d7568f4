"""The judge of the built-in model: right on true drawings, also poor ones, and no praise for nothing."""

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tools.shapes import checker, scenes

Spoil = Callable[[np.ndarray], np.ndarray]


def _blurred(picture: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(1.2)))


def _noisy(picture: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0, 15, picture.shape)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def _halved(picture: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(picture).reduce(2))


def _right(pictures: np.ndarray, captions: list[str], spoil: Spoil) -> float:
    """The share of `pictures`, spoilt, that the checker names as captioned in all three respects."""
    asked = zip(pictures, captions, strict=True)
    return float(np.mean([all(checker.judge(spoil(picture)).names(text)) for picture, text in asked]))


@pytest.mark.parametrize("spoil", [np.asarray, _blurred, _noisy, _halved])
def test_true_drawings_are_named(spoil: Spoil) -> None:
    pictures, captions = scenes.pictures(40, seed=11)

    assert _right(pictures, captions, spoil) >= 0.98


def test_every_caption_drawn_once_is_told_from_every_other() -> None:
    rng = np.random.default_rng(12)
    wanted = scenes.every_caption()[::3]
    drawn: dict[str, scenes.Scene] = {}
    while len(drawn) < len(wanted):
        scene = scenes.random_scene(rng)
        if scene.caption in wanted:
            drawn[scene.caption] = scene

    wrong = [text for text, scene in drawn.items() if not all(checker.judge(scenes.draw(scene)).names(text))]

    assert wrong == []


def test_a_wrong_caption_is_wrong_in_the_part_that_differs() -> None:
    scene = scenes.Scene("red", "star", "white", 0.5, 0.5, 0.3, fill=(215, 25, 35), paper=(255, 255, 255))
    verdict = checker.judge(scenes.draw(scene))

    assert verdict.names("a red star on white") == (True, True, True)
    assert verdict.names("a blue star on white") == (False, True, True)
    assert verdict.names("a red cross on white") == (True, False, True)
    assert verdict.names("a red star on black") == (True, True, False)


def test_an_empty_picture_shows_nothing() -> None:
    verdict = checker.judge(np.full((64, 64, 3), 255, np.uint8))

    assert (verdict.colour, verdict.shape, verdict.ground) == ("unknown", "unknown", "white")


def test_noise_and_half_pictures_have_no_shape() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    wedge = np.full((64, 64, 3), 255, np.uint8)
    wedge[20:24, 5:60] = scenes.COLOURS["red"]

    assert checker.judge(noise).shape == "unknown"
    assert checker.judge(wedge).shape == "unknown"


def test_the_checker_shares_no_code_with_the_drawing() -> None:
    with open(checker.__file__) as file:
        assert not any("import" in line and "scenes" in line for line in file)
