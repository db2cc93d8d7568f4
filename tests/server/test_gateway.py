"""What lies around the routes: keys and tenants, envelopes, models, pools, probes, metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from tests.core.graphs import object_for
from tests.scheduler.model import CARD, params
from tests.server.served import BROKEN, IDLE, PICTURES, WORKER, Served, serve, until
from tools.asking import asking
from tools.cards import MOVING
from unfuse import __version__, queues
from unfuse.core.errors import Overloaded
from unfuse.core.messages import Heartbeat, Register, RequestTasks, StorageLocations, TaskCompleted, TransferStats
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import readable_pool
from unfuse.core.request import Timings
from unfuse.core.worker_status import DeviceErrors, DeviceId, RankTimes, WorkerStatus
from unfuse.edge.access import ApiError
from unfuse.queues.base import QueueLimits
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server import openapi_schemas
from unfuse.server.gateway import Gateway
from unfuse.stores.results import open_results
from unfuse.testing.queue_samples import lease_request

URL = "/v1/images/generations"
ASKED = {"model": "test/pictures", "prompt": "a red circle"}
ASYNC = {"prefer": "respond-async"}


async def cut_short(tmp_path: Path, draining: bool) -> BaseException | None:
    """What a caller that waits for a result ends with, whose answer the HTTP server cuts short."""
    scheduler = Scheduler(queues.open("memory:"), specs=[CARD])
    gateway = Gateway(scheduler, open_results(f"disk:{tmp_path}"))
    record = await scheduler.submit(*asking(CARD, params()))
    waiting = asyncio.create_task(gateway.completed(record.context.id))
    await asyncio.sleep(0)
    assert gateway.awaited == {record.context.id: 1}
    assert await gateway.awaited_within(60.0)  # of a model of which nothing is known
    scheduler.draining = draining
    waiting.cancel()
    await asyncio.wait({waiting})
    await scheduler.close()
    assert not gateway.awaited
    return None if waiting.cancelled() else waiting.exception()


async def test_waiting_calls_get_503_stopping_only_if_the_server_drains(tmp_path: Path) -> None:
    assert await cut_short(tmp_path, draining=False) is None
    told = await cut_short(tmp_path, draining=True)
    assert isinstance(told, ApiError) and (told.status, told.code, told.headers) == (
        503,
        "stopping",
        {"retry-after": "2"},
    )


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path, keys=["anna key-a", "bert key-b"], limits=QueueLimits(max_active=1)) as running:
        yield running


@pytest.fixture
def renamed(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path, names={"pictures": "test/pictures"}, idle=False) as running:
        yield running


def sample(http: httpx2.Client, name: str) -> float | None:
    """What /metrics says of one sample, given with its labels."""
    lines = http.get("/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), None)


def as_(served: Served, key: str = "") -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(base_url=served.url, headers=headers, trust_env=False)


def test_wrong_or_missing_api_key_returns_401(guarded: Served) -> None:
    for key in ("wrong", "", "key-a2"):
        with as_(guarded, key) as http:
            response = http.post(URL, json=ASKED)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert [http.get(path).status_code for path in ("/v1/models", "/v1/requests", "/v1/pools")] == [401] * 3
            assert [http.get(path).status_code for path in ("/health", "/version")] == [200] * 2
            assert http.get("/metrics").status_code == (401 if key else 200)


def test_tenant_can_access_only_its_own_requests(guarded: Served) -> None:
    with as_(guarded, "key-a") as anna, as_(guarded, "key-b") as bert:
        id = anna.post(URL, json=ASKED | {"response_format": "url"}).json()["id"]
        assert [one["id"] for one in anna.get("/v1/requests").json()["data"]] == [id]
        assert bert.get("/v1/requests").json()["data"] == []
        for path in ("", "/events", "/result/0"):
            assert anna.get(f"/v1/requests/{id}{path}").status_code == 200
            assert bert.get(f"/v1/requests/{id}{path}").status_code == 404
        assert bert.post(f"/v1/requests/{id}/cancel").status_code == 404


def test_id_of_another_tenant_gets_the_response_of_an_unknown_id(guarded: Served) -> None:
    """Given a request of another tenant, when it is asked for in any way, then nothing tells that it exists."""
    none = "req_" + "0" * 32
    with as_(guarded, "key-a") as anna, as_(guarded, "key-b") as bert:
        id = anna.post(URL, json=ASKED | {"response_format": "url"}).json()["id"]
        video = anna.post("/v1/videos", json=ASKED | {"num_frames": 9}).json()["id"]

        def told(method: str, path: str, id: str, **params: str) -> tuple[int, str]:
            response = bert.request(method, path.format(id), params={key: id for key in params})
            return response.status_code, response.text.replace(id, "ID")

        for known in (id, video):
            for path in ("/v1/requests", "/v1/videos", "/v1/videos?order=asc", "/v1/dead"):
                assert told("GET", path, known, after="") == told("GET", path, none, after="")
                assert told("GET", path, known, after="")[0] == 404
            for method, path in (
                ("GET", "/v1/requests/{}"),
                ("GET", "/v1/requests/{}/events"),
                ("POST", "/v1/requests/{}/cancel"),
                ("GET", "/v1/requests/{}/result/0"),
                ("GET", "/v1/requests/{}/preview/0/1"),
                ("GET", "/v1/videos/{}"),
                ("GET", "/v1/videos/{}/content"),
                ("DELETE", "/v1/videos/{}"),
                ("GET", "/v1/dead/{}"),
                ("POST", "/v1/dead/{}/retry"),
            ):
                assert told(method, path, known) == told(method, path, none)
        assert anna.get(f"/v1/videos/{video}").status_code == 200


def test_admission_limit_returns_429_with_retry_after(guarded: Served) -> None:
    with as_(guarded, "key-a") as http:
        assert http.post(URL, json={**ASKED, "model": IDLE.name}, headers=ASYNC).status_code == 202
        response = http.post(URL, json=ASKED)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert "unfuse_requests_rejected_total 1.0" in http.get("/metrics").text


def test_retry_after_is_the_scheduler_estimate_in_whole_seconds(
    served: Served, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise Overloaded("much is going on", retry_after=7.2)

    monkeypatch.setattr(served.queue, "submit", refuse)
    monkeypatch.setattr(served.scheduler._costs, "seconds_until_admitted", lambda *_: 7.2)
    assert http.post(URL, json=ASKED).headers["retry-after"] == "8"


def test_without_keys_any_authorization_is_accepted(served: Served) -> None:
    with as_(served, "whatever") as http:
        assert http.get("/v1/models").status_code == 200


def test_error_responses_have_message_type_param_and_code(http: httpx2.Client) -> None:
    for response, status in (
        (http.get("/nowhere"), 404),
        (http.get("/v1/models/nope"), 404),
        (http.delete("/v1/models"), 405),
        (http.get("/v1/requests", params={"limit": "x"}), 400),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "GET" in http.delete("/v1/models").headers["allow"]


def test_x_request_id_is_echoed_if_it_can_be_logged(http: httpx2.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
    for other in ("x" * 129, "two words", ""):
        name = http.get("/health", headers={"x-request-id": other}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{32}", name)


def test_unexpected_exception_returns_500_without_details(
    served: Served, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise RuntimeError("secret inside")

    monkeypatch.setattr(served.scheduler.registry, "unavailable_pools", fail)
    with capture_logs() as logs:
        response = http.get("/ready", headers={"x-request-id": "mine"})
    assert isinstance(logs[0]["exc_info"], RuntimeError)
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


def test_models_endpoint_lists_limits_and_defaults(http: httpx2.Client) -> None:
    data = http.get("/v1/models").json()["data"]
    assert [one["id"] for one in data] == ["test/idle", "test/pictures"]
    assert (data[1]["object"], data[1]["created"], data[1]["limits"]["max_steps"]) == ("model", 7, 100)
    assert data[1]["defaults"]["num_inference_steps"] == 4
    assert http.get("/v1/models/test/pictures").json() == data[1]


def test_model_is_known_by_its_served_name_and_is_the_default_if_alone(renamed: Served) -> None:
    with as_(renamed) as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["pictures"]
        assert http.post(URL, json={"prompt": "a", "model": "pictures"}).status_code == 200
        assert http.post(URL, json={"prompt": "a"}).json()["model"] == "pictures"
        assert http.post(URL, json=ASKED).status_code == 404
        for param in ("strength", "lora"):
            error = http.post(URL, json={"prompt": "a", param: "1"}).json()["error"]
            assert error["message"].startswith("model pictures "), "its own name may be a folder"
            assert error["param"] == param
        shown = http.get("/v1/requests?limit=1").json()["data"][0]
        assert shown["model"] == "pictures"


def test_requests_without_a_model_use_the_first_model_of_the_server(http: httpx2.Client, tmp_path: Path) -> None:
    """Given one model of the server and one that a worker brings, then the first is the default; of two that workers
    bring none is."""
    assert [one["id"] for one in http.get("/v1/models").json()["data"] if one["default"]] == [IDLE.name]
    assert http.post(URL, json={"prompt": "a"}, headers=ASYNC).json()["model"] == IDLE.name
    with serve(tmp_path, idle=False, cards=(PICTURES, MOVING)) as served, as_(served) as other:
        served.run(served.queue.register(WORKER, (PICTURES, MOVING)))
        assert not any(one["default"] for one in other.get("/v1/models").json()["data"])
        error = other.post(URL, json={"prompt": "a"}).json()["error"]
        assert error["param"] == "model"
        assert error["message"] == "model is missing: send one of test/moving, test/pictures"


def test_model_in_a_folder_is_named_by_the_last_path_component(tmp_path: Path) -> None:
    """Given models of two folders that have one name, then each has a name of its own, and no answer has a path."""
    first, second = (replace(PICTURES, name=f"/secret/{one}/flux") for one in ("a", "b"))
    with serve(tmp_path, idle=False, cards=(first, second)) as served, as_(served) as http:
        served.run(served.queue.register(WORKER, (first, second)))
        names = [one["id"] for one in http.get("/v1/models").json()["data"]]
        assert names[0] == "flux" and re.fullmatch("flux-[0-9a-f]{6}", names[1])
        for name, own in zip(names, (first.name, second.name), strict=True):
            for asked in (name, own):
                answer = http.post(URL, json={"prompt": "a", "model": asked}, headers=ASYNC)
                assert answer.json()["model"] == name
                assert served.run(served.queue.load(answer.json()["id"])).context.request.model == own
            assert http.get(f"/v1/models/{own}").json()["id"] == name
        pages = ["/v1/models", "/v1/workers", "/v1/pools", "/v1/requests", "/ready", "/metrics"]
        assert not [page for page in pages if "secret" in http.get(page).text]
        assert http.get("/ready").json()["models"] == sorted(names)


def named_pools(card: ModelSpec) -> dict[str, str]:
    """The name of the pool of each stage, while it has no numerics."""
    return {stage: readable_pool(pool) for stage, pool in card.pools().items()}


def test_workers_and_pools_endpoints_list_workers_and_waiting_tasks(http: httpx2.Client) -> None:
    (worker,) = http.get("/v1/workers").json()["data"]
    assert worker.keys() == openapi_schemas.WORKER["properties"].keys()
    assert (worker["id"], worker["slots"], worker["models"]) == ("worker-1", 4, ["test/pictures"])
    pools = {pool["id"]: pool for pool in http.get("/v1/pools").json()["data"]}
    pictures, idle = named_pools(PICTURES), named_pools(IDLE)
    assert set(pools) == {*pictures.values(), *idle.values()}
    waited = pools[idle["text_encode"]]["waiting"]
    http.post(URL, json={**ASKED, "model": IDLE.name}, headers=ASYNC)
    pools = {pool["id"]: pool for pool in http.get("/v1/pools").json()["data"]}
    assert pools[idle["text_encode"]]["waiting"] == waited + 1
    assert pools[pictures["denoise"]]["workers"] == ["worker-1"]
    assert pools[idle["denoise"]]["workers"] == []


def test_ready_returns_503_while_a_pool_has_no_worker(http: httpx2.Client) -> None:
    response = http.get("/ready")
    assert response.status_code == 503
    assert response.json()["missing"] == {"test/idle": [*map(readable_pool, sorted(IDLE.pools().values()))]}
    assert response.headers["retry-after"]
    assert named_pools(IDLE)["denoise"] in response.json()["error"]["message"]


def test_ready_returns_200_if_every_pool_has_a_worker_else_503(renamed: Served) -> None:
    with as_(renamed) as http:
        assert http.get("/ready").json() == {"ready": True, "models": ["pictures"]}
        renamed.run(renamed.queue.unregister("worker-1"))
        assert http.get("/ready").status_code == 503
        response = http.post(URL, json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_model")


def test_health_and_version(http: httpx2.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": __version__}


def test_metrics_count_outcomes_and_measure_latency_of_successes_only(renamed: Served) -> None:
    with as_(renamed) as http:
        for prompt in ("a", "b", BROKEN):
            http.post(URL, json={"prompt": prompt})
        with renamed.held():
            id = http.post(URL, json={"prompt": "a"}, headers=ASYNC).json()["id"]
            renamed.next_event(id, "stage_started")
            lines = set(http.get("/metrics").text.splitlines())
            encode = named_pools(PICTURES)["text_encode"]
            assert {"unfuse_requests_active 1.0", f'unfuse_worker_active{{numerics="",pool="{encode}"}} 1.0'} <= lines
            (node,) = (line.removesuffix(" 1.0") for line in lines if line.startswith('unfuse_node_tasks{node="'))
            http.post(f"/v1/requests/{id}/cancel")
        lines = set(http.get("/metrics").text.splitlines())
    assert {
        "unfuse_requests_submitted_total 4.0",
        "requests_submitted_total 4.0",
        "unfuse_requests_completed_total 2.0",
        "requests_completed_total 2.0",
        "unfuse_requests_failed_total 1.0",
        "requests_failed_total 1.0",
        "unfuse_requests_cancelled_total 1.0",
        "unfuse_requests_rejected_total 0.0",
        "unfuse_requests_active 0.0",
        f'unfuse_queue_size{{numerics="",pool="{encode}"}} 0.0',
        f'unfuse_worker_idle{{numerics="",pool="{encode}"}} 1.0',
        f"{node} 0.0",
        'unfuse_request_latency_seconds_count{model="pictures"} 2.0',
        'unfuse_stage_latency_seconds_count{model="pictures",stage="denoise"} 2.0',
        f'unfuse_step_latency_seconds_sum{{numerics="",pool="{encode}"}} 0.1',
        f'unfuse_batch_size_sum{{numerics="",pool="{encode}"}} 4.0',
    } <= lines


def test_metrics_parse_and_labels_have_few_values(http: httpx2.Client) -> None:
    for seed in range(3):
        http.post(URL, json=ASKED | {"seed": seed, "metadata": {"job": str(seed)}})
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    assert {"unfuse_queue_oldest_seconds", "unfuse_lease_expired", "unfuse_store_bytes"} <= families.keys()
    labels = {
        name: {
            value for family in families.values() for sample in family.samples for value in [sample.labels.get(name)]
        }
        for name in ("model", "stage", "pool", "numerics", "backend", "role", "engine", "tenant", "device", "memory")
    }
    assert labels["model"] <= {PICTURES.name, IDLE.name, None}
    assert labels["stage"] <= {"text_encode", "denoise", "vae_decode", None}
    assert labels["pool"] <= {*named_pools(PICTURES).values(), *named_pools(IDLE).values(), None}
    assert labels["numerics"] == {"", None}
    assert labels["backend"] == {"shared_memory", None}
    assert labels["role"] <= {"encoder", "denoiser", "decoder", "all", None}
    assert labels["engine"] <= {"tcp", None}
    assert labels["tenant"] <= {"default", None}
    assert labels["device"] <= {"", "unknown", None}
    assert labels["memory"] <= {"kv", "arena", None}
    names = {label for family in families.values() for sample in family.samples for label in sample.labels}
    assert names <= {*labels, "component", "le", "node", "retry", "state"}


def test_metrics_report_the_age_of_the_oldest_waiting_task(tmp_path: Path) -> None:
    with serve(tmp_path, works=False) as served, as_(served) as http:
        served.run(served.queue.register(WORKER, (PICTURES,)))
        encode = named_pools(PICTURES)["text_encode"]
        for _ in range(3):
            id = http.post(URL, json=ASKED, headers=ASYNC).json()["id"]
        assert len(served.run(served.queue.lease(WORKER.id, lease_request(*WORKER.pools, slots=2), 60.0))) == 2
        record = served.run(served.queue.load(id))
        queued_at = record.context.stages["text_encode"].queued_at
        assert sample(http, f'unfuse_queue_size{{numerics="",pool="{encode}"}}') == 1
        assert sample(http, 'unfuse_role_queue_size{component="text_encoder",role="encoder"}') == 1
        assert sample(http, 'unfuse_role_queue_size{component="transformer",role="denoiser"}') == 0
        until(lambda: any(pool["oldest_s"] > 0 for pool in http.get("/v1/pools").json()["data"]))
        (pool,) = [pool for pool in http.get("/v1/pools").json()["data"] if pool["id"] == encode]
        told = sample(http, f'unfuse_queue_oldest_seconds{{numerics="",pool="{encode}"}}')
        assert 0 < told <= time.time() - queued_at
        assert (pool["waiting"], pool["leased"]) == (1, 2)
        http.post(f"/v1/requests/{id}/cancel")
        assert sample(http, f'unfuse_queue_oldest_seconds{{numerics="",pool="{encode}"}}') == 0


def test_metrics_report_predicted_seconds_and_dispatches_by_pool(tmp_path: Path) -> None:
    with serve(tmp_path, works=False) as served, as_(served) as http:
        dispatcher = Dispatcher(served.scheduler, [], StorageLocations(""))
        served.run(dispatcher.answer(b"w", Register(WORKER, (PICTURES,))))
        encode, denoise = (named_pools(PICTURES)[name] for name in ("text_encode", "denoise"))
        ids = [http.post(URL, json=ASKED, headers=ASYNC).json()["id"] for _ in range(2)]
        plan = served.run(served.queue.load(ids[0])).context.plan
        costs = {readable_pool(stage.pool): stage.cost for stage in plan.stages}
        assert sample(http, f'unfuse_pool_predicted_seconds{{numerics="",pool="{denoise}"}}') == pytest.approx(
            2 * costs[denoise]
        )
        assert sample(http, f'unfuse_tasks_dispatched_total{{numerics="",pool="{encode}"}}') is None

        (lease,) = served.run(dispatcher.answer(b"w", RequestTasks(1, None, 1.0))).leases
        made = replace(object_for(lease.claim), owner=WORKER.id)
        done = TaskCompleted(lease.claim, made, (), Timings(run_s=1.0))
        served.run(dispatcher.answer(b"w", done))

        assert sample(http, f'unfuse_tasks_dispatched_total{{numerics="",pool="{encode}"}}') == 1
        assert sample(http, f'unfuse_pool_predicted_seconds{{numerics="",pool="{encode}"}}') == pytest.approx(
            costs[encode]
        )
        http.post(f"/v1/requests/{ids[1]}/cancel")
        assert sample(http, f'unfuse_pool_predicted_seconds{{numerics="",pool="{encode}"}}') == 0


def test_store_bytes_metric_is_labelled_with_the_store_backend(tmp_path: Path) -> None:
    with serve(tmp_path, works=False, store="disk") as served, as_(served) as http:
        assert sample(http, 'unfuse_store_bytes{backend="disk"}') == 0
        assert sample(http, 'unfuse_store_bytes{backend="shared_memory"}') is None
        assert sample(http, "unfuse_cache_bytes") == 0


def test_silent_worker_is_unhealthy_and_its_expired_leases_are_counted(tmp_path: Path) -> None:
    with serve(tmp_path, works=False, lease_ttl=2.0) as served, as_(served) as http:
        served.run(served.queue.register(replace(WORKER, status=WorkerStatus(arena_used=4096)), (PICTURES,)))
        pool = named_pools(PICTURES)["text_encode"]
        http.post(URL, json={**ASKED, "model": PICTURES.name}, headers=ASYNC)
        assert served.run(served.queue.lease(WORKER.id, lease_request(*WORKER.pools), 0.1))
        until(lambda: sample(http, f'unfuse_lease_expired_total{{numerics="",pool="{pool}"}}') == 1)
        until(lambda: not http.get("/v1/workers").json()["data"][0]["healthy"])
        assert all(pool["workers"] == [] for pool in http.get("/v1/pools").json()["data"])
        assert sample(http, 'unfuse_store_bytes{backend="shared_memory"}') == 0
        served.run(served.queue.register(replace(WORKER, status=WorkerStatus(arena_used=4096))))
        served.scheduler.lease_ttl = 600.0
        assert http.get("/v1/workers").json()["data"][0]["healthy"]
        assert sample(http, 'unfuse_store_bytes{backend="shared_memory"}') == 4096


def test_metrics_report_transfers_by_engine_and_arena_use_by_role(tmp_path: Path) -> None:
    """Given beats of a worker, when metrics are read, then what it pulled is summed by engine."""
    with serve(tmp_path, works=False) as served, as_(served) as http:
        dispatcher = Dispatcher(served.scheduler, [], StorageLocations(""))
        served.run(dispatcher.answer(b"w", Register(replace(WORKER, arena_bytes=4096), (PICTURES,))))
        for moved in (TransferStats(1000, 0.5), TransferStats(24, 0.25, 1)):
            status = WorkerStatus(
                arena_used=1024,
                arena_high_water=3072,
                arena_fragmentation=0.125,
                ranks=(RankTimes(3.0, 0.25), RankTimes(1.0)),
            )
            served.run(dispatcher.answer(b"w", Heartbeat(status=status, transfers={"tcp": moved})))
        told = {
            name: sample(http, f'unfuse_transfer_{name}_total{{engine="tcp"}}')
            for name in ("bytes", "seconds", "failures")
        }
        assert told == {"bytes": 1024.0, "seconds": 0.75, "failures": 1.0}
        shares = {
            name: sample(http, f'unfuse_arena_{name}{{role="{WORKER.role}"}}')
            for name in ("occupancy", "high_water", "fragmentation")
        }
        assert shares == {"occupancy": 0.25, "high_water": 0.75, "fragmentation": 0.125}
        (shown,) = http.get("/v1/workers").json()["data"]
        assert sample(http, f'unfuse_rank_seconds{{of="exchange",rank="0",role="{WORKER.role}"}}') == 0.25
        assert sample(http, f'unfuse_rank_seconds{{of="compute",rank="1",role="{WORKER.role}"}}') == 1.0
        assert shown["ranks"] == [{"compute_s": 3.0, "exchange_s": 0.25}, {"compute_s": 1.0, "exchange_s": 0.0}]
        assert (shown["high_water"], shown["fragmentation"], shown["engines"]) == (3072, 0.125, {})


def test_leaked_memory_of_workers_is_summed_by_role(tmp_path: Path) -> None:
    """Given beats of two workers of a role, then bytes are summed by what memory they are of, and 0 before any."""
    with serve(tmp_path, works=False) as served, as_(served) as http:
        dispatcher = Dispatcher(served.scheduler, [], StorageLocations(""))
        name = 'unfuse_leaked_bytes_total{memory="%s",role="' + WORKER.role + '"}'
        for worker in (b"v", b"w"):
            served.run(dispatcher.answer(worker, Register(replace(WORKER, id=worker.decode()), (PICTURES,))))
        assert [sample(http, name % memory) for memory in ("kv", "arena")] == [0, 0]
        served.run(dispatcher.answer(b"v", Heartbeat(leaks={"kv": 1 << 40})))
        served.run(dispatcher.answer(b"w", Heartbeat(leaks={"kv": 512, "arena": 4096})))
        served.run(dispatcher.answer(b"w", Heartbeat()))
        assert [sample(http, name % memory) for memory in ("kv", "arena")] == [(1 << 40) + 512, 4096]


def test_device_errors_are_summed_by_device_and_retries_by_role(tmp_path: Path) -> None:
    with serve(tmp_path, works=False) as served, as_(served) as http:
        dispatcher = Dispatcher(served.scheduler, [], StorageLocations(""))
        device = DeviceId("cuda:0", "GPU-0")
        labels = f'index="cuda:0",kind="%s",node="{WORKER.node}",uuid="GPU-0"'
        errors = "unfuse_device_errors_total{" + labels + "}"
        retries = f'unfuse_memory_retries_total{{retry="halved",role="{WORKER.role}"}}'
        for worker in (b"v", b"w"):
            registration = replace(WORKER, id=worker.decode(), devices=(device,))
            served.run(dispatcher.answer(worker, Register(registration, (PICTURES,))))
        assert [sample(http, errors % kind) for kind in ("failed", "unusable", "out_of_memory")] == [0, 0, 0]
        assert sample(http, retries) == 0

        failed, halved = DeviceErrors(device, "failed"), DeviceErrors(device, "out_of_memory", "halved", 3)
        served.run(dispatcher.answer(b"v", Heartbeat(device_errors=(failed, halved))))
        served.run(dispatcher.answer(b"w", Heartbeat(device_errors=(failed, DeviceErrors(device, "out_of_memory")))))
        served.run(dispatcher.answer(b"w", Heartbeat()))
        assert [sample(http, errors % kind) for kind in ("failed", "unusable", "out_of_memory")] == [2, 0, 4]
        assert sample(http, retries) == 3


def test_accepted_rejected_and_ended_requests_are_logged(guarded: Served) -> None:
    with capture_logs([merge_contextvars]) as logs, as_(guarded, "key-a") as http:
        named = {"x-request-id": "mine-7"}
        asked = ASKED | {"prompt": "a very secret circle", "metadata": {"job": "secret"}}
        id = http.post(URL, json=asked | {"response_format": "url"}, headers=named).json()["id"]
        http.post(URL, json={"prompt": asked["prompt"], "seed": "secret"}, headers=named)
        http.post(URL, json=asked | {"prompt": BROKEN})
        waiting = http.post(URL, json=asked | {"model": IDLE.name}, headers=ASYNC).json()["id"]
        http.post(URL, json=asked)
        http.post(f"/v1/requests/{waiting}/cancel")
    lines = [line for line in logs if line["event"] in ("accepted", "rejected", "ended")]
    accepted, ended, invalid, _, failed, _, refused, cancelled = lines
    assert (accepted["event"], accepted["request"], accepted["model"]) == ("accepted", id, PICTURES.name)
    assert {line["x_request_id"] for line in (accepted, invalid)} == {"mine-7"}
    assert (ended["request"], ended["status"], ended["seconds"] >= 0) == (id, "completed", True)
    assert (invalid["status"], invalid["code"], invalid["param"]) == (400, "invalid_parameter", "seed")
    assert invalid["model"] == "", "which the client did not send"
    assert (failed["status"], failed["code"], failed["stage"]) == ("failed", "stage_failed", "text_encode")
    assert (refused["status"], refused["code"]) == (429, "overloaded")
    assert "1 requests are in progress" in refused["reason"]
    assert (cancelled["request"], cancelled["status"]) == (waiting, "cancelled")
    assert {line["tenant"] for line in lines} == {"anna"}
    assert not any(word in str(logs) for word in ("secret", "circle", "key-a"))


def test_openapi_schema_lists_image_request_parameters(http: httpx2.Client) -> None:
    operation = http.get("/openapi.json").json()["paths"]["/v1/images/generations"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "size", "seed", "num_inference_steps"} <= set(schema["properties"])
    assert {"4XX", "5XX"} <= set(operation["responses"])
    assert "422" not in operation["responses"]
