"""Keys and values of many token sequences in one memory, in blocks that each sequence takes as it grows.

After Kwon et al., 2023 (paged attention). There, any free block is taken; here the next one while it is free: then most
sequences lie in one piece, or few, which attention reads in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unfuse.core.errors import TransientError

Span = tuple[int, int]  # the first of adjacent places (blocks or tokens), and the one behind the last


class NoKvBlocks(TransientError):
    """There is no room for more tokens now: wait for a sequence to end, or give up the blocks of one."""


@dataclass(frozen=True)
class KvUsage:
    """How many blocks there are, and how many of them are taken."""

    blocks: int
    used: int

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return self.blocks - self.used


class _Gaps:
    """The free blocks, as gaps between runs, in order."""

    def __init__(self, blocks: int) -> None:
        self._gaps: list[Span] = [(0, blocks)]
        self.free = blocks

    def behind(self, place: int, most: int) -> int:
        """Take up to so many blocks from this place on. Returns how many."""
        index = bisect_left(self._gaps, (place, 0))
        if index == len(self._gaps) or self._gaps[index][0] != place:
            return 0
        taken = min(most, self._gaps[index][1] - place)
        self._cut(index, (place, place + taken))
        return taken

    def begin(self, most: int, tails: set[int]) -> Span:
        """Take up to so many blocks where most fit and, of these, where most room is left to grow.

        In a gap behind the end of a sequence (`tails`), what is left is shared: half before, half behind.
        """

        def room(index: int) -> tuple[int, int]:
            start, end = self._gaps[index]
            fits = min(most, end - start)
            return fits, (end - start - fits) // (2 if start in tails else 1)

        index = max(range(len(self._gaps)), key=room)
        start, end = self._gaps[index]
        fits, left = room(index)
        first = start + left if start in tails else start
        self._cut(index, (first, first + fits))
        return first, first + fits

    def give(self, run: Span) -> None:
        """Take a run back, and join it with the gaps beside it."""
        self.free += run[1] - run[0]
        index = bisect_left(self._gaps, run)
        if index < len(self._gaps) and self._gaps[index][0] == run[1]:
            run = (run[0], self._gaps.pop(index)[1])
        if index and self._gaps[index - 1][1] == run[0]:
            index -= 1
            run = (self._gaps.pop(index)[0], run[1])
        self._gaps.insert(index, run)

    def _cut(self, index: int, run: Span) -> None:
        start, end = self._gaps[index]
        left = [(start, run[0]), (run[1], end)]
        self._gaps[index : index + 1] = [gap for gap in left if gap[0] < gap[1]]
        self.free -= run[1] - run[0]


class PagedKvCache:
    """Room for the keys and values of so many tokens: of each layer two tensors of shape (heads, tokens, width).

    Heads are outermost, so that a rank with a share of the heads can take its own alone. A sequence has the same places
    in every layer. What is there of `tokens` is rounded down to whole blocks. No lock: the caller has one.
    """

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
            raise ValueError(f"room for {tokens} tokens has no block of {block}")
        self.block, self._blocks = block, tokens // block
        shape = (heads, self._blocks * block, width)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.block_bytes = 2 * layers * heads * block * width * dtype.itemsize
        self._gaps = _Gaps(self._blocks)
        self._grown: set[KvSequence] = set()

    def blocks(self, tokens: int) -> int:
        """How many hold so many tokens."""
        return -(-tokens // self.block)

    def sequence(self) -> KvSequence:
        """A sequence without tokens."""
        return KvSequence(self)

    def usage(self) -> KvUsage:
        """The present numbers."""
        return KvUsage(self._blocks, self._blocks - self._gaps.free)

    def _take(self, sequence: KvSequence, runs: list[Span], wanted: int) -> list[Span]:
        """These runs and so many blocks more. Raises NoKvBlocks, with nothing taken."""
        if wanted > self._gaps.free:
            raise NoKvBlocks(
                f"no room for {wanted * self.block} more tokens of keys and values ({self._gaps.free} of "
                f"{self._blocks} blocks of {self.block} are free): wait for others to finish"
            )
        runs = [*runs]
        if runs and wanted:
            first, end = runs.pop()
            more = self._gaps.behind(end, wanted)
            runs.append((first, end + more))
            wanted -= more
        while wanted:
            runs.append(self._gaps.begin(wanted, {one.tail for one in self._grown}))
            wanted -= runs[-1][1] - runs[-1][0]
        self._grown.add(sequence)
        return runs

    def _give(self, sequence: KvSequence, runs: Iterable[Span]) -> None:
        for run in runs:
            self._gaps.give(run)
        if not sequence.length:
            self._grown.discard(sequence)


class KvSequence:
    """The keys and values of one token sequence. What it holds before it is written is undefined."""

    def __init__(self, kv: PagedKvCache) -> None:
        self._kv = kv
        self._runs: list[Span] = []
        self.length = 0  # tokens that it has room for, all of which count

    @property
    def blocks(self) -> int:
        """How many it has."""
        return self._kv.blocks(self.length)

    @property
    def tail(self) -> int:
        """The block behind its last one, into which it would grow; -1 without blocks."""
        return self._runs[-1][1] if self._runs else -1

    def grow(self, tokens: int) -> None:
        """Make it longer by so many tokens; what it has stays where it is. Raises NoKvBlocks, with nothing changed."""
        if tokens < 0:
            raise ValueError(f"a sequence does not grow by {tokens} tokens: truncate it")
        if not tokens:
            return
        wanted = self._kv.blocks(self.length + tokens) - self._kv.blocks(self.length)
        self._runs = self._kv._take(self, self._runs, wanted)
        self.length += tokens

    def truncate(self, tokens: int) -> None:
        """Keep this many tokens, from the first one on, and give back the blocks of the others."""
        if not 0 <= tokens <= self.length:
            raise ValueError(f"a sequence of {self.length} tokens has no first {tokens}")
        kept = [*_within(self._runs, 0, self._kv.blocks(tokens))]
        given = [*_within(self._runs, self._kv.blocks(tokens), self._kv.blocks(self.length))]
        self._runs, self.length = kept, tokens
        self._kv._give(self, given)

    def free(self) -> None:
        """Give back everything. The sequence may grow again."""
        self.truncate(0)

    def spans(self, start: int = 0, stop: int | None = None) -> list[Span]:
        """Where its tokens from `start` to `stop` lie among those of a layer's tensors, in order."""
        stop = self.length if stop is None else stop
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"a sequence of {self.length} tokens has none from {start} to {stop}")
        block = self._kv.block
        return [*_within([(first * block, end * block) for first, end in self._runs], start, stop)]

    def read(self, layer: int, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer from token `start` to `stop`, each of shape (heads, tokens, width).

        A view where they lie in one piece, which changes with the sequence; else a copy.
        """
        spans = self.spans(start, stop)
        return joined(self._kv.keys[layer], spans), joined(self._kv.values[layer], spans)

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int = 0) -> None:
        """Write a layer's keys and values (heads, tokens, width) from token `start`. Raises ValueError beyond it."""
        done = 0
        for first, end in self.spans(start, start + keys.shape[1]):
            part = slice(done, done + end - first)
            self._kv.keys[layer][:, first:end] = keys[:, part]
            self._kv.values[layer][:, first:end] = values[:, part]
            done += end - first


def joined(tensor: Tensor, spans: list[Span]) -> Tensor:
    """What a layer's tensor has in these spans, in order: a view of one span, a copy of several."""
    if len(spans) == 1:
        return tensor[:, slice(*spans[0])]
    return torch.cat([tensor[:, :0], *(tensor[:, start:stop] for start, stop in spans)], 1)


def _within(runs: Iterable[Span], start: int, stop: int) -> Iterator[Span]:
    """The spans of the `start`th to the `stop`th place of these runs."""
    passed = 0
    for first, end in runs:
        low, high = max(start - passed, 0), min(stop - passed, end - first)
        if low < high:
            yield first + low, first + high
        passed += end - first
