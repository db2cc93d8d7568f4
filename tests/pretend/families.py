"""Every tiny family on the CPU and on a pretended GPU: its requests, and how often the host waits for the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import GPU, LoadedModel, Run, held_by, load, run_request
from tools import tiny

REDRAWN = ("flux", "sdxl", "sd3", "qwen-image", "z-image")
MASKED = ("flux", "sdxl", "qwen-image", "z-image")
PREVIEWED = ("flux", "wan")


def cases(kind: str) -> dict[str, dict[str, Any]]:
    """The parameters of each request to a family. An upload is named by its parameter."""
    sees = kind == "kontext" or "-image" in kind and kind not in ("qwen-image", "z-image")
    found: dict[str, dict[str, Any]] = {"plain": {"image": "image"} if sees else {}}
    if kind.endswith("last"):
        found["plain"]["last_frame"] = "last_frame"
    if kind in REDRAWN:
        found["redrawn"] = {"image": "image", "strength": 0.6}
        found["negative"] = {"negative_prompt": "n", "true_cfg_scale": 3.0}
    if kind in MASKED:
        found["masked"] = {"image": "image", "strength": 0.6, "mask": "mask"}
    if kind in PREVIEWED:
        found["previews"] = {"preview_every": 1}
        found["cached"] = {"feature_cache": 0.3, "num_inference_steps": 8}
    return found


def options_of(case: str) -> dict[str, Any]:
    """How the model of a case is loaded."""
    return {"batching": "batched"} if case == "cached" else {}


class Family:
    """One kind of `tools/tiny.py`, loaded on the CPU and on a pretended GPU when it is first needed."""

    def __init__(self, kind: str, folder: Path, **options: Any) -> None:
        self.kind, self._folder, self._options = kind, folder, options
        self.gpus = PretendedGpus()

    @cached_property
    def folder(self) -> Path:
        return tiny.build(self.kind, self._folder / self.kind)

    @cached_property
    def on_cpu(self) -> LoadedModel:
        options = {name: value for name, value in self._options.items() if name != "offload"}
        return load(self.folder, **options)

    @cached_property
    def on_gpu(self) -> LoadedModel:
        return load(self.folder, GPU, **self._options)

    def expected(self, params: Mapping[str, Any]) -> Run:
        return run_request(self.on_cpu, dict(params))

    def measure(self, params: Mapping[str, Any]) -> tuple[Run, dict[str, int]]:
        """A request on the GPU, and the counts that have ceilings.

        By phase, those are waits of the host; "kept" are the bytes that stay on the GPU after the first request, and
        "kept again" those that a second one adds.
        """
        with self.gpus:
            model = self.on_gpu
            before = held_by(self.gpus)
            run = run_request(model, dict(params), self.gpus)
            after = held_by(self.gpus)
            run_request(model, dict(params))
            counts = {name: waits.total() for name, waits in run.waits.items() if waits}
            counts["kept"] = sum(after.values()) - sum(before.values())
            counts["kept again"] = sum(held_by(self.gpus).values()) - sum(after.values())
        return run, {name: count for name, count in counts.items() if count}
