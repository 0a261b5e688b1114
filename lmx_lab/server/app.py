"""The ASGI application of the inference server, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI

from lmx_lab.broadcast import Feed
from lmx_lab.engine import Engine
from lmx_lab.http.guard import OPEN_PATHS, ASGIApp, GuardPolicy
from lmx_lab.http.middleware import VERSION, wrap_app
from lmx_lab.http.openapi import DescribedAPI
from lmx_lab.server.admin import admin_routes, listing_routes
from lmx_lab.server.chat import chat_routes
from lmx_lab.server.completions import completion_routes
from lmx_lab.server.embeddings import embedding_routes
from lmx_lab.server.encoding import EncodingService
from lmx_lab.server.health import health_routes
from lmx_lab.server.loading import Event, ModelLoader
from lmx_lab.server.metrics import Metrics, metrics_routes
from lmx_lab.server.naming import in_memory, without_paths
from lmx_lab.server.openapi import SHAPES, SOCKETS
from lmx_lab.server.pages import page_routes
from lmx_lab.server.rerank import rerank_routes
from lmx_lab.server.service import ChatService
from lmx_lab.server.swap import ModelSwap
from lmx_lab.server.websocket import socket_routes
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog
from lmx_lab.weights.hub.cache import cache_folder


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
        title="LMX Lab inference server",
        version=VERSION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        shapes=SHAPES,
        sockets=SOCKETS,
        key=("key", GuardPolicy.key_hint) if settings.api_key is not None else None,
        open_paths=OPEN_PATHS,
    )
    api.state.max_body_bytes = settings.max_body_bytes
    folders = [settings.models_folder, cache_folder(), *settings.model_folders]
    api.state.without_paths = lambda text: without_paths(
        text, [*folders, *(entry.path.parent for entry in in_memory(engine.snapshot))]
    )
    api.include_router(page_routes())
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
    return InferenceServer(
        asgi=wrap_app(api, policy),
        api=api,
        chat=chat,
        encoding=encoding,
        chat_as_is=ChatService(engine=engine, catalog=catalog, feed=feed, observe=metrics.observe),
        encoding_as_is=EncodingService(engine=engine, catalog=catalog, feed=feed, observe=metrics.observe_encoding),
        loader=loader,
        feed=feed,
    )
