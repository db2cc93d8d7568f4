"""Results of stages are compared bit for bit, on the device that has them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from unfuse.core.errors import PermanentError
from unfuse.stages.base import EncodedMedia, StageOutput
from unfuse.stages.bitwise import are_equal, first_difference

NAN, OTHER_NAN = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (NAN, OTHER_NAN, False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16), False),
        (torch.tensor([1.0]).half(), torch.tensor([1.0]).bfloat16(), False),
        (torch.tensor([0.0]).to(torch.float8_e4m3fn), torch.tensor([-0.0]).to(torch.float8_e4m3fn), False),
        (torch.tensor([True]), torch.tensor([True]), True),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([1j, 0j]), torch.tensor([1j, 0j]), True),
        (torch.tensor([1j], dtype=torch.complex128), torch.tensor([-1j], dtype=torch.complex128), False),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (torch.tensor(3.0), torch.tensor(3.0), True),
        (torch.zeros(0, 3), torch.zeros(0, 3), True),
        (torch.zeros(0, 3), torch.zeros(3, 0), False),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.ones(2, device="meta"), torch.ones(2), False),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
        (torch.ones(1, 3).expand(2, 3), torch.ones(2, 3), True),
        (torch.ones(2, requires_grad=True), torch.ones(2), True),
        (np.zeros(2), np.zeros(2), True),
        (np.zeros(2), -np.zeros(2), False),
        (StageOutput({"x": torch.ones(2)}), StageOutput({"x": torch.ones(2)}), True),
        (StageOutput({"x": torch.ones(2), "y": None}), StageOutput({"x": torch.ones(2)}), False),
        (
            StageOutput(media=(EncodedMedia("image/png", b"a"),)),
            StageOutput(media=(EncodedMedia("image/png", b"b"),)),
            False,
        ),
        (PermanentError("not finite"), PermanentError("not finite"), True),
        (PermanentError("not finite"), None, False),
    ],
)
def test_outputs_are_compared_bit_for_bit(one: object, other: object, same: bool) -> None:
    assert are_equal(one, other) is same


class HostReads(TorchFunctionMode):
    """Counts the calls that wait for a device, and refuses those that bring a tensor to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.equals = 0
        self.elements: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (Tensor.cpu, Tensor.numpy, Tensor.to, Tensor.__array__), resolve_name(func)
        self.equals += func is torch.equal
        if func in (Tensor.tolist, Tensor.item):
            self.elements[func.__name__] += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_tensors_are_compared_where_they_are() -> None:
    results = [StageOutput({"latents": torch.randn(1, 4, 8), "pooled": torch.randn(3)}) for _ in range(4)]
    copies = [StageOutput({name: tensor.clone() for name, tensor in one.tensors.items()}) for one in results]  # type: ignore[union-attr]
    with HostReads() as reads:
        assert first_difference(results, copies) is None
    assert (reads.equals, reads.elements) == (8, Counter())


def test_comparison_of_a_batch_ends_at_its_first_difference() -> None:
    results = [torch.full((3,), float(row)) for row in range(4)]
    with HostReads() as reads:
        assert first_difference(results, [results[0], results[1], results[0], results[3]]) == 2
    assert reads.equals == 3
