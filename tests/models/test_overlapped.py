"""Texts of a real model in both kinds of step loop: the same pieces, and the same answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_language import Model, task
from tests.worker.test_step_loop import Bench, Large
from tools.tiny_language import make_language_model
from unfuse.core.codec import decode
from unfuse.core.growth import Grown
from unfuse.core.messages import Done
from unfuse.core.text import Piece
from unfuse.worker.exactness import Exactness
from unfuse.worker.step_loop import StepLoop


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return Model(make_language_model(tmp_path_factory.mktemp("language") / "tiny", positions=300))


def made(model: Model, folder: Path, batching: str, overlapped: bool) -> list[tuple[list[Piece], bytes]]:
    """The pieces and the answers of texts that come one after the other, more than the KV has room for at once."""
    chance = random.Random(5)
    _, stage = model.stages(320, batching)
    bench = Bench(folder, {"talk": stage}, 4, overlapped)
    if batching == "exact":
        own = bench.store, bench.results, bench.inbox, bench.sent.append
        bench.loop = StepLoop({"talk": stage}, *own, 4, exactness=Exactness(None), overlapped=overlapped)
    else:
        bench.loop._batches.sizes = Large(4)
    leases = []
    for number in range(8):
        asked: dict[str, Any] = {"temperature": chance.choice([0, 1.2]), "seed": number, "max_tokens": 60}
        asked |= {"logprobs": True, "top_logprobs": 2}
        asked |= {"stop": chance.choice([["e"], ["the", "zzz"], []]), "frequency_penalty": chance.choice([0, 0.5])}
        given = task(model.card, model.ids(3 + 9 * number), **asked)
        leases.append(bench.run("talk", **given.params))
        bench.results.attach(leases[-1].task.request, "prompt", given.uploads["prompt"])
        for _ in range(chance.randrange(20)):
            bench.loop.carry_out(bench.loop.decide())
    ends = [bench.outcome(lease) for lease in leases]
    assert all(isinstance(end, Done) for end in ends)
    assert stage._sequences.retracted or batching == "exact", "where they are made one by one"
    assert stage._sequences.usage().used == 0
    grown = [[m for m in bench.sent if isinstance(m, Grown) and m.claim == lease.claim] for lease in leases]
    pieces = [[decode(piece, Piece) for one in own for piece in one.pieces] for own in grown]
    return [(own, bench.results.read(lease.task.request, 0)) for own, lease in zip(pieces, leases, strict=True)]


@pytest.mark.parametrize("batching", ["exact", "batched"])
def test_overlapped_texts_are_those_of_the_normal_loop(model: Model, tmp_path: Path, batching: str) -> None:
    """Given greedy and drawn texts, with penalties and stop strings, in a KV that is too small for all, when both loops
    make them, then each has the same pieces and the same answer; in exact pools to the last bit of its logprobs."""
    normal, overlapped = (made(model, tmp_path / str(kind), batching, kind) for kind in (False, True))
    assert {piece.text for own, _ in normal for piece in own} > {""}
    if batching == "exact":
        assert normal == overlapped
    assert [[(piece.id, piece.text) for piece in own] for own, _ in normal] == [
        [(piece.id, piece.text) for piece in own] for own, _ in overlapped
    ]
