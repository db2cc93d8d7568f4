"""One rank of several that make latents together: `rank.py RANK SIZE RENDEZVOUS ROOT`, with tasks as JSON on its input.

Each task is a spread (of the denoiser, or ROLE=SPREAD) and a job of the families' tests. Rank 0 saves the latents as
`SPREAD JOB.npy` in the rendezvous' folder. The spread "copied" is none, with weights that lie in memory as torch
allocates it, not as files are mapped.
"""

import json
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from tests.models import conftest as c
from unfuse.core.spread import Spread
from unfuse.models import find
from unfuse.models.base import Loader, Runtime, held
from unfuse.parallel.group import Group
from unfuse.stages.adapters import Loras
from unfuse.stages.base import Stage, StageInput

LIMIT_S = 60.0


def _copied(loader: Loader, model: torch.nn.Module) -> torch.nn.Module:
    for tensor in held(model):
        tensor.data = tensor.data.clone()
    return model


def main(rank: int, size: int, rendezvous: Path, root: Path) -> None:
    torch.set_num_threads(1)
    group = Group(rank, size, str(rendezvous), "cpu", LIMIT_S)
    tiny = c.Undivided(root)

    @cache
    def stage(model: str, dtype: str, kind: str, spread: str, loras: str) -> list[Stage]:
        folder = tiny.folder(model)
        family = find(folder)
        card = family.card("model", folder, dtype)
        mesh = group.mesh(Spread.parse(spread)) if ":" in spread else None
        runtime = Runtime("cpu", card.dtypes, c.EXACT, loras, mesh, group=group)
        specs = [spec for spec in card.pipeline.stages if kind in spec.name]
        with patch.object(Loader, "_settle", _copied) if spread == "copied" else nullcontext():
            return [family.load(spec, folder, runtime) for spec in specs]

    for spread, name in json.load(sys.stdin):
        job = {job.name: job for job in [*c.JOBS, *c.LORA_JOBS, *c.TILED]}[name]
        params, loras = dict(job.params), str(root / "loras") if "lora" in job.params else ""
        if loras:
            params["lora_id"] = Loras(loras).id_of(params["lora"])
        by_role = dict(each.split("=") for each in spread.split(",")) if "=" in spread else {"denoiser": spread}
        encoders = stage(job.model, job.dtype, "encode", by_role.get("encoder", ""), "")
        encoded = {}
        for encoder in encoders:
            with group.together():
                encoded |= c.run(encoder, job.params, None, tiny.uploads(job.params)).tensors
        (denoise,) = stage(job.model, job.dtype, "denoise", by_role.get("denoiser", ""), loras)
        task = StageInput({**params, "output_format": "png"}, encoded)
        denoise.verify(task)
        with group.together():
            (made,) = denoise.run([task])
        if rank == 0:
            np.save(rendezvous.with_name(f"{spread} {name}.npy"), made.tensors["latents"].float().numpy())
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
