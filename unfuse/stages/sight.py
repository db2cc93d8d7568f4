"""What the prompt of a sequence shows, for the forward: embeddings in place of tokens, and positions of three rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unfuse.core.errors import PermanentError
from unfuse.core.vision import Shown, TokenRun, Vision
from unfuse.stages.base import Tensors


@dataclass(frozen=True)
class Rows:
    """Of a chunk of tokens: the rows that are seen, their embeddings, and what deeper layers add to them."""

    rows: Tensor
    embeddings: Tensor
    deep: list[Tensor]


class Sight:
    """What a prompt shows. Positions of its tokens are (3, tokens); those behind it go on from the last, in each row.

    So does `generate` of transformers 5.23. Its forward, where nobody says positions, goes on from the largest instead
    (`rope_deltas`), which is another one where a video has just been shown.
    """

    def __init__(
        self, ids: Sequence[int], shown: Sequence[Shown], tensors: Tensors, vision: Vision, layers: int
    ) -> None:
        """`tensors` has what was encoded, each with so many `layers` of deepstack. Raises PermanentError."""
        runs = [*vision.runs(ids, shown)]
        self._positions = _positions(len(ids), runs, vision)
        ends = ["", *(f".{layer}" for layer in range(layers))]
        self._runs = [(run.start, [_part(tensors, run, end, vision.tokens(run.grid)) for end in ends]) for run in runs]

    @property
    def ends_in_text(self) -> bool:
        """Whether the last token is text: then those behind the prompt have the positions of a longer prompt."""
        return bool((self._positions[:, -1] == self._positions[0, -1]).all())

    def positions(self, start: int, stop: int) -> Tensor:
        """(3, stop - start): those of tokens in these places."""
        length = self._positions.shape[1]
        behind = torch.arange(max(start, length), max(stop, length)) + 1 - length
        return torch.cat([self._positions[:, start:stop], self._positions[:, -1:] + behind], 1)

    def seen(self, start: int, stop: int) -> Rows | None:
        """What is seen of the tokens in these places; their rows count from `start`."""
        rows, values = list[Tensor](), list[list[Tensor]]()
        for place, parts in self._runs:
            first, last = max(place, start), min(place + len(parts[0]), stop)
            if first < last:
                rows.append(torch.arange(first - start, last - start))
                values.append([part[first - place : last - place] for part in parts])
        if not rows:
            return None
        embeddings, *deep = (torch.cat(layer) for layer in zip(*values, strict=True))
        return Rows(torch.cat(rows), embeddings, deep)


def _part(tensors: Tensors, run: TokenRun, end: str, tokens: int) -> Tensor:
    value = tensors.get(run.shown.shown + end)
    if value is None or value.ndim != 2 or value.shape[0] != run.shown.tokens:
        raise PermanentError(f"what was encoded of {run.shown.shown[:12]} is missing, or of another size")
    return value[run.first : run.first + tokens]


def _positions(length: int, runs: Sequence[TokenRun], vision: Vision) -> Tensor:
    """Those of transformers: text goes on by one in all rows; what is shown has frame, row and column behind it."""
    parts: list[Tensor] = []
    place = position = 0
    for run in [*runs, None]:
        stop = run.start if run else length
        parts.append((torch.arange(stop - place) + position).expand(3, -1))
        position += stop - place
        if run is None:
            break
        frames, rows, columns = (side // by for side, by in zip(run.grid, (1, vision.merge, vision.merge), strict=True))
        paced = run.shown.images and not vision.timed
        pace = vision.pace * torch.tensor(run.shown.seconds) if paced else 1
        moments = (torch.arange(frames) * pace).long()
        axes = torch.meshgrid(moments, torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack(axes).reshape(3, -1) + position)
        place, position = stop + frames * rows * columns, position + max(rows, columns)
    return torch.cat(parts, 1)
