"""What diffusers makes of calls: run as a script, in a process that cannot import unfuse.

    python -I undivided.py OUT < jobs.json

Each job {name, folder, seed, params, dtype} is a call of the pipeline that the folder names. It draws as a script does
that calls `torch.manual_seed(seed)` and gives the call a generator of the same seed. OUT/NAME.npy has the pixels
(frames, height, width, 3; uint8), OUT/NAME.json what the safety checker said.
"""

import inspect
import json
import sys
from pathlib import Path

sys.modules["unfuse"] = None

import numpy as np  # noqa: E402
import torch  # noqa: E402
from diffusers import DiffusionPipeline  # noqa: E402


def main() -> None:
    """Run the jobs."""
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    for job in json.load(sys.stdin):
        pipe = DiffusionPipeline.from_pretrained(job["folder"], torch_dtype=getattr(torch, job["dtype"]))
        pipe.set_progress_bar_config(disable=True)
        known = inspect.signature(pipe.__call__).parameters
        given = {name: value for name, value in job["params"].items() if name in known}
        torch.manual_seed(job["seed"])
        made = pipe(**given, generator=torch.Generator("cpu").manual_seed(job["seed"]), output_type="np")
        frames = made.frames[0] if hasattr(made, "frames") else made.images
        np.save(out / f"{job['name']}.npy", (np.asarray(frames) * 255).round().astype(np.uint8))
        (out / f"{job['name']}.json").write_text(json.dumps(getattr(made, "nsfw_content_detected", None)))


main()
