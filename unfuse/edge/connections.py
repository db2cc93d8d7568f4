"""The HTTP server, with limits on connections, slow clients, heads and concurrent calls."""

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
from unfuse.edge.access import PROBE_PATHS, AccessPolicy, ApiError, address_of, envelope

#: The most bytes of a request's head: its first line and headers.
MAX_HEAD = 32 * 1024

#: The most headers of a request.
MAX_HEADERS = 100

#: The most bytes of a request's target: its path and query.
MAX_TARGET = 8 * 1024

#: A body may have FINE_CHUNKS chunks of any size. Further ones need CHUNK bytes on average, since each costs time.
FINE_CHUNKS, CHUNK = 1024, 64

#: The most calls that start or end in one iteration of the event loop. Each takes about a millisecond.
CALLS_AT_ONCE = 4

#: The most connections that are accepted in one iteration of the event loop, so that other events are not delayed.
ACCEPTED_AT_ONCE = 32

#: Open files that are reserved for everything else than connections.
OTHER_FILES = 256

log = structlog.get_logger(__name__)


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Limits on the number of connections and on the speed of clients."""

    #: The most connections in all.
    connections: int
    #: The most connections from one address; for IPv6, from one /64 network.
    per_address: int
    #: Seconds that a client has to send the head of a request, also before the first one and between two.
    head_s: float = 20.0
    #: Seconds between two checks of a client's rate.
    stall_s: float = 30.0
    #: The least bytes a second at which a client must send a body, or read a response.
    rate: int = 8 * 1024


class Connections(ServerState):
    """The open connections of one server, counted by address.

    Connections of trusted proxies count only in the total. The constructor raises the process's limit of open files.
    """

    def __init__(self, bounds: ConnectionLimits, access: AccessPolicy) -> None:
        super().__init__()
        self.bounds = bounds
        self._access = access
        self._max_connections = min(
            bounds.connections, _raise_file_limit(bounds.connections + OTHER_FILES) - OTHER_FILES
        )
        self._counts: Counter[str] = Counter()  # connections by address or network
        self._throttle = LogThrottle()

    def add(self, peer: str) -> ApiError | None:
        """Count a new connection. Returns a refusal if there are too many.

        A refused connection counts too, until `remove`.
        """
        source = self._counted_source(peer)
        self._counts[source] += 1
        if len(self.connections) > self._max_connections:
            refusal = ApiError(
                503, "too_many_connections", f"{self._max_connections} connections are open, which is the maximum"
            )
        elif source and self._counts[source] > self.bounds.per_address:
            message = (
                f"{self.bounds.per_address} connections are open from {source}, which is the maximum for one address"
            )
            refusal = ApiError(429, "too_many_connections", message)
        else:
            return None
        self.warn("too many connections", reason=str(refusal))
        return refusal

    def remove(self, peer: str) -> None:
        """Count that a connection of this peer has ended."""
        source = self._counted_source(peer)
        self._counts[source] -= 1
        if not self._counts[source]:
            del self._counts[source]

    def close_slow(self) -> None:
        """Close connections whose clients are too slow."""
        now = time.monotonic()
        for connection in [*self.connections]:
            cast(Protocol, connection).close_if_slow(now)

    def warn(self, event: str, **fields: object) -> None:
        """Log a problem with connections, each cause at most once a second."""
        if times := self._throttle.count_if_due(event):
            log.warning(event, times=times, **fields)

    def _counted_source(self, peer: str) -> str:
        """Return the address or /64 network that a connection counts for; "" for trusted proxies."""
        if self._access.trusts(peer):
            return ""
        address = address_of(peer)
        return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else str(address)


class _Http(h11.Connection):
    """An HTTP/1.1 parser with limits on heads and on the number of a body's chunks.

    It counts heads and bytes.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD)
        self.heads = 0  # heads received on this connection
        self.received = 0  # bytes of bodies received on this connection
        self.sent = 0  # bytes sent on this connection
        self.refusal = ApiError(400, "bad_request", "the request is not valid HTTP/1.1")
        self._chunks = 0  # chunks of the current body
        self._body_bytes = 0  # bytes of the current body

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError; then `refusal` has the reason."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.heads += 1
            self._chunks = 0
            self._body_bytes = 0
            self._check(event)
        elif isinstance(event, h11.Data):
            self.received += len(event.data)
            self._body_bytes += len(event.data)
            self._chunks += event.chunk_start
            if self._chunks > FINE_CHUNKS + self._body_bytes // CHUNK:
                self._refuse(400, "chunks_too_small", f"send the body in chunks of more than {CHUNK} bytes")
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """Return the bytes of an event to send, and count them."""
        data = super().send_with_data_passthrough(event)
        self.sent += sum(map(len, data or ()))
        return data

    def _check(self, head: h11.Request) -> None:
        """Refuse a head that is too large or has ambiguous framing (request smuggling)."""
        names = {name for name, _ in head.headers}
        if head.http_version not in (b"1.0", b"1.1"):
            self._refuse(505, "http_version", "this server supports HTTP/1.1")
        if len(head.target) > MAX_TARGET:
            self._refuse(414, "target_too_long", f"the request target is longer than {MAX_TARGET} bytes")
        if len(head.headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in head.headers) > MAX_HEAD:
            self._refuse(
                431,
                "headers_too_large",
                f"the request has more than {MAX_HEADERS} headers, or headers of more than {MAX_HEAD} bytes",
            )

        if b"transfer-encoding" in names and (b"content-length" in names or head.http_version != b"1.1"):
            self._refuse(400, "bad_framing", "send a Content-Length, or in HTTP/1.1 a Transfer-Encoding: not both")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Set `refusal` and raise RemoteProtocolError, as h11 does for a malformed request."""
        self.refusal = ApiError(status, code, message)
        raise h11.RemoteProtocolError(message, status)


#: What a client has to do by each duty of `Protocol.close_if_slow`, for errors.
_ACTIONS = {"ask": "send a request", "send": "send the body", "read": "read the response"}


class Protocol(H11Protocol):
    """One connection of uvicorn, with limits on its client."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn: _Http = _Http()
        self._connections = cast(Connections, server_state)

        # The state at the start of the window, see `close_if_slow`.
        self._duty = ""
        self._window_start = 0.0
        self._progress = 0
        self._required = 0

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, or refuse it if there are too many.

        With TCP_NODELAY a response is sent as it is written. Else, with some event loops, its body would wait 40 ms for
        the acknowledgement of its head.
        """
        transport.get_extra_info("socket").setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        super().connection_made(transport)
        if refusal := self._connections.add(self._peer):
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count that the connection has ended."""
        super().connection_lost(exc)
        self._connections.remove(self._peer)

    def send_400_response(self, msg: str) -> None:
        """Respond with the reason why the request is malformed, and close the connection."""
        self._refuse(self.conn.refusal)

    def close_if_slow(self, now: float) -> None:
        """Close the connection if its client sends or reads too slowly.

        Within a window of time, a client has the duty to "ask" (send a head), "send" (a body) or "read" (the response).
        Its progress is a number of heads or bytes. A change of the duty starts a new window.

        now: the time in monotonic seconds.
        """
        bounds = self._connections.bounds
        unsent = self.transport.get_write_buffer_size()
        duty, progress = "", 0
        required, window = int(bounds.rate * bounds.stall_s), bounds.stall_s
        if unsent:
            duty, progress = "read", self.conn.sent - unsent
            required = min(required, unsent)
        elif self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and (not self.cycle or self.cycle.response_complete):
            duty, progress = "ask", self.conn.heads
            required, window = 1, bounds.head_s
        elif self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused:
            duty, progress = "send", self.conn.received

        if duty == self._duty and now - self._window_start < window:
            return
        if duty and duty == self._duty and progress - self._progress < self._required:
            self._connections.warn("client too slow", client=self._peer, to=duty)
            # An idle connection, without the beginning of a request, is closed without a response.
            if duty != "ask" or self.conn.trailing_data[0]:
                self._refuse(ApiError(408, "timeout", f"the client took too long to {_ACTIONS[duty]}"))
            self.transport.close()
            if unsent:
                self.transport.abort()  # `close` waits until the client has read everything
        self._duty = duty
        self._window_start = now
        self._progress = progress
        self._required = required

    @property
    def _peer(self) -> str:
        """The address of the client; "" if unknown."""
        return self.client[0] if self.client else ""

    def _refuse(self, refusal: ApiError) -> None:
        """Respond with a refusal, unless the application has started its response, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(envelope(refusal))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            head = h11.Response(status_code=refusal.status, headers=headers)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

        if self.cycle:  # a call in progress sees that its client has disconnected
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class Throttle:
    """Middleware that lets few calls start or end in each iteration of the event loop.

    Calls that end are those that receive the disconnect of their client. Probes never wait.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, after waiting for its turn."""
        if scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return

        async def receive_in_turn() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                await self._wait_for_turn()
            return message

        await self._wait_for_turn()
        await self._app(scope, receive_in_turn, send)

    async def _wait_for_turn(self) -> None:
        """Wait until this call may proceed, in the order of the calls."""
        loop = asyncio.get_running_loop()
        self._waiting.append(turn := loop.create_future())
        if len(self._waiting) == 1:
            loop.call_soon(self._grant_turns)
        await turn

    def _grant_turns(self) -> None:
        """Let the next CALLS_AT_ONCE calls proceed.

        Others wait for the next iteration of the event loop.
        """
        for turn in [self._waiting.popleft() for _ in range(min(CALLS_AT_ONCE, len(self._waiting)))]:
            if not turn.done():
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._grant_turns)


class HttpServer(Server):
    """uvicorn with limits on its connections.

    It handles no signals: that is left to the caller.
    """

    def __init__(self, app: ASGIApp, bounds: ConnectionLimits, access: AccessPolicy) -> None:
        config = Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._connections = Connections(bounds, access)
        self.server_state = self._connections
        logging.getLogger("uvicorn.error").addFilter(_is_an_error)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers of the process unchanged."""
        yield

    async def serve(self, sockets: list[socket] | None = None) -> None:
        """Serve on these listening sockets until `should_exit` is set.

        Each is duplicated, because libuv accepts only one connection per socket in an iteration of the event loop.
        """
        listeners = sockets or []
        duplicates = [listener.dup() for listener in listeners for _ in range(ACCEPTED_AT_ONCE - 1)]
        await super().serve([*listeners, *duplicates])

    async def on_tick(self, counter: int) -> bool:
        """Close slow connections once a second. uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            self._connections.close_slow()
        return await super().on_tick(counter)


def _is_an_error(record: logging.LogRecord) -> bool:
    """Return whether a log record of uvicorn is an error.

    Calls that are cancelled by a shutdown, and responses that are aborted on purpose, are not.
    """
    is_expected = str(record.msg).startswith(("Cancel %s running task(s)", "ASGI callable returned without completing"))
    return not is_expected and not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _raise_file_limit(wanted: int) -> int:
    """Raise the process's limit of open files to `wanted`, as far as allowed.

    Returns the new limit, which is never lower than before.
    """
    soft, hard = (
        wanted if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < min(wanted, hard):
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
