"""How the keys and values of a prompt lie in the object by which one worker hands them to another.

What is computed first lies first, so that the object can be read while it is made: chunk after chunk of the prompt,
in it layer after layer, in that head after head, with its keys and then its values. So one layer's share of the heads,
which is what a rank of another degree needs, is one range. Two tensors hold it, however long the prompt is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import override

from unfuse.core.text import CHUNK
from unfuse.language.paged_kv import KvSequence
from unfuse.stages.base import OpenOutput, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.parallel.group import Axis

CHUNKS, REST = "chunks", "rest"  # the tensors: all chunks that are full, and the last one if it is not
ALL = slice(None)


@dataclass(frozen=True)
class KvLayout:
    """The layout for so many `tokens`; a unit is what one layer keeps of one chunk."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype
    tokens: int

    def unit(self, tokens: int) -> tuple[int, ...]:
        """The shape of a unit of so many tokens."""
        return self.heads, 2, tokens, self.width

    def outline(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Names, dtypes and shapes of the tensors."""
        chunks, rest = divmod(self.tokens, CHUNK)
        dtype = str(self.dtype).removeprefix("torch.")
        return [
            (CHUNKS, dtype, (chunks, self.layers, *self.unit(CHUNK))),
            (REST, dtype, (self.layers, *self.unit(rest))),
        ]

    def fits(self, tensors: Mapping[str, Tensor | None]) -> bool:
        """Whether those of such an object are among these tensors."""
        found = [(one.dtype, tuple(one.shape)) for one in map(tensors.get, (CHUNKS, REST)) if one is not None]
        return found == [(self.dtype, shape) for _, _, shape in self.outline()]

    def read(self, tensors: Mapping[str, Any]) -> Iterator[tuple[int, int, Tensor]]:
        """The units in their order, each as (first token, layer, what it has)."""
        for chunk, layers in enumerate([*tensors[CHUNKS], tensors[REST]]):
            yield from ((chunk * CHUNK, layer, unit) for layer, unit in enumerate(layers))


class KvBlocks(NamedTuple):
    """Keys and values of the first `tokens` of a sequence, in tensors of such an object."""

    tokens: int
    tensors: Mapping[str, Tensor | None]


class KvReader:
    """Puts what comes of such an object, in pieces of any length, into a sequence, which has grown by as much.

    Of the heads, the sequence has only `heads`.
    """

    def __init__(self, kv: KvSequence, layout: KvLayout, heads: slice = ALL) -> None:
        self._kv, self._layout, self._heads = kv, layout, heads
        self._unit = torch.empty(prod(layout.unit(CHUNK)), dtype=layout.dtype)
        self._done = self._filled = 0

    @property
    def whole(self) -> bool:
        """Whether everything is there, and still is."""
        return self._kv.length == self._layout.tokens and not self._tokens()

    def take(self, piece: Tensor) -> None:
        """Take the next bytes. Does nothing from when on the sequence has given up what it had."""
        memory = self._unit.view(torch.uint8)
        while piece.numel() and (tokens := self._tokens()) and self._kv.length == self._layout.tokens:
            elements = prod(self._layout.unit(tokens))
            some = piece[: elements * self._layout.dtype.itemsize - self._filled]
            memory[self._filled : self._filled + some.numel()] = some
            self._filled, piece = self._filled + some.numel(), piece[some.numel() :]
            if self._filled == elements * self._layout.dtype.itemsize:
                chunk, layer = divmod(self._done, self._layout.layers)
                unit = self._unit[:elements].view(self._layout.unit(tokens))[self._heads]
                self._kv.write(layer, unit[:, 0], unit[:, 1], chunk * CHUNK)
                self._done, self._filled = self._done + 1, 0

    def _tokens(self) -> int:
        """Those of the unit that comes next; 0 if none does."""
        left = self._layout.tokens - self._done // self._layout.layers * CHUNK
        return max(0, min(CHUNK, left))


class KvWriter:
    """Writes what a sequence has into such an object, as it comes, each unit once; before `to`, nothing.

    It leaves out the `first` chunks.
    """

    def __init__(self, kv: KvSequence, layout: KvLayout, first: int = 0) -> None:
        self._kv, self._layout = kv, layout
        self._done = first * layout.layers
        self._output: OpenOutput | None = None

    def to(self, output: OpenOutput) -> None:
        """Write there from now on."""
        self._output = output

    @property
    def written(self) -> KvBlocks | None:
        """What is there of it, in whole chunks; None without any."""
        chunks = min(self._done, self._layout.tokens // CHUNK * self._layout.layers) // self._layout.layers
        if not (self._output and chunks):
            return None
        whole, rest = (self._output.tensors[name] for name in (CHUNKS, REST))
        return KvBlocks(chunks * CHUNK, {CHUNKS: whole[:chunks], REST: rest[..., :0, :]})

    def layer(self, layer: int) -> None:
        """This layer has what it keeps of the sequence's last chunk. What others can read then is written at once."""
        if not self._output:
            return
        chunk, layers = (self._kv.length - 1) // CHUNK, self._layout.layers
        units = chunk * layers + layer + 1
        if units > self._done and (layer + 1 == layers or self._output.due(*self._written(units))):
            self._write(units, self._output.tensors)
            self._output.written(*self._written(units))

    def stepped(self) -> None:
        """A step of the sequence is made."""

    def prefix_block(self, number: int) -> Tensors:
        """Keys and values of a chunk, of shape (layers, 2, heads, CHUNK, width), for other prompts."""
        span = number * CHUNK, (number + 1) * CHUNK
        return {"kv": torch.stack([torch.stack(self._kv.read(layer, *span)) for layer in range(self._layout.layers)])}

    def finish(self) -> dict[str, Tensor]:
        """All tensors of a sequence that is complete; none if they were written elsewhere."""
        units = -(-self._layout.tokens // CHUNK) * self._layout.layers
        if self._output:
            if self._done < units:  # no step has computed what came last
                self._write(units, self._output.tensors)
                self._output.written(*self._written(units))
            return {}
        tensors = self._room()
        self._write(units, tensors)
        return tensors

    def _write(self, units: int, tensors: Mapping[str, Tensor]) -> None:
        """Write what is there up to this number of units."""
        for unit in range(self._done, units):
            chunk, layer = divmod(unit, self._layout.layers)
            start = chunk * CHUNK
            keys, values = self._kv.read(layer, start, min(start + CHUNK, self._layout.tokens))
            into = self._chunk(tensors, chunk)[layer]
            into[:, 0].copy_(keys)
            into[:, 1].copy_(values)
        self._done = max(self._done, units)

    def _room(self) -> dict[str, Tensor]:
        outline = self._layout.outline()
        return {name: torch.empty(shape, dtype=self._layout.dtype) for name, _, shape in outline}

    def _chunk(self, tensors: Mapping[str, Tensor], chunk: int) -> Tensor:
        """Where all layers of a chunk lie."""
        return tensors[CHUNKS][chunk] if chunk < self._layout.tokens // CHUNK else tensors[REST]

    def _written(self, units: int) -> tuple[str, int]:
        """The tensor in which that many units end, and how many of its elements they are."""
        chunks, rest = divmod(self._layout.tokens, CHUNK)
        full = chunks * self._layout.layers
        if units <= full:
            return CHUNKS, units * prod(self._layout.unit(CHUNK))
        return REST, (units - full) * prod(self._layout.unit(rest))


class SharedKvWriter(KvWriter):
    """Of a sequence of which each of several ranks has some heads, `layout` being that of all: behind a step they
    gather the chunks that it completed, and the first one writes them. What it hands on is read from there, by it.
    """

    def __init__(self, kv: KvSequence, layout: KvLayout, axis: Axis, first: int = 0) -> None:
        super().__init__(kv, layout, first)
        self._axis = axis
        self._made: dict[str, Tensor] = {}

    @property
    @override
    def written(self) -> None:
        """Nothing: it is not there for all of them."""

    @override
    def layer(self, layer: int) -> None:
        pass

    @override
    def stepped(self) -> None:
        layers, tokens = self._layout.layers, self._layout.tokens
        while (start := self._done // layers * CHUNK) < tokens and self._kv.length >= min(start + CHUNK, tokens):
            stop = min(start + CHUNK, tokens)
            own = torch.stack([torch.stack(self._kv.read(layer, start, stop), 1) for layer in range(layers)])
            whole = self._axis.gather(own).movedim(0, 1).flatten(1, 2)
            self._done += layers
            if self._axis.rank == 0:
                self._chunk(self._tensors, start // CHUNK).copy_(whole)
            if self._output:
                self._output.written(*self._written(self._done))

    @override
    def prefix_block(self, number: int) -> Tensors:
        return {"kv": self._tensors[CHUNKS][number].transpose(1, 2).contiguous()}

    @override
    def finish(self) -> dict[str, Tensor]:
        return {} if self._output else dict(self._tensors)

    @property
    def _tensors(self) -> Mapping[str, Tensor]:
        if self._output:
            return self._output.tensors
        self._made = self._made or self._room()
        return self._made
