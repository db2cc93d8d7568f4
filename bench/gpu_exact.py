"""Whether a device gives requests that share forwards the bytes that each has alone, and what would make it so.

Parts of `bench/gpu.py`. Verdicts are what the probe of `exact` pools finds: by model, dtype and batch size, the
function that is to blame, or "equal". Products are one layer's, of random numbers, in four ways: requests as they come,
padded to a full batch, each by itself, and cut into tiles of so many rows, which are multiplied one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.model import Made, Model
from tools import tiny
from unfuse.core.compute_options import ComputeOptions
from unfuse.stages.base import Stage, StageInput
from unfuse.stages.bitwise import first_difference
from unfuse.stages.variant_functions import variant_function

FAMILIES = ("wan", "wan-2.2", "wan-2.2-5b", "flux", "hunyuan-video", "qwen-image")
DTYPES = ("float32", "bfloat16")
SIZES = (2, 4, 8)
FULL = max(SIZES)
TILE = 128
"""Rows that a product has at a time, whatever the batch."""

LAYERS = {"3072 to 12288": (3072, 12288), "12288 to 3072": (12288, 3072), "5120 to 5120": (5120, 5120)}
"""FLUX.1's feed-forward layers, and a projection of Wan 14B's."""

TOKENS = {"1024 tokens": 1024, "one token": 1, "333 tokens": 333}
TIMES = 9


def families(root: Path, device: str, kinds: tuple[str, ...] = FAMILIES) -> dict[str, Any]:
    """The verdicts of tiny models of these kinds, which are built under `root`."""
    found: dict[str, Any] = {}
    for kind in kinds:
        folder = tiny.build(kind, root / kind)
        for dtype in DTYPES:
            model = Model(folder, ComputeOptions(device=device, dtype=dtype), device)
            found[f"{kind}, {dtype}"] = verdicts(model, SIZES)
    return found


def verdicts(model: Model, sizes: tuple[int, ...], **given: Any) -> dict[str, str]:
    """Of the first step of every stage whose tasks may share forwards, by stage and size."""
    params = [model.params(seed, **given) for seed in range(max(sizes))]
    made: list[Made] = [{} for _ in params]
    found = {}
    for name, stage in model.stages.items():
        tasks = [model.task(name, *each)[1] for each in zip(params, made, strict=True)]
        if stage.exact_batch_key(stage.start(tasks[0])) is not None:
            for size in sizes:
                found[f"{name}, {size}"] = verdict(stage, alike(stage, tasks), size)
        for each in zip(params, made, strict=True):
            model.run(name, *each)
    return found


def alike(stage: Stage, tasks: list[StageInput]) -> list[StageInput]:
    """Those that may share a forward with the first."""
    first = stage.exact_batch_key(stage.start(tasks[0]))
    return [task for task in tasks if stage.exact_batch_key(stage.start(task)) == first]


def verdict(stage: Stage, tasks: list[StageInput], size: int) -> str:
    states = [stage.start(tasks[number % len(tasks)]) for number in range(size)]
    try:
        alone = [stage.step_alone(state) for state in states]
        row = first_difference(alone, stage.step(states))
        return "equal" if row is None else variant_function(stage, states, row)
    except torch.OutOfMemoryError:
        return "out of memory"


Product = Callable[[Tensor, Tensor], Tensor]
"""Of requests (n, tokens, width) and a weight (width, other width)."""


def as_they_come(requests: Tensor, weight: Tensor) -> Tensor:
    return requests @ weight


def padded(requests: Tensor, weight: Tensor) -> Tensor:
    rest = requests.new_zeros(FULL - len(requests), *requests.shape[1:])
    return (torch.cat([requests, rest]) @ weight)[: len(requests)]


def each_by_itself(requests: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([request @ weight for request in requests])


def in_tiles(requests: Tensor, weight: Tensor) -> Tensor:
    rows = requests.flatten(0, 1)
    made = rows.new_empty(-(-len(rows) // TILE) * TILE, weight.shape[1])
    for start in range(0, len(rows), TILE):
        tile = rows[start : start + TILE]
        if len(tile) < TILE:
            tile = torch.cat([tile, rows.new_zeros(TILE - len(tile), rows.shape[1])])
        torch.mm(tile, weight, out=made[start : start + TILE])
    return made[: len(rows)].unflatten(0, requests.shape[:2])


WAYS: dict[str, Product] = {
    "as they come": as_they_come,
    "padded to 8": padded,
    "each by itself": each_by_itself,
    f"tiles of {TILE}": in_tiles,
}


def products(
    device: str,
    layers: dict[str, tuple[int, int]] = LAYERS,
    times: int = TIMES,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
) -> dict[str, Any]:
    """By layer, tokens and way: in how many sizes a request has the bytes that it has alone, and seconds of a batch of
    eight over those as they come."""
    found: dict[str, Any] = {}
    for dtype in dtypes:
        for layer, (width, other) in layers.items():
            drawn = torch.Generator(device).manual_seed(0)
            weight = torch.randn(width, other, device=device, dtype=dtype, generator=drawn)
            for name, tokens in TOKENS.items():
                requests = torch.randn(FULL, tokens, width, device=device, dtype=dtype, generator=drawn)
                took = {way: seconds(partial(work, requests, weight), device, times) for way, work in WAYS.items()}
                for way, work in WAYS.items():
                    found[f"{str(dtype).removeprefix('torch.')}, {layer}, {name}, {way}"] = {
                        "sizes_with_equal_bytes": f"{sum(equal(work, requests, weight))} of {FULL}",
                        "over_as_they_come": round(took[way] / took["as they come"], 3),
                    }
    return found


def equal(product: Product, requests: Tensor, weight: Tensor) -> Iterator[bool]:
    """For each size of batch, whether the first request has the bytes that it has alone."""
    (alone,) = product(requests[:1], weight)
    for size in range(1, FULL + 1):
        yield torch.equal(product(requests[:size], weight)[0], alone)


def seconds(work: Callable[[], Tensor], device: str, times: int) -> float:
    """The median, after two that do not count."""
    taken = []
    for _ in range(times + 2):
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken[2:])
