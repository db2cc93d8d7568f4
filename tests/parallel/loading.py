"""Ranks that load models: `loading.py RANK SIZE RENDEZVOUS ROOT`; models, --dtype and spreads are JSON on its input.

Each prints, a line a component: its model and name, what of it is otherwise than where a rank loads it alone, bytes of
its tensors, how many of these are in memory that all ranks have, and whether files have others. Or why it cannot be
loaded.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from tests.models import conftest as c
from unfuse.core.compute_options import ParallelDegrees
from unfuse.core.errors import ConfigError
from unfuse.models import find
from unfuse.models.base import Loader, RuntimeOptions
from unfuse.parallel.group import Group
from unfuse.weights.folder import ModelFolder
from unfuse.weights.shared import resident_tensors

LIMIT_S = 60.0


def tensors(model: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All that a model computes with: weights, buffers, and what its modules keep beside."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return same and (one.data_ptr() - other.data_ptr()) % 64 == 0 and torch.equal(raw(one), raw(other))


def differing(together: Any, alone: Any) -> list[str]:
    found, wanted = dict(tensors(together)), dict(tensors(alone))
    wrong = [name for name in found.keys() & wanted.keys() if not equal(found[name], wanted[name])]
    return [*wrong, *(found.keys() ^ wanted.keys())]


def common(model: Module) -> int:
    """Bytes of a model's tensors that lie in memory that others have too."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if "memfd:weights" in line]
    return sum(one.nbytes for one in resident_tensors(model) if any(a <= one.data_ptr() < b for a, b in maps))


def main(rank: int, size: int, rendezvous: str, root: Path) -> None:
    torch.set_num_threads(1)
    group = Group(rank, size, rendezvous, "cpu", LIMIT_S)
    for model, dtype, spread in json.load(sys.stdin):
        folder = ModelFolder(root / model)
        family = find(folder.path)
        card = family.model_spec("model", folder.path, dtype)
        mesh = group.mesh(ParallelDegrees.parse(spread)) if spread else None
        runtime = RuntimeOptions("cpu", card.dtypes, c.EXACT, mesh=mesh, group=group)
        loader = Loader(folder, family.components(folder), runtime, None, family.parallel_plans)
        for component in dict.fromkeys(name for stage in card.pipeline.stages for name in stage.components):
            if not folder.weight_names(component):
                continue
            try:
                made = loader.model(component)
            except ConfigError as error:
                print(json.dumps([model, component, str(error)]), flush=True)
                continue
            wrong = [] if spread else differing(made, loader.for_this_rank.model(component))
            size, own = (
                sum(one.nbytes for one in resident_tensors(made)),
                not folder.stores_dtype(component, card.dtypes[component]),
            )
            print(json.dumps([model, component, wrong, size, common(made), own]), flush=True)
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
