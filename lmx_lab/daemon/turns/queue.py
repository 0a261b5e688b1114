"""Turns that wait: submitted once each, begun in their order, or cancelled before. In the caller's transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from lmx_lab.daemon import sessions
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.store import DatabaseView, Row, Transaction
from lmx_lab.daemon.turns import records
from lmx_lab.daemon.turns.records import NO_STATS, TurnKey, user_message
from lmx_lab.daemon.turns.turn import TurnEnding
from lmx_lab.errors import IdempotencyConflictError, QueueFullError, TurnInProgressError
from lmx_lab.wire.events import TurnQueued, TurnStarted
from lmx_lab.wire.identifiers import new_id
from lmx_lab.wire.sessions import SessionMessage, SessionRecord, SubmitTurn, TurnAccepted, TurnOverrides

RETRY_S = 5.0
"""When a full queue is worth another try."""
LIVE = "status IN ('queued', 'running', 'waiting')"
"""In these words, by which the index of such turns is found."""


# Submitting


def submit(tx: Transaction, session_id: str, body: SubmitTurn, limits: Limits) -> tuple[TurnAccepted, bool]:
    """Queue a turn; one that was submitted before is given as it is. And whether it is new.

    Raises:
        SessionNotFoundError, IdempotencyConflictError, TurnInProgressError, QueueFullError
    """
    session = sessions.record(tx, session_id)
    digest = _digest(body)
    if body.turn_id is not None and (row := records.row_of(tx, TurnKey(session_id=session_id, turn_id=body.turn_id))):
        if row["digest"] != digest:
            raise IdempotencyConflictError(
                f"turn {body.turn_id!r} was submitted before, with another body; give another turn_id", param="turn_id"
            )
        return _as_it_is(tx, row), False
    ahead = len(session.queued_turn_ids) + (session.active_turn_id is not None)
    _check_room(tx, session, body, limits)
    cursor = tx.latest_seq
    key = TurnKey(session_id=session_id, turn_id=body.turn_id or new_id("trn"))
    overrides = None if body.overrides is None else body.overrides.model_dump_json(exclude_unset=True)
    tx.run(
        "INSERT INTO turns (session_id, turn_id, status, content, overrides, digest, queued_at)"
        " VALUES (?, ?, 'queued', ?, ?, ?, ?)",
        *(key.session_id, key.turn_id, body.content, overrides, digest, tx.now),
    )
    if body.when_busy == "interrupt":
        _to_the_front(tx, key)
        ahead = int(session.active_turn_id is not None)
    message = user_message(key, body.content)
    records.append(tx, key, "turn.queued", TurnQueued(message=message, ahead=ahead))
    sessions.touch(tx, session_id)
    return TurnAccepted(turn_id=key.turn_id, status="queued", cursor=cursor), True


def _digest(body: SubmitTurn) -> str:
    return hashlib.sha256(body.model_dump_json(exclude={"turn_id"}, exclude_unset=True).encode()).hexdigest()


def _as_it_is(tx: Transaction, row: Row) -> TurnAccepted:
    # The latest: a deleted session of the same id may have had such a turn.
    queued = tx.row(
        "SELECT seq FROM events WHERE session_id = ? AND turn_id = ? AND event = 'turn.queued'"
        " ORDER BY seq DESC LIMIT 1",
        *(row["session_id"], row["turn_id"]),
    )
    # What is no longer in the log is left out by its retention, not by this cursor.
    cursor = 0 if queued is None else int(queued["seq"]) - 1
    return TurnAccepted(turn_id=row["turn_id"], status=row["status"], cursor=cursor)


def _check_room(tx: Transaction, session: SessionRecord, body: SubmitTurn, limits: Limits) -> None:
    if body.when_busy == "reject" and session.status != "idle":
        busy = session.active_turn_id or session.queued_turn_ids[0]
        raise TurnInProgressError(f"turn {busy!r} of this session is {session.status}; wait for its end, or cancel it")
    if len(session.queued_turn_ids) >= limits.queued_turns_per_session:
        raise QueueFullError(
            f"{limits.queued_turns_per_session} turns of this session wait already, which is the limit; "
            "wait for some to end",
            retry_after_s=RETRY_S,
        )
    row = tx.row(f"SELECT count(*) AS count FROM turns WHERE {LIVE} AND status = 'queued'")
    if row is not None and row["count"] >= limits.queued_turns:
        raise QueueFullError(
            f"{limits.queued_turns} turns wait already, which is the limit; wait for some to end", retry_after_s=RETRY_S
        )


def _to_the_front(tx: Transaction, key: TurnKey) -> None:
    """Of the session's queue: the turns that wait change places."""
    rows = tx.rows(
        f"SELECT turn_id, position FROM turns WHERE {LIVE} AND session_id = ? AND status = 'queued' ORDER BY position",
        key.session_id,
    )
    order = [rows[-1], *rows[:-1]]
    for row, place in zip(order, rows, strict=True):
        # By way of negative numbers, which nobody has: two turns are never in one place.
        _move(tx, key.session_id, row["turn_id"], -place["position"])
    for row, place in zip(order, rows, strict=True):
        _move(tx, key.session_id, row["turn_id"], place["position"])


def _move(tx: Transaction, session_id: str, turn_id: str, position: int) -> None:
    tx.run("UPDATE turns SET position = ? WHERE session_id = ? AND turn_id = ?", position, session_id, turn_id)


# Beginning


@dataclass(frozen=True, kw_only=True)
class StartedTurn:
    """All that a turn needs to run."""

    key: TurnKey
    session: SessionRecord
    overrides: TurnOverrides
    history: list[SessionMessage]
    """With the turn's own message as its last."""
    granted: frozenset[str]


def begin_next(tx: Transaction, session_id: str, *, model: str | None) -> StartedTurn | None:
    """Begin the turn that waits in front; None if none does.

    Args:
        model: Whoever will answer, where neither the turn nor its session says so.
    """
    row = tx.row(
        f"SELECT * FROM turns WHERE {LIVE} AND session_id = ? AND status = 'queued' ORDER BY position LIMIT 1",
        session_id,
    )
    if row is None:
        return None
    key = TurnKey(session_id=session_id, turn_id=row["turn_id"])
    tx.run(
        "UPDATE turns SET status = 'running', started_at = ? WHERE session_id = ? AND turn_id = ?",
        *(tx.now, key.session_id, key.turn_id),
    )
    sessions.add_message(tx, session_id, user_message(key, row["content"]))
    overrides = records.overrides_of(row) or TurnOverrides()
    session = sessions.record(tx, session_id)
    records.append(tx, key, "turn.started", TurnStarted(model=overrides.model or session.model or model))
    records.progress(tx, key, step=1, note="")
    granted = tx.rows("SELECT tool FROM grants WHERE session_id = ?", session_id)
    return StartedTurn(
        key=key,
        session=session,
        overrides=overrides,
        history=sessions.messages(tx, session_id),
        granted=frozenset(grant["tool"] for grant in granted),
    )


def cancel_queued(tx: Transaction, session_id: str, turn_ids: Iterable[str] | None) -> list[str]:
    """End turns that have not begun; None is all of the session. Gives those that this ends."""
    rows = tx.rows(
        f"SELECT turn_id FROM turns WHERE {LIVE} AND session_id = ? AND status = 'queued' ORDER BY position", session_id
    )
    wanted = None if turn_ids is None else set(turn_ids)
    ended = [row["turn_id"] for row in rows if wanted is None or row["turn_id"] in wanted]
    for turn_id in ended:
        key = TurnKey(session_id=session_id, turn_id=turn_id)
        records.end(tx, key, TurnEnding(reason="cancelled"), text="", stats=NO_STATS)
    return ended


def unfinished(reading: DatabaseView) -> tuple[list[TurnKey], list[TurnKey]]:
    """Turns that were running, and turns that wait, in their order."""
    rows = reading.rows(f"SELECT session_id, turn_id, status FROM turns WHERE {LIVE} ORDER BY position")
    keys = [(TurnKey(session_id=row["session_id"], turn_id=row["turn_id"]), row["status"]) for row in rows]
    begun = [key for key, status in keys if status != "queued"]
    return begun, [key for key, status in keys if status == "queued"]
