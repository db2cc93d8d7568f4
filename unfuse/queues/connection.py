"""The way to a queue in Redis: its address, why a server can never be the queue, calls of the script, and news."""

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
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from unfuse.core.errors import ConfigError
from unfuse.core.supervisor import Supervisor
from unfuse.queues.remote_waiters import MAX_BATCH, RETRY_S, NamedTasks, RemoteWaiters
from unfuse.queues.script import SCRIPT, SCRIPT_ID

#: The longest time, in seconds, for an answer of the queue's server, of one that another may have replaced meanwhile,
#: and of a Sentinel that is asked who that is.
ANSWER_S, SILENT_S, NAME_S = 15.0, 5.0, 2.0

ADDRESS = (
    "redis://[user:password@]host[:port][/database][?prefix=name][&replicas=number], with [&shards=number] at one host "
    "or at several, divided by commas; redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[,service…]"
    "[/database][?…]; redis+cluster://[user:password@]host[:port][,host[:port]…][?…]; rediss for TLS"
)
MOST_SHARDS = 64


class ClusterSlots:
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


class RedisAddress(msgspec.Struct, frozen=True):
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
    beside: RedisAddress | None = None

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
            slots = ClusterSlots(self.hosts, **options | asked)
            pool = SentinelConnectionPool(self.tag, slots, ssl=ssl, **options)  # type: ignore[no-untyped-call]
            return Redis.from_pool(pool)
        sentinel = Sentinel(self.hosts, sentinel_kwargs=asked, ssl=ssl, **options)  # type: ignore[no-untyped-call]
        return cast(Redis, sentinel.master_for(self.service))


def parse_address(url: str) -> list[RedisAddress]:
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
    host, port = hosts[0]
    first = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    found = []
    for shard in range(shards):
        place = places[shard % len(places)]
        netloc = f"{user}{at}{first if kind else place}"
        server = parts._replace(scheme=scheme, netloc=netloc, path=path, query="").geturl()
        one = RedisAddress(server, f"{{{prefix}}}", "", replicas, hosts, kind, place if services else "")
        if shards > 1:
            here = ", ".join(str(one) for one in range(shard % len(places), shards, len(places)))
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


#: A server that hangs up TRIES times in a row is not Redis; one that is just shutting down does not do so.
TRIES, PAUSE_S, LOOK_S = 3, 0.2, 3.0

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


Call = tuple[str, bytes]  # a verb of the script, and its arguments

#: The most calls in one run of the script, and the most bytes of their arguments: other clients wait for its end.
RUN_CALLS, RUN_BYTES = 32, 2**20

REPLICATED_MS = 1000  # the longest time, in milliseconds, for replicas to have what was changed


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


async def answers(redis: Redis, tag: str, calls: Sequence[Call], replicas: int = 0) -> list[Any]:
    """The answer to each of these calls, or its error, in one round trip. Raises what the connection does.

    Raises RedisError too if fewer than `replicas` have what was changed.
    """
    shared = runs(calls)
    async with redis.pipeline(transaction=False) as pipeline:
        for run in shared:
            words: list[str | bytes] = [word for call in run for word in call]
            pipeline.evalsha(SCRIPT_ID, 1, tag, *words)
        if replicas:
            pipeline.execute_command("WAIT", replicas, REPLICATED_MS)
        replies = await pipeline.execute(raise_on_error=False)
    if replicas and (reached := replies.pop()) not in range(replicas, 1000):
        raise RedisError(f"replicas that have what it was told: {reached}, wanted: {replicas}")
    found: list[Any] = []
    for run, reply in zip(shared, replies, strict=True):
        if isinstance(reply, NoScriptError):
            await redis.script_load(SCRIPT)
            found += await answers(redis, tag, run, replicas)
        else:
            found += [reply] * len(run) if isinstance(reply, Exception) else reply
    if any(isinstance(one, ReadOnlyError | MovedError) for one in found):  # a primary no more: ask again who is
        await redis.connection_pool.disconnect()
    return found


class PipelinedCalls:
    """Calls that wait to be sent, by `execute`: those that come while others are under way go together."""

    def __init__(self, execute: Callable[[Sequence[Call]], Awaitable[list[Any]]], background: NamedTasks) -> None:
        self._execute, self._background = execute, background
        self._unsent: list[tuple[Call, asyncio.Future[Any]]] = []

    async def answer(self, verb: str, args: bytes) -> Any:
        """The answer to one call. Raises what its verb does, and the connection."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsent.append(((verb, args), answer))
        self._background.run("send", self._send)
        return await answer

    async def _send(self) -> None:
        """Send all calls that wait, MAX_BATCH in a round trip, until there are none."""
        while self._unsent:
            batch, self._unsent = self._unsent[:MAX_BATCH], self._unsent[MAX_BATCH:]
            try:
                replies = await self._execute([call for call, _ in batch])
            except Exception as error:  # the callers must get any error
                replies = [error] * len(batch)
            for (_, answer), reply in zip(batch, replies, strict=True):
                if answer.done():
                    continue
                if isinstance(reply, Exception):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
            await asyncio.sleep(0)  # what those who were answered ask next goes together


SWEEP_S = 5.0  # seconds without a message after which all waiters look at the queue anyway


class Subscription:
    """One subscription for all callers in this process that wait for tasks or follow requests."""

    def __init__(self, redis: Redis, tag: str, waiting: RemoteWaiters) -> None:
        self._redis, self._waiting = redis, waiting
        self._channel = f"{tag}:news"
        self._supervisor = Supervisor()
        self._followers: dict[str, list[asyncio.Future[None]]] = {}
        self._closed = False

    def news_of(self, request: str) -> asyncio.Future[None]:
        """A future that is done when the request has changed, or may have."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._followers.setdefault(request, []).append(news)
        return news

    def notify(self, *requests: str) -> None:
        """Complete the futures of these requests."""
        for news in [news for request in requests for news in self._followers.pop(request, ())]:
            if not news.done():
                news.set_result(None)

    async def listen(self) -> None:
        """Receive messages until `close`, on one connection after the other."""
        while not self._closed:
            with self._supervisor.besides("hearing what changed"), suppress(RedisError, OSError):
                await self._hear_changes()
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """Wake everyone who waits."""
        self._closed = True
        self._waiting.close()
        self.notify(*self._followers)

    async def _hear_changes(self) -> None:
        """Receive messages; after connecting, and after SWEEP_S without a message, wake everyone.

        Then the server is asked for a sign of life: one that gives none may not be who the others talk to any more.
        """
        async with self._redis.pubsub() as channel:
            await channel.subscribe(self._channel)
            is_asked = False
            while not self._closed:
                message = await channel.get_message(timeout=SWEEP_S)
                self._hear(message)
                if message is None and is_asked:
                    return
                if is_asked := message is None:
                    await channel.ping()

    def _hear(self, message: dict[str, Any] | None) -> None:
        if message is None or message["type"] != "message":
            self._waiting.serve()
            self.notify(*self._followers)
            return
        for what in message["data"].decode(errors="replace").split("\0"):
            kind, _, name = what.partition(":")
            if kind == "request":
                self.notify(name)
            elif self._waiting.waits_for(name):
                self._waiting.serve()
