"""Turns in the database: every function changes rows and appends the events that tell of it, in the caller's
transaction. A turn gets its one terminal event here and nowhere else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from lmx_lab.daemon import sessions
from lmx_lab.daemon.storage.store import Reading, Row, Transaction
from lmx_lab.daemon.turns.turn import Call, Ending
from lmx_lab.errors import TurnNotFoundError
from lmx_lab.http.error_bodies import error_detail
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
from lmx_lab.wire.identifiers import new_id
from lmx_lab.wire.sessions import (
    SessionMessage,
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


@dataclass(frozen=True, kw_only=True)
class TurnKey:
    session_id: str
    turn_id: str


def user_message(key: TurnKey, content: str) -> SessionMessage:
    """The same in the event that queues the turn and in the history, where it is only when the turn begins."""
    digest = hashlib.sha256(f"{key.session_id} {key.turn_id}".encode()).hexdigest()[:26]
    return SessionMessage(message_id=f"msg_{digest}", role="user", content=content, turn_id=key.turn_id)


# While it runs


def progress(tx: Transaction, key: TurnKey, *, step: int, note: str) -> None:
    append(tx, key, "turn.progress", TurnProgress(step=step, note=note))


def text(tx: Transaction, key: TurnKey, *, kind: str, message_id: str, text: str) -> None:
    """Of ``turn.token`` and ``turn.thinking``."""
    append(tx, key, kind, TurnText(message_id=message_id, text=text))


def message(tx: Transaction, key: TurnKey, said: SessionMessage) -> None:
    """An answer of the model, whole or as far as it came."""
    sessions.add_message(tx, key.session_id, said)
    append(tx, key, "message.done", MessageDone(message=said))


def tool_start(tx: Transaction, key: TurnKey, call: Call, arguments: dict[str, Any]) -> None:
    tx.run(
        "INSERT INTO tool_calls (session_id, turn_id, call_id, name, started_at) VALUES (?, ?, ?, ?, ?)",
        *(key.session_id, key.turn_id, call.call_id, call.name, tx.now),
    )
    append(tx, key, "tool.start", ToolStart(call_id=call.call_id, name=call.name, arguments=arguments))


def tool_output(tx: Transaction, key: TurnKey, *, call_id: str, text: str) -> None:
    append(tx, key, "tool.output", ToolOutput(call_id=call_id, text=text))


def tool_end(tx: Transaction, key: TurnKey, ended: ToolEnd, said: SessionMessage) -> None:
    """
    Args:
        said: What the model is told, as a message of the history.
    """
    tx.run(
        "UPDATE tool_calls SET status = ? WHERE session_id = ? AND turn_id = ? AND call_id = ?",
        *(ended.status, key.session_id, key.turn_id, ended.call_id),
    )
    sessions.add_message(tx, key.session_id, said)
    append(tx, key, "tool.end", ended)


def tool_message(key: TurnKey, *, call_id: str, text: str) -> SessionMessage:
    return SessionMessage(message_id=new_id("msg"), role="tool", content=text, call_id=call_id, turn_id=key.turn_id)


# Ending


def end(tx: Transaction, key: TurnKey, ending: Ending, *, text: str, stats: TurnStats | None) -> None:
    """The turn's terminal event, and its row, which makes its session idle.

    Raises:
        RuntimeError: it has ended already, which is a bug of the caller's.
    """
    error = None if ending.error is None else failure(ending)
    reason = ending.reason if error is None else None
    changed = tx.run(
        "UPDATE turns SET status = ?, stop_reason = ?, text = ?, error = ?, stats = ?, ended_at = ?"
        " WHERE session_id = ? AND turn_id = ? AND ended_at IS NULL",
        *("done" if error is None else "error", reason, text),
        *(None if error is None else error.model_dump_json(), None if stats is None else stats.model_dump_json()),
        *(tx.now, key.session_id, key.turn_id),
    )
    if changed != 1:
        raise RuntimeError(f"turn {key.turn_id!r} of {key.session_id!r} was to end, and has ended or is not there")
    sessions.touch(tx, key.session_id)
    if error is not None:
        failed = TurnFailed(error=error, text=text, stats=stats)
        tx.append("turn.error", failed, session_id=key.session_id, turn_id=key.turn_id, stats=stats)
        return
    done = TurnDone(stop_reason=ending.reason, text=text, stats=stats or NO_STATS)
    tx.append("turn.done", done, session_id=key.session_id, turn_id=key.turn_id, stats=done.stats)


def failure(ending: Ending) -> ErrorDetail:
    assert ending.error is not None
    return error_detail(ending.error, None)


def answer(key: TurnKey, *, message_id: str, text: str, thinking: str, **fields: Any) -> SessionMessage:
    return SessionMessage(
        message_id=message_id,
        role="assistant",
        content=text,
        reasoning_content=thinking or None,
        turn_id=key.turn_id,
        **fields,
    )


# Reading


def record(reading: Reading, key: TurnKey) -> TurnRecord:
    """
    Raises:
        SessionNotFoundError, TurnNotFoundError
    """
    row = row_of(reading, key)
    if row is None:
        sessions.record(reading, key.session_id)
        raise TurnNotFoundError(f"no turn {key.turn_id!r:.80} in session {key.session_id!r:.80}")
    fields = {name: row[name] for name in ("turn_id", "session_id", "status", "content", "stop_reason", "text")}
    return TurnRecord(
        **fields,
        overrides=overrides_of(row),
        error=None if row["error"] is None else ErrorDetail.model_validate_json(row["error"]),
        stats=None if row["stats"] is None else TurnStats.model_validate_json(row["stats"]),
        queued_at=row["queued_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
    )


def row_of(reading: Reading, key: TurnKey) -> Row | None:
    return reading.row("SELECT * FROM turns WHERE session_id = ? AND turn_id = ?", key.session_id, key.turn_id)


def overrides_of(row: Row) -> TurnOverrides | None:
    return None if row["overrides"] is None else TurnOverrides.model_validate(json.loads(row["overrides"]))


def append(tx: Transaction, key: TurnKey, event: str, data: Any) -> None:
    tx.append(event, data, session_id=key.session_id, turn_id=key.turn_id)
