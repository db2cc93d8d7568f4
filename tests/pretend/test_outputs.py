"""Outputs of a task on a pretended GPU are copied to the host together."""

from __future__ import annotations

import torch

from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import GPU
from unfuse.worker.job import on_host


def test_all_tensors_of_an_output_are_awaited_once() -> None:
    with PretendedGpus() as gpus:
        tensors = {"a": torch.arange(6.0, device=GPU).view(2, 3).T, "b": torch.ones(2, device=GPU), "c": None}
        gpus.records.clear()
        copied = on_host({**tensors, "d": torch.zeros(1)})
        assert [wait.kind for wait in gpus.records.waits.elements()] == ["synchronize"]
        assert all(tensor is None or tensor.device.type == "cpu" for tensor in copied.values())
    assert [*copied] == ["a", "b", "c", "d"]
    assert copied["a"] is not None and copied["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert copied["c"] is None


def test_tensors_of_the_cpu_are_not_copied() -> None:
    tensors = {"a": torch.ones(2), "b": None}
    assert on_host(tensors) is tensors
