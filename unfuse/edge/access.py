"""Decides from where the server may be used: under which host names, by which websites, through which proxies.

`Refusal` is what the gateway refuses by itself, and `envelope` the body of an error in OpenAI's format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from unfuse.core import errors
from unfuse.core.errors import UsageError
from unfuse.core.request import MODERATION_BLOCKED
from unfuse.wire.address import is_loopback


class Refusal(errors.UnfuseError):
    """A call that the gateway itself refuses, with an HTTP status and a code for programs."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})


class ResponseAborted(Exception):
    """A response cannot be sent to its end: the connection closes before that, so that the client notices."""


def envelope(error: Refusal) -> dict[str, object]:
    """The body of an error reply."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status)
    kind = kind or ("server_error" if error.status >= 500 else "invalid_request_error")
    kind = "image_generation_user_error" if error.code == MODERATION_BLOCKED else kind
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


ANY = "*"
EXEMPT = frozenset({"/health", "/ready", "/metrics"})  # paths for probes, which may reach the server under any address
#: The entry of a call's scope that says that Access allows it no more than these paths.
STRANGER = "unfuse.stranger"

#: Response headers that an allowed website may read.
EXPOSED = (
    "x-request-id", "location", "retry-after", "preference-applied", "openai-poll-after-ms",
    "etag", "accept-ranges", "content-range",
)  # fmt: skip

MOST_SHOWN = 100  # the most characters of a name that a refusal quotes

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_STANDARD_PORT = {"http": ":80", "https": ":443"}


class AccessPolicy:
    """Host names and websites that are allowed beside the server's own, and proxies that are trusted to forward both.

    `hosts` are names (`.domain` stands for a domain and all below it), `origins` are like `https://example.com`, `*` is
    any of them; `proxies` are addresses or networks. Raises ConfigError for what is none of that.
    """

    def __init__(self, hosts: Sequence[str] = (), origins: Sequence[str] = (), proxies: Sequence[str] = ()) -> None:
        self._hosts = frozenset(ANY if name == ANY else _host_in(name) for name in hosts)
        self.origins = tuple(origin.lower().rstrip("/") for origin in origins)
        if "" in self._hosts:
            raise UsageError("--allowed-hosts takes names like example.com, .example.com for all below it, or *")
        for origin in self.origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise UsageError(f"--allowed-origins {origin}: write it as browsers do, like https://example.com, or *")
        try:
            self._proxies = [ip_network(proxy) for proxy in proxies]
        except ValueError as error:
            raise UsageError(f"--trusted-proxies: {error}; write addresses or networks, like 10.0.0.0/8") from error

    def trusts(self, peer: str) -> bool:
        """Whether a trusted proxy has this address."""
        address = address_of(peer)
        return address is not None and any(address in network for network in self._proxies)

    def refusal(self, scope: Scope, names: Sequence[str]) -> Refusal | None:
        """Why a call that shows no key is not answered; `names` are all the hosts it was sent to, the first one last.

        Whoever has a name of their own lead here makes browsers send that name; whoever has a page make calls cannot
        keep browsers from saying whose page it is.
        """
        for name in names or [""]:
            host = _host_in(name)
            if not is_loopback(host) and not (host and matches(host, self._hosts)):
                flag = f"start it with --allowed-hosts {host[:MOST_SHOWN] or 'NAME'}"
                return Refusal(
                    403,
                    "host_not_allowed",
                    f"this server is not known as {name[:MOST_SHOWN]!r}: if that is a name of yours, {flag}",
                )
        given = Headers(scope=scope)
        for origin in given.getlist("origin"):
            if ANY not in self.origins and origin.lower() not in (*self.origins, _site(scope["scheme"], names[-1])):
                shown, hint = origin[:MOST_SHOWN], ""
                if any(name.startswith("x-forwarded-") or name == "forwarded" for name in given):
                    hint = f", or, if a proxy of yours at {scope['client'][0]} sent it, with --trusted-proxies"
                message = f"pages of {shown!r} may not use this server: to let them, start it with --allowed-origins"
                return Refusal(403, "origin_not_allowed", f"{message} {shown}{hint}")
        return None


class AccessGuard:
    """Refuses calls that Access does not allow, unless keys are required. Answers preflights. Raises Refusal."""

    def __init__(self, app: ASGIApp, access: AccessPolicy, keyed: bool) -> None:
        self._access, self._keyed = access, keyed
        self._app = app if not access.origins else CORSMiddleware(
            app, access.origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=EXPOSED, allow_private_network=True,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one call on, with the host and scheme that the client used."""
        if not scope["path"].startswith("/"):
            raise Refusal(400, "bad_target", "ask for a path, such as /v1/models: this server is no proxy")
        names = self._forwarded(scope)
        if not self._keyed and (why := self._access.refusal(scope, names)):
            if scope["path"] not in EXEMPT:
                raise why
            scope[STRANGER] = True
        await self._app(scope, receive, send)

    def _forwarded(self, scope: Scope) -> list[str]:
        """The hosts that a call was sent to. What a trusted proxy forwards becomes the call's own host and scheme."""
        given = Headers(scope=scope)
        names = given.getlist("host")
        if not self._access.trusts((scope.get("client") or ("",))[0]):
            return names
        said = [part.strip() for part in ",".join(given.getlist("x-forwarded-host")).split(",") if part.strip()]
        if said:
            names = [*names, *reversed(said)]
            kept = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope["headers"] = [*kept, (b"host", said[0].encode("latin-1"))]
        scheme = given.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
        if scheme in _STANDARD_PORT:
            scope["scheme"] = scheme
        return names


def address_of(peer: str) -> IPv4Address | IPv6Address | None:
    """The IP address in a text, IPv4 also where it is written as IPv6; None if it has none."""
    try:
        address = ip_address(peer)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def matches(host: str, names: Set[str]) -> bool:
    """Return whether a host has one of these names, lies below a `.domain` among them, or any host may (`*`)."""
    above = [host[dot:] for dot in range(len(host)) if host[dot] == "."]
    return not names.isdisjoint([ANY, host, f".{host}", *above])


def _host_in(text: str) -> str:
    """The name or address in a Host header; "" if it is malformed."""
    found = _HOST.fullmatch(text.lower())
    return found[1].strip("[]").rstrip(".") if found else ""


def _site(scheme: str, host: str) -> str:
    """The origin of a host's pages, as browsers write it."""
    return f"{scheme}://{host.lower().removesuffix(_STANDARD_PORT.get(scheme, ':'))}"
