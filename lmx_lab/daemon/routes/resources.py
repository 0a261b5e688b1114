"""Routes of the daemon itself, sessions, turns, permissions and MCP servers, with their errors and OpenAPI links."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

from fastapi import APIRouter, Request, Response, status

from lmx_lab.daemon.encoding import to_json
from lmx_lab.daemon.routes.queries import (
    Archived,
    ListCursor,
    PageLimit,
    StrictQueryRoute,
    Wait,
    Words,
    check_limit,
    check_wait,
)
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.storage import sessions
from lmx_lab.errors import (
    AlreadyResolvedError,
    HostingError,
    IdempotencyConflictError,
    InvalidRequestError,
    LabError,
    McpServerExistsError,
    McpServerNotFoundError,
    PermissionExpiredError,
    PermissionNotFoundError,
    QueueFullError,
    RevisionConflictError,
    SessionNotFoundError,
    StoppingError,
    StorageFullError,
    TurnInProgressError,
    TurnNotFoundError,
)
from lmx_lab.http.middleware import VERSION
from lmx_lab.http.openapi import BODY, Responses, failures, link
from lmx_lab.wire.daemon import Counts, DaemonRecord, Health, Retention, Shutdown, ShutdownAnswer
from lmx_lab.wire.mcp import (
    ChangeMcpServer,
    McpServerConfig,
    McpServerList,
    McpServerRecord,
    McpTestFailed,
    McpTestPassed,
    ToolList,
)
from lmx_lab.wire.sessions import (
    CancelAnswer,
    CancelTurns,
    ChangeSession,
    CreateSession,
    Decision,
    ForkSession,
    PermissionList,
    PermissionRecord,
    SessionList,
    SessionRecord,
    SessionSnapshot,
    SubmitTurn,
    TurnAccepted,
    TurnRecord,
)

DATABASE_ERRORS = (StoppingError, HostingError)
"""Errors of all routes that use the database: it can be closed or damaged."""
_SESSION_LINKS = {
    "read": link("sessions_read", "Read the session.", session_id="$response.body#/session_id"),
    "change": link("sessions_change", "Change the session.", session_id="$response.body#/session_id"),
    "delete": link("sessions_delete", "Delete the session.", session_id="$response.body#/session_id"),
    "fork": link("sessions_fork", "Create a session with its messages.", session_id="$response.body#/session_id"),
    "submit": link("turns_submit", "Submit a turn.", session_id="$response.body#/session_id"),
    "cancel": link("turns_cancel", "Cancel its active turn.", session_id="$response.body#/session_id"),
    "events": link("events_events_of_session", "Read its events.", session_id="$response.body#/session_id"),
}
SESSION_CREATED: Responses = {
    200: {
        "model": SessionRecord,
        "description": "The id exists already; the session is not changed",
        "links": _SESSION_LINKS,
    },
    201: {"links": _SESSION_LINKS},
}
"""Answers with a new session, or with the existing one of the same id."""
_TURN_KEY = {"session_id": "$request.path.session_id", "turn_id": "$response.body#/turn_id"}
TURN_LINKS = {
    "read": link("turns_read", "Read the turn.", **_TURN_KEY),
    "cancel": link("turns_cancel_one", "Cancel the turn.", **_TURN_KEY),
}
SERVER_LINKS = {
    "read": link("mcp_read", "Read the server.", name="$response.body#/name"),
    "change": link("mcp_change", "Change the server.", name="$response.body#/name"),
    "restart": link("mcp_restart", "Restart the server.", name="$response.body#/name"),
    "test": link("mcp_test_named", "Test whether the server starts.", name="$response.body#/name"),
    "tools": link("mcp_tools", "List its tools.", name="$response.body#/name"),
    "remove": link("mcp_remove", "Remove the server.", name="$response.body#/name"),
}


def read_failures(*errors: type[LabError], in_path: bool = False) -> Responses:
    """Return the error answers of a route that reads. ``InvalidRequestError`` is raised for unknown parameters."""
    return failures(InvalidRequestError, *errors, *DATABASE_ERRORS, in_path=in_path)


def write_failures(*errors: type[LabError], in_path: bool = False) -> Responses:
    """Return the error answers of a route that writes."""
    return failures(*BODY, *errors, *DATABASE_ERRORS, StorageFullError, in_path=in_path)


HEALTH = "/v3/health"
FEATURES = ("sessions", "fork", "turns", "permissions", "events", "events-socket", "mcp-stdio", "mcp-http")


def daemon_routes(services: Services) -> APIRouter:
    """Return the routes of the daemon itself."""
    router = APIRouter(prefix="/v3", tags=["daemon"], route_class=StrictQueryRoute)

    # HEAD is used by load balancers. The HTTP server omits the body.
    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=failures(InvalidRequestError))
    async def health() -> Health:
        """Whether the daemon is running. Needs no token."""
        return Health(status=services.status(), daemon_id=services.daemon_id)

    @router.get("/daemon", responses=read_failures())
    async def daemon() -> DaemonRecord:
        """Ids, counts, limits, retention, features and the state of the model server."""
        rows = await services.store.read(sessions.count_rows)
        running, queued = services.turns.counts()
        limits = services.limits
        log = services.log
        return DaemonRecord(
            daemon_id=services.daemon_id,
            stream_id=log.stream_id,
            version=VERSION,
            pid=os.getpid(),
            started_at=services.started_at,
            uptime_s=time.monotonic() - services.started_monotonic_s,
            latest_seq=log.latest_seq,
            oldest_seq=log.oldest_seq,
            counts=Counts(
                **rows,
                running_turns=running,
                queued_turns=queued,
                subscribers=len(services.subscribers),
                tools=len(services.toolbox.list_tools()),
            ),
            upstream=services.upstream.state(),
            retention=Retention(
                days=limits.keep_days, events=limits.keep_events, fold_tokens_after_s=limits.fold_after_s
            ),
            limits=asdict(limits),
            features=list(FEATURES),
        )

    @router.post("/daemon/shutdown", status_code=202, responses=failures(*BODY))
    async def shutdown(body: Shutdown | None = None) -> ShutdownAnswer:
        """Stop the daemon. With `drain`, running turns have `grace_s` seconds to end; with `now` they end immediately.
        Queued turns run at the next start."""
        services.shut_down(body or Shutdown())
        return ShutdownAnswer()

    return router


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
        page_limit = check_limit(limit, default=50, maximum=sessions.LIST_LIMIT)
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


def mcp_routes(services: Services) -> APIRouter:
    """Return the routes of MCP servers."""
    router = APIRouter(prefix="/v3/mcp", tags=["mcp"], route_class=StrictQueryRoute)
    servers = services.servers

    @router.get("/servers", responses=read_failures())
    async def listed() -> McpServerList:
        """All servers and their states. The values of `env` and `headers` are redacted."""
        return await servers.list_servers()

    @router.post(
        "/servers", status_code=201, responses={201: {"links": SERVER_LINKS}, **write_failures(McpServerExistsError)}
    )
    async def add(body: McpServerConfig) -> McpServerRecord:
        """Add a server and start it. Events `mcp.status` report the progress."""
        return await servers.add(body)

    @router.get("/servers/{name}", responses=read_failures(McpServerNotFoundError, in_path=True))
    async def read(name: str) -> McpServerRecord:
        """One server, with the last lines of its stderr."""
        return await servers.read(name)

    @router.patch("/servers/{name}", responses=write_failures(McpServerNotFoundError, in_path=True))
    async def change(name: str, body: ChangeMcpServer) -> McpServerRecord:
        """Set the fields that the body contains and restart the server. The value `***` keeps a secret."""
        return await servers.change(name, body)

    @router.delete("/servers/{name}", status_code=204, responses=write_failures(in_path=True))
    async def remove(name: str) -> None:
        """Stop a server and remove it; 204 even if it does not exist."""
        await servers.remove(name)

    @router.post("/servers/{name}/test", responses=write_failures(McpServerNotFoundError, QueueFullError, in_path=True))
    async def test_named(name: str) -> McpTestPassed | McpTestFailed:
        """Start a second process of a server, list its tools and stop it. The running server is not affected."""
        return await servers.test_named(name)

    @router.post("/test", responses=write_failures(QueueFullError))
    async def test(body: McpServerConfig) -> McpTestPassed | McpTestFailed:
        """Test a configuration that is not stored."""
        return await servers.test(body)

    @router.post("/servers/{name}/restart", responses=write_failures(McpServerNotFoundError, in_path=True))
    async def restart(name: str) -> McpServerRecord:
        """Stop a server and start it again, even if it has failed."""
        return await servers.restart(name)

    @router.get("/servers/{name}/tools", responses=read_failures(McpServerNotFoundError, in_path=True))
    async def tools(name: str) -> ToolList:
        """The tools of a server, under the names that models use."""
        return await servers.list_tools(name)

    return router
