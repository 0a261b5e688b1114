"""A server whose manager is a fake that returns the vectors and scores that a test sets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import numpy as np

from lmx_lab.engine import Caller, EmbeddingRequest, Embeddings, ModelManager, Ranking, RerankRequest
from lmx_lab.errors import LabError
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.server import InferenceServer, create_server
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import ModelEvent
from lmx_lab.values.outputs import EncodeReport
from lmx_lab.weights import Catalog
from tests.support.models import TINY_ENTRY

EMBEDDER = replace(TINY_ENTRY, id="minilm", kind="embedding")
REPORT = EncodeReport(model="minilm", texts=2, tokens=7, queue_s=0.25, compute_s=0.5, peak_memory_bytes=1)


@dataclass
class FakeEncoder:
    """A manager that returns the vectors and scores that a test sets, or the lengths of the texts."""

    failure: LabError | Exception | None = None
    vectors: Any = None
    scores: Any = None
    endless: bool = False
    snapshot: EngineSnapshot = field(default_factory=lambda: EngineSnapshot(state="ready", entry=EMBEDDER))
    catalog: Catalog = field(default_factory=lambda: Catalog(Settings()))
    settings: Settings = field(default_factory=Settings)
    alive: bool = True
    uptime_s: float = 1.0
    requests: list[Any] = field(default_factory=list)
    """The requests, without their callers."""
    callers: list[Caller] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add_observer(self, observer: Callable[[ModelEvent], None]) -> None:
        """Do nothing, because this manager does not load models."""

    def model_for(self, name: str | None, kinds: Any, *, local: bool) -> Any:
        return SimpleNamespace(entry=self.snapshot.entry)

    async def submit_embedding(self, request: EmbeddingRequest) -> PendingResult:
        self._accept(request)
        values = [[len(item), 0.5] for item in request.inputs] if self.vectors is None else self.vectors
        return PendingResult(self, Embeddings(vectors=np.array(values, dtype=np.float32), report=REPORT))

    async def submit_rerank(self, request: RerankRequest) -> PendingResult:
        self._accept(request)
        values = [len(document) for document in request.documents] if self.scores is None else self.scores
        return PendingResult(self, Ranking(scores=np.array(values, dtype=np.float32), method="cosine", report=REPORT))

    def _accept(self, request: EmbeddingRequest | RerankRequest) -> None:
        self.requests.append(replace(request, caller=Caller()))
        self.callers.append(request.caller)
        if self.failure is not None:
            raise self.failure


@dataclass(frozen=True)
class PendingResult:
    """The result of a request, which is available at once or never."""

    manager: FakeEncoder
    value: Any

    async def result(self) -> Any:
        self.manager.started.set()
        try:
            while self.manager.endless:
                await asyncio.Event().wait()
        finally:
            self.manager.ended.set()
        return self.value


def server_of(manager: FakeEncoder) -> InferenceServer:
    names = frozenset({"lab:80", "lab"})
    policy = GuardPolicy(hosts=names, local_hosts=names)
    return create_server(
        manager=cast(ModelManager, manager),
        policy=lambda: policy,
    )


@asynccontextmanager
async def client_of(manager: FakeEncoder) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(server_of(manager).asgi, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://lab") as client:
        yield client


class _Current:
    """The manager of the newest request."""

    manager: FakeEncoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)


@functools.cache
def _shared_client() -> tuple[_Current, httpx2.AsyncClient]:
    """Return a client of one server for all requests, because defining the routes takes most of the time of a test."""
    current = _Current()
    current.manager = FakeEncoder()
    transport = httpx2.ASGITransport(server_of(cast(FakeEncoder, current)).asgi, raise_app_exceptions=False)
    return current, httpx2.AsyncClient(transport=transport, base_url="http://lab")


async def post(manager: FakeEncoder, path: str, body: dict[str, Any]) -> httpx2.Response:
    """Send a request to a server with default settings and this manager."""
    current, client = _shared_client()
    assert manager.settings == current.settings
    current.manager = manager
    return await client.post(path, json=body)


async def refused(manager: FakeEncoder, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """Send a request that must be refused, and return the error."""
    response = await post(manager, path, body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error
