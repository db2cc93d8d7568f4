"""Pictures and videos in the prompts of language models: their patches, tokens and positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

from unfuse.core.errors import InvalidParameter, PermanentError

MAX_RATIO = 200  # the longer side of a picture may be at most this many times the shorter one

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class PixelBounds(msgspec.Struct, frozen=True):
    """The range of a number of pixels after resizing, or of frames (`VisionConfig.images`)."""

    #: The least number.
    min_pixels: int
    #: The largest number.
    max_pixels: int


class Grid(NamedTuple):
    """The patches of a picture or video: groups of frames, rows and columns."""

    #: Groups of frames; 1 for a picture.
    frames: int
    #: Rows of patches.
    rows: int
    #: Columns of patches.
    columns: int


class MediaItem(msgspec.Struct, frozen=True):
    """A picture or a video in a prompt, with its grid of patches."""

    #: Hash of the content.
    content_hash: str
    #: Name of its attachment.
    upload: str
    #: Groups of frames of its grid; 1 for a picture.
    frames: Count
    #: Rows of patches.
    rows: Count
    #: Columns of patches.
    columns: Count
    #: Number of tokens in the prompt.
    tokens: Count
    #: Number of frames of a video; 0: it is a picture.
    images: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    #: Numbers of the frames that are sampled from a video file, joined by commas; "": all pictures are used.
    frame_indexes: str = ""
    #: Duration of a group of frames, in seconds.
    seconds: float = 0.0


class TokenRun(NamedTuple):
    """Consecutive tokens of a prompt that stand for one picture or video.

    For a `timed` video, a run stands for one group of its frames.
    """

    #: Position of the first token in the prompt.
    start: int
    #: The picture or video.
    item: MediaItem
    #: Number of that token among the tokens of `item`; not 0 only for later groups of a `timed` video.
    first: int
    #: The grid of this run.
    grid: Grid


class VisionConfig(msgspec.Struct, frozen=True):
    """How a language model turns pictures and videos into tokens."""

    #: Id of the token that stands for each token of a picture.
    picture: int
    #: Id of the token that stands for each token of a video.
    video: int
    #: Id of the token before a picture or video.
    begin_id: int
    #: Id of the token after a picture or video.
    end_id: int
    #: Side of a patch, in pixels.
    patch: int
    #: `merge` by `merge` patches are one token.
    merge: int
    #: Number of video frames in one group.
    group: int
    #: Pixels to which pictures are resized.
    pictures: PixelBounds
    #: Pixels to which videos are resized: of all frames if `timed`, else of each frame.
    videos: PixelBounds
    #: The fewest and the most frames of a video.
    images: PixelBounds = PixelBounds(4, 768)
    #: Frames that are sampled from one second of a video.
    rate: float = 2.0
    #: Whether each group of frames follows a text with its time, and has begin and end tokens of its own.
    timed: bool = False
    #: Without `timed`: how much the position grows per second of a video.
    pace: float = 1.0

    def picture_grid(self, width: int, height: int) -> Grid:
        """Return the grid of a picture.

        Raises InvalidParameter if one side is more than MAX_RATIO times the other.
        """
        return Grid(1, *self._resized(width, height, 1, 1, self.pictures))

    def video_grid(self, width: int, height: int, images: int) -> Grid:
        """Return the grid of a video of `images` frames.

        Raises InvalidParameter if one side is more than MAX_RATIO times the other.
        """
        groups = -(-images // self.group)
        if not self.timed:
            return Grid(groups, *self._resized(width, height, 1, 1, self.videos))

        # transformers enlarges these videos too, so that each side has at least one token
        side = self.patch * self.merge
        if min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        counted_images = round(images / self.group) * self.group
        return Grid(groups, *self._resized(width, height, images, counted_images, self.videos))

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens of a grid."""
        return math.prod(grid) // self.merge**2

    def sample_frames(self, frames: int, rate: float) -> list[int]:
        """Return the numbers of the frames to sample from a video, as transformers does.

        The video has `frames` frames, `rate` per second. Unless `timed`, the sampled frames are whole groups. In some
        places transformers' 32-bit floats choose a neighbouring frame.
        """
        target_frames = frames / rate * self.rate
        min_frames = self.images.min_pixels
        max_frames = min(self.images.max_pixels, frames)
        if self.timed:
            count = min(max(int(target_frames), min_frames), max_frames)
            return [round(index * ((frames - 1) / max(1, count - 1))) for index in range(count)]
        count = (
            int(min(max(target_frames, min_frames), max_frames // self.group * self.group)) // self.group * self.group
        )
        count = max(count, min(frames, self.group))  # a video shorter than a group: its last frame is repeated
        return [index * frames // count for index in range(count)]

    def frame_times(self, frame_numbers: Sequence[int], rate: float) -> list[float]:
        """Return the time of each group of sampled frames, in seconds.

        It is the middle between the first and the last frame of the group. `rate` is the video's frames per second.
        """
        padded = [*frame_numbers, *[frame_numbers[-1]] * (-len(frame_numbers) % self.group)]
        group_ends = zip(padded[:: self.group], padded[self.group - 1 :: self.group], strict=True)
        return [(first / rate + last / rate) / 2 for first, last in group_ends]

    def _resized(
        self, width: int, height: int, images: int, counted_images: int, bounds: PixelBounds
    ) -> tuple[int, int]:
        """Return (rows, columns) of patches, as in transformers.

        They preserve the shape and are within the bounds. `images` is the number of frames. `counted_images` is that
        number, rounded to whole groups: transformers compares it with the bounds, but scales by `images`.
        """
        if max(width, height) > MAX_RATIO * min(width, height):
            rule = f"the longer side must be at most {MAX_RATIO} times the shorter side"
            raise InvalidParameter(f"{width}x{height} pixels: {rule}")

        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        if counted_images * rows * columns * side**2 > bounds.max_pixels:
            reduction = math.sqrt(images * height * width / bounds.max_pixels)
            rows, columns = (max(1, math.floor(length / reduction / side)) for length in (height, width))
        elif counted_images * rows * columns * side**2 < bounds.min_pixels:
            enlargement = math.sqrt(bounds.min_pixels / (images * height * width))
            rows, columns = (math.ceil(length * enlargement / side) for length in (height, width))
        return rows * self.merge, columns * self.merge

    def expand_placeholders(self, ids: Sequence[int], media: Sequence[MediaItem]) -> list[int]:
        """Return token ids with each placeholder repeated for each of its tokens.

        `ids` has one placeholder for each picture and video; for a `timed` video, one for each group of frames. Raises
        InvalidParameter if `ids` has more or fewer placeholders than `media` needs.
        """
        # a client's text may contain a placeholder token, so the numbers may differ
        items_by_id = {self.picture: [item for item in media if not item.images], self.video: self._groups(media)}
        remaining = {id: iter(items) for id, items in items_by_id.items()}
        for id, items in items_by_id.items():
            if (count := ids.count(id)) != len(items):
                mismatch = f"the messages have {count} placeholders for {'videos' if id == self.video else 'pictures'}"
                raise InvalidParameter(
                    f"{mismatch}, but need {len(items)}: remove placeholder tokens from the texts", "messages"
                )

        expanded: list[int] = []
        for id in ids:
            item = next(remaining[id]) if id in remaining else None
            expanded += [id] * self._run_tokens(item) if item else [id]
        return expanded

    def _groups(self, media: Sequence[MediaItem]) -> list[MediaItem]:
        """Return the videos, each repeated for each of its placeholders."""
        return [item for item in media if item.images for _ in range(item.frames if self.timed else 1)]

    def _run_tokens(self, item: MediaItem) -> int:
        """Return the number of tokens in one run (see TokenRun)."""
        return item.tokens // item.frames if item.images and self.timed else item.tokens

    def token_runs(self, ids: Sequence[int], media: Sequence[MediaItem]) -> Iterator[TokenRun]:
        """Yield the runs of tokens in expanded ids, in order.

        Raises PermanentError if the ids do not fit `media`.
        """
        remaining = {
            self.picture: iter([item for item in media if not item.images]),
            self.video: iter(self._groups(media)),
        }
        position = 0
        previous_hash = ""
        first_token = 0
        while position < len(ids):
            if (id := ids[position]) not in remaining:
                position += 1
                continue

            item = next(remaining[id], None)
            if item is None or {*ids[position : position + self._run_tokens(item)]} != {id}:
                raise PermanentError("the prompt does not contain the pictures and videos of the request")
            # consecutive runs of one video are its groups; the same video may follow itself, and then starts again
            is_group = bool(item.images) and self.timed
            first_token = (
                first_token if is_group and item.content_hash == previous_hash and first_token < item.tokens else 0
            )
            yield TokenRun(position, item, first_token, Grid(1 if is_group else item.frames, item.rows, item.columns))

            position += self._run_tokens(item)
            previous_hash = item.content_hash
            first_token += self._run_tokens(item)


def media_positions(vision: VisionConfig, ids: Sequence[int], media: Sequence[MediaItem]) -> list[tuple[int, str]]:
    """Return the positions of pictures and videos in expanded ids.

    Each is (position of the first token, MediaItem as JSON).
    """
    return [(run.start, msgspec.json.encode(run.item).decode()) for run in vision.token_runs(ids, media)]
