"""The layers around an application, outermost first: headers of every answer, CORS, guard.

CORS is outside the guard, so that a page can read a refusal. It answers preflights only if the guard would let
them pass.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lmx_lab.errors import LabError
from lmx_lab.http import error_bodies
from lmx_lab.http.bodies import ROOM_BYTES, BodyRoom, Turns
from lmx_lab.http.guard import (
    ANSWER_HEADERS,
    CONTENT_POLICY,
    ASGIApp,
    Guard,
    GuardPolicy,
    Message,
    Receive,
    Scope,
    Send,
    allows_origin,
    passes,
)

VERSION = version("lmx-lab")
CONTENT_POLICY_HEADER = b"content-security-policy"
ALWAYS = (
    (b"x-lmx-lab", VERSION.encode()),
    *((name.encode(), value.encode()) for name, value in ANSWER_HEADERS),
)


def wrapped(api: FastAPI, policy: Callable[[], GuardPolicy], *, methods: Sequence[str] = ("GET", "POST")) -> ASGIApp:
    """The application as strangers may reach it, every failure in the one form.

    Args:
        policy: Asked for every request: the port is known late.
        methods: That pages of allowed origins may use.
    """
    # A body that is not too large has room where it is the only one.
    api.state.body_room = BodyRoom(max(ROOM_BYTES, api.state.max_body_bytes))
    api.state.body_turns = Turns()
    api.add_exception_handler(LabError, error_bodies.on_lab_error)
    api.add_exception_handler(RequestValidationError, error_bodies.on_invalid)
    api.add_exception_handler(HTTPException, error_bodies.on_http_error)
    api.add_exception_handler(ClientDisconnect, error_bodies.on_gone)
    api.add_exception_handler(Exception, error_bodies.on_bug)
    return AnswerHeaders(Cors(Guard(api, policy=policy, respond=_refusal), policy=policy, methods=methods))


class Cors(CORSMiddleware):
    """CORS for the origins that the guard's policy names; requests of all others are for the guard to refuse."""

    def __init__(self, app: ASGIApp, *, policy: Callable[[], GuardPolicy], methods: Sequence[str]) -> None:
        exposed = ["x-request-id", "x-lmx-lab", "retry-after", "x-should-retry"]
        super().__init__(app, allow_methods=methods, allow_headers=["*"], expose_headers=exposed)
        self._policy = policy

    def is_allowed_origin(self, origin: str) -> bool:
        return allows_origin(origin, self._policy())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None or not self.is_allowed_origin(origin):
            await self.app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and not passes(scope, self._policy()):
            await self.simple_response(scope, receive, send, request_headers=headers)
        else:
            await super().__call__(scope, receive, send)


def _refusal(error: LabError) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await error_bodies.respond(error, request_id=scope["lmx_lab.request_id"])(scope, receive, send)

    return answer


class AnswerHeaders:
    """Gives every answer its headers: a request id, which is in the scope too, the lab's name, and what browsers may do
    with it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request_id = scope["lmx_lab.request_id"] = f"req_{secrets.token_hex(8)}"
        named = (b"x-request-id", request_id.encode())

        async def send_with_headers(message: Message) -> None:
            if message["type"].endswith((".response.start", "websocket.accept")):
                message = {**message, "headers": [*_with_policy(message.get("headers", ())), named, *ALWAYS]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _with_policy(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """With a ``Content-Security-Policy``, unless the answer has its own."""
    own = list(headers)
    has_policy = any(name.lower() == CONTENT_POLICY_HEADER for name, _ in own)
    return own if has_policy else [*own, (CONTENT_POLICY_HEADER, CONTENT_POLICY.encode())]
