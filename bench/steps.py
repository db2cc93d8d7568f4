"""What sharing a forward gives and takes: seconds of a denoising step by batch size, and the bytes that come out.

The denoise stage of the built-in model, in this process. Guidance halves apart against fused; a growing batch against
one that is always filled to 8; by threads. `python -m bench.steps [ROUNDS]`
"""

from __future__ import annotations

import io
import random
import sys
from collections import defaultdict
from hashlib import sha256
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bench.model import PROMPTS, Case, Halves, Model
from bench.report import ratio, show
from unfuse.models import resolve_source

HALVES: tuple[Halves, ...] = ("apart", "fused")
Kind = Literal["growing", "padded", "slots kept"]
KINDS: tuple[Kind, ...] = ("growing", "padded", "slots kept")
SIZES = {"128²": (128, 128, 1), "256²": (256, 256, 1), "128² × 9 frames": (128, 128, 9)}
PADDED = 8
BATCHES = (*range(1, PADDED + 1), 16)
ROUNDS = 9
STEPS = 3
"""Steps that are timed of a batch in a round."""

TRIALS = 4
"""Times that requests are denoised in other company, for their bytes."""

THREADS = (2, 3)
"""For the bytes, beside one. Three do not share 8 requests out evenly."""

POOL = PADDED + 4
"""Requests that the company is drawn from; another one pads."""


def cost(case: Case, rounds: int, batches: tuple[int, ...] = BATCHES) -> dict[str, Any]:
    """Seconds by batch size, and each task's part of them against one that is stepped alone with its halves apart."""
    found: dict[tuple[Halves, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for batch in batches:
            for halves in HALVES:
                found[halves, batch].append(case.step_seconds(halves, batch, STEPS))
    alone, table = found["apart", 1], {}
    for batch in batches:
        row: dict[str, Any] = {"fused_over_apart": ratio(found["fused", batch], found["apart", batch])["p50"]}
        for halves in HALVES:
            seconds = found[halves, batch]
            row[halves] = {
                "step_ms": round(median(seconds) * 1e3, 2),
                "task_ms": round(median(seconds) * 1e3 / batch, 2),
                "throughput_over_alone": ratio([one * batch for one in alone], seconds)["p50"],
            }
        if batch <= PADDED and PADDED in batches:
            full = found["fused", PADDED]
            row["padded_task_ms"] = round(median(full) * 1e3 / batch, 2)
            row["padded_over_growing"] = ratio(full, found["fused", batch])["p50"]
        table[str(batch)] = row
    return table


def companies(kind: Kind, trials: int) -> list[list[int]]:
    """Seeds of the requests of each trial, by slot: some 1 to 8 of the pool, in any order.

    What pads a batch is one request over and over. Where slots are kept, each request has the same one in every trial.
    """
    drawn = random.Random(1)
    found = []
    for _ in range(trials):
        if kind == "slots kept":
            row = [drawn.choice((slot, min(slot + PADDED, POOL))) for slot in range(PADDED)]
        else:
            real = drawn.sample(range(POOL), drawn.randint(1, PADDED))
            row = real + [POOL] * (PADDED - len(real)) if kind == "padded" else real
            drawn.shuffle(row)
        found.append(row)
    return found


def pictures(case: Case, latents: Tensor, seed: int) -> np.ndarray:
    """What is decoded of latents, as (frames, height, width, 3)."""
    output = case.model.run("vae_decode", case.params(seed), {"latents": latents})
    return np.stack([np.asarray(Image.open(io.BytesIO(media.data))) for media in output.media]).astype(int)


def bytes_of(case: Case, halves: Halves, kind: Kind, alone: dict[int, Tensor], trials: int) -> dict[str, Any]:
    """Whether a request's latents depend on its mates and its slot, and how far they are from those made alone."""
    made: dict[int, list[Tensor]] = defaultdict(list)
    for seeds in companies(kind, trials):
        for seed, latents in zip(seeds, case.denoised(halves, seeds), strict=True):
            if seed != POOL:
                made[seed].append(latents)
    again = [found for found in made.values() if len(found) > 1]
    levels = [
        np.abs(pictures(case, found[0], seed) - pictures(case, alone[seed], seed)) for seed, found in made.items()
    ]
    return {
        "requests": len(made),
        "seen_again": len(again),
        "same_bytes_each_time": sum(len({digest(latents) for latents in found}) == 1 for found in again),
        "latents_furthest_from_alone": max(
            float((latents - alone[seed]).abs().max()) for seed, found in made.items() for latents in found
        ),
        "latents_as_large_as": max(float(latents.abs().max()) for found in made.values() for latents in found),
        "pictures_that_change": sum(bool(level.any()) for level in levels),
        "by_levels_of_255": max(int(level.max()) for level in levels),
    }


def digest(latents: Tensor) -> str:
    return sha256(latents.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def independence(case: Case, *halves: Halves, trials: int = TRIALS) -> dict[str, Any]:
    """Bytes in company, of growing batches and of batches padded to 8, and of those where a request keeps its slot."""
    alone = {seed: case.denoised("apart", [seed])[0] for seed in range(POOL)}
    return {f"{kind}, {half}": bytes_of(case, half, kind, alone, trials) for kind in KINDS for half in halves}


def load(steps: int | None = None) -> dict[str, Case]:
    """The built-in model at each size; requests of its default number of steps unless another is given."""
    model = Model(resolve_source("unfuse/shapes"))
    made = [model.encode(model.params(seed)) for seed in range(len(PROMPTS))]
    whole = steps or int(model.card.defaults["num_inference_steps"] or 0)
    return {name: Case(model, made, size, whole) for name, size in SIZES.items()}


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    torch.set_num_threads(1)
    cases = load()
    found: dict[str, Any] = {"1 thread": {name: independence(case, "fused") for name, case in cases.items()}}
    small = cases["128²"]
    found["1 thread"]["128², halves apart"] = independence(small, "apart")
    for threads in THREADS:
        torch.set_num_threads(threads)
        found[f"{threads} threads"] = {"128²": independence(small, "fused")}
    torch.set_num_threads(1)
    show("steps", cost_with_1_thread={name: cost(case, rounds) for name, case in cases.items()}, bytes=found)


if __name__ == "__main__":
    main()
