"""Wrap an application in its middleware, from the outside: response headers, CORS, guard.

CORS is outside the guard, so that a page can read a refusal. It answers preflight requests only if the guard would
allow them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version
from types import MappingProxyType
from typing import Protocol

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lmx_lab.errors import LabError
from lmx_lab.heap import return_freed_memory
from lmx_lab.http import Limits, errors
from lmx_lab.http.bodies import BodyMemory
from lmx_lab.http.guard import (
    CONTENT_POLICY,
    RESPONSE_HEADERS,
    ASGIApp,
    Guard,
    GuardPolicy,
    Message,
    Receive,
    Scope,
    Send,
    allows_origin,
    is_allowed,
)

VERSION = version("lmx-lab")
CONTENT_POLICY_HEADER = b"content-security-policy"
ABSOLUTE = re.compile(r"/?https?://(?P<host>[^/?#]*)(?P<path>.*)", re.DOTALL | re.IGNORECASE)
"""The target of a request that a client sends as to a proxy."""
FIXED_HEADERS = (
    (b"x-lmx-lab", VERSION.encode()),
    *((name.encode(), value.encode()) for name, value in RESPONSE_HEADERS),
)


class ExchangeObserver(Protocol):
    """Receives the begin and end of each request, including requests that are refused before they reach a route."""

    def begin_exchange(self, scope: Scope) -> None: ...

    def end_exchange(self, scope: Scope, status: int | None) -> None:
        """Handle the end of a request, when the response was sent. The status is None if there was no response."""


def wrap_app(
    api: FastAPI,
    policy: Callable[[], GuardPolicy],
    *,
    methods: Sequence[str] = ("GET", "POST"),
    observer: ExchangeObserver | None = None,
    error_forms: Mapping[str, errors.ErrorForm] = MappingProxyType({}),
    limits: Limits | None = None,
) -> ASGIApp:
    """Wrap an application so that untrusted clients may reach it and all errors have the same form.

    Args:
        policy: Returns the policy; called for each request, because the port is not known at this time.
        methods: Methods that pages of allowed origins may use.
        error_forms: Forms of errors, by the beginning of the path of the routes whose errors have them.
    """
    limits = limits or Limits()
    # A single body of the largest allowed size always fits.
    api.state.body_memory = BodyMemory(max(limits.memory_bytes, api.state.max_body_bytes))
    api.state.limits = limits
    api.add_exception_handler(LabError, errors.on_lab_error)
    api.add_exception_handler(RequestValidationError, errors.on_invalid)
    api.add_exception_handler(HTTPException, errors.on_http_error)
    api.add_exception_handler(ClientDisconnect, errors.on_disconnect)
    api.add_exception_handler(Exception, errors.on_bug)
    guarded = Cors(Guard(api, policy=policy, respond=errors.respond), policy=policy, methods=methods)
    return ResponseHeaders(guarded, observer, error_forms, trim_s=limits.trim_s)


class Cors(CORSMiddleware):
    """CORS for the origins in the guard's policy. Other origins are left to the guard, which refuses them."""

    def __init__(self, app: ASGIApp, *, policy: Callable[[], GuardPolicy], methods: Sequence[str]) -> None:
        exposed = ["x-request-id", "x-lmx-lab", "retry-after", "x-should-retry", "x-lmx-ignored", "x-lmx-recorded"]
        super().__init__(app, allow_methods=methods, allow_headers=["*"], expose_headers=exposed)
        self._policy = policy

    def is_allowed_origin(self, origin: str) -> bool:
        return allows_origin(origin, self._policy())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None or not self.is_allowed_origin(origin):
            await self.app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and not is_allowed(scope, self._policy()):
            await self.simple_response(scope, receive, send, request_headers=headers)
        else:
            await super().__call__(scope, receive, send)


class ResponseHeaders:
    """Adds headers to every response: a request id (also in the scope), the version, and restrictions for browsers.

    It is the outermost middleware, and therefore also adds the forms of errors to the scope. Some time after a request,
    it returns the memory that requests have freed to the operating system.
    """

    def __init__(
        self,
        app: ASGIApp,
        observer: ExchangeObserver | None,
        error_forms: Mapping[str, errors.ErrorForm],
        *,
        trim_s: float,
    ) -> None:
        self._app = app
        self._error_forms = error_forms
        self._observer = observer
        self._trim_s = trim_s
        self._trim_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if (target := ABSOLUTE.match(scope["path"])) is not None:
            # RFC 9112, 3.2.2: the host of such a target replaces that of the header. They are the same, unless a
            # caller tries to pass the guard, which refuses a host with both names.
            hosts = [target["host"].encode(), *(value for name, value in scope["headers"] if name == b"host")]
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            headers = [(b"host", b" and ".join(dict.fromkeys(map(bytes.lower, hosts)))), *others]
            path = target["path"] or "/"
            scope = {**scope, "headers": headers, "path": path, "raw_path": path.encode()}
        request_id = scope["lmx_lab.request_id"] = f"req_{secrets.token_hex(8)}"
        scope["lmx_lab.error_forms"] = self._error_forms
        id_header = (b"x-request-id", request_id.encode())
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"].endswith((".response.start", "websocket.accept")):
                status = message.get("status", HTTPStatus.SWITCHING_PROTOCOLS)
                headers = [*message.get("headers", ()), id_header, *FIXED_HEADERS]
                # Some responses have a policy of their own.
                if CONTENT_POLICY_HEADER not in dict(headers):
                    headers.append((CONTENT_POLICY_HEADER, CONTENT_POLICY.encode()))
                message = {**message, "headers": headers}
            await send(message)

        if self._observer is not None:
            self._observer.begin_exchange(scope)
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            if self._observer is not None:
                self._observer.end_exchange(scope, status)
            # Clients that ask for the state every second do not postpone it.
            if (now := time.monotonic()) >= self._trim_at:
                self._trim_at = now + self._trim_s
                loop = asyncio.get_running_loop()
                loop.call_later(self._trim_s, loop.run_in_executor, None, return_freed_memory)
