"""Provide the blocking client of the daemon, for scripts, threads and notebook cells."""

# Generated from daemon.py, daemon_routes.py by "make blocking"; do not edit.

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import httpx2
from pydantic import JsonValue

from lmx_lab.client.blocking.base import BlockingClient
from lmx_lab.client.blocking.session import Session
from lmx_lab.client.blocking.subscription import BlockingSubscription
from lmx_lab.client.cursors import CursorStore
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.wire.daemon import DaemonRecord, Health
from lmx_lab.wire.events import EventPage
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
    """A blocking client of a daemon, for any thread: ``with DaemonClient.discover() as client``.

    It has the methods of ``AsyncDaemonClient``. Every method waits, and an interrupt (Ctrl-C) cancels the request.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(self, base_url: str, *, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(AsyncDaemonClient(base_url, token=token, transport=transport))

    @classmethod
    def discover(
        cls, home: str | os.PathLike[str] | None = None, *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> Self:
        """Return a client of this user's daemon, even after the daemon has been restarted.

        Reads the daemon's state file and sends nothing.

        Args:
            home: The lab's home folder; by default LMX_LAB_HOME, or ``~/.lmx-lab`` if that is not set.

        Raises:
            UnreachableError: no daemon is running; the message contains the command that starts one.
        """
        client = cls.__new__(cls)
        client._start(AsyncDaemonClient.discover(home, transport=transport))
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
        """Create a session. A session of this id that exists is returned unchanged.

        Args:
            model: The model of its turns; by default the one that the model server has loaded.
            tools: Names of the tools that its turns may use, or ``time__*`` for all tools of the MCP server ``time``.
                By default all tools; [] for none.
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
        """Subscribe to events. The subscription continues after lost connections and restarts of the daemon.

        ``with client.events() as events: for event in events: …``

        Args:
            after: Return events after this cursor; 0 for all events in the log. By default only new events.
            session_ids: Return events of these sessions only; by default all events, including those without a session.
            types: Return events of these types only, such as ``turn.done`` or ``tool.*``; by default all types.
            cursor: Stores the last event that was read; the next subscription with it continues there.
        """
        return BlockingSubscription(
            self._client,
            self._portal,
            self._client.events(after=after, session_ids=session_ids, types=types, cursor=cursor),
        )

    def health(self) -> Health:
        """Identify the daemon that answers. Needs no token."""
        return self._portal.run(self._client.health())

    def state(self) -> DaemonRecord:
        """Return the daemon's state: its ids, counts, limits and model server."""
        return self._portal.run(self._client.state())

    def shut_down(self, *, mode: Literal["drain", "now"] = "drain", grace_s: float = 30.0) -> None:
        """Stop the daemon. Returns when the daemon has started to stop.

        Running turns have ``grace_s`` seconds to end; with mode ``now`` they are cancelled immediately. Queued turns
        run after the next start.
        """
        self._portal.run(self._client.shut_down(mode=mode, grace_s=grace_s))

    def create_session(self, body: CreateSession) -> SessionRecord:
        """Create a session. A session of this id that exists is returned unchanged."""
        return self._portal.run(self._client.create_session(body))

    def sessions(
        self, *, limit: int | None = None, cursor: str | None = None, archived: bool = False, q: str | None = None
    ) -> SessionList:
        """List the sessions in pages, the last used ones first.

        Args:
            limit: Maximum number of sessions in a page.
            cursor: ``next_cursor`` of the previous page.
            archived: List the archived sessions instead of the others.
            q: List sessions whose title or id contains this text.
        """
        return self._portal.run(self._client.sessions(limit=limit, cursor=cursor, archived=archived, q=q))

    def read_session(self, session_id: str) -> SessionSnapshot:
        """Read a session: its messages, turns, pending permissions, and the cursor from which its events continue."""
        return self._portal.run(self._client.read_session(session_id))

    def change_session(self, session_id: str, change: ChangeSession) -> SessionRecord:
        """Change the fields of a session that are set in ``change``.

        Raises:
            RevisionConflictError: another client has changed the session since that revision.
        """
        return self._portal.run(self._client.change_session(session_id, change))

    def delete_session(self, session_id: str) -> None:
        """Delete a session, and cancel its turns. Idempotent."""
        self._portal.run(self._client.delete_session(session_id))

    def fork_session(self, session_id: str, fork: ForkSession) -> SessionRecord:
        """Create a session with the messages of another one: all of them, or those up to a turn."""
        return self._portal.run(self._client.fork_session(session_id, fork))

    def submit_turn(self, session_id: str, turn: SubmitTurn) -> TurnAccepted:
        """Submit a turn. Returns when the daemon has accepted it.

        Raises:
            TurnInProgressError: another turn is running, and ``when_busy`` is ``reject``.
            QueueFullError: too many turns are waiting.
            IdempotencyConflictError: a turn of this id exists with another body.
        """
        return self._portal.run(self._client.submit_turn(session_id, turn))

    def read_turn(self, session_id: str, turn_id: str, wait_s: float = 0.0) -> TurnRecord:
        """Read a turn.

        Args:
            wait_s: Wait until the turn has ended, but at most for this time in seconds, up to 60.
        """
        return self._portal.run(self._client.read_turn(session_id, turn_id, wait_s))

    def cancel_turns(self, session_id: str, cancel: CancelTurns) -> CancelAnswer:
        """Cancel the active turn, the turn of an id, or also the queued turns. Turns that have ended stay unchanged."""
        return self._portal.run(self._client.cancel_turns(session_id, cancel))

    def permissions(self) -> list[PermissionRecord]:
        """List the permissions of all sessions that wait for a decision."""
        return self._portal.run(self._client.permissions())

    def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], *, scope: Literal["once", "session"] = "once"
    ) -> PermissionRecord:
        """Allow or deny a tool call.

        Args:
            scope: ``once``: this call with exactly its arguments. ``session``: all calls of the tool in this session.

        Raises:
            AlreadyResolvedError: another client has decided; the message has its decision.
            PermissionExpiredError: the time for a decision is over, or the turn has ended.
        """
        return self._portal.run(self._client.decide(permission_id, decision, scope=scope))

    def mcp_servers(self) -> list[McpServerRecord]:
        """List the MCP servers with their states."""
        return self._portal.run(self._client.mcp_servers())

    def add_mcp_server(self, config: McpServerConfig) -> McpServerRecord:
        """Add an MCP server and start it. ``mcp.status`` events report its state.

        Raises:
            McpServerExistsError: an MCP server of this name exists.
        """
        return self._portal.run(self._client.add_mcp_server(config))

    def mcp_server(self, name: str) -> McpServerRecord:
        """Read one MCP server, with the last lines of its standard error."""
        return self._portal.run(self._client.mcp_server(name))

    def change_mcp_server(self, name: str, change: ChangeMcpServer) -> McpServerRecord:
        """Change the fields that are set in ``change``, and restart the server. ``***`` leaves a secret unchanged."""
        return self._portal.run(self._client.change_mcp_server(name, change))

    def remove_mcp_server(self, name: str) -> None:
        """Stop and remove an MCP server. Idempotent."""
        self._portal.run(self._client.remove_mcp_server(name))

    def restart_mcp_server(self, name: str) -> McpServerRecord:
        """Restart an MCP server, even if it has failed so often that the daemon no longer restarts it."""
        return self._portal.run(self._client.restart_mcp_server(name))

    def test_mcp_server(self, server: str | McpServerConfig) -> McpTestPassed | McpTestFailed:
        """Start an MCP server, list its tools and stop it. Running servers are not affected, and nothing is stored.

        Args:
            server: The name of a configured server, or a configuration.
        """
        return self._portal.run(self._client.test_mcp_server(server))

    def mcp_tools(self, name: str) -> list[ToolRecord]:
        """List the tools of an MCP server as they are given to the model."""
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
        """Read a page of events, oldest first. Polling needs more requests than ``events()``.

        Args:
            after: The cursor of the previous page; 0 for all events in the log. By default only new events.
            stream_id: Id of the log that the cursor is from.
            limit: Maximum number of events in the page.
            wait_s: Maximum time to wait for an event, in seconds, up to 60.
            session_ids: Read events of these sessions only.
            types: Read events of these types only, such as ``turn.done`` or ``tool.*``; by default all types.

        Raises:
            CursorExpiredError: events after the cursor are not available; ``reason`` contains the cause.
        """
        return self._portal.run(
            self._client.page(
                after=after, stream_id=stream_id, limit=limit, wait_s=wait_s, session_ids=session_ids, types=types
            )
        )
