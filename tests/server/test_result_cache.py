"""Requests that are given the results of an equal one, and those that must not be."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from tests.server import served as module
from tests.server.served import MOVING, PICTURES, Served, picture, serve
from tools.cards import STILL
from tools.redis_server import RedisServer
from unfuse.core import checking
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import NotFound, ResultsUnavailable
from unfuse.core.messages import WorkerInfo
from unfuse.core.plan import Pipeline, pool_with_numerics
from unfuse.core.request import Delivery
from unfuse.queues.base import QueueLimits
from unfuse.server.calls import GenerationCall
from unfuse.server.result_cache import result_key
from unfuse.stores.results import ResultStore

URL = "/v1/images/generations"
ASKED = {"model": PICTURES.name, "prompt": "a red circle", "seed": 5}
EXACT, BATCHED = {"batching": "exact", "device": "cpu"}, {"batching": "batched", "device": "cpu"}


def working(outcome: dict[str, str]) -> WorkerInfo:
    """The worker, as one of that outcome."""
    pools = [pool for card in (PICTURES, MOVING, STILL) for pool in card.pools().values()]
    return msgspec.structs.replace(
        module.WORKER, pools=tuple(pool_with_numerics(pool, outcome) for pool in pools), numerics=outcome
    )


@pytest.fixture(scope="module")
def exact() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORKER", working(EXACT))
        yield


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module", params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def thrifty(request: pytest.FixtureRequest, exact: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway that gives results again, with an exact worker, for two tenants, on each kind of queue."""
    folder, url = tmp_path_factory.mktemp("thrifty"), request.param
    if url == "redis":
        url = request.getfixturevalue("redis").url
    elif url == "sqlite":
        url = f"sqlite:{folder}/queue.db"
    keys = ["mine one", "theirs other"]
    with serve(folder / "results", cards=(PICTURES, MOVING), queue=url, reuses=True, keys=keys) as served:
        yield served


@pytest.fixture
def http(thrifty: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=thrifty.url, timeout=600, trust_env=False) as client:
        client.headers["authorization"] = "Bearer one"
        yield client


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What no other test asks for."""
    return ASKED | {"prompt": f"a red circle of {request.node.name}"}


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[tuple[Served, httpx2.Client]]:
    """A gateway of one's own that gives results again, and a client of it."""
    with (
        serve(folder, **({"reuses": True} | options)) as served,
        httpx2.Client(base_url=served.url, timeout=60, trust_env=False) as http,
    ):
        yield served, http


def view(http: httpx2.Client, id: str) -> dict[str, Any]:
    found = dict(http.get(f"/v1/requests/{id}").json())
    return found | {"reused": found["metadata"].get("reuse_of")}


def made(http: httpx2.Client, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The request that a call became, and its pictures."""
    answer = http.post(URL, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    pictures = [base64.b64decode(one["b64_json"]) for one in reply["data"]]
    return view(http, reply["id"]) | {"pictures": pictures}


def completed(http: httpx2.Client) -> float:
    """How many completed requests the gateway counted."""
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("unfuse_requests_completed_total "))


def test_equal_request_is_answered_from_the_cache_under_its_own_id(
    thrifty: Served, http: httpx2.Client, asked: dict[str, Any]
) -> None:
    """Given a worker that does nothing, then who asks again has the answer at once, under an id of its own."""
    body = asked | {"n": 2, "metadata": {"job": "7"}}
    first, counted = made(http, body), completed(http)
    with thrifty.held():
        second = made(http, body)
    assert (second["id"] != first["id"], completed(http)) == (True, counted + 1)
    assert (first["reused"], second["reused"]) == (None, first["id"])
    assert second["pictures"] == first["pictures"] == [picture(5), picture(6)]
    assert first["completed_at"] <= second["created_at"] == second["completed_at"]
    assert (second["status"], second["progress"], second["metadata"]["job"]) == ("completed", 100, "7")
    assert all(stage["cached"] and not stage["attempt"] for stage in second["stages"])
    assert [http.get(one["url"]).content for one in second["result"]] == first["pictures"]
    told = http.get(f"/v1/requests/{second['id']}/events").text
    assert [line for line in told.splitlines() if line.startswith("event:")] == ["event: queued", "event: completed"]
    assert '"message":"reused"' in told
    assert thrifty.run(thrifty.queue.stats([])).active == 0


def test_cached_copy_outlives_the_original_and_is_reused_itself(
    thrifty: Served, http: httpx2.Client, asked: dict[str, Any]
) -> None:
    first, second = made(http, asked), made(http, asked)
    thrifty.run(_gateway_delete(thrifty, first["id"]))
    assert http.get(second["result"][0]["url"]).content == picture(5)
    with thrifty.held():
        assert made(http, asked)["reused"] == second["id"]


async def _gateway_delete(served: Served, request: str) -> None:
    served.results.delete(request)
    await served.queue.drop(request)


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 6},
        {"seed": None},
        {"cache": False},
        {"prompt": "another"},
        {"size": "32x32"},
        {"n": 2},
        {"num_inference_steps": 3},
        {"guidance_scale": 2.0},
        {"output_format": "webp"},
        {"preview_every": 1},
    ],
    ids=str,
)
def test_different_or_uncacheable_request_is_computed(
    http: httpx2.Client, asked: dict[str, Any], more: dict[str, Any]
) -> None:
    made(http, asked)
    first = made(http, asked | more)
    assert first["reused"] is None
    again = made(http, asked | more)["reused"]
    own = set(more) & {"cache", "preview_every"} or more == {"seed": None}
    assert again == (None if own else first["id"])


def test_results_are_not_reused_across_tenants(http: httpx2.Client, asked: dict[str, Any]) -> None:
    first = made(http, asked)
    http.headers["authorization"] = "Bearer other"
    theirs = made(http, asked)
    assert (theirs["reused"], theirs["tenant"]) == (None, "theirs")
    assert made(http, asked)["reused"] == theirs["id"]
    assert http.get(f"/v1/requests/{first['id']}").status_code == 404


def test_video_from_an_equal_input_image_is_reused(http: httpx2.Client, thrifty: Served) -> None:
    """Given uploads, then equal ones are found and others not, and none of them is left."""
    url = {number: "data:image/png;base64," + base64.b64encode(picture(number)).decode() for number in (8, 9)}
    ids = []
    for number in (8, 8, 9):
        body = {"model": MOVING.name, "prompt": "it moves", "seed": 5, "num_frames": 5, "input_reference": url[number]}
        ids.append(http.post("/v1/videos", json=body).json()["id"])
        thrifty.next_event(ids[-1], "completed")
    assert [view(http, id)["reused"] for id in ids] == [None, ids[0], None]
    films = [http.get(f"/v1/videos/{id}/content").content for id in ids]
    assert films[0] == films[1] != films[2]
    with pytest.raises(NotFound):
        thrifty.results.attached(ids[1], "image")


def test_cache_false_in_a_form_field_disables_reuse(http: httpx2.Client, thrifty: Served) -> None:
    form, reused = {"model": MOVING.name, "prompt": "a form moves", "seed": "5", "num_frames": "5"}, list[bool]()
    for more in ({}, {}, {"cache": "false"}, {"cache": "false"}):
        id = http.post("/v1/videos", data=form | more, files={"input_reference": picture(8)}).json()["id"]
        thrifty.next_event(id, "completed")
        reused.append(bool(view(http, id)["reused"]))
    assert reused == [False, True, False, False]


def test_concurrent_reuse_and_deletion_returns_complete_videos(
    thrifty: Served, http: httpx2.Client, asked: dict[str, Any]
) -> None:
    """Given callers who ask for one film and delete what they got, then each had it, and no file is left over."""
    url = "data:image/png;base64," + base64.b64encode(picture(8)).decode()
    body = {"model": MOVING.name, "prompt": asked["prompt"], "seed": 5, "num_frames": 5, "input_reference": url}
    folders = set(thrifty.folder.iterdir())

    def film(_: int) -> bytes:
        id = http.post("/v1/videos", json=body).json()["id"]
        thrifty.next_event(id, "completed")
        content = http.get(f"/v1/videos/{id}/content")
        assert content.status_code == http.delete(f"/v1/videos/{id}").status_code == 200
        return content.content

    first = film(0)
    with ThreadPoolExecutor(4) as callers:
        assert set(callers.map(film, range(24))) == {first}
    assert set(thrifty.folder.iterdir()) == folders


def test_reused_result_is_streamed_to_a_streaming_request(
    http: httpx2.Client, asked: dict[str, Any], thrifty: Served
) -> None:
    made(http, asked | {"stream": False})
    bodies = []
    for _ in range(2):
        with http.stream("POST", URL, json=asked | {"stream": True}) as answer:
            bodies.append(answer.read())
    assert [body.count(b"image_generation.completed") for body in bodies] == [2, 2]
    assert view(http, http.get("/v1/requests?limit=1").json()["data"][0]["id"])["reused"]


def test_idempotency_key_returns_one_request_also_if_it_is_reused(http: httpx2.Client, asked: dict[str, Any]) -> None:
    first = made(http, asked)
    keyed = [made(http, asked, **{"idempotency-key": "reused"}) for _ in range(2)]
    assert keyed[0]["id"] == keyed[1]["id"] != first["id"]
    assert keyed[0]["reused"] == first["id"]


Read = Callable[[ResultStore, str, int], bytes]


def gone(read: Read, served: Served) -> Read:
    """The results are deleted before they are read."""

    def reading(results: ResultStore, request: str, index: int) -> bytes:
        results.delete(request)
        return read(results, request, index)

    return reading


def dropped(read: Read, served: Served) -> Read:
    """The request is deleted, with its results, after they were read."""

    def reading(results: ResultStore, request: str, index: int) -> bytes:
        data = read(results, request, index)
        served.run(_gateway_delete(served, request))
        return data

    return reading


def harmed(read: Read, served: Served) -> Read:
    """What is kept is not what was made."""
    return lambda results, request, index: read(results, request, index)[:-1] + b"\0"


def full(read: Read, served: Served) -> Read:
    """There is no room for another copy."""

    def reading(results: ResultStore, request: str, index: int) -> bytes:
        raise ResultsUnavailable("no room")

    return reading


@pytest.mark.parametrize("fault", [gone, dropped, harmed, full])
@pytest.mark.parametrize("n", [1, 2])
def test_result_is_computed_if_the_cached_copy_fails(
    thrifty: Served,
    http: httpx2.Client,
    asked: dict[str, Any],
    fault: Callable[[Read, Served], Read],
    n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given a fault while pictures are copied, then all are made, and no copy is left over."""
    body = asked | {"n": n, "response_format": "url"}
    http.post(URL, json=body)
    folders = {path.name for path in (thrifty.folder).iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(ResultStore, "read", fault(ResultStore.read, thrifty))
        reply = http.post(URL, json=body).json()
    assert view(http, reply["id"])["reused"] is None
    assert [http.get(one["url"]).content for one in reply["data"]] == [picture(5), picture(6)][:n]
    assert {path.name for path in thrifty.folder.iterdir()} - folders == {reply["id"]}


def test_waiting_or_cancelled_requests_are_not_reused(
    thrifty: Served, http: httpx2.Client, asked: dict[str, Any]
) -> None:
    """Given equal requests of which one waits and one was cancelled, then neither is an answer."""
    with thrifty.held():
        cancelled, waits = (http.post(URL, json=asked, headers={"prefer": "respond-async"}).json() for _ in range(2))
        assert "reuse_of" not in waits["metadata"]
        http.post(f"/v1/requests/{cancelled['id']}/cancel")
        http.post(f"/v1/requests/{waits['id']}/cancel")
    assert made(http, asked)["reused"] is None


def test_random_seed_prevents_reuse(
    http: httpx2.Client, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the same seed drawn twice, then it is made twice: whoever names no seed wants another picture."""
    monkeypatch.setattr(checking.secrets, "randbelow", lambda _: 11)
    drawn = asked | {"seed": None}
    assert [(one["seed"], one["reused"]) for one in (made(http, drawn), made(http, drawn))] == [(11, None)] * 2


def test_copies_are_deleted_if_the_idempotency_key_is_already_used(
    thrifty: Served, http: httpx2.Client, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a repeat that comes before the first is seen, then the queue says whose it is, and nothing is left."""
    first = made(http, asked, **{"idempotency-key": "so close"})
    folders = set(thrifty.folder.iterdir())

    async def none(*_: object) -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(GenerationCall, "_earlier", none)
        assert made(http, asked, **{"idempotency-key": "so close"})["id"] == first["id"]
    assert set(thrifty.folder.iterdir()) == folders


def test_failed_copy_is_deleted_if_the_request_then_returns_429(
    tmp_path: Path, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, limits=QueueLimits(max_active=1)) as (served, http):
        made(http, ASKED)
        with served.held():
            http.post(URL, json=ASKED | {"seed": 6}, headers={"prefer": "respond-async"})
            folders = set(tmp_path.iterdir())
            monkeypatch.setattr(ResultStore, "read", harmed(ResultStore.read, served))
            assert http.post(URL, json=ASKED).status_code == 429
            assert set(tmp_path.iterdir()) == folders


@pytest.mark.parametrize(
    "change",
    [
        {"name": "another"},
        {"family": "another"},
        {"weights": {**PICTURES.weights, "vae": "another"}},
        {"dtypes": {**PICTURES.dtypes, "vae": "float16"}},
        {"pipeline": Pipeline(PICTURES.pipeline.stages[:2])},
    ],
    ids=str,
)
def test_result_key_depends_on_model_spec_inputs_and_count(change: dict[str, Any]) -> None:
    none, other = DerivedFacts(), DerivedFacts(image_hashes={"image": "hash"})
    made = result_key(PICTURES, ASKED, {"seed": 5, "prompt": "a"}, none, 1, Delivery())
    assert result_key(PICTURES, ASKED, {"prompt": "a", "seed": 5}, none, 1, Delivery()) == made != ""
    assert (
        result_key(msgspec.structs.replace(PICTURES, **change), ASKED, {"seed": 5, "prompt": "a"}, none, 1, Delivery())
        != made
    )
    assert result_key(PICTURES, ASKED, {"seed": 5, "prompt": "a"}, none, 2, Delivery()) != made
    assert result_key(PICTURES, ASKED, {"seed": 5, "prompt": "a"}, other, 1, Delivery()) != made


def test_changed_model_default_prevents_reuse(tmp_path: Path, exact: None) -> None:
    """Given the same call before and after the server was told of another default, then it is made again."""
    reused, queue = list[str | None](), f"sqlite:{tmp_path}/queue.db"
    for scale in (2.0, 3.0, 3.0):
        with serving(tmp_path / "results", queue=queue, standard={"guidance_scale": scale}) as (_, http):
            reused.append(made(http, ASKED)["reused"])
    assert reused[:2] == [None, None] and reused[2]


@pytest.mark.parametrize("outcome", [{}, BATCHED, {**EXACT, "batching": "exact-or-batched"}])
def test_results_of_pools_that_are_not_exact_are_not_reused(
    tmp_path: Path, outcome: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORKER", working(outcome))
    with serving(tmp_path) as (_, http):
        assert [made(http, ASKED)["reused"] for _ in range(2)] == [None, None]


def test_results_are_not_reused_without_the_option(tmp_path: Path, exact: None) -> None:
    with serving(tmp_path, reuses=False) as (_, http):
        assert [made(http, ASKED)["reused"] for _ in range(2)] == [None, None]


def test_results_of_other_numerics_are_not_reused(tmp_path: Path, exact: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given results of workers that make other bytes than those of today, then nobody is given them."""
    queue, reused = f"sqlite:{tmp_path}/queue.db", list[bool]()
    for device in ("cpu", "cpu", "another"):
        monkeypatch.setattr(module, "WORKER", working(EXACT | {"device": device}))
        with serving(tmp_path / "results", queue=queue, lease_ttl=1.0) as (_, http):
            reused.append(bool(made(http, ASKED)["reused"]))
    assert reused == [False, True, False]


def test_cached_result_is_returned_while_admission_control_rejects(tmp_path: Path, exact: None) -> None:
    with serving(tmp_path, limits=QueueLimits(max_active=1)) as (served, http):
        first = made(http, ASKED)
        with served.held():
            http.post(URL, json=ASKED | {"seed": 6}, headers={"prefer": "respond-async"})
            assert http.post(URL, json=ASKED | {"seed": 7}).status_code == 429
            assert made(http, ASKED)["reused"] == first["id"]
