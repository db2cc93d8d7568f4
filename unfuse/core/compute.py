"""Settings of compute processes: they are the same for every stage that a worker runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Batching = Literal["auto", "exact", "batched"]
Loop = Literal["normal", "overlapped"]
MaxLoadedModels = Literal["1", "all"]
Offload = Literal["none", "model", "sequential"]

USUAL_BATCH = 8  # how many tasks share a forward at most, where nobody says it


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables that say whether OpenMP's threads spin or sleep while they wait for each other."""


def compute_environment(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that computes with so many threads, where the caller's is `given`.

    Its libraries draw no progress bars. Threads that wait for each other sleep, unless the caller has chosen: one that
    spins takes its core from other processes, and then the thread that it waits for may be without one.
    """
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    waiting = {} if given.keys() & {*WAITING} else {"OMP_WAIT_POLICY": "PASSIVE"}
    return {**given, **waiting, **counts, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class ComputeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How compute processes run their stages."""

    device: Annotated[str, Meta(
        description="Device to compute on, cpu, cuda:0 or xpu:0; auto takes the best. Several, like cuda:0+cuda:1, are "
        "those of a worker's ranks."
    )] = "auto"  # fmt: skip
    dtype: Annotated[str, Meta(
        description="Type of the weights: one for all, or by component (bfloat16,vae=float32). auto is "
        "float32 on a CPU; on a GPU bfloat16, and float32 for the VAE."
    )] = "auto"  # fmt: skip
    parallel: Annotated[str, Meta(
        description="How the stages of a role are spread over ranks, a compute process and device each: "
        "denoiser=ulysses:2 or denoiser=ulysses:2+cfg:2. Kinds: cfg, layers, ring, shard, tensor, tiles, "
        "ulysses. auto, for one worker: as many ranks as it has GPUs, if its stages can be divided so."
    )] = ""  # fmt: skip
    collective_s: Annotated[
        float,
        Meta(description="Most seconds that ranks wait for each other; then all of them are started again.", gt=0),
    ] = 60.0
    threads: Annotated[int, Meta(description="CPU threads of each compute process; 0 shares the cores out.", ge=0)] = 0
    offload: Annotated[Offload, Meta(
        description="What rests in pinned host memory while it does not run: nothing, whole components (model), or "
        "every layer (sequential)."
    )] = "none"  # fmt: skip
    batching: Annotated[Batching, Meta(
        description="exact gives each request the bytes of the undivided pipeline: it shares a forward where "
        "comparing showed that this changes none; in batched pools it always may, equal within a small "
        "tolerance. auto is exact, but batched for workers that have language models alone."
    )] = "auto"  # fmt: skip
    max_batch: Annotated[int, Meta(
        description="Most requests in one forward; 0 is 8, and as many as are there of texts that are decoded.",
        ge=0, le=256,
    )] = 0  # fmt: skip
    loop: Annotated[Loop, Meta(
        description="Loop of texts: overlapped sends a token, and stores a chunk of a prompt for other requests, while "
        "the next one is computed, in a thread of its own; normal does so before that. Tokens are the same."
    )] = "overlapped"  # fmt: skip
    max_loras: Annotated[int, Meta(description="Adapters (LoRA) that a denoiser keeps loaded.", ge=1, le=256)] = 4
    noise_device: Annotated[
        Literal["cpu", "cuda", "xpu", "mps"],
        Meta(
            description="Where noise is drawn: cpu equals torch.Generator('cpu') everywhere, others draw on the device."
        ),
    ] = "cpu"
    vae: Annotated[
        Literal["whole", "sliced", "tiled"],
        Meta(description="How the VAE works: at once, picture by picture, or in tiles, which takes less memory."),
    ] = "whole"

    @property
    def outcome(self) -> dict[str, str]:
        """The settings that change a result's bytes, by name: all workers of one scheduler must agree on them."""
        batching = "exact" if self.batching == "auto" else self.batching
        return {"batching": batching, "noise-device": self.noise_device, "vae": self.vae}
