"""The function that changes a row in a batch is found on the device, by digests, and no further than that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.stages.test_bitwise import HostReads
from unfuse.stages.variant_functions import MOST_WORDS, first_variant_function, row_digests

ROWS = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
ROW = ROWS[:1]


def forward(rows: Tensor, later: Callable[[Tensor], Tensor], calls: list[str]) -> Tensor:
    """Three functions, of which the second depends on the number of rows."""
    rows = functional.silu(rows)
    rows = rows + 1e-3 * (len(rows) > 1)
    calls.append("after")
    return later(torch.tanh(rows))


def test_first_function_whose_result_differs_ends_the_search() -> None:
    alone, together = list[str](), list[str]()
    name = first_variant_function(lambda: forward(ROW, torch.exp, alone), lambda: forward(ROWS, torch.exp, together))
    assert name == "torch.Tensor.add", name
    assert (len(alone), len(together)) == (0, 1), "the forward alone goes no further"


def test_equal_forwards_have_no_variant_function() -> None:
    assert not first_variant_function(lambda: ROW + 1, lambda: ROWS + 1)


def test_search_survives_a_model_that_handles_exceptions() -> None:
    def handled(rows: Tensor) -> Tensor:
        try:
            return rows + (len(rows) > 1)
        except Exception:
            return rows

    assert first_variant_function(lambda: handled(ROW), lambda: handled(ROWS)) == "torch.Tensor.add"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 0), (3, 2, 7), (0, 4)])
def test_rows_have_equal_digests_alone_and_together(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = (torch.randn(shape) * 9).abs().to(dtype)
    assert row_digests(rows) == [digest for row in range(len(rows)) for digest in row_digests(rows[row : row + 1])]


@pytest.mark.parametrize(
    ("places", "values"),
    [
        ((0,), (-0.0,)),
        ((0, 2), (-0.0, -0.0)),
        ((0, 1), (-0.0, -0.0)),
        ((2 * MOST_WORDS + 5,), (1e-38,)),
        ((1, 2 * MOST_WORDS + 1), (-0.0, -0.0)),
    ],
)
def test_any_changed_bit_changes_a_digest(places: Sequence[int], values: Sequence[float]) -> None:
    plain = torch.zeros(1, 2 * MOST_WORDS + 7)
    changed = plain.clone()
    changed[0, list(places)] = torch.tensor(values)
    assert row_digests(plain) != row_digests(changed)


def test_host_reads_one_number_for_each_row() -> None:
    row_digests(ROWS)  # draws the weights of this device
    with HostReads() as reads:
        row_digests(ROWS)
    assert dict(reads.elements) == {"tolist": len(ROWS)}
