"""Where a queue in Redis is, how to get there, and why a server can never be the queue."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import msgspec
from redis.asyncio import Redis, Sentinel
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from unfuse.core.errors import ConfigError

ANSWER_S, SILENT_S, NAME_S = 15.0, 5.0, 2.0
"""The longest time, in seconds, for an answer of the queue's server, of one that another may have replaced meanwhile,
and of a Sentinel that is asked who that is.
"""

ADDRESS = (
    "redis://[user:password@]host[:port][/database][?prefix=name][&replicas=number], with [&shards=number] at one host "
    "or at several, divided by commas; redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[,service…]"
    "[/database][?…]; redis+cluster://[user:password@]host[:port][,host[:port]…][?…]; rediss for TLS"
)
MOST_SHARDS = 64


class Slots:
    """Knows a Redis Cluster by some of its servers, as a client of Sentinels knows those: it is asked who has a tag."""

    def __init__(self, hosts: Sequence[tuple[str, int]], **options: Any) -> None:
        self.sentinels = [Redis(host=host, port=port, **options) for host, port in hosts]

    async def discover_master(self, tag: str) -> tuple[str, int]:
        """The server that has the slot of a tag. Raises ConnectionError if none says so."""
        slot = key_slot(tag.encode())
        for one in self.sentinels:
            with suppress(RedisError, OSError):
                found = await one.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
                for first, last, (host, port, *_), *_ in found:
                    if first <= slot <= last:
                        return host.decode(), port
        raise ConnectionError(f"no server of the cluster says who has {tag}")


class Address(msgspec.Struct, frozen=True):
    """`server` is the server's URL, or of a `service` or a cluster that of the first of `hosts`, with the user that all
    have.

    What a queue does is acknowledged when `replicas` have it too. All keys have the `tag`, and are those of a `part` of
    a queue, in words, or of one without shards, "". `beside` a shard are the keys that a queue without any would have.
    """

    server: str
    tag: str
    part: str
    replicas: int
    hosts: tuple[tuple[str, int], ...]
    kind: str
    service: str
    beside: Address | None = None

    @property
    def shown(self) -> str:
        """The address without user and password."""
        name = self.service or self.part
        server = self.server.rpartition("@")[2]
        return f"{server} ({name})" if name else server

    def connect(self) -> Redis:
        """A client of the server; of a service or a cluster, each new connection goes to who has the tag then."""
        options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_timeout": ANSWER_S}
        if not self.kind:
            return Redis.from_url(self.server, **options)
        options |= parse_url(self.server) | {"socket_timeout": SILENT_S}
        ssl = options.pop("connection_class", None) is not None
        del options["host"], options["port"]
        asked = {"ssl": ssl, "socket_timeout": NAME_S, "retry": options["retry"]}
        if self.kind == "cluster":
            slots = Slots(self.hosts, **options | asked)
            pool = SentinelConnectionPool(self.tag, slots, ssl=ssl, **options)  # type: ignore[no-untyped-call]
            return Redis.from_pool(pool)
        sentinel = Sentinel(self.hosts, sentinel_kwargs=asked, ssl=ssl, **options)  # type: ignore[no-untyped-call]
        return cast(Redis, sentinel.master_for(self.service))


def parse_address(url: str) -> list[Address]:
    """What an address says: where the one server of a queue is, or each of its shards, which take turns at the servers
    that are named, or the services. Raises ConfigError for a malformed one.
    """
    try:
        parts = urlsplit(url if "//" in url else f"{url.partition(':')[0]}://127.0.0.1")
        options = {
            "prefix": "unfuse",
            "replicas": "0",
            "shards": "1",
            **dict(parse_qsl(parts.query, keep_blank_values=True)),
        }
        prefix, replicas, shards = options.pop("prefix"), int(options.pop("replicas")), int(options.pop("shards"))
        user, at, named = parts.netloc.rpartition("@")
        scheme, _, kind = parts.scheme.partition("+")
        hosts = tuple(_host(one, 26379 if kind == "sentinel" else 6379) for one in named.split(","))
        pattern = r"/([\w.-]+(?:,[\w.-]+)*)(/\d*)?" if kind == "sentinel" else r"()(/?\d*)"
        services, path = re.fullmatch(pattern, parts.path).groups("")  # type: ignore[union-attr]
        places = services.split(",") if services else [""] if kind else named.split(",")
        if options or replicas < 0 or not re.fullmatch(r"[\w.-]{1,64}", prefix):
            raise ValueError
        if not len(places) <= shards <= MOST_SHARDS or len({*places}) < len(places):
            raise ValueError
    except (ValueError, AttributeError):
        raise ConfigError(f"a queue in Redis is {ADDRESS}") from None
    found = []
    for shard in range(shards):
        host, port = hosts[0]
        netloc = places[shard % len(places)]
        if kind:
            netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        server = parts._replace(scheme=scheme, netloc=f"{user}{at}{netloc}", path=path, query="").geturl()
        service = places[shard % len(places)] if services else ""
        here = ", ".join(str(one) for one in range(shard % len(places), shards, len(places)))
        one = Address(server, f"{{{prefix}}}", "", replicas, hosts, kind, service)
        if shards > 1:
            beside = msgspec.structs.replace(one, part=f"shards {here} of {shards}")
            part = f"shard {shard} of {shards}"
            one = msgspec.structs.replace(one, tag=f"{{{prefix}:{shard}}}", part=part, beside=beside)
        found.append(one)
    return found


async def close(redis: Redis) -> None:
    """Close its connections, also those to Sentinels."""
    await redis.aclose()
    if isinstance(redis.connection_pool, SentinelConnectionPool):
        for sentinel in redis.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _host(text: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0:
        raise ValueError(text)
    return parts.hostname, parts.port or port


TRIES, PAUSE_S, LOOK_S = 3, 0.2, 3.0
"""A server that hangs up TRIES times in a row is not Redis; one that is just shutting down does not do so."""

HANGS_UP = "whatever listens there hangs up: it is not Redis, or wants rediss:// (TLS)"


async def obstacle(url: str, ask: Callable[[], Awaitable[object]]) -> str:
    """Why `ask` can never succeed, in words; "" if it succeeds, or may succeed later."""
    for _ in range(TRIES):
        try:
            async with asyncio.timeout(LOOK_S):
                await ask()
            return ""
        except TimeoutError:
            plain = url.startswith("rediss") and await _answers_plainly(url)
            return "it is Redis without TLS: write redis://, or give it a certificate" if plain else ""
        except RedisError as error:
            found = _permanent_reason(error)
            if found != HANGS_UP:
                return found
        await asyncio.sleep(PAUSE_S)
    return HANGS_UP


def _permanent_reason(error: RedisError) -> str:
    """Why this error will not pass, in words; "" for one that may pass."""
    match error:
        case AuthenticationError():
            return f"it refuses the user or the password ({error}): write redis://user:password@host"
        case NoPermissionError():
            return f"its user may not do what a queue does ({error})"
        case ResponseError() if "DB index" in str(error):
            return f"it has no database of that number ({error}): the number is what stands behind the last /"
        case ResponseError() if (told := str(error)).startswith("MISPLACED"):
            return told.partition(" ")[2]
        case ResponseError() if "unknown command" in str(error):
            return f"it is no Redis of 6.2 or later ({error})"
        case MovedError():
            home = f"{error.host}:{error.port}"
            return (
                f"it is of a Redis Cluster, where this prefix is at {home}: name that server, or write redis+cluster://"
            )
        case InvalidResponse():
            return f"something else than Redis answers there ({error})"
    causes = list(_chain(error))
    if found := next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None):
        return f"TLS fails ({found.reason or found}): is its certificate trusted, or is it redis:// without TLS?"
    hung_up = any(isinstance(cause, ConnectionResetError | BrokenPipeError) for cause in causes)
    return HANGS_UP if hung_up or "closed by server" in str(error) else ""


async def _answers_plainly(url: str) -> bool:
    parts = urlsplit(url)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(LOOK_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 6379)
            writer.write(b"PING\r\n")
            answer = await reader.read(1)
            writer.close()
            return answer in (b"+", b"-")
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
