"""The fused pipeline as a server would run it: reads one JSON case a line, answers with one line when the picture is
done.

Runs without unfuse: `python bench/undivided.py FOLDER THREADS`.
"""

import io
import json
import sys

import torch
from diffusers import WanPipeline
from PIL import Image


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    pipeline = WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    print("ready", flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        generator = torch.Generator("cpu").manual_seed(case.pop("seed"))
        frames = pipeline(**case, generator=generator, output_type="np").frames[0]
        Image.fromarray((frames[0] * 255).round().astype("uint8")).save(io.BytesIO(), "PNG", compress_level=1)
        print("done", flush=True)


main()
