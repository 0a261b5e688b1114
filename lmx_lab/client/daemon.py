"""Provide a typed client of the daemon and of its sessions, over HTTP and a WebSocket of events.

A session runs turns to their end over lost connections and restarts of the daemon.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Self, TypedDict, Unpack

import httpx2
from pydantic import JsonValue

from lmx_lab.blocking import BlockingStream, Twin, documented_as, twin, twin_stream
from lmx_lab.client.blocking import BlockingClient
from lmx_lab.client.credentials import Credentials
from lmx_lab.client.daemon_routes import ClientTimes, DaemonRoutes
from lmx_lab.client.subscription import ConnectionState, Cursor, CursorStore, Subscription
from lmx_lab.client.turn import OnPermission, TurnFollower, TurnResult
from lmx_lab.wire.base import new_id
from lmx_lab.wire.errors import validated
from lmx_lab.wire.events import DaemonEvent
from lmx_lab.wire.sessions import (
    CancelAnswer,
    CancelTurns,
    ChangeSession,
    CreateSession,
    ForkSession,
    SessionMessage,
    SessionRecord,
    SessionSnapshot,
    SubmitTurn,
    TurnOverrides,
    TurnRecord,
)

# Sessions

WhenBusy = Literal["enqueue", "reject", "interrupt"]


class SessionFields(TypedDict, total=False):
    """The fields of a session that can be changed. Omitted fields stay unchanged; None removes a value."""

    title: str | None
    model: str | None
    system_prompt: str | None
    tools: list[str] | None
    metadata: dict[str, JsonValue] | None
    archived: bool
    revision: int
    """The revision that was read. If the session has another revision now, the change is refused."""


class AsyncSession:
    """One session. ``AsyncDaemonClient.session()`` returns it; closing that client cancels the turns that run here."""

    def __init__(
        self, client: DaemonRoutes, session_id: str, turns: set[TurnFollower] | None = None, *, origin: str = ""
    ) -> None:
        """
        Args:
            origin: How the session was opened, for display: created or reopened.
        """
        self.session_id = session_id
        self.origin = origin
        self._client = client
        self._turns = set() if turns is None else turns

    @property
    def url(self) -> str:
        """The daemon's address at the time of the last request."""
        return self._client.url

    def __repr__(self) -> str:
        return f"<AsyncSession {self.session_id} of {self.url}{self.origin and f', {self.origin}'}>"

    async def run(
        self,
        text: str,
        *,
        turn_id: str | None = None,
        when_busy: WhenBusy = "enqueue",
        overrides: TurnOverrides | None = None,
        on_permission: OnPermission | None = None,
        on_event: Callable[[DaemonEvent], object] | None = None,
    ) -> TurnResult:
        """Run a turn and return its result. Continues over lost connections and restarts of the daemon.

        Cancelling this, or an error in a callback, cancels the turn.

        Args:
            turn_id: Id of the turn. If a turn of this id was submitted before with the same text, its result is
                returned.
            when_busy: What to do while another turn is running in the session: wait, be refused, or interrupt it.
            on_permission: Decides on tool calls that need a permission. By default other clients decide.
            on_event: Called on this loop with each event of the turn.

        Raises:
            TurnError, EngineError …: the turn has failed. The class is the one for its error code, and the message
                names the turn.
            UnreachableError: no daemon answers.
            TurnInProgressError, QueueFullError, SessionNotFoundError …: the turn was not accepted.
        """
        turn = self._follower(text, turn_id, when_busy, overrides, on_permission)
        async with aclosing(turn.events()) as events:
            async for event in events:
                if on_event is not None:
                    on_event(event)
        return turn.result()

    async def stream(
        self,
        text: str,
        *,
        turn_id: str | None = None,
        when_busy: WhenBusy = "enqueue",
        overrides: TurnOverrides | None = None,
        on_permission: OnPermission | None = None,
    ) -> AsyncGenerator[DaemonEvent, None]:
        """Run a turn and yield its events, up to ``turn.done``. Closing the stream before its end cancels the turn.

        Events that are no longer available are replaced by a ``ResetFrame`` and a ``SnapshotFrame``. The last event may
        then be missing, too.

        Args:
            turn_id: As in ``run``.
            when_busy: As in ``run``.
            on_permission: Decides on tool calls that need a permission. By default other clients decide.

        Raises:
            LabError: as ``run``, after all events.
        """
        turn = self._follower(text, turn_id, when_busy, overrides, on_permission)
        async with aclosing(turn.events()) as events:
            async for event in events:
                yield event
        turn.result()

    def _follower(
        self,
        text: str,
        turn_id: str | None,
        when_busy: WhenBusy,
        overrides: TurnOverrides | None,
        on_permission: OnPermission | None,
    ) -> TurnFollower:
        fields: dict[str, object] = {"turn_id": turn_id or new_id("trn"), "content": text, "when_busy": when_busy}
        if overrides is not None:
            fields["overrides"] = overrides
        return TurnFollower(self._client, self.session_id, validated(SubmitTurn, fields), on_permission, self._turns)

    async def snapshot(self) -> SessionSnapshot:
        """Read the complete session. Its ``cursor`` is the one from which its events continue."""
        return await self._client.read_session(self.session_id)

    async def change(self, **fields: Unpack[SessionFields]) -> SessionRecord:
        """Change fields of the session.

        Raises:
            RevisionConflictError: another client has changed the session since ``revision``.
        """
        return await self._client.change_session(self.session_id, validated(ChangeSession, fields))

    async def delete(self) -> None:
        """Delete the session with its turns. Running turns are cancelled. Idempotent."""
        await self._client.delete_session(self.session_id)

    async def fork(self, *, through_turn_id: str | None = None, title: str | None = None) -> AsyncSession:
        """Create a session that continues from the messages of this one.

        Args:
            through_turn_id: The last turn to include; by default all turns that have ended are included.
        """
        fields = {"through_turn_id": through_turn_id, "title": title}
        given = {name: value for name, value in fields.items() if value is not None}
        record = await self._client.fork_session(self.session_id, validated(ForkSession, given))
        return AsyncSession(self._client, record.session_id, self._turns)

    async def cancel(self, turn_id: str | None = None, *, queued: bool = False) -> CancelAnswer:
        """Cancel a turn. Idempotent.

        Args:
            turn_id: By default the active turn.
            queued: Whether to cancel the queued turns as well.
        """
        fields: dict[str, object] = {"queued": queued} if turn_id is None else {"turn_id": turn_id, "queued": queued}
        return await self._client.cancel_turns(self.session_id, validated(CancelTurns, fields))

    async def turn(self, turn_id: str, *, wait_s: float = 0.0) -> TurnRecord:
        """Read a turn.

        Args:
            wait_s: Wait until the turn has ended, but at most for this time in seconds, up to 60.
        """
        return await self._client.read_turn(self.session_id, turn_id, wait_s=wait_s)


class Session:
    """One session, with the methods of ``AsyncSession``. ``DaemonClient.session()`` returns it.

    An interrupt (Ctrl-C) cancels the turn that is waited for. Callbacks are called in the waiting thread.
    """

    def __init__(self, client: Twin[Any], session: AsyncSession) -> None:
        self._portal = client._portal
        self._async = session

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self._async.session_id

    def __repr__(self) -> str:
        return repr(self._async).replace("AsyncSession", type(self).__name__, 1)

    run = twin(AsyncSession.run)
    stream = twin_stream(AsyncSession.stream)
    snapshot = twin(AsyncSession.snapshot)
    change = twin(AsyncSession.change)
    delete = twin(AsyncSession.delete)
    # A lambda, because the class does not exist yet.
    fork = twin(AsyncSession.fork, lambda self, forked: Session(self, forked))  # noqa: PLW0108
    cancel = twin(AsyncSession.cancel)
    turn = twin(AsyncSession.turn)


# The client


class AsyncDaemonClient(DaemonRoutes):
    """A client of one daemon, on one event loop: ``async with AsyncDaemonClient.discover() as client``.

    Args:
        base_url: The address, optionally with a proxy's prefix, a trailing slash or ``/v3``.
        token: The daemon's token, which is in ``state.json`` in its folder. It is never displayed.
        transport: Replaces the network, for tests. Closing the client closes it.
        times: Delays and time limits of subscriptions and turns.

    Raises:
        InvalidRequestError: the address or the token is not valid.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None,
        transport: httpx2.AsyncBaseTransport | None = None,
        times: ClientTimes | None = None,
    ) -> None:
        super().__init__(Credentials(base_url, token), transport=transport, times=times)
        self._turns: set[TurnFollower] = set()
        """The turns of ``run`` and ``stream`` that have not ended."""

    @classmethod
    def discover(
        cls,
        home: str | os.PathLike[str] | None = None,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        times: ClientTimes | None = None,
    ) -> Self:
        """Return a client of this user's daemon, even after the daemon has been restarted.

        Reads the daemon's state file and sends nothing.

        Args:
            home: The lab's home folder; by default LMX_LAB_HOME, or ``~/.lmx-lab`` if that is not set.

        Raises:
            UnreachableError: no daemon is running; the message contains the command that starts one.
        """
        credentials = Credentials.from_home(home)
        client = cls(credentials.url, token=credentials.endpoint.token, transport=transport, times=times)
        client._connection.credentials = credentials
        return client

    async def aclose(self) -> None:
        """Cancel the turns of ``run`` and ``stream`` that have not ended, then close all connections. Idempotent."""
        await asyncio.gather(*[turn.cancel() for turn in self._turns], return_exceptions=True)
        await super().aclose()

    async def session(
        self,
        session_id: str | None = None,
        *,
        title: str | None = None,
        model: str | None = None,
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        messages: Sequence[SessionMessage] = (),
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> AsyncSession:
        """Create a session. A session of this id that exists is returned unchanged. The ``repr`` of the session
        shows whether it was created or reopened.

        Args:
            session_id: A name of letters, digits, ``-`` and ``_``; by default a new one.
            model: The model of its turns; by default the one that the model server has loaded.
            tools: Names of the tools that its turns may use, or ``time__*`` for all tools of the MCP server ``time``.
                By default all tools; [] for none.
            messages: The initial history.
        """
        fields: dict[str, object] = {
            "session_id": session_id,
            "title": title,
            "model": model,
            "system_prompt": system_prompt,
            # A string is passed on unchanged and refused below; list() would convert it to a list of letters.
            "tools": tools if tools is None or isinstance(tools, str) else list(tools),
            "messages": tuple(messages) or None,
            "metadata": dict(metadata) if isinstance(metadata, Mapping) else metadata,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        record = await self.create_session(validated(CreateSession, given))
        is_used = record.updated_at != record.created_at
        origin = f"reopened, last used {record.updated_at[:16].replace('T', ' ')} UTC" if is_used else "created"
        return AsyncSession(self, record.session_id, self._turns, origin=origin)

    def events(
        self,
        *,
        after: int | None = None,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
        cursor: CursorStore | None = None,
    ) -> Subscription:
        """Subscribe to events. The subscription continues after lost connections and restarts of the daemon.

        ``async with client.events() as events: async for event in events: …``

        Args:
            after: Return events after this cursor; 0 for all events in the log. By default only new events.
            session_ids: Return events of these sessions only; by default all events, including those without a session.
            types: Return events of these types only, such as ``turn.done`` or ``tool.*``; by default all types.
            cursor: Stores the last event that was read; the next subscription with it continues there.
        """
        return Subscription(self, after=after, session_ids=session_ids, types=types, cursor=cursor)


class BlockingSubscription(BlockingStream[DaemonEvent]):
    """Events of the daemon for a ``for`` loop: ``with client.events() as events: for event in events: …``

    It has the properties and methods of ``Subscription``, and starts when the ``with`` block is entered.
    """

    def __init__(self, client: DaemonClient, subscription: Subscription) -> None:
        super().__init__(client._portal, lambda _: subscription)
        self._url = client.url
        self._async = subscription

    @property
    def state(self) -> ConnectionState:
        """The current state of the connection."""
        return self._async.state

    @property
    def cursor(self) -> Cursor | None:
        """The cursor after the last event that was read; None before the daemon has answered for the first time."""
        return self._async.cursor

    @property
    def reconnects(self) -> int:
        """Number of reconnects so far."""
        return self._async.reconnects

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._url}: {self.state.state}>"

    def __enter__(self) -> Self:
        self._started()
        return self

    @documented_as(Subscription.opened)
    def opened(self) -> Cursor | None:
        self._started()
        return self._portal.run(self._async.opened())

    def states(self) -> BlockingStream[ConnectionState]:
        """Yield the current state, then each change until the subscription is closed. Any number of readers."""
        return BlockingStream(self._portal, lambda _: aclosing(self._async.states()))


class DaemonClient(BlockingClient[AsyncDaemonClient]):
    """A blocking client of a daemon, for any thread: ``with DaemonClient.discover() as client``.

    It has the methods of ``AsyncDaemonClient``. Every method waits, and an interrupt (Ctrl-C) cancels the request.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(self, base_url: str, *, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(AsyncDaemonClient(base_url, token=token, transport=transport))

    @classmethod
    @documented_as(AsyncDaemonClient.discover)
    def discover(
        cls,
        home: str | os.PathLike[str] | None = None,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        times: ClientTimes | None = None,
    ) -> Self:
        client = cls.__new__(cls)
        BlockingClient.__init__(client, AsyncDaemonClient.discover(home, transport=transport, times=times))
        return client

    @documented_as(AsyncDaemonClient.events)
    def events(
        self,
        *,
        after: int | None = None,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
        cursor: CursorStore | None = None,
    ) -> BlockingSubscription:
        return BlockingSubscription(
            self, self._async.events(after=after, session_ids=session_ids, types=types, cursor=cursor)
        )

    session = twin(AsyncDaemonClient.session, Session)
    health = twin(AsyncDaemonClient.health)
    state = twin(AsyncDaemonClient.state)
    shut_down = twin(AsyncDaemonClient.shut_down)
    create_session = twin(AsyncDaemonClient.create_session)
    sessions = twin(AsyncDaemonClient.sessions)
    read_session = twin(AsyncDaemonClient.read_session)
    change_session = twin(AsyncDaemonClient.change_session)
    delete_session = twin(AsyncDaemonClient.delete_session)
    fork_session = twin(AsyncDaemonClient.fork_session)
    submit_turn = twin(AsyncDaemonClient.submit_turn)
    read_turn = twin(AsyncDaemonClient.read_turn)
    cancel_turns = twin(AsyncDaemonClient.cancel_turns)
    permissions = twin(AsyncDaemonClient.permissions)
    decide = twin(AsyncDaemonClient.decide)
    mcp_servers = twin(AsyncDaemonClient.mcp_servers)
    add_mcp_server = twin(AsyncDaemonClient.add_mcp_server)
    mcp_server = twin(AsyncDaemonClient.mcp_server)
    change_mcp_server = twin(AsyncDaemonClient.change_mcp_server)
    remove_mcp_server = twin(AsyncDaemonClient.remove_mcp_server)
    restart_mcp_server = twin(AsyncDaemonClient.restart_mcp_server)
    test_mcp_server = twin(AsyncDaemonClient.test_mcp_server)
    mcp_tools = twin(AsyncDaemonClient.mcp_tools)
    page = twin(AsyncDaemonClient.page)
