"""What a pair copies to and from a GPU, by a device that has shapes only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unfuse.parallel.pairs import _Pair

META = torch.device("meta")


class Connection:
    """A process group that receives sevens."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], *arguments: int) -> Any:
        self.sent += tensors
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[torch.Tensor], *arguments: int) -> Any:
        return SimpleNamespace(wait=lambda: tensors[0].fill_(7))


def pair(is_sender: bool, device: torch.device) -> _Pair:
    """One end of a connected pair."""
    pair = _Pair.__new__(_Pair)
    pair._is_sender, pair._device, pair._group = is_sender, device, Connection()
    return pair


def test_sender_on_a_gpu_copies_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be copied from the device meta."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    sender = pair(True, META)
    sender.move(torch.zeros(4, dtype=torch.uint8))
    assert ([tensor.device for tensor in sender._group.sent], waited) == ([META], [META])


def test_receiver_on_a_gpu_copies_only_what_it_received(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty_like(data: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device == META
        return torch.empty(data.shape, dtype=data.dtype)

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    data = torch.zeros(4, dtype=torch.uint8)
    pair(False, META).move(data)
    assert data.tolist() == [7] * 4


def test_receiver_on_a_cpu_receives_in_place() -> None:
    data = torch.zeros(4, dtype=torch.uint8)
    pair(False, torch.device("cpu")).move(data)
    assert data.tolist() == [7] * 4
