"""The judge of the built-in model: right on true drawings, also poor ones, and no praise for nothing."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tools.shapes import checker, scenes

Spoil = Callable[[np.ndarray], np.ndarray]
RED, BLUE, WHITE = (215, 25, 35), (35, 75, 230), (255, 255, 255)


def _blurred(picture: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(2)))


def _noisy(picture: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0, 20, picture.shape)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def _halved(picture: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(picture).reduce(2))


def _right(clips: list[np.ndarray], captions: list[str], spoil: Spoil) -> float:
    """The share of pictures and clips, spoilt, that show all that their captions ask for."""
    spoilt = [np.stack([spoil(frame) for frame in frames]) for frames in clips]
    found = [checker.check(frames, text) for frames, text in zip(spoilt, captions, strict=True)]
    return float(np.mean([all(parts.values()) for parts in found]))


def _scene(*things: tuple[str, float, float], relation: str = "") -> scenes.Scene:
    """Things such as ("red star", x, y), of radius 0.15 on white."""
    fills = {"red": RED, "blue": BLUE}
    drawn = [scenes.Thing(*name.split(), x, y, 0.15, fills[name.split()[0]]) for name, x, y in things]
    return scenes.Scene(tuple(drawn), "white", WHITE, relation)


def _judged(scene: scenes.Scene, caption: str) -> dict[str, bool]:
    return checker.check(scenes.draw(scene)[None], caption)


@pytest.mark.parametrize("spoil", [np.asarray, _blurred, _noisy, _halved])
@pytest.mark.parametrize("kind", ["single", "relation"])
def test_checker_recognizes_correct_drawings(kind: str, spoil: Spoil) -> None:
    pictures, captions = scenes.pictures(kind, 24, seed=11)

    assert _right([picture[None] for picture in pictures], captions, spoil) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("spoil", [np.asarray, _blurred, _noisy])
def test_checker_recognizes_correct_clips_and_their_direction(spoil: Spoil) -> None:
    clips, captions = scenes.clips(8, seed=12)

    assert _right(list(clips), captions, spoil) == 1


def test_checker_recognizes_all_combinations_including_held_out_ones() -> None:
    rng = np.random.default_rng(12)
    drawn = [scenes.random_single(rng, [pair]) for pair in (*scenes.TRAINED, *scenes.HELD_OUT)]

    assert [scene.caption for scene in drawn if not all(_judged(scene, scene.caption).values())] == []


def test_checker_reports_the_wrong_part_of_a_caption() -> None:
    scene = _scene(("red star", 0.5, 0.5))

    right = {"colour": True, "shape": True, "ground": True}
    assert _judged(scene, "a red star on white") == right
    assert _judged(scene, "a blue star on white") == {**right, "colour": False}
    assert _judged(scene, "a red cross on white") == {**right, "shape": False}
    assert _judged(scene, "a red star on black") == {**right, "ground": False}


def test_checker_reports_the_wrong_part_of_a_pair_caption() -> None:
    scene = _scene(("red star", 0.2, 0.5), ("blue circle", 0.7, 0.55))

    right = {"first": True, "second": True, "relation": True, "ground": True}
    assert _judged(scene, "a red star left of a blue circle on white") == right
    assert _judged(scene, "a blue circle right of a red star on white") == right
    assert _judged(scene, "a red star right of a blue circle on white") == {**right, "relation": False}
    assert _judged(scene, "a red star above a blue circle on white") == {**right, "relation": False}
    wrong = {**right, "second": False, "relation": False}
    assert _judged(scene, "a red star left of a blue ring on white") == wrong
    assert _judged(scene, "a red circle left of a blue star on white") == {**wrong, "first": False}


def test_checker_separates_touching_shapes_only_by_colour() -> None:
    touching = _scene(("red square", 0.4, 0.5), ("blue circle", 0.66, 0.5))
    merged = _scene(("red square", 0.4, 0.5), ("red circle", 0.66, 0.5))

    assert all(_judged(touching, "a red square left of a blue circle on white").values())
    assert not _judged(merged, "a red square left of a red circle on white")["relation"]


def test_checker_rejects_extra_or_missing_shapes() -> None:
    pair = _scene(("red star", 0.2, 0.5), ("red star", 0.7, 0.5))
    three = _scene(("red star", 0.2, 0.2), ("blue circle", 0.7, 0.2), ("blue circle", 0.5, 0.7))
    alone = _scene(("red star", 0.2, 0.5))

    assert _judged(pair, "a red star on white") == {"colour": False, "shape": False, "ground": True}
    assert not any(list(_judged(three, "a red star left of a blue circle on white").values())[:3])
    found = _judged(alone, "a red star left of a blue circle on white")
    assert found == {"first": True, "second": False, "relation": False, "ground": True}


def test_checker_rejects_wrong_slanted_or_missing_motion() -> None:
    scene = replace(_scene(("red star", 0.3, 0.5)), path=(0.4, 0.0))
    clip, still = scenes.draw_clip(scene), scenes.draw_clip(replace(scene, path=(0.0, 0.0)))
    slanted = scenes.draw_clip(replace(scene, path=(0.3, 0.25)))

    assert checker.check(clip, "a red star moving right on white")["direction"]
    assert not checker.check(clip, "a red star moving left on white")["direction"]
    assert not checker.check(clip, "a red star moving down on white")["direction"]
    assert not checker.check(still, "a red star moving right on white")["direction"]
    assert not checker.check(slanted, "a red star moving right on white")["direction"]


def test_checker_rejects_a_clip_with_one_wrong_frame() -> None:
    clip = scenes.draw_clip(replace(_scene(("red star", 0.3, 0.5)), path=(0.4, 0.0))).copy()
    clip[4] = scenes.draw(_scene(("red circle", 0.5, 0.5)))

    found = checker.check(clip, "a red star moving right on white")

    assert found == {"colour": True, "shape": False, "ground": True, "direction": True}


def test_checker_ignores_motion_for_a_single_image() -> None:
    assert _judged(_scene(("red star", 0.3, 0.5)), "a red star moving left on white") == {
        "colour": True,
        "shape": True,
        "ground": True,
    }


def test_checker_raises_value_error_for_an_unknown_caption() -> None:
    with pytest.raises(ValueError, match="two dogs"):
        _judged(_scene(("red star", 0.3, 0.5)), "two dogs")


def test_checker_observes_nothing_in_an_empty_image() -> None:
    assert str(checker.observe(np.full((128, 128, 3), 255, np.uint8))) == "nothing on white"


def test_checker_observes_no_known_shape_in_noise_or_a_bar() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3)).astype(np.uint8)
    wedge = np.full((128, 128, 3), 255, np.uint8)
    wedge[40:48, 10:120] = scenes.COLOURS["red"]

    assert {thing.shape for thing in checker.observe(noise).things} <= {"unknown"}
    assert str(checker.observe(wedge)) == "red unknown on white"


def test_checker_does_not_import_the_drawing_code() -> None:
    with open(checker.__file__) as file:
        assert not any("import" in line and "scenes" in line for line in file)
