"""Checkpoints of a training run as safetensors plus JSON: no pickle, and never half written.

Optimizer state is flattened into tensors named `optimizer.WHICH.INDEX.FIELD`, after the positions of the optimizer and
of the parameter.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SAVE_EVERY_S = 90.0
LONGEST_STEP_S = 60.0  # what a step counts at most: a process may be stopped for a while in the midst of one
BEFORE_DECAY = ".before-decay"


@dataclass
class Progress:
    """How far a run has come. A budget is seconds of training; the learning rate follows the time spent.

    `decay` is the share of the budget, at its end, in which the rate falls.
    """

    budget_s: float
    step: int = 0
    spent_s: float = 0.0
    decay: float = 0.2

    @property
    def share(self) -> float:
        """The spent share of the budget, 0 to 1."""
        return min(1.0, self.spent_s / self.budget_s)

    @property
    def decaying(self) -> bool:
        """Whether the last part of the budget, in which the learning rate falls, has begun."""
        return self.share >= 1 - self.decay

    def rate(self, peak: float, warmup_steps: int = 100) -> float:
        """Learning rate: warm-up by steps, constant, then linear by time down to 1 % of `peak`."""
        fall = min(1.0, (1 - self.share) / self.decay)
        return peak * (0.01 + 0.99 * fall) * min(1.0, (self.step + 1) / warmup_steps)

    def set_rates(self, *optimizers: torch.optim.Optimizer) -> None:
        """Set the rates of now, whose peaks are what the optimizers were made with."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate(optimizer.defaults["lr"])


@dataclass(frozen=True)
class Run:
    """What is trained: the modules by name, their optimizers, and where the checkpoint lies."""

    path: Path
    modules: dict[str, torch.nn.Module]
    optimizers: tuple[torch.optim.Optimizer, ...]


def train(
    run: Run, progress: Progress, step: Callable[[int], None], watch: Callable[[Progress], None] | None = None
) -> None:
    """Call `step` until the budget is spent, going on from a checkpoint; save on the way and at the end.

    What was there before the learning rate began to fall is kept beside, and is where a run with more budget goes on.
    `step(i)` must draw its batch from `i` alone, so that a resumed run sees the batches it would have seen.
    `watch` is called at every checkpoint, with its time not counted.
    """
    restore(run, progress)
    saved_at, kept = progress.spent_s, progress.decaying
    while progress.spent_s < progress.budget_s:
        started = time.perf_counter()
        step(progress.step)
        progress.step += 1
        progress.spent_s += min(time.perf_counter() - started, LONGEST_STEP_S)
        if progress.decaying and not kept:
            kept = True
            save(run, progress)
            unfinished = run.path.with_suffix(".unfinished")
            shutil.copyfile(run.path, unfinished)
            os.replace(unfinished, before_decay(run.path))
        if progress.spent_s - saved_at >= SAVE_EVERY_S:
            saved_at = progress.spent_s
            save(run, progress)
            if watch:
                watch(progress)
    save(run, progress)
    if watch:
        watch(progress)


def before_decay(path: Path) -> Path:
    """Where the checkpoint lies that a run saved as its learning rate began to fall."""
    return path.with_suffix(BEFORE_DECAY + path.suffix)


def save(run: Run, progress: Progress) -> None:
    """Write modules, optimizers and progress in one file; an interrupted save leaves the one before."""
    tensors = {
        f"{name}.{key}": value.detach().contiguous().clone()
        for name, module in run.modules.items()
        for key, value in module.state_dict().items()
    }
    for which, optimizer in enumerate(run.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{which}.{index}.{field}": value.clone() for field, value in state.items()}
    unfinished = run.path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"progress": json.dumps(asdict(progress))})
    os.replace(unfinished, run.path)


def restore(run: Run, progress: Progress) -> None:
    """Load what `save` wrote into `run` and `progress`; without a file leave both as they are.

    The budget stays the caller's. With a larger one than was saved, a run goes on from before its learning rate fell.
    """
    if not run.path.exists():
        return
    path, saved = run.path, progress_of(run.path)
    if progress.budget_s > saved["budget_s"] and before_decay(path).exists():
        path = before_decay(path)
        saved = progress_of(path)
    tensors = load_file(path)
    for name, module in run.modules.items():
        module.load_state_dict(_below(tensors, f"{name}."))
    for which, optimizer in enumerate(run.optimizers):
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in _below(tensors, f"optimizer.{which}.").items():
            index, field = key.split(".")
            state.setdefault(int(index), {})[field] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    progress.step, progress.spent_s = int(saved["step"]), float(saved["spent_s"])


def finished(path: Path, budget_s: float) -> bool:
    """Whether a checkpoint's run has spent a budget."""
    return path.exists() and progress_of(path)["spent_s"] >= budget_s


def load(path: Path, name: str, module: torch.nn.Module) -> None:
    """Load one module's weights from a checkpoint."""
    module.load_state_dict(_below(load_file(path), f"{name}."))


def progress_of(path: Path) -> dict[str, float]:
    """How far a checkpoint's run had come: `step`, `spent_s`, `budget_s`."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["progress"])


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
