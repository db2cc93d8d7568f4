"""Attention in a ring: what a part of the keys weighs."""

from __future__ import annotations

import torch

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
