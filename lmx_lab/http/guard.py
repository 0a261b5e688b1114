"""Guard an ASGI application: check Host, Origin and key of HTTP and WebSocket requests, and identify local callers.

Web pages can reach a server on loopback in two ways: from another origin, which the Origin header shows, and through a
DNS name that points to 127.0.0.1, which the Host header shows. Programs on the network are distinguished by the key.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from starlette.datastructures import Headers

from lmx_lab.errors import HostForbiddenError, InvalidRequestError, LabError, OriginForbiddenError, UnauthorizedError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health"})
PAGE_PATHS = frozenset({"/", "/docs", "/manifest.webmanifest", "/icon-192.png", "/icon-512.png", "/favicon.ico"})
"""Paths of pages with scripts, and of their files. With the setting ``page`` they need no key, because browsers cannot
send one when they open a page, and the pages are the same for all clients. They ask for the key and send it with their
requests."""
DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
RESPONSE_HEADERS = (
    ("x-content-type-options", "nosniff"),
    # Other origins cannot embed a response as a script or an image; origins that CORS allows can still fetch it.
    ("cross-origin-resource-policy", "same-origin"),
    # With no-referrer, browsers would send "Origin: null" with some requests of a page to its own server.
    ("referrer-policy", "same-origin"),
)
"""Headers of every response."""
CONTENT_POLICY = "frame-ancestors 'self'"
"""The ``Content-Security-Policy`` of responses without their own. Only pages of the same origin may frame them; behind
jupyter-server-proxy, these are the pages of JupyterLab."""
FORWARDED = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"})
"""Headers that proxies and tunnels add. Their values are never trusted; they show that the caller is on another
machine."""
REFRESH_S = 2.0
"""Minimum time between two reads of the names and addresses of this machine."""
PASSED_POLICY = "lmx_lab.policy"
"""Key in a request's scope: the policy that it satisfied."""
TRUSTED_PROXY = "lmx_lab.trusted_proxy"
"""Key in a request's scope: whether it came through the trusted proxy."""
# RFC 3986 reg-names that occur in practice, IPv4, bracketed IPv6; no userinfo, no percent-encoding, no zone.
_HOST = re.compile(r"(?P<name>[a-z0-9_][a-z0-9_.-]*|\[[0-9a-f:.]+\])(?::(?P<port>[1-9][0-9]{0,4}))?", re.ASCII)
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[^\s/?#@]+)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class GuardPolicy:
    """The requests that the guard allows. Names are in lower case, IPv6 addresses in brackets."""

    hosts: frozenset[str]
    """Accepted values of the Host header with their port, ``name:port``."""
    any_port_hosts: frozenset[str] = frozenset()
    """Names that are accepted with any port, or without one."""
    local_hosts: frozenset[str] = frozenset()
    """Values of the Host header, with their port, that make a caller on loopback a local one; see ``is_local``."""
    origins: frozenset[str] = frozenset()
    """Accepted origins in addition to the server's own, ``scheme://host[:port]``."""
    webviews: bool = False
    """Whether VS Code's webviews are accepted. Their origins are random, and no web site can have one."""
    is_trusted_proxy: Callable[[tuple[str, int], tuple[str, int]], bool] | None = None
    """Whether the peer of a connection authenticates its callers and forwards ``Host`` unchanged. Called with the
    address of the peer and our own; last, because it is slow."""
    key: str | None = field(default=None, repr=False)
    key_hint: str = "send the header Authorization: Bearer KEY"
    """The next step in the error for a missing key."""
    open_paths: frozenset[str] = OPEN_PATHS
    """Paths that need no key."""
    query_key_paths: frozenset[str] = frozenset()
    """Paths of WebSockets that also accept the key as ``?token=``, because browsers cannot add headers to them."""


def loopback_hosts(port: int) -> frozenset[str]:
    """Return the values of the Host header with which this machine reaches its own server."""
    names = ("localhost", "127.0.0.1", "[::1]")
    return frozenset(f"{name}:{port}" for name in names) | (frozenset(names) if port == 80 else frozenset())


def local_policy(
    port: int,
    *,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    webviews: bool = False,
    is_trusted_proxy: Callable[[tuple[str, int], tuple[str, int]], bool] | None = None,
    key: str | None = None,
    open_paths: Iterable[str] = (),
) -> GuardPolicy:
    """Build the policy for loopback on this port, with the hosts and origins that the operator adds.

    Args:
        hosts: ``name`` for any port, or ``name:port``.
        open_paths: Paths that need no key, in addition to the health checks.

    Raises:
        InvalidRequestError: an entry could never match, such as one with an asterisk; or no header can contain the key.
    """
    if key is not None and not (key.isascii() and key.isprintable() and key.split() == [key]):
        raise InvalidRequestError("api_key must be a single word of ASCII characters, or left out", param="api_key")
    with_port, any_port, allowed_origins = set[str](), set[str](), set[str]()
    for text in hosts:
        host = text.strip().lower()
        if host.count(":") > 1 and not host.startswith("["):
            host = f"[{host}]"
        match = _HOST.fullmatch(host)
        if match is None:
            raise InvalidRequestError(
                f"allowed_hosts contains {text!r}; write name, name:port or [address]:port", param="allowed_hosts"
            )
        (any_port if match["port"] is None else with_port).add(host)
    for text in origins:
        origin = text.strip().lower().removesuffix("/")
        match = _ORIGIN.fullmatch(origin)
        if match is None or "*" in origin:
            raise InvalidRequestError(
                f"cors_origins contains {text!r}; write each origin in full, such as http://localhost:3000",
                param="cors_origins",
            )
        # Browsers omit the default port of the scheme.
        allowed_origins.add(origin.removesuffix(f":{DEFAULT_PORTS.get(match['scheme'])}"))
    return GuardPolicy(
        hosts=loopback_hosts(port) | with_port,
        local_hosts=loopback_hosts(port),
        any_port_hosts=frozenset(any_port),
        origins=frozenset(allowed_origins),
        webviews=webviews,
        is_trusted_proxy=is_trusted_proxy,
        key=key,
        open_paths=OPEN_PATHS.union(open_paths),
    )


class LivePolicy:
    """A policy that is built again when a value that it depends on has changed. Call it for every request.

    Args:
        make: Builds the policy.
        depends_on: Returns the value; called at most every ``REFRESH_S``.
    """

    def __init__(self, make: Callable[[], GuardPolicy], depends_on: Callable[[], object]) -> None:
        self.replace(make, depends_on)

    def replace(self, make: Callable[[], GuardPolicy], depends_on: Callable[[], object]) -> None:
        """Use another policy from now on. The arguments are those of the class."""
        self._make = make
        self._depends_on = depends_on
        self._value = depends_on()
        self._read_at = time.monotonic()
        self._policy = make()

    def __call__(self) -> GuardPolicy:
        now = time.monotonic()
        if now - self._read_at >= REFRESH_S:
            self._read_at = now
            # If the system cannot provide the value, the last one is kept.
            with suppress(OSError):
                if (value := self._depends_on()) != self._value:
                    self._policy, self._value = self._make(), value
        return self._policy


class Guard:
    """Calls ``app`` if the policy allows the request, and otherwise responds with ``respond(scope, error)``.

    It must be outside all code that responds to requests. A policy given as a function is called for every request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        policy: GuardPolicy | Callable[[], GuardPolicy],
        respond: Callable[[Scope, LabError], ASGIApp],
    ) -> None:
        self._app = app
        self._policy = policy
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] in ("http", "websocket"):
            try:
                policy = self._policy if isinstance(self._policy, GuardPolicy) else self._policy()
                check(scope, policy)
                scope[PASSED_POLICY] = policy
            except LabError as error:
                app = self._respond(scope, error)
                if scope["type"] == "websocket":
                    app = _refuse_handshake(app)
        await app(scope, receive, send)


def check(scope: Scope, policy: GuardPolicy) -> None:
    """Check the request of an ``http`` or ``websocket`` scope.

    Raises:
        HostForbiddenError: there is no Host header, or several, or the policy does not allow it.
        OriginForbiddenError: the policy does not allow the page that makes the request.
        UnauthorizedError: the key is missing or wrong.
    """
    headers, host = Headers(scope=scope), _host_of(scope)
    if not host or (
        policy.hosts.isdisjoint(host[:2])
        and host[2] not in policy.any_port_hosts
        and not _is_from_trusted_proxy(scope, policy)
    ):
        shown = " and ".join(repr(value.lower()[:100]) for value in headers.getlist("host")[:3]) or "missing"
        allowed = ", ".join(sorted(policy.hosts | policy.any_port_hosts))
        raise HostForbiddenError(
            f"Host header is {shown}; this server accepts {allowed}; --allow-host (allowed_hosts) adds a name"
        )
    if origins := headers.getlist("origin"):
        origin = origins[0].lower()
        if len(origins) > 1 or not (allows_origin(origin, policy) or _is_own_origin(origin, host[0], policy)):
            shown = " and ".join(repr(value.lower()[:100]) for value in origins[:3])
            hint = "a page without an origin cannot be allowed" if origin == "null" else "--cors-origin adds an origin"
            raise OriginForbiddenError(f"pages of origin {shown} may not use this server; {hint}")
    is_preflight = scope.get("method") == "OPTIONS" and bool(headers.get("access-control-request-method"))
    is_open = scope["path"] in policy.open_paths or is_preflight
    if policy.key is not None and not is_open and not _has_key(scope, policy, policy.key):
        raise UnauthorizedError(f"this server needs its key: {policy.key_hint}")


def is_allowed(scope: Scope, policy: GuardPolicy) -> bool:
    """Whether ``check`` allows this request."""
    with suppress(LabError):
        check(scope, policy)
        return True
    return False


def is_local(scope: Scope) -> bool:
    """Whether the caller has the rights of this machine: to load, unload and download models, and to use and see paths.

    The connection must come from loopback. In addition, one of these must hold: ``Host`` is a loopback name with the
    server's port, and no proxy has added its header; the request has the key; or it comes from the Jupyter server of
    this process, whose users may run any code here. Without a guard, no caller is local.
    """
    policy: GuardPolicy | None = scope.get(PASSED_POLICY)
    peer = scope.get("client")
    if policy is None or not peer or not is_loopback(peer[0]):
        return False
    if policy.key is not None and _has_key(scope, policy, policy.key):
        return True
    is_direct = FORWARDED.isdisjoint(Headers(scope=scope).keys())
    has_loopback_host = not policy.local_hosts.isdisjoint(_host_of(scope)[:2])
    return (is_direct and has_loopback_host) or _is_from_trusted_proxy(scope, policy)


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address, including the IPv6 form of IPv4 addresses (``::ffff:127.0.0.1``)."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _host_of(scope: Scope) -> tuple[str, ...]:
    """Return the ``Host`` of a request in lower case: as it was sent, with its port, and without a port.

    The result is empty if the header is missing, repeated or malformed.
    """
    values = Headers(scope=scope).getlist("host")
    host = values[0].lower() if len(values) == 1 else ""
    return (host, *parsed) if (parsed := _parse_host(host, DEFAULT_PORTS.get(scope.get("scheme", ""), 80))) else ()


def allows_origin(origin: str, policy: GuardPolicy) -> bool:
    """Whether pages of another origin may use the server. Its own pages are not considered."""
    origin = origin.lower()
    is_webview = policy.webviews and origin.startswith("vscode-webview://") and _ORIGIN.fullmatch(origin) is not None
    return origin != "null" and (origin in policy.origins or is_webview)


def _is_from_trusted_proxy(scope: Scope, policy: GuardPolicy) -> bool:
    peer, here = scope.get("client"), scope.get("server")
    if policy.is_trusted_proxy is None or not peer or not here:
        return False
    if TRUSTED_PROXY not in scope:  # The result is kept, because the check takes milliseconds.
        scope[TRUSTED_PROXY] = policy.is_trusted_proxy(_as_ipv4(*peer), _as_ipv4(*here))
    return bool(scope[TRUSTED_PROXY])


def _as_ipv4(address: str, port: int) -> tuple[str, int]:
    """Convert an address in the IPv6 form of IPv4 addresses; leave others unchanged."""
    return address.removeprefix("::ffff:"), port


def _is_own_origin(origin: str, host: str, policy: GuardPolicy) -> bool:
    match = _ORIGIN.fullmatch(origin)
    if match is None or match["scheme"] not in ("http", "https"):
        return False
    parsed = _parse_host(match["host"], DEFAULT_PORTS[match["scheme"]])
    if parsed is None:
        return False
    # The host was already accepted. On a name that is allowed with any port, another port is another program.
    return parsed[0] in policy.hosts or match["host"] == host


def _has_key(scope: Scope, policy: GuardPolicy, key: str) -> bool:
    headers, bearers, queries = Headers(scope=scope), [], []
    for header in headers.getlist("authorization"):
        kind, _, value = header.partition(" ")
        bearers.append(value.strip(" \t") if kind.lower() == "bearer" else "")
    # Clients of the Messages format and of Azure's service send the key in these headers.
    others = [value.strip(" \t") for name in ("x-api-key", "api-key") for value in headers.getlist(name)]
    if scope["type"] == "websocket" and scope["path"] in policy.query_key_paths:
        query = scope.get("query_string", b"").decode("latin-1")
        pairs = parse_qsl(query, keep_blank_values=True, encoding="latin-1")
        queries = [text for name, text in pairs if name == "token"]
    given = [*bearers, *others, *queries]
    # At most one of each kind. If several are given, all have to be correct.
    is_complete = bool(given) and all(len(values) <= 1 for values in (bearers, others, queries))
    # All keys are compared, so that the time does not depend on the first result.
    same = [hmac.compare_digest(one.encode("latin-1"), key.encode()) for one in given]
    return is_complete and all(same)


def _refuse_handshake(response: ASGIApp) -> ASGIApp:
    """Send an HTTP response as a refused WebSocket handshake, with status and body if the server supports it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_http(message: Message) -> None:
            if message["type"].startswith("http.response."):
                message = {"body": b"", **message} if message["type"].endswith(".body") else message
                message = {**message, "type": f"websocket.{message['type']}"}
            await send(message)

        await receive()  # websocket.connect: ASGI allows no response before it
        if "websocket.http.response" in (scope.get("extensions") or {}):
            await response(scope, receive, send_http)
        else:
            await send({"type": "websocket.close", "code": 1008})

    return app


def _parse_host(text: str, default_port: int) -> tuple[str, str] | None:
    """Return a host with its port, and without it; None if it is malformed."""
    match = _HOST.fullmatch(text)
    return (f"{match['name']}:{match['port'] or default_port}", match["name"]) if match else None
