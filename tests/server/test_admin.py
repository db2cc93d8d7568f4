"""Admin keys: what they open, and what stays closed to a tenant's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.server.served import IDLE, POISON, Served, serve

ASYNC = {"prefer": "respond-async"}
URL = "/v1/images/generations"
KEYS = ["anna key-a", "bert key-b", "admin key-root admin=yes"]
CLOSED = ("/v1/workers", "/v1/pools")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path, keys=KEYS) as running:
        yield running


def as_(served: Served, key: str = "") -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(base_url=served.url, headers=headers, trust_env=False)


def submitted(http: httpx2.Client, path: str = URL, **asked: object) -> str:
    answer = http.post(path, json={"model": IDLE.name, "prompt": "a circle", **asked}, headers=ASYNC)
    assert answer.status_code < 300, answer.text
    return str(answer.json()["id"])


def ids(http: httpx2.Client, path: str = "/v1/requests") -> list[str]:
    return sorted(one["id"] for one in http.get(path).json()["data"])


def test_workers_and_pools_endpoints_require_an_admin_key(guarded: Served) -> None:
    with as_(guarded, "key-a") as anna, as_(guarded, "key-root") as root, as_(guarded, "key-rooted") as stranger:
        for path in CLOSED:
            answer = anna.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_only")
            assert "admin=yes" in answer.json()["error"]["message"]
            assert root.get(path).status_code == 200
            assert stranger.get(path).status_code == 401
        assert anna.get("/v1/models").status_code == anna.get("/metrics").status_code == 200


def test_admin_lists_and_cancels_requests_of_all_tenants(guarded: Served) -> None:
    with as_(guarded, "key-a") as anna, as_(guarded, "key-b") as bert, as_(guarded, "key-root") as root:
        first, second, third = submitted(anna), submitted(bert), submitted(root)
        assert ids(anna) == [first]
        assert ids(bert) == [second]
        assert ids(root) == sorted((first, second, third))
        for path in ("", "/result/9", "/events"):
            assert anna.get(f"/v1/requests/{third}{path}").status_code == 404
        assert anna.post(f"/v1/requests/{third}/cancel").status_code == 404
        assert root.get(f"/v1/requests/{first}").json()["id"] == first
        assert root.post(f"/v1/requests/{first}/cancel").json()["status"] == "cancelled"
        assert "cancelled" in root.get(f"/v1/requests/{first}/events").text
        assert bert.get(f"/v1/requests/{second}").json()["status"] == "queued"


def test_admin_retry_of_a_dead_letter_belongs_to_its_tenant(guarded: Served) -> None:
    with as_(guarded, "key-a") as anna, as_(guarded, "key-b") as bert, as_(guarded, "key-root") as root:
        dead = submitted(anna, model="test/pictures", prompt=POISON)
        guarded.next_event(dead, "failed")
        assert ids(bert, "/v1/dead") == []
        assert ids(root, "/v1/dead") == ids(anna, "/v1/dead") == [dead]
        with guarded.held():
            fresh = root.post(f"/v1/dead/{dead}/retry").json()["id"]
            assert anna.get(f"/v1/requests/{fresh}").status_code == 200
            assert bert.get(f"/v1/requests/{fresh}").status_code == 404
        guarded.next_event(fresh, "failed")


def test_admin_lists_and_deletes_videos_of_all_tenants(guarded: Served) -> None:
    with as_(guarded, "key-a") as anna, as_(guarded, "key-b") as bert, as_(guarded, "key-root") as root:
        film = submitted(anna, "/v1/videos")
        for order in ("asc", "desc"):
            assert ids(root, f"/v1/videos?order={order}") == [film]
            assert ids(bert, f"/v1/videos?order={order}") == []
        assert bert.delete(f"/v1/videos/{film}").status_code == 404
        assert root.delete(f"/v1/videos/{film}").json()["deleted"]
        assert ids(anna, "/v1/videos") == []


def test_single_api_key_is_not_admin_without_the_admin_option(tmp_path: Path) -> None:
    with serve(tmp_path, keys=["anna key-a"]) as served, as_(served, "key-a") as anna:
        assert [anna.get(path).status_code for path in CLOSED] == [403, 403]
    with serve(tmp_path, keys=["anna key-a admin=yes"]) as served, as_(served, "key-a") as anna, as_(served) as nobody:
        assert [anna.get(path).status_code for path in CLOSED] == [200, 200]
        assert [nobody.get(path).status_code for path in CLOSED] == [401, 401]


def test_multiple_api_keys_are_not_admin_without_the_admin_option(tmp_path: Path) -> None:
    with serve(tmp_path, keys=["anna key-a", "bert key-b"]) as served:
        for key in ("key-a", "key-b"):
            with as_(served, key) as http:
                assert [http.get(path).status_code for path in CLOSED] == [403, 403]


def test_without_keys_admin_endpoints_are_open_for_the_default_tenant(tmp_path: Path) -> None:
    queue = f"sqlite:{tmp_path}/queue.db"
    with serve(tmp_path, keys=["anna key-a"], queue=queue) as served, as_(served, "key-a") as anna:
        kept = submitted(anna)
    with serve(tmp_path, queue=queue) as served, as_(served) as http:
        assert [http.get(path).status_code for path in CLOSED] == [200, 200]
        assert ids(http) == []
        assert http.get(f"/v1/requests/{kept}").status_code == 404
        assert ids(http) != [own := submitted(http)]
        assert ids(http) == [own]
