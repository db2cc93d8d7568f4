"""Objects that are written step by step, and read meanwhile, by those who map them and those who ask their owner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from unfuse.core.errors import ArenaFull, ObjectLost
from unfuse.core.object_ref import CHUNK_BYTES
from unfuse.stores.base import checksums_of
from unfuse.stores.tensor_store import TensorStore

CHUNK = CHUNK_BYTES // 4
OUTLINE = [("a", "float32", (3, CHUNK)), ("b", "float32", (10,))]


def shared(owner: str, **more: Any) -> TensorStore:
    return TensorStore.create("shared_memory", owner=owner, run_dir=os.environ["UNFUSE_RUN_DIR"], **more)


@pytest.fixture
def owner() -> Iterator[TensorStore]:
    with shared("w", capacity=64 << 20) as store:
        yield store


@pytest.fixture
def writer(owner: TensorStore) -> Iterator[TensorStore]:
    """Another process's store, which writes into the owner's memory."""
    with shared("w", address=owner.address, write_token=owner.write_token) as store:
        yield store


@pytest.fixture
def reader(owner: TensorStore) -> Iterator[TensorStore]:
    with shared("r", capacity=1 << 20) as store:
        store.register_owners({"w": ("node", owner.address)})
        yield store


def test_unsealed_object_exposes_complete_chunks_until_sealed(
    owner: TensorStore, writer: TensorStore, reader: TensorStore
) -> None:
    """Given an output that is begun, when a half of it is written, then its owner tells of what is complete, and nobody
    maps it; at the end, a reader has all of it by the ref that was there from the beginning."""
    output = writer.start_output(OUTLINE, request="req_a", stage="s", attempt=1)
    assert output and owner.arena
    assert not output.ref.is_whole and owner.arena.written(output.ref.id) == ((), False)
    output.tensors["a"][:2] = 7
    assert output.completes_chunk("a", CHUNK) and not output.completes_chunk("a", CHUNK - 1)
    output.written("a", 3 * CHUNK // 2)
    assert [len(owner.arena.written(output.ref.id)[0]), output.completes_chunk("a", 2 * CHUNK - 1)] == [1, False]
    assert not reader.is_whole(output.ref) and not owner.is_whole(output.ref)
    with pytest.raises(ObjectLost):
        reader.get(output.ref)
    output.tensors["a"][2], output.tensors["b"][:] = 8, 9
    ref = output.finish()
    output.abort()
    assert ref.is_whole and ref.id == output.ref.id and reader.is_whole(output.ref)
    with reader.get(output.ref, as_torch=True) as held:
        assert torch.equal(held["b"], torch.full((10,), 9.0)) and held["a"].sum() == CHUNK * (7 + 7 + 8)
    assert checksums_of(reader.open(output.ref).bytes()) == ref.checksums


def test_small_output_is_filled_at_once_and_must_match_its_outline(owner: TensorStore, reader: TensorStore) -> None:
    """Given an output of one chunk that is begun all the same, then it is whole when it is filled, with tensors of any
    strides; those of another shape or dtype, or name, are refused."""
    outline = [("a", "float32", (3, 5)), ("b", "bfloat16", (10,))]
    output = owner.start_output(outline, request="req_a", stage="s", attempt=1, small=True)
    assert output and not output.ref.is_whole and not reader.is_whole(output.ref)
    made = {"a": torch.arange(15.0).reshape(5, 3).mT, "b": torch.ones(10, dtype=torch.bfloat16)}
    for wrong in ({**made, "a": made["a"].mT}, {**made, "b": torch.ones(10)}, {"a": made["a"]}):
        with pytest.raises(ValueError, match="was announced"):
            output.fill(wrong)
    output.fill({})
    output.fill(made)
    assert owner.arena and len(owner.arena.written(output.ref.id)[0]) == 1
    ref = output.finish()
    with reader.get(output.ref, as_torch=True) as held:
        assert all(held[name].equal(made[name]) for name in made)
    assert checksums_of(reader.open(output.ref).bytes()) == ref.checksums


def test_aborted_or_released_outputs_raise_object_lost(owner: TensorStore) -> None:
    """Given one output whose task ends, one whose request is over, and one whose writer dies, then each is lost, and
    writing goes on to no effect."""
    writer = shared("w", address=owner.address, write_token=owner.write_token)
    ended, over, left = (writer.start_output(OUTLINE, request=f"req_{n}", stage="s", attempt=1) for n in "abc")
    assert ended and over and left
    ended.abort()
    ended.abort()
    owner.release("req_b")
    for part in range(1, 4):
        over.written("a", part * CHUNK)
    with pytest.raises(ObjectLost, match="its request has ended"):
        over.finish()
    writer.close()
    for output in (ended, over, left):
        with pytest.raises(ObjectLost):
            while not owner.is_whole(output.ref):
                pass
    assert owner.usage().used == 0


def test_start_output_returns_none_if_early_reads_are_impossible(owner: TensorStore) -> None:
    """Given an output of one chunk that is not wanted so, or a store that others cannot read meanwhile, then there is
    none; nor without room."""
    assert owner.start_output(OUTLINE[1:], request="req_a", stage="s", attempt=1) is None
    with TensorStore.create("memory") as store:
        assert store.start_output(OUTLINE, request="req_a", stage="s", attempt=1) is None
    with pytest.raises(ArenaFull):
        owner.start_output([("a", "float32", (40, CHUNK))], request="req_a", stage="s", attempt=1)
    assert owner.usage().used == 0
