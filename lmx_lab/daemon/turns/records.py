"""Read and write turns in the database, within the caller's transaction.

Each function changes rows and appends the events about the change. ``end`` is the only function that appends the
terminal event of a turn.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from lmx_lab.daemon.storage import sessions
from lmx_lab.daemon.storage.store import DatabaseView, Row, Transaction
from lmx_lab.daemon.turns.machine import TurnEnding
from lmx_lab.errors import TurnNotFoundError
from lmx_lab.http.errors import error_detail
from lmx_lab.wire.base import new_id
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.events import (
    MessageDone,
    ToolEnd,
    ToolOutput,
    ToolStart,
    TurnDone,
    TurnFailed,
    TurnProgress,
    TurnText,
)
from lmx_lab.wire.sessions import (
    SessionMessage,
    ToolCall,
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


@dataclass(frozen=True, kw_only=True)
class TurnKey:
    """Identifies a turn: the ids of turns are unique only within a session."""

    session_id: str
    turn_id: str


def user_message(key: TurnKey, content: str) -> SessionMessage:
    """Return the message of a turn's user.

    Its id is derived from the turn, because the event that queues the turn contains the message, and the history
    contains it only once the turn starts.
    """
    digest = hashlib.sha256(f"{key.session_id} {key.turn_id}".encode()).hexdigest()[:26]
    return SessionMessage(message_id=f"msg_{digest}", role="user", content=content, turn_id=key.turn_id)


# While it runs


def append_progress(tx: Transaction, key: TurnKey, *, step: int, note: str) -> None:
    """Append ``turn.progress``."""
    append(tx, key, "turn.progress", TurnProgress(step=step, note=note))


def append_text(tx: Transaction, key: TurnKey, *, event: str, message_id: str, text: str) -> None:
    """Append ``turn.token`` or ``turn.thinking``."""
    append(tx, key, event, TurnText(message_id=message_id, text=text))


def add_message(tx: Transaction, key: TurnKey, message: SessionMessage) -> None:
    """Add a message of the model, complete or partial, to the history."""
    sessions.add_message(tx, key.session_id, message)
    append(tx, key, "message.done", MessageDone(message=message))


def start_tool(tx: Transaction, key: TurnKey, call: ToolCall, arguments: dict[str, Any]) -> None:
    """Record that a call starts."""
    tx.execute(
        "INSERT INTO tool_calls (session_id, turn_id, call_id, name, started_at) VALUES (?, ?, ?, ?, ?)",
        *(key.session_id, key.turn_id, call.call_id, call.name, tx.now),
    )
    append(tx, key, "tool.start", ToolStart(call_id=call.call_id, name=call.name, arguments=arguments))


def append_tool_output(tx: Transaction, key: TurnKey, *, call_id: str, text: str) -> None:
    """Append ``tool.output``."""
    append(tx, key, "tool.output", ToolOutput(call_id=call_id, text=text))


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
    append(tx, key, "tool.end", end)


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
        failed = TurnFailed(error=error, text=text, stats=stats)
        tx.append("turn.error", failed, session_id=key.session_id, turn_id=key.turn_id, stats=stats)
        return
    done = TurnDone(stop_reason=ending.reason, text=text, stats=stats or NO_STATS)
    tx.append("turn.done", done, session_id=key.session_id, turn_id=key.turn_id, stats=done.stats)


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


def append(tx: Transaction, key: TurnKey, event: str, data: Any) -> int:
    """Append an event of a turn and return its ``seq``."""
    return tx.append(event, data, session_id=key.session_id, turn_id=key.turn_id)
