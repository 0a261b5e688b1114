"""Provide a session of the daemon, which runs turns to their end over lost connections and restarts of the daemon."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Literal, TypedDict, Unpack

from pydantic import JsonValue

# BlockingStream: in the type hints of streams.
from lmx_lab.blocking import BlockingStream, Twin, twin, twin_stream  # noqa: F401
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.request_bodies import build_body
from lmx_lab.client.turn import OnPermission, TurnFollower, TurnResult
from lmx_lab.wire.base import new_id
from lmx_lab.wire.events import DaemonEvent
from lmx_lab.wire.sessions import (
    CancelAnswer,
    CancelTurns,
    ChangeSession,
    ForkSession,
    SessionRecord,
    SessionSnapshot,
    SubmitTurn,
    TurnOverrides,
    TurnRecord,
)

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

    def __init__(self, client: DaemonRoutes, session_id: str, turns: set[TurnFollower] | None = None) -> None:
        self.session_id = session_id
        self._client = client
        self._turns = set() if turns is None else turns

    @property
    def url(self) -> str:
        """The daemon's address at the time of the last request."""
        return self._client.url

    def __repr__(self) -> str:
        return f"<AsyncSession {self.session_id} of {self.url}>"

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
        return TurnFollower(self._client, self.session_id, build_body(SubmitTurn, **fields), on_permission, self._turns)

    async def snapshot(self) -> SessionSnapshot:
        """Read the complete session. Its ``cursor`` is the one from which its events continue."""
        return await self._client.read_session(self.session_id)

    async def change(self, **fields: Unpack[SessionFields]) -> SessionRecord:
        """Change fields of the session.

        Raises:
            RevisionConflictError: another client has changed the session since ``revision``.
        """
        return await self._client.change_session(self.session_id, build_body(ChangeSession, **fields))

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
        record = await self._client.fork_session(self.session_id, build_body(ForkSession, **given))
        return AsyncSession(self._client, record.session_id, self._turns)

    async def cancel(self, turn_id: str | None = None, *, queued: bool = False) -> CancelAnswer:
        """Cancel a turn. Idempotent.

        Args:
            turn_id: By default the active turn.
            queued: Whether to cancel the queued turns as well.
        """
        fields: dict[str, object] = {"queued": queued} if turn_id is None else {"turn_id": turn_id, "queued": queued}
        return await self._client.cancel_turns(self.session_id, build_body(CancelTurns, **fields))

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
        return f"<{type(self).__name__} {self.session_id} of {self._async.url}>"

    run = twin(AsyncSession.run)
    stream = twin_stream(AsyncSession.stream)
    snapshot = twin(AsyncSession.snapshot)
    change = twin(AsyncSession.change)
    delete = twin(AsyncSession.delete)
    # A lambda, because the class does not exist yet.
    fork = twin(AsyncSession.fork, lambda self, forked: Session(self, forked))  # noqa: PLW0108
    cancel = twin(AsyncSession.cancel)
    turn = twin(AsyncSession.turn)
