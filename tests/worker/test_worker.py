"""A worker's parent: what it asks for, what it does with a task that it cannot run, and what it logs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from unfuse.core.messages import TaskFailed
from unfuse.core.task import Claim
from unfuse.core.worker_status import ChangedFile
from unfuse.worker.link import WITHDRAW, log_outcome
from unfuse.worker.worker import Worker

FILE = ChangedFile("vae/model.safetensors", compared=True)


@pytest.mark.parametrize(("changed", "asks"), [((), True), (("a",), True), (("a", "b"), False)])
def test_worker_requests_tasks_while_it_serves_at_least_one_pool(changed: tuple[str, ...], asks: bool) -> None:
    worker: Any = SimpleNamespace(
        _objects=SimpleNamespace(free=1, usage=lambda: SimpleNamespace(used=0)),
        _executor=SimpleNamespace(ready=True),
        _swapper=SimpleNamespace(target_model="", loaded_model="all"),
        _served=SimpleNamespace(pools=("a", "b")),
        _weights=SimpleNamespace(changed=dict.fromkeys(changed, FILE)),
        _slots=SimpleNamespace(free_bytes=lambda *_: {}, next_request=lambda *_: "an Ask"),
        _affinity="",
    )
    assert (Worker._next_request(worker) is not WITHDRAW) is asks


async def test_inputs_of_a_handed_back_task_are_dropped_in_compute() -> None:
    """Given a worker that is about to load other weights when the inputs of a task are there, then the task is handed
    back, and its compute process told that it does not come."""
    done = list[Any]()

    async def note(what: Any) -> None:
        done.append(what)

    async def found(*_: Any) -> str:
        return "it"

    lease: Any = SimpleNamespace(claim="claim", task=SimpleNamespace(planned=SimpleNamespace(pool="pool")))
    worker: Any = SimpleNamespace(
        _adapter_fetcher=SimpleNamespace(fetch=found),
        _outputs=SimpleNamespace(read=found),
        _slots=SimpleNamespace(arrived=lambda _: None),
        _swapper=SimpleNamespace(is_loaded=lambda _: False),
        _executor=SimpleNamespace(ready=True, replies=SimpleNamespace(drop=note)),
        _objects=SimpleNamespace(copies=SimpleNamespace(fetch=found)),
        _end=note,
    )
    await Worker._run(worker, lease, granted=None)  # type: ignore[arg-type]
    dropped, failed = done
    assert dropped == "claim"
    assert (failed.claim, failed.kind) == ("claim", "hand_back")


def test_task_handed_back_by_a_drain_is_not_logged_as_a_failure() -> None:
    claim = Claim("req_0", "denoise", 1, b"secret")
    with capture_logs() as told:
        log_outcome(TaskFailed(claim, "hand_back", "the worker is draining", reason="drain"))
        log_outcome(TaskFailed(claim, "hand_back", "the worker cannot run the task now", reason="compute"))
    assert [(one["event"], one["log_level"]) for one in told] == [
        ("task handed back", "info"),
        ("task failed", "warning"),
    ]
    assert "secret" not in str(told)
