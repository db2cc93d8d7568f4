"""A second core for a training run: another process takes every other scene of each batch, on the same weights."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch


class Halves:
    """Runs `work(index, part)`, which leaves gradients in the model: one half here, the other in a forked process.

    The weights lie in shared memory, so what an optimizer does to them here is what the next half sees there. Make it
    before the model ran for the first time. With `alone` there is no other process, and all of a batch runs here.
    """

    def __init__(self, model: torch.nn.Module, work: Callable[[int, slice], torch.Tensor], alone: bool) -> None:
        self._model, self._work, self._alone = model, work, alone
        if alone:
            return
        model.share_memory()
        self._gradients = [torch.zeros_like(parameter).share_memory_() for parameter in model.parameters()]
        self._here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        context.Process(target=self._serve, args=(there,), daemon=True).start()
        there.close()

    def step(self, index: int) -> float:
        """Leave the gradients of the whole batch of that step in the model; returns its loss."""
        self._model.zero_grad()
        if self._alone:
            return self._work(index, slice(None)).item()
        self._here.send_bytes(index.to_bytes(8, "big"))
        losses = self._work(index, slice(0, None, 2)).item(), float(self._here.recv_bytes())
        for parameter, other in zip(self._model.parameters(), self._gradients, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(other).mul_(0.5)
        return sum(losses) / 2

    def _serve(self, there: Connection) -> None:
        """The other process: it ends with the one that made it."""
        self._here.close()
        while True:
            try:
                index = int.from_bytes(there.recv_bytes(), "big")
            except EOFError:
                return
            self._model.zero_grad()
            loss = self._work(index, slice(1, None, 2))
            for parameter, mine in zip(self._model.parameters(), self._gradients, strict=True):
                if parameter.grad is not None:
                    mine.copy_(parameter.grad)
            there.send_bytes(str(loss.item()).encode())
