"""How a language model is shown pictures and videos: how many tokens each is, and where these stand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

from unfuse.core.errors import InvalidParameter, PermanentError

MAX_RATIO = 200  # the longer side of what is shown, in shorter ones, may be at most this

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class PixelBounds(msgspec.Struct, frozen=True):
    """The fewest and most pixels to which a picture, or all frames of a video, are resized."""

    least: int
    most: int


class Grid(NamedTuple):
    """Groups of frames, and rows and columns of patches in each."""

    frames: int
    rows: int
    columns: int


class MediaItem(msgspec.Struct, frozen=True):
    """A picture or a video of a prompt: its name, by content, and its grid of patches, which are so many `tokens`.

    `images` of a video are its frames, of which `frames` groups are made; 0: it is a picture. They are `picked` of
    those of a file, or all of a list of pictures, which has none (""). A group lasts for so many `seconds`.
    """

    shown: str
    upload: str
    frames: Count
    rows: Count
    columns: Count
    tokens: Count
    images: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    picked: str = ""
    seconds: float = 0.0


class TokenRun(NamedTuple):
    """Tokens of a prompt that stand in a row for a picture, or for all or one of the groups of a video.

    They begin at place `start`, and are those of `shown` from number `first` on.
    """

    start: int
    shown: MediaItem
    first: int
    grid: Grid


class VisionConfig(msgspec.Struct, frozen=True):
    """What a language model makes of what it is shown. Lengths are pixels, tokens their ids.

    Patches have sides of `patch`, and `merge` by `merge` of them are a token; a video has `group` frames in one. A
    `picture` and a `video` have a token that stands for each of theirs, between `begin` and `end`. Groups of a `timed`
    video follow texts that say when they are, each between tokens of its own; else positions go on by `pace` a second.
    Of a video `rate` frames a second are shown, `images.least` to `images.most` in all.
    """

    picture: int
    video: int
    begin: int
    end: int
    patch: int
    merge: int
    group: int
    pictures: PixelBounds
    videos: PixelBounds
    images: PixelBounds = PixelBounds(4, 768)
    rate: float = 2.0
    timed: bool = False
    pace: float = 1.0

    def picture_grid(self, width: int, height: int) -> Grid:
        """The grid of a picture. Raises InvalidParameter for one that is too long."""
        return Grid(1, *self._resized(width, height, 1, 1, self.pictures))

    def video_grid(self, width: int, height: int, images: int) -> Grid:
        """The grid of a video of so many frames. Raises InvalidParameter for one that is too long."""
        groups = -(-images // self.group)
        if not self.timed:
            return Grid(groups, *self._resized(width, height, 1, 1, self.videos))
        side = self.patch * self.merge
        if min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        whole = round(images / self.group) * self.group
        return Grid(groups, *self._resized(width, height, images, whole, self.videos))

    def tokens(self, grid: Grid) -> int:
        """How many tokens a grid has."""
        return math.prod(grid) // self.merge**2

    def picked(self, frames: int, rate: float) -> list[int]:
        """The frames that are shown of a video of so many, as transformers chooses them; in whole groups, or timed.

        Of those that are not timed, its 32-bit floats have some fall one frame aside.
        """
        wanted, least, most = frames / rate * self.rate, self.images.least, min(self.images.most, frames)
        if self.timed:
            number = min(max(int(wanted), least), most)
            return [round(place * ((frames - 1) / max(1, number - 1))) for place in range(number)]
        number = int(min(max(wanted, least), most // self.group * self.group)) // self.group * self.group
        return [place * frames // number for place in range(number)]

    def moments(self, picked: Sequence[int], rate: float) -> list[float]:
        """When each group of the frames that are picked is, in seconds from the first: between its first and last."""
        whole = [*picked, *[picked[-1]] * (-len(picked) % self.group)]
        ends = zip(whole[:: self.group], whole[self.group - 1 :: self.group], strict=True)
        return [(first / rate + last / rate) / 2 for first, last in ends]

    def _resized(self, width: int, height: int, images: int, whole: int, bounds: PixelBounds) -> tuple[int, int]:
        """Rows and columns of patches, as transformers has them, which keep the shape and are within the bounds.

        These are of so many frames, `whole` of which count.
        """
        if max(width, height) > MAX_RATIO * min(width, height):
            raise InvalidParameter(f"{width}x{height} pixels: no side may be more than {MAX_RATIO} of the other")
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        if whole * rows * columns * side**2 > bounds.most:
            smaller = math.sqrt(images * height * width / bounds.most)
            rows, columns = (max(1, math.floor(length / smaller / side)) for length in (height, width))
        elif whole * rows * columns * side**2 < bounds.least:
            larger = math.sqrt(bounds.least / (images * height * width))
            rows, columns = (math.ceil(length * larger / side) for length in (height, width))
        return rows * self.merge, columns * self.merge

    def expanded(self, ids: Sequence[int], shown: Sequence[MediaItem]) -> list[int]:
        """Ids that have as many tokens as each picture and video is, where they had one for each, or each group.

        Raises InvalidParameter where ids have more, or fewer, for what is shown.
        """
        made: list[int] = []
        kinds = {self.picture: [one for one in shown if not one.images], self.video: self._groups(shown)}
        left = {id: iter(of) for id, of in kinds.items()}
        for id, of in kinds.items():
            if (found := ids.count(id)) != len(of):
                said = f"the messages have {found} places for {'videos' if id == self.video else 'pictures'}"
                raise InvalidParameter(f"{said}, and {len(of)} are shown: leave out the tokens for them", "messages")
        for id in ids:
            one = next(left[id]) if id in left else None
            made += [id] * self._length(one) if one else [id]
        return made

    def _groups(self, shown: Sequence[MediaItem]) -> list[MediaItem]:
        """The videos, each as often as it has tokens between tokens of its own."""
        return [one for one in shown if one.images for _ in range(one.frames if self.timed else 1)]

    def _length(self, one: MediaItem) -> int:
        return one.tokens // one.frames if one.images and self.timed else one.tokens

    def runs(self, ids: Sequence[int], shown: Sequence[MediaItem]) -> Iterator[TokenRun]:
        """Where expanded ids stand for what is shown. Raises PermanentError where they are not those of `shown`."""
        left = {self.picture: iter([one for one in shown if not one.images]), self.video: iter(self._groups(shown))}
        place, before, first = 0, "", 0
        while place < len(ids):
            if (id := ids[place]) not in left:
                place += 1
                continue
            one = next(left[id], None)
            if one is None or {*ids[place : place + self._length(one)]} != {id}:
                raise PermanentError("the prompt does not show what it was said to show")
            parted = bool(one.images) and self.timed
            first = first if parted and one.shown == before and first < one.tokens else 0
            yield TokenRun(place, one, first, Grid(1 if parted else one.frames, one.rows, one.columns))
            place, before, first = place + self._length(one), one.shown, first + self._length(one)


def places_of(vision: VisionConfig, ids: Sequence[int], shown: Sequence[MediaItem]) -> list[tuple[int, str]]:
    """Where in expanded ids stands what is shown: (place, all that there is to know of it, as JSON)."""
    return [(run.start, msgspec.json.encode(run.shown).decode()) for run in vision.runs(ids, shown)]
