"""What is on disk, what is loaded, load, unload, live metrics. Also GET /v1/models, the chat format's view of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from starlette.requests import HTTPConnection

from lmx_lab.broadcast import Feed
from lmx_lab.engine import Engine
from lmx_lab.engine.registry import ENGINES
from lmx_lab.engine.speeds import Speeds, kept_speeds, versions
from lmx_lab.errors import InvalidRequestError, ModelNotFoundError
from lmx_lab.http import guard
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.event_stream import EventStream
from lmx_lab.http.openapi import event_stream, failures, link
from lmx_lab.server.loading import Event, ModelLoader, check_admin
from lmx_lab.server.naming import ANY, check_unloads, shown_id, unknown_model
from lmx_lab.server.openapi import EVENTS, SWAPPED
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import LoadSpec, ModelEntry
from lmx_lab.weights import Catalog, Listing
from lmx_lab.weights.threads import in_thread
from lmx_lab.wire.admin import (
    Compute,
    EngineRecord,
    Heartbeat,
    LoadAnswer,
    LoadRequest,
    Memory,
    ModelCard,
    ModelCards,
    ModelEvent,
    ModelRecord,
    ModelRecords,
    Preference,
    Sample,
    Throughput,
    UnloadAnswer,
    UnloadRequest,
)

SAMPLE_S = 1.0
HEARTBEAT_S = 15.0
EXTRAS = {"models": "model", "requests": "request", "samples": "sample"}
FIRST_CARD = link("inference_get_model", "One of the models that are listed.", model="$response.body#/data/0/id")
FIRST_RECORD = link("admin_load", "Load one that is listed.", body={"model": "$response.body#/models/0/id"})
LOADED = {
    "model": link("inference_get_model", "The model that was loaded.", model="$response.body#/model"),
    "unload": link("admin_unload", "Unload it again.", body={"model": "$response.body#/model"}),
}
INCLUDE = (
    "What to add, separated by commas: `models` for the progress of loads (ModelEvent), "
    "`requests` for the end of every generation, embedding and rerank (RequestEvent), "
    "`samples` for all live figures every second (Sample)"
)


def admin_routes(
    *, engine: Engine, catalog: Catalog, loader: ModelLoader, feed: Feed[Event], lan_admin: bool
) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["admin"], route_class=StrictRoute)

    @router.get("/models", responses={200: {"links": {"load": FIRST_RECORD}}})
    async def models(request: Request) -> ModelRecords:
        """Every model on this disk that can be loaded, and which one is, and which engines run them. Only local callers
        see paths; for others the `path` of a model is its id.
        """
        found = await alisting(catalog, engine)
        if is_local(request):
            return found
        hide: Callable[[str], str] = request.app.state.without_paths
        return found.model_copy(
            update={
                "models": [_without_path(it) for it in found.models],
                "compute": found.compute and found.compute.model_copy(update={"detail": hide(found.compute.detail)}),
                "problem": found.problem and hide(found.problem),
            }
        )

    @router.post("/models/load", responses={200: {"links": LOADED}, **SWAPPED})
    async def load(body: LoadRequest, request: Request) -> LoadAnswer:
        """Load a model in the place of what is loaded; answers when it is done. Local callers may name a path."""
        local = is_local(request)
        check_admin(local=local, lan_admin=lan_admin)
        report = await loader.load(LoadSpec(**body.model_dump()), local=local)
        return LoadAnswer(model=report.model, load_time_ms=report.load_s * 1e3, vram_gb=report.memory_bytes / 1e9)

    @router.post("/models/unload", responses=SWAPPED)
    async def unload(request: Request, body: UnloadRequest | None = None) -> UnloadAnswer:
        """Unload the model; with none loaded nothing happens, and 0 GB are freed. Pinned models stay."""
        local = is_local(request)
        check_admin(local=local, lan_admin=lan_admin)
        if body is not None and body.model is not None:
            check_unloads(body.model, engine.snapshot, local=local)
        return UnloadAnswer(freed_vram_gb=await loader.unload() / 1e9)

    @router.get(
        "/events",
        response_class=Response,
        responses={
            200: event_stream(*EVENTS, description="Samples, heartbeats, and what `include` asked for; it never ends"),
            **failures(InvalidRequestError),
        },
    )
    async def events(
        request: Request, include: Annotated[str, Query(description=INCLUDE, examples=list(EXTRAS))] = ""
    ) -> EventStream:
        """Throughput and memory every second, a heartbeat every 15 s, as server-sent events without an end."""
        wanted = {_extra(name) for name in include.split(",") if name}
        hide = None if is_local(request) else request.app.state.without_paths
        return EventStream(_lines(engine, feed, wanted, hide))

    return router


def listing_routes(*, engine: Engine, catalog: Catalog) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["inference"])

    async def shown(request: Request) -> tuple[list[ModelCard], str | None]:
        local = is_local(request)
        found = await catalog.alisting()
        cards = [_card(entry, local=local) for entry in _with_loaded(found.entries, engine.snapshot)]
        return cards, found.problem if local or not found.problem else request.app.state.without_paths(found.problem)

    @router.get("", responses={200: {"links": {"model": FIRST_CARD}}})
    async def list_models(request: Request) -> ModelCards:
        """The models on this disk, as the chat format lists them."""
        cards, problem = await shown(request)
        return ModelCards(data=cards, problem=problem)

    @router.get("/{model:path}", responses=failures(ModelNotFoundError))
    async def get_model(model: str, request: Request) -> ModelCard:
        """One model on this disk, by its id."""
        for card in (await shown(request))[0]:
            if card.id == model:
                return card
        raise unknown_model(model, engine.snapshot, ANY)

    return router


def is_local(request: HTTPConnection) -> bool:
    """Whether the caller has this machine's rights; see ``guard.is_local``."""
    return guard.is_local(request.scope)


def listing(catalog: Catalog, engine: Engine) -> ModelRecords:
    """What the admin routes and a notebook show of models and engines. Reads files; bounded in time."""
    return _records(catalog.listing(), engine)


async def alisting(catalog: Catalog, engine: Engine) -> ModelRecords:
    """As ``listing``, on an event loop."""
    found = await catalog.alisting()
    return await in_thread(lambda: _records(found, engine))


def _records(found: Listing, engine: Engine) -> ModelRecords:
    now = engine.snapshot
    # The figures lie on the same disk, in general.
    speeds = kept_speeds(engine.settings) if found.problem is None else None
    rates = speeds.tokens_per_second if speeds is not None else {}
    return ModelRecords(
        models=records(found.entries, now),
        compute=compute(now),
        engines=[
            EngineRecord(name=name, version=version, tokens_per_second=rates.get(name))
            for name, version in versions().items()
        ],
        preference=_preference(speeds),
        problem=found.problem,
    )


def _preference(speeds: Speeds | None) -> Preference | None:
    if speeds is None:
        return None
    day = time.strftime("%Y-%m-%d", time.localtime(speeds.measured_at))
    return Preference(
        engine=speeds.preferred, model=speeds.model, measured_at=speeds.measured_at, detail=f"{speeds} (of {day})"
    )


def records(entries: Sequence[ModelEntry], now: EngineSnapshot) -> list[ModelRecord]:
    """The catalog as the admin routes and the notebook show it; what is in memory is in it, wherever it lies."""
    in_memory = {pinned.entry.path: pinned.memory_bytes for pinned in now.pinned}
    pins = set(in_memory)
    if now.entry is not None:
        in_memory[now.entry.path] = now.model_memory_bytes
    problems = {format: row.problem() for format, row in ENGINES.items()}
    return [
        ModelRecord(
            id=entry.id,
            path=str(entry.path),
            loaded=entry.path in in_memory,
            vram_gb=in_memory[entry.path] / 1e9 if entry.path in in_memory else None,
            format=entry.format,
            engine=ENGINES[entry.format].name,
            problem=problems[entry.format],
            kind=entry.kind,
            size_gb=entry.size_bytes / 1e9,
            quantization=entry.quantization,
            context_length=entry.context_length,
            pinned=entry.path in pins,
        )
        for entry in _with_loaded(entries, now)
    ]


def _with_loaded(entries: Sequence[ModelEntry], now: EngineSnapshot) -> list[ModelEntry]:
    """What is on the disk, and what is in memory from elsewhere."""
    known = {entry.path for entry in entries}
    held = [*(pinned.entry for pinned in now.pinned), *([now.entry] if now.entry else [])]
    return [*entries, *{entry.path: entry for entry in held if entry.path not in known}.values()]


def compute(now: EngineSnapshot) -> Compute | None:
    """What multiplies matrices, as the admin routes and the notebook show it."""
    if now.blas is None:
        return None
    blas = now.blas
    return Compute(blas=blas.name, detail=blas.detail, threads=blas.threads, gflops=blas.gflops)


def _without_path(record: ModelRecord) -> ModelRecord:
    """The record for callers that are not local."""
    model = shown_id(record.id, local=False)
    return record.model_copy(update={"id": model, "path": model})


def _card(entry: ModelEntry, *, local: bool) -> ModelCard:
    return ModelCard(id=shown_id(entry.id, local=local), created=entry.modified_at)


def _extra(name: str) -> str:
    if name not in EXTRAS:
        raise InvalidRequestError(f"include names {name!r}; there are {', '.join(EXTRAS)}", param="include")
    return EXTRAS[name]


async def _lines(
    engine: Engine, feed: Feed[Event], wanted: set[str], hide: Callable[[str], str] | None = None
) -> AsyncIterator[str]:
    """A sample a second, a heartbeat every 15 s, and in between what the watcher asked for.

    Args:
        hide: Takes paths out of messages; None for watchers that may see them.
    """
    started = time.monotonic()
    last, due, beat = engine.snapshot, started, started
    with feed.subscribe() as extras:
        while True:
            now = time.monotonic()
            if now >= due:
                snapshot = engine.snapshot
                for event in events_between(last, snapshot, SAMPLE_S + now - due):
                    yield event.model_dump_json()
                if "sample" in wanted:
                    yield sample(last, snapshot, SAMPLE_S + now - due).model_dump_json()
                gone = vanished(last, snapshot, idle_unload_s=engine.settings.idle_unload_s)
                if gone is not None and "model" in wanted:
                    yield _shown(gone, hide).model_dump_json()
                last, due = snapshot, now + SAMPLE_S
            if now >= beat:
                yield Heartbeat(uptime=engine.uptime_s).model_dump_json()
                beat = now + HEARTBEAT_S
            try:
                extra = await asyncio.wait_for(anext(extras), max(0.0, due - time.monotonic()))
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return
            if extra.type in wanted:
                yield _shown(extra, hide).model_dump_json()


def _shown(event: Event, hide: Callable[[str], str] | None) -> Event:
    if hide is None:
        return event
    changes = {"model": shown_id(event.model, local=False)}
    if isinstance(event, ModelEvent) and event.message is not None:
        changes["message"] = hide(event.message)
    return event.model_copy(update=changes)


def sample(before: EngineSnapshot, now: EngineSnapshot, elapsed_s: float) -> Sample:
    """All figures of the time between two snapshots."""

    def rate(of: Callable[[EngineSnapshot], int]) -> float:
        # An engine that was started anew counts from 0.
        return max(0, of(now) - of(before)) / elapsed_s

    return Sample(
        at=time.time(),
        decode_tokens_per_second=rate(lambda it: it.output_tokens),
        prompt_tokens_per_second=rate(lambda it: it.prompt_tokens - it.cached_tokens),
        encoded_tokens_per_second=rate(lambda it: it.encoded_tokens),
        active_requests=now.active_requests,
        queued_requests=now.queued_requests,
        memory_active_gb=now.memory_used_bytes / 1e9,
        memory_cache_gb=now.prefix_cache_bytes / 1e9,
        memory_peak_gb=now.memory_peak_bytes / 1e9,
        memory_total_gb=now.memory_total_bytes / 1e9,
    )


def events_between(before: EngineSnapshot, now: EngineSnapshot, elapsed_s: float) -> list[BaseModel]:
    """The figures that every watcher is told of the time between two snapshots."""
    # An engine that was started anew counts from 0.
    rate = max(0, now.output_tokens - before.output_tokens) / elapsed_s
    total = now.memory_total_bytes
    return [
        Throughput(
            tokens_per_second=rate,
            active_requests=now.active_requests + now.queued_requests,
            queued_requests=now.queued_requests,
        ),
        Memory(
            vram_used_gb=now.memory_used_bytes / 1e9,
            vram_total_gb=total / 1e9,
            pct=100 * now.memory_used_bytes / total if total else 0.0,
        ),
    ]


def vanished(before: EngineSnapshot, now: EngineSnapshot, *, idle_unload_s: float | None) -> ModelEvent | None:
    """The model that went away by itself between two snapshots; those that were asked to go, the loader tells."""
    if now.model is not None or now.unloaded_model is None or now.unload_cause not in ("idle", "memory"):
        return None
    known = (before.unloaded_model, before.unload_cause) == (now.unloaded_model, now.unload_cause)
    if known and before.model is None:
        return None
    message = "out of memory" if now.unload_cause == "memory" else f"idle for {idle_unload_s:g} s"
    return ModelEvent(model=now.unloaded_model, stage="unloaded", message=message)
