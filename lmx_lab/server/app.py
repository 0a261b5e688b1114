"""The ASGI application of the inference server, put together."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lmx_lab.engine import Engine
from lmx_lab.errors import LabError
from lmx_lab.feed import Feed
from lmx_lab.guard import ASGIApp, Guard, GuardPolicy, Message, Receive, Scope, Send, allows_origin
from lmx_lab.server import errors
from lmx_lab.server.admin import admin_routes, listing_routes
from lmx_lab.server.chat import chat_routes
from lmx_lab.server.completions import completion_routes
from lmx_lab.server.embeddings import embedding_routes
from lmx_lab.server.encoding import EncodingService
from lmx_lab.server.health import health_routes
from lmx_lab.server.loading import Event, ModelLoader
from lmx_lab.server.metrics import Metrics, metrics_routes
from lmx_lab.server.openapi import DescribedAPI
from lmx_lab.server.rerank import rerank_routes
from lmx_lab.server.service import ChatService
from lmx_lab.server.socket import socket_routes
from lmx_lab.server.swapping import ModelSwap
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog

VERSION = version("lmx-lab")


@dataclass(frozen=True, kw_only=True)
class InferenceServer:
    """The application and the services behind it that the notebook uses directly."""

    asgi: ASGIApp
    api: FastAPI
    chat: ChatService
    encoding: EncodingService
    chat_as_is: ChatService
    """The same for callers on other loops than the server's: what is loaded answers, since a swap has one loop."""
    encoding_as_is: EncodingService
    loader: ModelLoader
    feed: Feed[Event]


def create_server(
    *, engine: Engine, catalog: Catalog, settings: Settings, policy: Callable[[], GuardPolicy]
) -> InferenceServer:
    """Routes, errors, guard, CORS and request ids around an engine. Starts nothing."""
    feed: Feed[Event] = Feed()
    loader = ModelLoader(engine=engine, catalog=catalog, feed=feed, downloads=settings.downloads)
    swap = ModelSwap(engine=engine, catalog=catalog, loader=loader, settings=settings) if settings.swap else None
    metrics = Metrics(engine)
    chat = ChatService(engine=engine, catalog=catalog, feed=feed, swap=swap, observe=metrics.observe)
    encoding = EncodingService(engine=engine, catalog=catalog, feed=feed, swap=swap, observe=metrics.observe_encoding)
    api = DescribedAPI(
        title="LMX Lab inference server", version=VERSION, responses=errors.RESPONSES, redirect_slashes=False
    )
    api.state.max_body_bytes = settings.max_body_bytes
    api.include_router(health_routes(engine))
    api.include_router(chat_routes(chat))
    api.include_router(completion_routes(chat, slots=settings.slots))
    api.include_router(embedding_routes(encoding))
    api.include_router(rerank_routes(encoding))
    api.include_router(socket_routes(chat, max_body_bytes=settings.max_body_bytes))
    api.include_router(listing_routes(engine=engine, catalog=catalog))
    api.include_router(
        admin_routes(engine=engine, catalog=catalog, loader=loader, feed=feed, lan_admin=settings.lan_admin)
    )
    api.include_router(metrics_routes(metrics))
    api.add_exception_handler(LabError, errors.on_lab_error)
    api.add_exception_handler(RequestValidationError, errors.on_invalid)
    api.add_exception_handler(HTTPException, errors.on_http_error)
    api.add_exception_handler(ClientDisconnect, errors.on_gone)
    api.add_exception_handler(Exception, errors.on_bug)
    return InferenceServer(
        asgi=_wrap(api, policy),
        api=api,
        chat=chat,
        encoding=encoding,
        chat_as_is=ChatService(engine=engine, catalog=catalog, feed=feed, observe=metrics.observe),
        encoding_as_is=EncodingService(engine=engine, catalog=catalog, feed=feed, observe=metrics.observe_encoding),
        loader=loader,
        feed=feed,
    )


def _wrap(api: FastAPI, policy: Callable[[], GuardPolicy]) -> ASGIApp:
    """Outermost first: request ids, CORS, guard. CORS is outside, so that a page can read a refusal."""
    return RequestIds(Cors(Guard(api, policy=policy, respond=_refusal), policy=policy))


class Cors(CORSMiddleware):
    """CORS for the origins that the guard's policy names; requests of all others are for the guard to refuse."""

    def __init__(self, app: ASGIApp, *, policy: Callable[[], GuardPolicy]) -> None:
        exposed = ["x-request-id", "x-lmx-lab"]
        super().__init__(app, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=exposed)
        self._policy = policy

    def is_allowed_origin(self, origin: str) -> bool:
        return allows_origin(origin, self._policy())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        known = origin is not None and self.is_allowed_origin(origin)
        await (super().__call__ if known else self.app)(scope, receive, send)


def _refusal(error: LabError) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await errors.respond(error, request_id=scope["lmx_lab.request_id"])(scope, receive, send)

    return answer


class RequestIds:
    """Gives every request an id, in the scope and in the headers of its answer, with the server's name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request_id = scope["lmx_lab.request_id"] = f"req_{secrets.token_hex(8)}"
        headers = [(b"x-request-id", request_id.encode()), (b"x-lmx-lab", VERSION.encode())]

        async def send_with_id(message: Message) -> None:
            if message["type"].endswith((".response.start", "websocket.accept")):
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        await self._app(scope, receive, send_with_id)
