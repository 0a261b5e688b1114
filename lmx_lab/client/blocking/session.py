"""Provide the blocking session of the daemon."""

# Generated from session.py by "make blocking"; do not edit.

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Unpack

from lmx_lab.client.blocking.base import SessionBase
from lmx_lab.client.blocking.stream import BlockingOnPermission, BlockingStream, run_with_callbacks
from lmx_lab.client.session import SessionFields, WhenBusy
from lmx_lab.client.turn import TurnResult
from lmx_lab.wire.events import DaemonEvent
from lmx_lab.wire.sessions import CancelAnswer, SessionRecord, SessionSnapshot, TurnOverrides, TurnRecord


class Session(SessionBase):
    """One session, with the methods of ``AsyncSession``. ``DaemonClient.session()`` returns it.

    An interrupt (Ctrl-C) cancels the turn that is waited for. Callbacks are called in the waiting thread.
    """

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
        """Run a turn and return its result. Continues over lost connections and restarts of the daemon.

        An interrupt (Ctrl-C), or an error in a callback, cancels the turn.

        Args:
            turn_id: Id of the turn. If a turn of this id was submitted before with the same text, its result is
                returned.
            when_busy: What to do while another turn is running in the session: wait, be refused, or interrupt it.
            on_permission: Decides on tool calls that need a permission. By default other clients decide.
            on_event: Called in this thread with each event of the turn.

        Raises:
            TurnError, EngineError …: the turn has failed. The class is the one for its error code, and the message
                names the turn.
            UnreachableError: no daemon answers.
            TurnInProgressError, QueueFullError, SessionNotFoundError …: the turn was not accepted.
        """
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
        """Read the complete session. Its ``cursor`` is the one from which its events continue."""
        return self._portal.run(self._session.snapshot())

    def change(self, **fields: Unpack[SessionFields]) -> SessionRecord:
        """Change fields of the session.

        Raises:
            RevisionConflictError: another client has changed the session since ``revision``.
        """
        return self._portal.run(self._session.change(**fields))

    def delete(self) -> None:
        """Delete the session with its turns. Running turns are cancelled. Idempotent."""
        self._portal.run(self._session.delete())

    def fork(self, *, through_turn_id: str | None = None, title: str | None = None) -> Session:
        """Create a session that continues from the messages of this one.

        Args:
            through_turn_id: The last turn to include; by default all turns that have ended are included.
        """
        return Session(
            self._client,
            self._portal,
            self._portal.run(self._session.fork(through_turn_id=through_turn_id, title=title)),
        )

    def cancel(self, turn_id: str | None = None, *, queued: bool = False) -> CancelAnswer:
        """Cancel a turn. Idempotent.

        Args:
            turn_id: By default the active turn.
            queued: Whether to cancel the queued turns as well.
        """
        return self._portal.run(self._session.cancel(turn_id, queued=queued))

    def turn(self, turn_id: str, *, wait_s: float = 0.0) -> TurnRecord:
        """Read a turn.

        Args:
            wait_s: Wait until the turn has ended, but at most for this time in seconds, up to 60.
        """
        return self._portal.run(self._session.turn(turn_id, wait_s=wait_s))
