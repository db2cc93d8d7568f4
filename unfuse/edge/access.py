"""Access checks before authentication: allowed hosts, allowed origins (CORS), trusted proxies.

`ApiError` is an error with an HTTP status, and `envelope` is its body in OpenAI's format.
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

ANY = "*"

#: Paths for probes. They are answered whatever the host and origin of a call.
PROBE_PATHS = frozenset({"/health", "/ready", "/metrics"})

#: The key in a call's scope that marks a stranger: a caller with access to PROBE_PATHS only.
STRANGER = "unfuse.stranger"

#: Response headers that an allowed website may read.
EXPOSED = (
    "x-request-id",
    "location",
    "retry-after",
    "preference-applied",
    "openai-poll-after-ms",
    "etag",
    "accept-ranges",
    "content-range",
)

#: The most characters of a name that a refusal quotes.
MAX_QUOTED = 100

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_STANDARD_PORT = {"http": ":80", "https": ":443"}


class ApiError(errors.UnfuseError):
    """An error that the gateway itself raises, with an HTTP status and an error code.

    param: the request parameter that is wrong, or None. headers: headers of the response.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


class ResponseAborted(Exception):
    """Raised if a response cannot be completed.

    The connection is closed early, so that the client notices.
    """


def envelope(error: ApiError) -> dict[str, object]:
    """Return the body of an error response, in OpenAI's format."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status)
    kind = kind or ("server_error" if error.status >= 500 else "invalid_request_error")
    kind = "image_generation_user_error" if error.code == MODERATION_BLOCKED else kind
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


class AccessPolicy:
    """The hosts and origins that calls without a key may have, and the trusted proxies.

    hosts: names of the server other than loopback; `.domain` is a domain and all names below it, `*` is any name.
    origins: websites other than its own whose pages may call the server, like `https://example.com`; `*` is any.
    proxies: addresses or networks of proxies whose X-Forwarded headers are trusted.

    Raises UsageError for an entry of another form.
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
        """Return whether this is the address of a trusted proxy."""
        address = address_of(peer)
        return address is not None and any(address in network for network in self._proxies)

    def refusal(self, scope: Scope, hosts: Sequence[str]) -> ApiError | None:
        """Return the refusal (403) of a call without a key, or None.

        hosts: the hosts that the call was sent to, those of proxies first, the one that the client used last.

        The host check protects against DNS rebinding: a browser sends the name of the attacker's domain. The origin
        check protects against calls of other websites: a browser always sends the origin of the page.
        """
        for name in hosts or [""]:  # a call without a host is refused
            host = _host_in(name)
            if not is_loopback(host) and not (host and matches(host, self._hosts)):
                flag = f"start the server with --allowed-hosts {host[:MAX_QUOTED] or 'NAME'}"
                return ApiError(
                    403,
                    "host_not_allowed",
                    f"host {name[:MAX_QUOTED]!r} is not allowed: if it is a name of this server, {flag}",
                )

        headers = Headers(scope=scope)
        for origin in headers.getlist("origin"):
            if ANY not in self.origins and origin.lower() not in (
                *self.origins,
                _origin_of(scope["scheme"], hosts[-1]),
            ):
                quoted = origin[:MAX_QUOTED]
                hint = ""
                if any(name.startswith("x-forwarded-") or name == "forwarded" for name in headers):
                    hint = f", or, if your proxy at {scope['client'][0]} sent the call, with --trusted-proxies"
                message = f"pages of {quoted!r} may not use this server: to allow them, start it with --allowed-origins"
                return ApiError(403, "origin_not_allowed", f"{message} {quoted}{hint}")
        return None


class AccessGuard:
    """Middleware that refuses calls which the policy does not allow, and answers CORS preflights.

    If API keys are required (`keyed`), hosts and origins are not checked. Raises ApiError.
    """

    def __init__(self, app: ASGIApp, access: AccessPolicy, keyed: bool) -> None:
        self._access = access
        self._keyed = keyed
        self._app = app
        if access.origins:
            self._app = CORSMiddleware(
                app,
                access.origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=EXPOSED,
                allow_private_network=True,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, with the host and scheme that the client used.

        A stranger reaches only PROBE_PATHS.
        """
        if not scope["path"].startswith("/"):
            raise ApiError(
                400, "bad_target", "the request target must be a path, such as /v1/models: this server is not a proxy"
            )
        hosts = self._apply_forwarded(scope)
        if not self._keyed and (refusal := self._access.refusal(scope, hosts)):
            if scope["path"] not in PROBE_PATHS:
                raise refusal
            scope[STRANGER] = True
        await self._app(scope, receive, send)

    def _apply_forwarded(self, scope: Scope) -> list[str]:
        """Return the hosts of a call, with the one that the client used last.

        If a trusted proxy forwards the host and scheme of the client, they replace those in `scope`.
        """
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if not self._access.trusts((scope.get("client") or ("",))[0]):
            return hosts
        forwarded = [part.strip() for part in ",".join(headers.getlist("x-forwarded-host")).split(",") if part.strip()]
        if forwarded:
            hosts = [*hosts, *reversed(forwarded)]
            other_headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope["headers"] = [*other_headers, (b"host", forwarded[0].encode("latin-1"))]

        scheme = headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
        if scheme in _STANDARD_PORT:
            scope["scheme"] = scheme
        return hosts


def address_of(peer: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address in a text, or None.

    An IPv4 address that is mapped to IPv6 is returned as IPv4.
    """
    try:
        address = ip_address(peer)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def matches(host: str, names: Set[str]) -> bool:
    """Return whether a host matches one of these names.

    A name is a host, a `.domain` with all names below it, or `*` for any host.
    """
    parent_domains = [host[dot:] for dot in range(len(host)) if host[dot] == "."]
    return not names.isdisjoint([ANY, host, f".{host}", *parent_domains])


def _host_in(text: str) -> str:
    """Return the name or address in a Host header; "" if it is malformed."""
    match = _HOST.fullmatch(text.lower())
    return match[1].strip("[]").rstrip(".") if match else ""


def _origin_of(scheme: str, host: str) -> str:
    """Return the origin of a host's pages, as browsers write it."""
    return f"{scheme}://{host.lower().removesuffix(_STANDARD_PORT.get(scheme, ':'))}"
