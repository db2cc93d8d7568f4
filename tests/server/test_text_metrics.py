"""What workers say of texts, on the page of metrics."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tests.server.served import WORKER, serve
from tests.server.test_gateway import as_, sample
from tools.cards import PICTURES
from unfuse.core.messages import Heartbeat, Register, StorageLocations
from unfuse.core.text import TextStats
from unfuse.core.worker_status import WorkerStatus
from unfuse.scheduler.dispatcher import Dispatcher


def test_kv_blocks_prompt_queues_and_retractions_are_in_the_metrics(tmp_path: Path) -> None:
    """Given two workers of one role and what their heartbeats say, then blocks and prompts are those of the last, added
    up, and retractions those of all; who serves no language model has none."""
    with serve(tmp_path, works=False) as served, as_(served) as http:
        dispatcher = Dispatcher(served.scheduler, [], StorageLocations(""))
        loads = (TextStats(1, 9, 5, 9), 0, 2), (TextStats(4, 6, 2, 3), 3, 1), (TextStats(7, 3, 1, 4), 1, 0)
        for name, (load, arriving, retracted) in zip("aba", loads, strict=True):
            beat = Heartbeat(status=WorkerStatus(texts=load, waiting_for_inputs=arriving), retracted=retracted)
            served.run(
                dispatcher.answer(name.encode(), Register(replace(WORKER, id=name, role="language"), (PICTURES,)))
            )
            served.run(dispatcher.answer(name.encode(), beat))
        served.run(dispatcher.answer(b"c", Register(WORKER, (PICTURES,))))
        served.run(dispatcher.answer(b"c", Heartbeat()))
        assert sample(http, 'unfuse_kv_blocks{role="language",state="used"}') == 11
        assert sample(http, 'unfuse_kv_blocks{role="language",state="free"}') == 9
        assert sample(http, "unfuse_prefill_queue") == 3
        assert sample(http, "unfuse_grammar_queue") == 3 + 4
        assert sample(http, "unfuse_decode_transfer_queue") == 4
        assert sample(http, "unfuse_decode_prealloc_queue") == 0
        assert sample(http, "unfuse_retractions_total") == 3
        assert f'role="{WORKER.role}",state' not in http.get("/metrics").text
