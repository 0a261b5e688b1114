"""Keep the timelines of the last requests and loads, and serve them at ``/admin/timeline``.

Neither texts nor tokens are kept.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from lmx_lab.engine import Caller
from lmx_lab.engine.lookup import public_id
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.errors import client_of
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import failures
from lmx_lab.server.requests import Part, Requests
from lmx_lab.values.models import ModelEvent
from lmx_lab.values.outputs import GenerationReport
from lmx_lab.values.timeline import ModelStage, ModelTimeline, RequestTimeline, ServerTimeline, phase_durations
from lmx_lab.wire.admin import PAGE_REQUESTS, TimelinePage


@dataclass(kw_only=True)
class _Change:
    """A load or an unload. Its times are seconds of ``time.perf_counter``."""

    timeline: ModelTimeline
    """The timeline until its last event."""
    began_at: float = field(default_factory=time.perf_counter)
    ended_at: float | None = None

    def until(self, now: float) -> ModelTimeline:
        """Return the timeline until its end, or until now."""
        elapsed_s = (now if self.ended_at is None else self.ended_at) - self.began_at
        stages = self.timeline.stages
        if stages:
            stages = (*stages[:-1], replace(stages[-1], duration_s=elapsed_s - stages[-1].start_s))
        return replace(self.timeline, total_s=elapsed_s, stages=stages)


class TimelineLog:
    """The timelines of the last requests of all clients, and of the last loads. It may be used on any thread.

    Args:
        requests: Keeps the requests.
        loads: Maximum number of loads and unloads.
        page_steps: Number of steps after which a page has no more requests; it has at least one.
    """

    def __init__(self, requests: Requests, *, loads: int = 64, page_steps: int = 20_000) -> None:
        self._requests = requests
        self._page_steps = page_steps
        self._changes: deque[_Change] = deque(maxlen=loads)
        self._lock = threading.Lock()
        """Protects ``_changes``: downloads report their progress on separate threads."""

    def observe_model(self, event: ModelEvent) -> None:
        """Record a stage of a load or unload."""
        with self._lock:
            kind: Literal["load", "unload"] = "unload" if event.stage in ("unloading", "unloaded") else "load"
            running = [each for each in self._changes if each.timeline.kind == kind and each.ended_at is None]
            for change in reversed(running):
                # For a download and for a failed load, ``model`` is the name that the caller used instead of the id.
                is_other_name = event.stage == "load" and change.timeline.stages[-1].name != "load"
                is_same = (event.stage == "failed" or is_other_name) and change is running[-1]
                if is_same or change.timeline.model == event.model:
                    break
            else:
                began = ModelTimeline(
                    kind=kind, model=event.model, at=time.time(), outcome="running", message="", total_s=0.0, stages=()
                )
                change = _Change(timeline=began)
                self._changes.append(change)
            now = time.perf_counter()
            timeline = replace(change.until(now), model=event.model)
            if event.stage in ("loaded", "unloaded", "failed"):
                change.ended_at = now
                timeline = replace(timeline, outcome=event.stage, message=event.message or "")
            elif not timeline.stages or timeline.stages[-1].name != event.stage:
                # The first stage may be recorded a little after the beginning.
                start_s = timeline.total_s if timeline.stages else 0.0
                timeline = replace(timeline, stages=(*timeline.stages, ModelStage(event.stage, start_s, 0.0)))
            change.timeline = timeline

    def read(self, last_s: float, *, most: int | None = None) -> ServerTimeline:
        """Return the requests that ran in the last ``last_s`` seconds, and the loads, oldest first.

        Args:
            most: Maximum number of requests; the newest are returned. None sets no limit.
        """
        now = time.perf_counter()
        parts = self._requests.last(now - last_s)[-most if most else 0 :]
        requests = tuple(_timeline(part, now) for part in parts)
        return ServerTimeline(requests=requests, models=self._models_since(now - last_s, now))

    def page(self, last_s: float, *, limit: int, before: int | None, scope: str | None = None) -> TimelinePage:
        """Return a page of the requests that ran in the last ``last_s`` seconds, newest first.

        The first page also has the loads, oldest first.

        Args:
            limit: Maximum number of requests.
            before: ``before`` of the previous page; None for the first page.
            scope: The caller whose requests are returned; None returns those of all.
        """
        now, steps = time.perf_counter(), 0
        parts = [
            part
            for part in self._requests.last(now - last_s)
            if (before is None or part.number < before) and scope in (None, part.caller.scope)
        ]
        requests: list[RequestTimeline] = []
        number = None
        while parts and len(requests) < limit and steps < self._page_steps:
            number = parts[-1].number
            requests.append(_timeline(parts.pop(), now))
            steps += len(requests[-1].steps)
        models = self._models_since(now - last_s, now) if before is None else ()
        return TimelinePage(requests=requests, models=list(models), before=number if parts else None)

    def _models_since(self, since: float, now: float) -> tuple[ModelTimeline, ...]:
        with self._lock:
            return tuple(
                change.until(now) for change in self._changes if change.ended_at is None or change.ended_at >= since
            )


def _timeline(part: Part, now: float) -> RequestTimeline:
    """Return the timeline of a generation until its end, or until now."""
    steps = () if part.steps is None else part.steps.steps()
    report = part.report if isinstance(part.report, GenerationReport) else None
    elapsed_s = (now if part.ended_at is None else part.ended_at) - part.began_at
    measured = None if report is None else (report.queue_s, report.prefill_s, report.decode_s)
    queue_s, prefill_s, decode_s = phase_durations(steps, elapsed_s=elapsed_s, report=measured)
    return RequestTimeline(
        request_id=part.caller.request_id or "",
        index=part.index,
        model=part.model,
        at=part.at,
        outcome=part.outcome or "running",
        code=part.code,
        stop_string=report is not None and report.stop_sequence is not None,
        prompt_tokens=part.prompt_tokens,
        cached_tokens=report.cached_tokens if report is not None else 0,
        output_tokens=sum(step.tokens for step in steps if step.kind == "decode"),
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        steps=steps,
        internal=part.caller.internal,
    )


def timeline_routes(timelines: TimelineLog) -> APIRouter:
    """Return the router of ``/admin/timeline``."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/timeline", response_model=TimelinePage, responses=failures(InvalidRequestError))
    async def timeline(
        request: Request,
        last_s: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 60.0,
        limit: Annotated[int, Query(ge=1, le=PAGE_REQUESTS)] = PAGE_REQUESTS,
        before: Annotated[int | None, Query(ge=1)] = None,
    ) -> Response:
        """Return the engines' steps for the requests in the last `last_s` seconds, newest first.

        Callers on the server's machine get the requests of all clients, others only their own. The first page also has
        the loads and unloads. If `before` of a page is not null, send its value to request the next page.
        """
        caller = Caller(local=is_local(request.scope), client=client_of(request))
        scope, hide = (None, None) if caller.local else (caller.scope, request.app.state.without_paths)

        def content() -> str:
            page = timelines.page(last_s, limit=limit, before=before, scope=scope)
            if hide is not None:
                page.requests = [replace(each, model=public_id(each.model, local=False)) for each in page.requests]
                page.models = [
                    replace(each, model=public_id(each.model, local=False), message=hide(each.message))
                    for each in page.models
                ]
            return page.model_dump_json()

        return Response(await asyncio.to_thread(content), media_type="application/json")

    return router
