"""What a queue may do in a Redis that others use too: all that it needs, and no more."""

import asyncio
import re
from importlib.resources import files

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from tests.queues.conftest import Address, Server, users
from unfuse import queues
from unfuse.core.errors import ConfigError, TransientError
from unfuse.queues.base import QueueBackend, RequestFilter
from unfuse.stores.redis import RedisBlobs
from unfuse.testing.queue_samples import TTL, lease_all, lease_next, lease_request, start_task, submit, worker_info

OUTSIDE = {"evalsha", "script|load", "subscribe", "unsubscribe", "ping", "wait"}
"""What is sent by the queue itself, not by its script."""


def test_documented_redis_acl_allows_exactly_the_script_commands() -> None:
    """Given the commands that the script calls, then these are the ones that the page allows, to one."""
    script = "".join(part.read_text() for part in (files("unfuse.queues") / "scripts").iterdir())
    called = {name.lower() for name in re.findall(r"call\(?,? ?'([A-Z]+)'", script)}
    assert {word[1:] for word in users()[0] if word.startswith("+")} == called | OUTSIDE


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL",
        "CONFIG GET requirepass",
        "ACL LIST",
        "KEYS *",
        "SCAN 0",
        "GET {unfuse}:meta",
        "HGET {other}:meta x",
        "HGET unfuse:meta x",
        "HSET {unfuse-kept}:kept a b",
        "SUBSCRIBE {other}:news",
        "PUBLISH {other}:news x",
        "PSUBSCRIBE *",
        "SHUTDOWN",
        "REPLICAOF 127.0.0.1 1",
        "SCRIPT FLUSH",
        "FUNCTION LIST",
        "MONITOR",
        "CLIENT LIST",
    ],
)
def test_documented_redis_user_is_denied_other_commands_and_keys(server: Server, command: str) -> None:
    """Neither by itself nor in a script of its own."""
    server.client.execute_command(*users()[0])
    with Redis.from_url(server.as_user("unfuse", "SECRET").url) as client:
        with pytest.raises(NoPermissionError):
            client.execute_command(*command.split())
        words = ", ".join(repr(word) for word in command.split())
        ours = client.script_load(f"return redis.call({words})")
        with pytest.raises(Exception, match="can't|not allowed|ACL failure"):
            client.evalsha(ours, 1, "{unfuse}")


@pytest.mark.slow
def test_result_store_in_redis_works_with_documented_acl(least: Address, server: Server) -> None:
    server.client.execute_command(*users()[1])
    blobs = RedisBlobs(least.url)
    blobs.write("folder", "name", b"bytes")
    assert b"".join(blobs.read("folder", "name")[1]) == b"bytes"
    assert [entry.name for entry in blobs.entries("folder")] == ["name"]
    blobs.drop("folder")
    assert list(blobs.entries()) == []


@pytest.mark.slow
async def test_missing_redis_permissions_are_reported(server: Server) -> None:
    """A wrong prefix at the start; a command that is missing where it is used, and the server's log names it."""
    server.client.execute_command(*users()[0])
    mine = server.as_user("unfuse", "SECRET").url
    other = queues.open(f"{mine}?prefix=other")
    with pytest.raises(ConfigError, match="the Redis user lacks permissions"):
        await other.check_address()
    await other.close()
    server.client.execute_command("ACL", "SETUSER", "unfuse", "-zadd")
    queue = queues.open(mine)
    await queue.check_address()
    with pytest.raises(TransientError, match="can't run this command|'zadd'"):
        await submit(queue, "a")
    assert server.client.acl_log()[0]["object"] == "zadd"
    await queue.close()


@pytest.mark.slow
async def test_two_prefixes_in_one_redis_are_isolated(server: Server) -> None:
    """Given two, each with a user of its own, when both have a request of one name, then each has, lists, leases and
    counts its own; who waits at the other is not woken, and nothing of one can be reached by the other."""
    both: dict[str, QueueBackend] = {}
    for name in ("blue", "green"):
        server.client.execute_command(*(word.replace("unfuse", name) for word in users()[0]))
        both[name] = queues.open(f"{server.as_user(name, 'SECRET').url}?prefix={name}")
        await both[name].check_address()
    blue, green = both.values()
    waiting = await start_task(green.lease("w", lease_request("p"), TTL, wait=60.0))
    await blue.register(worker_info("w"))
    await submit(blue, "a", priority=7)
    await submit(blue, "b")
    assert not waiting.done()
    assert (await green.list(RequestFilter()), await green.workers(), (await green.stats(["p"])).active) == ([], [], 0)
    await submit(green, "a")
    assert [(lease.task.request, lease.task.priority) for lease in await waiting] == [("a", 0)]
    assert (await lease_next(blue)).task.priority == 7
    assert await lease_all(blue) == ["b"]
    assert [record.context.id for record in await green.list(RequestFilter())] == ["a"]
    await asyncio.gather(blue.close(), green.close())
