"""Prompts and texts of a real model in both kinds of step loop: the same keys and values, pieces, and answers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_language import Model, task
from tests.worker.test_step_loop import Bench, Large
from tools.tiny_language import make_language_model
from unfuse.core.codec import decode
from unfuse.core.messages import CachePrefix, TaskCompleted
from unfuse.core.object_ref import ObjectRef
from unfuse.core.task import Lease, OutputDeltas
from unfuse.core.text import PREFILL_CHUNK_TOKENS, TokenDelta
from unfuse.stages.language import Prefill
from unfuse.worker.batch_invariance import InvarianceResults
from unfuse.worker.step_loop import StepLoop

WAIT_S = 20.0
KEYS = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return Model(make_language_model(tmp_path_factory.mktemp("language") / "tiny", positions=300))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same for prompts of several chunks."""
    torch.set_num_threads(1)
    return Model(make_language_model(tmp_path_factory.mktemp("language") / "long", positions=2048))


def made(model: Model, folder: Path, batching: str, overlapped: bool) -> list[tuple[list[TokenDelta], bytes]]:
    """The pieces and the answers of texts that come one after the other, more than the KV has room for at once."""
    chance = random.Random(5)
    _, stage = model.stages(320, batching)
    bench = Bench(folder, {"talk": stage}, 4, overlapped)
    if batching == "exact":
        own = bench.store, bench.results, bench.inbox, bench.sent.append
        bench.loop = StepLoop({"talk": stage}, *own, 4, exactness=InvarianceResults(None), overlapped=overlapped)
    else:
        bench.loop._batches.sizes = Large(4)
    leases = []
    for number in range(8):
        asked: dict[str, Any] = {"temperature": chance.choice([0, 1.2]), "seed": number, "max_tokens": 60}
        asked |= {"logprobs": True, "top_logprobs": 2}
        asked |= {"stop": chance.choice([["e"], ["the", "zzz"], []]), "frequency_penalty": chance.choice([0, 0.5])}
        given = task(model.card, model.ids(3 + 9 * number), **asked)
        leases.append(bench.run("talk", derived=given.derived, **given.params))
        bench.results.attach(leases[-1].task.request, "prompt", given.uploads["prompt"])
        for _ in range(chance.randrange(20)):
            bench.loop.carry_out(bench.loop.decide())
    ends = [bench.outcome(lease) for lease in leases]
    assert all(isinstance(end, TaskCompleted) for end in ends)
    assert stage._sequences.retracted or batching == "exact", "where they are made one by one"
    assert stage._sequences.usage().used == 0
    grown = [[m for m in bench.sent if isinstance(m, OutputDeltas) and m.claim == lease.claim] for lease in leases]
    pieces = [[decode(piece, TokenDelta) for one in own for piece in one.deltas] for own in grown]
    return [(own, bench.results.read(lease.task.request, 0)) for own, lease in zip(pieces, leases, strict=True)]


@pytest.mark.parametrize("batching", ["exact", "batched"])
def test_overlapped_step_loop_generates_the_same_text(model: Model, tmp_path: Path, batching: str) -> None:
    """Given greedy and drawn texts, with penalties and stop strings, in a KV that is too small for all, when both loops
    make them, then each has the same pieces and the same answer; in exact pools to the last bit of its logprobs."""
    normal, overlapped = (made(model, tmp_path / str(kind), batching, kind) for kind in (False, True))
    assert {piece.text for own, _ in normal for piece in own} > {""}
    if batching == "exact":
        assert normal == overlapped
    assert [[(piece.id, piece.text) for piece in own] for own, _ in normal] == [
        [(piece.id, piece.text) for piece in own] for own, _ in overlapped
    ]


def prompts_in(
    model: Model, folder: Path, batching: str, overlapped: bool, lengths: list[int]
) -> tuple[Bench, Prefill, list[Lease]]:
    """A loop that was given prompts of so many tokens, of which whole chunks are kept."""
    prefill, _ = model.stages(4096, batching)
    bench = Bench(folder, {"fill": prefill}, 4, overlapped)
    own = bench.store, bench.results, bench.inbox, bench.sent.append
    if batching == "exact":
        bench.loop = StepLoop({"fill": prefill}, *own, 4, exactness=InvarianceResults(None), overlapped=overlapped)
    else:
        bench.loop._batches.sizes = Large(4)
    leases = []
    for length in lengths:
        given = task(model.card, [3 + (7 * length + place) % 190 for place in range(length)])
        leases.append(bench.run("fill", prefixes=KEYS, derived=given.derived, **given.params))
        bench.results.attach(leases[-1].task.request, "prompt", given.uploads["prompt"])
    return bench, prefill, leases


def tensors_of(bench: Bench, ref: ObjectRef | None) -> Mapping[str, torch.Tensor]:
    assert ref
    return {name: tensor.clone() for name, tensor in bench.store.get(ref, as_torch=True).items()}


def computed(bench: Bench, leases: list[Lease]) -> list[Mapping[str, torch.Tensor]]:
    """What prompts have become, and then what was kept of them, by prompt and in order."""
    found = []
    for lease in leases:
        done = bench.outcome(lease)
        assert isinstance(done, TaskCompleted)
        found.append(tensors_of(bench, done.output))
    for lease in leases:
        kept = [m for m in bench.sent if isinstance(m, CachePrefix) and m.claim == lease.claim]
        assert [m.key for m in kept] == [*KEYS[: len(kept)]]
        found += [tensors_of(bench, m.output) for m in kept]
    return found


@pytest.mark.parametrize("batching", ["exact", "batched"])
def test_overlapped_step_loop_prefills_bitwise_equal_kv(long: Model, tmp_path: Path, batching: str) -> None:
    """Given prompts of one to four chunks, when both loops prefill them, then what they hand on, and what they keep for
    others, has the same bits."""
    both = [prompts_in(long, tmp_path / str(kind), batching, kind, [40, 300, 600, 1000]) for kind in (False, True)]
    normal, overlapped = (computed(bench, leases) for bench, _, leases in both)
    assert len(normal) == len(overlapped) > 8
    for one, other in zip(normal, overlapped, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(prefill._sequences.usage().used == 0 for _, prefill, _ in both)


def watched(
    bench: Bench,
    prefill: Prefill,
    monkeypatch: pytest.MonkeyPatch,
    forward: Callable[[int], object],
    store: Callable[[int], object],
) -> None:
    """Call `forward` with the number of each forward before it, and `store` with that of each portion before it is
    stored."""
    forwards, portions = [0], [0]
    compute, put = prefill._sequences._model.forward, bench.store.put

    def counted(*how: Any) -> Any:
        forwards[0] += 1
        forward(forwards[0])
        return compute(*how)

    def stored(tensors: Any, **how: Any) -> ObjectRef:
        if "kv" in tensors:
            portions[0] += 1
            store(portions[0])
        return put(tensors, **how)

    monkeypatch.setattr(prefill._sequences._model, "forward", counted)
    monkeypatch.setattr(bench.store, "put", stored)


def test_prefill_chunk_is_computed_while_the_previous_one_is_stored(
    long: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given forwards that begin only when the chunk before is being stored, and chunks that are stored only when the
    next forward has begun, then an overlapped loop comes to the end of a prompt."""
    bench, prefill, leases = prompts_in(long, tmp_path, "batched", True, [1000])
    both = threading.Barrier(2)
    watched(
        bench,
        prefill,
        monkeypatch,
        lambda number: both.wait(WAIT_S) if number > 1 else None,
        lambda number: both.wait(WAIT_S),
    )
    assert len(computed(bench, leases)) > 3


def test_prefix_block_stored_late_is_unaffected_by_kv_block_reuse(
    long: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a chunk that is stored only when its place in the KV has other values, as those of a prompt that has taken
    its room, then others find what was computed."""
    calm, _, leases = prompts_in(long, tmp_path / "calm", "batched", False, [1000])
    expected = computed(calm, leases)
    bench, prefill, (lease,) = prompts_in(long, tmp_path / "late", "batched", True, [1000])
    second = threading.Event()

    def overwrite(number: int) -> None:
        if number == 2:
            for values in (*prefill._sequences._kv.keys, *prefill._sequences._kv.values):
                kept = values[:, PREFILL_CHUNK_TOKENS:].clone()
                values.zero_()
                values[:, PREFILL_CHUNK_TOKENS:] = kept
            second.set()

    watched(bench, prefill, monkeypatch, overwrite, lambda number: second.wait(WAIT_S))
    bench.outcome(lease)
    first = next(m for m in bench.sent if isinstance(m, CachePrefix))
    assert torch.equal(tensors_of(bench, first.output)["kv"], expected[1]["kv"])
