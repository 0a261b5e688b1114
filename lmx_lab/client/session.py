"""A session of the daemon: runs turns to their end, over lost connections and restarts of the daemon."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Literal, TypedDict, Unpack

from pydantic import JsonValue

from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.request_bodies import shaped
from lmx_lab.client.turn import FollowedTurns, TurnFollower
from lmx_lab.client.turn_permissions import OnPermission
from lmx_lab.client.turn_result import TurnResult
from lmx_lab.wire.events import DaemonEvent
from lmx_lab.wire.identifiers import new_id
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
    """The fields of a session that can be changed. Omitted fields stay unchanged; None sets a field to null."""

    title: str | None
    model: str | None
    system_prompt: str | None
    tools: list[str] | None
    metadata: dict[str, JsonValue] | None
    archived: bool
    revision: int
    """The revision that was read; if the session has another one now, the change is refused."""


class AsyncSession:
    """One session, by its id. ``AsyncDaemonClient.session()`` creates it; closing the client ends its work."""

    def __init__(self, client: DaemonRoutes, session_id: str, turns: FollowedTurns | None = None) -> None:
        self.session_id = session_id
        self._client = client
        self._turns = turns or FollowedTurns()

    def __repr__(self) -> str:
        return f"<AsyncSession {self.session_id} of {self._client.url}>"

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
        """Run a turn and return its result.

        Continues over lost connections and restarts of the daemon.
        Cancelling this, or an error in a callback, cancels the turn.

        Args:
            turn_id: The id of a turn that was submitted before with the same text returns that turn's result.
            when_busy: What to do while another turn runs in the session: wait, be refused, or replace it.
            on_permission: Decides on tools that ask for a permission. By default other clients decide.
            on_event: Called on this loop with each event of the turn.

        Raises:
            TurnError, EngineError …: the turn has failed, by the code of its error; the message names the turn.
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
        """Run a turn and return its events, up to ``turn.done``. Closing the stream before its end cancels the turn.

        A ``ResetFrame`` and a ``SnapshotFrame`` replace events that are no longer available; the last event may be
        missing then, too.

        Args:
            on_permission: Decides on tools that ask for a permission. By default other clients decide.

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
        return TurnFollower(self._client, self.session_id, shaped(SubmitTurn, **fields), on_permission, self._turns)

    async def snapshot(self) -> SessionSnapshot:
        """Read the whole session; events after its ``cursor`` continue from there."""
        return await self._client.read_session(self.session_id)

    async def change(self, **fields: Unpack[SessionFields]) -> SessionRecord:
        """Change fields of the session.

        Raises:
            RevisionConflictError: another client has changed it since ``revision``.
        """
        return await self._client.change_session(self.session_id, shaped(ChangeSession, **fields))

    async def delete(self) -> None:
        """Delete the session with its turns; running turns are cancelled. Idempotent."""
        await self._client.delete_session(self.session_id)

    async def fork(self, *, through_turn_id: str | None = None, title: str | None = None) -> AsyncSession:
        """Create a session that continues from the messages of this one.

        Args:
            through_turn_id: The last turn to include; by default all that have ended.
        """
        fields = {"through_turn_id": through_turn_id, "title": title}
        given = {name: value for name, value in fields.items() if value is not None}
        record = await self._client.fork_session(self.session_id, shaped(ForkSession, **given))
        return AsyncSession(self._client, record.session_id, self._turns)

    async def cancel(self, turn_id: str | None = None, *, queued: bool = False) -> CancelAnswer:
        """Cancel a turn, by default the active one; with ``queued`` the waiting turns, too. Idempotent."""
        fields: dict[str, object] = {"queued": queued} if turn_id is None else {"turn_id": turn_id, "queued": queued}
        return await self._client.cancel_turns(self.session_id, shaped(CancelTurns, **fields))

    async def turn(self, turn_id: str, *, wait_s: float = 0.0) -> TurnRecord:
        """Read a turn; with ``wait_s``, which is at most 60, once it has ended, or after that time in seconds."""
        return await self._client.read_turn(self.session_id, turn_id, wait_s=wait_s)
