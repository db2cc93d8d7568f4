"""The undivided diffusers pipeline in a process of its own, for comparison: `python -m unfuse.models.undivided`.

The process reads JSON lines. The first one is an Undivided. Each further one is a pair: a number of CPU threads, and
the parameters of a request in the form in which stages get them. The process answers each line with a line, the SHA-256
of each result file. The answer to the first line is an empty list. Files are encoded as in the decoder stage, so equal
pixels give equal files.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec

from unfuse.core.compute_options import NATIVE_ATTENTION, Fp32Precision
from unfuse.core.pixels import read_rgb
from unfuse.core.plan import Params
from unfuse.models.undivided_family import casting
from unfuse.stages.attention import set_attention
from unfuse.stages.base import need
from unfuse.stages.media import encode

#: The calls' parameter for the start image.
IMAGE = "image"


class Undivided(msgspec.Struct, frozen=True):
    """The first line that the process reads: which model to load, and how."""

    #: The path of the model's folder.
    folder: str
    #: The device on which all components run.
    device: str
    #: The dtype of each component.
    dtypes: dict[str, str]
    #: The path of the start image of all requests, for models with image input; "" for none.
    image: str = ""
    #: How float32 is computed on a CUDA device, as in workers.
    fp32_precision: Fp32Precision = "ieee"
    #: The attention backend of its denoiser, as in workers.
    attention: str = NATIVE_ATTENTION


def main() -> None:
    """Load the model, then run requests until the input ends."""
    model = msgspec.json.decode(sys.stdin.readline(), type=Undivided)
    pipeline = _load(model)
    _write_line(())
    for line in sys.stdin:
        threads, params = msgspec.json.decode(line, type=tuple[int, dict[str, Any]])
        _write_line(_generate(pipeline, model, threads, params))


def _write_line(digests: tuple[str, ...]) -> None:
    sys.stdout.write(msgspec.json.encode(digests).decode() + "\n")
    sys.stdout.flush()


def _load(model: Undivided) -> Any:
    """Return the pipeline on its device."""
    import torch
    from diffusers import DiffusionPipeline
    from diffusers.utils.logging import disable_progress_bar
    from transformers.utils.logging import disable_progress_bar as transformers_quiet

    from unfuse.parallel.kernel_flags import set_kernel_flags

    disable_progress_bar()
    transformers_quiet()
    set_kernel_flags(model.device, model.fp32_precision)
    dtypes = {name: getattr(torch, dtype) for name, dtype in model.dtypes.items()}
    pipeline = DiffusionPipeline.from_pretrained(model.folder, dtype={**dtypes, "default": torch.float32})
    pipeline.set_progress_bar_config(disable=True)
    casting(pipeline.vae)
    pipeline.to(model.device)
    for name, component in pipeline.components.items():
        set_attention(component, model.attention, name, torch.device(model.device).type)
    return pipeline


def _generate(pipeline: Any, model: Undivided, threads: int, params: Params) -> tuple[str, ...]:
    """Run a request. Returns the SHA-256 of each result file."""
    import torch

    torch.set_num_threads(threads)
    accepted = inspect.signature(pipeline.__call__).parameters
    arguments: dict[str, Any] = {
        name: value for name, value in params.items() if name in accepted and value is not None
    }
    arguments |= {"frame_rate": params["fps"]} if "frame_rate" in accepted else {}
    # Kontext makes the requested size only if `max_area` has as many pixels.
    arguments |= (
        {"max_area": need(params, "width", int) * need(params, "height", int)} if "max_area" in accepted else {}
    )
    if IMAGE in accepted and model.image:
        arguments[IMAGE] = read_rgb(Path(model.image).read_bytes())

    # Some pipelines and noise schedulers draw from the global random state instead of the generator.
    seed = int(params["seed"] or 0)
    torch.manual_seed(seed)
    arguments["generator"] = torch.Generator("cpu").manual_seed(seed)
    output = pipeline(**arguments, output_type="np")

    frames = output.frames[0] if hasattr(output, "frames") else output.images
    files = encode((frames * 255).round().astype("uint8"), params)
    return tuple(hashlib.sha256(file.data).hexdigest() for file in files)


if __name__ == "__main__":
    main()
