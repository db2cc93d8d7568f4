"""Celery over Redis, for many short tasks: https://docs.celeryq.dev/en/stable/userguide/optimizing.html.

Tasks are acknowledged when they are received, as by default: a dead worker's tasks are lost. The client has no result
backend, so that it does not subscribe to each task's result. `python -m bench.peers.with_celery client|worker`
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

from celery import Celery, signals

from bench.peers.loop import PARAMS, Ear, Mouth, obey

URL, PIPE = os.environ["BENCH_URL"], os.environ["BENCH_PIPE"]
POOL = ("--pool", "threads", "--concurrency", "4")
"""The best of solo, threads and prefork for tasks that do nothing."""

WORKER = (*POOL, "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING")

app = Celery("bench", broker=URL, backend=None if sys.argv[1:] == ["client"] else URL)
app.conf.update(
    worker_prefetch_multiplier=256,  # "if you have many tasks with a short duration": 4 by default
    result_expires=3600,
    broker_connection_retry_on_startup=True,
    worker_enable_remote_control=False,
    task_serializer="json",
)
mouth = Mouth(PIPE)


@app.task(name="nothing")
def nothing(params: dict[str, object]) -> None:
    pass


@signals.task_postrun.connect
def told(task_id: str, **_: object) -> None:
    mouth.say(task_id)


async def submit(name: str) -> None:
    nothing.apply_async((PARAMS,), task_id=name)


async def client() -> None:
    await obey(partial(Ear(PIPE).one, submit))


if __name__ == "__main__":
    if sys.argv[1:] == ["client"]:
        asyncio.run(client())
    else:
        command = [sys.executable, "-m", "celery", "--app", "bench.peers.with_celery", "worker", *WORKER]
        os.execv(sys.executable, command)
