"""A gateway over a queue of which a part does not answer."""

from pathlib import Path

import httpx2

from tests.queues.sharded import CutShards
from tests.server.served import PICTURES, serve, until

MADE = "/v1/images/generations"


def test_what_is_away_is_told_and_stops_its_own_requests_alone(tmp_path: Path) -> None:
    """Given three shards, when the first is away, then what lives there is 503, and all that comes new is made."""
    with serve(tmp_path, idle=False, cards=(PICTURES,), queue="tests.queues.sharded:CutShards") as served:
        queue = served.queue
        assert isinstance(queue, CutShards)
        shards = queue._answering.shards
        with httpx2.Client(base_url=served.url, timeout=30, trust_env=False) as http:

            def made(prompt: str) -> str:
                answer = http.post(MADE, json={"model": PICTURES.name, "prompt": prompt, "n": 1})
                assert answer.status_code == 200, answer.text
                return str(answer.json()["id"])

            ids: dict[int, str] = {}
            while ids.keys() != {0, 1, 2}:
                id = made(f"a {len(ids)}")
                ids[queue.home(id)] = id
            assert "away" not in http.get("/ready").json()
            shards[0].gone = True  # type: ignore[attr-defined]
            until(lambda: queue.away())
            ready = http.get("/ready")
            assert (ready.status_code, ready.json()["ready"]) == (200, True)
            assert ready.json()["away"] == ["shard 0 of 3: it does not answer"]
            assert http.get(f"/v1/requests/{ids[0]}").status_code == 503
            assert http.get(f"/v1/requests/{ids[1]}").status_code == 200
            assert {queue.home(made(f"b {number}")) for number in range(12)} == {1, 2}
            assert {queue.home(one["id"]) for one in http.get("/v1/requests?limit=100").json()["data"]} == {1, 2}
            shards[0].gone = False  # type: ignore[attr-defined]
            until(lambda: not queue.away())
            assert http.get(f"/v1/requests/{ids[0]}").status_code == 200
