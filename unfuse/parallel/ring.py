"""Ring attention: keys and values go round the ranks, and each adds what its own tokens get of those that have come.

After Liu et al., Ring Attention with Blockwise Transformers, 2023. While it computes with what it has, a rank sends it
on and receives the next. Sums over parts are put together by their log-sum-exps in float32, so results differ from
those of one rank by rounding. Keys and values of its share leave a rank once for each other rank.

Over a product with `ulysses`, ranks first exchange tokens for heads with their neighbours; then these go round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unfuse.parallel.group import Axis
from unfuse.parallel.sequence import SequenceShares


class Ring:
    """An Attend in a ring of ranks, each for `heads.size` neighbours that hold a part of its heads."""

    def __init__(self, ring: Axis, heads: Axis) -> None:
        self._ring, self._heads = ring, heads

    def __call__(
        self, shares: SequenceShares, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
    ) -> Tensor:
        """What this rank's tokens get of all."""
        near = self._heads.size
        if near > 1:
            each = torch.unflatten(torch.stack([q, k, v]), 2, (near, -1)).movedim(2, 0)
            q, k, v = self._heads.transpose(each).movedim(0, 3).flatten(3, 4).unbind(0)
        made = self._round(shares, q, torch.stack([k, v]), mask, more.get("scale"))
        if near > 1:
            back = self._heads.transpose(torch.unflatten(made, 2, (near, -1)).movedim(2, 0))
            made = back.movedim(0, 1).flatten(1, 2)
        return made

    def _round(self, shares: SequenceShares, q: Tensor, kv: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        total = q.new_zeros(q.shape, dtype=torch.float32)
        known = q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
        for turn in range(self._ring.size):
            arrives = self._ring.pass_on(kv) if turn + 1 < self._ring.size else None
            held, places = self._there(shares, (self._ring.rank - turn) % self._ring.size, kv.shape[-2])
            if len(held):
                k, v = kv[..., held.to(kv.device), :].unbind(0)
                part, weight = _attention(q, k, v, None if mask is None else mask[..., places.to(mask.device)], scale)
                both = torch.logaddexp(known, weight)
                total = torch.where(known.isneginf()[..., None], 0.0, total * (known - both).exp()[..., None])
                total += torch.where(weight.isneginf()[..., None], 0.0, part.float() * (weight - both).exp()[..., None])
                known = both
            kv = arrives() if arrives else kv
        return total.to(q.dtype)

    def _there(self, shares: SequenceShares, place: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Of the tokens that a place of the ring has: where in them those lie that are no zeros, and where in all."""
        near, held, places = self._heads.size, list[Tensor](), list[Tensor]()
        for number in range(near):
            rank, before, begin = place * near + number, number * (tokens // near), 0
            for segment, (start, count) in zip(shares.order, shares.kept(rank), strict=True):
                held.append(torch.arange(before + start, before + start + count))
                first = begin + rank * shares.share(segment)
                places.append(torch.arange(first, first + count))
                begin += shares.lengths[segment]
        return torch.cat(held), torch.cat(places)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """What these keys and values give, and the log-sum-exp of their weights (rows, heads, tokens)."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    if q.device.type == "cpu":
        made, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    else:
        bias = None if mask is None else mask.expand(*q.shape[:-1], k.shape[-2])
        made, weight, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
    weight = weight[..., : q.shape[-2]].float()
    if mask is not None:  # of keys that are all hidden torch says 0, which is the weight of one key
        weight = weight.masked_fill(mask.isneginf().all(-1), float("-inf"))
    return made, weight
