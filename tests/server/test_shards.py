"""A gateway over a queue of which a part does not answer."""

from pathlib import Path

import httpx2

from tests.queues.sharded import CutShards
from tests.scheduler.model import CARD, params
from tests.server.served import PICTURES, serve, until
from tools.asking import asking
from unfuse import queues
from unfuse.client import AsyncClient, Client
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.gateway import Gateway
from unfuse.stores.results import open_results

MADE = "/v1/images/generations"


def test_unreachable_shard_affects_only_its_own_requests(tmp_path: Path) -> None:
    """Given three shards, when the first is away, then what lives there is 503, and all that comes new is made."""
    with serve(tmp_path, idle=False, cards=(PICTURES,), queue="tests.queues.sharded:CutShards") as served:
        queue = served.queue
        assert isinstance(queue, CutShards)
        shards = queue._health.shards
        with httpx2.Client(base_url=served.url, timeout=30, trust_env=False) as http:

            def made(prompt: str) -> str:
                answer = http.post(MADE, json={"model": PICTURES.name, "prompt": prompt, "n": 1})
                assert answer.status_code == 200, answer.text
                return str(answer.json()["id"])

            ids: dict[int, str] = {}
            while ids.keys() != {0, 1, 2}:
                id = made(f"a {len(ids)}")
                ids[queue.shard_of(id)] = id
            assert "away" not in http.get("/ready").json()
            shards[0].gone = True  # type: ignore[attr-defined]
            until(lambda: queue.unreachable_parts())
            ready = http.get("/ready")
            assert (ready.status_code, ready.json()["ready"]) == (200, True)
            assert ready.json()["away"] == ["shard 0 of 3: it does not answer"]
            assert http.get(f"/v1/requests/{ids[0]}").status_code == 503
            assert http.get(f"/v1/requests/{ids[1]}").status_code == 200
            assert {queue.shard_of(made(f"b {number}")) for number in range(12)} == {1, 2}
            assert {queue.shard_of(one["id"]) for one in http.get("/v1/requests?limit=100").json()["data"]} == {1, 2}
            shards[0].gone = False  # type: ignore[attr-defined]
            until(lambda: not queue.unreachable_parts())
            assert http.get(f"/v1/requests/{ids[0]}").status_code == 200


def test_client_calls_succeed_while_any_one_shard_is_unreachable(tmp_path: Path) -> None:
    """Given three shards of which any one is away, when the client asks for new requests, lists, pages of them and the
    state of what lives elsewhere, then it is answered; and a key that was used before is not taken anew elsewhere."""
    with serve(tmp_path, idle=False, cards=(PICTURES,), queue="tests.queues.sharded:CutShards") as served:
        queue = served.queue
        assert isinstance(queue, CutShards)
        shards = queue._health.shards
        with Client(served.url) as client, httpx2.Client(base_url=served.url, timeout=60, trust_env=False) as http:
            known = list[str]()
            while {queue.shard_of(id) for id in known} != {0, 1, 2}:
                known.append(client.submit("a red circle", model=PICTURES.name).id)
            for away, shard in enumerate(shards):
                last = next(one["id"] for one in client.requests() if queue.shard_of(one["id"]) == away)
                client.requests(limit=[one["id"] for one in client.requests()].index(last) + 1)
                shard.gone = True  # type: ignore[attr-defined]
                made = [client.submit("a red circle", model=PICTURES.name).id for _ in range(8)]
                assert away not in {queue.shard_of(id) for id in made}
                assert {one["id"] for one in client.requests()} >= {*made}
                assert all(queue.shard_of(one["id"]) != away for one in client.requests(after=last, limit=2))
                assert all(client.request(id).view["id"] == id for id in known if queue.shard_of(id) != away)
                assert client.models() and client.workers() and client.pools() and client.dead() == []
                refused = [
                    http.post(MADE, json={"model": PICTURES.name, "prompt": "a"}, headers={"idempotency-key": f"{key}"})
                    for key in range(12)
                ]
                codes = {one.json()["error"]["code"] for one in refused if one.status_code != 200}
                assert codes == {"key_unavailable"}
                shard.gone = False  # type: ignore[attr-defined]
                until(lambda: not queue.unreachable_parts())


async def test_async_client_submits_to_reachable_shards(tmp_path: Path) -> None:
    with serve(tmp_path, idle=False, cards=(PICTURES,), queue="tests.queues.sharded:CutShards") as served:
        assert isinstance(queue := served.queue, CutShards)
        queue._health.shards[1].gone = True  # type: ignore[attr-defined]
        async with AsyncClient(served.url) as client:
            made = [(await client.submit("a red circle", model=PICTURES.name)).id for _ in range(8)]
        assert 1 not in {queue.shard_of(id) for id in made}


async def test_shutdown_waits_for_callers_while_a_shard_is_unreachable(tmp_path: Path) -> None:
    """Given a caller whose request lives in a part that does not answer, then a server that stops goes on waiting for
    its callers: those of the other parts may be answered in time, and the part may come back."""
    queue = queues.open("tests.queues.sharded:CutShards")
    assert isinstance(queue, CutShards)
    scheduler = Scheduler(queue, specs=[CARD])
    gateway = Gateway(scheduler, open_results(f"disk:{tmp_path}"))
    request = (await scheduler.submit(*asking(CARD, params()))).context.id
    queue._health.shards[queue.shard_of(request)].gone = True  # type: ignore[attr-defined]
    with gateway.awaiting(request):
        assert await gateway.awaited_within(60.0)
    assert not await gateway.awaited_within(60.0)
    await scheduler.close()
    await queue.close()
