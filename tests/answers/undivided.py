"""What diffusers makes of calls: run as a script, in a process that cannot import unfuse.

    python -I undivided.py OUT < jobs.json

Each job {name, folder, seed, params, dtype} is a call of the pipeline that the folder names. It draws as a script does
that calls `torch.manual_seed(seed)` and gives the call a generator of the same seed. OUT/NAME.npy has the pixels
(frames, height, width, 3; uint8), OUT/NAME.json what the safety checker said. A job that `may_fail` leaves the error
there instead.
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
        try:
            pixels, flags = call(job)
        except Exception as error:
            if not job.get("may_fail"):
                raise
            (out / f"{job['name']}.json").write_text(json.dumps({"error": repr(error)}))
            continue
        np.save(out / f"{job['name']}.npy", pixels)
        (out / f"{job['name']}.json").write_text(json.dumps(flags))


def call(job: dict) -> tuple[np.ndarray, object]:
    """The pixels of a call, and what the safety checker said of them."""
    pipe = DiffusionPipeline.from_pretrained(job["folder"], torch_dtype=getattr(torch, job["dtype"]))
    pipe.set_progress_bar_config(disable=True)
    known = inspect.signature(pipe.__call__).parameters
    given = {name: value for name, value in job["params"].items() if name in known}
    torch.manual_seed(job["seed"])
    made = pipe(**given, generator=torch.Generator("cpu").manual_seed(job["seed"]), output_type="np")
    frames = made.frames[0] if hasattr(made, "frames") else made.images
    return (np.asarray(frames) * 255).round().astype(np.uint8), getattr(made, "nsfw_content_detected", None)


main()
