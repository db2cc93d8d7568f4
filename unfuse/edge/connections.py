"""Bounds of HTTP connections and calls: their number, how long a client may be silent, how large a head may be."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_network
from socket import IPPROTO_TCP, TCP_NODELAY, socket
from typing import Any, cast

import h11
import msgspec
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from unfuse.core.supervisor import LogThrottle
from unfuse.edge.access import EXEMPT, AccessPolicy, Refusal, address_of, envelope

MAX_HEAD = 32 * 1024
MAX_HEADERS = 100
MAX_TARGET = 8 * 1024

#: How many chunks a body may have in any case, and the least average bytes of further ones: each chunk costs time.
FINE_CHUNKS, CHUNK = 1024, 64

#: How many calls begin or end in one turn of the event loop; each takes about a millisecond.
CALLS_AT_ONCE = 4

ACCEPTED_AT_ONCE = 32  # the most connections accepted in one turn of the event loop, so that others have their turn
OTHER_FILES = 256  # open files that are reserved for everything else than connections

log = structlog.get_logger(__name__)


class ConnectionLimits(msgspec.Struct, frozen=True):
    """The most connections in all and from one address (for IPv6, from one /64 network).

    A client has `head_s` seconds to ask. While it sends a body, or has not taken what was sent to it, `rate` bytes a
    second have to pass, looked at every `stall_s` seconds.
    """

    connections: int
    per_address: int
    head_s: float = 20.0
    stall_s: float = 30.0
    rate: int = 8 * 1024


class Connections(ServerState):
    """All connections of one server, counted by address; those of trusted proxies count only in the total."""

    def __init__(self, bounds: ConnectionLimits, access: AccessPolicy) -> None:
        super().__init__()
        self.bounds, self._access = bounds, access
        self._most = min(bounds.connections, _files(bounds.connections + OTHER_FILES) - OTHER_FILES)
        self._from: Counter[str] = Counter()
        self._throttle = LogThrottle()

    def enter(self, peer: str) -> Refusal | None:
        """Count a new connection. Returns a refusal if there are too many."""
        whose = self._whose(peer)
        self._from[whose] += 1
        if len(self.connections) > self._most:
            refusal = Refusal(503, "too_many_connections", f"{self._most} connections are open, as many as may be")
        elif whose and self._from[whose] > self.bounds.per_address:
            most = f"{self.bounds.per_address} connections are open from {whose}, as many as may be from one address"
            refusal = Refusal(429, "too_many_connections", most)
        else:
            return None
        self.warn("too many connections", reason=str(refusal))
        return refusal

    def leave(self, peer: str) -> None:
        """A connection that was counted has ended."""
        whose = self._whose(peer)
        self._from[whose] -= 1
        if not self._from[whose]:
            del self._from[whose]

    def sweep(self) -> None:
        """End connections whose clients are too slow."""
        now = time.monotonic()
        for connection in [*self.connections]:
            cast(Protocol, connection).look(now)

    def warn(self, what: str, **about: object) -> None:
        """Log a problem with connections, each cause at most once a second."""
        if times := self._throttle.count_if_due(what):
            log.warning(what, times=times, **about)

    def _whose(self, peer: str) -> str:
        """The address or network that a connection counts for; "" for those without a bound of their own."""
        if self._access.trusts(peer):
            return ""
        address = address_of(peer)
        return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else str(address)


class _Http(h11.Connection):
    """HTTP/1.1 with bounds on heads and on the number of a body's chunks. It counts heads and bytes."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD)
        self.heads = self.received = self.sent = self._chunks = self._whole = 0
        self.refusal = Refusal(400, "bad_request", "this cannot be read as HTTP/1.1")

    def next_event(self) -> Any:
        """The next event. Raises RemoteProtocolError; then `refusal` has the reason."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.heads += 1
            self._chunks = self._whole = 0
            self._check(event)
        elif isinstance(event, h11.Data):
            self.received += len(event.data)
            self._whole += len(event.data)
            self._chunks += event.chunk_start
            if self._chunks > FINE_CHUNKS + self._whole // CHUNK:
                self._refuse(400, "chunks_too_small", f"send the body in chunks of more than {CHUNK} bytes")
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """The bytes of an event to send."""
        data = super().send_with_data_passthrough(event)
        self.sent += sum(map(len, data or ()))
        return data

    def _check(self, head: h11.Request) -> None:
        names = {name for name, _ in head.headers}
        if head.http_version not in (b"1.0", b"1.1"):
            self._refuse(505, "http_version", "this server speaks HTTP/1.1")
        if len(head.target) > MAX_TARGET:
            self._refuse(414, "target_too_long", f"the address is longer than {MAX_TARGET} bytes")
        if len(head.headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in head.headers) > MAX_HEAD:
            self._refuse(
                431, "headers_too_large", f"there are more than {MAX_HEADERS} headers of {MAX_HEAD} bytes in all"
            )
        if b"transfer-encoding" in names and (b"content-length" in names or head.http_version != b"1.1"):
            self._refuse(
                400, "bad_framing", "a body has a Content-Length, or in HTTP/1.1 a Transfer-Encoding: not both"
            )

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.refusal = Refusal(status, code, message)
        raise h11.RemoteProtocolError(message, status)


class Protocol(H11Protocol):
    """uvicorn's connection, with bounds."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn: _Http = _Http()
        self._all = cast(Connections, server_state)
        self._owes, self._since, self._passed, self._needed = "", 0.0, 0, 0

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, if there is room for it.

        Replies are sent as they are written, whatever the loop: a body would wait 40 ms for its head's acknowledgement.
        """
        transport.get_extra_info("socket").setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        super().connection_made(transport)
        if refusal := self._all.enter(self._peer):
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        super().connection_lost(exc)
        self._all.leave(self._peer)

    def send_400_response(self, msg: str) -> None:
        """Answer what is wrong with the request, and close."""
        self._refuse(self.conn.refusal)

    def look(self, now: float) -> None:
        """End the connection if its client is too slow to send a request or to read the response."""
        bounds, unsent = self._all.bounds, self.transport.get_write_buffer_size()
        owes, passed, needed, window = "", 0, int(bounds.rate * bounds.stall_s), bounds.stall_s
        if unsent:
            owes, passed, needed = "read", self.conn.sent - unsent, min(needed, unsent)
        elif self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and (not self.cycle or self.cycle.response_complete):
            owes, passed, needed, window = "ask", self.conn.heads, 1, bounds.head_s
        elif self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused:
            owes, passed = "send", self.conn.received
        if owes == self._owes and now - self._since < window:
            return
        if owes and owes == self._owes and passed - self._passed < self._needed:
            self._all.warn("client too slow", client=self._peer, to=owes)
            if owes != "ask" or self.conn.trailing_data[0]:
                self._refuse(Refusal(408, "timeout", f"the client took too long to {owes}"))
            self.transport.close()
            if unsent:
                self.transport.abort()
        self._owes, self._since, self._passed, self._needed = owes, now, passed, needed

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else ""

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal, unless the application has begun to answer, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(envelope(refusal))
            kind, size = ("content-type", "application/json"), ("content-length", str(len(body)))
            head = h11.Response(status_code=refusal.status, headers=[kind, size, ("connection", "close")])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class Throttle:
    """Lets a few calls in each turn of the event loop begin, or notice that their client is gone. Probes never wait."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, after waiting for its turn."""
        if scope["path"] in EXEMPT:
            await self._app(scope, receive, send)
            return

        async def heard() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                await self._turn()
            return message

        await self._turn()
        await self._app(scope, heard, send)

    async def _turn(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        self._waiting.append(turn := loop.create_future())
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        for turn in [self._waiting.popleft() for _ in range(min(CALLS_AT_ONCE, len(self._waiting)))]:
            if not turn.done():
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class HttpServer(Server):
    """uvicorn with bounds on its connections, and without its signal handlers, which are its caller's business."""

    def __init__(self, app: ASGIApp, bounds: ConnectionLimits, access: AccessPolicy) -> None:
        super().__init__(
            Config(
                app, http=Protocol, ws="none", lifespan="off", log_level="error", access_log=False,
                proxy_headers=False, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self.server_state = self._connections = Connections(bounds, access)
        logging.getLogger("uvicorn.error").addFilter(_is_an_error)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def serve(self, sockets: list[socket] | None = None) -> None:
        """Serve at these sockets; libuv takes one connection of each in a turn of the loop, so there are several."""
        given = sockets or []
        await super().serve([*given, *(one.dup() for one in given for _ in range(ACCEPTED_AT_ONCE - 1))])

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: end slow connections."""
        if counter % 10 == 0:
            self._connections.sweep()
        return await super().on_tick(counter)


def _is_an_error(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn is an error. Calls cut short by the end, or broken off on purpose, are none."""
    ends = str(record.msg).startswith(("Cancel %s running task(s)", "ASGI callable returned without completing"))
    return not ends and not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _files(wanted: int) -> int:
    """How many files this process may open, now that it has asked for that many."""
    most, ever = (
        wanted if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if most < min(wanted, ever):
        most = min(wanted, ever)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, ever))
    return most
