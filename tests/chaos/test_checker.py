"""The checker has to see what is wrong: for each of its counts a history that is wrong in that way, made by hand."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import pytest

from tests.chaos.checker import Fault, Held, Verdict, check, quantile, summary
from tests.chaos.history import Asked, Client, Final, History, Leaks, Load, Operation, Told, healthy

ASKED = Asked("a calm one", 7)
POISON = Asked("a bad one [crash@denoise]", 7, healthy=False)


def event(type: str, seq: int, stage: str = "", attempt: int = 0, worker: str = "") -> dict[str, Any]:
    return {"type": type, "seq": seq, "at": 100.0 + seq, "stage": stage, "attempt": attempt, "worker": worker}


def ran(*attempts: tuple[str, int, str], end: str = "completed") -> list[dict[str, Any]]:
    """Events of a request whose only stage was started and completed by these."""
    events = [event("queued", 1)]
    for type, attempt, worker in attempts:
        events.append(event(type, len(events) + 1, "denoise.0", attempt, worker))
    return [*events, event(end, len(events) + 1)]


GOOD = ran(("stage_started", 1, "a"), ("stage_completed", 1, "a"))


def told(status: str = "completed", events: Any = GOOD, hashes: Any = None, attempts: int = 1, key: str = "k") -> Told:
    view = {"id": "", "status": status, "attempts": attempts, "metadata": {"operation": key}, "error": None}
    right = [ASKED.right] if status == "completed" else []
    return Told(view, list(events), right if hashes is None else hashes)


def done(outcome: Any = "ok", ids: Any = ("req_1",), hashes: Any = (ASKED.right,), asked: Asked = ASKED) -> Operation:
    return Operation("k", asked, "wait", 100.0, 110.0, outcome, list(ids), list(hashes))


def verdict(operation: Operation | None = None, final: Final | None = None, faults: Any = ()) -> Verdict:
    return check("drill", [operation or done()], final or Final({"req_1": told()}), faults)


def wrong(found: Verdict) -> set[str]:
    return {name for name, what in found.wrongs.items() if what}


def test_correct_history_passes_the_checker() -> None:
    found = verdict()
    found.require_nothing_wrong()
    assert (found.operations, found.acknowledged, found.completed, found.recovered) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    ("what", "operation", "final"),
    [
        ("lost", done(), Final({})),
        ("lost", done(ids=()), Final({})),
        ("lost", done(), Final({"req_1": told("in_progress")})),
        ("lost", done(), Final({"req_1": told("failed", ran(end="failed"), [ASKED.right])})),
        ("lost", done(), Final({"req_1": told(hashes=[])})),
        ("lost", done(), Final({"req_1": told(events=GOOD[:-1])})),
        ("unexpected", done(), Final({"req_1": told(), "req_2": told(key="of nobody")})),
        ("unexpected", done(asked=POISON, hashes=[POISON.right]), Final({"req_1": told(hashes=[POISON.right])})),
        ("duplicated", done(ids=("req_1", "req_2")), Final({"req_1": told(), "req_2": told()})),
        ("duplicated", done(), Final({"req_1": told(), "req_2": told()})),
        ("duplicated", done(), Final({"req_1": told(events=[*GOOD, event("completed", 9)])})),
        ("dead_lettered", done("ok"), Final({"req_1": told("failed", ran(end="failed"))}, {"req_1": "{}"})),
        (
            "stale",
            done(),
            Final(
                {
                    "req_1": told(
                        events=ran(("stage_started", 1, "a"), ("retrying", 1, "a"), ("stage_completed", 1, "a"))
                    )
                }
            ),
        ),
        (
            "stale",
            done(),
            Final(
                {
                    "req_1": told(
                        events=ran(("stage_started", 1, "a"), ("stage_started", 2, "b"), ("stage_completed", 1, "a"))
                    )
                }
            ),
        ),
        ("stale", done(), Final({"req_1": told(events=ran(("stage_started", 1, "a"), ("stage_completed", 1, "b")))})),
        (
            "stale",
            done(),
            Final(
                {
                    "req_1": told(
                        events=ran(("stage_started", 1, "a"), ("stage_completed", 1, "a"), ("stage_completed", 1, "a"))
                    )
                }
            ),
        ),
        ("stale", done(), Final({"req_1": told(events=[*GOOD, event("stage_completed", 9, "denoise.0", 2, "b")])})),
        ("wrong_bytes", done(hashes=["other"]), Final({"req_1": told(hashes=["other"])})),
        ("errors", done("unknown"), Final({"req_1": told()})),
        ("errors", done("fail"), Final({"req_1": told()})),
        ("leaks", done(), Final({"req_1": told()}, leaks=Leaks(bytes=64))),
        ("leaks", done(), Final({"req_1": told()}, leaks=Leaks(leases=1))),
        ("leaks", done(), Final({"req_1": told()}, leaks=Leaks(tasks=1))),
        ("leaks", done(), Final({"req_1": told()}, leaks=Leaks(requests=1))),
        ("leaks", done(), Final({"req_1": told()}, leaks=Leaks(reported=1))),
    ],
)
def test_each_violation_is_counted_under_its_own_kind(what: str, operation: Operation, final: Final) -> None:
    found = verdict(operation, final)
    assert wrong(found) == {what}
    with pytest.raises(AssertionError, match=what):
        found.require_nothing_wrong()


def test_rejected_call_is_counted_and_must_not_have_a_request() -> None:
    away = msgspec.structs.replace(done("fail", (), ()), refused=1, error="429")
    found = check("drill", [away], Final({}))
    assert (wrong(found), found.refused, found.acknowledged) == (set(), 1, 0)
    assert wrong(check("drill", [away], Final({"req_1": told()}))) == {"unexpected"}


def test_results_that_differ_between_reads_count_as_duplicated_and_wrong() -> None:
    assert wrong(verdict(final=Final({"req_1": told(hashes=[ASKED.right, "other"])}))) == {"duplicated", "wrong_bytes"}


def test_completion_of_a_recomputed_output_is_not_stale() -> None:
    again = ran(
        ("stage_started", 1, "a"),
        ("stage_completed", 1, "a"),
        ("retrying", 1, "a"),
        ("stage_started", 2, "b"),
        ("stage_completed", 2, "b"),
    )
    found = verdict(final=Final({"req_1": told(events=again, attempts=2)}))
    assert (wrong(found), found.recovered) == (set(), 1)


def test_failed_poison_request_with_evidence_is_counted_as_dead() -> None:
    ended = told("failed", ran(end="failed"), [])
    found = verdict(done("fail", hashes=(), asked=POISON), Final({"req_1": ended}, {"req_1": "killed by SIGKILL"}))
    assert (wrong(found), found.poison_dead) == (set(), 1)


def test_recovery_time_ends_at_next_start_or_completion_of_leased_task() -> None:
    events = ran(
        ("stage_started", 1, "a"), ("retrying", 1, "a"), ("stage_started", 2, "b"), ("stage_completed", 2, "b")
    )
    held = (Held("req_1", "denoise.0", 1),)
    faults = [
        Fault(101.5, "kill worker", "a", held),  # started again at 104
        Fault(104.5, "kill compute", "b", (Held("req_1", "denoise.0", 2),)),  # completed at 105
        Fault(200.0, "kill worker", "b", held),  # nothing follows
        Fault(101.5, "kill worker", "a", held, spare=False),  # nobody was there to take over
    ]
    final = Final({"req_1": told(events=events, attempts=2)})
    found = verdict(final=final, faults=faults)
    assert found.recovery_s == {"kill worker": [2.5], "kill compute": [0.5]}
    assert (found.kills, found.faults) == (4, {"kill worker": 3, "kill compute": 1})
    disturbed = verdict(final=final, faults=[Fault(102.0, "kill redis", "redis"), faults[0]])
    assert disturbed.recovery_s == {"kill worker, control plane away": [2.5]}


def test_summary_lists_every_drill_with_recovery_quantiles() -> None:
    assert [quantile([3.0, 1.0, 2.0], part) for part in (0.5, 0.99, 1.0)] == [2.0, 3.0, 3.0]
    assert quantile([], 0.99) == 0.0
    one, other = Verdict("one", faults={"kill worker": 2}), Verdict("other", recovery_s={"kill worker": [2.0]})
    text = summary([msgspec.json.encode(verdict).decode() for verdict in (one, other, one)])
    assert text.count("one") == 1
    assert "faults: 2 kill worker" in text
    assert "recovery after kill worker: p50 2.00 s, p99 2.00 s, max 2.00 s of 1 tasks" in text


class _Gateway(BaseHTTPRequestHandler):
    """Answers POSTs by a script of (status, headers, body); None hangs up. Results are read from `results`."""

    script: list[tuple[int, dict[str, str], dict[str, Any]] | None] = []
    results: list[bytes] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if (answer := self.script.pop(0)) is None:
            self.close_connection = True
            self.connection.close()
            return
        self.reply(answer[0], answer[1], json.dumps(answer[2]).encode())

    def do_GET(self) -> None:
        if self.path.endswith("/result/0"):
            self.reply(200, {}, self.results.pop(0))
        else:
            self.reply(200, {}, json.dumps({"id": "req_1", "status": "completed"}).encode())

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def gateway(*script: Any, results: Any = ()) -> Iterator[int]:
    _Gateway.script, _Gateway.results = list(script), list(results)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def performed(port: int, mode: Any = "poll") -> Operation:
    class Steady:
        def shuffle(self, _: object) -> None:
            pass

        def uniform(self, *_: float) -> float:
            return 0.0

    client = Client([port], History(), Steady(), Event())  # type: ignore[arg-type]
    try:
        return client.perform("k", ASKED, mode)
    finally:
        client.close()


def refusal(status: int, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, {"error": {"message": "no"}}


def test_client_retries_until_accepted_and_records_each_rejection() -> None:
    accepted = (202, {}, {"id": "req_1"})
    script = [None, refusal(503, retry_after="1"), refusal(429, retry_after="1"), accepted]
    with gateway(*script, results=[b"bytes"]) as port:
        operation = performed(port)
    assert (operation.outcome, operation.ids, len(operation.hashes)) == ("ok", ["req_1"], 1)
    assert (operation.lost, operation.refused, operation.unwell) == (2, 1, [])


def test_429_without_retry_after_is_counted_as_an_error() -> None:
    with gateway(refusal(429), (202, {}, {"id": "req_1"}), results=[b"bytes"]) as port:
        operation = performed(port)
    assert wrong(verdict(operation, Final({"req_1": told(hashes=operation.hashes)}))) == {"errors", "wrong_bytes"}
    assert len(operation.unwell) == 1


def test_client_in_once_mode_does_not_retry_after_429() -> None:
    with gateway(refusal(429, retry_after="1")) as port:
        operation = performed(port, "once")
    assert operation.turned_away


def test_failed_call_is_recorded_with_its_request_id() -> None:
    with gateway((500, {}, {"error": {"message": "req_1: it crashed"}})) as port:
        operation = performed(port, "wait")
    assert (operation.outcome, operation.ids) == ("fail", ["req_1"])


def test_history_file_ignores_a_torn_last_line(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    History(file).add(done())
    with file.open("ab") as torn:
        torn.write(msgspec.json.encode(done())[:40])
    assert [operation.key for operation in History(file).operations] == ["k"]


def test_load_clients_share_the_work_and_propagate_errors() -> None:
    script = [(202, {}, {"id": f"req_{number}"}) for number in range(6)]
    with (
        gateway(*script, results=[b""] * 6) as port,
        Load([port], healthy(6, "a", 1, ["poll"]), 3, 1, History()) as load,
    ):
        assert sorted(operation.key for operation in load.finish().operations) == [f"a-1-{n}" for n in range(6)]
    with Load([1], iter([("k", None, "wait")]), 1, 1, History()) as load, pytest.raises(AttributeError):  # type: ignore[list-item]
        load.finish()


def test_scripted_gateway_returns_its_scripted_result() -> None:
    with gateway(results=[b"x"]) as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/result/0") as answer:
        assert answer.read() == b"x"


def test_faults_during_a_lasting_fault_are_reported() -> None:
    faults = [
        Fault(10.0, "fill disk", "disk", lasts=4.0),
        Fault(9.0, "kill worker", "a"),
        Fault(12.0, "kill compute", "a"),
        Fault(13.0, "kill shard", "shard-0", lasts=4.0),
        Fault(16.0, "kill scheduler", "serve-0"),
    ]
    assert verdict(faults=faults).beside == {
        "fill disk": ["kill compute", "kill shard"],
        "kill shard": ["kill scheduler"],
    }
