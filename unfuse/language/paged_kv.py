"""A KV cache for paged attention.

It stores the keys and values of many token sequences, allocated in blocks.

After Kwon et al., 2023. The paper allocates any free block. This cache prefers the block after the
sequence's last one. Most sequences therefore lie in one or few contiguous runs, which attention reads in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unfuse.core.errors import TransientError

#: A range of adjacent positions, (first, end): `end` is exclusive. Counts blocks or tokens, as the context says.
Span = tuple[int, int]


class NoKvBlocks(TransientError):
    """The KV cache has too few free blocks.

    The caller waits for a sequence to end, or frees one.
    """


@dataclass(frozen=True)
class KvUsage:
    """The total and used number of blocks of a KV cache."""

    #: All blocks of the cache.
    blocks: int
    #: Blocks that belong to a sequence.
    used: int

    @property
    def free(self) -> int:
        """The number of blocks that belong to no sequence."""
        return self.blocks - self.used


class _FreeBlocks:
    """The free blocks, as ordered gaps between the runs in use."""

    def __init__(self, blocks: int) -> None:
        self._gaps: list[Span] = [(0, blocks)]
        self.free = blocks

    def extend_run(self, end: int, max_blocks: int) -> int:
        """Allocate up to `max_blocks` blocks from block `end` on. Returns how many.

        Returns 0 if block `end` is in use.
        """
        index = bisect_left(self._gaps, (end, 0))
        if index == len(self._gaps) or self._gaps[index][0] != end:
            return 0

        blocks = min(max_blocks, self._gaps[index][1] - end)
        self._allocate(index, (end, end + blocks))
        return blocks

    def allocate_run(self, max_blocks: int, tails: set[int]) -> Span:
        """Allocate a run of up to `max_blocks` blocks. Needs at least one free block.

        Chooses the gap where the most blocks fit and, among those, the one with the most room left to extend the run.
        `tails` are the blocks after the ends of all sequences. A gap that starts with one of them is split:
        half of its room is before the new run, for that sequence, and half after it.
        """

        def fit_and_room(index: int) -> tuple[int, int]:
            start, end = self._gaps[index]
            blocks = min(max_blocks, end - start)
            return blocks, (end - start - blocks) // (2 if start in tails else 1)

        index = max(range(len(self._gaps)), key=fit_and_room)
        start, _ = self._gaps[index]
        blocks, room = fit_and_room(index)

        first = start + room if start in tails else start
        self._allocate(index, (first, first + blocks))
        return first, first + blocks

    def release(self, run: Span) -> None:
        """Free a run, and merge it with the adjacent gaps."""
        self.free += run[1] - run[0]
        index = bisect_left(self._gaps, run)
        if index < len(self._gaps) and self._gaps[index][0] == run[1]:
            run = (run[0], self._gaps.pop(index)[1])
        if index and self._gaps[index - 1][1] == run[0]:
            index -= 1
            run = (self._gaps.pop(index)[0], run[1])
        self._gaps.insert(index, run)

    def _allocate(self, index: int, run: Span) -> None:
        """Remove a run from the gap at this index."""
        start, end = self._gaps[index]
        remainders = [(start, run[0]), (run[1], end)]
        self._gaps[index : index + 1] = [gap for gap in remainders if gap[0] < gap[1]]
        self.free -= run[1] - run[0]


class PagedKvCache:
    """A paged KV cache with key and value tensors per layer, (heads, tokens, width).

    Heads are the first dimension, so that with tensor parallelism a rank can copy its share of the heads alone.
    A sequence has the same block positions in every layer. Not thread-safe: the caller locks.

    `tokens`: the capacity, rounded down to whole blocks.
    `block`: tokens per block.
    Raises ValueError if the capacity is less than one block.
    """

    #: Tokens per block.
    block: int
    #: The keys of each layer, (heads, tokens, width).
    keys: list[Tensor]
    #: The values of each layer, (heads, tokens, width).
    values: list[Tensor]
    #: The dtype of keys and values.
    dtype: torch.dtype
    #: Bytes of one block: keys and values of all layers.
    block_bytes: int

    def __init__(
        self,
        layers: int,
        heads: int,
        width: int,
        tokens: int,
        block: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if block < 1 or tokens < block:
            raise ValueError(f"a KV cache of {tokens} tokens cannot have blocks of {block}")

        self.block, self.dtype = block, dtype
        self._blocks = tokens // block
        shape = (heads, self._blocks * block, width)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.block_bytes = 2 * layers * heads * block * width * dtype.itemsize

        self._free_blocks = _FreeBlocks(self._blocks)
        self._sequences: set[KvSequence] = set()  # those with at least one block

    def blocks(self, tokens: int) -> int:
        """Return how many blocks this number of tokens needs."""
        return -(-tokens // self.block)

    def sequence(self) -> KvSequence:
        """Return a new, empty sequence."""
        return KvSequence(self)

    def usage(self) -> KvUsage:
        """Return the current block counts."""
        return KvUsage(self._blocks, self._blocks - self._free_blocks.free)

    def _allocate(self, sequence: KvSequence, runs: list[Span], blocks: int) -> list[Span]:
        """Return a sequence's runs, extended by this many blocks.

        Raises NoKvBlocks if too few blocks are free; nothing is allocated then.
        """
        if blocks > self._free_blocks.free:
            raise NoKvBlocks(
                f"the KV cache has no room for {blocks * self.block} more tokens ({self._free_blocks.free} of "
                f"{self._blocks} blocks of {self.block} are free): wait for other sequences to finish"
            )

        runs = [*runs]
        if runs and blocks:
            first, end = runs.pop()
            extension = self._free_blocks.extend_run(end, blocks)
            runs.append((first, end + extension))
            blocks -= extension

        while blocks:
            tails = {other.tail for other in self._sequences}
            runs.append(self._free_blocks.allocate_run(blocks, tails))
            blocks -= runs[-1][1] - runs[-1][0]

        self._sequences.add(sequence)
        return runs

    def _release(self, sequence: KvSequence, runs: Iterable[Span]) -> None:
        """Free these runs of a sequence, whose length is already updated."""
        for run in runs:
            self._free_blocks.release(run)
        if not sequence.length:
            self._sequences.discard(sequence)


class KvSequence:
    """The keys and values of one token sequence, in blocks of a paged KV cache.

    The contents are undefined until `write`.
    """

    #: Tokens of the sequence. All of them have room in its blocks.
    length: int

    def __init__(self, kv: PagedKvCache) -> None:
        self._kv = kv
        self._runs: list[Span] = []
        self.length = 0

    @property
    def blocks(self) -> int:
        """The number of its blocks."""
        return self._kv.blocks(self.length)

    @property
    def tail(self) -> int:
        """The block after its last one, which extends it in place; -1 without blocks."""
        return self._runs[-1][1] if self._runs else -1

    def block_numbers(self) -> list[int]:
        """Return the numbers of its blocks, in the order of its tokens."""
        return [number for run in self._runs for number in range(*run)]

    def extend(self, tokens: int) -> None:
        """Extend the sequence by this many tokens. Its present tokens stay in place.

        Raises NoKvBlocks if too few blocks are free; nothing is changed then. Raises ValueError for a negative number.
        """
        if tokens < 0:
            raise ValueError(f"a sequence cannot grow by {tokens} tokens: truncate it")
        if not tokens:
            return

        blocks = self._kv.blocks(self.length + tokens) - self._kv.blocks(self.length)
        self._runs = self._kv._allocate(self, self._runs, blocks)
        self.length += tokens

    def truncate(self, tokens: int) -> None:
        """Shorten the sequence to its first `tokens` tokens, and free the blocks of the others.

        Raises ValueError unless 0 ≤ tokens ≤ length.
        """
        if not 0 <= tokens <= self.length:
            raise ValueError(f"a sequence of {self.length} tokens cannot be truncated to {tokens}")

        blocks = self._kv.blocks(tokens)
        freed_runs = [*_subspans(self._runs, blocks, self._kv.blocks(self.length))]
        self._runs = [*_subspans(self._runs, 0, blocks)]
        self.length = tokens
        self._kv._release(self, freed_runs)

    def free(self) -> None:
        """Free all blocks. The sequence can be extended again."""
        self.truncate(0)

    def spans(self, start: int = 0, stop: int | None = None) -> list[Span]:
        """Return the positions of tokens `start` to `stop` in a layer's tensors, as spans.

        The spans are along the token dimension, in the order of the sequence. `stop` is exclusive, and the end of the
        sequence by default. Raises ValueError if the range is not within the sequence.
        """
        stop = self.length if stop is None else stop
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"a sequence of {self.length} tokens has no tokens {start} to {stop}")

        block = self._kv.block
        return [*_subspans([(first * block, end * block) for first, end in self._runs], start, stop)]

    def read(self, layer: int, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values of tokens `start` to `stop`, each (heads, tokens, width).

        They are views of the cache, which later writes change, if the tokens are contiguous; otherwise copies.
        """
        spans = self.spans(start, stop)
        return joined(self._kv.keys[layer], spans), joined(self._kv.values[layer], spans)

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int = 0) -> None:
        """Write a layer's keys and values, each (heads, tokens, width), from token `start` on.

        Raises ValueError if they extend beyond the sequence; nothing is written then.
        """
        offset = 0
        for first, end in self.spans(start, start + keys.shape[1]):
            source = slice(offset, offset + end - first)
            # The host does not wait for copies to a device: those from pageable memory are staged at once.
            self._kv.keys[layer][:, first:end].copy_(keys[:, source], non_blocking=True)
            self._kv.values[layer][:, first:end].copy_(values[:, source], non_blocking=True)
            offset += end - first


def joined(tensor: Tensor, spans: list[Span]) -> Tensor:
    """Return a layer's tensor in these spans, (heads, tokens, width).

    A view for one span, a copy for several. No spans give an empty tensor.
    """
    if len(spans) == 1:
        return tensor[:, slice(*spans[0])]
    return torch.cat([tensor[:, :0], *(tensor[:, start:stop] for start, stop in spans)], 1)


def _subspans(runs: Iterable[Span], start: int, stop: int) -> Iterator[Span]:
    """Yield the spans of positions `start` to `stop` of these runs, counted in order."""
    offset = 0
    for first, end in runs:
        low = max(start - offset, 0)
        high = min(stop - offset, end - first)
        if low < high:
            yield first + low, first + high
        offset += end - first
