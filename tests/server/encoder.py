"""A server around an engine that makes up vectors and scores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx2
import numpy as np

from lmx_lab.engine import EmbeddingRequest, Embeddings, ModelManager, Ranking, RerankRequest
from lmx_lab.errors import LabError
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.server import InferenceServer, create_server
from lmx_lab.settings import Settings
from lmx_lab.values.encoding import EncodeReport
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights import Catalog, Listing
from tests.server.conftest import ENTRY

EMBEDDER = replace(ENTRY, id="minilm", kind="embedding")
REPORT = EncodeReport(model="minilm", texts=2, tokens=7, queue_s=0.25, compute_s=0.5, peak_memory_bytes=1)


@dataclass(frozen=True)
class Shelf:
    """What is on the disk."""

    entries: tuple[ModelEntry, ...] = (EMBEDDER, ENTRY)

    async def alisting(self) -> Listing:
        return Listing(entries=self.entries)


@dataclass
class FakeEncoder:
    """An engine whose embeddings are the lengths of texts, or what the test says; so are its scores."""

    failure: LabError | Exception | None = None
    vectors: Any = None
    scores: Any = None
    endless: bool = False
    snapshot: EngineSnapshot = field(default_factory=lambda: EngineSnapshot(state="ready", entry=EMBEDDER))
    settings: Settings = field(default_factory=Settings)
    alive: bool = True
    uptime_s: float = 1.0
    asked: list[Any] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit_embedding(self, request: EmbeddingRequest) -> Answer:
        self._accept(request)
        made = [[len(item), 0.5] for item in request.inputs] if self.vectors is None else self.vectors
        return Answer(self, Embeddings(vectors=np.array(made, dtype=np.float32), report=REPORT))

    async def submit_rerank(self, request: RerankRequest) -> Answer:
        self._accept(request)
        made = [len(document) for document in request.documents] if self.scores is None else self.scores
        return Answer(self, Ranking(scores=np.array(made, dtype=np.float32), method="cosine", report=REPORT))

    def _accept(self, request: EmbeddingRequest | RerankRequest) -> None:
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure


@dataclass(frozen=True)
class Answer:
    """What comes of a request, at once or never."""

    manager: FakeEncoder
    made: Any

    async def result(self) -> Any:
        self.engine.begun.set()
        try:
            while self.engine.endless:
                await asyncio.Event().wait()
        finally:
            self.engine.given_up.set()
        return self.made


def server_of(manager: FakeEncoder, shelf: Shelf | None = None) -> InferenceServer:
    names = frozenset({"lab:80", "lab"})
    policy = GuardPolicy(hosts=names, local_hosts=names)
    return create_server(
        manager=cast(ModelManager, manager),
        catalog=cast(Catalog, shelf or Shelf()),
        settings=manager.settings,
        policy=lambda: policy,
    )


@asynccontextmanager
async def client_of(manager: FakeEncoder, shelf: Shelf | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(server_of(manager, shelf).asgi, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://lab") as client:
        yield client


async def post(manager: FakeEncoder, path: str, body: dict[str, Any], shelf: Shelf | None = None) -> httpx2.Response:
    async with client_of(manager, shelf) as client:
        return await client.post(path, json=body)


async def refused(
    manager: FakeEncoder, path: str, body: dict[str, Any], status: int = 400, shelf: Shelf | None = None
) -> dict[str, Any]:
    """The error; nothing of such a request has reached the engine unless the engine refused it."""
    response = await post(manager, path, body, shelf)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error
