"""One session of the daemon: turns run to their end, whatever happens to the connection meanwhile."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from pydantic import JsonValue

from lmx_lab.client.bodies import shaped
from lmx_lab.client.turn import TurnFollower
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

if TYPE_CHECKING:
    from lmx_lab.client.daemon import AsyncDaemonClient

WhenBusy = Literal["enqueue", "reject", "interrupt"]


class SessionFields(TypedDict, total=False):
    """What of a session can be changed; what is left out stays as it is, None sets to null."""

    title: str | None
    model: str | None
    system_prompt: str | None
    tools: list[str] | None
    metadata: dict[str, JsonValue] | None
    archived: bool
    revision: int
    """The one that was read; another now is refused with ``RevisionConflictError``."""


class AsyncSession:
    """One session, by its id; the client is its owner's to close."""

    def __init__(self, client: AsyncDaemonClient, session_id: str) -> None:
        self.session_id = session_id
        self._client = client

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
        """Let the model answer, and wait until it has.

        It waits over lost connections and restarts of the daemon. Cancelling this, or an error in a callback, cancels
        the turn.

        Args:
            turn_id: Of one that was submitted before, with the same text, this gives the end of that.
            when_busy: With another turn in the session: wait behind it, be refused, or take its place.
            on_permission: What to decide on tools that ask; by default others do, or time runs out.
            on_event: Called with each event of the turn, on this loop.

        Raises:
            TurnError, EngineError …: with which the turn has ended, by its code; the message names the turn.
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
        """The same as the turn's events, to ``turn.done``; closing this before the end cancels the turn.

        Where events could not be had there is a ``ResetFrame`` and a ``SnapshotFrame``, and perhaps no last event.

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
        return TurnFollower(self._client, self.session_id, shaped(SubmitTurn, **fields), on_permission)

    async def snapshot(self) -> SessionSnapshot:
        """Everything of it, as it is now; events after its ``cursor`` go on from there."""
        return await self._client.read_session(self.session_id)

    async def change(self, **fields: Unpack[SessionFields]) -> SessionRecord:
        """
        Raises:
            RevisionConflictError: somebody else has changed it since ``revision``.
        """
        return await self._client.change_session(self.session_id, shaped(ChangeSession, **fields))

    async def delete(self) -> None:
        """With all of its turns; those that run are cancelled. Again: nothing happens."""
        await self._client.delete_session(self.session_id)

    async def fork(self, *, through_turn_id: str | None = None, title: str | None = None) -> AsyncSession:
        """Another session that goes on from here.

        Args:
            through_turn_id: The last turn to take along; by default all that have ended.
        """
        fields = {"through_turn_id": through_turn_id, "title": title}
        given = {name: value for name, value in fields.items() if value is not None}
        record = await self._client.fork_session(self.session_id, shaped(ForkSession, **given))
        return AsyncSession(self._client, record.session_id)

    async def cancel(self, turn_id: str | None = None, *, queued: bool = False) -> CancelAnswer:
        """End this turn, or the active one, and with ``queued`` those that wait, too. Again: nothing happens."""
        fields: dict[str, object] = {"queued": queued} if turn_id is None else {"turn_id": turn_id, "queued": queued}
        return await self._client.cancel_turns(self.session_id, shaped(CancelTurns, **fields))

    async def turn(self, turn_id: str, *, wait_s: float = 0.0) -> TurnRecord:
        """How a turn stands; with ``wait_s`` once it has ended, or after so many seconds."""
        return await self._client.read_turn(self.session_id, turn_id, wait_s=wait_s)
