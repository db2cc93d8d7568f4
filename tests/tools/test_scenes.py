"""The drawings the built-in model learns from: seeded, captioned, wholly inside the picture."""

import numpy as np
import pytest

from tools.shapes import scenes


def test_a_seed_draws_the_same_pictures_again() -> None:
    first, first_captions = scenes.pictures(5, seed=3)
    again, again_captions = scenes.pictures(5, seed=3)
    other, _ = scenes.pictures(5, seed=4)

    assert np.array_equal(first, again)
    assert first_captions == again_captions
    assert not np.array_equal(first, other)


def test_captions_are_exactly_the_promised_ones() -> None:
    captions = scenes.every_caption()

    assert len(set(captions)) == 6 * 6 * 3
    assert "a red circle on white" in captions
    assert "an orange ring on gray" in captions


def test_random_scenes_use_every_word() -> None:
    rng = np.random.default_rng(0)
    drawn = [scenes.random_scene(rng) for _ in range(300)]

    assert {scene.colour for scene in drawn} == set(scenes.COLOURS)
    assert {scene.shape for scene in drawn} == set(scenes.SHAPES)
    assert {scene.ground for scene in drawn} == set(scenes.GROUNDS)


def test_shapes_keep_off_the_edge_and_have_the_promised_size() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        scene = scenes.random_scene(rng)
        picture = scenes.draw(scene).astype(int)
        edge = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])

        assert (edge == scene.paper).all(), scene.caption
        assert 12 <= scene.radius * scenes.SIZE <= 20


def test_edges_are_smoothed() -> None:
    scene = scenes.random_scene(np.random.default_rng(2))

    levels = np.unique(scenes.draw(scene).reshape(-1, 3), axis=0)

    assert len(levels) > 2


@pytest.mark.parametrize("size", [32, 64, 128])
def test_a_scene_scales_with_the_picture(size: int) -> None:
    scene = scenes.random_scene(np.random.default_rng(5))
    covered = (scenes.draw(scene, size) != scene.paper).any(axis=-1)
    covered_in_detail = (scenes.draw(scene, 256) != scene.paper).any(axis=-1)

    assert covered.shape == (size, size)
    assert covered.mean() == pytest.approx(covered_in_detail.mean(), abs=0.05)


def test_clips_move_and_stay_one_scene() -> None:
    clips, captions = scenes.clips(3, seed=6)

    assert clips.shape == (3, 5, 64, 64, 3)
    assert len(captions) == 3
    for clip in clips:
        assert not np.array_equal(clip[0], clip[-1])
        assert np.array_equal(clip[0, 0, 0], clip[-1, 0, 0])


def test_an_unknown_shape_is_refused_by_name() -> None:
    scene = scenes.Scene("red", "blob", "white", 0.5, 0.5, 0.2, (255, 0, 0), (255, 255, 255))

    with pytest.raises(ValueError, match="blob"):
        scenes.draw(scene)
