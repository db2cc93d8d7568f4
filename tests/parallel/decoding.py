"""One rank of several that decode together: `decoding.py RANK SIZE RENDEZVOUS ROOT`, with tasks as JSON on its input.

Each task is a job, and with how many others it shares a forward. All encode the job's picture together, if it has one.
Each rank makes the latents for itself, and saves them and the frames that all decode as `TASK RANK.npz`, by number, in
the rendezvous' folder; it prints a line for each task: how many numbers its own VAE encoded and decoded.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.models import conftest as c
from unfuse.core.compute_options import ParallelDegrees
from unfuse.models import base, find, modular
from unfuse.models.base import Loader, RuntimeOptions
from unfuse.parallel.group import Group
from unfuse.stages.base import Stage, StageInput, StageOutput
from unfuse.stages.vae_decode import VaeDecode

LIMIT_S = 60.0

given: Counter[str] = Counter()
"""Numbers that encoders and decoders of this process were given."""


class Counting(Loader):
    """Loads VAEs that note what their encoders and decoders run on."""

    def vae(self) -> Any:
        vae = super().vae()
        for part in ("encoder", "decoder"):
            first = getattr(vae, part).conv_in
            first.register_forward_hook(lambda _, args, _made, part=part: given.update({part: args[0].numel()}))
        return vae


def stages(folder: Path, dtype: str, group: Group) -> dict[str, Stage]:
    family = find(folder)
    card = family.model_spec("model", folder, dtype)
    made = {}
    for spec in card.pipeline.stages:
        mesh = group.mesh(ParallelDegrees({"tiles": group.size})) if "tiles" in spec.parallelism else None
        made[spec.name] = family.load(spec, folder, RuntimeOptions("cpu", card.dtypes, c.EXACT, mesh=mesh, group=group))
    return made


def decoded(stage: Stage, tasks: list[StageInput]) -> list[StageOutput]:
    """All of them together, where the stage takes them so."""
    if not isinstance(stage, VaeDecode):
        return stage.run(tasks)
    return [stage.finish(state) for state in stage.step([stage.start(task) for task in tasks])]


def main(rank: int, size: int, rendezvous: Path, root: Path) -> None:
    torch.set_num_threads(1)
    group = Group(rank, size, str(rendezvous), "cpu", LIMIT_S)
    tiny, jobs = c.Undivided(root), {job.name: job for job in c.TILED}
    for number, (name, mates) in enumerate(json.load(sys.stdin)):
        job = jobs[name]
        loaded = stages(tiny.folder(job.model), job.dtype, group)
        given.clear()
        with group.together():
            encoded = c.encode(loaded, job.params, tiny.uploads(job.params))
        latents = c.run(loaded["denoise"], job.params, encoded).tensors["latents"]
        params = {**job.params, "output_format": "png"}
        tasks = [StageInput(params, {"latents": own}) for own in (latents, *[-latents] * mates)]
        with group.together():
            output, *_ = decoded(loaded["vae_decode"], tasks)
        made = {"latents": latents.float().numpy(), "pixels": c.frames(output.media)}
        np.savez(rendezvous.with_name(f"{number} {rank}.npz"), **made)
        print(given["encoder"], given["decoder"], flush=True)
    group.close()


if __name__ == "__main__":
    base.Loader = modular.Loader = Counting  # type: ignore[misc]
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
