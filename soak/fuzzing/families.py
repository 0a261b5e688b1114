"""Define the kinds of requests: how many, for which program, and which errors above 4xx their routes declare."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from soak.fuzzing import corpus
from soak.fuzzing.frames import SocketCase, chat_socket, event_socket, oversized
from soak.fuzzing.requests import Case, Headers, ValidRequest, endless_case, http_case, raw_case, too_large

TOKEN: Headers = [("authorization", "Bearer TOKEN")]
Refusals = frozenset[tuple[int, str]]
NOT_LOADED: Refusals = frozenset({(503, "no-model-loaded")})
"""The answer to a request that names a model on disk that is not loaded."""
BUSY: Refusals = frozenset({(503, "no-model-loaded"), (409, "model-busy")})
NONE: Refusals = frozenset()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of requests."""

    name: str
    count: int
    """Number of cases of a full run, which has 20,000 with MLX."""
    draw: Callable[[random.Random], Case | SocketCase]
    """Draws a case."""
    program: Literal["server", "daemon"] = "server"
    refusals: Refusals = NONE
    of_engine: bool = False
    """Whether an engine processes the requests, so that they are also sent with llama.cpp."""
    longest: Callable[[], Case | SocketCase] | None = None
    """Creates a request above the size limit, one for each batch."""


def _http(name: str, count: int, goods: tuple[ValidRequest, ...], refusals: Refusals = NOT_LOADED) -> Family:
    return Family(
        name=name,
        count=count,
        draw=lambda chance: http_case(chance, goods, []),
        refusals=refusals,
        of_engine=True,
        longest=lambda: too_large(goods[0], []),
    )


def families(model: str = corpus.MODEL) -> tuple[Family, ...]:
    """Return the families whose requests name a model."""
    named = partial(corpus.requests_naming, model)
    chats = [corpus.naming(model, body) for body in corpus.CHAT_BODIES]
    return (
        _http("chat", 2600, named(corpus.CHAT)),
        _http("completions", 2000, named(corpus.COMPLETIONS)),
        _http("responses", 1000, named(corpus.RESPONSES)),
        _http("messages", 1000, named(corpus.MESSAGES)),
        # A request without a prompt loads or unloads the model.
        _http("ollama", 800, named(corpus.OLLAMA), BUSY),
        _http("tokens", 200, named(corpus.TOKENS)),
        _http("embeddings", 2000, named(corpus.EMBEDDINGS)),
        _http("rerank", 1500, named(corpus.RERANK)),
        _http("admin", 1500, named(corpus.ADMIN), BUSY),
        Family(
            name="chat socket",
            count=2000,
            draw=lambda chance: chat_socket(chance, "/v1/chat/stream", chats),
            refusals=NOT_LOADED,
            of_engine=True,
            longest=lambda: oversized("/v1/chat/stream", []),
        ),
        Family(name="pages", count=200, draw=lambda chance: http_case(chance, corpus.PAGES, [])),
        Family(name="admin events", count=200, draw=lambda chance: endless_case(chance, corpus.SERVER_EVENTS)),
        Family(
            name="/v3",
            count=3500,
            program="daemon",
            draw=lambda chance: http_case(chance, corpus.DAEMON, TOKEN),
            longest=lambda: too_large(corpus.DAEMON[0], TOKEN),
        ),
        Family(
            name="/v3 events socket",
            count=1000,
            program="daemon",
            draw=lambda chance: event_socket(chance, "/v3/events", TOKEN, corpus.SESSIONS),
            longest=lambda: oversized("/v3/events", TOKEN),
        ),
        Family(name="no HTTP", count=300, draw=raw_case),
        Family(name="/v3 no HTTP", count=200, program="daemon", draw=raw_case),
    )
