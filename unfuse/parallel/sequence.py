"""Sequence parallel attention: each rank has a share of the tokens, and attends to all.

Before the first block, each rank cuts its share out of every segment (text, picture). After the last block, all ranks
gather the whole tensors again. The rest of the model runs on whole tensors. Shares have equal length. If the length of
a segment does not divide, the last shares end in padding (zeros), which attention leaves out. Attention is computed by
`ulysses` or by `RingAttention`.
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

#: Shares are multiples of ROWS tokens, because matrix products process rows in groups of this size, and round the rows
#: of an incomplete group differently. A share has at least FEW tokens, unless the whole segment has fewer, because
#: products of fewer rows round differently, too.
ROWS, FEW = 8, 16

#: torch's attention kernel for GPUs reads a bias in groups of this many numbers.
BIAS_ALIGNMENT = 8

#: The dimension of tokens in the tensors of attention: (rows, heads, tokens, width).
TOKENS = 2


class SequenceShares:
    """The length of each segment in the running forward, and the ranks' shares of it.

    `axis`: the ranks that share the tokens.
    `order`: the segments in their order within attention.
    """

    def __init__(self, axis: Axis, order: Sequence[str]) -> None:
        self.axis, self.order = axis, order
        #: Tokens of each segment, set at the first block of each forward.
        self.lengths: dict[str, int] = {}

    def padded_share(self, segment: str) -> int:
        """Return how many tokens of a segment each rank has, with padding."""
        length = self.lengths[segment]
        return max(-(-length // (self.axis.size * ROWS)) * ROWS, FEW if length >= FEW else 0)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, tokens) of each segment within the shares of a rank, in order.

        `start` is an offset within that rank's tokens. `tokens` counts real tokens, without padding.
        """
        spans, start = [], 0
        for segment in self.order:
            share = self.padded_share(segment)
            spans.append((start, max(0, min(share, self.lengths[segment] - rank * share))))
            start += share
        return spans

    @property
    def total_tokens(self) -> int:
        """The number of tokens of all segments, without padding."""
        return sum(self.lengths[segment] for segment in self.order)

    def own_share(self, tensor: Tensor, rule: SequenceDim) -> Tensor:
        """Return this rank's share of a tensor: its tokens only, along the dimension `rule.axis`.

        `tensor` is (…, tokens, …). Returns (…, padded share of tokens, …), or the tensor itself if it has no tokens by
        `rule.dims`.
        """
        if rule.dims not in (0, tensor.dim()):
            return tensor
        parts = torch.split(tensor, [self.lengths[segment] for segment in rule.segments], rule.axis)
        shares = [
            self._own_tokens(part, rule.axis, self.padded_share(segment))
            for part, segment in zip(parts, rule.segments, strict=True)
        ]
        return shares[0] if len(shares) == 1 else torch.cat(shares, rule.axis)

    def _own_tokens(self, part: Tensor, dim: int, share: int) -> Tensor:
        """Return this rank's padded share of one segment, `share` tokens along this dimension."""
        length = part.shape[dim]
        start = min(self.axis.rank * share, length)
        return _pad(part.narrow(dim, start, min(share, length - start)), dim, share)

    def gather(self, shares: Tensor, dim: int, segments: Sequence[str]) -> Tensor:
        """Return the whole tensor from the shares of all ranks, without padding.

        `shares` is (ranks, …, share of tokens, …), where `dim` is the token dimension of one share. Returns (…,
        tokens, …) in the order of the segments.
        """
        parts = torch.split(shares, [self.padded_share(segment) for segment in segments], dim + 1)

        wholes = []
        for part, segment in zip(parts, segments, strict=True):
            by_rank = part.movedim(0, dim)
            whole = by_rank.reshape(*part.shape[1 : dim + 1], -1, *part.shape[dim + 2 :])
            wholes.append(whole.narrow(dim, 0, self.lengths[segment]))

        return wholes[0] if len(wholes) == 1 else torch.cat(wholes, dim)

    def split_segments(self, whole: Tensor, dim: int) -> Tensor:
        """Split a whole tensor into padded shares, the inverse of `gather`.

        `whole` is (…, tokens, …) along `dim`. Returns (ranks, …, share of tokens, …).
        """
        shares, parts = [], torch.split(whole, [self.lengths[segment] for segment in self.order], dim)
        for segment, part in zip(self.order, parts, strict=True):
            share = self.padded_share(segment)
            padded = _pad(part, dim, share * self.axis.size)
            shares.append(torch.unflatten(padded, dim, (self.axis.size, share)).movedim(dim, 0))
        return torch.cat(shares, dim + 1)


#: Attention over the tokens of all ranks. Arguments: the shares; this rank's queries, keys and values, each (rows,
#: heads, share of tokens, width); a mask over all tokens in order (…, tokens), or None; and options of torch's
#: attention. Returns (rows, heads, share of tokens, width).
Attend = Callable[..., Tensor]


class _AttentionOverride(TorchFunctionMode):
    """Replaces torch's attention by attention over all ranks."""

    def __init__(self, shares: SequenceShares, attend: Attend) -> None:
        super().__init__()
        self._shares, self._attend = shares, attend

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, or attend over all ranks in the place of `scaled_dot_product_attention`."""
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))

        arguments = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | dict(kwargs or {})
        q = arguments.pop("query")
        k = arguments.pop("key")
        v = arguments.pop("value")
        mask = arguments.pop("attn_mask", None)
        if arguments.pop("enable_gqa", False) and q.shape[1] != k.shape[1]:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))

        shares = self._shares
        # A mask that was cut with the tokens is gathered, because each rank attends to all tokens.
        if mask is not None and mask.shape[-1] != shares.total_tokens:
            mask = shares.gather(shares.axis.gather(mask), mask.dim() - 1, shares.order)
        return self._attend(shares, q, k, v, mask, **arguments)


def _pad(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Return a tensor padded with zeros to a length along one dimension.

    A tensor that has this length already is returned itself.
    """
    shape = [*tensor.shape]
    shape[dim] = length - tensor.shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim) if shape[dim] else tensor


def shard_tokens(model: Module, plan: ParallelPlan, axis: Axis, attend: Attend) -> None:
    """Make the ranks of this axis share a transformer's tokens (sequence parallel)."""
    blocks, shares = plan.blocks_of(model), SequenceShares(axis, plan.order)
    for index, block in enumerate(blocks):
        _BlockEntry(block, shares, plan.block_inputs if index == 0 else {}, plan.follow)
        # Only this submodule: other attention of a block, such as that to a text, is computed on each rank alone.
        _run_in_mode(block.get_submodule(plan.attention), _AttentionOverride(shares, attend))
    blocks[-1].register_forward_hook(functools.partial(_gather_outputs, shares, plan.block_outputs))


class _BlockEntry:
    """A hook that cuts the arguments of a block to this rank's share of tokens.

    `block_inputs`: the arguments of the first block with the tokens; empty for the other blocks.
    `follow`: further arguments with a dimension of tokens.
    """

    def __init__(
        self,
        block: Module,
        shares: SequenceShares,
        block_inputs: Mapping[str, SequenceDim],
        follow: Mapping[str, tuple[SequenceDim, ...]],
    ) -> None:
        self._shares = shares
        self._block_inputs = block_inputs
        self._follow = follow
        self._signature = inspect.signature(block.forward)
        block.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, block: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        bound = self._signature.bind(*args, **kwargs)
        arguments = bound.arguments

        # All lengths are read before an argument is cut.
        for name, rule in self._block_inputs.items():
            self._shares.lengths[rule.segments[0]] = arguments[name].shape[rule.axis]

        for name, rule in self._block_inputs.items():
            arguments[name] = self._shares.own_share(arguments[name], rule)

        for name, rules in self._follow.items():
            if arguments.get(name) is not None:
                arguments[name] = self._shard(arguments[name], rules)

        return bound.args, bound.kwargs

    def _shard(self, value: Any, rules: tuple[SequenceDim, ...]) -> Any:
        """Return this rank's share of a tensor, or of each tensor of a tuple.

        A single rule is for all tensors of a tuple.
        """
        if isinstance(value, Tensor):
            return self._shares.own_share(value, rules[0])
        rule_per_element = rules * len(value) if len(rules) == 1 else rules
        return tuple(self._shares.own_share(tensor, rule) for tensor, rule in zip(value, rule_per_element, strict=True))


def _gather_outputs(
    shares: SequenceShares, rules: tuple[SequenceDim, ...], block: Module, args: Any, outputs: Any
) -> Any:
    """Return the whole outputs of the last block, gathered from the shares of all ranks."""
    is_single = isinstance(outputs, Tensor)
    wholes = tuple(
        shares.gather(shares.axis.gather(output), rule.axis, rule.segments) if rule.segments else output
        for output, rule in zip((outputs,) if is_single else outputs, rules, strict=True)
    )
    return wholes[0] if is_single else wholes


def _run_in_mode(module: Module, mode: TorchFunctionMode) -> None:
    """Make a module run its forward in this torch function mode."""
    original_forward = module.forward

    @functools.wraps(original_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original_forward(*args, **kwargs)

    module.forward = forward


def ulysses(shares: SequenceShares, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Ulysses attention, an `Attend`: ranks exchange tokens for heads.

    Each rank computes some heads over all tokens. After Jacobs et al., DeepSpeed Ulysses, 2023.

    `q`, `k`, `v`: (rows, heads, share of tokens, width).
    `mask`: (…, tokens), or None.
    Returns (rows, heads, share of tokens, width).

    There are two exchanges per attention: one of queries, keys and values, and one of the results. Each rank sends
    4 ÷ ranks × tokens × width numbers, less its own part. During attention the tokens are in their order, without
    padding, so that each head computes the same as on one rank.
    """
    axis = shares.axis
    by_heads = torch.unflatten(torch.stack([q, k, v]), 2, (axis.size, -1)).movedim(2, 0)
    q, k, v = shares.gather(axis.transpose(by_heads), TOKENS + 1, shares.order).unbind(0)

    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    by_tokens = axis.transpose(shares.split_segments(attended, TOKENS))
    return by_tokens.movedim(0, 1).flatten(1, 2)


class RingAttention:
    """Ring attention, an `Attend`: keys and values pass round the ranks.

    After Liu et al., Ring Attention with Blockwise Transformers, 2023. While a rank computes with the keys and values
    that it has, it sends them on and receives the next. Partial results are combined by their log-sum-exps in float32,
    so they differ from those of one rank by rounding. The keys and values of a share leave their rank once for each
    other rank.

    In a product with `ulysses`, the ring has groups of `heads.size` neighbours, each with a part of the heads: ranks
    first exchange tokens for heads with their neighbours, then keys and values pass round the ring.

    `ring`: the axis along which keys and values pass.
    `heads`: the axis of neighbours that share out the heads.
    """

    def __init__(self, ring: Axis, heads: Axis) -> None:
        self._ring, self._heads = ring, heads

    def __call__(
        self, shares: SequenceShares, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Return the attention of this rank's tokens to all tokens.

        `q`, `k`, `v`: (rows, heads, share of tokens, width).
        `mask`: (…, tokens), or None.
        Returns (rows, heads, share of tokens, width).
        """
        neighbours = self._heads.size

        if neighbours > 1:
            by_heads = torch.unflatten(torch.stack([q, k, v]), 2, (neighbours, -1)).movedim(2, 0)
            q, k, v = self._heads.transpose(by_heads).movedim(0, 3).flatten(3, 4).unbind(0)

        attended = self._attend_in_ring(shares, q, torch.stack([k, v]), mask, options.get("scale"))

        if neighbours > 1:
            by_tokens = self._heads.transpose(torch.unflatten(attended, 2, (neighbours, -1)).movedim(2, 0))
            attended = by_tokens.movedim(0, 1).flatten(1, 2)
        return attended

    def _attend_in_ring(
        self, shares: SequenceShares, q: Tensor, kv: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Return the attention of these queries to all keys and values of the ring.

        `q` is (rows, heads, tokens, width), `kv` is (2, rows, heads, tokens, width). Returns the shape of `q`.
        """
        total = q.new_zeros(q.shape, dtype=torch.float32)
        log_sum_exp = q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)

        for round_number in range(self._ring.size):
            # The next keys and values arrive while this rank computes with the current ones.
            receive_next = self._ring.send_to_next(kv) if round_number + 1 < self._ring.size else None
            offsets, positions = self._token_positions(
                shares, (self._ring.rank - round_number) % self._ring.size, kv.shape[-2]
            )
            if len(offsets):
                k, v = kv[..., offsets.to(kv.device), :].unbind(0)
                part, part_log_sum_exp = _attention(
                    q, k, v, None if mask is None else mask[..., positions.to(mask.device)], scale
                )
                new_log_sum_exp = torch.logaddexp(log_sum_exp, part_log_sum_exp)
                # A part whose keys are all masked has weight 0. Computed, it would be NaN: exp(-inf + inf).
                total = torch.where(
                    log_sum_exp.isneginf()[..., None], 0.0, total * (log_sum_exp - new_log_sum_exp).exp()[..., None]
                )
                total += torch.where(
                    part_log_sum_exp.isneginf()[..., None],
                    0.0,
                    part.float() * (part_log_sum_exp - new_log_sum_exp).exp()[..., None],
                )
                log_sum_exp = new_log_sum_exp
            kv = receive_next() if receive_next else kv

        return total.to(q.dtype)

    def _token_positions(self, shares: SequenceShares, ring_rank: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the positions of one ring rank's tokens, and its neighbours', without padding.

        The first result indexes the `tokens` tokens of these ranks, with padding. The second one indexes the tokens of
        all ranks. Both are 1-d.
        """
        neighbours = self._heads.size
        offsets = list[Tensor]()
        positions = list[Tensor]()

        for index in range(neighbours):
            rank = ring_rank * neighbours + index
            rank_start = index * (tokens // neighbours)
            segment_start = 0
            for segment, (start, count) in zip(shares.order, shares.ranges(rank), strict=True):
                offsets.append(torch.arange(rank_start + start, rank_start + start + count))
                position = segment_start + rank * shares.padded_share(segment)
                positions.append(torch.arange(position, position + count))
                segment_start += shares.lengths[segment]
        return torch.cat(offsets), torch.cat(positions)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the attention to these keys and values, and the log-sum-exp of its weights.

    `q`: (rows, heads, query tokens, width).
    `k`, `v`: (rows, heads, key tokens, width).
    `mask`: broadcastable to (rows, heads, query tokens, key tokens): bool (True: attend) or added to the scores; or
    None.
    Returns (rows, heads, query tokens, width) and float32 (rows, heads, query tokens).
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    if q.device.type == "cpu":
        attended, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
    else:
        attended, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None if mask is None else _aligned_bias(mask, q, k), True, scale=scale
        )

    log_sum_exp = log_sum_exp[..., : q.shape[-2]].float()  # on GPUs torch pads the queries
    # If all keys are masked, torch returns 0, which is the log-sum-exp of one key.
    if mask is not None:
        log_sum_exp = log_sum_exp.masked_fill(mask.isneginf().all(-1), float("-inf"))
    return attended, log_sum_exp


def _aligned_bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return a mask as a bias that torch's kernel for GPUs can read.

    The kernel needs strides that are multiples of BIAS_ALIGNMENT, except those of dimensions that are repeated.
    `scaled_dot_product_attention` pads the mask in the same way, before it calls the kernel.

    `mask`: broadcastable to (rows, heads, query tokens, key tokens).
    Returns (rows, heads, query tokens, key tokens).
    """
    tokens = mask.shape[-1]
    padded = functional.pad(mask.to(q.dtype).contiguous(), (0, -tokens % BIAS_ALIGNMENT))
    return padded[..., :tokens].expand(*q.shape[:-1], k.shape[-2])
