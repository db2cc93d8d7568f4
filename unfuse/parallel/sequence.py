"""Tokens spread over ranks: each has a share of them in a transformer's blocks, and attention is over all.

Before the first block each rank takes its share of every segment (of text, of the picture), and behind the last one all
get the whole again; whatever else the model does, it does on whole tensors. Shares are of equal length: where that does
not divide, the last ones end in zeros, which attention leaves out. Attention over all is by `ulysses`, or by
`RingAttention`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from unfuse.parallel.group import Axis
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim

ROWS, FEW = 8, 16
"""Shares are multiples of so many tokens: products of matrices take rows by as many, and others in another way. They
also take fewer than these otherwise, so a share has no fewer unless the whole has.
"""

TOKENS = 2  # the dimension of tokens in what attention is given: (rows, heads, tokens, width)


class SequenceShares:
    """How many tokens each segment has in the forward that runs, and which of them are this rank's."""

    def __init__(self, axis: Axis, order: Sequence[str]) -> None:
        self.axis, self.order = axis, order
        self.lengths: dict[str, int] = {}

    def share(self, segment: str) -> int:
        """How many tokens of a segment each rank has, zeros included."""
        whole = self.lengths[segment]
        return max(-(-whole // (self.axis.size * ROWS)) * ROWS, FEW if whole >= FEW else 0)

    def kept(self, rank: int) -> list[tuple[int, int]]:
        """Of the shares of a rank, in order: where each begins, and how many of its tokens are there at all."""
        found, start = [], 0
        for segment in self.order:
            share = self.share(segment)
            found.append((start, max(0, min(share, self.lengths[segment] - rank * share))))
            start += share
        return found

    @property
    def whole(self) -> int:
        """All tokens."""
        return sum(self.lengths[segment] for segment in self.order)

    def own(self, tensor: Tensor, along: SequenceDim) -> Tensor:
        """This rank's share of a tensor."""
        if along.dims not in (0, tensor.dim()):
            return tensor
        pieces = torch.split(tensor, [self.lengths[segment] for segment in along.segments], along.axis)
        shares = [self._own(piece, along.axis, self.share(s)) for piece, s in zip(pieces, along.segments, strict=True)]
        return shares[0] if len(shares) == 1 else torch.cat(shares, along.axis)

    def _own(self, piece: Tensor, axis: int, share: int) -> Tensor:
        there = piece.shape[axis]
        start = min(self.axis.rank * share, there)
        return _padded(piece.narrow(axis, start, min(share, there - start)), axis, share)

    def joined(self, shares: Tensor, axis: int, segments: Sequence[str]) -> Tensor:
        """The whole of shares (ranks, …), along that axis of each, in the order of the segments."""
        parts = torch.split(shares, [self.share(segment) for segment in segments], axis + 1)
        wholes = []
        for part, segment in zip(parts, segments, strict=True):
            lined = part.movedim(0, axis)
            whole = lined.reshape(*part.shape[1 : axis + 1], -1, *part.shape[axis + 2 :])
            wholes.append(whole.narrow(axis, 0, self.lengths[segment]))
        return wholes[0] if len(wholes) == 1 else torch.cat(wholes, axis)

    def apart(self, whole: Tensor, axis: int) -> Tensor:
        """Shares (ranks, …) of a whole, as `joined` takes them."""
        parts, pieces = [], torch.split(whole, [self.lengths[segment] for segment in self.order], axis)
        for segment, part in zip(self.order, pieces, strict=True):
            share = self.share(segment)
            padded = _padded(part, axis, share * self.axis.size)
            parts.append(torch.unflatten(padded, axis, (self.axis.size, share)).movedim(axis, 0))
        return torch.cat(parts, axis + 1)


Attend = Callable[..., Tensor]
"""Attention over the tokens of all ranks: what this rank's tokens get of all, by its shares, queries, keys and values
(rows, heads, tokens, width), and a mask for all tokens in order, or None.
"""


class _Replaced(TorchFunctionMode):
    """Puts attention over all ranks in the place of torch's."""

    def __init__(self, shares: SequenceShares, attend: Attend) -> None:
        super().__init__()
        self._shares, self._attend = shares, attend

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | dict(kwargs or {})
        q, k, v, mask = given.pop("query"), given.pop("key"), given.pop("value"), given.pop("attn_mask", None)
        if given.pop("enable_gqa", False) and q.shape[1] != k.shape[1]:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        shares = self._shares
        if mask is not None and mask.shape[-1] != shares.whole:
            mask = shares.joined(shares.axis.gather(mask), mask.dim() - 1, shares.order)
        return self._attend(shares, q, k, v, mask, **given)


def _padded(tensor: Tensor, axis: int, length: int) -> Tensor:
    """A tensor of that length along an axis, with zeros behind its own values; itself, if none are missing."""
    shape = [*tensor.shape]
    shape[axis] = length - tensor.shape[axis]
    return torch.cat([tensor, tensor.new_zeros(shape)], axis) if shape[axis] else tensor


def share_tokens(model: Module, cut: ParallelPlan, axis: Axis, attend: Attend) -> None:
    """Spread a transformer's tokens over these ranks."""
    blocks, shares = cut.blocks_of(model), SequenceShares(axis, cut.order)
    for number, block in enumerate(blocks):
        _Entrance(block, shares, cut.enter if number == 0 else {}, cut.follow)
        _within(block.get_submodule(cut.attention), _Replaced(shares, attend))
    blocks[-1].register_forward_hook(functools.partial(_leave, shares, cut.leave))


class _Entrance:
    """What a block is given, cut to this rank's share."""

    def __init__(
        self,
        block: Module,
        shares: SequenceShares,
        enter: Mapping[str, SequenceDim],
        follow: Mapping[str, tuple[SequenceDim, ...]],
    ) -> None:
        self._shares, self._enter, self._follow = shares, enter, follow
        self._signature = inspect.signature(block.forward)
        block.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, block: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        for name, along in self._enter.items():
            self._shares.lengths[along.segments[0]] = given[name].shape[along.axis]
        for name, along in self._enter.items():
            given[name] = self._shares.own(given[name], along)
        for name, rules in self._follow.items():
            if given.get(name) is not None:
                given[name] = self._cut(given[name], rules)
        return bound.args, bound.kwargs

    def _cut(self, value: Any, rules: tuple[SequenceDim, ...]) -> Any:
        if isinstance(value, Tensor):
            return self._shares.own(value, rules[0])
        every = rules * len(value) if len(rules) == 1 else rules
        return tuple(self._shares.own(one, along) for one, along in zip(value, every, strict=True))


def _leave(shares: SequenceShares, rules: tuple[SequenceDim, ...], block: Module, args: Any, made: Any) -> Any:
    """The whole of what the last block has made of shares."""
    single = isinstance(made, Tensor)
    wholes = tuple(
        shares.joined(shares.axis.gather(part), along.axis, along.segments) if along.segments else part
        for part, along in zip((made,) if single else made, rules, strict=True)
    )
    return wholes[0] if single else wholes


def _within(module: Module, mode: TorchFunctionMode) -> None:
    """Have a module run in that mode."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return inner(*args, **kwargs)

    module.forward = forward


def ulysses(shares: SequenceShares, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Tensor:
    """Attention by heads, an Attend: ranks exchange tokens for heads, and each computes some heads over all tokens.

    After Jacobs et al., DeepSpeed Ulysses, 2023. Two exchanges an attention, of this rank's queries, keys and values,
    and of what they give: 4 ÷ ranks × tokens × width numbers leave a rank, less what it keeps. Tokens lie in their
    order for the attention itself, so that each head computes what it computes on one rank.
    """
    axis = shares.axis
    each = torch.unflatten(torch.stack([q, k, v]), 2, (axis.size, -1)).movedim(2, 0)
    q, k, v = shares.joined(axis.transpose(each), TOKENS + 1, shares.order).unbind(0)
    made = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
    back = axis.transpose(shares.apart(made, TOKENS))
    return back.movedim(0, 1).flatten(1, 2)


class RingAttention:
    """An Attend in a ring of ranks, each for `heads.size` neighbours that hold a part of its heads.

    After Liu et al., Ring Attention with Blockwise Transformers, 2023. Keys and values go round the ranks. While it
    computes with what it has, a rank sends it on and receives the next. Sums over parts are put together by their
    log-sum-exps in float32, so results differ from those of one rank by rounding. Keys and values of its share leave a
    rank once for each other rank. Over a product with `ulysses`, ranks first exchange tokens for heads with their
    neighbours; then these go round.
    """

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
