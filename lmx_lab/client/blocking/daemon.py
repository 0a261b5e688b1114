"""The client of the daemon for callers that block: scripts, threads, cells."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import httpx2
from pydantic import JsonValue

from lmx_lab.client.blocking.portal import BlockingClient
from lmx_lab.client.blocking.session import Session
from lmx_lab.client.blocking.subscription import BlockingSubscription, check_upstream
from lmx_lab.client.cursors import CursorStore
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.wire.daemon import DaemonRecord, Health
from lmx_lab.wire.event_stream import EventPage
from lmx_lab.wire.mcp import (
    ChangeMcpServer,
    McpServerConfig,
    McpServerRecord,
    McpTestFailed,
    McpTestPassed,
    ToolRecord,
)
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

    Every verb waits, and an interrupt (Ctrl-C) cancels what it waits for. What each does, takes and raises is said
    there.

    Raises:
        InvalidRequestError: an address or a token that could never do.
        HostingError: from every verb, where the daemon runs on the very loop that would wait; from those that wait for
            a turn, where the model's server does. It says what to do.
    """

    def __init__(self, base_url: str, *, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(AsyncDaemonClient(base_url, token=token, transport=transport))

    @classmethod
    def discover(
        cls, home: str | os.PathLike[str] | None = None, *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> Self:
        """A client of the daemon that this user runs, and of the next one in the same folder. Reads its state file and
        asks nobody.

        Args:
            home: By default LMX_LAB_HOME, else ``~/.lmx-lab``.

        Raises:
            UnreachableError: there is none; the message says how to start it.
        """
        client = cls.__new__(cls)
        client._begin(AsyncDaemonClient.discover(home, transport=transport))
        return client

    # The daemon

    def health(self) -> Health:
        """That a daemon answers, and which; needs no token."""
        return self._portal.run(self._client.health())

    def state(self) -> DaemonRecord:
        """What it is, what it does, what it keeps, how much it allows."""
        return self._portal.run(self._client.state())

    def shut_down(self, *, mode: Literal["drain", "now"] = "drain", grace_s: float = 30.0) -> None:
        """End the daemon; returns when it has begun to."""
        self._portal.run(self._client.shut_down(mode=mode, grace_s=grace_s))

    # Sessions

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
        """A new session, or the one of this id, which stays as it is."""
        made = self._client.session(
            session_id,
            title=title,
            model=model,
            system_prompt=system_prompt,
            tools=tools,
            messages=messages,
            metadata=metadata,
        )
        return Session(self._client, self._portal, self._portal.run(made))

    def create_session(self, body: CreateSession) -> SessionRecord:
        """A new session; if there is one of this id, that one, as it is."""
        return self._portal.run(self._client.create_session(body))

    def sessions(
        self, *, limit: int | None = None, cursor: str | None = None, archived: bool = False, q: str | None = None
    ) -> SessionList:
        """The sessions, the last used first, in pages."""
        return self._portal.run(self._client.sessions(limit=limit, cursor=cursor, archived=archived, q=q))

    def read_session(self, session_id: str) -> SessionSnapshot:
        """A session with its messages, turns and pending permissions, and the cursor from which events continue it."""
        return self._portal.run(self._client.read_session(session_id))

    def change_session(self, session_id: str, change: ChangeSession) -> SessionRecord:
        """Set what is set in ``change``."""
        return self._portal.run(self._client.change_session(session_id, change))

    def delete_session(self, session_id: str) -> None:
        """Cancel its turns and delete it. One that is not there is deleted already."""
        self._portal.run(self._client.delete_session(session_id))

    def fork_session(self, session_id: str, fork: ForkSession) -> SessionRecord:
        """A new session with the messages of this one, all or up to a turn."""
        return self._portal.run(self._client.fork_session(session_id, fork))

    # Turns

    def submit_turn(self, session_id: str, turn: SubmitTurn) -> TurnAccepted:
        """Let the model answer; returns once the daemon is bound to do so."""
        return self._portal.run(self._client.submit_turn(session_id, turn))

    def read_turn(self, session_id: str, turn_id: str, wait_s: float = 0.0) -> TurnRecord:
        """A turn; with ``wait_s``, which is at most 60, once it has ended, or after that time."""
        if wait_s:
            check_upstream(self._client, self._portal)
        return self._portal.run(self._client.read_turn(session_id, turn_id, wait_s))

    def cancel_turns(self, session_id: str, cancel: CancelTurns) -> CancelAnswer:
        """End the active turn, or one by its id, or the queued ones too. What has ended stays as it is."""
        return self._portal.run(self._client.cancel_turns(session_id, cancel))

    # Permissions

    def permissions(self) -> list[PermissionRecord]:
        """Those that wait for a decision, of all sessions."""
        return self._portal.run(self._client.permissions())

    def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], *, scope: Literal["once", "session"] = "once"
    ) -> PermissionRecord:
        """Let a call run, or not."""
        return self._portal.run(self._client.decide(permission_id, decision, scope=scope))

    # MCP servers

    def mcp_servers(self) -> list[McpServerRecord]:
        """All that are configured, and how they are."""
        return self._portal.run(self._client.mcp_servers())

    def add_mcp_server(self, config: McpServerConfig) -> McpServerRecord:
        """Add one, and start it; returns before it is ready."""
        return self._portal.run(self._client.add_mcp_server(config))

    def mcp_server(self, name: str) -> McpServerRecord:
        """One of them."""
        return self._portal.run(self._client.mcp_server(name))

    def change_mcp_server(self, name: str, change: ChangeMcpServer) -> McpServerRecord:
        """Set what is set in ``change``, and start it again."""
        return self._portal.run(self._client.change_mcp_server(name, change))

    def remove_mcp_server(self, name: str) -> None:
        """Stop it and forget it."""
        self._portal.run(self._client.remove_mcp_server(name))

    def restart_mcp_server(self, name: str) -> McpServerRecord:
        """Stop it and start it again."""
        return self._portal.run(self._client.restart_mcp_server(name))

    def test_mcp_server(self, server: str | McpServerConfig) -> McpTestPassed | McpTestFailed:
        """Whether it starts and lists its tools: one of the daemon's by name, or any. It changes nothing."""
        return self._portal.run(self._client.test_mcp_server(server))

    def mcp_tools(self, name: str) -> list[ToolRecord]:
        """The tools of one of them."""
        return self._portal.run(self._client.mcp_tools(name))

    # Events

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
        """Events by polling, the oldest first. ``events()`` loses none on the way and asks less often."""
        if wait_s:
            check_upstream(self._client, self._portal)
        page = self._client.page(
            after=after, stream_id=stream_id, limit=limit, wait_s=wait_s, session_ids=session_ids, types=types
        )
        return self._portal.run(page)

    def events(
        self,
        *,
        after: int | None = None,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
        cursor: CursorStore | None = None,
    ) -> BlockingSubscription:
        """Events as they come, also over breaks and restarts: ``with client.events() as events: for event in events``.

        Args:
            after: A cursor: what came after that event, 0 for all that is kept. By default only what is new.
            session_ids: By default of all sessions, and what is of none.
            types: Such as ``turn.done``, ``tool.*``; by default all.
            cursor: Where to keep the last event that was seen, and to go on from.
        """
        subscription = self._client.events(after=after, session_ids=session_ids, types=types, cursor=cursor)
        return BlockingSubscription(self._client, self._portal, subscription)
