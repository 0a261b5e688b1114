"""Turns: submitted, read, cancelled."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response, status

from lmx_lab.daemon.routes.queries import StrictQueryRoute, Wait, waiting_s
from lmx_lab.daemon.routes.responses import TURN, reading, writing
from lmx_lab.daemon.services import Services
from lmx_lab.errors import (
    IdempotencyConflictError,
    QueueFullError,
    SessionNotFoundError,
    TurnInProgressError,
    TurnNotFoundError,
)
from lmx_lab.wire.sessions import CancelAnswer, CancelTurns, SubmitTurn, TurnAccepted, TurnRecord


def turn_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v3/sessions/{session_id}", tags=["turns"], route_class=StrictQueryRoute)
    turns = services.turns

    @router.post(
        "/turns",
        status_code=202,
        responses={
            200: {
                "model": TurnAccepted,
                "description": "This turn was submitted before; nothing runs twice",
                "links": TURN,
            },
            202: {"links": TURN},
            **writing(
                SessionNotFoundError, IdempotencyConflictError, TurnInProgressError, QueueFullError, in_path=True
            ),
        },
    )
    async def submit(session_id: str, body: SubmitTurn, response: Response) -> TurnAccepted:
        """Let the model answer. With a `turn_id` of your own the request can be repeated safely."""
        accepted, is_new = await turns.submit(session_id, body)
        if not is_new:
            response.status_code = status.HTTP_200_OK
        return accepted

    @router.get("/turns/{turn_id}", responses=reading(SessionNotFoundError, TurnNotFoundError, in_path=True))
    async def read(session_id: str, turn_id: str, request: Request, wait: Wait = 0.0) -> TurnRecord:
        """A turn; with `wait` once it has ended, or after so many seconds."""
        if wait_s := waiting_s(wait, services.limits.wait_s):
            waiting = turns.read(session_id, turn_id, wait_s=wait_s)
            if (record := await services.subscribers.unless_left(request, waiting)) is not None:
                return record
        return await turns.read(session_id, turn_id)

    @router.post("/turns/{turn_id}/cancel", responses=writing(SessionNotFoundError, TurnNotFoundError, in_path=True))
    async def cancel_one(session_id: str, turn_id: str) -> CancelAnswer:
        """End this turn, running or queued. One that has ended stays as it is."""
        # Whatever the path has, it is an id, if of nothing.
        return await turns.cancel(session_id, CancelTurns.model_construct(turn_id=turn_id, queued=False))

    @router.post("/cancel", responses=writing(SessionNotFoundError, TurnNotFoundError, in_path=True))
    async def cancel(session_id: str, body: CancelTurns | None = None) -> CancelAnswer:
        """End the active turn, or the one that the body names, or the queued ones too."""
        return await turns.cancel(session_id, body or CancelTurns())

    return router
