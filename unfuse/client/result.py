"""The result of a completed request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from unfuse.core.errors import InvalidParameter, PermanentError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Pillow's format by the suffix of a file's name.
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}

#: The content type of a video.
_VIDEO = "video/mp4"

#: The part of a file's name that is replaced by the number of each picture or frame.
NUMBERED = re.compile(r"%0?\d*d")


class Result:
    """The result of one request: pictures, a video, or its frames."""

    def __init__(self, view: Mapping[str, Any], data: Sequence[bytes], indexes: Sequence[int] | None = None) -> None:
        #: The request object.
        self.view = view

        #: The bytes of the files, in order.
        self.data = list(data)

        #: The index of each file among the requested ones: from 0 without gaps, unless some are missing.
        self.indexes = list(range(len(self.data)) if indexes is None else indexes)

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({file["content_type"] for file in self.view["result"]}))
        return f"<Result of {self.id}: {len(self.data)} × {kinds or 'nothing'}, {sum(map(len, self.data))} bytes>"

    @property
    def id(self) -> str:
        """The request's id."""
        return str(self.view["id"])

    @property
    def seed(self) -> int:
        """The seed of the first picture; each further one has the next."""
        return int(self.view["seed"])

    @property
    def flagged(self) -> list[int]:
        """The indexes of the pictures that the model's safety checker flagged. They have no files."""
        return [place_of(file) for file in self.view.get("result", ()) if file.get("flagged")]

    @property
    def timings(self) -> dict[str, dict[str, float]]:
        """Seconds of each stage by name: queued_s, get_s (reading inputs), run_s, put_s (writing outputs)."""
        names = ("queued_s", "get_s", "run_s", "put_s")
        return {stage["name"]: {name: stage[name] for name in names} for stage in self.view["stages"]}

    @property
    def is_video(self) -> bool:
        """Whether the result is one mp4 file."""
        return [file["content_type"] for file in self.view.get("result", ())] == [_VIDEO]

    @cached_property
    def images(self) -> list[Image]:
        """The pictures, or the frames of a video, decoded at first use.

        Raises ImportError for a video if the library av is missing.
        """
        from PIL import Image

        if self.is_video:
            try:
                import av
            except ModuleNotFoundError as error:
                raise ImportError("frames of a video need the library av: pip install 'unfuse[video]'") from error
            with av.open(BytesIO(self.data[0]), "r") as container:
                frames = container.decode(video=0)
                return [Image.fromarray(frame.to_ndarray(format="rgb24")) for frame in frames]
        return [Image.open(BytesIO(data)) for data in self.data]

    def save(self, path: str | Path) -> list[Path]:
        """Write the files, and return their paths.

        `path`: the name of a single file. Several pictures become NAME-0.png, NAME-1.png, …, or, for a name such as
        NAME-%04d.png, are numbered by that format.

        A picture in the format of the path's suffix is written unchanged, any other is converted. A video can only be
        written as .mp4. Raises InvalidParameter for another suffix, PermanentError if a file cannot be written.
        """
        try:
            return self._save(Path(path))
        except OSError as error:
            raise PermanentError(f"{error.filename or path} cannot be written: {error.strerror}") from error

    def files_at(self, path: Path) -> list[Path]:
        """Return the paths that `save` writes. Raises InvalidParameter for an unsupported suffix."""
        suffixes = [".mp4"] if self.is_video else [*_FORMATS]
        if path.suffix.lower() not in suffixes:
            raise InvalidParameter(f"{path} must end in one of {', '.join(suffixes)}", "path")
        is_numbered = len(self.data) + len(self.flagged) > 1 or NUMBERED.search(path.name)
        return [_numbered(path, index) if is_numbered and not self.is_video else path for index in self.indexes]

    def _save(self, path: Path) -> list[Path]:
        format = _FORMATS.get(path.suffix.lower())
        paths = self.files_at(path)
        if self.is_video:
            path.write_bytes(self.data[0])
            return [path]

        for target, data, image in zip(paths, self.data, self.images, strict=True):
            if image.format == format:
                target.write_bytes(data)
            else:
                # JPEG has no alpha channel.
                (image.convert("RGB") if format == "JPEG" else image).save(target, format)
        return paths


def place_of(file: Mapping[str, Any]) -> int:
    """Return the index of a result file, from its entry in the request object."""
    return int(urlsplit(file["url"]).path.rpartition("/")[2])


def _numbered(path: Path, index: int) -> Path:
    """Return the path with a number, formatted by its pattern or added to its stem."""
    if not NUMBERED.search(path.name):
        return path.with_stem(f"{path.stem}-{index}")
    return path.with_name(NUMBERED.sub(lambda match: match[0] % index, path.name, count=1))
