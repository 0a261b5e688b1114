"""The daemon's routes, one method each: what is sent and what comes is of ``lmx_lab.wire``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self

import httpx2
from pydantic import RootModel

from lmx_lab.client.bodies import as_content, shaped
from lmx_lab.client.connection import QUICK_S, HttpConnection
from lmx_lab.client.credentials import Credentials
from lmx_lab.client.daemon_connection import DaemonConnection, DaemonRequest
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
"""For requests that wait until an MCP server has ended, or others are done with it."""


class _McpTest(RootModel[McpTestPassed | McpTestFailed]):
    pass


class DaemonRoutes:
    """Requests to the daemon that ``access`` names, on one loop.

    Every failure is a ``LabError``: the daemon's own by their codes, ``UnreachableError`` where none answers in its
    words. What can be repeated without doing more is repeated once after a break of the connection; the rest raises
    ``ConnectionLostError``, and may or may not have been done.
    """

    def __init__(self, access: Credentials, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._line = DaemonConnection(access, transport=transport)

    @property
    def access(self) -> Credentials:
        """Where the daemon is, and its token."""
        return self._line.access

    @property
    def url(self) -> str:
        """Where the daemon is, as far as is known."""
        return self.access.url

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        await self._line.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def connection(self) -> HttpConnection:
        """To where the daemon is by now, for a WebSocket; who is there was asked just now, without the token.

        Raises:
            UnreachableError: nobody is, or somebody else than the daemon of the state file.
        """
        return await self._line.connection()

    # The daemon

    async def health(self) -> Health:
        """That a daemon answers, and which; needs no token."""
        return await self._line.health()

    async def state(self) -> DaemonRecord:
        """What it is, what it does, what it keeps, how much it allows."""
        return await self._line.ask(_get("/v3/daemon"), DaemonRecord)

    async def shut_down(self, *, mode: Literal["drain", "now"] = "drain", grace_s: float = 30.0) -> None:
        """End the daemon; returns when it has begun to. Running turns have ``grace_s`` seconds, with ``now`` none;
        queued ones run at the next start."""
        content = as_content(shaped(Shutdown, mode=mode, grace_s=grace_s))
        request = DaemonRequest(method="POST", path="/v3/daemon/shutdown", content=content, repeatable=True)
        await self._line.ask(request, ShutdownAnswer)

    # Sessions

    async def create_session(self, body: CreateSession) -> SessionRecord:
        """A new session; if there is one of this id, that one, as it is."""
        if body.session_id is None:
            # It can be repeated, then.
            body = body.model_copy(update={"session_id": new_id("ses")})
        request = DaemonRequest(method="POST", path="/v3/sessions", content=as_content(body), repeatable=True)
        return await self._line.ask(request, SessionRecord)

    async def sessions(
        self, *, limit: int | None = None, cursor: str | None = None, archived: bool = False, q: str | None = None
    ) -> SessionList:
        """The sessions, the last used first, in pages.

        Args:
            limit: Of one page.
            cursor: ``next_cursor`` of the page before.
            archived: List those that are archived, in the place of the others.
            q: Part of a title or an id.
        """
        request = _get("/v3/sessions", limit=limit, cursor=cursor, archived=archived or None, q=q)
        return await self._line.ask(request, SessionList)

    async def read_session(self, session_id: str) -> SessionSnapshot:
        """A session with its messages, turns and pending permissions, and the cursor from which events continue it."""
        return await self._line.ask(_get(_session(session_id)), SessionSnapshot)

    async def change_session(self, session_id: str, change: ChangeSession) -> SessionRecord:
        """Set what is set in ``change``.

        Raises:
            RevisionConflictError: somebody else has changed it since that revision.
        """
        content = as_content(change)
        return await self._line.ask(
            DaemonRequest(method="PATCH", path=_session(session_id), content=content), SessionRecord
        )

    async def delete_session(self, session_id: str) -> None:
        """Cancel its turns and delete it. One that is not there is deleted already."""
        await self._line.do(DaemonRequest(method="DELETE", path=_session(session_id), repeatable=True))

    async def fork_session(self, session_id: str, fork: ForkSession) -> SessionRecord:
        """A new session with the messages of this one, all or up to a turn."""
        return await self._line.ask(_post(f"{_session(session_id)}/fork", as_content(fork)), SessionRecord)

    # Turns

    async def submit_turn(self, session_id: str, turn: SubmitTurn) -> TurnAccepted:
        """Let the model answer; returns once the daemon is bound to do so.

        Raises:
            TurnInProgressError: with ``when_busy="reject"``.
            QueueFullError: too many turns wait.
            IdempotencyConflictError: there is a turn of this id with another body.
        """
        if turn.turn_id is None:
            turn = turn.model_copy(update={"turn_id": new_id("trn")})
        path = f"{_session(session_id)}/turns"
        request = DaemonRequest(method="POST", path=path, content=as_content(turn), repeatable=True)
        return await self._line.ask(request, TurnAccepted)

    async def read_turn(self, session_id: str, turn_id: str, wait_s: float = 0.0) -> TurnRecord:
        """A turn; with ``wait_s``, which is at most 60, once it has ended, or after that time."""
        path = f"{_session(session_id)}/turns/{_part('turn_id', turn_id)}"
        return await self._line.ask(_get(path, wait_s=wait_s), TurnRecord)

    async def cancel_turns(self, session_id: str, cancel: CancelTurns) -> CancelAnswer:
        """End the active turn, or one by its id, or the queued ones too. What has ended stays as it is."""
        # Which turn is the active one may be another matter the second time.
        repeatable = cancel.turn_id is not None and not cancel.queued
        path, content = f"{_session(session_id)}/cancel", as_content(cancel)
        return await self._line.ask(
            DaemonRequest(method="POST", path=path, content=content, repeatable=repeatable), CancelAnswer
        )

    # Permissions

    async def permissions(self) -> list[PermissionRecord]:
        """Those that wait for a decision, of all sessions."""
        return (await self._line.ask(_get("/v3/permissions"), PermissionList)).permissions

    async def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], *, scope: Literal["once", "session"] = "once"
    ) -> PermissionRecord:
        """Allow or deny one call, with exactly its arguments, or with ``session`` this tool for all of its session.

        Raises:
            AlreadyResolvedError: somebody else has decided; the message says how.
            PermissionExpiredError: nobody did in time, or the turn has ended.
        """
        content = as_content(shaped(Decision, decision=decision, scope=scope))
        path = f"/v3/permissions/{_part('permission_id', permission_id)}"
        return await self._line.ask(_post(path, content), PermissionRecord)

    # MCP servers

    async def mcp_servers(self) -> list[McpServerRecord]:
        """All of them, and how they are."""
        return (await self._line.ask(_get("/v3/mcp/servers"), McpServerList)).servers

    async def add_mcp_server(self, config: McpServerConfig) -> McpServerRecord:
        """Configure a server and start it; ``mcp.status`` events tell how that goes.

        Raises:
            McpServerExistsError: the name is taken.
        """
        return await self._line.ask(_post("/v3/mcp/servers", as_content(config), PROGRAM_S), McpServerRecord)

    async def mcp_server(self, name: str) -> McpServerRecord:
        """One of them, with the last lines of its stderr."""
        return await self._line.ask(_get(_server(name)), McpServerRecord)

    async def change_mcp_server(self, name: str, change: ChangeMcpServer) -> McpServerRecord:
        """Set what is set in ``change``, and start it anew with that. A value ``***`` leaves a secret as it is."""
        content = as_content(change)
        request = DaemonRequest(method="PATCH", path=_server(name), content=content, within_s=PROGRAM_S)
        return await self._line.ask(request, McpServerRecord)

    async def remove_mcp_server(self, name: str) -> None:
        """Stop it and forget it. One that is not there is removed already."""
        await self._line.do(DaemonRequest(method="DELETE", path=_server(name), within_s=PROGRAM_S, repeatable=True))

    async def restart_mcp_server(self, name: str) -> McpServerRecord:
        """Stop it and start it, also after it was given up."""
        return await self._line.ask(_post(f"{_server(name)}/restart", None, PROGRAM_S), McpServerRecord)

    async def test_mcp_server(self, server: str | McpServerConfig) -> McpTestPassed | McpTestFailed:
        """Start a server, list its tools, stop it; one that runs is left alone, and nothing is kept.

        Args:
            server: The name of one that is configured, or a configuration.
        """
        if isinstance(server, str):
            path, content = f"{_server(server)}/test", None
            start_s = (await self.mcp_server(server)).start_timeout_s
        else:
            path, content, start_s = "/v3/mcp/test", as_content(server), server.start_timeout_s
        return (await self._line.ask(_post(path, content, start_s + PROGRAM_S), _McpTest)).root

    async def mcp_tools(self, name: str) -> list[ToolRecord]:
        """The tools of a server, as the model is told of them."""
        return (await self._line.ask(_get(f"{_server(name)}/tools"), ToolList)).tools

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
        """Events by polling, the oldest first. ``events()`` loses none on the way and asks less often.

        Args:
            after: The cursor of the page before; 0 for all that is kept. By default only what is new.
            stream_id: Where that cursor is from.
            wait_s: How long the answer may wait for an event, at most 60.
            types: Such as ``turn.done``, ``tool.*``; by default all.

        Raises:
            CursorExpiredError: events after the cursor are not there; ``reason`` says why.
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
        return await self._line.ask(request, EventPage)


def _get(path: str, *, wait_s: float = 0.0, **params: str | int | bool | list[str] | None) -> DaemonRequest:
    """With the parameters that are not None."""
    written = {name: _written(value) for name, value in params.items() if value is not None}
    if wait_s:
        # Not by str(), which writes small ones as 1e-05.
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
    """An id as a part of a path, of which it cannot be more.

    Raises:
        InvalidRequestError: nothing has such an id.
    """
    if not re.fullmatch(PATTERN, value, re.ASCII):
        said = f"{name} is {value!r:.80}; it can have 1 to 64 letters, digits, '-' and '_'"
        raise InvalidRequestError(said, param=name)
    return value
