"""Files that a verb reads, and names of those that it writes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from unfuse.core.errors import InvalidParameter

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".mp4": "mp4"}


def kind_of(output: Path) -> tuple[str, bool]:
    """The format by a file's name, and whether it is one of a video. Raises InvalidParameter."""
    from unfuse.client.result import NUMBERED

    if output.is_dir():
        raise InvalidParameter(f"-o {output} is a folder: name a file in it, such as {output / 'out.png'}", "output")
    form, numbered = FORMATS.get(output.suffix.lower()), NUMBERED.search(output.name) is not None
    if form is None or (numbered and form != "png"):
        raise InvalidParameter(f"-o {output}: the name must end in one of {', '.join(FORMATS)}", "output")
    if not output.parent.is_dir():
        raise InvalidParameter(f"-o {output}: there is no folder {output.parent}", "output")
    try:
        with output.open("ab") if output.exists() else tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise InvalidParameter(f"-o {output}: it cannot be written there ({error.strerror})", "output") from error
    return form, form == "mp4" or numbered


def json_of(file: Path) -> Any:
    """What a JSON file says. Raises InvalidParameter for one that cannot be read."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{file} cannot be read as JSON: {error}") from error
