"""Attention in a ring: what a part of the keys weighs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unfuse.parallel import sequence
from unfuse.parallel.sequence import _attention


def test_fully_masked_keys_have_zero_attention_weight() -> None:
    """As where a rank holds only the padding of a short prompt; of another row of the batch it may hold more."""
    q, k, v = torch.randn(3, 2, 2, 16, 12, generator=torch.Generator().manual_seed(1)).unbind(0)
    mask = torch.ones(2, 1, 1, 16, dtype=torch.bool)
    mask[0] = False

    made, weight = _attention(q, k, v, mask, None)

    assert bool(weight[0].isneginf().all()) and bool(weight[1].isfinite().all())
    assert torch.allclose(made[1], torch.nn.functional.scaled_dot_product_attention(q, k, v)[1], atol=1e-6)
    assert torch.allclose(weight[1], torch.logsumexp(q[1] @ k[1].mT / 12**0.5, -1), atol=1e-5)


class Biases(TorchDispatchMode):
    """Records the biases that torch's attention kernel for GPUs gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_efficient_attention.default:
            self.seen.append(args[3])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 5), (1, 1, 1), (2, 3, 5), ()])
@pytest.mark.parametrize("tokens", [7, 13, 16])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_bias_has_the_strides_that_gpu_kernels_need(shape: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
    """On the device meta, which has shapes and strides only: any device but the CPU takes this way."""
    q = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 3, tokens, 8, device="meta", dtype=torch.bfloat16)
    mask = torch.empty(tokens, *shape, device="meta").to(dtype).movedim(0, -1)
    with Biases() as biases:
        _attention(q, k, k, mask, None)

    (bias,) = biases.seen
    assert (bias.shape, bias.dtype, bias.stride(-1)) == ((2, 3, 5, tokens), torch.bfloat16, 1)
    assert all(stride % 8 == 0 for stride in bias.stride()[:-1])


@pytest.mark.parametrize("tokens", [7, 16])
def test_padding_of_a_bias_changes_no_value(tokens: int) -> None:
    q, k = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, tokens, 8)
    mask = torch.randn(2, 1, 1, tokens)
    assert torch.equal(sequence._aligned_bias(mask, q, k), mask.expand(2, 3, 5, tokens))
