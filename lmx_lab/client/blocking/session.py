"""One session of the daemon for callers that block."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Literal, Unpack

from lmx_lab.client.blocking.portal import Portal
from lmx_lab.client.blocking.stream import BlockingStream, CallbackQueue, run_with_callbacks
from lmx_lab.client.blocking.subscription import check_upstream
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.session import AsyncSession, SessionFields, WhenBusy
from lmx_lab.client.turn_permissions import OnPermission, Verdict
from lmx_lab.client.turn_result import TurnResult
from lmx_lab.wire.events import DaemonEvent
from lmx_lab.wire.sessions import (
    CancelAnswer,
    PermissionRecord,
    SessionRecord,
    SessionSnapshot,
    TurnOverrides,
    TurnRecord,
)

BlockingOnPermission = Literal["allow", "deny"] | Callable[[PermissionRecord], Verdict]
"""What decides, of what asks for a permission; a function is called in the thread that waits for the turn."""


class Session:
    """``AsyncSession`` without ``await``; made by ``DaemonClient.session()``."""

    def __init__(self, client: AsyncDaemonClient, portal: Portal, session: AsyncSession) -> None:
        self._client = client
        self._portal = portal
        self._session = session

    @property
    def session_id(self) -> str:
        return self._session.session_id

    def __repr__(self) -> str:
        return f"<Session {self.session_id} of {self._client.url}>"

    # Turns

    def run(
        self,
        text: str,
        *,
        turn_id: str | None = None,
        when_busy: WhenBusy = "enqueue",
        overrides: TurnOverrides | None = None,
        on_permission: BlockingOnPermission | None = None,
        on_event: Callable[[DaemonEvent], None] | None = None,
    ) -> TurnResult:
        """A turn to its end, whatever happens to the connection meanwhile. An interrupt (Ctrl-C) cancels it.

        Args:
            turn_id: A new one by default. Of a turn that there is, with the same text, this is the result.
            on_permission: By default others decide: panels, other programs.
            on_event: Called with each event of the turn, in this thread.

        Raises:
            HostingError: the loop of the caller is what serves the daemon, or the model.
            LabError: the turn's own.
        """
        check_upstream(self._client, self._portal)

        async def work(callbacks: CallbackQueue) -> TurnResult:
            return await self._session.run(
                text,
                turn_id=turn_id,
                when_busy=when_busy,
                overrides=overrides,
                on_permission=_there(callbacks, on_permission),
                on_event=None if on_event is None else lambda event: callbacks.tell(partial(on_event, event)),
            )

        return run_with_callbacks(self._portal, work)

    def stream(
        self,
        text: str,
        *,
        turn_id: str | None = None,
        when_busy: WhenBusy = "enqueue",
        overrides: TurnOverrides | None = None,
        on_permission: BlockingOnPermission | None = None,
    ) -> BlockingStream[DaemonEvent]:
        """A turn's events as they come, to its ``turn.done``; leaving early cancels the turn, as does an interrupt.

        Args:
            on_permission: By default others decide. A function is called while the next event is waited for.

        Raises:
            HostingError: the loop of the caller is what serves the daemon, or the model.
            LabError: the turn's own.
        """

        def source(callbacks: CallbackQueue) -> aclosing[AsyncGenerator[DaemonEvent, None]]:
            return aclosing(
                self._session.stream(
                    text,
                    turn_id=turn_id,
                    when_busy=when_busy,
                    overrides=overrides,
                    on_permission=_there(callbacks, on_permission),
                )
            )

        check_upstream(self._client, self._portal)
        return BlockingStream(self._portal, source)

    def turn(self, turn_id: str, *, wait_s: float = 0.0) -> TurnRecord:
        """A turn; with ``wait_s``, which is at most 60, once it has ended, or after that time."""
        if wait_s:
            check_upstream(self._client, self._portal)
        return self._portal.run(self._session.turn(turn_id, wait_s=wait_s))

    def cancel(self, turn_id: str | None = None, *, queued: bool = False) -> CancelAnswer:
        """End the active turn, or one by its id, or the queued ones too. What has ended stays as it is."""
        return self._portal.run(self._session.cancel(turn_id, queued=queued))

    # The session

    def snapshot(self) -> SessionSnapshot:
        """The session with its messages, turns and pending permissions."""
        return self._portal.run(self._session.snapshot())

    def change(self, **fields: Unpack[SessionFields]) -> SessionRecord:
        """
        Raises:
            RevisionConflictError: somebody else has changed it since ``revision``.
        """
        return self._portal.run(self._session.change(**fields))

    def fork(self, *, through_turn_id: str | None = None, title: str | None = None) -> Session:
        """Another session that goes on from here.

        Args:
            through_turn_id: The last turn to take along; by default all that have ended.
        """
        forked = self._portal.run(self._session.fork(through_turn_id=through_turn_id, title=title))
        return Session(self._client, self._portal, forked)

    def delete(self) -> None:
        """With all of its turns; those that run are cancelled. Again: nothing happens."""
        self._portal.run(self._session.delete())


def _there(callbacks: CallbackQueue, on_permission: BlockingOnPermission | None) -> OnPermission | None:
    """The same, with a function called in the thread that waits."""
    if on_permission is None or isinstance(on_permission, str):
        return on_permission
    decide = on_permission

    async def decided(permission: PermissionRecord) -> Verdict:
        return await callbacks.ask(partial(decide, permission))

    return decided
