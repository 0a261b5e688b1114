"""Keep the timelines of the last requests and loads, and serve them at ``/admin/timeline``.

Neither texts nor tokens are kept.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from lmx_lab.engine import Caller
from lmx_lab.engine.lookup import public_id
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.errors import client_of
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import failures
from lmx_lab.values.models import ModelEvent
from lmx_lab.values.outputs import GenerationReport
from lmx_lab.values.timeline import ModelStage, ModelTimeline, RequestTimeline, ServerTimeline, StepLog, phase_durations
from lmx_lab.wire.admin import PAGE_REQUESTS, TimelinePage


@dataclass(kw_only=True)
class _Request:
    number: int
    scope: str
    """The caller; see ``Caller``."""
    timeline: RequestTimeline
    """Has no steps, and none of the values that are computed from them."""
    ended_at: float | None = None
    report: GenerationReport | None = None


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
        requests: Maximum number of requests, running ones included. With the limit of each, 256 are at most 30 MB.
        loads: Maximum number of loads and unloads.
        page_steps: Number of steps after which a page has no more requests; it has at least one.
    """

    def __init__(self, *, requests: int = 256, loads: int = 64, page_steps: int = 20_000) -> None:
        self._limit = requests
        self._page_steps = page_steps
        self._entries: dict[StepLog, _Request] = {}
        self._numbers = count(1)
        self._changes: deque[_Change] = deque(maxlen=loads)
        self._lock = threading.Lock()
        """Protects ``_changes``: downloads report their progress on separate threads."""

    def add(self, steps: StepLog, *, caller: Caller, index: int, model: str, prompt_tokens: int) -> None:
        """Add an accepted request. If there are too many, the oldest one is dropped."""
        timeline = RequestTimeline(
            request_id=caller.request_id or "",
            index=index,
            model=model,
            at=time.time() - (time.perf_counter() - steps.arrived_at),
            outcome="running",
            code=None,
            stop_string=False,
            prompt_tokens=prompt_tokens,
            cached_tokens=0,
            output_tokens=0,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
            steps=(),
            internal=caller.internal,
        )
        self._entries[steps] = _Request(number=next(self._numbers), scope=caller.scope, timeline=timeline)
        while len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]

    def end(self, steps: StepLog, outcome: str, code: str | None, report: GenerationReport | None) -> None:
        """Record the end of a request."""
        if (entry := self._entries.get(steps)) is not None:
            entry.ended_at, entry.report = time.perf_counter(), report
            entry.timeline = replace(entry.timeline, outcome=outcome, code=code)

    def observe_model(self, event: ModelEvent) -> None:
        """Record a stage of a load or unload."""
        with self._lock:
            change, now = self._change_of(event), time.perf_counter()
            timeline = change.until(now)
            if event.stage in ("loaded", "unloaded", "failed"):
                change.ended_at = now
                timeline = replace(timeline, outcome=event.stage, message=event.message or "")
            elif not timeline.stages or timeline.stages[-1].name != event.stage:
                # The first stage may be recorded a little after the beginning.
                start_s = timeline.total_s if timeline.stages else 0.0
                timeline = replace(timeline, stages=(*timeline.stages, ModelStage(event.stage, start_s, 0.0)))
            change.timeline = timeline

    def _change_of(self, event: ModelEvent) -> _Change:
        """Return the load or unload to which a stage belongs; add it if this is its first stage."""
        kind: Literal["load", "unload"] = "unload" if event.stage in ("unloading", "unloaded") else "load"
        running = [change for change in self._changes if change.timeline.kind == kind and change.ended_at is None]
        for change in reversed(running):
            # For a download and for a failed load, ``model`` is the name that the caller used instead of the id.
            is_other_name = event.stage == "load" and change.timeline.stages[-1].name != "load"
            is_same = (event.stage == "failed" or is_other_name) and change is running[-1]
            if is_same or change.timeline.model == event.model:
                change.timeline = replace(change.timeline, model=event.model)
                return change
        timeline = ModelTimeline(
            kind=kind, model=event.model, at=time.time(), outcome="running", message="", total_s=0.0, stages=()
        )
        self._changes.append(_Change(timeline=timeline))
        return self._changes[-1]

    def read(self, last_s: float, *, most: int | None = None) -> ServerTimeline:
        """Return the requests that ran in the last ``last_s`` seconds, and the loads, oldest first.

        Args:
            most: Maximum number of requests; the newest are returned. None sets no limit.
        """
        now = time.perf_counter()
        entries = self._entries_since(now - last_s)
        requests = [_timeline(steps, entry, now) for steps, entry in entries[-most if most else 0 :]]
        return ServerTimeline(requests=tuple(requests), models=self._models_since(now - last_s, now))

    def page(self, last_s: float, *, limit: int, before: int | None, scope: str | None = None) -> TimelinePage:
        """Return a page of the requests that ran in the last ``last_s`` seconds, newest first.

        The first page also has the loads, oldest first.

        Args:
            limit: Maximum number of requests.
            before: ``before`` of the previous page; None for the first page.
            scope: The caller whose requests are returned; None returns those of all.
        """
        now, steps = time.perf_counter(), 0
        entries = [
            each
            for each in self._entries_since(now - last_s)
            if (before is None or each[1].number < before) and scope in (None, each[1].scope)
        ]
        requests: list[RequestTimeline] = []
        last = None
        while entries and len(requests) < limit and steps < self._page_steps:
            log, last = entries.pop()
            requests.append(_timeline(log, last, now))
            steps += len(requests[-1].steps)
        models = self._models_since(now - last_s, now) if before is None else ()
        following = last.number if entries and last is not None else None
        return TimelinePage(requests=requests, models=list(models), before=following)

    def _entries_since(self, since: float) -> list[tuple[StepLog, _Request]]:
        return [
            (steps, entry)
            for steps, entry in list(self._entries.items())
            if entry.ended_at is None or entry.ended_at >= since
        ]

    def _models_since(self, since: float, now: float) -> tuple[ModelTimeline, ...]:
        with self._lock:
            return tuple(
                change.until(now) for change in self._changes if change.ended_at is None or change.ended_at >= since
            )


def _timeline(log: StepLog, entry: _Request, now: float) -> RequestTimeline:
    steps, report = log.steps(), entry.report
    elapsed_s = (now if entry.ended_at is None else entry.ended_at) - log.arrived_at
    measured = None if report is None else (report.queue_s, report.prefill_s, report.decode_s)
    queue_s, prefill_s, decode_s = phase_durations(steps, elapsed_s=elapsed_s, report=measured)
    return replace(
        entry.timeline,
        stop_string=report is not None and report.stop_sequence is not None,
        cached_tokens=report.cached_tokens if report is not None else 0,
        output_tokens=sum(step.tokens for step in steps if step.kind == "decode"),
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        steps=steps,
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
        content = await asyncio.to_thread(
            lambda: _content(timelines.page(last_s, limit=limit, before=before, scope=scope), hide)
        )
        return Response(content, media_type="application/json")

    return router


def _content(page: TimelinePage, hide: Callable[[str], str] | None) -> str:
    if hide is not None:
        page.requests = [replace(each, model=public_id(each.model, local=False)) for each in page.requests]
        page.models = [
            replace(each, model=public_id(each.model, local=False), message=hide(each.message)) for each in page.models
        ]
    return page.model_dump_json()
