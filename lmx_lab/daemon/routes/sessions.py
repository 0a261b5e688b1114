"""Sessions: made, listed, read, changed, forked, deleted."""

from __future__ import annotations

from fastapi import APIRouter, Response, status

from lmx_lab.daemon import sessions
from lmx_lab.daemon.routes.queries import Archived, ListCursor, PageLimit, StrictQueryRoute, Words, limited
from lmx_lab.daemon.routes.responses import MADE, reading, writing
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.storage.store import as_json
from lmx_lab.errors import RevisionConflictError, SessionNotFoundError, TurnInProgressError, TurnNotFoundError
from lmx_lab.wire.sessions import (
    ChangeSession,
    CreateSession,
    ForkSession,
    SessionList,
    SessionRecord,
    SessionSnapshot,
)

PAGE = 50


def session_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v3/sessions", tags=["sessions"], route_class=StrictQueryRoute)
    store = services.store

    @router.post(
        "",
        status_code=201,
        responses={**MADE, **writing()},
    )
    async def create(response: Response, body: CreateSession | None = None) -> SessionRecord:
        """Make a session. With an id of one that exists, that one is answered as it is: 200."""
        record, is_new = await store.write(lambda transaction: sessions.create(transaction, body or CreateSession()))
        if not is_new:
            response.status_code = status.HTTP_200_OK
        return record

    # What may be long becomes JSON where it is read: FastAPI would do it on the loop, and check it once more.
    @router.get("", response_model=SessionList, responses=reading())
    async def listed(
        limit: PageLimit = None, cursor: ListCursor = None, archived: Archived = False, q: Words = None
    ) -> Response:
        """The sessions, the last used first."""
        most = limited(limit, default=PAGE, most=sessions.LIST_LIMIT)
        text = await store.read(
            lambda reading: as_json(sessions.listed(reading, limit=most, cursor=cursor, archived=archived, q=q))
        )
        return Response(text, media_type="application/json")

    @router.get("/{session_id}", response_model=SessionSnapshot, responses=reading(SessionNotFoundError, in_path=True))
    async def read(session_id: str) -> Response:
        """A session with its messages, turns and pending permissions, and the cursor from which events continue it."""
        text = await store.read(lambda reading: as_json(sessions.snapshot(reading, session_id)))
        return Response(text, media_type="application/json")

    @router.patch("/{session_id}", responses=writing(SessionNotFoundError, RevisionConflictError, in_path=True))
    async def change(session_id: str, body: ChangeSession) -> SessionRecord:
        """Set what the body names; with `revision` only if nobody else has changed it since."""
        return await store.write(lambda transaction: sessions.change(transaction, session_id, body))

    @router.delete("/{session_id}", status_code=204, responses=writing(in_path=True))
    async def delete(session_id: str) -> None:
        """Cancel its turns and delete it, with its messages. One that is not there is deleted already: 204."""
        await services.turns.delete_session(session_id)

    @router.post(
        "/{session_id}/fork",
        status_code=201,
        responses={
            201: MADE[201],
            **writing(SessionNotFoundError, TurnNotFoundError, TurnInProgressError, in_path=True),
        },
    )
    async def fork(session_id: str, body: ForkSession | None = None) -> SessionRecord:
        """A new session with the messages of this one, all or up to a turn."""
        return await store.write(lambda transaction: sessions.fork(transaction, session_id, body or ForkSession()))

    return router
