"""The requests of a server, each with one start and one end.

Running requests are listed at ``/admin/requests`` and can be stopped. The last ones are kept for ``/admin/timeline``.
Each end is logged and reported once.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from lmx_lab.broadcast import Feed
from lmx_lab.engine import Answer, Caller, EmbeddingRequest, GenerationRequest, RerankRequest
from lmx_lab.engine.lookup import public_id
from lmx_lab.engine.stream import Outcome
from lmx_lab.errors import LabError, NotFoundError, RequestStoppedError, counted
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.errors import client_of
from lmx_lab.http.guard import Scope, is_local
from lmx_lab.http.openapi import BODY, failures, link
from lmx_lab.server.events import ServerEvent
from lmx_lab.values.outputs import Delta, EncodeReport, GenerationReport
from lmx_lab.values.timeline import StepLog
from lmx_lab.wire.admin import (
    RequestEvent,
    RequestKind,
    RunningRequest,
    RunningRequests,
    StopRequest,
    StopRequestAnswer,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
FIRST = link("admin_stop", "Stop the oldest of these requests.", body={"id": "$response.body#/requests/0/id"})
READY_PATHS = ("/readyz", "/health")


@dataclass(eq=False, kw_only=True)
class Part:
    """A part of a request: the wait for its answers, one of these answers, an embedding or a rerank.

    It contains neither texts nor tokens. Times are seconds of ``time.perf_counter``.
    """

    number: int
    """Parts that began later have larger numbers."""
    id: str
    """Id of the request, shared by all of its parts. Requests of the notebook get one here."""
    caller: Caller
    kind: RequestKind
    model: str
    index: int = 0
    """Index of the answer among those to the request."""
    at: float = field(default_factory=time.time)
    """Unix time of ``began_at``."""
    began_at: float = field(default_factory=time.perf_counter)
    steps: StepLog | None = None
    """The engine's steps for an answer."""
    answer: Callable[[], Answer | None] = lambda: None
    prompt_tokens: int = 0
    cancel: Callable[[], object] | None = None
    """Cancels the wait; None for an answer."""
    is_stopped: bool = False
    ended_at: float | None = None
    outcome: Outcome | None = None
    """How it ended; None while it runs."""
    code: str | None = None
    """Code of the error with which it ended."""
    report: GenerationReport | EncodeReport | None = None
    """The engine's report; None until its end, and if it failed or was cancelled."""

    def stop(self) -> None:
        """End it with an error. May be called on any thread."""
        self.is_stopped = True
        if self.cancel is not None:
            self.cancel()
        elif (answer := self.answer()) is not None:
            answer.fail(RequestStoppedError())


@dataclass(frozen=True, kw_only=True)
class RequestEnd:
    """The end of a generation, an embedding or a rerank. A refused request ends with an error and without a report."""

    event: RequestEvent
    """The event for clients of ``/admin/events``. Its id is empty for requests of the notebook."""
    report: GenerationReport | EncodeReport | None = None
    """The engine's report; None if the request failed or was cancelled before its end."""
    steps: StepLog | None = None
    """The engine's steps for the generation; None if the request was refused, or is not a generation."""
    request: GenerationRequest | EmbeddingRequest | RerankRequest
    """The request to the engine. All choices of one prompt have the same one."""
    deltas: Sequence[Delta] = ()
    """The parts of the answer that were delivered; empty unless they are kept."""
    began_at: float = field(default_factory=time.perf_counter)
    """Value of ``time.perf_counter`` when the request arrived."""
    ended_at: float = field(default_factory=time.perf_counter)
    in_exchange: bool = False
    """Whether it belongs to a running exchange, whose observers get it too."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request over HTTP or a WebSocket, from its arrival to the end of its response."""

    scope: Scope
    began_at: float = field(default_factory=time.perf_counter)
    ends: list[RequestEnd] = field(default_factory=list)
    """The ends of its generations, embeddings and reranks up to now."""


Observer = Callable[[RequestEnd], None]
"""Called once at the end of each generation, embedding and rerank."""
ExchangeObserver = Callable[[Exchange, int | None], None]
"""Called at the end of each exchange with the HTTP status; None if the client disconnected before the response."""


class Requests:
    """The requests of one server. It may be used on any thread.

    Args:
        feed: Receives a ``RequestEvent`` at the end of each generation, embedding and rerank.
        observers: Called after that.
        exchange_observers: Called at the end of each exchange.
        kept: Number of generations that are kept, running ones included. With the limit of the steps of each, 256 are
            at most 30 MB.
    """

    def __init__(
        self,
        feed: Feed[ServerEvent],
        *,
        observers: Sequence[Observer] = (),
        exchange_observers: Sequence[ExchangeObserver] = (),
        kept: int = 256,
    ) -> None:
        self._feed = feed
        self._observers = observers
        self._exchange_observers = exchange_observers
        self._numbers = count(1)
        self._running: dict[Part, None] = {}
        """The parts that can be stopped, in the order in which they began."""
        self._last: deque[Part] = deque(maxlen=kept)
        self._exchanges: dict[str, Exchange] = {}
        """The running exchanges by the id of their request."""

    # Parts

    def begin(self, caller: Caller, *, kind: RequestKind, model: str, index: int = 0) -> Part:
        """Return the part for a request that was received. It is listed while ``wait`` waits for its work.

        Args:
            model: Id of the model, as far as it is known.
            index: Index of its first answer.
        """
        number = next(self._numbers)
        id_ = caller.request_id or f"lab_{number}"
        return Part(number=number, id=id_, caller=caller, kind=kind, model=model, index=index)

    async def wait(self, part: Part, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work of a request. Cancelling the wait cancels the work.

        Raises:
            RequestStoppedError: it was stopped.
        """
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        part.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        self._running[part] = None
        try:
            result = await task
        except asyncio.CancelledError:
            if not part.is_stopped:
                raise
        finally:
            del self._running[part]
        # The work may have ended when it was stopped.
        if part.is_stopped:
            raise RequestStoppedError
        return result

    def accept(self, part: Part, answers: Sequence[Answer]) -> list[Part]:
        """Return a part for each answer to a request that was accepted, in place of the one that has waited."""
        parts = []
        for index, answer in enumerate(answers, part.index):
            each = Part(
                number=next(self._numbers),
                id=part.id,
                caller=part.caller,
                kind=part.kind,
                model=answer.model,
                index=index,
                at=part.at + answer.steps.arrived_at - part.began_at,
                began_at=answer.steps.arrived_at,
                steps=answer.steps,
                # An answer without a reader is cancelled, so nothing else may refer to it.
                answer=weakref.ref(answer),
                prompt_tokens=len(answer.prompt),
            )
            parts.append(each)
        self._running |= dict.fromkeys(parts)
        self._last += parts
        return parts

    def end(
        self,
        part: Part,
        request: GenerationRequest | EmbeddingRequest | RerankRequest,
        outcome: Outcome,
        code: str | None = None,
        *,
        report: GenerationReport | EncodeReport | None = None,
        tokens: int = 0,
        deltas: Sequence[Delta] = (),
    ) -> None:
        """Record and report the end of a part.

        Args:
            tokens: Number of generated tokens that were delivered, for the event of a part without a report.
        """
        self._running.pop(part, None)
        part.ended_at, part.outcome, part.code, part.report = time.perf_counter(), outcome, code, report
        speed = ttft_s = 0.0
        prompt_tokens = part.prompt_tokens
        if isinstance(report, GenerationReport):
            tokens, speed, ttft_s = report.output_tokens, report.tokens_per_second, report.ttft_s
        elif report is not None:
            prompt_tokens, speed, ttft_s = report.tokens, report.tokens_per_second, report.total_s
        event = RequestEvent(
            kind=part.kind,
            scope=part.caller.scope,
            request_id=part.caller.request_id or "",
            index=part.index,
            model=part.model,
            finish_reason=outcome,
            code=code,
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
            tokens_per_second=speed,
            ttft_ms=ttft_s * 1e3,
        )
        exchange = self._exchanges.get(event.request_id)
        end = RequestEnd(
            event=event,
            report=report,
            steps=part.steps,
            request=request,
            deltas=deltas,
            began_at=part.began_at,
            ended_at=part.ended_at,
            in_exchange=exchange is not None,
        )
        if exchange is not None:
            exchange.ends.append(end)
        self._feed.publish(event)
        for observe in self._observers:
            observe(end)

    def fail(
        self, part: Part, request: GenerationRequest | EmbeddingRequest | RerankRequest, error: BaseException
    ) -> None:
        """Record and report the end of a request that was refused or cancelled, or that failed."""
        if isinstance(error, asyncio.CancelledError):
            self.end(part, request, "cancelled")
        else:
            self.end(part, request, "error", getattr(error, "code", LabError.code))

    def last(self, since: float) -> list[Part]:
        """Return the last generations, oldest first.

        Args:
            since: Time of ``time.perf_counter``. Generations that ended before it are left out.
        """
        return [part for part in list(self._last) if part.ended_at is None or part.ended_at >= since]

    def read(self, scope: str | None = None) -> list[RunningRequest]:
        """Return the running requests, oldest first.

        Args:
            scope: The caller whose requests are returned; None returns those of all.
        """
        now = time.perf_counter()
        requests: dict[str, list[Part]] = {}
        for part in list(self._running):
            # The client of an answer that has ended may still read it.
            has_ended = (answer := part.answer()) is not None and answer.ended
            if scope in (None, part.caller.scope) and not has_ended:
                requests.setdefault(part.id, []).append(part)
        found = []
        for parts in requests.values():
            first = parts[0]
            answers = [answer for part in parts if (answer := part.answer()) is not None]
            # A request is queued until one of its answers begins. Embeddings and reranks do not report when they begin.
            is_queued = first.kind in ("chat", "internal") and all(answer.progress is None for answer in answers)
            request = RunningRequest(
                id=first.id,
                client=first.caller.client,
                kind=first.kind,
                model=first.model,
                state="queued" if is_queued else "running",
                age_s=now - min(part.began_at for part in parts),
                # All choices of a prompt have the same request.
                prompt_tokens=sum({id(answer.request): len(answer.prompt) for answer in answers}.values()),
                completion_tokens=sum(answer.tokens for answer in answers),
            )
            found.append(request)
        return sorted(found, key=lambda request: -request.age_s)

    def stop(self, name: str, scope: str | None = None) -> str:
        """Stop a request, which ends with an error, and return its id.

        Args:
            name: The id, or a unique beginning of it.
            scope: The caller whose requests may be stopped; None stops those of all.

        Raises:
            NotFoundError: no running request, or several, have this id.
        """
        ids = [request.id for request in self.read(scope)]
        found = [name] if name in ids else [each for each in ids if each.startswith(name)]
        if len(found) != 1:
            problem = f"{len(found)} running requests have ids" if found else "no running request has an id"
            raise NotFoundError(
                f"{problem} that begin{'' if found else 's'} with {name!r:.80}; GET /admin/requests, lab.clients() and "
                "lmx-lab ps list the ids",
                param="id",
            )
        for part in list(self._running):
            if part.id == found[0]:
                part.stop()
        return found[0]

    # Exchanges, which ``http.middleware`` reports

    def begin_exchange(self, scope: Scope) -> None:
        # Without a reader, a connection with many requests would only collect their ends.
        if self._exchange_observers or log.isEnabledFor(logging.INFO):
            self._exchanges[scope["lmx_lab.request_id"]] = Exchange(scope=scope)

    def end_exchange(self, scope: Scope, status: int | None) -> None:
        exchange = self._exchanges.pop(scope["lmx_lab.request_id"], None)
        if exchange is not None:
            _log(exchange, status)
            for observe in self._exchange_observers:
                observe(exchange, status)


# The log of requests, whose lines ``lmx-lab serve`` prints


def _log(exchange: Exchange, status: int | None) -> None:
    """Log a line for each end of an exchange, or one for the exchange if it has none.

    ``GET`` requests, such as those of panels, are logged only if they fail. Those of ``/readyz`` and ``/health`` are
    never logged, because their response is 503 while no model is loaded.
    """
    scope = exchange.scope
    is_read = scope.get("method") in ("GET", "HEAD", "OPTIONS")
    if not exchange.ends and is_read and (status is None or status < 400 or scope["path"] in READY_PATHS):
        return
    if status is None:
        shown_status = "the client disconnected"
    else:
        is_known = status in HTTPStatus._value2member_map_
        shown_status = f"{status} {HTTPStatus(status).phrase}" if is_known else str(status)
    client = scope["client"][0] if scope.get("client") else "unknown client"
    route = f"{scope.get('method', 'WebSocket')} {scope['path'][:80]}"
    lines = []
    for end in exchange.ends:
        event = end.event
        if event.finish_reason == "error":
            lines.append("  ".join(part for part in (event.model, shown_status, event.code) if part))
            continue
        parts = [event.model, f"{counted(event.prompt_tokens, 'token')} in"]
        if event.kind == "chat":
            parts[1] += f", {event.completion_tokens} out"
        if isinstance(end.report, GenerationReport):
            parts += [f"first token in {event.ttft_ms / 1e3:.2f} s", f"{event.tokens_per_second:.1f} tok/s"]
        elif end.report is not None:
            parts.append(f"{end.report.total_s:.2f} s")
        lines.append("  ".join([*parts, event.finish_reason]))
    for line in lines or [shown_status]:
        log.info("%s  %s  %s", client, route, line)


def running_routes(served: Requests) -> APIRouter:
    """Return the router of ``/admin/requests``."""
    router = APIRouter(prefix="/admin/requests", tags=["admin"], route_class=StrictRoute)

    def scope_of(request: Request) -> str | None:
        caller = Caller(local=is_local(request.scope), client=client_of(request))
        return None if caller.local else caller.scope

    @router.get("", responses={200: {"links": {"stop": FIRST}}})
    async def requests(request: Request) -> RunningRequests:
        """List the requests that wait or run, oldest first. Callers on the server's machine get those of all clients,
        others only their own.
        """
        scope = scope_of(request)
        found = served.read(scope)
        if scope is not None:
            found = [each.model_copy(update={"model": public_id(each.model, local=False)}) for each in found]
        return RunningRequests(requests=found)

    @router.post("/stop", responses=failures(*BODY, NotFoundError))
    async def stop(body: StopRequest, request: Request) -> StopRequestAnswer:
        """Stop a request: its slot is free at once, and its client gets the error `request-stopped`. Callers on other
        machines may stop only their own.
        """
        return StopRequestAnswer(id=served.stop(body.id, scope_of(request)))

    return router
