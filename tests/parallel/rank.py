"""One rank of several that make latents together: `rank.py RANK SIZE RENDEZVOUS ROOT`, with tasks as JSON on its input.

Each task is a spread (of the denoiser, or ROLE=SPREAD) and a job of the families' tests. Rank 0 saves the latents as
`SPREAD JOB.npy` in the rendezvous' folder, and beside them, as `SPREAD JOB.json`, whether this processor multiplies a
share of the tokens as it multiplies all. The spread "copied" is none, with weights that lie in memory as torch
allocates it, not as files are mapped. With "offloaded" behind a spread, shards are in host memory.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from msgspec.structs import replace
from torch.nn.functional import linear
from torch.nn.modules.module import register_module_forward_hook

from tests.models import conftest as c
from unfuse.core.compute_options import ParallelDegrees
from unfuse.core.derived_facts import DerivedFacts
from unfuse.models import base, find
from unfuse.models.base import Loader, RuntimeOptions
from unfuse.parallel import sequence
from unfuse.parallel.group import Group
from unfuse.stages.base import Stage, StageInput
from unfuse.weights.adapters import AdapterFolder
from unfuse.weights.shared import resident_tensors

LIMIT_S = 60.0
OFFLOADED = " offloaded"


def _copied(loader: Loader, model: torch.nn.Module, *_: object, **__: object) -> torch.nn.Module:
    for tensor in resident_tensors(model):
        tensor.data = tensor.data.clone()
    return model


class Products:
    """Holds the products of matrices that are made of a share of the tokens to the same ones made of all."""

    def __init__(self) -> None:
        self.alike = True
        self._shares: sequence.SequenceShares | None = None
        self._seen: set[tuple[object, ...]] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.alike, self._shares = True, None
        self._seen.clear()
        share = sequence.SequenceShares.padded_share

        def noted(shares: sequence.SequenceShares, segment: str) -> int:
            self._shares = shares
            return share(shares, segment)

        hook = register_module_forward_hook(self._compare)
        try:
            with patch.object(sequence.SequenceShares, "padded_share", noted):
                yield
        finally:
            hook.remove()

    def _compare(self, module: torch.nn.Module, given: tuple[torch.Tensor], made: torch.Tensor) -> None:
        if not (self._shares and isinstance(module, torch.nn.Linear) and given[0].dim() == 3):
            return
        rows, shares = given[0].shape[1], self._shares
        each = {shares.padded_share(segment): shares.lengths[segment] for segment in shares.order}
        whole = ({sum(map(shares.padded_share, shares.order)): shares.total_tokens} | each).get(rows)
        seen = module.weight.shape, module.weight.dtype, given[0].shape, whole
        if whole is None or seen in self._seen:
            return
        self._seen.add(seen)
        together = linear(given[0].repeat(1, shares.axis.size, 1)[:, :whole], module.weight, module.bias)
        self.alike &= all(torch.equal(part, made[:, : part.shape[1]]) for part in together.split(rows, 1))


def main(rank: int, size: int, rendezvous: Path, root: Path) -> None:
    torch.set_num_threads(1)
    group = Group(rank, size, str(rendezvous), "cpu", LIMIT_S)
    tiny, products = c.Undivided(root), Products()

    @cache
    def stage(model: str, dtype: str, kind: str, spread: str, loras: str) -> list[Stage]:
        folder = tiny.folder(model)
        family = find(folder)
        card = family.model_spec("model", folder, dtype)
        mesh = group.mesh(ParallelDegrees.parse(spread.removesuffix(OFFLOADED))) if ":" in spread else None
        offload = "transformer=model,transformer_2=model" if spread.endswith(OFFLOADED) else "none"
        runtime = RuntimeOptions("cpu", card.dtypes, replace(c.EXACT, offload=offload), loras, mesh, group=group)
        specs = [spec for spec in card.pipeline.stages if kind in spec.name]
        stand_in = patch.object(base, "require_gpu")  # the host stands in for a GPU
        with stand_in, patch.object(Loader, "_place", _copied) if spread == "copied" else nullcontext():
            return [family.load(spec, folder, runtime) for spec in specs]

    for spread, name in json.load(sys.stdin):
        job = {job.name: job for job in [*c.JOBS, *c.LORA_JOBS, *c.TILED]}[name]
        params, loras = dict(job.params), str(root / "loras") if "lora" in job.params else ""
        lora_id = AdapterFolder(loras).ids_of(params["lora"]) if loras else ""
        by_role = dict(each.split("=") for each in spread.split(",")) if "=" in spread else {"denoiser": spread}
        encoders = stage(job.model, job.dtype, "encode", by_role.get("encoder", ""), "")
        encoded, uploads = {}, tiny.uploads(job.params)
        for encoder in (one for one in encoders if {*one.uploads} <= uploads.keys()):
            with group.together():
                encoded |= c.run(encoder, job.params, None, uploads).tensors
        (denoise,) = stage(job.model, job.dtype, "denoise", by_role.get("denoiser", ""), loras)
        task = StageInput({**params, "output_format": "png"}, encoded, derived=DerivedFacts(lora_id=lora_id))
        denoise.verify(task)
        with group.together(), products.watched():
            (made,) = denoise.run([task])
        if rank == 0:
            np.save(rendezvous.with_name(f"{spread} {name}.npy"), made.tensors["latents"].float().numpy())
            rendezvous.with_name(f"{spread} {name}.json").write_text(json.dumps(products.alike))
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
