"""Keys and values in the object by which they are handed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from unfuse.language.paged_kv import KvSequence, PagedKvCache
from unfuse.stages.kv_transfer import CHUNKS, LAST_CHUNK, PREFILL_CHUNK_TOKENS, KvLayout, KvReader, KvWriter

LAYERS, HEADS, WIDTH = 3, 2, 4


class Output:
    """What others can read of it is told every so many elements."""

    def __init__(self, layout: KvLayout, every: int) -> None:
        self.tensors: Mapping[str, Any] = {
            name: torch.full(shape, torch.nan, dtype=layout.dtype) for name, _, shape in layout.outline()
        }
        self.every, self.told = every, list[int]()

    def _all(self, name: str, elements: int) -> int:
        return elements if name == CHUNKS else self.tensors[CHUNKS].numel() + elements

    def completes_chunk(self, name: str, elements: int) -> bool:
        return self._all(name, elements) >= (self.told[-1] if self.told else 0) + self.every

    def written(self, name: str, elements: int) -> None:
        self.told.append(self._all(name, elements))
        assert not self.bytes[: self.told[-1]].isnan().any()

    @property
    def bytes(self) -> Tensor:
        return torch.cat([self.tensors[CHUNKS].flatten(), self.tensors[LAST_CHUNK].flatten()])


def filled(tokens: int, seed: int = 0) -> tuple[KvSequence, KvLayout, list[tuple[Tensor, Tensor]]]:
    """A sequence that lies in pieces, and what it has by layer."""
    kv = PagedKvCache(LAYERS, HEADS, WIDTH, 4 * PREFILL_CHUNK_TOKENS, block=16)
    apart = [kv.sequence() for _ in range(2 * PREFILL_CHUNK_TOKENS // 16)]
    for one in apart:
        one.extend(16)
    for one in apart[::2]:
        one.free()
    sequence = kv.sequence()
    sequence.extend(tokens)
    source = torch.Generator().manual_seed(seed)
    made = [tuple(torch.rand(HEADS, tokens, WIDTH, generator=source) for _ in "kv") for _ in range(LAYERS)]
    for layer, (keys, values) in enumerate(made):
        sequence.write(layer, keys, values)
    return sequence, KvLayout(LAYERS, HEADS, WIDTH, torch.float32, tokens), made  # type: ignore[return-value]


def written(tokens: int, every: int = 1 << 30) -> tuple[Output, list[tuple[Tensor, Tensor]]]:
    """What a sequence that grew chunk by chunk has written."""
    kv, layout, made = filled(tokens)
    output, writer, length = Output(layout, every), KvWriter(kv, layout), kv.length
    writer.redirect(output)
    for end in [*range(PREFILL_CHUNK_TOKENS, length, PREFILL_CHUNK_TOKENS), length]:
        kv.length = end
        for layer in range(LAYERS):
            writer.layer(layer)
    assert writer.finish() == {}
    return output, made


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 600])
def test_kv_object_is_equal_written_by_chunk_or_at_the_end(tokens: int) -> None:
    """Given sequences around whole chunks, then each layer's keys and values lie where the layout says, whether they
    were written chunk by chunk or at the end, and a reader puts them back, in pieces of whatever length."""
    output, made = written(tokens)
    kv, layout, _ = filled(tokens)
    whole = KvWriter(kv, layout).finish()
    for name in (CHUNKS, LAST_CHUNK):
        assert torch.equal(whole[name], output.tensors[name])
    for start, layer, unit in layout.read(whole):
        keys, values = (each[:, start : start + PREFILL_CHUNK_TOKENS] for each in made[layer])
        assert torch.equal(unit[:, 0], keys) and torch.equal(unit[:, 1], values)
    for size in (1 << 20, 1000, 77):
        other = filled(tokens, seed=1)[0]
        reader = KvReader(other, layout)
        pieces = output.bytes.view(torch.uint8).split(size)
        for piece in pieces:
            assert not reader.is_complete
            reader.write(piece)
        assert reader.is_complete
        for layer, (keys, values) in enumerate(made):
            assert torch.equal(other.read(layer)[0], keys) and torch.equal(other.read(layer)[1], values)


@pytest.mark.parametrize("tokens", [255, 600])
def test_kv_reader_of_a_rank_stores_only_its_heads(tokens: int) -> None:
    """Given a sequence that has one of the heads, then a reader puts that in place, and nothing of the others."""
    output, made = written(tokens)
    layout = KvLayout(LAYERS, HEADS, WIDTH, torch.float32, tokens)
    for head in range(HEADS):
        heads = slice(head, head + 1)
        kv = PagedKvCache(LAYERS, 1, WIDTH, 4 * PREFILL_CHUNK_TOKENS).sequence()
        kv.extend(tokens)
        reader = KvReader(kv, layout, heads)
        for piece in output.bytes.view(torch.uint8).split(1000):
            reader.write(piece)
        assert reader.is_complete
        for layer, (keys, values) in enumerate(made):
            assert torch.equal(kv.read(layer)[0], keys[heads]) and torch.equal(kv.read(layer)[1], values[heads])


def test_kv_progress_is_reported_per_layer_or_chunk_by_unit_size() -> None:
    """Given a layer that is as much as others can read at a time, then each is told; given more, chunks are."""
    unit = 2 * HEADS * WIDTH * PREFILL_CHUNK_TOKENS
    assert written(600, every=unit)[0].told == [unit * n for n in range(1, 2 * LAYERS + 1)] + [
        unit * 2 * LAYERS + 2 * HEADS * WIDTH * (600 - 512) * LAYERS
    ]
    assert len(written(600)[0].told) == 3


def test_recomputed_step_does_not_change_announced_kv() -> None:
    """Given a sequence that gave up what it had and is computed again, with other values, then what was told stays."""
    kv, layout, made = filled(600)
    output, writer = Output(layout, 1), KvWriter(kv, layout)
    writer.redirect(output)
    kv.length = PREFILL_CHUNK_TOKENS
    for layer in range(2):
        writer.layer(layer)
    before = output.bytes.clone()
    for layer, (keys, values) in enumerate(made):
        kv.write(layer, -keys[:, :PREFILL_CHUNK_TOKENS], -values[:, :PREFILL_CHUNK_TOKENS])
    for layer in range(LAYERS):
        writer.layer(layer)
    assert len(output.told) == 3 and torch.equal(output.bytes[: output.told[1]], before[: output.told[1]])


def test_heads_of_a_kv_unit_are_contiguous() -> None:
    """A rank of another degree takes its heads alone: of each unit one range."""
    layout = KvLayout(LAYERS, HEADS, WIDTH, torch.float32, 600)
    unit = torch.empty(layout.unit(PREFILL_CHUNK_TOKENS))
    assert all(unit[head:].is_contiguous() for head in range(HEADS))
    whole = KvWriter(filled(600)[0], layout).finish()
    assert layout.fits({"pictures": unit, **whole}) and not layout.fits({CHUNKS: whole[CHUNKS]})
    assert not layout.fits({}) and not layout.fits({CHUNKS: unit, LAST_CHUNK: unit})


def test_kv_reader_of_a_freed_sequence_writes_nothing() -> None:
    """Given a sequence that others took the blocks of amid its transfer, then it is not whole, and nobody's blocks are
    written."""
    output, _ = written(600)
    kv, layout, _ = filled(600, seed=1)
    reader = KvReader(kv, layout)
    first, *others = output.bytes.view(torch.uint8).split(5000)
    reader.write(first)
    kv.free()
    for piece in others:
        reader.write(piece)
    assert not reader.is_complete and not kv.length
