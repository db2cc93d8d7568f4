"""What ranks give: a step of one rank and of several, what it waits in exchanges, and the bytes these take.

Seconds are medians of requests, in turns over all spreads: what the first rank computes in a step, and waits. Bytes are
those that cross the loopback interface in a step, of all ranks together, beside what the kind's formula says: tensors
of float32, tokens padded to a multiple of eight a rank. Several spreads of one number of CPU threads in all. Memory is
what the ranks' processes take together, each page by how many have it, and of that what lies in files or is shared.
On GPUs: `python -m bench.ranks --model FOLDER --devices cuda:0,cuda:1 --spreads ulysses:2,ring:2`; no bytes there.
`python -m bench.ranks [--model M] [--size S] [--steps N] [--rounds N] [--spreads A,B] [--devices D,D]
[--dtype D]`
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench.report import NO_CACHE, show, table
from tools.server import Server, computes_of, serving
from unfuse.core.compute_options import ParallelDegrees
from unfuse.models import resolve_source

SHAPES = "unfuse/shapes"
SPREADS = "ulysses:2", "ring:2", "tensor:2", "layers:2", "shard:2", "cfg:2", "ulysses:4", "ring:4", "ulysses:2+cfg:2"
HALVES = 2
"""Both halves of guidance, each of which the transformer computes."""
SUMS = 3
"""The matrices of a block behind which ranks add what they made of it: of both attentions, and of the feed-forward."""
WIDTH = 4
"""Bytes of a number."""
LATENT = 16
"""Pixels of a side of the picture for each of its latents."""


def numbers(spread: ParallelDegrees, model: Path, size: int) -> int:
    """The numbers that leave a rank in a step of a picture, over all ranks, as the kinds' formulas have it."""
    config = json.loads((model / "transformer" / "config.json").read_text())
    cells = (size // LATENT) ** 2
    heads, ring, halves, ranges, parts, shares = (
        spread.degrees.get(kind, 1) for kind in ("ulysses", "ring", "cfg", "layers", "tensor", "shard")
    )
    ranks = heads * ring
    whole = cells // config["patch_size"][1] ** 2
    tokens = max(-(-whole // (8 * ranks)) * 8, 16 if whole >= 16 else 0) * ranks
    hidden = tokens * config["num_attention_heads"] * config["attention_head_dim"]
    block = 4 * hidden * (heads - 1) // heads + 2 * hidden * (ring - 1) + SUMS * 2 * hidden * (parts - 1)
    forward = config["num_layers"] * block + hidden * (ranks - 1) + ranges * (ranges - 1) * hidden
    weights = sum(file.stat().st_size for file in (model / "transformer").glob("*.safetensors")) // WIDTH
    both = config["out_channels"] * cells * spread.size * (halves - 1)
    return HALVES * (forward + weights * (shares - 1)) + both


def crossed() -> int:
    """Bytes that have crossed the loopback interface so far."""
    lines = (line.split() for line in Path("/proc/net/dev").read_text().splitlines())
    return next(int(line[9]) for line in lines if line[0] == "lo:")


def step(server: Server, size: int, steps: int, seed: int) -> dict[str, float]:
    """A step of a request, and the bytes that crossed for all of them."""
    before = crossed()
    body = {"prompt": "a red circle on white", "seed": seed, "num_inference_steps": steps, "size": f"{size}x{size}"}
    server.post("/v1/images/generations", body)
    bytes_ = crossed() - before
    (made,) = server.get("/v1/requests?limit=1")["data"]
    (denoise,) = (stage for stage in made["stages"] if stage["name"] == "denoise.0")
    waited = denoise["exchange_s"]
    return {"compute": (denoise["run_s"] - waited) / steps, "exchange": waited / steps, "bytes": bytes_}


def memory(server: Server) -> dict[str, float]:
    """MiB of all compute processes of the denoiser, in all and without anonymous memory."""
    (worker,) = (one for one in server.get("/v1/workers")["data"] if one["role"] == "denoiser")
    found = {"Pss": 0, "Pss_Anon": 0}
    for process in computes_of(worker["pid"]):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, kib, *_ = line.replace(":", "").split()
            found[name] = found.get(name, 0) + int(kib)
    return {"all": found["Pss"] / 1024, "shared": (found["Pss"] - found["Pss_Anon"]) / 1024}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default=SHAPES)
    options.add_argument("--size", type=int, default=256)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--spreads", default=",".join(SPREADS))
    options.add_argument("--devices", default="")
    options.add_argument("--dtype", default="auto")
    given = options.parse_args()
    spreads = ["", *given.spreads.split(",")]
    found: dict[str, list[dict[str, float]]] = {spread: [] for spread in spreads}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        servers = {}
        for number, spread in enumerate(spreads):
            own = Path(folder, str(number))
            own.mkdir()
            devices = "+".join(given.devices.split(",")[: ParallelDegrees.parse(spread).size if spread else 1])
            parallel = ("--parallel", f"denoiser={spread}") if spread else ()
            place = ("--place", f"denoiser={devices}") if devices else ()
            flags = (*NO_CACHE, "--workers", "split", "--threads", "1", "--dtype", given.dtype, *parallel, *place)
            servers[spread] = running.enter_context(serving(own, given.model, *flags)).ready()
        for seed in range(given.rounds + 1):
            for spread, server in servers.items():
                short, long = (step(server, given.size, steps, seed) for steps in (given.steps, 2 * given.steps))
                found[spread].append({**long, "bytes": (long["bytes"] - short["bytes"]) / given.steps})
        takes = {spread: memory(server) for spread, server in servers.items()}
    show("ranks", all=found, memory=takes)
    alone = median(one["compute"] for one in found[""][1:])
    rows: dict[str, dict[str, object]] = {}
    for spread, each in found.items():
        took = {name: median(one[name] for one in each[1:]) for name in each[0]}
        rows[spread or "one rank"] = {
            "computes ms": round(1000 * took["compute"], 1),
            "waits ms": round(1000 * took["exchange"], 1),
            "step ÷ one rank's": round((took["compute"] + took["exchange"]) / alone, 2),
            "MiB": round(takes[spread]["all"]),
            "of files or shared": round(takes[spread]["shared"]),
            "KiB a step": round(took["bytes"] / 1024),
            "formula": round(
                WIDTH * numbers(ParallelDegrees.parse(spread), resolve_source(given.model), given.size) / 1024
            )
            if spread and given.model == SHAPES and not given.devices
            else "",
        }
    table("", rows)


if __name__ == "__main__":
    main()
