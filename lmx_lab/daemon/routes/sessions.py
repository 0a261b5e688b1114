"""Routes of sessions."""

from __future__ import annotations

from fastapi import APIRouter, Response, status

from lmx_lab.daemon import sessions
from lmx_lab.daemon.encoding import to_json
from lmx_lab.daemon.routes.queries import Archived, ListCursor, PageLimit, StrictQueryRoute, Words, check_limit
from lmx_lab.daemon.routes.responses import SESSION_CREATED, read_failures, write_failures
from lmx_lab.daemon.services import Services
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
"""Number of sessions on a page by default."""


def session_routes(services: Services) -> APIRouter:
    """Return the routes of sessions."""
    router = APIRouter(prefix="/v3/sessions", tags=["sessions"], route_class=StrictQueryRoute)
    store = services.store

    @router.post("", status_code=201, responses={**SESSION_CREATED, **write_failures()})
    async def create(response: Response, body: CreateSession | None = None) -> SessionRecord:
        """Create a session. If the id exists already, the answer is that session, unchanged, with status 200."""
        record, is_new = await store.write(lambda tx: sessions.create(tx, body or CreateSession()))
        if not is_new:
            response.status_code = status.HTTP_200_OK
        return record

    # Long answers are converted to JSON on the reader's thread. FastAPI would do it on the event loop and validate them
    # a second time.
    @router.get("", response_model=SessionList, responses=read_failures())
    async def listed(
        limit: PageLimit = None, cursor: ListCursor = None, archived: Archived = False, q: Words = None
    ) -> Response:
        """The sessions, the last updated first."""
        page_limit = check_limit(limit, default=PAGE, maximum=sessions.LIST_LIMIT)
        text = await store.read(
            lambda view: sessions.list_page(view, limit=page_limit, cursor=cursor, archived=archived, q=q)
        )
        return Response(text, media_type="application/json")

    @router.get(
        "/{session_id}", response_model=SessionSnapshot, responses=read_failures(SessionNotFoundError, in_path=True)
    )
    async def read(session_id: str) -> Response:
        """A session with its messages, turns and pending permissions, and the cursor after which its events follow."""
        text = await store.read(lambda view: to_json(sessions.read_snapshot(view, session_id)))
        return Response(text, media_type="application/json")

    @router.patch("/{session_id}", responses=write_failures(SessionNotFoundError, RevisionConflictError, in_path=True))
    async def change(session_id: str, body: ChangeSession) -> SessionRecord:
        """Set the fields that the body contains. With `revision`, only if the session was not changed since."""
        return await store.write(lambda tx: sessions.change(tx, session_id, body))

    @router.delete("/{session_id}", status_code=204, responses=write_failures(in_path=True))
    async def delete(session_id: str) -> None:
        """Cancel the turns of a session and delete it with its messages; 204 even if it does not exist."""
        await services.turns.delete_session(session_id)

    @router.post(
        "/{session_id}/fork",
        status_code=201,
        responses={
            201: SESSION_CREATED[201],
            **write_failures(SessionNotFoundError, TurnNotFoundError, TurnInProgressError, in_path=True),
        },
    )
    async def fork(session_id: str, body: ForkSession | None = None) -> SessionRecord:
        """Create a session with the messages of this one, all or up to a turn."""
        return await store.write(lambda tx: sessions.fork(tx, session_id, body or ForkSession()))

    return router
