"""A layout says where each thing is, and words and patches are asked for it where it can be known."""

import pytest
import torch

from tools.shapes import scenes
from tools.shapes.dit import Denoiser
from tools.shapes.layout import COLOURS, PLACES, SHAPES, UNKNOWN, PatchHeads, WordHead, layout
from tools.shapes.words import make_tokenizer, things_named, wordings

SIDE = 4


def said(scene: scenes.Scene) -> list[tuple[str, str, str]]:
    return [(PLACES[place], COLOURS[colour], SHAPES[shape]) for place, colour, shape in layout(scene)]


def test_layout_has_a_position_for_each_of_two_shapes() -> None:
    for scene in scenes.scenes("relation", 40, seed=1):
        first, second = scene.things
        nearer = {
            "left of": first.x < second.x,
            "right of": first.x > second.x,
            "above": first.y < second.y,
            "below": first.y > second.y,
        }
        (place, *named), (other, *others) = said(scene)
        assert nearer[place]
        assert not nearer[other]
        assert {place, other} in ({"left of", "right of"}, {"above", "below"})
        assert [named, others] == [[thing.colour, thing.shape] for thing in scene.things]


def test_layout_of_a_single_shape_has_two_equal_entries() -> None:
    for kind in ("single", "motion"):
        for scene in scenes.scenes(kind, 20, seed=2):
            (thing,) = scene.things
            place = f"moving {scene.direction}" if kind == "motion" else "alone"
            assert said(scene) == 2 * [(place, thing.colour, thing.shape)]


def test_caption_words_map_to_their_shapes_in_any_wording() -> None:
    tokenizer = make_tokenizer()
    for kind in scenes.KINDS:
        for scene in scenes.scenes(kind, 10, seed=3):
            for text in wordings(scene):
                tokens = tokenizer(text, return_tensors="pt").input_ids
                words = tokenizer.convert_ids_to_tokens(tokens[0])
                named = things_named(tokens)[0].tolist()
                for index, thing in enumerate(scene.things):
                    mine = [word for word, which in zip(words, named, strict=True) if which == index]
                    assert mine == [word for word in (thing.colour, thing.shape) if word in text.split()]
                assert sum(which >= 0 for which in named) == sum(word in (*COLOURS, *SHAPES) for word in words)


def test_word_loss_covers_only_words_that_name_a_shape() -> None:
    torch.manual_seed(0)
    words = torch.randn(2, 4, 8, requires_grad=True)
    things = torch.tensor([[-1, 0, -1, 1], [-1, -1, -1, -1]])

    WordHead(8).loss(words, things, torch.zeros(2, 2, 3, dtype=torch.long)).backward()

    assert words.grad is not None
    assert words.grad.nonzero()[:, :2].unique(dim=0).tolist() == [[0, 1], [0, 3]]


class Told(torch.nn.Module):
    """A block that gives its patches what they are asked for, if it is given the layout."""

    def forward(self, known: torch.Tensor) -> torch.Tensor:
        return known


def loss_knowing(known: torch.Tensor, layouts: torch.Tensor) -> float:
    """What heads that read off (B, N, 20) answers themselves (row, column, colour, shape) still miss."""
    blocks = torch.nn.ModuleList(Told() for _ in range(4))
    heads = PatchHeads(blocks, known.shape[-1], SIDE)
    for head, start in [*((head, 0) for head in heads.where), *((head, 2 * SIDE) for head in heads.what)]:
        with torch.no_grad():
            head.weight.copy_(50 * torch.eye(known.shape[-1])[start : start + len(head.weight)])
            head.bias.zero_()
    for block in blocks:
        block(known)
    return heads.loss(layouts).item()


def answers(scene: scenes.Scene, frames: int = 1) -> torch.Tensor:
    """(1, frames * 16, 20): for every patch its row, its column and what is on its side of the caption's picture."""
    first, second = scene.things[0], scene.things[-1]
    known = torch.zeros(frames, SIDE, SIDE, 2 * SIDE + len(COLOURS) + len(SHAPES))
    for row in range(SIDE):
        for column in range(SIDE):
            mine = {"left of": column < 2, "right of": column > 1, "above": row < 2, "below": row > 1}
            thing = first if mine.get(scene.relation, True) else second
            for index in (
                row,
                SIDE + column,
                2 * SIDE + COLOURS.index(thing.colour),
                2 * SIDE + len(COLOURS) + SHAPES.index(thing.shape),
            ):
                known[:, row, column, index] = 1
    return known.flatten(0, 2)[None]


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_patch_loss_is_low_only_for_the_correct_positions(kind: str) -> None:
    frames = 3 if kind == "motion" else 1
    for scene in scenes.scenes(kind, 8, seed=4):
        known, layouts = answers(scene, frames), torch.tensor([layout(scene)])
        assert loss_knowing(known, layouts) < 1e-3
        for wrong in (known.roll(1, dims=1), known.roll(1, dims=2)):
            assert loss_knowing(wrong, layouts) > 1


def test_patch_loss_ignores_unknown_layout_parts() -> None:
    (scene,) = scenes.scenes("relation", 1, seed=5)
    known = answers(scene).repeat(2, 1, 1)
    layouts = torch.tensor([layout(scene)]).repeat(2, 1, 1)
    layouts[1, :, 1:] = UNKNOWN
    known[1, :, 2 * SIDE :] = known[1, :, 2 * SIDE :].roll(1, dims=-1)

    assert loss_knowing(known, layouts) < 1e-3


def test_patch_heads_backpropagate_into_their_transformer_blocks() -> None:
    model = Denoiser()
    heads = PatchHeads(model.transformer.blocks, 144, SIDE)
    tokens = make_tokenizer()(["a red ring", "a blue star"], return_tensors="pt")
    model(tokens.input_ids, tokens.attention_mask, torch.randn(2, 16, 3, 8, 8), torch.ones(2))

    heads.loss(torch.zeros(2, 2, 3, dtype=torch.long)).backward()

    asked = [block.attn1.to_q.weight.grad is not None for block in model.transformer.blocks]
    assert asked == [True] * 4 + [False] * 2
