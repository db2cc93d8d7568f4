"""Attention of many sequences in one call, against a call for each of them."""

from __future__ import annotations

import random

import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import examples
from unfuse.core.text import GATHERED_KV_BYTES
from unfuse.language.paged_kv import KvSequence, PagedKvCache
from unfuse.stages.gathered_attention import SHORT, attend_gathered, block_table, gathered_sequences, split_by_length

lengths_of_texts = st.lists(st.integers(1, 5_000), min_size=1, max_size=80)


def filled(lengths: list[int], block: int, kv_heads: int, width: int, prefix: int, seed: int) -> list[KvSequence]:
    """Sequences that grew in turns, so that they lie in several runs. All begin with the same tokens."""
    source = torch.Generator().manual_seed(seed)
    kv = PagedKvCache(1, kv_heads, width, sum(-(-length // block) + 1 for length in lengths) * block, block)
    kv.keys[0].fill_(torch.nan)
    kv.values[0].fill_(torch.nan)
    sequences = [kv.sequence() for _ in lengths]
    shared = torch.randn(2, kv_heads, prefix, width, generator=source)
    while growing := [pair for pair in zip(sequences, lengths, strict=True) if pair[0].length < pair[1]]:
        for sequence, length in growing:
            sequence.extend(min(length - sequence.length, random.Random(seed).randint(1, 2 * block)))
    for sequence, length in zip(sequences, lengths, strict=True):
        keys, values = torch.randn(2, kv_heads, length, width, generator=source)
        keys[:, :prefix], values[:, :prefix] = shared[0, :, :length], shared[1, :, :length]
        sequence.write(0, keys, values)
    return sequences


def one_by_one(query: Tensor, sequences: list[KvSequence], scaling: float) -> Tensor:
    """Each new token attends to its own sequence, in a call of its own. Shapes are those of `attend_gathered`."""
    attended = []
    for row, sequence in enumerate(sequences):
        keys, values = sequence.read(0)
        one = scaled_dot_product_attention(
            query[None, :, row : row + 1], keys[None], values[None], scale=scaling, enable_gqa=True
        )
        attended.append(one[0])
    return torch.cat(attended, 1)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    block=st.sampled_from([1, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    width=st.sampled_from([8, 16, 20]),
    prefix=st.sampled_from([0, 5, 40]),
    seed=st.integers(0, 1 << 20),
)
def test_one_call_agrees_with_a_call_for_each_sequence(
    lengths: list[int], block: int, kv_heads: int, group: int, width: int, prefix: int, seed: int
) -> None:
    """Also beside numbers that are not finite: those that no token wrote, in blocks of a sequence and around them."""
    lengths.sort(reverse=True)
    sequences = filled(lengths, block, kv_heads, width, prefix, seed)
    (kv,) = {sequence._kv for sequence in sequences}
    query = torch.randn(kv_heads * group, len(lengths), width, generator=torch.Generator().manual_seed(seed))

    table = torch.tensor(block_table(sequences))
    gathered = gathered_sequences(slice(0, len(lengths)), table, block, torch.float32)
    together = attend_gathered(query, kv.keys[0], kv.values[0], gathered, 0.3)

    torch.testing.assert_close(together, one_by_one(query, sequences, 0.3), rtol=1e-5, atol=1e-5)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=lengths_of_texts,
    block=st.sampled_from([1, 4, 16]),
    token_bytes=st.sampled_from([1 << 8, 1 << 12, 1 << 16, 1 << 20]),
)
def test_padding_and_memory_of_a_call_are_limited(lengths: list[int], block: int, token_bytes: int) -> None:
    lengths.sort(reverse=True)
    groups = split_by_length(lengths, block, token_bytes)

    assert [index for group in groups for index in range(len(lengths))[group]] == [*range(len(lengths))]
    for group in groups:
        own = lengths[group]
        padded = len(own) * -(-own[0] // block) * block
        assert len(own) == 1 or padded <= 2 * sum(max(length, SHORT) for length in own)
        assert len(own) == 1 or padded * token_bytes <= GATHERED_KV_BYTES


def test_texts_of_similar_length_share_one_call_and_others_do_not() -> None:
    assert split_by_length([1000] * 64, 16, 4096) == [slice(0, 32), slice(32, 64)]
    assert split_by_length([1000, *[500] * 31], 16, 4096) == [slice(0, 32)]
    assert split_by_length([8000, *[20] * 9], 16, 256) == [slice(0, 2), slice(2, 10)]
    assert split_by_length([], 16, 4096) == []


class Calls(TorchDispatchMode):
    """The aten operations that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def test_calls_do_not_depend_on_the_number_of_sequences() -> None:
    def names(count: int) -> list[str]:
        sequences = filled([40] * count, 16, 2, 8, 0, 0)
        (kv,) = {sequence._kv for sequence in sequences}
        query, table = torch.randn(4, count, 8), torch.tensor(block_table(sequences))
        with Calls() as calls:
            gathered = gathered_sequences(slice(0, count), table, 16, torch.float32)
            attend_gathered(query, kv.keys[0], kv.values[0], gathered, 0.3)
        return calls.names

    assert names(2) == names(9)
