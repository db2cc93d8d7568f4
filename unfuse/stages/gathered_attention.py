"""Attention of several sequences in one call, over their gathered keys and values.

Each has one new token. A call for each sequence and layer launches several kernels, and a GPU then waits for the host.
Here the keys and values of sequences of similar length are copied from the KV cache into one padded tensor, which
exists while its layer is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unfuse.core.text import GATHERED_KV_BYTES
from unfuse.language.paged_kv import KvSequence

#: Shorter sequences count as this long where padding is limited: reading so few tokens costs less than another call.
SHORT = 256


@dataclass(frozen=True)
class GatheredSequences:
    """Sequences with one new token each, which attend in one call."""

    #: The rows of their new tokens in the forward.
    rows: slice
    #: The positions of their tokens in the KV cache, sequence after sequence, each padded to the same length.
    slots: Tensor
    #: What is added to the score of each token, (sequences, 1, 1, tokens): -inf for padding.
    bias: Tensor


def split_by_length(lengths: Sequence[int], block: int, token_bytes: int) -> list[slice]:
    """Return the groups of sequences that attend in one call.

    With padding to whole blocks of the longest sequence, a group has at most twice its tokens, where each sequence
    counts as at least SHORT tokens. Several sequences have at most GATHERED_KV_BYTES together.

    `lengths`: those of the sequences, longest first.
    `token_bytes`: the bytes of a token's keys and values in one layer.
    """
    groups: list[slice] = []
    first = tokens = 0
    for index, length in enumerate(lengths):
        padded_tokens = (index + 1 - first) * -(-lengths[first] // block) * block
        tokens += max(length, SHORT)
        if index > first and (padded_tokens > 2 * tokens or padded_tokens * token_bytes > GATHERED_KV_BYTES):
            groups.append(slice(first, index))
            first, tokens = index, max(length, SHORT)
    return [*groups, slice(first, len(lengths))] if lengths else []


def block_table(sequences: Sequence[KvSequence]) -> list[int]:
    """Return the lengths of the sequences, then the blocks of each.

    The blocks are padded to the same number for each. `sequences`: the longest first.
    """
    columns = sequences[0].blocks
    numbers = [sequence.length for sequence in sequences]
    for sequence in sequences:
        blocks = sequence.block_numbers()
        numbers += blocks + blocks[-1:] * (columns - len(blocks))
    return numbers


def gathered_sequences(rows: slice, table: Tensor, block: int, dtype: torch.dtype) -> GatheredSequences:
    """Return what all layers need to gather these sequences.

    `table`: what `block_table` returns, on the device.
    `dtype`: that of queries.
    """
    lengths, blocks = table.tensor_split([rows.stop - rows.start])
    lengths, blocks = lengths[:, None], blocks.view(len(lengths), -1)
    positions = torch.arange(blocks.shape[1] * block, device=table.device)
    # Padding repeats the last token. Other memory may hold numbers that are not finite, which no bias removes.
    token_indices = positions.minimum(lengths - 1)
    slots = blocks.gather(1, token_indices // block) * block + token_indices % block
    bias = torch.zeros(slots.shape, dtype=dtype, device=table.device).masked_fill_(positions >= lengths, -torch.inf)
    return GatheredSequences(rows, slots.flatten(), bias[:, None, None])


def attend_gathered(query: Tensor, keys: Tensor, values: Tensor, gathered: GatheredSequences, scaling: float) -> Tensor:
    """Attend each new token to its own sequence. Returns (heads, new tokens, width).

    `query`: (heads, new tokens, width). `keys`, `values`: (KV heads, cache tokens, width).
    """
    # The query heads that share a KV head are rows of one product, so that no kernel has to repeat keys and values.
    count = len(gathered.bias)
    kv_heads, _, width = keys.shape
    grouped_query = query.transpose(0, 1).reshape(count, kv_heads, -1, width)
    own_keys, own_values = (
        cache.index_select(1, gathered.slots).view(kv_heads, count, -1, width).transpose(0, 1)
        for cache in (keys, values)
    )
    attended = scaled_dot_product_attention(grouped_query, own_keys, own_values, attn_mask=gathered.bias, scale=scaling)
    return attended.reshape(count, -1, width).transpose(0, 1)
