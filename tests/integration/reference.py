"""The undivided pipeline, in a process that cannot import what it judges.

Usage: python -I reference.py FOLDER OUT.json CASES.json; each case holds WanPipeline arguments and a seed; the answer
lists the SHA-256 of every picture's RGB bytes.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.modules["unfuse"] = None  # type: ignore[assignment]  # whoever tries to import it here gets an ImportError

import torch  # noqa: E402
from diffusers import WanPipeline  # noqa: E402


def main() -> None:
    folder, out, cases = sys.argv[1:]
    torch.set_num_threads(1)
    pipeline = WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    digests = []
    for case in json.loads(Path(cases).read_text()):
        seed = case.pop("seed")
        frames = pipeline(**case, generator=torch.Generator("cpu").manual_seed(seed), output_type="np").frames[0]
        pixels = (frames * 255).round().astype("uint8")
        digests.append([hashlib.sha256(frame.tobytes()).hexdigest() for frame in pixels])
    Path(out).write_text(json.dumps(digests))


main()
