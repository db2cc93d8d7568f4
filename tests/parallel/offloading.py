"""Ranks whose shards are in host memory: `offloading.py RANK SIZE RENDEZVOUS`; the kind of device is JSON on its input.

The kinds are cpu, gpu (a pretended one for each rank), and refused: such a GPU, whose driver pins nothing. Each rank
prints a JSON object with what it found.
"""

import gc
import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential

from tests.pretend.gpus import PretendedGpus
from unfuse.core.compute_options import ParallelDegrees
from unfuse.parallel.group import Group, Mesh
from unfuse.parallel.parallel_plan import ParallelPlan, TensorParallelLayers
from unfuse.parallel.spreading import parallelize
from unfuse.weights.offload import offload_model
from unfuse.weights.pinned import offloading_shards
from unfuse.weights.shared import resident_tensors

LIMIT_S = 60.0
PLAN = ParallelPlan(("0",), "", (), {}, (), TensorParallelLayers((), (), ()))
ALIGNMENT = 256


def network() -> Module:
    """Three blocks and a layer behind them: with numbers of rows that ranks cannot divide evenly, among them one."""
    torch.manual_seed(0)
    return Sequential(Sequential(Linear(6, 70), Linear(70, 1), Linear(1, 55)), Linear(55, 6))


def sharded(mesh: Mesh) -> Module:
    model = network()
    parallelize(model, PLAN, mesh)
    return model


def offloaded(mesh: Mesh, device: torch.device) -> Module:
    model = network()
    with offloading_shards(model, mesh.degrees["shard"], device) as policy:
        parallelize(model, PLAN, mesh, policy)
    return offload_model(model, device, "model", is_sharded=True)


def outputs(group: Group, model: Module, device: torch.device) -> list[float]:
    """Those of two forwards."""
    found = []
    for seed in range(2):
        generator = torch.Generator("cpu").manual_seed(seed)
        given = torch.randn(4, 6, generator=generator).to(device)
        with group.together(), torch.no_grad():
            found += model(given).flatten().cpu().tolist()
    return found


def shard_size(tensor: Tensor, ranks: int) -> int:
    """The bytes of a rank's shard in its buffer. All shards are as long as the first."""
    rows = -(-tensor.shape[0] // ranks) * tensor[0].nbytes
    return -(-rows // ALIGNMENT) * ALIGNMENT


def facts(group: Group, device: torch.device, gpus: PretendedGpus | None) -> dict[str, Any]:
    mesh = group.mesh(ParallelDegrees({"shard": group.size}))
    expected = outputs(group, sharded(mesh), device)
    neighbour = offload_model(Linear(6, 6), device, "model")
    places = {tensor.data_ptr() for tensor in neighbour.parameters()}
    if gpus:
        gpus.records.clear()
    model = offloaded(mesh, device)
    buffers = {tensor.untyped_storage().data_ptr() for tensor in resident_tensors(model) if tensor.numel()}
    with torch.no_grad():
        neighbour(torch.ones(1, 6).to(device))
    loaded = places.isdisjoint(tensor.data_ptr() for tensor in neighbour.parameters())
    found = outputs(group, model, device)
    said = {
        "equal": found == expected,
        "devices": sorted({tensor.device.type for tensor in resident_tensors(model)}),
        "neighbour was loaded": loaded,
        "neighbour was unloaded": places == {tensor.data_ptr() for tensor in neighbour.parameters()},
    }
    if gpus:
        shards = sum(shard_size(tensor, group.size) for tensor in network().parameters())
        own = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in neighbour.parameters())
        copies = sorted({call.name for call in gpus.records.calls if call.name.startswith("copy cpu to cuda")})
        said |= {
            "one buffer": len(buffers) == 1,
            "registered": sorted(gpus.memory.registered.values()) == sorted([shards, own]),
            "pinned by torch": gpus.memory.pinned,
            "copies": copies,
        }
        del model
        gc.collect()  # FSDP has cycles of references
        said["released"] = [*gpus.memory.registered.values()] == [own]
    return said


def main(rank: int, size: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    kind = json.load(sys.stdin)
    gpus = None if kind == "cpu" else PretendedGpus(count=size)
    with gpus or nullcontext():
        if gpus and kind == "refused":
            gpus.memory.registrable = 0
        name = f"cuda:{rank}" if gpus else "cpu"
        group = Group(rank, size, rendezvous, name, LIMIT_S)
        print(json.dumps(facts(group, torch.device(name), gpus)), flush=True)
        group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
