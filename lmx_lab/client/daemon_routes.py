"""The daemon's routes, one method each; requests and answers are the shapes of ``lmx_lab.wire``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self

import httpx2
from pydantic import RootModel

from lmx_lab.client.connection import QUICK_S, HttpConnection
from lmx_lab.client.credentials import Credentials
from lmx_lab.client.daemon_connection import DaemonConnection, DaemonRequest
from lmx_lab.client.request_bodies import as_content, shaped
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.daemon import DaemonRecord, Health, Shutdown, ShutdownAnswer
from lmx_lab.wire.event_stream import EventPage
from lmx_lab.wire.identifiers import PATTERN, new_id
from lmx_lab.wire.mcp import (
    ChangeMcpServer,
    McpServerConfig,
    McpServerList,
    McpServerRecord,
    McpTestFailed,
    McpTestPassed,
    ToolList,
    ToolRecord,
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

PROGRAM_S = 120.0
"""Time limit of requests that wait until an MCP server has stopped or is free."""


class _McpTest(RootModel[McpTestPassed | McpTestFailed]):
    pass


class DaemonRoutes:
    """Requests to one daemon, on one event loop.

    Every failure is a ``LabError``: the daemon's own by its code, ``UnreachableError`` if no daemon answers. Idempotent
    requests are repeated once after a lost connection; others raise ``ConnectionLostError``, and may or may not have
    been executed.
    """

    def __init__(self, credentials: Credentials, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._connection = DaemonConnection(credentials, transport=transport)

    @property
    def credentials(self) -> Credentials:
        """The daemon's address and token."""
        return self._connection.credentials

    @property
    def url(self) -> str:
        """The daemon's address, as of the last request."""
        return self.credentials.url

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def connection(self) -> HttpConnection:
        """Return a connection for a WebSocket; the daemon's identity was checked just now, without the token.

        Raises:
            UnreachableError: no daemon answers, or another one than the state file names.
        """
        return await self._connection.connection()

    # The daemon

    async def health(self) -> Health:
        """Return which daemon answers; needs no token."""
        return await self._connection.health()

    async def state(self) -> DaemonRecord:
        """Return the daemon's state: ids, counts, limits, the model server."""
        return await self._connection.ask(_get("/v3/daemon"), DaemonRecord)

    async def shut_down(self, *, mode: Literal["drain", "now"] = "drain", grace_s: float = 30.0) -> None:
        """Stop the daemon; returns when it has started to stop.

        Running turns have ``grace_s`` seconds to end, with mode ``now`` none; queued turns run at the next start.
        """
        content = as_content(shaped(Shutdown, mode=mode, grace_s=grace_s))
        request = DaemonRequest(method="POST", path="/v3/daemon/shutdown", content=content, repeatable=True)
        await self._connection.ask(request, ShutdownAnswer)

    # Sessions

    async def create_session(self, body: CreateSession) -> SessionRecord:
        """Create a session, or return the existing one of this id unchanged."""
        if body.session_id is None:
            # With an id the request is idempotent.
            body = body.model_copy(update={"session_id": new_id("ses")})
        request = DaemonRequest(method="POST", path="/v3/sessions", content=as_content(body), repeatable=True)
        return await self._connection.ask(request, SessionRecord)

    async def sessions(
        self, *, limit: int | None = None, cursor: str | None = None, archived: bool = False, q: str | None = None
    ) -> SessionList:
        """List the sessions in pages, the last used first.

        Args:
            limit: Sessions per page.
            cursor: ``next_cursor`` of the previous page.
            archived: List the archived sessions instead of the others.
            q: Part of a title or an id.
        """
        request = _get("/v3/sessions", limit=limit, cursor=cursor, archived=archived or None, q=q)
        return await self._connection.ask(request, SessionList)

    async def read_session(self, session_id: str) -> SessionSnapshot:
        """Read a session with its messages, turns, pending permissions, and the cursor for its events."""
        return await self._connection.ask(_get(_session(session_id)), SessionSnapshot)

    async def change_session(self, session_id: str, change: ChangeSession) -> SessionRecord:
        """Set the fields that are set in ``change``.

        Raises:
            RevisionConflictError: another client has changed the session since that revision.
        """
        content = as_content(change)
        return await self._connection.ask(
            DaemonRequest(method="PATCH", path=_session(session_id), content=content), SessionRecord
        )

    async def delete_session(self, session_id: str) -> None:
        """Cancel a session's turns and delete it. Idempotent."""
        await self._connection.send(DaemonRequest(method="DELETE", path=_session(session_id), repeatable=True))

    async def fork_session(self, session_id: str, fork: ForkSession) -> SessionRecord:
        """Create a session with the messages of this one, all or up to a turn."""
        return await self._connection.ask(_post(f"{_session(session_id)}/fork", as_content(fork)), SessionRecord)

    # Turns

    async def submit_turn(self, session_id: str, turn: SubmitTurn) -> TurnAccepted:
        """Submit a turn; returns when the daemon has accepted it.

        Raises:
            TurnInProgressError: another turn runs, with ``when_busy="reject"``.
            QueueFullError: too many turns wait.
            IdempotencyConflictError: a turn of this id exists with another body.
        """
        if turn.turn_id is None:
            turn = turn.model_copy(update={"turn_id": new_id("trn")})
        path = f"{_session(session_id)}/turns"
        request = DaemonRequest(method="POST", path=path, content=as_content(turn), repeatable=True)
        return await self._connection.ask(request, TurnAccepted)

    async def read_turn(self, session_id: str, turn_id: str, wait_s: float = 0.0) -> TurnRecord:
        """Read a turn; with ``wait_s``, which is at most 60, once it has ended, or after that time in seconds."""
        path = f"{_session(session_id)}/turns/{_part('turn_id', turn_id)}"
        return await self._connection.ask(_get(path, wait_s=wait_s), TurnRecord)

    async def cancel_turns(self, session_id: str, cancel: CancelTurns) -> CancelAnswer:
        """Cancel the active turn, or one by its id, or also the queued ones. Ended turns stay unchanged."""
        # Without an id, a repetition could cancel another turn.
        repeatable = cancel.turn_id is not None and not cancel.queued
        path, content = f"{_session(session_id)}/cancel", as_content(cancel)
        return await self._connection.ask(
            DaemonRequest(method="POST", path=path, content=content, repeatable=repeatable), CancelAnswer
        )

    # Permissions

    async def permissions(self) -> list[PermissionRecord]:
        """List the permissions that wait for a decision, of all sessions."""
        return (await self._connection.ask(_get("/v3/permissions"), PermissionList)).permissions

    async def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], *, scope: Literal["once", "session"] = "once"
    ) -> PermissionRecord:
        """Allow or deny one call with exactly its arguments, or with scope ``session`` the tool in this session.

        Raises:
            AlreadyResolvedError: another client has decided; the message says how.
            PermissionExpiredError: the time for a decision is over, or the turn has ended.
        """
        content = as_content(shaped(Decision, decision=decision, scope=scope))
        path = f"/v3/permissions/{_part('permission_id', permission_id)}"
        return await self._connection.ask(_post(path, content), PermissionRecord)

    # MCP servers

    async def mcp_servers(self) -> list[McpServerRecord]:
        """List the MCP servers with their states."""
        return (await self._connection.ask(_get("/v3/mcp/servers"), McpServerList)).servers

    async def add_mcp_server(self, config: McpServerConfig) -> McpServerRecord:
        """Add an MCP server and start it; ``mcp.status`` events report its state.

        Raises:
            McpServerExistsError: the name is taken.
        """
        return await self._connection.ask(_post("/v3/mcp/servers", as_content(config), PROGRAM_S), McpServerRecord)

    async def mcp_server(self, name: str) -> McpServerRecord:
        """Read one MCP server, with the last lines of its stderr."""
        return await self._connection.ask(_get(_server(name)), McpServerRecord)

    async def change_mcp_server(self, name: str, change: ChangeMcpServer) -> McpServerRecord:
        """Set the fields that are set in ``change``, and restart the server. ``***`` leaves a secret unchanged."""
        content = as_content(change)
        request = DaemonRequest(method="PATCH", path=_server(name), content=content, within_s=PROGRAM_S)
        return await self._connection.ask(request, McpServerRecord)

    async def remove_mcp_server(self, name: str) -> None:
        """Stop and remove an MCP server. Idempotent."""
        await self._connection.send(
            DaemonRequest(method="DELETE", path=_server(name), within_s=PROGRAM_S, repeatable=True)
        )

    async def restart_mcp_server(self, name: str) -> McpServerRecord:
        """Restart an MCP server, also after the daemon has stopped restarting it."""
        return await self._connection.ask(_post(f"{_server(name)}/restart", None, PROGRAM_S), McpServerRecord)

    async def test_mcp_server(self, server: str | McpServerConfig) -> McpTestPassed | McpTestFailed:
        """Start an MCP server, list its tools and stop it. A running server is not affected, and nothing is stored.

        Args:
            server: The name of a configured server, or a configuration.
        """
        if isinstance(server, str):
            path, content = f"{_server(server)}/test", None
            start_s = (await self.mcp_server(server)).start_timeout_s
        else:
            path, content, start_s = "/v3/mcp/test", as_content(server), server.start_timeout_s
        return (await self._connection.ask(_post(path, content, start_s + PROGRAM_S), _McpTest)).root

    async def mcp_tools(self, name: str) -> list[ToolRecord]:
        """List the tools of a server, as the model receives them."""
        return (await self._connection.ask(_get(f"{_server(name)}/tools"), ToolList)).tools

    # Events

    async def page(
        self,
        *,
        after: int | None = None,
        stream_id: str | None = None,
        limit: int | None = None,
        wait_s: float = 0.0,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
    ) -> EventPage:
        """Read events by polling, the oldest first. ``events()`` needs fewer requests.

        Args:
            after: The cursor of the previous page; 0 for all that are kept. By default only new events.
            stream_id: The log that the cursor is from.
            wait_s: Maximum time in seconds to wait for an event, at most 60.
            types: Such as ``turn.done``, ``tool.*``; by default all.

        Raises:
            CursorExpiredError: events after the cursor are not available; ``reason`` says why.
        """
        only = ",".join(types) or None
        request = _get(
            "/v3/events",
            after=after,
            stream_id=stream_id,
            limit=limit,
            session_id=list(session_ids) or None,
            types=only,
            wait_s=wait_s,
        )
        return await self._connection.ask(request, EventPage)


def _get(path: str, *, wait_s: float = 0.0, **params: str | int | bool | list[str] | None) -> DaemonRequest:
    """A GET request with the parameters that are not None."""
    written = {name: _written(value) for name, value in params.items() if value is not None}
    if wait_s:
        # str() writes small numbers as 1e-05.
        written["wait"] = f"{wait_s:.3f}"
    return DaemonRequest(method="GET", path=path, params=written, within_s=QUICK_S + max(0.0, wait_s), repeatable=True)


def _written(value: str | int | bool | list[str]) -> str | list[str]:
    if isinstance(value, list):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _post(path: str, content: bytes | None, within_s: float = QUICK_S) -> DaemonRequest:
    return DaemonRequest(method="POST", path=path, content=content, within_s=within_s)


def _session(session_id: str) -> str:
    return f"/v3/sessions/{_part('session_id', session_id)}"


def _server(name: str) -> str:
    return f"/v3/mcp/servers/{_part('name', name)}"


def _part(name: str, value: str) -> str:
    """Return an id as one segment of a path.

    Raises:
        InvalidRequestError: it is not a valid id.
    """
    if not re.fullmatch(PATTERN, value, re.ASCII):
        said = f"{name} is {value!r:.80}; it can have 1 to 64 letters, digits, '-' and '_'"
        raise InvalidRequestError(said, param=name)
    return value
