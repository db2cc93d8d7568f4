"""The drawings the built-in model learns from: seeded, captioned, wholly inside the picture."""

from dataclasses import replace

import numpy as np
import pytest

from tools.shapes import scenes
from tools.shapes.scenes import Scene


def _extent(thing: scenes.Thing) -> np.ndarray:
    return np.array([thing.x - thing.radius, thing.y - thing.radius, thing.x + thing.radius, thing.y + thing.radius])


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_equal_seeds_draw_equal_images(kind: str) -> None:
    first, first_captions = scenes.pictures(kind, 5, seed=3)
    again, again_captions = scenes.pictures(kind, 5, seed=3)
    other, _ = scenes.pictures(kind, 5, seed=4)

    assert np.array_equal(first, again)
    assert first_captions == again_captions
    assert not np.array_equal(first, other)


def test_captions_have_the_documented_wording() -> None:
    assert scenes.caption(("red", "circle"), "white") == "a red circle on white"
    assert scenes.motion_caption(("orange", "ring"), "left", "gray") == "an orange ring moving left on gray"
    related = scenes.relation_caption(("blue", "star"), "left of", ("orange", "ring"), "black")
    assert related == "a blue star left of an orange ring on black"


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_random_scenes_use_every_word_but_no_held_out_combination(kind: str) -> None:
    drawn = scenes.scenes(kind, 600, seed=0)
    pairs = {(thing.colour, thing.shape) for scene in drawn for thing in scene.things}

    assert pairs == {(c, s) for c in scenes.COLOURS for s in scenes.SHAPES} - set(scenes.HELD_OUT)
    assert {scene.ground for scene in drawn} == set(scenes.GROUNDS)
    assert {scene.relation for scene in drawn} == (set(scenes.RELATIONS) if kind == "relation" else {""})
    assert {scene.direction for scene in drawn} == (set(scenes.DIRECTIONS) if kind == "motion" else {""})


def test_held_out_combinations_leave_every_colour_and_shape_well_covered() -> None:
    assert len(set(scenes.HELD_OUT)) == 4
    for words in zip(*scenes.HELD_OUT, strict=True):
        assert len(set(words)) == 4, "no colour and no shape is held out twice"


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_shapes_avoid_the_image_edge_and_have_the_documented_size(kind: str) -> None:
    low, high = scenes.PAIR_RADII if kind == "relation" else scenes.RADII
    for scene in scenes.scenes(kind, 100, seed=1):
        for share in (0.0, 1.0):
            picture = scenes.draw(scene, share=share).astype(int)
            edge = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])

            assert (edge == scene.paper).all(), scene.caption
        assert all(low <= thing.radius * 64 <= high for thing in scene.things)


def test_two_shapes_are_placed_according_to_their_caption() -> None:
    for scene in scenes.scenes("relation", 300, seed=2):
        first, second = scene.things
        offset = np.array([first.x - second.x, first.y - second.y])
        axis = np.array(scenes.RELATIONS[scene.relation])
        one, other = _extent(first), _extent(second)

        assert offset @ axis >= first.radius + second.radius, scene.caption
        assert abs(offset @ axis[::-1]) <= scenes.ASIDE / 64
        assert (one[2:] < other[:2]).any() or (other[2:] < one[:2]).any(), "they do not overlap"
        assert (first.colour, first.shape) != (second.colour, second.shape)


def test_moving_shape_follows_the_direction_of_its_caption() -> None:
    for scene in scenes.scenes("motion", 100, seed=6):
        path, axis = np.array(scene.path), np.array(scenes.DIRECTIONS[scene.direction])

        assert scenes.TRAVEL[0] <= path @ axis <= scenes.TRAVEL[1]
        assert path @ axis[::-1] == 0


def test_clips_show_motion_on_a_constant_background() -> None:
    clips, captions = scenes.clips(3, seed=6)

    assert clips.shape == (3, 9, 128, 128, 3)
    assert len(captions) == 3
    for clip in clips:
        assert not np.array_equal(clip[0], clip[-1])
        assert np.array_equal(clip[0, 0, 0], clip[-1, 0, 0])


def test_shape_edges_are_antialiased() -> None:
    levels = np.unique(scenes.draw(scenes.scenes("single", 1, seed=2)[0]).reshape(-1, 3), axis=0)

    assert len(levels) > 2


@pytest.mark.parametrize("size", [32, 64, 128])
def test_scene_scales_with_the_image_size(size: int) -> None:
    scene = scenes.scenes("single", 1, seed=5)[0]
    covered = (scenes.draw(scene, size) != scene.paper).any(axis=-1)
    covered_in_detail = (scenes.draw(scene, 256) != scene.paper).any(axis=-1)

    assert covered.shape == (size, size)
    assert covered.mean() == pytest.approx(covered_in_detail.mean(), abs=0.05)


def test_unknown_shape_raises_value_error() -> None:
    scene: Scene = scenes.scenes("single", 1, seed=0)[0]

    with pytest.raises(ValueError, match="blob"):
        scenes.draw(replace(scene, things=(replace(scene.things[0], shape="blob"),)))
