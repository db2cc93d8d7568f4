"""Ray Serve with two replicas and batches of four, by its docs' guide to batching; a batch waits 10 ms for others.

https://docs.ray.io/en/latest/serve/advanced-guides/dyn-req-batch.html
`python -m bench.peers.with_rayserve PORT WORKERS BATCH`
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from bench.peers.pipeline import load, together

PORT, WORKERS, BATCH = map(int, sys.argv[1:])
VARIABLES = {name: os.environ[name] for name in ("BENCH_MODEL", "BENCH_THREADS", "OMP_NUM_THREADS", "PYTHONPATH")}
STORE = 128 << 20


@serve.deployment(
    num_replicas=WORKERS,
    max_ongoing_requests=2 * BATCH,
    ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": VARIABLES}},
)
class Pictures:
    def __init__(self) -> None:
        self.pipeline = load()

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=0.01)
    async def make(self, asked: list[dict[str, Any]]) -> list[bytes]:
        return together(self.pipeline, asked)

    async def __call__(self, request: Request) -> Response:
        return Response(await self.make(await request.json()), media_type="image/png")


def main() -> None:
    ray.init(num_cpus=WORKERS, include_dashboard=False, object_store_memory=STORE, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT, "num_cpus": 0})
    serve.run(Pictures.bind(), route_prefix="/picture")
    threading.Event().wait()


if __name__ == "__main__":
    main()
