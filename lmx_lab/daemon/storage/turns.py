"""Read and write turns in the database: queued, started, ended and recovered, within the caller's transaction.

Each function changes rows and appends the events about the change. ``end`` is the only function that appends the
terminal event of a turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import permissions, sessions
from lmx_lab.daemon.storage.sessions import UNFINISHED
from lmx_lab.daemon.storage.store import DatabaseView, Row, Transaction, TurnKey
from lmx_lab.daemon.turns.machine import TurnEnding
from lmx_lab.errors import (
    DaemonRestartedError,
    IdempotencyConflictError,
    QueueFullError,
    TurnInProgressError,
    TurnNotFoundError,
)
from lmx_lab.http.errors import error_detail
from lmx_lab.wire.base import new_id
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.events import (
    MessageDone,
    ToolEnd,
    ToolStart,
    TurnDone,
    TurnFailed,
    TurnProgress,
    TurnQueued,
    TurnStarted,
)
from lmx_lab.wire.sessions import (
    SessionMessage,
    SessionRecord,
    SubmitTurn,
    ToolCall,
    TurnAccepted,
    TurnOverrides,
    TurnRecord,
    TurnStats,
)

NO_STATS = TurnStats(
    tokens=0,
    prompt_tokens=0,
    completion_tokens=0,
    tool_calls=0,
    steps=0,
    elapsed_s=0.0,
    tokens_per_second=0.0,
    ttft_ms=None,
)
"""The statistics of a turn that was not started."""
RETRY_S = 5.0
"""Time after which a client should try again when a queue is full."""
RESTARTED = TurnEnding(
    error=DaemonRestartedError(
        "the daemon ended while this turn was running; its partial answer is kept; submit a new turn"
    ),
    open_call_status="interrupted",
)


def user_message(key: TurnKey, content: str) -> SessionMessage:
    """Return the message of a turn's user.

    Its id is derived from the turn, because the event that queues the turn contains the message, and the history
    contains it only once the turn starts.
    """
    digest = hashlib.sha256(f"{key.session_id} {key.turn_id}".encode()).hexdigest()[:26]
    return SessionMessage(message_id=f"msg_{digest}", role="user", content=content, turn_id=key.turn_id)


# While it runs


def add_message(tx: Transaction, key: TurnKey, message: SessionMessage) -> None:
    """Add a message of the model, complete or partial, to the history."""
    sessions.add_message(tx, key.session_id, message)
    tx.append_to_turn(key, "message.done", MessageDone(message=message))


def start_tool(tx: Transaction, key: TurnKey, call: ToolCall, arguments: dict[str, Any]) -> None:
    """Record that a call starts."""
    tx.insert("tool_calls", {**asdict(key), "call_id": call.call_id, "name": call.name, "started_at": tx.now})
    tx.append_to_turn(key, "tool.start", ToolStart(call_id=call.call_id, name=call.name, arguments=arguments))


def end_tool(tx: Transaction, key: TurnKey, end: ToolEnd, message: SessionMessage) -> None:
    """Record that a call has ended.

    Args:
        message: The result as a message of the history.
    """
    tx.execute(
        "UPDATE tool_calls SET status = ? WHERE session_id = ? AND turn_id = ? AND call_id = ?",
        *(end.status, key.session_id, key.turn_id, end.call_id),
    )
    sessions.add_message(tx, key.session_id, message)
    tx.append_to_turn(key, "tool.end", end)


def tool_message(key: TurnKey, *, call_id: str, text: str) -> SessionMessage:
    """Return the result of a call as a message."""
    return SessionMessage(message_id=new_id("msg"), role="tool", content=text, call_id=call_id, turn_id=key.turn_id)


# Ending


def end(tx: Transaction, key: TurnKey, ending: TurnEnding, *, text: str, stats: TurnStats | None) -> None:
    """Append the turn's terminal event and update its row, after which its session is idle.

    Raises:
        RuntimeError: The turn has ended already or does not exist. This is a bug in the caller.
    """
    error = None if ending.error is None else error_detail(ending.error, None)
    reason = ending.reason if error is None else None
    changed = tx.execute(
        "UPDATE turns SET status = ?, stop_reason = ?, text = ?, error = ?, stats = ?, ended_at = ?"
        " WHERE session_id = ? AND turn_id = ? AND ended_at IS NULL",
        *("done" if error is None else "error", reason, text),
        *(None if error is None else error.model_dump_json(), None if stats is None else stats.model_dump_json()),
        *(tx.now, key.session_id, key.turn_id),
    )
    if changed != 1:
        raise RuntimeError(f"turn {key.turn_id!r} of session {key.session_id!r} has ended already or does not exist")
    sessions.touch(tx, key.session_id)
    if error is not None:
        tx.append_to_turn(key, "turn.error", TurnFailed(error=error, text=text, stats=stats), stats)
        return
    done = TurnDone(stop_reason=ending.reason, text=text, stats=stats or NO_STATS)
    tx.append_to_turn(key, "turn.done", done, done.stats)


# Reading


def read(view: DatabaseView, key: TurnKey) -> TurnRecord:
    """Return a turn.

    Raises:
        SessionNotFoundError: The session does not exist.
        TurnNotFoundError: The session has no such turn.
    """
    row = find_row(view, key)
    if row is None:
        sessions.read(view, key.session_id)
        raise TurnNotFoundError(f"no turn {key.turn_id!r:.80} in session {key.session_id!r:.80}")
    fields = {name: row[name] for name in ("turn_id", "session_id", "status", "content", "stop_reason", "text")}
    return TurnRecord(
        **fields,
        overrides=parse_overrides(row),
        error=None if row["error"] is None else ErrorDetail.model_validate_json(row["error"]),
        stats=None if row["stats"] is None else TurnStats.model_validate_json(row["stats"]),
        queued_at=row["queued_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
    )


def find_row(view: DatabaseView, key: TurnKey) -> Row | None:
    """Return the row of a turn; None if it does not exist."""
    return view.fetch_one("SELECT * FROM turns WHERE session_id = ? AND turn_id = ?", key.session_id, key.turn_id)


def parse_overrides(row: Row) -> TurnOverrides | None:
    """Return the overrides in the row of a turn."""
    return None if row["overrides"] is None else TurnOverrides.model_validate(json.loads(row["overrides"]))


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
    digest = hashlib.sha256(body.model_dump_json(exclude={"turn_id"}, exclude_unset=True).encode()).hexdigest()
    if body.turn_id is not None and (row := find_row(tx, TurnKey(session_id=session_id, turn_id=body.turn_id))):
        if row["digest"] != digest:
            raise IdempotencyConflictError(
                f"turn {body.turn_id!r} was submitted before with another body; use another turn_id", param="turn_id"
            )
        # The latest event, because a deleted session of the same id may have had a turn of the same id.
        queued = tx.fetch_one(
            "SELECT seq FROM events WHERE session_id = ? AND turn_id = ? AND event = 'turn.queued'"
            " ORDER BY seq DESC LIMIT 1",
            *(session_id, body.turn_id),
        )
        # If the event was deleted, the client receives those that are kept.
        cursor = 0 if queued is None else int(queued["seq"]) - 1
        accepted = TurnAccepted(turn_id=body.turn_id, status=row["status"], cursor=cursor)
        return Submitted(turn=accepted, is_new=False, session=session)
    ahead = len(session.queued_turn_ids) + (session.active_turn_id is not None)
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
    waiting = tx.fetch_one(f"SELECT count(*) AS count FROM turns WHERE {UNFINISHED} AND status = 'queued'")
    if waiting is not None and waiting["count"] >= limits.queued_turns:
        raise QueueFullError(
            f"{limits.queued_turns} turns are queued already, which is the limit; wait for some of them to end",
            retry_after_s=RETRY_S,
        )
    key = TurnKey(session_id=session_id, turn_id=body.turn_id or new_id("trn"))
    overrides = None if body.overrides is None else body.overrides.model_dump_json(exclude_unset=True)
    row = {"status": "queued", "content": body.content, "overrides": overrides, "digest": digest, "queued_at": tx.now}
    tx.insert("turns", {**asdict(key), **row})
    if body.when_busy == "interrupt":
        # The last turn of the queue moves to its front.
        rows = tx.fetch_all(
            f"SELECT turn_id, position FROM turns WHERE {UNFINISHED} AND session_id = ? AND status = 'queued'"
            " ORDER BY position",
            session_id,
        )
        order = [(row["turn_id"], target["position"]) for row, target in zip([rows[-1], *rows[:-1]], rows, strict=True)]
        # Negative positions, which are not used otherwise, are set first: two turns must never have the same position.
        for turn_id, position in [*((turn_id, -position) for turn_id, position in order), *order]:
            tx.execute(
                "UPDATE turns SET position = ? WHERE session_id = ? AND turn_id = ?", position, session_id, turn_id
            )
        ahead = int(session.active_turn_id is not None)
    message = user_message(key, body.content)
    seq = tx.append_to_turn(key, "turn.queued", TurnQueued(message=message, ahead=ahead))
    sessions.touch(tx, session_id)
    accepted = TurnAccepted(turn_id=key.turn_id, status="queued", cursor=seq - 1)
    return Submitted(turn=accepted, is_new=True, session=session)


# Starting


@dataclass(frozen=True, kw_only=True)
class StartedTurn:
    """Everything that is needed to run a turn."""

    key: TurnKey
    session: SessionRecord
    overrides: TurnOverrides
    history: list[str]
    """The history of the session, with the turn's own message at its end. It is not parsed here, because other
    transactions wait for this one."""
    granted: frozenset[str]
    """Names of the tools that the session may call without a permission."""


def start_next(tx: Transaction, session_id: str, *, model: str | None) -> StartedTurn | None:
    """End turns that an earlier process has started, then start the first one of the session's queue.

    Returns None if the queue is empty.

    Args:
        model: The model that is going to answer if neither the turn nor the session names one.
    """
    end_abandoned(tx, session_id)
    row = tx.fetch_one(
        f"SELECT * FROM turns WHERE {UNFINISHED} AND session_id = ? AND status = 'queued' ORDER BY position LIMIT 1",
        session_id,
    )
    if row is None:
        return None
    overrides = parse_overrides(row)
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
    tx.append_to_turn(key, "turn.started", TurnStarted(model=overrides.model or session.model or model))
    tx.append_to_turn(key, "turn.progress", TurnProgress(step=1, note=""))
    granted = tx.fetch_all("SELECT tool FROM grants WHERE session_id = ?", key.session_id)
    return StartedTurn(
        key=key,
        session=session,
        overrides=overrides,
        history=sessions.read_message_texts(tx, key.session_id),
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
        end(tx, key, TurnEnding(reason="cancelled"), text="", stats=NO_STATS)
    return cancelled


def list_unfinished(view: DatabaseView) -> tuple[list[TurnKey], list[TurnKey]]:
    """Return the turns that have started but not ended, and the turns that are queued, in their order."""
    rows = view.fetch_all(f"SELECT session_id, turn_id, status FROM turns WHERE {UNFINISHED} ORDER BY position")
    keys = [(TurnKey(session_id=row["session_id"], turn_id=row["turn_id"]), row["status"]) for row in rows]
    started = [key for key, status in keys if status != "queued"]
    return started, [key for key, status in keys if status == "queued"]


# Turns whose process or task has ended


def end_from_rows(tx: Transaction, key: TurnKey, ending: TurnEnding) -> bool:
    """End a turn of which only the database's content is known.

    Its open calls end, its pending permissions are denied, and its partial answer becomes a message.

    Returns:
        Whether the turn had not ended before.
    """
    row = find_row(tx, key)
    if row is None or row["ended_at"] is not None:
        return False
    permissions.withdraw(tx, key)
    history = sessions.parse_messages(sessions.read_message_texts(tx, key.session_id, key.turn_id))
    ended = {message.call_id for message in history if message.role == "tool"}
    rows = tx.fetch_all(
        "SELECT call_id FROM tool_calls WHERE session_id = ? AND turn_id = ?", key.session_id, key.turn_id
    )
    started = {row["call_id"] for row in rows}
    for call in [call for message in history for call in message.tool_calls if call.call_id not in ended]:
        text = "the turn was interrupted before this call started"
        if call.call_id in started:
            text = "the turn was interrupted while this tool was running; it is unknown whether the call had an effect"
        status = ending.open_call_status
        tool_end = ToolEnd(
            call_id=call.call_id, name=call.name, status=status, text=text, truncated=False, elapsed_s=0.0
        )
        end_tool(tx, key, tool_end, tool_message(key, call_id=call.call_id, text=text))
    partial = sessions.read_partial_message(tx, key.session_id, key.turn_id)
    if partial is not None:
        add_message(tx, key, partial)
    last = partial or next((message for message in reversed(history) if message.role == "assistant"), None)
    end(tx, key, ending, text="" if last is None else last.content, stats=None)
    return True


def end_abandoned(tx: Transaction, session_id: str) -> list[str]:
    """End all turns of a session that have started, while none of them is running in this process.

    Returns:
        The ids of the turns that were ended.
    """
    rows = tx.fetch_all(
        f"SELECT turn_id FROM turns WHERE {UNFINISHED} AND session_id = ? AND status != 'queued'", session_id
    )
    for row in rows:
        end_from_rows(tx, key=TurnKey(session_id=session_id, turn_id=row["turn_id"]), ending=RESTARTED)
    return [row["turn_id"] for row in rows]
