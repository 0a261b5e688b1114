"""Create the ASGI application of the inference server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Send
from starlette.types import Scope as RouteScope

from lmx_lab.broadcast import Feed
from lmx_lab.engine import ModelManager
from lmx_lab.extras import optional_imports
from lmx_lab.http.bodies import MODEL
from lmx_lab.http.guard import OPEN_PATHS, ASGIApp, GuardPolicy
from lmx_lab.http.middleware import VERSION, wrap_app
from lmx_lab.http.openapi import DescribedAPI
from lmx_lab.server.admin import admin_routes, listing_routes
from lmx_lab.server.chat import chat_routes
from lmx_lab.server.cohere import cohere_routes
from lmx_lab.server.completions import completion_routes
from lmx_lab.server.embeddings import embedding_routes
from lmx_lab.server.events import ServerEvent, event_routes
from lmx_lab.server.health import health_routes
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.lm_studio import lm_studio_routes
from lmx_lab.server.messages import messages_error, messages_routes
from lmx_lab.server.metrics import Metrics, metrics_routes
from lmx_lab.server.ollama import ollama_error, ollama_routes
from lmx_lab.server.ollama_models import ollama_model_routes
from lmx_lab.server.openapi import EXTRA_MODELS, SOCKETS
from lmx_lab.server.pages import page_routes
from lmx_lab.server.recording import Recording, SaveRecord
from lmx_lab.server.requests import Requests, running_routes
from lmx_lab.server.rerank import rerank_routes
from lmx_lab.server.responses import responses_routes
from lmx_lab.server.timelines import timeline_routes
from lmx_lab.server.tokens import token_routes
from lmx_lab.server.tracing import trace_routes
from lmx_lab.server.websocket import socket_routes
from lmx_lab.values.recording import RecordMode
from lmx_lab.weights.hub import cache_folder
from lmx_lab.weights.locations import program_folders

if TYPE_CHECKING:
    from lmx_lab.server.telemetry import RequestSpans

PREFIXES = frozenset({"v0", "v1", "openai", "api"})
"""First parts of paths that a base URL may lack, or have in addition."""
ROUTE = "lmx_lab.route"
"""Key in a request's scope: the route that answers it."""
# Matches an absolute path of at least two parts that is neither a route of this server nor a part of a URL.
_PATH = re.compile(r"(?<![\w:/.])/(?!(?:v\d|admin)/)(?:[^\s/'\":;,()]+/)+(?P<last>[^\s/'\":;,()]*)")


@dataclass(frozen=True, kw_only=True)
class InferenceServer:
    """The application, and the objects behind it, which the notebook uses directly from any event loop."""

    asgi: ASGIApp
    api: FastAPI
    inference: InferenceService
    manager: ModelManager
    feed: Feed[ServerEvent]
    spans: Sequence[RequestSpans] = ()
    """The exporters of requests as spans; empty if requests are not exported."""

    def open(self) -> None:
        """Export spans again after ``close``."""
        for each in self.spans:
            each.open()

    def close(self) -> None:
        """Send the remaining spans. Called after all requests have ended; blocks for a few seconds at most.
        Idempotent.
        """
        for each in self.spans:
            each.close()


def create_server(
    *,
    manager: ModelManager,
    policy: Callable[[], GuardPolicy],
    save_record: SaveRecord = lambda make, entry: None,
) -> InferenceServer:
    """Create the application for a model manager and its settings, with routes and middleware. Does not start anything.

    Args:
        policy: Returns the guard's policy; called for each request, because the port is not known yet.
        save_record: Stores the records of the requests that the setting ``record`` selects.

    Raises:
        InvalidRequestError: requests cannot be exported as the setting ``otel`` requires.
    """
    settings = manager.settings
    feed: Feed[ServerEvent] = Feed()
    manager.add_observer(feed.publish)
    manager.budget.add_observer(feed.publish)
    metrics = Metrics(manager)
    spans: list[RequestSpans] = []
    if settings.otel != "off":
        with optional_imports(f"otel={settings.otel}"):
            # Imported here, because the SDK is optional.
            from lmx_lab.server.telemetry import RequestSpans
        spans.append(RequestSpans(content=settings.otel == "content"))
    requests = Requests(
        feed,
        observers=[metrics.observe, *(each.observe for each in spans)],
        exchange_observers=[each.observe_exchange for each in spans],
    )
    inference = InferenceService(
        manager=manager,
        requests=requests,
        recording=Recording(cast(RecordMode, settings.record), save_record, dtype=settings.dtype),
        keep_answers=settings.otel == "content",
    )
    manager.add_observer(inference.timelines.observe_model)
    api = DescribedAPI(
        title="LMX Lab inference server",
        version=VERSION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        extra_models=EXTRA_MODELS,
        sockets=SOCKETS,
        key=("key", GuardPolicy.key_hint) if settings.api_key is not None else None,
        open_paths=OPEN_PATHS,
    )
    api.state.max_body_bytes = settings.max_body_bytes
    folders = [settings.models_folder, cache_folder(), *settings.model_folders, *(it for _, it in program_folders())]
    api.state.without_paths = lambda text: without_paths(
        text, [*folders, *(entry.path.parent for entry in manager.snapshot.entries)]
    )
    api.include_router(page_routes(manager))
    api.include_router(health_routes(manager))
    api.include_router(chat_routes(inference))
    api.include_router(completion_routes(inference))
    api.include_router(messages_routes(inference))
    api.include_router(cohere_routes(inference))
    api.include_router(responses_routes(inference))
    api.include_router(ollama_routes(inference))
    api.include_router(ollama_model_routes(manager))
    api.include_router(lm_studio_routes(manager))
    api.include_router(token_routes(manager))
    api.include_router(embedding_routes(inference))
    api.include_router(rerank_routes(inference))
    api.include_router(socket_routes(inference, max_body_bytes=settings.max_body_bytes))
    api.include_router(listing_routes(manager))
    api.include_router(admin_routes(manager))
    api.include_router(event_routes(manager=manager, feed=feed))
    api.include_router(running_routes(requests))
    api.include_router(timeline_routes(inference.timelines))
    api.include_router(trace_routes(manager))
    api.include_router(metrics_routes(metrics))
    api.router.routes.append(OtherPaths(api.routes))
    asgi = wrap_app(
        api,
        policy,
        observer=requests,
        error_forms={"/v1/messages": messages_error, "/api/": ollama_error},
    )
    return InferenceServer(asgi=asgi, api=api, inference=inference, manager=manager, feed=feed, spans=spans)


def without_paths(text: str, folders: Iterable[Path] = ()) -> str:
    """Return the text with each absolute path reduced to its last part.

    Args:
        folders: Folders whose paths may contain spaces. Files in them keep their path relative to the folder.
    """
    for folder in sorted(map(str, folders), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return _PATH.sub(lambda match: match["last"] or "(a folder)", text)


class OtherPaths(BaseRoute):
    """The last route, which passes a request to the route with the most similar path.

    Clients build paths from a base URL with or without ``/v1``, and llama.cpp's server has most of its routes with and
    without ``/v1``. Clients use HEAD to check whether a server is available; the route for GET answers it.

    Args:
        routes: All other routes.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = list(routes)

    def matches(self, scope: RouteScope) -> tuple[Match, RouteScope]:
        prefix = scope.get("root_path", "")
        path = scope["path"].removeprefix(prefix)
        partial: tuple[Match, RouteScope] = (Match.NONE, {})
        deployment = DEPLOYMENT.match(_single_slashes(path))
        is_head = scope.get("method") == "HEAD"
        for similar in (*((path,) if is_head else ()), *similar_paths(path)):
            changed = {"path": prefix + similar, MODEL: deployment["model"] if deployment is not None else None}
            for route in self._routes:
                match, found = route.matches({**scope, **changed, **({"method": "GET"} if is_head else {})})
                if match is Match.FULL:
                    return match, {**found, **changed, ROUTE: route}
                if match is Match.PARTIAL and partial[0] is Match.NONE:
                    partial = match, {**found, **changed, ROUTE: route}
        return partial

    async def handle(self, scope: RouteScope, receive: Receive, send: Send) -> None:
        route: BaseRoute = scope[ROUTE]
        if scope.get("method") == "HEAD":
            # A copy, because the HTTP server reads the method to omit the body.
            await route.handle({**scope, "method": "GET"}, receive, _end_at_body(send))
        else:
            await route.handle(scope, receive, send)


def _end_at_body(send: Send) -> Send:
    """Return a function that ends the response where its body begins, because a stream may have no end."""
    has_ended = False

    async def send_head(message: Message) -> None:
        nonlocal has_ended
        if not has_ended:
            has_ended = message["type"] == "http.response.body"
            await send({**message, "more_body": False} if has_ended else message)

    return send_head


DEPLOYMENT = re.compile("^/openai/deployments/(?P<model>.+?)(?=/(?:chat|completions|embeddings|responses)(?:/|$))")
"""The beginning of the paths of Azure's service. They have the name of the model, which replaces that in the body."""


OTHER_NAME = re.compile("/reranking$")
"""The end of a path that llama.cpp's server has in addition to ``/rerank``."""


def _single_slashes(path: str) -> str:
    return re.sub("/+", "/", path)


def similar_paths(path: str) -> Iterator[str]:
    """Yield other forms of a path: without empty parts, and with fewer prefixes or with ``/v1`` at the beginning."""
    similar = OTHER_NAME.sub("/rerank", DEPLOYMENT.sub("", _single_slashes(path)).rstrip("/"))
    # Limited, because each path is compared with those of all routes.
    for _ in range(3):
        if not similar:
            return
        if similar != path:
            yield similar
        yield f"/v1{similar}"
        first, slash, rest = similar[1:].partition("/")
        if first not in PREFIXES:
            return
        similar = slash + rest
