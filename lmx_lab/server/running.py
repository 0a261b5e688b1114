"""List the running requests of all clients, and stop one of them: ``/admin/requests``."""

from __future__ import annotations

import asyncio
import functools
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from lmx_lab.engine import Answer, Caller
from lmx_lab.engine.lookup import public_id
from lmx_lab.errors import NotFoundError, RequestStoppedError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.errors import client_of
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import BODY, failures, link
from lmx_lab.wire.admin import RequestKind, RunningRequest, RunningRequests, StopRequest, StopRequestAnswer

T = TypeVar("T")
FIRST = link("admin_stop", "Stop the oldest of these requests.", body={"id": "$response.body#/requests/0/id"})


@dataclass(eq=False, kw_only=True)
class _Part:
    """A part of a request that can be stopped: a wait, or one of its answers."""

    id: str
    caller: Caller
    kind: RequestKind
    model: str
    stop: Callable[[], object]
    answer: Callable[[], Answer | None] = lambda: None
    is_queued: bool = False
    """Whether it waits. Ignored for an answer, whose progress shows this."""
    is_stopped: bool = False
    began_at: float = field(default_factory=time.perf_counter)


class Running:
    """The running requests of all clients. It may be used on any thread."""

    def __init__(self) -> None:
        self._parts: dict[object, _Part] = {}
        """The key of an answer is its ``steps``, and that of a wait is the part itself."""
        self._numbers = count(1)

    async def wait(
        self, work: Coroutine[Any, Any, T], *, caller: Caller, kind: RequestKind, model: str, is_queued: bool = False
    ) -> T:
        """Wait for work of a request. Cancelling the wait cancels the work.

        Raises:
            RequestStoppedError: it was stopped.
        """
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        part = _Part(
            id=self._id_of(caller),
            caller=caller,
            kind=kind,
            model=model,
            stop=lambda: loop.call_soon_threadsafe(task.cancel),
            is_queued=is_queued,
        )
        self._parts[part] = part
        try:
            result = await task
        except asyncio.CancelledError:
            if not part.is_stopped:
                raise
        finally:
            del self._parts[part]
        # The work may have ended when it was stopped.
        if part.is_stopped:
            raise RequestStoppedError
        return result

    def add(self, answers: Sequence[Answer]) -> None:
        """Add the answers to one request."""
        id_ = self._id_of(answers[0].request.caller)
        for answer in answers:
            # An answer without a reader is cancelled, so nothing else may refer to it.
            reference = weakref.ref(answer)
            self._parts[answer.steps] = _Part(
                id=id_,
                caller=answer.request.caller,
                kind=answer.request.caller.kind,
                model=answer.model,
                stop=functools.partial(_stop, reference),
                answer=reference,
                began_at=answer.steps.arrived_at,
            )

    def end(self, answer: Answer) -> None:
        """Remove an answer that has ended."""
        self._parts.pop(answer.steps, None)

    def _id_of(self, caller: Caller) -> str:
        return caller.request_id or f"lab_{next(self._numbers)}"

    def read(self, scope: str | None = None) -> list[RunningRequest]:
        """Return the requests, oldest first.

        Args:
            scope: The caller whose requests are returned; None returns those of all.
        """
        requests: dict[str, list[_Part]] = {}
        for part in list(self._parts.values()):
            # The client of an answer that has ended may still read it.
            has_ended = (answer := part.answer()) is not None and answer.ended
            if scope in (None, part.caller.scope) and not has_ended:
                requests.setdefault(part.id, []).append(part)
        found = [_describe(parts) for parts in requests.values()]
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
        for part in list(self._parts.values()):
            if part.id == found[0]:
                part.is_stopped = True
                part.stop()
        return found[0]


def _stop(reference: weakref.ref[Answer]) -> None:
    if (answer := reference()) is not None:
        answer.fail(RequestStoppedError())


def _describe(parts: Sequence[_Part]) -> RunningRequest:
    first = parts[0]
    answers = [answer for part in parts if (answer := part.answer()) is not None]
    is_queued = all(answer.progress is None for answer in answers) if answers else first.is_queued
    return RunningRequest(
        id=first.id,
        client=first.caller.client,
        kind=first.kind,
        model=first.model,
        state="queued" if is_queued else "running",
        age_s=time.perf_counter() - min(part.began_at for part in parts),
        # All choices of a prompt have the same request.
        prompt_tokens=sum({id(answer.request): len(answer.prompt) for answer in answers}.values()),
        completion_tokens=sum(answer.tokens for answer in answers),
    )


def running_routes(running: Running) -> APIRouter:
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
        found = running.read(scope)
        if scope is not None:
            found = [each.model_copy(update={"model": public_id(each.model, local=False)}) for each in found]
        return RunningRequests(requests=found)

    @router.post("/stop", responses=failures(*BODY, NotFoundError))
    async def stop(body: StopRequest, request: Request) -> StopRequestAnswer:
        """Stop a request: its slot is free at once, and its client gets the error `request-stopped`. Callers on other
        machines may stop only their own.
        """
        return StopRequestAnswer(id=running.stop(body.id, scope_of(request)))

    return router
