"""What a batch-invariant forward computes row by row, by the rule of each type of device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unfuse.stages import batch_invariant_ops
from unfuse.stages.batch_invariant_ops import depends_on_cuda, one_by_one

ROWS = 4


class Calls(TorchFunctionMode):
    """Counts the calls of each function that reach torch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Callable[..., Any]] = Counter()
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        if func is functional.linear:
            self.inputs.append(args[0])
        return func(*args, **(kwargs or {}))


def calls(func: Callable[..., Tensor], *args: Any) -> int:
    """How often torch computes this function for a batch of four rows. Its result is that of a plain forward."""
    with Calls() as seen, one_by_one(ROWS):
        result = func(*args)
    torch.testing.assert_close(result, func(*args))
    return seen.counts[func.func if isinstance(func, partial) else func]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has the rule of a CUDA device."""
    monkeypatch.setitem(batch_invariant_ops.RULES, "cpu", depends_on_cuda)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("dtype", "terms", "tokens", "width", "times"),
    [
        (torch.bfloat16, 2560, 1, 1, 1),
        (torch.bfloat16, 3072, 77, 768, ROWS),
        (torch.float16, 3072, 1024, 767, ROWS),
        (torch.float16, 3072, 1024, 768, 1),
        (torch.float32, 1, 1024, 2304, ROWS),
        (torch.float32, 1, 1024, 2560, 1),
    ],
)
def test_cuda_matmuls_with_few_outputs_run_row_by_row(
    dtype: torch.dtype, terms: int, tokens: int, width: int, times: int
) -> None:
    batch, weight = torch.ones(ROWS, tokens, terms, dtype=dtype), torch.ones(width, terms, dtype=dtype)
    assert calls(functional.linear, batch, weight, torch.ones(width, dtype=dtype)) == times


@pytest.mark.usefixtures("cuda")
def test_cuda_float32_matmuls_without_bias_run_row_by_row() -> None:
    batch, weight = torch.ones(ROWS, 1024, 1), torch.ones(2560, 1)
    assert calls(functional.linear, batch, weight) == ROWS
    assert calls(functional.linear, batch, weight, None) == ROWS
    assert calls(partial(functional.linear, weight=weight), batch) == ROWS
    assert calls(torch.matmul, batch, weight.T) == ROWS


@pytest.mark.usefixtures("cuda")
def test_cuda_batched_matmuls_run_once() -> None:
    assert calls(torch.matmul, torch.ones(ROWS, 2, 3), torch.ones(ROWS, 3, 2)) == 1


@pytest.mark.usefixtures("cuda")
def test_cuda_convolutions_run_row_by_row() -> None:
    assert calls(functional.conv2d, torch.ones(ROWS, 2, 4, 4), torch.ones(3, 2, 1, 1)) == ROWS


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("func", [functional.silu, functional.gelu, torch.sigmoid, torch.exp])
def test_cuda_pointwise_functions_run_once(func: Callable[..., Tensor]) -> None:
    assert calls(func, torch.ones(ROWS, 8)) == 1


def test_cpu_row_by_row_rule_is_the_default() -> None:
    assert calls(torch.exp, torch.ones(ROWS, 8)) == ROWS
    assert calls(functional.linear, torch.ones(ROWS, 64, 1), torch.ones(2, 1)) == 1
    assert calls(functional.linear, torch.ones(ROWS, 2, 1), torch.ones(2, 1)) == ROWS


@pytest.mark.usefixtures("cuda")
def test_batch_slices_are_made_contiguous_before_linear() -> None:
    """Joint attention cuts text from picture: alone a product gets one block of memory, in a batch several."""
    batch = torch.ones(ROWS, 300, 8)[:, 100:]
    with Calls() as seen, one_by_one(ROWS):
        functional.linear(batch, torch.ones(16_384, 8), torch.ones(16_384))
    assert [given.is_contiguous() for given in seen.inputs] == [True]
