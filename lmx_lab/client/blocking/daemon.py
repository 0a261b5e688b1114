"""The client of the daemon for callers that block: scripts, threads, notebook cells."""

# Generated from daemon.py, daemon_routes.py by "make blocking"; do not edit.

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import httpx2
from pydantic import JsonValue

from lmx_lab.client.blocking.portal import BlockingClient, check_upstream
from lmx_lab.client.blocking.session import Session
from lmx_lab.client.blocking.subscription import BlockingSubscription
from lmx_lab.client.cursors import CursorStore
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.wire.daemon import DaemonRecord, Health
from lmx_lab.wire.event_stream import EventPage
from lmx_lab.wire.mcp import ChangeMcpServer, McpServerConfig, McpServerRecord, McpTestFailed, McpTestPassed, ToolRecord
from lmx_lab.wire.sessions import (
    CancelAnswer,
    CancelTurns,
    ChangeSession,
    CreateSession,
    ForkSession,
    PermissionRecord,
    SessionList,
    SessionMessage,
    SessionRecord,
    SessionSnapshot,
    SubmitTurn,
    TurnAccepted,
    TurnRecord,
)


class DaemonClient(BlockingClient[AsyncDaemonClient]):
    """``AsyncDaemonClient`` without ``await``, for any thread: ``with DaemonClient.discover() as client``.

    Every method waits, and an interrupt (Ctrl-C) cancels the request. Methods that wait for a turn also raise
    ``HostingError`` if the model's server runs on the event loop of the caller.

    Raises:
        InvalidRequestError: the address or the key is not valid.
        HostingError: from every method, if the server runs on the caller's own event loop, which would wait for itself.
    """

    def __init__(self, base_url: str, *, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(AsyncDaemonClient(base_url, token=token, transport=transport))

    @classmethod
    def discover(
        cls, home: str | os.PathLike[str] | None = None, *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> Self:
        """Return a client of this user's daemon, and of its successors in the same folder.

        Reads the daemon's state file and sends nothing.

        Args:
            home: By default LMX_LAB_HOME, else ``~/.lmx-lab``.

        Raises:
            UnreachableError: there is no daemon; the message says how to start one.
        """
        client = cls.__new__(cls)
        client._begin(AsyncDaemonClient.discover(home, transport=transport))
        return client

    def session(
        self,
        session_id: str | None = None,
        *,
        title: str | None = None,
        model: str | None = None,
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        messages: Sequence[SessionMessage] = (),
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> Session:
        """Create a session, or return the existing one of this id unchanged.

        Args:
            model: By default the model that the model server has loaded.
            tools: Tools that its turns may use: names, or all of a server, ``time__*``. [] is none; by default all.
            messages: The initial history.
        """
        return Session(
            self._client,
            self._portal,
            self._portal.run(
                self._client.session(
                    session_id,
                    title=title,
                    model=model,
                    system_prompt=system_prompt,
                    tools=tools,
                    messages=messages,
                    metadata=metadata,
                )
            ),
        )

    def events(
        self,
        *,
        after: int | None = None,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
        cursor: CursorStore | None = None,
    ) -> BlockingSubscription:
        """Subscribe to events, over lost connections and restarts of the daemon.

        ``with client.events() as events: for event in events: …``

        Args:
            after: A cursor; events after it are returned, 0 for all that are kept. By default only new events.
            session_ids: By default all sessions, and events without a session.
            types: Such as ``turn.done``, ``tool.*``; by default all.
            cursor: Stores the last event that was read, and the next subscription continues from it.
        """
        return BlockingSubscription(
            self._client,
            self._portal,
            self._client.events(after=after, session_ids=session_ids, types=types, cursor=cursor),
        )

    def health(self) -> Health:
        """Return which daemon answers; needs no token."""
        return self._portal.run(self._client.health())

    def state(self) -> DaemonRecord:
        """Return the daemon's state: ids, counts, limits, the model server."""
        return self._portal.run(self._client.state())

    def shut_down(self, *, mode: Literal["drain", "now"] = "drain", grace_s: float = 30.0) -> None:
        """Stop the daemon; returns when it has started to stop.

        Running turns have ``grace_s`` seconds to end, with mode ``now`` none; queued turns run at the next start.
        """
        self._portal.run(self._client.shut_down(mode=mode, grace_s=grace_s))

    def create_session(self, body: CreateSession) -> SessionRecord:
        """Create a session, or return the existing one of this id unchanged."""
        return self._portal.run(self._client.create_session(body))

    def sessions(
        self, *, limit: int | None = None, cursor: str | None = None, archived: bool = False, q: str | None = None
    ) -> SessionList:
        """List the sessions in pages, the last used first.

        Args:
            limit: Sessions per page.
            cursor: ``next_cursor`` of the previous page.
            archived: List the archived sessions instead of the others.
            q: Part of a title or an id.
        """
        return self._portal.run(self._client.sessions(limit=limit, cursor=cursor, archived=archived, q=q))

    def read_session(self, session_id: str) -> SessionSnapshot:
        """Read a session with its messages, turns, pending permissions, and the cursor for its events."""
        return self._portal.run(self._client.read_session(session_id))

    def change_session(self, session_id: str, change: ChangeSession) -> SessionRecord:
        """Set the fields that are set in ``change``.

        Raises:
            RevisionConflictError: another client has changed the session since that revision.
        """
        return self._portal.run(self._client.change_session(session_id, change))

    def delete_session(self, session_id: str) -> None:
        """Cancel a session's turns and delete it. Idempotent."""
        self._portal.run(self._client.delete_session(session_id))

    def fork_session(self, session_id: str, fork: ForkSession) -> SessionRecord:
        """Create a session with the messages of this one, all or up to a turn."""
        return self._portal.run(self._client.fork_session(session_id, fork))

    def submit_turn(self, session_id: str, turn: SubmitTurn) -> TurnAccepted:
        """Submit a turn; returns when the daemon has accepted it.

        Raises:
            TurnInProgressError: another turn runs, with ``when_busy="reject"``.
            QueueFullError: too many turns wait.
            IdempotencyConflictError: a turn of this id exists with another body.
        """
        return self._portal.run(self._client.submit_turn(session_id, turn))

    def read_turn(self, session_id: str, turn_id: str, wait_s: float = 0.0) -> TurnRecord:
        """Read a turn; with ``wait_s``, which is at most 60, once it has ended, or after that time in seconds."""
        if wait_s:
            check_upstream(self._client, self._portal)
        return self._portal.run(self._client.read_turn(session_id, turn_id, wait_s))

    def cancel_turns(self, session_id: str, cancel: CancelTurns) -> CancelAnswer:
        """Cancel the active turn, or one by its id, or also the queued ones. Ended turns stay unchanged."""
        return self._portal.run(self._client.cancel_turns(session_id, cancel))

    def permissions(self) -> list[PermissionRecord]:
        """List the permissions that wait for a decision, of all sessions."""
        return self._portal.run(self._client.permissions())

    def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], *, scope: Literal["once", "session"] = "once"
    ) -> PermissionRecord:
        """Allow or deny one call with exactly its arguments, or with scope ``session`` the tool in this session.

        Raises:
            AlreadyResolvedError: another client has decided; the message says how.
            PermissionExpiredError: the time for a decision is over, or the turn has ended.
        """
        return self._portal.run(self._client.decide(permission_id, decision, scope=scope))

    def mcp_servers(self) -> list[McpServerRecord]:
        """List the MCP servers with their states."""
        return self._portal.run(self._client.mcp_servers())

    def add_mcp_server(self, config: McpServerConfig) -> McpServerRecord:
        """Add an MCP server and start it; ``mcp.status`` events report its state.

        Raises:
            McpServerExistsError: the name is taken.
        """
        return self._portal.run(self._client.add_mcp_server(config))

    def mcp_server(self, name: str) -> McpServerRecord:
        """Read one MCP server, with the last lines of its stderr."""
        return self._portal.run(self._client.mcp_server(name))

    def change_mcp_server(self, name: str, change: ChangeMcpServer) -> McpServerRecord:
        """Set the fields that are set in ``change``, and restart the server. ``***`` leaves a secret unchanged."""
        return self._portal.run(self._client.change_mcp_server(name, change))

    def remove_mcp_server(self, name: str) -> None:
        """Stop and remove an MCP server. Idempotent."""
        self._portal.run(self._client.remove_mcp_server(name))

    def restart_mcp_server(self, name: str) -> McpServerRecord:
        """Restart an MCP server, also after the daemon has stopped restarting it."""
        return self._portal.run(self._client.restart_mcp_server(name))

    def test_mcp_server(self, server: str | McpServerConfig) -> McpTestPassed | McpTestFailed:
        """Start an MCP server, list its tools and stop it. A running server is not affected, and nothing is stored.

        Args:
            server: The name of a configured server, or a configuration.
        """
        return self._portal.run(self._client.test_mcp_server(server))

    def mcp_tools(self, name: str) -> list[ToolRecord]:
        """List the tools of a server, as the model receives them."""
        return self._portal.run(self._client.mcp_tools(name))

    def page(
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
        if wait_s:
            check_upstream(self._client, self._portal)
        return self._portal.run(
            self._client.page(
                after=after, stream_id=stream_id, limit=limit, wait_s=wait_s, session_ids=session_ids, types=types
            )
        )
