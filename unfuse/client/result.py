"""What a completed request gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfuse.core.errors import InvalidParameter

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


class Result:
    """Pictures of one request. `view` is the request object they came with, `data` the files, in order."""

    def __init__(self, view: Mapping[str, Any], data: Sequence[bytes]) -> None:
        self.view = view
        self.data = list(data)

    @property
    def id(self) -> str:
        """The request's id."""
        return str(self.view["id"])

    @property
    def seed(self) -> int:
        """The seed of the first picture; each further one has the next."""
        return int(self.view["seed"])

    @property
    def timings(self) -> dict[str, dict[str, float]]:
        """Seconds of every stage by name: waited (queued_s), read (get_s), computed (run_s), wrote (put_s)."""
        names = ("queued_s", "get_s", "run_s", "put_s")
        return {stage["name"]: {name: stage[name] for name in names} for stage in self.view["stages"]}

    @cached_property
    def images(self) -> list[Image]:
        """The pictures, decoded at first use."""
        from PIL import Image

        return [Image.open(BytesIO(data)) for data in self.data]

    def save(self, path: str | Path) -> list[Path]:
        """Write the pictures and return where: to `path`, or NAME-0.png, NAME-1.png, … if there are several.

        A picture that has the format of the path's suffix already is written as it came, any other converted.
        Raises InvalidParameter for a suffix that is no picture's.
        """
        path = Path(path)
        form = _FORMATS.get(path.suffix.lower())
        if form is None:
            raise InvalidParameter(f"{path} must end in one of {', '.join(_FORMATS)}", "path")
        several = len(self.data) > 1
        paths = [path.with_stem(f"{path.stem}-{index}") if several else path for index in range(len(self.data))]
        for target, data, image in zip(paths, self.data, self.images, strict=True):
            if image.format == form:
                target.write_bytes(data)
            else:
                (image.convert("RGB") if form == "JPEG" else image).save(target, form)
        return paths
