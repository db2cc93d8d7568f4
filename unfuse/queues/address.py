"""Where a queue in Redis is, and how to get there: one server, or whichever one Sentinels say is the primary."""

from __future__ import annotations

import re
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import msgspec
from redis.asyncio import Redis, Sentinel
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff

from unfuse.core.errors import ConfigError

ANSWER_S, SILENT_S, NAME_S = 15.0, 5.0, 2.0
"""The longest time, in seconds, for an answer of the queue's server, of one that another may have replaced meanwhile,
and of a Sentinel that is asked who that is.
"""

ADDRESS = (
    "redis://[user:password@]host[:port][/database][?prefix=name][&replicas=number] or "
    "redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[/database][?…]; rediss for TLS"
)


class Address(msgspec.Struct, frozen=True):
    """`server` is the server's URL, or of a `service` that of its first Sentinel, with the user of the service.

    What a queue does is acknowledged when `replicas` have it too. All keys have the `prefix`.
    """

    server: str
    prefix: str
    replicas: int
    sentinels: tuple[tuple[str, int], ...]
    service: str

    @property
    def shown(self) -> str:
        """The address without user and password."""
        server = self.server.rpartition("@")[2]
        return f"{server} ({self.service})" if self.service else server

    def connect(self) -> Redis:
        """A client of the server; of a service, each new connection goes to who is its primary then."""
        options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_timeout": ANSWER_S}
        if not self.service:
            return Redis.from_url(self.server, **options)
        options |= parse_url(self.server) | {"socket_timeout": SILENT_S}
        ssl = options.pop("connection_class", None) is not None
        del options["host"], options["port"]
        asked = {"ssl": ssl, "socket_timeout": NAME_S, "retry": options["retry"]}
        sentinel = Sentinel(self.sentinels, sentinel_kwargs=asked, ssl=ssl, **options)  # type: ignore[no-untyped-call]
        return cast(Redis, sentinel.master_for(self.service))


def parse_address(url: str) -> Address:
    """What an address says. Raises ConfigError for a malformed one."""
    try:
        parts = urlsplit(url if "//" in url else f"{url.partition(':')[0]}://127.0.0.1")
        options = {"prefix": "unfuse", "replicas": "0", **dict(parse_qsl(parts.query, keep_blank_values=True))}
        prefix, replicas = options.pop("prefix"), int(options.pop("replicas"))
        user, at, hosts = parts.netloc.rpartition("@")
        kind, is_service, _ = parts.scheme.partition("+")
        sentinels = tuple(_host(one, 26379 if is_service else 6379) for one in hosts.split(","))
        service, path = re.fullmatch(r"/([\w.-]+)(/\d*)?" if is_service else r"()(/?\d*)", parts.path).groups("")  # type: ignore[union-attr]
        if options or replicas < 0 or not re.fullmatch(r"[\w.-]{1,64}", prefix) or len(sentinels) > 1 > len(service):
            raise ValueError
    except (ValueError, AttributeError):
        raise ConfigError(f"a queue in Redis is {ADDRESS}") from None
    host, port = sentinels[0]
    netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    server = parts._replace(scheme=kind, netloc=f"{user}{at}{netloc if service else hosts}", path=path, query="")
    return Address(server.geturl(), prefix, replicas, sentinels, service)


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
