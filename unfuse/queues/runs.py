"""Runs of the script in Redis: as few for many calls as their sizes allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from unfuse.queues.script import SCRIPT, SCRIPT_ID

Call = tuple[str, bytes]
"""A verb of the script, and its arguments."""

RUN_CALLS, RUN_BYTES = 32, 2**20
"""The most calls in one run of the script, and the most bytes of their arguments: other clients wait for its end."""


def runs(calls: Sequence[Call]) -> list[list[Call]]:
    """These calls in their order, as many in a run as RUN_CALLS and RUN_BYTES allow; a longer one runs alone."""
    found: list[list[Call]] = []
    nbytes = 0
    for call in calls:
        nbytes += len(call[1])
        if not found or len(found[-1]) == RUN_CALLS or nbytes > RUN_BYTES:
            found.append([])
            nbytes = len(call[1])
        found[-1].append(call)
    return found


async def answers(redis: Redis, tag: str, calls: Sequence[Call]) -> list[Any]:
    """The answer to each of these calls, or its error, in one round trip. Raises what the connection does."""
    shared = runs(calls)
    async with redis.pipeline(transaction=False) as pipeline:
        for run in shared:
            words: list[str | bytes] = [word for call in run for word in call]
            pipeline.evalsha(SCRIPT_ID, 1, tag, *words)
        replies = await pipeline.execute(raise_on_error=False)
    found: list[Any] = []
    for run, reply in zip(shared, replies, strict=True):
        if isinstance(reply, NoScriptError):
            await redis.script_load(SCRIPT)
            found += await answers(redis, tag, run)
        else:
            found += [reply] * len(run) if isinstance(reply, Exception) else reply
    return found
