"""Ranks of which one may fail: `failing.py RANK SIZE RENDEZVOUS`, with the scenario as JSON on its input.

Each rank prints what it got of each step, a line each.
"""

import json
import os
import signal
import sys
import time

import torch
from torch.nn import Linear, Sequential

from unfuse.core.compute_options import ParallelDegrees
from unfuse.parallel.group import Axis, Group
from unfuse.parallel.parallel_plan import ParallelPlan, TensorParallelLayers
from unfuse.parallel.spreading import shard_weights

BEFORE: dict[str, Exception] = {
    "before": ValueError("no such thing"),
    "device before": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "memory": torch.OutOfMemoryError("the device is full"),
}
"""Errors before the first exchange of a step, and below amid the exchanges."""

AMID: dict[str, Exception] = {
    "amid": ValueError("too late"),
    "device amid": RuntimeError("CUDA error: unspecified launch failure"),
}

LIMIT_S = 3.0
LINGER_S = 2.0


@torch.no_grad()
def lent(group: Group, model: torch.nn.Module, how: str) -> str:
    """One step of a model whose weights all ranks lend each other; rank 1 fails as `how` says."""
    fails = group.rank == 1
    with group.together():
        if how == "lent before" and fails:
            raise ValueError("no such thing")
        made = model(torch.ones(1, 2))
        if how == "lent stop" and fails:
            os.kill(os.getpid(), signal.SIGSTOP)
        return str([*model(made).shape])


def step(group: Group, axis: Axis, how: str) -> str:
    """One step; rank 1 fails as `how` says."""
    fails = group.rank == 1
    with group.together():
        if how in BEFORE and fails:
            raise BEFORE[how]
        if how == "both":
            raise ValueError(f"of rank {group.rank}")
        if how == "without":
            return "nothing exchanged"
        if how == "sum":
            own = torch.randn(5, 333, generator=torch.Generator().manual_seed(group.rank))
            rows = torch.cat([axis.sum(row) for row in own.split(1)])
            near = torch.allclose(rows, axis.gather(own).sum(0), atol=1e-5)
            return f"near: {near}, alone as together: {torch.equal(axis.sum(own), rows)}"
        if how == "beside":
            axis = group.mesh(ParallelDegrees({"tensor": group.size, "tiles": group.size})).axis("tiles")
        gathered = axis.gather(torch.full((2,), float(group.rank)))
        if how in AMID and fails:
            raise AMID[how]
        if how == "stop" and fails:
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "linger":
            time.sleep(LINGER_S)
        axis.gather(gathered)
        return str(gathered[:, 0].tolist())


def main(rank: int, size: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    group = Group(rank, size, rendezvous, "cpu", LIMIT_S)
    mesh = group.mesh(ParallelDegrees({"ulysses": size, "shard": size}))
    axis, model = mesh.axis("ulysses"), Sequential(Sequential(Linear(2, 2)))
    shard_weights(model, ParallelPlan(("0",), "", (), {}, (), TensorParallelLayers((), (), ())), mesh.axis("shard"))
    print(json.dumps([len(said) for said in group.exchange(b"x" * rank)]), flush=True)
    for how in json.load(sys.stdin):
        try:
            said = lent(group, model, how) if how.startswith("lent") else step(group, axis, how)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if how == "device amid":  # the other rank waits for an exchange, so the process ends as in a worker
                print(json.dumps(said), flush=True)
                os._exit(1)
        print(json.dumps(said), flush=True)
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
