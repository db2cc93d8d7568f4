"""Checkpoints of a training run as safetensors plus JSON: no pickle, and never half written.

Optimizer state is flattened into tensors named `optimizer.INDEX.FIELD`, after the position of the parameter.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SAVE_EVERY_S = 90.0


@dataclass
class Progress:
    """How far a run has come. A budget is seconds of training; the learning rate follows the time spent."""

    budget_s: float
    step: int = 0
    spent_s: float = 0.0

    @property
    def share(self) -> float:
        """The spent share of the budget, 0 to 1."""
        return min(1.0, self.spent_s / self.budget_s)

    def rate(self, peak: float, warmup_steps: int = 100) -> float:
        """Learning rate: a linear warm-up by steps, then a cosine by time down to 1 % of `peak`."""
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.share))
        return peak * cosine * min(1.0, (self.step + 1) / warmup_steps)


@dataclass(frozen=True)
class Run:
    """What is trained: the modules by name, their optimizer, and where the checkpoint lies."""

    path: Path
    modules: dict[str, torch.nn.Module]
    optimizer: torch.optim.Optimizer


def train(run: Run, progress: Progress, step: Callable[[int], None], watch: Callable[[Progress], None]) -> None:
    """Call `step` until the budget is spent, going on from a checkpoint; save on the way and at the end.

    `step(i)` must draw its batch from `i` alone, so that a resumed run sees the batches it would have seen.
    `watch` is called at every checkpoint, with its time not counted.
    """
    restore(run, progress)
    saved_at = progress.spent_s
    while progress.spent_s < progress.budget_s:
        started = time.perf_counter()
        step(progress.step)
        progress.step += 1
        progress.spent_s += time.perf_counter() - started
        if progress.spent_s - saved_at >= SAVE_EVERY_S:
            saved_at = progress.spent_s
            save(run, progress)
            watch(progress)
    save(run, progress)
    watch(progress)


def save(run: Run, progress: Progress) -> None:
    """Write modules, optimizer and progress in one file; an interrupted save leaves the one before."""
    tensors = {
        f"{name}.{key}": value.detach().contiguous().clone()
        for name, module in run.modules.items()
        for key, value in module.state_dict().items()
    }
    for index, state in run.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{field}": value.clone() for field, value in state.items()}
    unfinished = run.path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"progress": json.dumps(asdict(progress))})
    os.replace(unfinished, run.path)


def restore(run: Run, progress: Progress) -> None:
    """Load what `save` wrote into `run` and `progress`; without a file leave both as they are.

    The budget stays the caller's, so a finished run continues when it is given more time.
    """
    if not run.path.exists():
        return
    tensors = load_file(run.path)
    for name, module in run.modules.items():
        module.load_state_dict(_below(tensors, f"{name}."))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in _below(tensors, "optimizer.").items():
        index, field = key.split(".")
        state.setdefault(int(index), {})[field] = value
    groups = run.optimizer.state_dict()["param_groups"]
    run.optimizer.load_state_dict({"state": state, "param_groups": groups})
    saved = _read_progress(run.path)
    progress.step, progress.spent_s = int(saved["step"]), float(saved["spent_s"])


def _read_progress(path: Path) -> dict[str, float]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["progress"])


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
