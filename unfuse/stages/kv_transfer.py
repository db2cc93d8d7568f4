"""The layout of a prompt's KV in the object that transfers it to another worker.

Data that is computed first comes first, so that the object can be read while it is written (streaming KV transfer):
chunk after chunk of the prompt; within a chunk, layer after layer; within a layer, head after head, each with its keys
and then its values. One layer's share of the heads, which a rank of another parallel degree needs, is therefore one
contiguous range. The object has two tensors, however long the prompt is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import override

from unfuse.core.text import PREFILL_CHUNK_TOKENS
from unfuse.language.paged_kv import KvSequence
from unfuse.stages.base import OpenOutput, Tensors
from unfuse.stages.device_copies import HostCopy

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.parallel.group import Axis

#: The names of the tensors: all full chunks (chunks, layers, heads, 2, PREFILL_CHUNK_TOKENS, width), and the tokens
#: after them (layers, heads, 2, tokens, width).
CHUNKS, LAST_CHUNK = "chunks", "rest"
#: All heads.
ALL = slice(None)


@dataclass(frozen=True)
class KvLayout:
    """The layout of the KV of one prompt.

    A unit is the KV of one layer and one chunk.
    """

    #: Layers of the model.
    layers: int
    #: KV heads of the model, of all ranks.
    heads: int
    #: The width of a head.
    width: int
    #: The dtype of the KV.
    dtype: torch.dtype
    #: Tokens of the prompt.
    tokens: int

    def unit(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of a unit of this many tokens: (heads, 2, tokens, width)."""
        return self.heads, 2, tokens, self.width

    def outline(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return names, dtypes and shapes of the tensors."""
        chunks, last_tokens = divmod(self.tokens, PREFILL_CHUNK_TOKENS)
        dtype = str(self.dtype).removeprefix("torch.")
        return [
            (CHUNKS, dtype, (chunks, self.layers, *self.unit(PREFILL_CHUNK_TOKENS))),
            (LAST_CHUNK, dtype, (self.layers, *self.unit(last_tokens))),
        ]

    def fits(self, tensors: Mapping[str, Tensor | None]) -> bool:
        """Return whether these tensors are an object of this layout."""
        actual_types = [
            (tensor.dtype, tuple(tensor.shape))
            for tensor in map(tensors.get, (CHUNKS, LAST_CHUNK))
            if tensor is not None
        ]
        return actual_types == [(self.dtype, shape) for _, _, shape in self.outline()]

    def read(self, tensors: Mapping[str, Any]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the units in order: (first token, layer, KV of shape `unit`)."""
        for chunk, layers in enumerate([*tensors[CHUNKS], tensors[LAST_CHUNK]]):
            yield from ((chunk * PREFILL_CHUNK_TOKENS, layer, unit) for layer, unit in enumerate(layers))


class KvBlocks(NamedTuple):
    """The KV of the first tokens of a sequence, in tensors of a KvLayout."""

    #: The number of tokens.
    tokens: int
    #: The tensors CHUNKS and LAST_CHUNK.
    tensors: Mapping[str, Tensor | None]


class KvReader:
    """Writes a received object into a sequence, from byte chunks of any length.

    `kv`: a sequence that has already been extended by the object's tokens.
    `heads`: the heads that the sequence has.
    """

    def __init__(self, kv: KvSequence, layout: KvLayout, heads: slice = ALL) -> None:
        self._kv = kv
        self._layout = layout
        self._heads = heads
        self._unit = torch.empty(prod(layout.unit(PREFILL_CHUNK_TOKENS)), dtype=layout.dtype)
        self._done = self._filled = 0

    @property
    def is_complete(self) -> bool:
        """Whether all of the object has been written and the sequence still has it."""
        return self._kv.length == self._layout.tokens and not self._unit_tokens()

    def write(self, piece: Tensor) -> None:
        """Consume the next bytes, uint8 (bytes,). Does nothing once the sequence is retracted."""
        memory = self._unit.view(torch.uint8)

        # A sequence that was retracted between two calls has another length.
        while piece.numel() and (tokens := self._unit_tokens()) and self._kv.length == self._layout.tokens:
            elements = prod(self._layout.unit(tokens))

            next_bytes = piece[: elements * self._layout.dtype.itemsize - self._filled]
            memory[self._filled : self._filled + next_bytes.numel()] = next_bytes
            self._filled, piece = self._filled + next_bytes.numel(), piece[next_bytes.numel() :]

            if self._filled == elements * self._layout.dtype.itemsize:
                chunk, layer = divmod(self._done, self._layout.layers)
                unit = self._unit[:elements].view(self._layout.unit(tokens))[self._heads]
                self._kv.write(layer, unit[:, 0], unit[:, 1], chunk * PREFILL_CHUNK_TOKENS)
                self._done, self._filled = self._done + 1, 0

    def _unit_tokens(self) -> int:
        """Return the tokens of the next unit; 0 after the last one."""
        remaining = self._layout.tokens - self._done // self._layout.layers * PREFILL_CHUNK_TOKENS
        return max(0, min(PREFILL_CHUNK_TOKENS, remaining))


class KvWriter:
    """A writer of a sequence's KV into an object while prefill computes it.

    Each unit is written once. Before `redirect`, nothing is written. Chunks before `first_chunk` are not written.
    The copies from the device are queued during a forward, which does not wait for them. Those that are complete are
    written at the next call.
    """

    def __init__(self, kv: KvSequence, layout: KvLayout, first_chunk: int = 0) -> None:
        self._kv, self._layout = kv, layout
        #: The units that are written, and those whose copies are queued.
        self._done = self._queued = first_chunk * layout.layers
        self._copies: deque[tuple[int, HostCopy]] = deque()
        self._output: OpenOutput | None = None

    def redirect(self, output: OpenOutput) -> None:
        """Write into this output from now on."""
        self._output = output

    @property
    def written(self) -> KvBlocks | None:
        """The written KV, in whole chunks; None without any."""
        chunks = (
            min(self._done, self._layout.tokens // PREFILL_CHUNK_TOKENS * self._layout.layers) // self._layout.layers
        )
        if not (self._output and chunks):
            return None
        full_chunks, last_chunk = (self._output.tensors[name] for name in (CHUNKS, LAST_CHUNK))
        return KvBlocks(
            chunks * PREFILL_CHUNK_TOKENS, {CHUNKS: full_chunks[:chunks], LAST_CHUNK: last_chunk[..., :0, :]}
        )

    def layer(self, layer: int) -> None:
        """Write a layer's KV of the sequence's last chunk, if readers gain data by it.

        Called when the layer is computed. After the step, everything is written.
        """
        if not self._output:
            return
        chunk, layers = (self._kv.length - 1) // PREFILL_CHUNK_TOKENS, self._layout.layers
        units = chunk * layers + layer + 1
        if units > self._queued and (layer + 1 == layers or self._output.completes_chunk(*self._end_of(units))):
            self._queue(units)
        self._write(self._output.tensors, waits=False)

    def stepped(self) -> None:
        """Write all that is queued. Called after each step of the sequence."""
        if self._output:
            self._write(self._output.tensors)

    def prefix_block(self, number: int) -> Tensors:
        """Return the KV of a chunk as a prefix block.

        Its only tensor is `kv`, (layers, 2, heads, PREFILL_CHUNK_TOKENS, width).
        """
        span = number * PREFILL_CHUNK_TOKENS, (number + 1) * PREFILL_CHUNK_TOKENS
        return {"kv": torch.stack([torch.stack(self._kv.read(layer, *span)) for layer in range(self._layout.layers)])}

    def finish(self) -> dict[str, Tensor]:
        """Return all tensors of a complete sequence; none if they were written into an output."""
        units = -(-self._layout.tokens // PREFILL_CHUNK_TOKENS) * self._layout.layers
        if self._output:
            # No step writes the units of cached prefix blocks that end the sequence.
            self._write_until(units, self._output.tensors)
            return {}

        tensors = self._allocate()
        self._write_until(units, tensors)
        return tensors

    def _write_until(self, units: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the remaining units up to this number, one chunk at a time.

        Their copies take pinned memory.
        """
        while self._queued < units:
            self._queue(min(units, self._queued + self._layout.layers))
            self._write(tensors)
        self._write(tensors)

    def _queue(self, units: int) -> None:
        """Queue copies of the remaining units up to this number."""
        if units <= self._queued:
            return
        kv: list[Tensor] = []
        for unit in range(self._queued, units):
            chunk, layer = divmod(unit, self._layout.layers)
            start = chunk * PREFILL_CHUNK_TOKENS
            kv += self._kv.read(layer, start, min(start + PREFILL_CHUNK_TOKENS, self._layout.tokens))
        self._copies.append((units, HostCopy(*kv)))
        self._queued = units

    def _write(self, tensors: Mapping[str, Tensor], *, waits: bool = True) -> None:
        """Write the copies that are complete, or with `waits` all, in order.

        An output announces them.
        """
        while self._copies and (waits or self._copies[0][1].is_ready):
            units, copy = self._copies.popleft()
            kv = iter(copy.read())
            for unit in range(self._done, units):
                chunk, layer = divmod(unit, self._layout.layers)
                target = self._chunk(tensors, chunk)[layer]
                target[:, 0].copy_(next(kv))
                target[:, 1].copy_(next(kv))
            self._done = units
            if self._output:
                self._output.written(*self._end_of(units))

    def _allocate(self) -> dict[str, Tensor]:
        """Return new tensors for the object, with undefined contents."""
        outline = self._layout.outline()
        return {name: torch.empty(shape, dtype=self._layout.dtype) for name, _, shape in outline}

    def _chunk(self, tensors: Mapping[str, Tensor], chunk: int) -> Tensor:
        """Return the part of the tensors that has this chunk: (layers, heads, 2, tokens, width)."""
        return tensors[CHUNKS][chunk] if chunk < self._layout.tokens // PREFILL_CHUNK_TOKENS else tensors[LAST_CHUNK]

    def _end_of(self, units: int) -> tuple[str, int]:
        """Return the position after this many units: the tensor, and elements of it."""
        chunks, last_tokens = divmod(self._layout.tokens, PREFILL_CHUNK_TOKENS)
        full_units = chunks * self._layout.layers
        if units <= full_units:
            return CHUNKS, units * prod(self._layout.unit(PREFILL_CHUNK_TOKENS))
        return LAST_CHUNK, (units - full_units) * prod(self._layout.unit(last_tokens))


class SharedKvWriter(KvWriter):
    """Writes the KV of a sequence with tensor parallelism, where each rank has some heads.

    After a step the ranks gather the chunks that it completed, and rank 0 writes them. Rank 0 reads prefix blocks from
    these tensors.

    `layout`: that of all ranks' heads.
    `axis`: the ranks.
    """

    def __init__(self, kv: KvSequence, layout: KvLayout, axis: Axis, first_chunk: int = 0) -> None:
        super().__init__(kv, layout, first_chunk)
        self._axis = axis
        self._new_tensors: dict[str, Tensor] = {}

    @property
    @override
    def written(self) -> None:
        """None, on all ranks: only rank 0 has the written KV."""

    @override
    def layer(self, layer: int) -> None:
        """Do nothing: ranks gather once per step, not once per layer."""

    @override
    def stepped(self) -> None:
        """Gather and write the chunks that the last step completed."""
        layers, tokens = self._layout.layers, self._layout.tokens
        while (start := self._done // layers * PREFILL_CHUNK_TOKENS) < tokens and self._kv.length >= min(
            start + PREFILL_CHUNK_TOKENS, tokens
        ):
            stop = min(start + PREFILL_CHUNK_TOKENS, tokens)
            own_heads = torch.stack([torch.stack(self._kv.read(layer, start, stop), 1) for layer in range(layers)])
            all_heads = self._axis.gather(own_heads).movedim(0, 1).flatten(1, 2)

            self._done += layers
            if self._axis.rank == 0:
                self._chunk(self._tensors, start // PREFILL_CHUNK_TOKENS).copy_(all_heads)

            if self._output:
                self._output.written(*self._end_of(self._done))

    @override
    def prefix_block(self, number: int) -> Tensors:
        return {"kv": self._tensors[CHUNKS][number].transpose(1, 2).contiguous()}

    @override
    def finish(self) -> dict[str, Tensor]:
        return {} if self._output else dict(self._tensors)

    @property
    def _tensors(self) -> Mapping[str, Tensor]:
        """The tensors to write into: the output's, or new ones."""
        if self._output:
            return self._output.tensors
        self._new_tensors = self._new_tensors or self._allocate()
        return self._new_tensors
