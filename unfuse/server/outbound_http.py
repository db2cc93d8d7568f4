"""Outbound HTTP to addresses that clients send: allowed hosts only, protected against SSRF.

A client must not make the server call addresses that only the server can reach, such as those of an internal network.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from urllib.parse import SplitResult, urlsplit

import httpcore2
from typing_extensions import override

from unfuse.core.errors import InvalidParameter, TransientError, UsageError
from unfuse.edge.access import ANY, address_of, matches

#: The most seconds of one call, including the lookup of the name and the reading of the response.
CALL_S = 10.0

HTTP_OK = 200
STANDARD_PORTS = {"http": 80, "https": 443}

#: The most DNS lookups at one time.
LOOKUPS = 8

#: All public IPv6 addresses. Among those outside are the ones that stand for an IPv4 address: ::/96 (IPv4-compatible),
#: ::ffff:0:0:0/96 (translated) and 64:ff9b:1::/48 (NAT64 of a local network).
UNICAST = ip_network("2000::/3")

#: The addresses outside of UNICAST by which NAT64 reaches the IPv4 address in their last 32 bits.
TRANSLATED = ip_network("64:ff9b::/96")

#: The 32 bits before the IPv4 address in an ISATAP address, which a tunnel leads to that IPv4 address.
ISATAP = (0x00005EFE, 0x02005EFE)

#: Reserved networks that not every supported version of Python's `ipaddress` knows.
RESERVED = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))


class OutboundHttp:
    """An HTTP client that calls allowed hosts only.

    It is false if no host is allowed.

    allowed: names (`.domain` for all names below it, `*` for any), and IP addresses or networks.
    param: the request parameter that has the addresses, for errors.
    flag: the command line option that allows hosts, for errors.
    action: what is done with a host, as a participle ("called"), for errors.
    needs: the text after the flag in an error, for another option that is required too.

    An allowed name may resolve to public addresses and to addresses in `allowed`. Raises UsageError for an entry that
    is neither a name nor a network.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        param: str = "webhook",
        flag: str = "--webhook-hosts",
        action: str = "called",
        needs: str = "",
    ) -> None:
        self._param = param
        self._flag = flag
        self._action = action
        self._needs = needs
        self._names = set[str]()
        self._networks = list[IPv4Network | IPv6Network]()
        for entry in allowed:
            try:
                self._networks.append(ip_network(entry))
            except ValueError:
                self._names.add(entry.lower())
        # Each call opens a connection, so that the address is checked each time.
        self._pool = httpcore2.AsyncConnectionPool(
            ssl.create_default_context() if allowed else None,
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=_CheckedBackend(self.check),
        )

        for name in self._names:
            if not name.isascii() or not name.strip(".") or set(name) & set("/:@ ?#"):
                raise UsageError(f"{flag} {name}: write names like hooks.example or .example, networks, or *")

    def __bool__(self) -> bool:
        return bool(self._names or self._networks)

    def require(self, url: str) -> None:
        """Raise InvalidParameter for a URL that may not be called. Names are not resolved here."""
        if not self:
            raise InvalidParameter(
                f"{self._param}: no host may be {self._action} by this server: start it with {self._flag}{self._needs}",
                self._param,
            )

        host = self._parts(url).hostname or ""
        if (address := address_of(host)) is not None:
            allowed = self._may_be_called(address) and (ANY in self._names or self._is_listed(address))
        else:
            allowed = matches(host, self._names)
        if not allowed:
            raise InvalidParameter(
                f"{self._param}: {host[:80]} may not be {self._action}: the server's operator can add it to "
                f"{self._flag}",
                self._param,
            )

    def check(self, address: str) -> bool:
        """Return whether connections to this IP address are allowed, by any host name."""
        parsed = address_of(address.partition("%")[0])  # without the zone of an IPv6 address
        return parsed is not None and self._may_be_called(parsed)

    async def call(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """Send a POST. Returns the status; redirects are not followed.

        Raises TransientError if the host cannot be reached or does not respond in time.
        """
        async with self._response("POST", url, {"content-length": str(len(body)), **headers}, body) as response:
            return int(response.status)

    async def read(self, url: str, max_bytes: int) -> bytes:
        """Return the body of a GET for a picture, of at most `max_bytes` bytes.

        Redirects are not followed.

        Raises TransientError if the host cannot be reached or does not respond in time, and for another status or a
        larger body.
        """
        data = bytearray()
        async with self._response("GET", url, {"accept": "image/*"}) as response:
            if response.status != HTTP_OK:
                raise TransientError(f"the response has status {response.status}, not {HTTP_OK}")
            async for chunk in response.aiter_stream():
                data += chunk
                if len(data) > max_bytes:
                    raise TransientError(f"the response has more than {max_bytes} bytes")
        return bytes(data)

    @asynccontextmanager
    async def _response(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> AsyncIterator[httpcore2.Response]:
        """Return a context with the response of one call, which lasts for at most CALL_S."""
        parts = self._parts(url)
        host, scheme = parts.hostname or "", parts.scheme
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        port = parts.port or STANDARD_PORTS[scheme]
        address = httpcore2.URL(scheme=scheme.encode(), host=host.encode(), port=port, target=target.encode())
        all_headers = {"host": parts.netloc, "connection": "close", **headers}

        try:
            async with asyncio.timeout(CALL_S):
                async with self._pool.stream(method, address, headers=[*all_headers.items()], content=body) as response:
                    yield response
        except TimeoutError as error:
            raise TransientError(f"no response within {CALL_S:g} s") from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
            raise TransientError(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    def _parts(self, url: str) -> SplitResult:
        """Return the parts of an http or https URL. Raises InvalidParameter for any other URL."""
        try:
            parts = urlsplit(url)
            is_plain = url.isascii() and url.isprintable() and " " not in url and "\\" not in url
            is_clean = "@" not in parts.netloc and not parts.fragment and parts.port != 0
            if is_plain and is_clean and parts.scheme in STANDARD_PORTS and parts.hostname:
                return parts
        except ValueError:
            pass
        raise InvalidParameter(
            f"{self._param} must be a URL like https://hooks.example/done, without user and fragment", self._param
        )

    def _is_listed(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks)

    def _may_be_called(self, address: IPv4Address | IPv6Address) -> bool:
        return self._is_listed(address) or _is_public(address)


class _CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connects only to addresses that passed the check.

    The checked address itself is used, so a later lookup of the name cannot replace it (DNS rebinding).
    """

    def __init__(self, check: Callable[[str], bool]) -> None:
        self._check = check
        self._backend = httpcore2.AnyIOBackend()
        self._lookups = ThreadPoolExecutor(LOOKUPS, "lookup")  # a separate pool: a slow lookup delays no other work

    @override
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        results = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        addresses = list(dict.fromkeys(str(result[4][0]) for result in results))

        if not (allowed := [address for address in addresses if self._check(address)]):
            raise httpcore2.ConnectError(f"{host} resolves to {', '.join(addresses[:4])}, which may not be called")
        # The error of the last address is the one that is raised.
        for address in allowed[:-1]:
            with suppress(httpcore2.ConnectError):
                return await self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
        return await self._backend.connect_tcp(allowed[-1], port, timeout, local_address, socket_options)


def host_of(url: str) -> str:
    """Return the host of a URL that was checked before; "" if it has none."""
    return urlsplit(url).hostname or ""


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is public, including all IPv4 addresses that it stands for."""
    if isinstance(address, IPv6Address):
        if address not in UNICAST and address not in TRANSLATED:
            return False
        if any(not _is_public(embedded) for embedded in _embedded_addresses(address)):
            return False
    is_reserved = any(address in network for network in RESERVED)
    return address.is_global and not address.is_multicast and not is_reserved


def _embedded_addresses(address: IPv6Address) -> Iterator[IPv4Address]:
    """Yield the IPv4 addresses that an IPv6 address stands for.

    It may do so by 6to4, Teredo, NAT64 or ISATAP.
    """
    if address.sixtofour:
        yield address.sixtofour
    if address.teredo:
        yield from address.teredo
    if address in TRANSLATED or int(address) >> 32 & 0xFFFFFFFF in ISATAP:
        yield IPv4Address(int(address) & 0xFFFFFFFF)
