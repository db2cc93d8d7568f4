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

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_VIDEO = "video/mp4"
NUMBERED = re.compile(r"%0?\d*d")  # the part of a file's name that is replaced by the number of each frame


class Result:
    """The result of one request: pictures, a video, or its frames.

    `view` is the request object they came with, `data` the files, in order, `indexes` the place of each of them among
    what was asked for: from 0, unless some are missing.
    """

    def __init__(self, view: Mapping[str, Any], data: Sequence[bytes], indexes: Sequence[int] | None = None) -> None:
        self.view = view
        self.data = list(data)
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
        """Seconds of every stage by name: waited (queued_s), read (get_s), computed (run_s), wrote (put_s)."""
        names = ("queued_s", "get_s", "run_s", "put_s")
        return {stage["name"]: {name: stage[name] for name in names} for stage in self.view["stages"]}

    @property
    def is_video(self) -> bool:
        """Whether it is one mp4 file."""
        return [file["content_type"] for file in self.view.get("result", ())] == [_VIDEO]

    @cached_property
    def images(self) -> list[Image]:
        """The pictures, or the frames of a video, decoded at first use. Raises ImportError if av is missing."""
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
        """Write the pictures and return where: to `path`, or NAME-0.png, NAME-1.png, … if there are several.

        A name such as NAME-%04d.png numbers them as it says. A picture that has the format of the path's suffix already
        is written as it came, any other converted; a video is written as .mp4 alone.
        Raises InvalidParameter for a suffix that does not fit, and PermanentError when a file cannot be written.
        """
        try:
            return self._save(Path(path))
        except OSError as error:
            raise PermanentError(f"{error.filename or path} cannot be written: {error.strerror}") from error

    def files_at(self, path: Path) -> list[Path]:
        """Return the files that `save` writes for this path. Raises InvalidParameter for a suffix that does not fit."""
        known = [".mp4"] if self.is_video else [*_FORMATS]
        if path.suffix.lower() not in known:
            raise InvalidParameter(f"{path} must end in one of {', '.join(known)}", "path")
        several = len(self.data) + len(self.flagged) > 1 or NUMBERED.search(path.name)
        return [_numbered(path, index) if several and not self.is_video else path for index in self.indexes]

    def _save(self, path: Path) -> list[Path]:
        form, paths = _FORMATS.get(path.suffix.lower()), self.files_at(path)
        if self.is_video:
            path.write_bytes(self.data[0])
            return [path]
        for target, data, image in zip(paths, self.data, self.images, strict=True):
            if image.format == form:
                target.write_bytes(data)
            else:
                (image.convert("RGB") if form == "JPEG" else image).save(target, form)
        return paths


def place_of(file: Mapping[str, Any]) -> int:
    """Return the index of a result in its request, from its entry in a request object."""
    return int(urlsplit(file["url"]).path.rpartition("/")[2])


def _numbered(path: Path, index: int) -> Path:
    if not NUMBERED.search(path.name):
        return path.with_stem(f"{path.stem}-{index}")
    return path.with_name(NUMBERED.sub(lambda found: found[0] % index, path.name, count=1))
