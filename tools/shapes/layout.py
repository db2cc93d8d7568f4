"""Where things are: what the text encoder and the transformer are asked beside drawing.

A picture's loss says little of it: not to know which of two things is where costs 0.03 of 0.37 in pure noise, where it
is decided. And a transformer that is told relative positions alone must find out from noise where in the picture its
patches lie. Asked directly, both learn it in a few hundred steps: the words that name a thing tell where it is, and
patches tell where they are and what is on their side. docs/reference/builtin-model.md has what was measured.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.functional import cross_entropy

from tools.shapes import scenes

PLACES = ("alone", *scenes.RELATIONS, *(f"moving {way}" for way in scenes.DIRECTIONS))
COLOURS, SHAPES = tuple(scenes.COLOURS), scenes.SHAPES
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
UNKNOWN = -100  # of a colour or shape that the prompt does not say; cross-entropy leaves it out
SHARPNESS = 10.0


def layout(scene: scenes.Scene) -> list[list[int]]:
    """(2, 3) classes: place, colour and shape of the thing named first and of the other; one alone is both."""
    places = [f"moving {scene.direction}" if scene.direction else "alone"]
    if scene.relation:
        places = [scene.relation, OPPOSITE[scene.relation]]
    named = [
        [PLACES.index(place), COLOURS.index(thing.colour), SHAPES.index(thing.shape)]
        for place, thing in zip(places, scene.things, strict=True)
    ]
    return [named[0], named[-1]]


class WordHead(torch.nn.Module):
    """Asks the words that name a thing which it is, and where.

    The place is read by its angle to a direction per class, so that it must become a large part of an embedding, which
    attention can select by.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.places = torch.nn.Linear(width, len(PLACES), bias=False)
        self.things = torch.nn.Linear(width, len(COLOURS) + len(SHAPES))

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Scores by class of place, colour and shape for (N, width) words."""
        turned = F.linear(F.normalize(words, dim=-1), F.normalize(self.places.weight, dim=-1))
        return SHARPNESS * turned, *self.things(words).split([len(COLOURS), len(SHAPES)], dim=-1)

    def loss(self, words: torch.Tensor, things: torch.Tensor, layouts: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of (B, N, width) words, given their (B, N) things, -1 if none, and (B, 2, 3) layouts."""
        rows, columns = (things >= 0).nonzero(as_tuple=True)
        wanted = layouts[rows, things[rows, columns]]
        scores = self(words[rows, columns])
        return torch.stack([cross_entropy(*both) for both in zip(scores, wanted.T, strict=True)]).sum()


class PatchHeads(torch.nn.Module):
    """Ask patches, after some of the transformer's blocks, where they are, and after some what is on their side."""

    WHERE, WHAT = (1, 2), (2, 3)

    def __init__(self, blocks: torch.nn.ModuleList, width: int, side: int) -> None:
        super().__init__()
        self.where = torch.nn.ModuleList(torch.nn.Linear(width, 2 * side) for _ in self.WHERE)
        self.what = torch.nn.ModuleList(torch.nn.Linear(width, len(COLOURS) + len(SHAPES)) for _ in self.WHAT)
        self._places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        row, column = self._places.T
        covered = {"left of": column < side // 2, "right of": column >= side // 2}
        covered |= {"above": row < side // 2, "below": row >= side // 2}
        self._covered = torch.stack([covered.get(place, torch.ones_like(row, dtype=torch.bool)) for place in PLACES])
        self._felt: dict[int, torch.Tensor] = {}
        for index in {*self.WHERE, *self.WHAT}:
            blocks[index].register_forward_hook(self._saved_states(index))

    def loss(self, layouts: torch.Tensor) -> torch.Tensor:
        """What the patches of the last (B, ...) latents do not know, given their (B, 2, 3) layouts."""
        batch, frames = len(layouts), self._felt[self.WHERE[0]].shape[1] // len(self._places)
        here = self._places.repeat(batch * frames, 1)
        first = self._covered[layouts[:, 0, 0]].repeat(1, frames).unsqueeze(-1)
        things = torch.where(first, layouts[:, None, 0, 1:], layouts[:, None, 1, 1:]).flatten(0, 1)
        asked = [(index, head, here) for index, head in zip(self.WHERE, self.where, strict=True)]
        asked += [(index, head, things) for index, head in zip(self.WHAT, self.what, strict=True)]
        losses = []
        for index, head, wanted in asked:
            halves = head(self._felt[index].float()).flatten(0, 1).chunk(2, dim=-1)
            losses += [cross_entropy(*both, ignore_index=UNKNOWN) for both in zip(halves, wanted.T, strict=True)]
        return torch.stack(losses).sum()

    def _saved_states(self, index: int) -> Callable[[torch.nn.Module, object, torch.Tensor], None]:
        def keep(_block: torch.nn.Module, _given: object, felt: torch.Tensor) -> None:
            self._felt[index] = felt

        return keep
