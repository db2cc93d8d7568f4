"""Redis connections of a queue: addresses, permanent errors, pipelined script calls and pub/sub."""

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

#: Timeout for replies of a server at a fixed address, in seconds.
REPLY_TIMEOUT_S = 15.0
#: Timeout for replies of a server behind Sentinels or in a cluster, where another may have replaced it, in seconds.
FAILOVER_TIMEOUT_S = 5.0
#: Timeout for replies of Sentinels and cluster servers about who the primary is, in seconds.
DISCOVERY_TIMEOUT_S = 2.0

#: The form of addresses, for error messages.
ADDRESS = (
    "redis://[user:password@]host[:port][/database][?prefix=name][&replicas=number], with [&shards=number] at one host "
    "or at several, separated by commas; redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[,service…]"
    "[/database][?…]; redis+cluster://[user:password@]host[:port][,host[:port]…][?…]; rediss instead of redis for TLS"
)
#: Most shards of a queue.
MAX_SHARDS = 64


class ClusterSlots:
    """A lookup of the server of a hash tag in a Redis Cluster.

    It has those members of redis-py's `Sentinel` that a pool of connections to a primary uses.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]], **options: Any) -> None:
        self.sentinels = [Redis(host=host, port=port, **options) for host, port in hosts]

    async def discover_master(self, tag: str) -> tuple[str, int]:
        """Return the host and port of the server that has a tag's slot.

        Raises ConnectionError if no server names one.
        """
        slot = key_slot(tag.encode())
        for client in self.sentinels:
            with suppress(RedisError, OSError):
                ranges = await client.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
                for first_slot, last_slot, (host, port, *_), *_ in ranges:
                    if first_slot <= slot <= last_slot:
                        return host.decode(), port
        raise ConnectionError(f"no server of the cluster returned the owner of {tag}")


class RedisAddress(msgspec.Struct, frozen=True):
    """The address of a Redis queue, or of one of its shards."""

    #: URL of the server. Of a service or a cluster: that of the first host, with the user of all hosts.
    server: str
    #: The hash tag that all keys share.
    tag: str
    #: Name of the part of the queue, as in "shard 0 of 4". "": the queue has no shards.
    part: str
    #: Number of replicas that must have a change before it is acknowledged.
    replicas: int
    #: Host and port of the servers, of the cluster's servers, or of the Sentinels.
    hosts: tuple[tuple[str, int], ...]
    #: "sentinel", "cluster", or "" for plain servers.
    kind: str
    #: Name of the service that Sentinels monitor.
    service: str
    #: The address, at this shard's server, of a queue without shards. None: this queue has no shards.
    unsharded: RedisAddress | None = None

    @property
    def display_name(self) -> str:
        """The address without user and password."""
        name = self.service or self.part
        server = self.server.rpartition("@")[2]
        return f"{server} ({name})" if name else server

    def connect(self) -> Redis:
        """Return a client of the server at this address.

        With Sentinels or a cluster, each new connection goes to the present primary.
        """
        # No retries by the library: a call that failed may have had its effect, so only its caller can repeat it.
        options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_timeout": REPLY_TIMEOUT_S}
        if not self.kind:
            return Redis.from_url(self.server, **options)

        options |= parse_url(self.server) | {"socket_timeout": FAILOVER_TIMEOUT_S}
        uses_tls = options.pop("connection_class", None) is not None
        del options["host"], options["port"]
        discovery = {"ssl": uses_tls, "socket_timeout": DISCOVERY_TIMEOUT_S, "retry": options["retry"]}
        if self.kind == "cluster":
            slots = ClusterSlots(self.hosts, **options | discovery)
            pool = SentinelConnectionPool(self.tag, slots, ssl=uses_tls, **options)  # type: ignore[no-untyped-call]
            return Redis.from_pool(pool)
        sentinel = Sentinel(self.hosts, sentinel_kwargs=discovery, ssl=uses_tls, **options)  # type: ignore[no-untyped-call]
        return cast(Redis, sentinel.master_for(self.service))


def parse_address(url: str) -> list[RedisAddress]:
    """Return the address of each shard of a queue.

    A queue without shards has one address. Shards are assigned to the servers or services of the URL round-robin.
    Raises ConfigError for a malformed URL.
    """
    try:
        parts = urlsplit(url if "//" in url else f"{url.partition(':')[0]}://127.0.0.1")
        options = {
            "prefix": "unfuse",
            "replicas": "0",
            "shards": "1",
            **dict(parse_qsl(parts.query, keep_blank_values=True)),
        }
        prefix = options.pop("prefix")
        replicas = int(options.pop("replicas"))
        shards = int(options.pop("shards"))
        user, at_sign, host_list = parts.netloc.rpartition("@")
        scheme, _, kind = parts.scheme.partition("+")
        hosts = tuple(_host(text, 26379 if kind == "sentinel" else 6379) for text in host_list.split(","))
        pattern = r"/([\w.-]+(?:,[\w.-]+)*)(/\d*)?" if kind == "sentinel" else r"()(/?\d*)"
        services, database = re.fullmatch(pattern, parts.path).groups("")  # type: ignore[union-attr]
        # What the shards are assigned to: services of Sentinels, one cluster (""), or servers.
        targets = services.split(",") if services else [""] if kind else host_list.split(",")
        if options or replicas < 0 or not re.fullmatch(r"[\w.-]{1,64}", prefix):
            raise ValueError
        if not len(targets) <= shards <= MAX_SHARDS or len({*targets}) < len(targets):
            raise ValueError
    except (ValueError, AttributeError):
        raise ConfigError(f"the address of a Redis queue must be {ADDRESS}") from None

    host, port = hosts[0]
    first_host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    addresses = []
    for shard in range(shards):
        target = targets[shard % len(targets)]
        netloc = f"{user}{at_sign}{first_host if kind else target}"
        server = parts._replace(scheme=scheme, netloc=netloc, path=database, query="").geturl()
        address = RedisAddress(server, f"{{{prefix}}}", "", replicas, hosts, kind, target if services else "")
        if shards > 1:
            numbers = ", ".join(str(number) for number in range(shard % len(targets), shards, len(targets)))
            unsharded = msgspec.structs.replace(address, part=f"shards {numbers} of {shards}")
            part = f"shard {shard} of {shards}"
            address = msgspec.structs.replace(address, tag=f"{{{prefix}:{shard}}}", part=part, unsharded=unsharded)
        addresses.append(address)
    return addresses


async def close(redis: Redis) -> None:
    """Close all connections of a client, those to Sentinels included."""
    await redis.aclose()
    if isinstance(redis.connection_pool, SentinelConnectionPool):
        for sentinel in redis.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _host(text: str, port: int) -> tuple[str, int]:
    """Parse `host[:port]`. `port` is the default. Raises ValueError."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0:
        raise ValueError(text)
    return parts.hostname, parts.port or port


#: A server that closes this many connections in a row is not Redis. A Redis server that shuts down does not.
TRIES = 3
#: Seconds between two tries.
PAUSE_S = 0.2
#: Timeout of a try, in seconds.
LOOK_S = 3.0

NOT_REDIS = "the server closes each connection: it is not Redis, or it requires TLS (rediss://)"


async def permanent_failure(url: str, probe: Callable[[], Awaitable[object]]) -> str:
    """Return why calls to a server can never succeed, or "" if they may.

    `probe`: makes one call. It is repeated up to TRIES times while the server closes the connection.
    """
    for _ in range(TRIES):
        try:
            async with asyncio.timeout(LOOK_S):
                await probe()
            return ""
        except TimeoutError:
            # A server without TLS may leave a TLS handshake unanswered.
            is_plain = url.startswith("rediss") and await _answers_plainly(url)
            return "Redis does not use TLS there: use redis://, or configure TLS in Redis" if is_plain else ""
        except RedisError as error:
            reason = _permanent_reason(error)
            if reason != NOT_REDIS:
                return reason
        await asyncio.sleep(PAUSE_S)
    return NOT_REDIS


def _permanent_reason(error: RedisError) -> str:
    """Return why this error is permanent, or "" if it may be transient."""
    match error:
        case AuthenticationError():
            return f"authentication failed ({error}): use redis://user:password@host"
        case NoPermissionError():
            return f"the Redis user lacks permissions ({error})"
        case ResponseError() if "DB index" in str(error):
            return f"the database does not exist ({error}): set its number after the last / of the URL"
        case ResponseError() if (message := str(error)).startswith("MISPLACED"):
            return message.partition(" ")[2]
        case ResponseError() if "unknown command" in str(error):
            return f"it is not Redis 6.2 or later ({error})"
        case MovedError():
            server = f"{error.host}:{error.port}"
            return f"a Redis Cluster stores this prefix on {server}: use that server, or redis+cluster://"
        case InvalidResponse():
            return f"the server is not Redis ({error})"
    causes = list(_causes(error))
    if tls_error := next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None):
        reason = tls_error.reason or tls_error
        return f"TLS failed ({reason}): check that the certificate is trusted, or use redis:// without TLS"
    is_reset = any(isinstance(cause, ConnectionResetError | BrokenPipeError) for cause in causes)
    return NOT_REDIS if is_reset or "closed by server" in str(error) else ""


async def _answers_plainly(url: str) -> bool:
    """Return whether the server of this URL answers PING without TLS."""
    parts = urlsplit(url)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(LOOK_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 6379)
            writer.write(b"PING\r\n")
            answer = await reader.read(1)
            writer.close()
            return answer in (b"+", b"-")
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


#: A verb of the script, and its encoded arguments.
Call = tuple[str, bytes]

#: Most calls in one run of the script, which blocks all other clients of the server.
RUN_CALLS = 32
#: Most bytes of the arguments of one run.
RUN_BYTES = 2**20

#: Longest time for replicas to receive a change, in milliseconds.
REPLICATED_MS = 1000


def runs(calls: Sequence[Call]) -> list[list[Call]]:
    """Return these calls, in order, split into runs of the script.

    A run has at most RUN_CALLS calls and RUN_BYTES of arguments. A larger call runs alone.
    """
    batches: list[list[Call]] = []
    nbytes = 0
    for call in calls:
        nbytes += len(call[1])
        if not batches or len(batches[-1]) == RUN_CALLS or nbytes > RUN_BYTES:
            batches.append([])
            nbytes = len(call[1])
        batches[-1].append(call)
    return batches


async def answers(redis: Redis, tag: str, calls: Sequence[Call], replicas: int = 0) -> list[Any]:
    """Return the reply or the error of each call, in order.

    All calls share one round trip. Further ones follow only if the server lacks the script. Raises the connection's
    errors. Raises RedisError too if fewer than `replicas` replicas received the changes within REPLICATED_MS.
    """
    batches = runs(calls)
    async with redis.pipeline(transaction=False) as pipeline:
        for batch in batches:
            arguments: list[str | bytes] = [argument for call in batch for argument in call]
            pipeline.evalsha(SCRIPT_ID, 1, tag, *arguments)
        if replicas:
            pipeline.execute_command("WAIT", replicas, REPLICATED_MS)
        replies = await pipeline.execute(raise_on_error=False)
    # The reply to WAIT may also be an error, which is in no range.
    if replicas and (confirmed := replies.pop()) not in range(replicas, 1000):
        raise RedisError(f"{confirmed} replicas received the changes, but {replicas} are required")

    results: list[Any] = []
    for batch, reply in zip(batches, replies, strict=True):
        if isinstance(reply, NoScriptError):
            await redis.script_load(SCRIPT)
            results += await answers(redis, tag, batch, replicas)
        else:
            results += [reply] * len(batch) if isinstance(reply, Exception) else reply
    if any(isinstance(result, ReadOnlyError | MovedError) for result in results):
        # The server is not the primary any more. New connections look up the present primary.
        await redis.connection_pool.disconnect()
    return results


class PipelinedCalls:
    """Batches calls of the script: calls made during a round trip share the next one."""

    def __init__(self, execute: Callable[[Sequence[Call]], Awaitable[list[Any]]], background: NamedTasks) -> None:
        self._execute = execute
        self._background = background
        self._unsent: list[tuple[Call, asyncio.Future[Any]]] = []

    async def call(self, verb: str, args: bytes) -> Any:
        """Return the reply to one call of the script.

        Raises the errors of its verb and of the connection.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsent.append(((verb, args), answer))
        self._background.run("send", self._send)
        return await answer

    async def _send(self) -> None:
        """Send all unsent calls, MAX_BATCH in a round trip, until none is left."""
        while self._unsent:
            batch, self._unsent = self._unsent[:MAX_BATCH], self._unsent[MAX_BATCH:]
            try:
                replies = await self._execute([call for call, _ in batch])
            except Exception as error:  # every caller must get the error
                replies = [error] * len(batch)
            for (_, answer), reply in zip(batch, replies, strict=True):
                if answer.done():
                    continue
                if isinstance(reply, Exception):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
            await asyncio.sleep(0)  # the next calls of all answered callers then share a round trip


#: Seconds without a message after which all waiters are woken anyway. A lost message delays them no longer.
SWEEP_S = 5.0


class Subscription:
    """A pub/sub subscription for all callers that wait for tasks or follow requests.

    It serves all such callers of one `RedisQueue` in this process.
    """

    def __init__(self, redis: Redis, tag: str, waiting: RemoteWaiters) -> None:
        self._redis = redis
        self._waiting = waiting
        self._channel = f"{tag}:news"
        self._supervisor = Supervisor()
        self._followers: dict[str, list[asyncio.Future[None]]] = {}
        self._closed = False

    def news_of(self, request: str) -> asyncio.Future[None]:
        """Return a future that completes when the request has changed, or may have changed."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._followers.setdefault(request, []).append(changed)
        return changed

    def notify(self, *requests: str) -> None:
        """Complete the futures of these requests."""
        for changed in [changed for request in requests for changed in self._followers.pop(request, ())]:
            if not changed.done():
                changed.set_result(None)

    async def listen(self) -> None:
        """Receive messages until `close`. Reconnects after RETRY_S."""
        while not self._closed:
            with self._supervisor.log_errors("listening for changes"), suppress(RedisError, OSError):
                await self._receive_messages()
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """Stop listening, and wake all waiters and followers."""
        self._closed = True
        self._waiting.close()
        self.notify(*self._followers)

    async def _receive_messages(self) -> None:
        """Receive messages on one connection, and wake the callers that they concern.

        All waiters and followers are woken after connecting and after each silence of SWEEP_S. A silent server is
        pinged. Returns if it does not reply, since another server may be the primary now.
        """
        async with self._redis.pubsub() as channel:
            await channel.subscribe(self._channel)
            is_pinged = False
            while not self._closed:
                message = await channel.get_message(timeout=SWEEP_S)
                self._process_message(message)
                if message is None and is_pinged:
                    return
                if is_pinged := message is None:
                    await channel.ping()

    def _process_message(self, message: dict[str, Any] | None) -> None:
        """Wake the callers of the pools and requests that a message names.

        Without a message, and for one of the server itself, all callers are woken.
        """
        if message is None or message["type"] != "message":
            self._waiting.serve()
            self.notify(*self._followers)
            return
        for change in message["data"].decode(errors="replace").split("\0"):
            kind, _, name = change.partition(":")
            if kind == "request":
                self.notify(name)
            elif self._waiting.waits_for(name):
                self._waiting.serve()
