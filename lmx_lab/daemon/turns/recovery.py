"""Turns that lost whoever ran them: ended by what the database has of them. In the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence

from lmx_lab.daemon import sessions
from lmx_lab.daemon.storage.store import Transaction
from lmx_lab.daemon.turns import permissions, records
from lmx_lab.daemon.turns.queue import LIVE
from lmx_lab.daemon.turns.records import TurnKey
from lmx_lab.daemon.turns.turn import TurnEnding
from lmx_lab.errors import DaemonRestartedError
from lmx_lab.wire.events import ToolEnd, TurnText
from lmx_lab.wire.sessions import SessionMessage, ToolStatus

RESTARTED = TurnEnding(
    error=DaemonRestartedError("the daemon ended while this turn ran; what it had written is kept; ask again"),
    calls_are="interrupted",
)


def end_from_rows(tx: Transaction, key: TurnKey, ending: TurnEnding) -> bool:
    """End a turn of which nothing is known but what the database has; False if it has ended.

    Its calls end, its permissions are resolved, and what there is of its answer becomes a message.
    """
    row = records.row_of(tx, key)
    if row is None or row["ended_at"] is not None:
        return False
    permissions.withdraw(tx, key.session_id, key.turn_id)
    history = [said for said in sessions.messages(tx, key.session_id) if said.turn_id == key.turn_id]
    for call_id, name, began in _open_calls(tx, key, history):
        _interrupt(tx, key, call_id, name, ending.calls_are, began=began)
    said = _written(tx, key)
    if said is not None:
        records.message(tx, key, said)
    last = said or next((message for message in reversed(history) if message.role == "assistant"), None)
    records.end(tx, key, ending, text="" if last is None else last.content, stats=None)
    return True


def end_orphans(tx: Transaction, session_id: str) -> list[str]:
    """End all turns of a session that have begun, where nobody runs any; gives those that this ends."""
    rows = tx.rows(f"SELECT turn_id FROM turns WHERE {LIVE} AND session_id = ? AND status != 'queued'", session_id)
    for row in rows:
        end_from_rows(tx, key=TurnKey(session_id=session_id, turn_id=row["turn_id"]), ending=RESTARTED)
    return [row["turn_id"] for row in rows]


def _open_calls(tx: Transaction, key: TurnKey, history: Sequence[SessionMessage]) -> list[tuple[str, str, bool]]:
    """Id, name, and whether it began, of the calls that have no end."""
    answered = {said.call_id for said in history if said.role == "tool"}
    rows = tx.rows("SELECT call_id FROM tool_calls WHERE session_id = ? AND turn_id = ?", key.session_id, key.turn_id)
    began = {row["call_id"] for row in rows}
    calls = [call for said in history for call in said.tool_calls if call.call_id not in answered]
    return [(call.call_id, call.name, call.call_id in began) for call in calls]


def _interrupt(tx: Transaction, key: TurnKey, call_id: str, name: str, status: ToolStatus, *, began: bool) -> None:
    text = "the daemon ended while this tool ran; whether it did its work is not known" if began else "it never began"
    ended = ToolEnd(call_id=call_id, name=name, status=status, text=text, truncated=False, elapsed_s=0.0)
    records.tool_end(tx, key, ended, records.tool_message(key, call_id=call_id, text=text))


def _written(tx: Transaction, key: TurnKey) -> SessionMessage | None:
    """The message that was being written, as far as the log has it."""
    rows = tx.rows(
        "SELECT event, data FROM events WHERE session_id = ? AND turn_id = ? AND event IN ('turn.token',"
        " 'turn.thinking') AND seq > coalesce((SELECT max(seq) FROM events WHERE session_id = ? AND turn_id = ?"
        " AND event = 'message.done'), 0) ORDER BY seq",
        *(key.session_id, key.turn_id, key.session_id, key.turn_id),
    )
    if not rows:
        return None
    pieces = [(row["event"], TurnText.model_validate_json(row["data"])) for row in rows]
    return records.answer(
        key,
        message_id=pieces[-1][1].message_id,
        text="".join(piece.text for kind, piece in pieces if kind == "turn.token"),
        thinking="".join(piece.text for kind, piece in pieces if kind == "turn.thinking"),
    )
