"""Requests over plain HTTP: objects, lists, events, results, cancelling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from tests.server.served import IDLE, PICTURES, Served, picture, serve
from unfuse.core.errors import TransientError
from unfuse.core.model_spec import PromptVocabulary
from unfuse.core.request import Event
from unfuse.queues.base import DeclaredModels
from unfuse.scheduler.cold_starts import DEFAULT_COLD_START_S
from unfuse.server.requests import written
from unfuse.server.responses import with_comments

URL = "/v1/images/generations"


def submit(http: httpx2.Client, model: str = "test/pictures", **asked: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": "a red circle", **asked}
    return dict(http.post(URL, json=body, headers={"prefer": "respond-async"}).json())


def finished(served: Served, http: httpx2.Client, **asked: Any) -> dict[str, Any]:
    id = submit(http, **asked)["id"]
    served.next_event(id, "completed")
    return dict(http.get(f"/v1/requests/{id}").json())


def events(http: httpx2.Client, id: str, after: str | None = None) -> list[tuple[int, str]]:
    headers = {} if after is None else {"last-event-id": after}
    with http.sse(f"/v1/requests/{id}/events", headers=headers) as source:
        return [(int(message.id), message.event) for message in source]


def test_completed_request_object_lists_stages_and_results(served: Served, http: httpx2.Client) -> None:
    view = finished(served, http, seed=5, n=2, metadata={"job": "7"})
    assert (view["status"], view["progress"], view["seed"], view["attempts"]) == ("completed", 100, 5, 1)
    assert view["completed_at"] >= view["created_at"] > 1.7e9
    assert view["metadata"] == {"job": "7"}
    denoise = next(stage for stage in view["stages"] if stage["name"] == "denoise.1")
    assert (denoise["worker"], denoise["attempt"], denoise["run_s"]) == ("worker-1", 1, 0.2)
    assert [one["content_type"] for one in view["result"]] == ["image/png", "image/png"]
    assert view["result"][1]["url"] == f"{served.url}/v1/requests/{view['id']}/result/1"
    assert view["result"][1]["bytes"] == len(picture(6))


def test_prompt_words_outside_the_vocabulary_return_a_hint(tmp_path: Path) -> None:
    knowing = replace(PICTURES, vocabulary=PromptVocabulary(("a", "red", "circle"), "circles"))
    hint = "art was not trained on spaceship: it generates circles"
    asked = {"model": "art", "prompt": "a spaceship"}
    with (
        serve(tmp_path, cards=[knowing], names={"art": PICTURES.name}) as served,
        httpx2.Client(base_url=served.url, trust_env=False) as http,
    ):
        view = finished(served, http, **asked)
        assert view["hint"] == hint
        assert http.get("/v1/requests?limit=1").json()["data"][0]["hint"] == hint
        answer = http.post(URL, json=asked).json()
        assert (answer["hint"], len(answer["data"])) == (hint, 1)
        assert http.post("/v1/videos", json=asked).json()["hint"] == hint
        assert finished(served, http, model="art", prompt="A red circle!")["hint"] is None
        assert "hint" not in http.post(URL, json={"model": "art", "prompt": "a circle"}).json()


def test_running_request_reports_its_stage_and_worker(served: Served, http: httpx2.Client) -> None:
    with served.held():
        id = submit(http)["id"]
        served.next_event(id, "stage_started")
        view = http.get(f"/v1/requests/{id}").json()
    assert (view["status"], view["stage"], view["progress"]) == ("in_progress", "text_encode", 0)
    assert (view["stages"][0]["worker"], view["stages"][0]["status"]) == ("worker-1", "leased")


def test_waiting_request_reports_its_queue_position(http: httpx2.Client) -> None:
    first, second = submit(http, IDLE.name), submit(http, IDLE.name)
    assert second["queue_position"] == first["queue_position"] + 1


def test_eta_is_reported_once_the_model_has_been_measured(served: Served, http: httpx2.Client) -> None:
    assert finished(served, http)["eta_s"] is None
    with served.held():
        id = submit(http)["id"]
        served.next_event(id, "stage_started")
        assert http.get(f"/v1/requests/{id}").json()["eta_s"] > 0
    assert submit(http, IDLE.name)["eta_s"] is None


def test_unknown_request_returns_404(http: httpx2.Client) -> None:
    for path in ("", "/events", "/result/0"):
        response = http.get(f"/v1/requests/req_nope{path}")
        assert response.status_code == 404
        assert "req_nope" in response.json()["error"]["message"]
    assert http.post("/v1/requests/req_nope/cancel").status_code == 404


def test_request_list_is_paginated_newest_first(served: Served, http: httpx2.Client) -> None:
    ids = [submit(http, IDLE.name)["id"] for _ in range(3)]
    first = http.get("/v1/requests", params={"limit": 2}).json()
    rest = http.get("/v1/requests", params={"limit": 1, "after": first["last_id"]}).json()
    assert [one["id"] for one in [*first["data"], *rest["data"]]] == ids[::-1]
    assert (first["object"], first["has_more"], first["first_id"]) == ("list", True, ids[2])


def test_request_list_is_filtered_by_status(served: Served, http: httpx2.Client) -> None:
    done, waiting = finished(served, http)["id"], submit(http, IDLE.name)["id"]
    by_status = {
        status: {one["id"] for one in http.get("/v1/requests", params={"status": status, "limit": 1000}).json()["data"]}
        for status in ("completed", "queued", "failed")
    }
    assert done in by_status["completed"]
    assert waiting in by_status["queued"]
    assert not {done, waiting} & by_status["failed"]
    assert not by_status["completed"] & by_status["queued"]


@pytest.mark.parametrize("params", [{"limit": 0}, {"limit": 1001}, {"limit": "many"}, {"status": "lost"}])
def test_invalid_list_parameter_returns_400_naming_it(http: httpx2.Client, params: dict[str, str]) -> None:
    response = http.get("/v1/requests", params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(params))


def test_cancel_ends_a_waiting_request_and_ignores_a_completed_one(served: Served, http: httpx2.Client) -> None:
    id = submit(http, IDLE.name)["id"]
    assert http.post(f"/v1/requests/{id}/cancel").json()["status"] == "cancelled"
    assert http.post(f"/v1/requests/{id}/cancel").json()["status"] == "cancelled"
    assert served.run(served.queue.load(id)).context.status == "cancelled"
    done = finished(served, http)["id"]
    assert http.post(f"/v1/requests/{done}/cancel").json()["status"] == "completed"


def test_event_stream_runs_from_queued_to_completed(http: httpx2.Client) -> None:
    heard = events(http, submit(http)["id"])
    names = [name for _, name in heard]
    assert (names[0], names[-1]) == ("queued", "completed")
    assert names.count("progress") == 4
    assert [number for number, _ in heard] == sorted({number for number, _ in heard})


def test_event_stream_resumes_after_last_event_id(served: Served, http: httpx2.Client) -> None:
    id = finished(served, http)["id"]
    heard = events(http, id)
    assert events(http, id, after=str(heard[3][0])) == heard[4:]
    assert events(http, id, after=str(heard[-1][0])) == []


def test_progress_event_contains_stage_step_and_worker(http: httpx2.Client) -> None:
    with http.sse(f"/v1/requests/{submit(http)['id']}/events") as source:
        step = next(json.loads(message.data) for message in source if message.event == "progress")
    assert (step["stage"], step["step"], step["steps"], step["worker"]) == ("denoise.0", 1, 4, "worker-1")


@pytest.mark.parametrize("last", ["-1", "x", "1.5", "9" * 30])
def test_invalid_last_event_id_returns_400(http: httpx2.Client, last: str) -> None:
    id = submit(http)["id"]
    response = http.get(f"/v1/requests/{id}/events", headers={"last-event-id": last})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "last-event-id"


async def test_idle_event_stream_sends_keepalive_comments() -> None:
    told = asyncio.Event()

    async def happening() -> AsyncIterator[Event]:
        await told.wait()
        yield Event("completed", seq=1)

    stream = with_comments(written(happening()), comment_every=0.001)
    assert await anext(stream) == b": waiting\n"
    told.set()
    rest = [piece async for piece in stream if piece != b": waiting\n"]
    assert rest[0].startswith(b"id: 1\nevent: completed\ndata: {")


async def test_event_stream_ends_after_a_whole_event_if_the_queue_fails() -> None:
    async def happening() -> AsyncIterator[Event]:
        yield Event("queued", seq=1)
        raise TransientError("the queue does not answer")

    pieces = [piece async for piece in with_comments(written(happening()), comment_every=60)]
    assert [piece.splitlines()[0] for piece in pieces] == [b"id: 1"]


def test_request_for_a_pool_scaled_to_zero_reports_cold_start_and_eta(tmp_path: Path) -> None:
    with serve(tmp_path, works=False) as served, httpx2.Client(base_url=served.url) as http:
        asleep = dict.fromkeys(IDLE.pools().values(), 2)
        served.run(served.scheduler.queue.declare("operator", DeclaredModels((IDLE,), asleep)))
        shown = submit(http, model=IDLE.name)
        assert (shown["status"], shown["state"]) == ("queued", "cold_start")
        assert DEFAULT_COLD_START_S - 60 < shown["eta_s"] - shown["cost"]["predicted_s"] <= DEFAULT_COLD_START_S
        assert http.get("/ready").status_code == 200
        http.post(f"/v1/requests/{shown['id']}/cancel")
        assert http.get(f"/v1/requests/{shown['id']}").json()["state"] == "cancelled"


async def test_closed_event_stream_stops_watching_the_request() -> None:
    left = asyncio.Event()

    async def happening() -> AsyncIterator[Event]:
        try:
            await asyncio.Event().wait()
            yield Event("completed")
        finally:
            left.set()

    stream = with_comments(written(happening()), comment_every=0.001)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert left.is_set()


def test_result_is_returned_whole_or_by_range(served: Served, http: httpx2.Client) -> None:
    url = finished(served, http, seed=9)["result"][0]["url"]
    whole = http.get(url)
    assert whole.content == picture(9)
    assert (whole.headers["content-type"], whole.headers["accept-ranges"]) == ("image/png", "bytes")
    part = http.get(url, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, picture(9)[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(picture(9))}"


def test_missing_result_index_returns_404(served: Served, http: httpx2.Client) -> None:
    id = finished(served, http)["id"]
    assert http.get(f"/v1/requests/{id}/result/1").status_code == 404
    assert http.get(f"/v1/requests/{id}/result/x").status_code == 400
