"""End turns from their rows in the database, because the process or task that ran them has ended."""

from __future__ import annotations

from collections.abc import Sequence

from lmx_lab.daemon.storage import permissions, sessions
from lmx_lab.daemon.storage.store import Transaction
from lmx_lab.daemon.turns import records
from lmx_lab.daemon.turns.machine import TurnEnding
from lmx_lab.daemon.turns.queue import UNFINISHED
from lmx_lab.daemon.turns.records import TurnKey
from lmx_lab.errors import DaemonRestartedError
from lmx_lab.wire.events import ToolEnd
from lmx_lab.wire.sessions import SessionMessage, ToolStatus

RESTARTED = TurnEnding(
    error=DaemonRestartedError(
        "the daemon ended while this turn was running; its partial answer is kept; submit a new turn"
    ),
    open_call_status="interrupted",
)


def end_from_rows(tx: Transaction, key: TurnKey, ending: TurnEnding) -> bool:
    """End a turn of which only the database's content is known.

    Its open calls end, its pending permissions are denied, and its partial answer becomes a message.

    Returns:
        Whether the turn had not ended before.
    """
    row = records.find_row(tx, key)
    if row is None or row["ended_at"] is not None:
        return False
    permissions.withdraw(tx, key.session_id, key.turn_id)
    history = [message for message in sessions.read_messages(tx, key.session_id) if message.turn_id == key.turn_id]
    for call_id, name, has_started in _open_calls(tx, key, history):
        _end_call(tx, key, call_id, name, ending.open_call_status, has_started=has_started)
    partial = sessions.read_partial_message(tx, key.session_id, key.turn_id)
    if partial is not None:
        records.add_message(tx, key, partial)
    last = partial or next((message for message in reversed(history) if message.role == "assistant"), None)
    records.end(tx, key, ending, text="" if last is None else last.content, stats=None)
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


def _open_calls(tx: Transaction, key: TurnKey, history: Sequence[SessionMessage]) -> list[tuple[str, str, bool]]:
    """Return id and name of the calls that have not ended, and whether they were started."""
    ended = {message.call_id for message in history if message.role == "tool"}
    rows = tx.fetch_all(
        "SELECT call_id FROM tool_calls WHERE session_id = ? AND turn_id = ?", key.session_id, key.turn_id
    )
    started = {row["call_id"] for row in rows}
    calls = [call for message in history for call in message.tool_calls if call.call_id not in ended]
    return [(call.call_id, call.name, call.call_id in started) for call in calls]


def _end_call(tx: Transaction, key: TurnKey, call_id: str, name: str, status: ToolStatus, *, has_started: bool) -> None:
    text = "the turn was interrupted before this call started"
    if has_started:
        text = "the turn was interrupted while this tool was running; it is unknown whether the call had an effect"
    end = ToolEnd(call_id=call_id, name=name, status=status, text=text, truncated=False, elapsed_s=0.0)
    records.end_tool(tx, key, end, records.tool_message(key, call_id=call_id, text=text))
