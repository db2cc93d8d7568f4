"""One rank of several that decode together: `decoding.py RANK SIZE RENDEZVOUS ROOT`, with tasks as JSON on its input.

Each task is a job, and with how many others it shares a forward. Each rank makes the job's latents for itself and saves
the frames that all decode as `TASK RANK.npy`, by number, in the rendezvous' folder; it prints a line for each task: how
many latents its own decoder was given.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.models import conftest as c
from unfuse.core.spread import Spread
from unfuse.models import base, find, modular
from unfuse.models.base import Loader, Runtime
from unfuse.parallel.group import Group
from unfuse.stages.base import Stage, StageInput, StageOutput
from unfuse.stages.specs import VAE_DECODE
from unfuse.stages.vae_decode import VaeDecode

LIMIT_S = 60.0

given: list[int] = []
"""Numbers that decoders of this process were given, a call each."""


class Counting(Loader):
    """Loads VAEs that note what their decoders run on."""

    def vae(self) -> Any:
        vae = super().vae()
        vae.decoder.conv_in.register_forward_hook(lambda _module, args, _made: given.append(args[0].numel()))
        return vae


def stages(folder: Path, dtype: str, group: Group) -> dict[str, Stage]:
    family = find(folder)
    card = family.card("model", folder, dtype)
    made = {}
    for spec in card.pipeline.stages:
        mesh = group.mesh(Spread({"tiles": group.size})) if spec.kind == VAE_DECODE.kind else None
        made[spec.name] = family.load(spec, folder, Runtime("cpu", card.dtypes, c.EXACT, mesh=mesh))
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
        encoded = c.encode(loaded, job.params, tiny.uploads(job.params))
        latents = c.run(loaded["denoise"], job.params, encoded).tensors["latents"]
        params = {**job.params, "output_format": "png"}
        tasks = [StageInput(params, {"latents": own}) for own in (latents, *[-latents] * mates)]
        given.clear()
        with group.together():
            output, *_ = decoded(loaded["vae_decode"], tasks)
        np.save(rendezvous.with_name(f"{number} {rank}.npy"), c.frames(output.media))
        print(sum(given), flush=True)
    group.close()


if __name__ == "__main__":
    base.Loader = modular.Loader = Counting  # type: ignore[misc]
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
