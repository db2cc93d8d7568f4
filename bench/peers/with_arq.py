"""arq. Its worker looks for jobs every `poll_delay`: half a second by default, and it runs ten jobs then, not more.

Settings: https://arq-docs.helpmanual.io/#arq.worker.Worker. `python -m bench.peers.with_arq client|worker [defaults]`
"""

from __future__ import annotations

import json
import logging
import os
import sys
from functools import partial

import uvloop
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from bench.peers.loop import PARAMS, Ear, Mouth, obey

URL, PIPE = os.environ["BENCH_URL"], os.environ["BENCH_PIPE"]
BEST = {
    "max_jobs": 256,  # "maximum number of jobs to run at a time": as many as there are callers
    "poll_delay": 0.001,  # "duration between polling the queue for new jobs"
}


def packed(value: object) -> bytes:
    """`job_serializer` instead of pickle; what arq packs is a dict of plain values."""
    return json.dumps(value).encode()


async def nothing(context: dict[str, object], params: dict[str, object]) -> None:
    pass


async def client() -> None:
    pool = await create_pool(RedisSettings.from_dsn(URL), job_serializer=packed, job_deserializer=json.loads)
    ear = Ear(PIPE)
    await obey(partial(ear.one, lambda name: pool.enqueue_job("nothing", PARAMS, _job_id=name)))


def worker(settings: dict[str, float]) -> None:
    mouth = Mouth(PIPE)

    async def told(context: dict[str, str]) -> None:
        """`after_job_end`: "after job has ended and results have been recorded"."""
        mouth.say(context["job_id"])

    logging.disable(logging.INFO)
    uvloop.install()
    Worker(
        [func(nothing, keep_result=3600)],
        redis_settings=RedisSettings.from_dsn(URL),
        after_job_end=told,
        log_results=False,
        job_serializer=packed,
        job_deserializer=json.loads,
        **settings,
    ).run()


if __name__ == "__main__":
    if sys.argv[1] == "client":
        uvloop.run(client())
    else:
        worker({} if sys.argv[2:] == ["defaults"] else BEST)
