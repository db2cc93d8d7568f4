"""What checkpoints cost, and what they save.

Cost: a denoising that is saved after every step against one that is not, in this process, stores included; the bytes
and the milliseconds of one. Saving: a denoiser is killed (`kill -9`) at a random step of 50, with a checkpoint every 10
in a durable store, and another one takes over: the steps made twice, against all that the killed one had made.
`python -m bench.resume [REPETITIONS]`
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from bench.model import PROMPTS, Case, Model, advance
from bench.report import ratio, show, spread
from bench.steps import SIZES
from tools.server import serving, until
from unfuse.models import resolve_source
from unfuse.stages.denoise import Denoise, DenoiseState
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.checkpoints import pack

REPETITIONS, STEPS, EVERY = 15, 50, 10
VIDEO = {"prompt": PROMPTS[1], "size": "256x256", "num_frames": 9, "num_inference_steps": STEPS, "output_format": "png"}


def kept(stage: Denoise, state: DenoiseState, store: TensorStore, about: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds until a state is in the arena, seconds until its copy is on the disk, and its bytes."""
    began = time.perf_counter()
    checkpoint = stage.save(state)
    assert checkpoint is not None
    ref = store.put(pack(checkpoint), **about)
    there = time.perf_counter()
    store.save(ref)
    durable = time.perf_counter()
    store.delete(ref)
    return there - began, durable - there, ref.nbytes


def cost(case: Case, store: TensorStore, repetitions: int) -> dict[str, Any]:
    """Requests stepped alone, in pairs: one saved after every step but the last, one not at all."""
    stage, plain_s, saved_s, arena_s, disk_s = case.model.denoise("apart"), [], [], [], []
    nbytes = 0
    for seed in range(repetitions):
        for save in (False, True):
            (state,) = case.start(stage, [seed])
            taken = 0.0
            for step in range(case.steps):
                began = time.perf_counter()
                (state,) = advance(stage, [state])
                taken += time.perf_counter() - began
                if save and step + 1 < case.steps:
                    put, copied, nbytes = kept(stage, state, store, {"request": "req_0", "stage": "d", "attempt": 1})
                    taken += put
                    arena_s.append(put)
                    disk_s.append(copied)
            (saved_s if save else plain_s).append(taken)
    return {
        "bytes": nbytes,
        "arena_ms": {name: round(1e3 * value, 3) for name, value in spread(arena_s).items() if name != "n"},
        "disk_ms": {name: round(1e3 * value, 3) for name, value in spread(disk_s).items() if name != "n"},
        "every_step_over_none": ratio(saved_s, plain_s)["p50"],
    }


def saving(repetitions: int) -> dict[str, Any]:
    """Steps by kill, through real processes."""
    drawn, rows = random.Random(0), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["--workers", "none", "--checkpoint", str(EVERY), "--durable", f"disk:{folder / 'copies'}"]
        with serving(folder, *arguments, UNFUSE_LEASE__TTL_S="2") as server:
            until(lambda: server.get("/health"), "the server to answer", server.process)
            server.worker("encoder")
            server.worker("decoder")
            for _ in range(repetitions):
                denoiser, at = server.worker("denoiser"), drawn.randint(EVERY, STEPS - 5)
                id, reached = str(server.post("/v1/videos", {**VIDEO, "seed": 1})["id"]), 0
                for event in server.events(id):
                    reached = event["step"] if event["type"] == "progress" else reached
                    if reached >= at:
                        break
                server.killed(denoiser)
                other = server.worker("denoiser")
                stages = server.finished(id)["stages"]
                server.killed(other)
                resumed = next(stage["resumed"] for stage in stages if stage["name"] == "denoise.0")
                rows.append({"reached": reached, "resumed": resumed})
    twice, lost = [row["reached"] - row["resumed"] for row in rows], [row["reached"] for row in rows]
    return {
        "kills": rows,
        "steps_made_twice": round(mean(twice), 1),
        "without_checkpoints": round(mean(lost), 1),
        "work_saved": round(1 - sum(twice) / sum(lost), 3),
    }


def main() -> None:
    repetitions = int(sys.argv[1]) if sys.argv[1:] else REPETITIONS
    torch.set_num_threads(1)
    model = Model(resolve_source("unfuse/shapes"))
    made = [model.encode(model.params(seed)) for seed in range(len(PROMPTS))]
    with (
        tempfile.TemporaryDirectory() as folder,
        TensorStore.create("shared_memory", capacity=1 << 28, durable=f"disk:{folder}") as store,
    ):
        found = {name: cost(Case(model, made, size, 20), store, repetitions) for name, size in SIZES.items()}
    show("resume", cost=found, saving=saving(repetitions))


if __name__ == "__main__":
    main()
