"""Routes of turns and of the permissions that they wait for."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response, status

from lmx_lab.daemon.routes.queries import StrictQueryRoute, Wait, check_wait
from lmx_lab.daemon.routes.responses import TURN_LINKS, read_failures, write_failures
from lmx_lab.daemon.services import Services
from lmx_lab.errors import (
    AlreadyResolvedError,
    IdempotencyConflictError,
    PermissionExpiredError,
    PermissionNotFoundError,
    QueueFullError,
    SessionNotFoundError,
    TurnInProgressError,
    TurnNotFoundError,
)
from lmx_lab.wire.sessions import (
    CancelAnswer,
    CancelTurns,
    Decision,
    PermissionList,
    PermissionRecord,
    SubmitTurn,
    TurnAccepted,
    TurnRecord,
)


def turn_routes(services: Services) -> APIRouter:
    """Return the routes of turns."""
    router = APIRouter(prefix="/v3/sessions/{session_id}", tags=["turns"], route_class=StrictQueryRoute)
    turns = services.turns

    @router.post(
        "/turns",
        status_code=202,
        responses={
            200: {
                "model": TurnAccepted,
                "description": "This turn was submitted before; nothing runs twice",
                "links": TURN_LINKS,
            },
            202: {"links": TURN_LINKS},
            **write_failures(
                SessionNotFoundError, IdempotencyConflictError, TurnInProgressError, QueueFullError, in_path=True
            ),
        },
    )
    async def submit(session_id: str, body: SubmitTurn, response: Response) -> TurnAccepted:
        """Submit a turn. With a `turn_id` chosen by the client, the request can be repeated safely."""
        accepted, is_new = await turns.submit(session_id, body)
        if not is_new:
            response.status_code = status.HTTP_200_OK
        return accepted

    @router.get("/turns/{turn_id}", responses=read_failures(SessionNotFoundError, TurnNotFoundError, in_path=True))
    async def read(session_id: str, turn_id: str, request: Request, wait: Wait = 0.0) -> TurnRecord:
        """A turn. With `wait`, the answer is delayed until the turn has ended or the time has passed."""
        if wait_s := check_wait(wait, services.limits.wait_s):
            waiting = turns.read(session_id, turn_id, wait_s=wait_s)
            if (record := await services.subscribers.run_while_connected(request, waiting)) is not None:
                return record
        return await turns.read(session_id, turn_id)

    @router.post(
        "/turns/{turn_id}/cancel", responses=write_failures(SessionNotFoundError, TurnNotFoundError, in_path=True)
    )
    async def cancel_one(session_id: str, turn_id: str) -> CancelAnswer:
        """Cancel a turn, running or queued. A turn that has ended is not changed."""
        # Not validated: an id of the path that is not well-formed is only the id of no turn.
        return await turns.cancel(session_id, CancelTurns.model_construct(turn_id=turn_id, queued=False))

    @router.post("/cancel", responses=write_failures(SessionNotFoundError, TurnNotFoundError, in_path=True))
    async def cancel(session_id: str, body: CancelTurns | None = None) -> CancelAnswer:
        """Cancel the active turn or the one that the body names, and the queued turns if requested."""
        return await turns.cancel(session_id, body or CancelTurns())

    return router


def permission_routes(services: Services) -> APIRouter:
    """Return the routes of permissions."""
    router = APIRouter(prefix="/v3/permissions", tags=["permissions"], route_class=StrictQueryRoute)

    @router.get("", responses=read_failures())
    async def listed() -> PermissionList:
        """The pending permissions of all sessions."""
        return await services.turns.list_permissions()

    @router.post(
        "/{permission_id}",
        responses=write_failures(PermissionNotFoundError, AlreadyResolvedError, PermissionExpiredError, in_path=True),
    )
    async def decide(permission_id: str, body: Decision) -> PermissionRecord:
        """Allow or deny one call with exactly its arguments. Only the first decision counts; later ones fail with
        409."""
        return await services.turns.decide(permission_id, body)

    return router
