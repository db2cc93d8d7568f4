"""The undivided pipeline, in a process that cannot import what it judges.

Usage: python -I reference.py FOLDER OUT.json CASES.json; each case holds arguments of the folder's pipeline and a seed;
an image among them is a file, or several, with a `strength` one to be redrawn, where a `mask` is transparent if there,
`loras` are [file, scale] each, and a model is another folder. The answer
lists the SHA-256 of every picture's RGB bytes.
"""

import hashlib
import inspect
import json
import sys
from pathlib import Path

sys.modules["unfuse"] = None  # type: ignore[assignment]  # whoever tries to import it here gets an ImportError

import torch  # noqa: E402
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting, DiffusionPipeline  # noqa: E402
from diffusers.utils import load_image  # noqa: E402
from PIL import Image, ImageOps  # noqa: E402


def on_white(picture: Image.Image) -> Image.Image:
    """What is transparent is white, as transformers' processors have it; diffusers would show what is hidden there."""
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")


def load(folder: str, loras: str) -> DiffusionPipeline:
    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    scales = {}
    for file, scale in json.loads(loras):
        pipeline.load_lora_weights(file, adapter_name=Path(file).stem)
        scales[Path(file).stem] = scale
    if scales:
        pipeline.set_adapters([*scales], [*scales.values()])
    return pipeline


def redrawing(pipeline: DiffusionPipeline, case: dict) -> DiffusionPipeline:
    """The pipeline that starts from a picture, which some of them do not stretch; the mask becomes what it wants."""
    if "width" in case:
        case["image"] = case["image"].resize((case["width"], case["height"]), Image.Resampling.LANCZOS)
    if "mask" not in case:
        return AutoPipelineForImage2Image.from_pipe(pipeline)
    case["mask_image"] = ImageOps.invert(Image.open(case.pop("mask")).convert("RGBA").getchannel("A"))
    return AutoPipelineForInpainting.from_pipe(pipeline)


def main() -> None:
    folder, out, cases = sys.argv[1:]
    torch.set_num_threads(1)
    digests, pipelines = [], {}
    for case in json.loads(Path(cases).read_text()):
        asked = case.pop("model", folder), json.dumps(case.pop("loras", []))
        if asked not in pipelines:
            pipelines[asked] = load(*asked)
        pipeline = pipelines[asked]
        for name in case.keys() & {"image", "last_image"}:
            files = case[name] if isinstance(case[name], list) else [case[name]]
            case[name] = [load_image(file, on_white) for file in files] if files[1:] else load_image(files[0], on_white)
        if "strength" in case:
            pipeline = redrawing(pipeline, case)
            known = inspect.signature(pipeline.__call__).parameters
            case = {name: value for name, value in case.items() if name in {*known, "seed"}}
        generator = torch.Generator("cpu").manual_seed(case.pop("seed"))
        output = pipeline(**case, generator=generator, output_type="np")
        frames = output.frames[0] if hasattr(output, "frames") else output.images
        pixels = (frames * 255).round().astype("uint8")
        digests.append([hashlib.sha256(frame.tobytes()).hexdigest() for frame in pixels])
    Path(out).write_text(json.dumps(digests))


main()
