"""Which addresses of clients are called, and how, so that nobody has the server call what only it can reach."""

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

CALL_S = 10.0  # the longest a target has, from looking up its name to the head of its answer; the rest is not read

HTTP_OK = 200
STANDARD_PORTS = {"http": 80, "https": 443}
LOOKUPS = 8  # how many names are looked up at one time

#: All IPv6 addresses of the internet. Outside lie, among others, those that only stand for an IPv4 address: ::/96
#: (IPv4-compatible), ::ffff:0:0:0/96 (translated) and 64:ff9b:1::/48 (NAT64 of one's own network).
UNICAST = ip_network("2000::/3")

#: Addresses outside of these by which NAT64 reaches the IPv4 address at their end.
TRANSLATED = ip_network("64:ff9b::/96")

#: The 32 bits before the IPv4 address at the end of an address that a tunnel leads to it.
ISATAP = (0x00005EFE, 0x02005EFE)

#: Networks that are reserved, beside those that `ipaddress` knows in every version of Python.
RESERVED = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))


class OutboundHttp:
    """The hosts that may be called: names (`.domain` for all below it, `*` for any), and addresses or networks.

    A name may lead to an address of the internet, or to one of those networks. Addresses come in the parameter `param`,
    and `flag` allows hosts. Raises ConfigError for what is neither.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        param: str = "webhook",
        flag: str = "--webhook-hosts",
        done: str = "called",
        needs: str = "",
    ) -> None:
        self._param, self._flag, self._done, self._needs = param, flag, done, needs
        self._names, self._networks = set[str](), list[IPv4Network | IPv6Network]()
        for entry in allowed:
            try:
                self._networks.append(ip_network(entry))
            except ValueError:
                self._names.add(entry.lower())
        self._pool = httpcore2.AsyncConnectionPool(
            ssl.create_default_context() if allowed else None,
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=_Checked(self.check),
        )
        for name in self._names:
            if not name.isascii() or not name.strip(".") or set(name) & set("/:@ ?#"):
                raise UsageError(f"{flag} {name}: write names like hooks.example or .example, networks, or *")

    def __bool__(self) -> bool:
        return bool(self._names or self._networks)

    def require(self, url: str) -> None:
        """Raise InvalidParameter for an address that may not be called, as far as it tells itself."""
        if not self:
            raise InvalidParameter(
                f"{self._param}: nobody is {self._done} by this server, start it with {self._flag}{self._needs}",
                self._param,
            )
        host = self._parts(url).hostname or ""
        if (address := address_of(host)) is not None:
            allowed = self._may_be_called(address) and (ANY in self._names or self._is_named(address))
        else:
            allowed = matches(host, self._names)
        if not allowed:
            raise InvalidParameter(
                f"{self._param}: {host[:80]} may not be {self._done}, whoever runs the server can add it to "
                f"{self._flag}",
                self._param,
            )

    def check(self, address: str) -> bool:
        """Whether this address may be connected to, whichever name led there."""
        found = address_of(address.partition("%")[0])
        return found is not None and self._may_be_called(found)

    async def call(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """Post something; returns the status, be it a redirect's. Raises TransientError for no answer in time."""
        async with self._answer("POST", url, {"content-length": str(len(body)), **headers}, body) as answer:
            return int(answer.status)

    async def read(self, url: str, most: int) -> bytes:
        """Get what is there, of at most so many bytes. Redirects are not followed.

        Raises TransientError for a target that cannot be reached, does not answer in time, or has something else.
        """
        data = bytearray()
        async with self._answer("GET", url, {"accept": "image/*"}) as answer:
            if answer.status != HTTP_OK:
                raise TransientError(f"the answer is {answer.status}, and only {HTTP_OK} is read")
            async for piece in answer.aiter_stream():
                data += piece
                if len(data) > most:
                    raise TransientError(f"it has more than {most} bytes")
        return bytes(data)

    @asynccontextmanager
    async def _answer(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> AsyncIterator[httpcore2.Response]:
        parts = self._parts(url)
        host, scheme = parts.hostname or "", parts.scheme
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        port = parts.port or STANDARD_PORTS[scheme]
        where = httpcore2.URL(scheme=scheme.encode(), host=host.encode(), port=port, target=target.encode())
        sent = {"host": parts.netloc, "connection": "close", **headers}
        try:
            async with asyncio.timeout(CALL_S):
                async with self._pool.stream(method, where, headers=[*sent.items()], content=body) as answer:
                    yield answer
        except TimeoutError as error:
            raise TransientError(f"it did not answer within {CALL_S:g} s") from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
            raise TransientError(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.aclose()

    def _parts(self, url: str) -> SplitResult:
        """The parts of an address. Raises InvalidParameter."""
        try:
            parts = urlsplit(url)
            is_plain = url.isascii() and url.isprintable() and " " not in url and "\\" not in url
            is_clean = "@" not in parts.netloc and not parts.fragment and parts.port != 0
            if is_plain and is_clean and parts.scheme in STANDARD_PORTS and parts.hostname:
                return parts
        except ValueError:
            pass
        raise InvalidParameter(
            f"{self._param} must be an address like https://hooks.example/done, without user and #", self._param
        )

    def _is_named(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks)

    def _may_be_called(self, address: IPv4Address | IPv6Address) -> bool:
        return self._is_named(address) or _is_public(address)


class _Checked(httpcore2.AsyncNetworkBackend):
    """Connects to the address that was looked at, and to no other that the same name may stand for a moment later."""

    def __init__(self, check: Callable[[str], bool]) -> None:
        self._check, self._real = check, httpcore2.AnyIOBackend()
        self._lookups = ThreadPoolExecutor(LOOKUPS, "lookup")  # of its own: one that hangs keeps no other work waiting

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
        found = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        if not (may := [address for address in addresses if self._check(address)]):
            raise httpcore2.ConnectError(f"{host} leads to {', '.join(addresses[:4])}, which may not be called")
        for address in may[:-1]:
            with suppress(httpcore2.ConnectError):
                return await self._real.connect_tcp(address, port, timeout, local_address, socket_options)
        return await self._real.connect_tcp(may[-1], port, timeout, local_address, socket_options)


def host_of(url: str) -> str:
    """The host of an address that was checked before."""
    return urlsplit(url).hostname or ""


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is one of the internet, and stands for no other that is not."""
    if isinstance(address, IPv6Address):
        if address not in UNICAST and address not in TRANSLATED:
            return False
        if any(not _is_public(inner) for inner in _inner(address)):
            return False
    is_reserved = any(address in network for network in RESERVED)
    return address.is_global and not address.is_multicast and not is_reserved


def _inner(address: IPv6Address) -> Iterator[IPv4Address]:
    """The IPv4 addresses that an IPv6 address stands for, by whatever rule."""
    if address.sixtofour:
        yield address.sixtofour
    if address.teredo:
        yield from address.teredo
    if address in TRANSLATED or int(address) >> 32 & 0xFFFFFFFF in ISATAP:
        yield IPv4Address(int(address) & 0xFFFFFFFF)
