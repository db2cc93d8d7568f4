"""taskiq over taskiq-redis. The list broker is its quickest: it acknowledges nothing, a dead worker's tasks are lost.

Settings: https://taskiq-python.github.io/guide/cli.html (uvloop is used where it is installed; `--workers` processes,
`--max-async-tasks` at once in each, `--max-prefetch`, `--no-parse`), https://github.com/taskiq-python/taskiq-redis
(brokers, result backend). `python -m bench.peers.with_taskiq client|worker`
"""

from __future__ import annotations

import os
import sys
from functools import partial

import uvloop
from taskiq import TaskiqMessage, TaskiqMiddleware, TaskiqResult
from taskiq.serializers import ORJSONSerializer
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

from bench.peers.loop import PARAMS, Ear, Mouth, obey

URL, PIPE = os.environ["BENCH_URL"], os.environ["BENCH_PIPE"]
WORKER = ("--workers", "1", "--max-async-tasks", "256", "--max-prefetch", "256", "--no-parse", "--log-level", "WARNING")


class Told(TaskiqMiddleware):
    """Says so once a result is stored."""

    def __init__(self) -> None:
        super().__init__()
        self._mouth = Mouth(PIPE)

    def post_save(self, message: TaskiqMessage, result: TaskiqResult[object]) -> None:
        self._mouth.say(message.task_id)


broker = (
    ListQueueBroker(URL)
    .with_serializer(ORJSONSerializer())
    .with_result_backend(RedisAsyncResultBackend(URL, result_ex_time=3600, serializer=ORJSONSerializer()))
    .with_middlewares(Told())
)


@broker.task(task_name="nothing")
async def nothing(params: dict[str, object]) -> None:
    pass


async def client() -> None:
    await broker.startup()
    ear = Ear(PIPE)
    await obey(partial(ear.one, lambda name: nothing.kicker().with_task_id(name).kiq(PARAMS)))


if __name__ == "__main__":
    if sys.argv[1:] == ["client"]:
        uvloop.run(client())
    else:
        os.execv(sys.executable, [sys.executable, "-m", "taskiq", "worker", "bench.peers.with_taskiq:broker", *WORKER])
