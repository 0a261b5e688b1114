"""One session of the daemon for callers that block."""

# Generated from session.py by "make blocking"; do not edit.

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Unpack

from lmx_lab.client.blocking.portal import Portal, check_upstream
from lmx_lab.client.blocking.stream import BlockingOnPermission, BlockingStream, run_with_callbacks
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.session import AsyncSession, SessionFields, WhenBusy
from lmx_lab.client.turn_result import TurnResult
from lmx_lab.wire.events import DaemonEvent
from lmx_lab.wire.sessions import CancelAnswer, SessionRecord, SessionSnapshot, TurnOverrides, TurnRecord


class Session:
    """``AsyncSession`` without ``await``; ``DaemonClient.session()`` creates it.

    An interrupt (Ctrl-C) cancels the turn that is waited for. Callbacks are called in the thread that waits.
    """

    def __init__(self, client: AsyncDaemonClient, portal: Portal, session: AsyncSession) -> None:
        self._client = client
        self._portal = portal
        self._session = session

    @property
    def session_id(self) -> str:
        return self._session.session_id

    def __repr__(self) -> str:
        return f"<Session {self.session_id} of {self._client.url}>"

    def run(
        self,
        text: str,
        *,
        turn_id: str | None = None,
        when_busy: WhenBusy = "enqueue",
        overrides: TurnOverrides | None = None,
        on_permission: BlockingOnPermission | None = None,
        on_event: Callable[[DaemonEvent], object] | None = None,
    ) -> TurnResult:
        """Run a turn and return its result.

        Continues over lost connections and restarts of the daemon.
        An interrupt (Ctrl-C), or an error in a callback, cancels the turn.

        Args:
            turn_id: The id of a turn that was submitted before with the same text returns that turn's result.
            when_busy: What to do while another turn runs in the session: wait, be refused, or replace it.
            on_permission: Decides on tools that ask for a permission. By default other clients decide.
            on_event: Called in this thread with each event of the turn.

        Raises:
            TurnError, EngineError …: the turn has failed, by the code of its error; the message names the turn.
            UnreachableError: no daemon answers.
            TurnInProgressError, QueueFullError, SessionNotFoundError …: the turn was not accepted.
        """
        check_upstream(self._client, self._portal)
        return run_with_callbacks(
            self._portal,
            lambda callbacks: self._session.run(
                text,
                turn_id=turn_id,
                when_busy=when_busy,
                overrides=overrides,
                on_permission=callbacks.decider(on_permission),
                on_event=callbacks.notifier(on_event),
            ),
        )

    def stream(
        self,
        text: str,
        *,
        turn_id: str | None = None,
        when_busy: WhenBusy = "enqueue",
        overrides: TurnOverrides | None = None,
        on_permission: BlockingOnPermission | None = None,
    ) -> BlockingStream[DaemonEvent]:
        """Run a turn and return its events, up to ``turn.done``. Closing the stream before its end cancels the turn.

        A ``ResetFrame`` and a ``SnapshotFrame`` replace events that are no longer available; the last event may be
        missing then, too.

        Args:
            on_permission: Decides on tools that ask for a permission. By default other clients decide.

        Raises:
            LabError: as ``run``, after all events.
        """
        check_upstream(self._client, self._portal)
        return BlockingStream(
            self._portal,
            lambda callbacks: aclosing(
                self._session.stream(
                    text,
                    turn_id=turn_id,
                    when_busy=when_busy,
                    overrides=overrides,
                    on_permission=callbacks.decider(on_permission),
                )
            ),
        )

    def snapshot(self) -> SessionSnapshot:
        """Read the whole session; events after its ``cursor`` continue from there."""
        return self._portal.run(self._session.snapshot())

    def change(self, **fields: Unpack[SessionFields]) -> SessionRecord:
        """Change fields of the session.

        Raises:
            RevisionConflictError: another client has changed it since ``revision``.
        """
        return self._portal.run(self._session.change(**fields))

    def delete(self) -> None:
        """Delete the session with its turns; running turns are cancelled. Idempotent."""
        self._portal.run(self._session.delete())

    def fork(self, *, through_turn_id: str | None = None, title: str | None = None) -> Session:
        """Create a session that continues from the messages of this one.

        Args:
            through_turn_id: The last turn to include; by default all that have ended.
        """
        return Session(
            self._client,
            self._portal,
            self._portal.run(self._session.fork(through_turn_id=through_turn_id, title=title)),
        )

    def cancel(self, turn_id: str | None = None, *, queued: bool = False) -> CancelAnswer:
        """Cancel a turn, by default the active one; with ``queued`` the waiting turns, too. Idempotent."""
        return self._portal.run(self._session.cancel(turn_id, queued=queued))

    def turn(self, turn_id: str, *, wait_s: float = 0.0) -> TurnRecord:
        """Read a turn; with ``wait_s``, which is at most 60, once it has ended, or after that time in seconds."""
        if wait_s:
            check_upstream(self._client, self._portal)
        return self._portal.run(self._session.turn(turn_id, wait_s=wait_s))
