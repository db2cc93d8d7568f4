"""Fills a queue with requests in every state, and says what a Redis then holds: see README.md."""

import asyncio
import json
import sys
from collections.abc import Mapping

import msgspec

from tools.asking import asking
from unfuse import queues
from unfuse.core.card import ModelCard
from unfuse.core.messages import Done, Failed, WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.queues.base import TaskQueue
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.queue_samples import wanted

STAGES = (
    StageSpec("encode", "text_encode", ("a",), (), ("embeds",)),
    StageSpec("denoise", "denoise", ("b",), ("embeds",), ("latents",)),
    StageSpec("decode", "vae_decode", ("c",), ("latents",), ()),
)
NAMES = dict.fromkeys("abc", "0" * 12)
CARD = msgspec.convert(
    {
        "name": "m", "source": "/m", "family": "f", "pipeline": msgspec.to_builtins(Pipeline(STAGES)), "limits": {},
        "defaults": {}, "weights": NAMES, "dtypes": dict.fromkeys("abc", "float32"),
    },
    ModelCard,
)  # fmt: skip
"""With limits as each version has them: this file is run by that commit, and read by today's tests."""
POOLS = CARD.pools()
WORKER = WorkerInfo("w", "node", "all", tuple(POOLS.values()), 4, "unix:@w", 1 << 30)
STATES: Mapping[str, tuple[str, ...]] = {
    "req_queued": (),
    "req_encoding": ("lease",),
    "req_encoded": ("lease", "done"),
    "req_denoising": ("lease", "done", "lease"),
    "req_retried": ("lease", "transient"),
    "req_completed": ("lease", "done", "lease", "done", "lease", "done"),
    "video_completed": ("lease", "done", "lease", "done", "lease", "done"),
    "req_dead": ("lease", "crash", "lease", "crash"),
    "req_failed": ("lease", "permanent"),
    "req_cancelled": ("lease", "cancel"),
    "video_queued": (),
}
"""What happened to each request, in turn. Those of an odd place are of the tenant "other"."""


def params() -> dict[str, object]:
    sizes = {"height": 64, "width": 64, "num_frames": 1, "fps": 1, "num_inference_steps": 4}
    return {"prompt": "a red circle on white", "seed": 1, "output_format": "png", **sizes}


def done(lease: Lease) -> Done:
    """The completion of a stage; the last one made a picture."""
    task = lease.task
    name = f"{task.request}/{task.stage}"
    ref = ObjectRef(name, "w", "node", task.request, task.stage, task.attempt, 1, 64, (), (1, 2), b"k" * 16, 0.0)
    results = (ResultFile(0, "image/png", 1000, "0" * 64),) if task.planned.final else ()
    return Done(lease.claim, None if task.planned.final else ref, results, Timings(run_s=1.0))


async def one(scheduler: Scheduler, place: int, id: str, steps: tuple[str, ...]) -> None:
    queue, lease = scheduler.queue, None
    own = {"tenant": ("default", "other")[place % 2], "idempotency_key": f"key of {id}", "fingerprint": f"body of {id}"}
    await scheduler.submit(*asking(CARD, params(), id=id, metadata={"n": str(place)}, priority=place, **own))
    for step in steps:
        if step == "lease":
            (lease,) = await queue.lease("w", wanted(*POOLS.values()), 600.0)
            assert lease.task.request == id
        elif step == "done":
            await scheduler.complete(done(lease), "w")
        elif step == "cancel":
            await scheduler.cancel(id)
        else:
            await scheduler.fail(Failed(lease.claim, step, "it went wrong", evidence="its last words"), "w")


async def fill(queue: TaskQueue) -> None:
    scheduler = Scheduler(queue, cards=[CARD])
    await queue.hello(WORKER, [CARD])
    await queue.expired(15.0)
    for place, (id, steps) in enumerate(STATES.items()):
        await one(scheduler, place, id, steps)
    await scheduler.submit(*asking(CARD, params(), id="req_late", timeout=60.0, priority=-1))
    await queue.cache("a prompt", ObjectRef("e", "w", "node", "r", "s", 1, 1, 64, (), (1, 2), b"k" * 16, 0.0), 1 << 20)
    await queue.close()


def dump(url: str) -> str:
    """All that a Redis holds, by key: its type and value, a line each: its type and value, bytes as Latin-1."""
    import redis

    client = redis.Redis.from_url(url, decode_responses=True, encoding="latin-1")
    read = {"hash": client.hgetall, "zset": lambda key: client.zrange(key, 0, -1, withscores=True)}
    read |= {"set": lambda key: sorted(client.smembers(key)), "list": lambda key: client.lrange(key, 0, -1)}
    kinds = {key: client.type(key) for key in sorted(client.keys())}
    return "\n".join(json.dumps([key, kind, read[kind](key)], ensure_ascii=False) for key, kind in kinds.items())


if __name__ == "__main__":
    asyncio.run(fill(queues.open(sys.argv[1])))
    if sys.argv[1].startswith("redis"):
        print(dump(sys.argv[1]))
