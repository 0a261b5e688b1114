"""The route ``GET /admin/events``: live metrics, and optionally the progress of loads and the ends of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from operator import attrgetter
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from lmx_lab.broadcast import Feed
from lmx_lab.engine import Caller, ModelManager
from lmx_lab.engine.lookup import public_id, public_unloading
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.errors import client_of
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import event_stream, failures
from lmx_lab.http.streaming import EventStream, data_line
from lmx_lab.server.openapi import EVENTS
from lmx_lab.values.engine import COUNTERS, EngineSnapshot, PressureEvent, TokenTotals
from lmx_lab.values.models import ModelEvent
from lmx_lab.wire.admin import Heartbeat, Memory, RequestEvent, Sample, Throughput

ServerEvent = ModelEvent | RequestEvent | PressureEvent
SAMPLE_S = 1.0
"""Time between two samples."""
EXTRAS = {"models": "model", "requests": "request", "samples": "sample", "pressure": "pressure"}
"""The type of event that each name in ``include`` adds."""
INCLUDE = (
    "What to add, separated by commas: `models` for the progress of loads (ModelEvent), "
    "`requests` for the end of every generation, embedding and rerank (RequestEvent); callers on other machines get "
    "those of their own requests, "
    "`samples` for all metrics every second (Sample), "
    "`pressure` for the beginning and the end of a shortage of memory (PressureEvent)"
)


def event_routes(*, manager: ModelManager, feed: Feed[ServerEvent]) -> APIRouter:
    """Return the router of ``/admin/events``."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get(
        "/events",
        response_class=Response,
        responses={
            200: event_stream(
                *EVENTS, description="Metrics, heartbeats and the events that `include` adds, without an end"
            ),
            **failures(InvalidRequestError),
        },
    )
    async def events(
        request: Request, include: Annotated[str, Query(description=INCLUDE, examples=list(EXTRAS))] = ""
    ) -> EventStream:
        """Stream throughput and memory every second and a heartbeat every 15 s as server-sent events."""
        names = [name for name in include.split(",") if name]
        if unknown := [name for name in names if name not in EXTRAS]:
            raise InvalidRequestError(
                f"include contains {unknown[0]!r}; the names are {', '.join(EXTRAS)}", param="include"
            )
        included = {EXTRAS[name] for name in names}
        caller = Caller(local=is_local(request.scope), client=client_of(request))
        hide = None if caller.local else request.app.state.without_paths
        return EventStream(_lines(manager, feed, included, caller.scope, hide))

    return router


async def _lines(
    manager: ModelManager,
    feed: Feed[ServerEvent],
    included: set[str],
    scope: str = "",
    hide: Callable[[str], str] | None = None,
) -> AsyncIterator[str]:
    """Yield metrics every second, a heartbeat every 15 s, and the included events when they occur, as JSON.

    Args:
        included: Types of the events to add.
        scope: The caller.
        hide: Removes paths from messages; None for clients that may see paths, and the ends of all requests.
    """
    started = time.monotonic()
    last, due, beat = manager.snapshot, started, started
    with feed.subscribe() as extras:
        while True:
            now = time.monotonic()
            if now >= due:
                snapshot = manager.snapshot
                for event in events_between(last, snapshot, SAMPLE_S + now - due):
                    yield data_line(event.model_dump_json())
                if "sample" in included:
                    yield data_line(sample(last, snapshot, SAMPLE_S + now - due).model_dump_json())
                last, due = snapshot, now + SAMPLE_S
            if now >= beat:
                yield data_line(Heartbeat(uptime=manager.uptime_s).model_dump_json())
                beat = now + 15
            try:
                extra = await asyncio.wait_for(anext(extras), max(0.0, due - time.monotonic()))
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return
            is_of_another = hide is not None and isinstance(extra, RequestEvent) and extra.scope != scope
            if extra.type not in included or is_of_another:
                continue
            if hide is not None and not isinstance(extra, PressureEvent):
                model = public_id(extra.model, local=False)
                if isinstance(extra, ModelEvent):
                    extra = replace(
                        extra,
                        model=model,
                        message=extra.message and hide(extra.message),
                        unloading=extra.unloading and public_unloading(extra.unloading),
                    )
                else:
                    extra = extra.model_copy(update={"model": model})
            yield data_line(to_json(extra).decode())


def sample(before: EngineSnapshot, now: EngineSnapshot, elapsed_s: float) -> Sample:
    """Return all metrics of the time between two snapshots. The rate of a counter is in ``<counter>_per_second``."""

    def rate(count: Callable[[TokenTotals], int]) -> float:
        # Not less than 0: when the engine is started again, its counts begin at 0.
        return max(0, count(now.totals) - count(before.totals)) / elapsed_s

    rates = {f"{name}_per_second": rate(attrgetter(name)) for name in COUNTERS}
    rates["decode_tokens_per_second"] = rates["output_tokens_per_second"]
    rates["prompt_tokens_per_second"] = rate(lambda it: it.prompt_tokens - it.cached_tokens)
    return Sample(
        at=time.time(),
        **{name: value for name, value in rates.items() if name in Sample.model_fields},
        active_requests=now.active_requests,
        queued_requests=now.queued_requests,
        memory_active_gb=now.memory_used_bytes / 1e9,
        memory_cache_gb=now.prefix_cache_bytes / 1e9,
        memory_peak_gb=now.memory_peak_bytes / 1e9,
        memory_total_gb=now.memory_total_bytes / 1e9,
        memory_pressure=now.memory_pressure,
        memory_freed_gb=now.memory_freed_bytes / 1e9,
    )


def events_between(before: EngineSnapshot, now: EngineSnapshot, elapsed_s: float) -> list[BaseModel]:
    """Return the events about the time between two snapshots that every client receives."""
    # Not less than 0: when the engine is started again, its counts begin at 0.
    rate = max(0, now.totals.output_tokens - before.totals.output_tokens) / elapsed_s
    total = now.memory_total_bytes
    return [
        Throughput(tokens_per_second=rate, active_requests=now.requests, queued_requests=now.queued_requests),
        Memory(
            vram_used_gb=now.memory_used_bytes / 1e9,
            vram_total_gb=total / 1e9,
            pct=100 * now.memory_used_bytes / total if total else 0.0,
        ),
    ]
