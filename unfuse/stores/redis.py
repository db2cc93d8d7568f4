"""The Redis blob store, for Redis (6.2 or later) or Valkey."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import parse_qsl, urlsplit

from typing_extensions import override

from unfuse.core.errors import ConfigError, NotFound, TransientError
from unfuse.stores.blobs import PART_BYTES, BlobStore, Data, StoredBlob

try:
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
    from redis.retry import Retry
except ImportError as error:
    raise ConfigError("storage in Redis requires the package redis: pip install 'unfuse[redis]'") from error

ADDRESS = "redis://[user:password@]host[:port][/database][?prefix=name][&ttl=seconds]"

#: Seconds without an answer after which a server counts as gone.
SILENT_S = 30


class RedisBlobs(BlobStore):
    """Blobs in Redis: a hash of parts for each, and a hash as index.

    All blobs expire after `ttl` seconds (a day by default). How durable they are until then depends on the server's
    settings.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            options = {"prefix": "unfuse-kept", "ttl": "86400", **dict(parse_qsl(parts.query, keep_blank_values=True))}
            self._prefix, self._ttl = f"{{{options.pop('prefix')}}}", int(options.pop("ttl"))
            if options or self._ttl < 1 or parts.port == 0 or not re.fullmatch(r"/?\d*", parts.path):
                raise ValueError
        except ValueError:
            raise ConfigError(f"the Redis URL is not valid: use {ADDRESS}") from None
        self._index_key, self._server = f"{self._prefix}:kept", f"Redis at {parts.hostname}"
        self._redis = Redis.from_url(
            parts._replace(query="").geturl(),
            retry=Retry(NoBackoff(), 1),
            socket_timeout=SILENT_S,
            socket_connect_timeout=5,
        )

    @override
    def write(self, folder: str, name: str, data: Data, *, durable: bool = True) -> None:
        path, data_view = f"{folder}/{name}", memoryview(data)  # type: ignore[arg-type]  # an array is a buffer
        draft_key = f"{self._prefix}:{path}:{secrets.token_hex(8)}"
        with self._translated_errors(f"cannot store {path} ({len(data)} bytes)"):
            try:
                # An empty blob has one empty part, since Redis has no empty hashes.
                for start in range(0, len(data) or 1, PART_BYTES):
                    self._redis.hset(draft_key, str(start), data_view[start : start + PART_BYTES])
                    self._redis.expire(draft_key, self._ttl)
                with self._redis.pipeline() as transaction:
                    transaction.rename(draft_key, f"{self._prefix}:{path}")
                    transaction.hset(self._index_key, path, f"{len(data)} {time.time()}")
                    transaction.execute()
            except RedisError:
                with suppress(RedisError):
                    self._redis.unlink(draft_key)
                raise

    @override
    def read(self, folder: str, name: str) -> tuple[int, Iterator[bytes]]:
        path = f"{folder}/{name}"
        with self._translated_errors(f"cannot look up {path}"):
            entry = self._redis.hget(self._index_key, path)
        if not isinstance(entry, bytes):
            raise NotFound(f"{path} is not in {self._server}")
        nbytes = int(entry.split()[0])
        return nbytes, self._read_parts(path, nbytes)

    @override
    def remove(self, folder: str, name: str) -> None:
        with self._translated_errors(f"cannot delete {folder}/{name}"), self._redis.pipeline() as transaction:
            transaction.unlink(f"{self._prefix}:{folder}/{name}")
            transaction.hdel(self._index_key, f"{folder}/{name}")
            transaction.execute()

    @override
    def drop(self, folder: str) -> None:
        for entry in list(self.entries(folder)):
            self.remove(entry.folder, entry.name)

    @override
    def entries(self, under: str = "") -> Iterator[StoredBlob]:
        with self._translated_errors("cannot list its contents"):
            for path, value in self._redis.hscan_iter(self._index_key, f"{under}/*" if under else None, 1000):
                (folder, _, name), (nbytes, modified) = path.decode().rpartition("/"), map(float, value.split())
                # Redis expires the parts of a blob, but not its entry in the index.
                if modified + self._ttl < time.time():
                    self._redis.hdel(self._index_key, path)
                else:
                    yield StoredBlob(folder, name, int(nbytes), modified)

    @override
    def close(self) -> None:
        self._redis.close()

    def _read_parts(self, path: str, nbytes: int) -> Iterator[bytes]:
        """Yield the parts of a blob. Raises NotFound if one has expired."""
        for start in range(0, nbytes, PART_BYTES):
            with self._translated_errors(f"cannot read {path}"):
                part = self._redis.hget(f"{self._prefix}:{path}", str(start))
            if not isinstance(part, bytes):
                raise NotFound(f"a part of {path} is no longer in {self._server}")
            yield part

    @contextmanager
    def _translated_errors(self, action: str) -> Iterator[None]:
        """Turn the library's errors into TransientError."""
        try:
            yield
        except (RedisError, OSError) as error:
            raise TransientError(f"{self._server} {action}: {error}") from error
