"""What a client waits for a video's first frame, and what decoding takes of memory.

First frame: seconds from the end of denoising until a client of `content?stream=1` has a frame, over those until the
whole video is there, through `unfuse serve` with a tiny Wan. Memory: the most that a process grows by while it decodes
a video in pieces, over the same all at once; with a tiny VAE, and with one of the published size (random weights).
`python -m bench.stream [ROUNDS]`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bench.report import ratio, show, spread
from tools import tiny
from tools.server import Server, serving

ROUNDS = 5
FRAMES, SIDE = 63, 128
VIDEO = {"num_frames": FRAMES, "size": f"{SIDE}x{SIDE}", "num_inference_steps": 1}
VAES = {"tiny": (SIDE, (21, FRAMES)), "published size": (64, (21, FRAMES))}
"""Pixels of a side, and frames."""

HOWS = ("at once", "in pieces")
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Has glibc give back what is freed, so that a process is as large as what it holds."""


def waited(server: Server, video: dict[str, Any], seed: int) -> tuple[float, float]:
    """Seconds from the end of denoising until a client has a frame, and until it has all."""
    id = str(server.post("/v1/videos", video | {"prompt": "a red circle", "seed": seed})["id"])
    first, data = 0.0, b""
    with urllib.request.urlopen(f"{server.url}/v1/videos/{id}/content?stream=1", timeout=600) as answer:
        while more := answer.read1(1 << 20):
            data += more
            if not first and b"mdat" in data:
                first = time.time()
    end = time.time()
    done = [event for event in server.events(id) if event["type"] == "stage_completed" and "denoise" in event["stage"]]
    (denoised,) = (event["at"] for event in done)
    return first - denoised, end - denoised


def first_frames(folder: Path, rounds: int) -> dict[str, Any]:
    """Of videos that are asked for one after the other."""
    model = tiny.build("wan", folder / "wan")
    (model / "serving.json").write_text(json.dumps({"defaults": tiny.SERVING | {"num_frames": FRAMES}}))
    with serving(folder, str(model), "--workers", "all=1", "--threads", "1") as server:
        return first_frame(server.ready(), rounds, VIDEO)


def first_frame(server: Server, rounds: int, video: dict[str, Any]) -> dict[str, Any]:
    """Of videos of a server that are asked for one after the other, the first of which does not count."""
    waited(server, video, rounds)
    firsts, wholes = zip(*(waited(server, video, seed) for seed in range(rounds)), strict=True)
    found = {"first_s": spread([*firsts]), "whole_s": spread([*wholes])}
    return {**found, "first_over_whole": ratio([*firsts], [*wholes])}


def grown(vae: str, how: str, frames: int, side: int) -> dict[str, float]:
    """MiB that a process of its own grows by at most, and the seconds that it takes."""
    command = [sys.executable, "-m", "bench.stream", vae, how, str(frames), str(side)]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | FREED_AT_ONCE)
    found: dict[str, float] = json.loads(made.stdout)
    return found


def decode(vae: str, how: str, frames: int, side: int) -> dict[str, float]:
    """Decode a video of noise in this process, which has decoded the beginning of it before."""
    import torch

    from unfuse.models.wan import WanVae
    from unfuse.stages.base import StageInput
    from unfuse.stages.vae_decode import VaeDecode

    torch.set_num_threads(1)
    decoder: Any = WanVae(cast(Any, SimpleNamespace(vae=lambda: _vae(vae), device=torch.device("cpu"))))
    config = decoder.vae.config
    if how == "at once":
        decoder = SimpleNamespace(
            vae=decoder.vae, latents=decoder.latents, unpack=decoder.unpack, decode=decoder.decode
        )
    stage, edge = VaeDecode(decoder), side // config.scale_factor_spatial
    for length in (1, (frames - 1) // config.scale_factor_temporal + 1):
        given = torch.randn(1, config.z_dim, length, edge, edge)
        before, began = _memory("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")
        stage.run([StageInput({"output_format": "mp4", "fps": 16}, {"latents": given})])
    return {"mib": round(_memory("VmHWM") - before, 1), "seconds": round(time.perf_counter() - began, 2)}


def _vae(name: str) -> Any:
    from diffusers import AutoencoderKLWan

    return (tiny._wan_vae(small=False) if name == "tiny" else AutoencoderKLWan()).eval()


def _memory(what: str) -> float:
    """MiB of this process: what it has (VmRSS), or the most it had (VmHWM)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def memory(vaes: dict[str, tuple[int, tuple[int, ...]]] | None = None) -> dict[str, Any]:
    """By VAE and length: growth both ways, and of the one over the other."""
    found: dict[str, Any] = {}
    for vae, (side, lengths) in (vaes or VAES).items():
        for frames in lengths:
            row = {how: grown(vae, how, frames, side) for how in HOWS}
            share = row["in pieces"]["mib"] / row["at once"]["mib"]
            found[f"{vae}, {side}², {frames} frames"] = {**row, "in_pieces_over_at_once": round(share, 3)}
    return found


def main() -> None:
    if len(sys.argv) > 2:
        vae, how, frames, side = sys.argv[1:]
        print(json.dumps(decode(vae, how, int(frames), int(side))))
        return
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        found = first_frames(Path(folder), rounds)
    show("stream", first_frame=found, memory=memory())


if __name__ == "__main__":
    main()
