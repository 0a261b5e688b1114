"""The queued turns in the database: submit, start or cancel them within the caller's transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import sessions
from lmx_lab.daemon.storage.store import DatabaseView, Row, Transaction
from lmx_lab.daemon.turns import records
from lmx_lab.daemon.turns.machine import TurnEnding
from lmx_lab.daemon.turns.records import NO_STATS, TurnKey, user_message
from lmx_lab.errors import IdempotencyConflictError, QueueFullError, TurnInProgressError
from lmx_lab.wire.base import new_id
from lmx_lab.wire.events import TurnQueued, TurnStarted
from lmx_lab.wire.sessions import SessionMessage, SessionRecord, SubmitTurn, TurnAccepted, TurnOverrides

RETRY_S = 5.0
"""Time after which a client should try again when a queue is full."""
UNFINISHED = "status IN ('queued', 'running', 'waiting')"
"""Condition of turns that have not ended. SQLite uses their partial index only for exactly this text."""


# Submitting


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The result of ``submit``."""

    turn: TurnAccepted
    """The new or the existing turn."""
    is_new: bool
    session: SessionRecord
    """The session before the turn was queued."""

    @property
    def is_first(self) -> bool:
        """Whether the turn is new and its session had no other turn that has not ended."""
        return self.is_new and self.session.status == "idle"


def submit(tx: Transaction, session_id: str, body: SubmitTurn, limits: Limits) -> Submitted:
    """Queue a turn, unless it was submitted before.

    Raises:
        SessionNotFoundError: The session does not exist.
        IdempotencyConflictError: A turn of the same id was submitted with another body.
        TurnInProgressError: The session is not idle and ``when_busy`` is ``reject``.
        QueueFullError: Too many turns wait.
    """
    session = sessions.read(tx, session_id)
    digest = _digest(body)
    if body.turn_id is not None and (row := records.find_row(tx, TurnKey(session_id=session_id, turn_id=body.turn_id))):
        if row["digest"] != digest:
            raise IdempotencyConflictError(
                f"turn {body.turn_id!r} was submitted before with another body; use another turn_id", param="turn_id"
            )
        return Submitted(turn=_accepted_before(tx, row), is_new=False, session=session)
    ahead = len(session.queued_turn_ids) + (session.active_turn_id is not None)
    _check_space(tx, session, body, limits)
    key = TurnKey(session_id=session_id, turn_id=body.turn_id or new_id("trn"))
    overrides = None if body.overrides is None else body.overrides.model_dump_json(exclude_unset=True)
    tx.execute(
        "INSERT INTO turns (session_id, turn_id, status, content, overrides, digest, queued_at)"
        " VALUES (?, ?, 'queued', ?, ?, ?, ?)",
        *(key.session_id, key.turn_id, body.content, overrides, digest, tx.now),
    )
    if body.when_busy == "interrupt":
        _move_last_to_front(tx, key.session_id)
        ahead = int(session.active_turn_id is not None)
    message = user_message(key, body.content)
    seq = records.append(tx, key, "turn.queued", TurnQueued(message=message, ahead=ahead))
    sessions.touch(tx, session_id)
    accepted = TurnAccepted(turn_id=key.turn_id, status="queued", cursor=seq - 1)
    return Submitted(turn=accepted, is_new=True, session=session)


def _digest(body: SubmitTurn) -> str:
    return hashlib.sha256(body.model_dump_json(exclude={"turn_id"}, exclude_unset=True).encode()).hexdigest()


def _accepted_before(tx: Transaction, row: Row) -> TurnAccepted:
    # The latest event, because a deleted session of the same id may have had a turn of the same id.
    queued = tx.fetch_one(
        "SELECT seq FROM events WHERE session_id = ? AND turn_id = ? AND event = 'turn.queued'"
        " ORDER BY seq DESC LIMIT 1",
        *(row["session_id"], row["turn_id"]),
    )
    # If the event was deleted, the client receives those that are kept.
    cursor = 0 if queued is None else int(queued["seq"]) - 1
    return TurnAccepted(turn_id=row["turn_id"], status=row["status"], cursor=cursor)


def _check_space(tx: Transaction, session: SessionRecord, body: SubmitTurn, limits: Limits) -> None:
    if body.when_busy == "reject" and session.status != "idle":
        busy_id = session.active_turn_id or session.queued_turn_ids[0]
        raise TurnInProgressError(
            f"turn {busy_id!r} of this session is {session.status}; wait for its end, or cancel it"
        )
    if len(session.queued_turn_ids) >= limits.queued_turns_per_session:
        raise QueueFullError(
            f"{limits.queued_turns_per_session} turns of this session are queued already, which is the limit; wait for "
            "some of them to end",
            retry_after_s=RETRY_S,
        )
    row = tx.fetch_one(f"SELECT count(*) AS count FROM turns WHERE {UNFINISHED} AND status = 'queued'")
    if row is not None and row["count"] >= limits.queued_turns:
        raise QueueFullError(
            f"{limits.queued_turns} turns are queued already, which is the limit; wait for some of them to end",
            retry_after_s=RETRY_S,
        )


def _move_last_to_front(tx: Transaction, session_id: str) -> None:
    """Move the last turn of a session's queue to its front."""
    rows = tx.fetch_all(
        f"SELECT turn_id, position FROM turns WHERE {UNFINISHED} AND session_id = ? AND status = 'queued'"
        " ORDER BY position",
        session_id,
    )
    order = [rows[-1], *rows[:-1]]
    # Negative positions, which are not used otherwise, are set first: two turns must never have the same position.
    for row, target in zip(order, rows, strict=True):
        _set_position(tx, session_id, row["turn_id"], -target["position"])
    for row, target in zip(order, rows, strict=True):
        _set_position(tx, session_id, row["turn_id"], target["position"])


def _set_position(tx: Transaction, session_id: str, turn_id: str, position: int) -> None:
    tx.execute("UPDATE turns SET position = ? WHERE session_id = ? AND turn_id = ?", position, session_id, turn_id)


# Starting


@dataclass(frozen=True, kw_only=True)
class StartedTurn:
    """Everything that is needed to run a turn."""

    key: TurnKey
    session: SessionRecord
    overrides: TurnOverrides
    history: list[SessionMessage]
    """The history of the session. Its last message is the turn's own."""
    granted: frozenset[str]
    """Names of the tools that the session may call without a permission."""


def start_next(tx: Transaction, session_id: str, *, model: str | None) -> StartedTurn | None:
    """Start the first turn of a session's queue. Returns None if the queue is empty.

    Args:
        model: The model that is going to answer if neither the turn nor the session names one.
    """
    row = tx.fetch_one(
        f"SELECT * FROM turns WHERE {UNFINISHED} AND session_id = ? AND status = 'queued' ORDER BY position LIMIT 1",
        session_id,
    )
    if row is None:
        return None
    overrides = records.parse_overrides(row)
    key = TurnKey(session_id=session_id, turn_id=row["turn_id"])
    return _start(tx, key, row["content"], overrides, sessions.read(tx, session_id), model=model)


def start_submitted(tx: Transaction, submitted: Submitted, body: SubmitTurn, *, model: str | None) -> StartedTurn:
    """Start a turn that ``submit`` has queued in the same transaction as the first of its session.

    ``start_next`` has the same result, but reads the turn and the session again.
    """
    key = TurnKey(session_id=submitted.session.session_id, turn_id=submitted.turn.turn_id)
    return _start(tx, key, body.content, body.overrides, submitted.session, model=model)


def _start(
    tx: Transaction,
    key: TurnKey,
    content: str,
    overrides: TurnOverrides | None,
    session: SessionRecord,
    *,
    model: str | None,
) -> StartedTurn:
    tx.execute(
        "UPDATE turns SET status = 'running', started_at = ? WHERE session_id = ? AND turn_id = ?",
        *(tx.now, key.session_id, key.turn_id),
    )
    sessions.add_message(tx, key.session_id, user_message(key, content))
    overrides = overrides or TurnOverrides()
    records.append(tx, key, "turn.started", TurnStarted(model=overrides.model or session.model or model))
    records.append_progress(tx, key, step=1, note="")
    granted = tx.fetch_all("SELECT tool FROM grants WHERE session_id = ?", key.session_id)
    return StartedTurn(
        key=key,
        session=session,
        overrides=overrides,
        history=sessions.read_messages(tx, key.session_id),
        granted=frozenset(grant["tool"] for grant in granted),
    )


def cancel_queued(tx: Transaction, session_id: str, turn_ids: Iterable[str] | None) -> list[str]:
    """Cancel turns that have not started.

    Args:
        turn_ids: The turns to cancel. None stands for all of the session.

    Returns:
        The ids of the turns that were cancelled.
    """
    rows = tx.fetch_all(
        f"SELECT turn_id FROM turns WHERE {UNFINISHED} AND session_id = ? AND status = 'queued' ORDER BY position",
        session_id,
    )
    requested = None if turn_ids is None else set(turn_ids)
    cancelled = [row["turn_id"] for row in rows if requested is None or row["turn_id"] in requested]
    for turn_id in cancelled:
        key = TurnKey(session_id=session_id, turn_id=turn_id)
        records.end(tx, key, TurnEnding(reason="cancelled"), text="", stats=NO_STATS)
    return cancelled


def list_unfinished(view: DatabaseView) -> tuple[list[TurnKey], list[TurnKey]]:
    """Return the turns that have started but not ended, and the turns that are queued, in their order."""
    rows = view.fetch_all(f"SELECT session_id, turn_id, status FROM turns WHERE {UNFINISHED} ORDER BY position")
    keys = [(TurnKey(session_id=row["session_id"], turn_id=row["turn_id"]), row["status"]) for row in rows]
    started = [key for key, status in keys if status != "queued"]
    return started, [key for key, status in keys if status == "queued"]
