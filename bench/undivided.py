"""The fused pipeline as a server would run it. Each line it reads is a JSON case, or a list of cases to be made
together, alike but for prompt and seed; each is answered with one line when its pictures are done.

Runs without unfuse: `python bench/undivided.py FOLDER THREADS [DEVICE [DTYPE [VAE_DTYPE]]]`. A case with `digest` is
answered with a digest of its pixels, one with `peak` with the bytes that torch has had on the device since the start.
"""

import hashlib
import io
import json
import sys

import diffusers
import torch
import transformers
from PIL import Image


def load(folder, device="cpu", dtype="float32", vae_dtype="float32"):
    dtypes = {"default": getattr(torch, dtype), "vae": getattr(torch, vae_dtype)}
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtypes).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make(pipeline, cases):
    """What the cases ask for: pictures (cases, frames, height, width, 3), written as PNG; returned as uint8."""
    generators = [torch.Generator("cpu").manual_seed(case.pop("seed")) for case in cases]
    prompts = [case.pop("prompt") for case in cases]
    made = pipeline(prompts, **cases[0], generator=generators, output_type="np")
    frames = made.frames if hasattr(made, "frames") else made.images[:, None]
    pixels = (frames * 255).round().astype("uint8")
    for frame in pixels.reshape(-1, *pixels.shape[2:]):
        Image.fromarray(frame).save(io.BytesIO(), "PNG", compress_level=1)
    return pixels


def main():
    torch.set_num_threads(int(sys.argv[2]))
    pipeline = load(sys.argv[1], *sys.argv[3:])
    print("ready", flush=True)
    for line in sys.stdin:
        read = json.loads(line)
        cases = read if isinstance(read, list) else [read]
        wanted = {name for case in cases for name in ("digest", "peak") if case.pop(name, None)}
        pixels, answer = make(pipeline, cases), {}
        if "digest" in wanted:
            answer["digest"] = hashlib.sha256(pixels.tobytes()).hexdigest()
        if "peak" in wanted and torch.cuda.is_available():
            answer["peak"] = torch.cuda.max_memory_allocated()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
