"""Ulysses: for attention, ranks exchange tokens for heads. Each computes some heads over all tokens.

After Jacobs et al., DeepSpeed Ulysses, 2023. Two exchanges an attention, of this rank's queries, keys and values, and
of what they give: 4 ÷ ranks × tokens × width numbers leave a rank, less what it keeps. Tokens lie in their order for
the attention itself, so that each head computes what it computes on one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unfuse.parallel.sequence import TOKENS, SequenceShares


def ulysses(shares: SequenceShares, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Tensor:
    """Attention by heads; an Attend."""
    axis = shares.axis
    each = torch.unflatten(torch.stack([q, k, v]), 2, (axis.size, -1)).movedim(2, 0)
    q, k, v = shares.joined(axis.transpose(each), TOKENS + 1, shares.order).unbind(0)
    made = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
    back = axis.transpose(shares.apart(made, TOKENS))
    return back.movedim(0, 1).flatten(1, 2)
