"""Requests that were given up: listed with the evidence, looked at, asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec
import pytest

from tests.server.served import BROKEN, EVIDENCE, MOVING, POISON, Served, picture, serve
from unfuse.core.request import Change
from unfuse.queues.base import QueueLimits

URL = "/v1/images/generations"
ASYNC = {"prefer": "respond-async"}


def poisoned(served: Served, http: httpx2.Client, **asked: object) -> str:
    """The id of a request that was given up."""
    id = http.post(URL, json={"model": "test/pictures", "prompt": POISON, **asked}, headers=ASYNC).json()["id"]
    served.next_event(id, "failed")
    return str(id)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path, keys=["anna key-a", "bert key-b"], limits=QueueLimits(max_active=1)) as running:
        yield running


def as_(served: Served, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, headers={"authorization": f"Bearer {key}"}, trust_env=False)


def test_dead_letter_is_returned_with_its_evidence(served: Served, http: httpx2.Client) -> None:
    id = poisoned(served, http, seed=5)
    view = http.get(f"/v1/dead/{id}").json()
    assert (view["id"], view["status"], view["seed"]) == (id, "failed", 5)
    assert view["error"]["evidence"] == EVIDENCE
    assert (view["error"]["code"], view["error"]["stage"]) == ("compute_crashed", "text_encode")
    assert (view["stages"][0]["crashes"], view["stages"][0]["failures"], view["stages"][0]["attempt"]) == (2, 0, 2)
    assert http.get(f"/v1/requests/{id}").json() == view
    assert "evidence" not in http.get("/v1/requests", params={"limit": 1}).json()["data"][0]["error"]


def test_dead_letters_are_paginated_without_permanent_failures(served: Served, http: httpx2.Client) -> None:
    ids = [poisoned(served, http) for _ in range(3)]
    http.post(URL, json={"model": "test/pictures", "prompt": BROKEN})
    first = http.get("/v1/dead", params={"limit": 2}).json()
    rest = http.get("/v1/dead", params={"limit": 1, "after": first["last_id"]}).json()
    assert [one["id"] for one in [*first["data"], *rest["data"]]] == ids[::-1]
    assert {one["error"]["evidence"] for one in first["data"]} == {EVIDENCE}
    assert first["has_more"]


def test_failed_request_that_is_no_dead_letter_returns_404_and_409(served: Served, http: httpx2.Client) -> None:
    failed = http.post(URL, json={"model": "test/pictures", "prompt": BROKEN}).json()["error"]["message"].split(":")[0]
    assert http.get(f"/v1/dead/{failed}").status_code == 404
    answer = http.post(f"/v1/dead/{failed}/retry")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_dead")
    for unknown in (http.get("/v1/dead/req_nope"), http.post("/v1/dead/req_nope/retry")):
        assert unknown.status_code == 404


def test_retry_creates_a_new_request_and_clears_the_dead_letter(served: Served, http: httpx2.Client) -> None:
    id = poisoned(served, http, seed=5, metadata={"job": "7"})
    with served.held():
        answer = http.post(f"/v1/dead/{id}/retry")
        view = answer.json()
        assert (answer.status_code, view["status"], view["seed"]) == (202, "queued", 5)
        assert view["metadata"] == {"job": "7", "retry_of": id}
        assert view["id"] != id
        assert http.get(f"/v1/dead/{id}").status_code == 404
        assert http.post(f"/v1/dead/{id}/retry").status_code == 409
    served.next_event(view["id"], "failed")
    assert http.get("/v1/dead").json()["first_id"] == view["id"]


def test_interrupted_retry_is_idempotent(served: Served, http: httpx2.Client) -> None:
    id = poisoned(served, http)
    with served.held():
        first = http.post(f"/v1/dead/{id}/retry").json()["id"]
        buried = served.run(served.queue.load(id)).context
        unburied = msgspec.structs.replace(buried, version=buried.version + 1, is_dead_letter=True)
        served.run(served.queue.commit(Change(unburied)))
        assert http.post(f"/v1/dead/{id}/retry").json()["id"] == first
    served.next_event(first, "failed")


def test_retry_reuses_the_uploaded_file(studio: Served, film_set: httpx2.Client) -> None:
    asked = {"model": MOVING.name, "prompt": POISON, "seconds": "2"}
    old = film_set.post("/v1/videos", data=asked, files={"input_reference": picture(9)}).json()["id"]
    studio.next_event(old, "failed")
    with studio.held():
        new = film_set.post(f"/v1/dead/{old}/retry").json()["id"]
        assert new.startswith("video_")
        assert studio.results.attached(new, "image") == picture(9)
    studio.next_event(new, "failed")
    assert studio.results.attached(new, "image") == picture(9)
    film_set.delete(f"/v1/videos/{old}")
    film_set.delete(f"/v1/videos/{new}")
    assert not {old, new} & {folder.name for folder in studio.folder.iterdir()}


def test_dead_letters_are_visible_only_to_their_tenant(guarded: Served) -> None:
    with as_(guarded, "key-a") as anna, as_(guarded, "key-b") as bert:
        id = poisoned(guarded, anna)
        assert bert.get("/v1/dead").json()["data"] == []
        assert bert.get(f"/v1/dead/{id}").status_code == bert.post(f"/v1/dead/{id}/retry").status_code == 404
        assert anna.get("/v1/dead").json()["first_id"] == id


def test_retry_under_overload_returns_429(guarded: Served) -> None:
    with as_(guarded, "key-a") as anna:
        id = poisoned(guarded, anna)
        anna.post(URL, json={"model": "test/idle", "prompt": "a"}, headers=ASYNC)
        answer = anna.post(f"/v1/dead/{id}/retry")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert "unfuse_requests_rejected_total 1.0" in anna.get("/metrics").text
        assert anna.get(f"/v1/dead/{id}").status_code == 200
