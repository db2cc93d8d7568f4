"""Checkpoints: a run that was stopped and resumed ends where an unbroken one would."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools.shapes import checkpoint
from tools.shapes.checkpoint import Progress, Run, restore, save, train


def _run(path: Path) -> tuple[Run, torch.nn.Linear]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    return Run(
        path, {"layer": layer}, (torch.optim.Muon([layer.weight], lr=0.1), torch.optim.AdamW([layer.bias], lr=0.1))
    ), layer


def _step(run: Run, layer: torch.nn.Linear, index: int) -> None:
    batch = torch.full((4, 3), float(index))
    layer.zero_grad()
    layer(batch).square().sum().backward()
    for optimizer in run.optimizers:
        optimizer.step()


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    unbroken, expected = _run(tmp_path / "a.safetensors")
    for index in range(6):
        _step(unbroken, expected, index)

    first, layer = _run(tmp_path / "b.safetensors")
    for index in range(3):
        _step(first, layer, index)
    save(first, Progress(budget_s=60, step=3, spent_s=1.5))
    second, resumed = _run(tmp_path / "b.safetensors")
    progress = Progress(budget_s=60)
    restore(second, progress)
    for index in range(progress.step, 6):
        _step(second, resumed, index)

    assert (progress.step, progress.spent_s) == (3, 1.5)
    assert torch.equal(resumed.weight, expected.weight)


def test_restore_without_checkpoint_changes_nothing(tmp_path: Path) -> None:
    run, layer = _run(tmp_path / "none.safetensors")
    before = layer.weight.clone()
    progress = Progress(budget_s=60)

    restore(run, progress)

    assert torch.equal(layer.weight, before)
    assert progress.step == 0


def test_training_stops_at_its_time_budget(tmp_path: Path) -> None:
    run, layer = _run(tmp_path / "d.safetensors")
    taken: list[int] = []
    watched: list[int] = []

    def step(index: int) -> None:
        taken.append(index)
        _step(run, layer, index)

    train(run, Progress(budget_s=0.05), step, lambda now: watched.append(now.step))
    steps = len(taken)
    train(run, Progress(budget_s=0.05), step, lambda now: watched.append(now.step))

    assert taken == list(range(steps))
    assert steps >= 1
    assert watched == [steps, steps]


def test_saving_a_checkpoint_leaves_no_temporary_file(tmp_path: Path) -> None:
    run, layer = _run(tmp_path / "c.safetensors")
    _step(run, layer, 1)

    save(run, Progress(budget_s=60))

    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


def test_learning_rate_warms_up_and_decays_at_the_end_of_the_budget() -> None:
    assert Progress(60, step=0).rate(1.0) == pytest.approx(0.01)
    assert Progress(60, step=500).rate(1.0) == pytest.approx(1.0)
    assert Progress(60, step=500, spent_s=47).rate(1.0) == pytest.approx(1.0)
    assert Progress(60, step=500, spent_s=54).rate(1.0) == pytest.approx(0.505)
    assert Progress(60, step=500, spent_s=54, decay=0.1).rate(1.0) == pytest.approx(1.0)
    assert Progress(60, step=500, spent_s=90).rate(1.0) == pytest.approx(0.01)


def test_optimizers_scale_their_own_initial_learning_rates() -> None:
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    optimizers = torch.optim.SGD(parameter, lr=1.0), torch.optim.AdamW(parameter, lr=0.1)
    for spent, share in ((0.0, 1.0), (54.0, 0.505)):
        Progress(60, step=500, spent_s=spent).set_rates(*optimizers)
        assert [one.param_groups[0]["lr"] for one in optimizers] == pytest.approx([share, 0.1 * share])


def test_larger_budget_resumes_from_before_the_rate_decay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    path = tmp_path / "e.safetensors"
    run, layer = _run(path)
    train(run, Progress(budget_s=20), lambda index: _step(run, layer, index))
    same, more = Progress(budget_s=20), Progress(budget_s=40)

    restore(_run(path)[0], same)
    restore(_run(path)[0], more)

    assert (same.step, same.spent_s) == (20, 20)
    assert (more.step, more.spent_s) == (16, 16)
    assert not more.decaying
