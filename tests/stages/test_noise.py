"""The noise of a seed, in the numbers that torch 2.13 draws."""

from __future__ import annotations

import pytest
import torch

from unfuse.stages.noise import draw_noise

SHAPES = [(1,), (3, 5), (16,), (17,), (4, 5), (1, 4, 25, 25), (1, 16, 3, 8, 8), (2, 1001)]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions draw other 16-bit numbers")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_noise_has_the_bytes_and_leaves_the_state_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    drawn = draw_noise(shape, ours, dtype)

    assert torch.equal(drawn, torch.randn(shape, generator=theirs, dtype=dtype))
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_16_bit_noise_does_not_depend_on_how_torch_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 draws other 16-bit numbers than 2.13, and the same in float32."""
    randn = torch.randn

    def older(*sizes: object, dtype: torch.dtype | None = None, **options: object) -> torch.Tensor:
        drawn = randn(*sizes, dtype=dtype, **options)  # type: ignore[call-overload]
        return drawn if dtype in (None, torch.float32) else -drawn

    expected = draw_noise((1, 4, 8, 8), torch.Generator().manual_seed(7), torch.bfloat16)
    monkeypatch.setattr(torch, "randn", older)
    assert torch.equal(draw_noise((1, 4, 8, 8), torch.Generator().manual_seed(7), torch.bfloat16), expected)
