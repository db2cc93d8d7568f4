"""The same model as one diffusers pipeline in one process, for comparison: `python -m unfuse.models.undivided`.

It reads JSON lines: first an Undivided, then pairs of how many CPU threads to use and parameters as stages get them. It
answers each with a line: the SHA-256 of every file. It encodes as the decoder stage does: equal pixels, equal files.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec

from unfuse.core.pixels import read_rgb
from unfuse.core.plan import Params
from unfuse.models.undivided_family import casting
from unfuse.stages.base import need
from unfuse.stages.media import encode

IMAGE = "image"


class Undivided(msgspec.Struct, frozen=True):
    """The folder of the model to load, with its device and dtypes.

    `dtypes`: the dtype of each component.
    `image`: the path of a picture, for models that take one.
    """

    folder: str
    device: str
    dtypes: dict[str, str]
    image: str = ""


def main() -> None:
    """Load the model, then answer requests until the input ends."""
    asked = msgspec.json.decode(sys.stdin.readline(), type=Undivided)
    pipeline = _load(asked)
    _say(())
    for line in sys.stdin:
        threads, params = msgspec.json.decode(line, type=tuple[int, dict[str, Any]])
        _say(_make(pipeline, asked, threads, params))


def _say(digests: tuple[str, ...]) -> None:
    sys.stdout.write(msgspec.json.encode(digests).decode() + "\n")
    sys.stdout.flush()


def _load(asked: Undivided) -> Any:
    import torch
    from diffusers import DiffusionPipeline
    from diffusers.utils.logging import disable_progress_bar
    from transformers.utils.logging import disable_progress_bar as transformers_quiet

    disable_progress_bar()
    transformers_quiet()
    dtypes = {name: getattr(torch, dtype) for name, dtype in asked.dtypes.items()}
    pipeline = DiffusionPipeline.from_pretrained(asked.folder, dtype={**dtypes, "default": torch.float32})
    pipeline.set_progress_bar_config(disable=True)
    casting(pipeline.vae)
    return pipeline.to(asked.device)


def _make(pipeline: Any, asked: Undivided, threads: int, params: Params) -> tuple[str, ...]:
    import torch

    torch.set_num_threads(threads)
    known = inspect.signature(pipeline.__call__).parameters
    given: dict[str, Any] = {name: value for name, value in params.items() if name in known and value is not None}
    given |= {"frame_rate": params["fps"]} if "frame_rate" in known else {}
    given |= {"max_area": need(params, "width", int) * need(params, "height", int)} if "max_area" in known else {}
    if IMAGE in known and asked.image:
        given[IMAGE] = read_rgb(Path(asked.image).read_bytes())
    seed = int(params["seed"] or 0)
    torch.manual_seed(seed)
    given["generator"] = torch.Generator("cpu").manual_seed(seed)
    output = pipeline(**given, output_type="np")
    frames = output.frames[0] if hasattr(output, "frames") else output.images
    files = encode((frames * 255).round().astype("uint8"), params)
    return tuple(hashlib.sha256(file.data).hexdigest() for file in files)


if __name__ == "__main__":
    main()
