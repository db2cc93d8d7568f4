"""A training step in two processes is the step that one process makes."""

import multiprocessing

import torch

from tools.shapes.halves import Halves

SAMPLES = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def trained(alone: bool) -> tuple[list[torch.Tensor], list[float]]:
    """The weights after five steps, and the losses."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def work(index: int, part: slice) -> torch.Tensor:
        batch = SAMPLES[8 * index : 8 * index + 16][part]
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        return loss.detach()

    halves, losses = Halves(model, work, alone), []
    for index in range(5):
        losses.append(halves.step(index))
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], losses


def test_training_in_two_processes_equals_training_in_one() -> None:
    (one, its_losses), (two, their_losses) = trained(alone=True), trained(alone=False)
    assert torch.allclose(torch.tensor(its_losses), torch.tensor(their_losses), atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, two, strict=True))
    assert its_losses[-1] < its_losses[0]


def test_second_training_process_exits_with_the_run() -> None:
    before = set(multiprocessing.active_children())
    halves = Halves(torch.nn.Linear(1, 1), lambda index, part: torch.zeros(()), alone=False)
    (other,) = set(multiprocessing.active_children()) - before
    halves._here.close()
    other.join(30)
    assert not other.is_alive()
