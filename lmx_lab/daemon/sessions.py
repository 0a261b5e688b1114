"""Sessions in the database: functions of a transaction, each of which changes rows and writes the event of it."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Any

from lmx_lab.daemon.storage.store import DatabaseView, Row, Transaction
from lmx_lab.errors import (
    InvalidRequestError,
    RevisionConflictError,
    SessionNotFoundError,
    TurnInProgressError,
    TurnNotFoundError,
)
from lmx_lab.wire.events import SessionChanged, SessionDeleted
from lmx_lab.wire.identifiers import new_id
from lmx_lab.wire.sessions import (
    METADATA_CHARACTERS,
    ChangeSession,
    CreateSession,
    ForkSession,
    PermissionRecord,
    SessionList,
    SessionMessage,
    SessionRecord,
    SessionSnapshot,
    SessionStatus,
)

LIST_LIMIT = 2000
STATUS: dict[str, SessionStatus] = {"running": "running", "waiting": "waiting", "queued": "queued"}
AS_JSON = ("tools", "metadata")
LIVE_TURNS = "SELECT session_id, turn_id, status FROM turns WHERE status IN ('queued', 'running', 'waiting')"


def create(transaction: Transaction, body: CreateSession) -> tuple[SessionRecord, bool]:
    """A new session, or the one that has this id, as it is; and whether it is new."""
    session_id = body.session_id or new_id("ses")
    if body.session_id is not None and _row(transaction, session_id) is not None:
        return record(transaction, session_id), False
    fields = {
        "title": body.title,
        "model": body.model,
        "system_prompt": body.system_prompt,
        "tools": body.tools,
        "metadata": body.metadata or {},
    }
    _insert(transaction, session_id, fields, forked_from=None)
    for message in body.messages:
        add_message(transaction, session_id, message.model_copy(update={"turn_id": None}))
    return _created(transaction, session_id), True


def fork(transaction: Transaction, session_id: str, body: ForkSession) -> SessionRecord:
    """A new session with the messages of this one, and none of its turns.

    Raises:
        SessionNotFoundError, TurnNotFoundError: there is none.
        TurnInProgressError: the turn to fork behind has not ended.
    """
    row = _known(transaction, session_id)
    last = _last_position(transaction, session_id, body.through_turn_id)
    forked = new_id("ses")
    fields = {name: json.loads(row[name]) if name in AS_JSON and row[name] else row[name] for name in _FIELDS}
    fields["title"] = body.title if "title" in body.model_fields_set else fields["title"]
    _insert(transaction, forked, fields, forked_from=session_id)
    copied = transaction.rows(
        "SELECT m.body FROM messages m LEFT JOIN turns t ON t.session_id = m.session_id AND t.turn_id = m.turn_id"
        " WHERE m.session_id = ? AND (t.position IS NULL OR (t.ended_at IS NOT NULL AND t.position <= ?))"
        " ORDER BY m.position",
        session_id,
        last,
    )
    for message in copied:
        read = SessionMessage.model_validate_json(message["body"])
        add_message(transaction, forked, read.model_copy(update={"turn_id": None}))
    return _created(transaction, forked)


def _last_position(reading: DatabaseView, session_id: str, turn_id: str | None) -> int:
    if turn_id is None:
        row = reading.row("SELECT coalesce(max(position), 0) AS position FROM turns WHERE session_id = ?", session_id)
        assert row is not None
        return int(row["position"])
    row = reading.row("SELECT position, ended_at FROM turns WHERE session_id = ? AND turn_id = ?", session_id, turn_id)
    if row is None:
        raise TurnNotFoundError(f"no turn {turn_id!r:.80} in session {session_id!r:.80}", param="through_turn_id")
    if row["ended_at"] is None:
        raise TurnInProgressError(f"turn {turn_id!r:.80} has not ended; wait for it, or cancel it, then fork")
    return int(row["position"])


def change(transaction: Transaction, session_id: str, body: ChangeSession) -> SessionRecord:
    """Set what the body has, and nothing else.

    Raises:
        SessionNotFoundError: there is none.
        RevisionConflictError: it was changed since the given revision.
    """
    row = _known(transaction, session_id)
    if body.revision is not None and body.revision != row["revision"]:
        raise RevisionConflictError(
            f"revision is {body.revision}, and session {session_id!r} is at {row['revision']} by now; "
            "read it again, then change it",
            param="revision",
        )
    fields = {name: getattr(body, name) for name in body.model_fields_set - {"revision"}}
    if fields.get("metadata", ...) is None:
        fields["metadata"] = {}
    values = {**_encoded(fields), "revision": row["revision"] + 1, "updated_at": transaction.now}
    sets = ", ".join(f"{name} = ?" for name in values)
    transaction.run(f"UPDATE sessions SET {sets} WHERE session_id = ?", *values.values(), session_id)
    changed = record(transaction, session_id)
    transaction.append("session.updated", SessionChanged(session=changed), session_id=session_id)
    return changed


def touch(transaction: Transaction, session_id: str) -> None:
    """It was used now, for the order of lists."""
    transaction.run("UPDATE sessions SET updated_at = ? WHERE session_id = ?", transaction.now, session_id)


def delete(transaction: Transaction, session_id: str) -> bool:
    """Delete a session, whose turns have ended, with all that belongs to it; False if there was none."""
    if not transaction.run("DELETE FROM sessions WHERE session_id = ?", session_id):
        return False
    seq = transaction.append("session.deleted", SessionDeleted(session_id=session_id), session_id=session_id)
    transaction.run("INSERT INTO deleted_sessions VALUES (?, ?, ?)", seq, session_id, transaction.now)
    return True


# Messages


def add_message(transaction: Transaction, session_id: str, message: SessionMessage) -> SessionMessage:
    """Put a message at the end of the history; gives it an id if it has none."""
    if message.message_id is None:
        message = message.model_copy(update={"message_id": new_id("msg")})
    transaction.run(
        "INSERT INTO messages (session_id, turn_id, message_id, body) VALUES (?, ?, ?, ?)",
        session_id,
        message.turn_id,
        message.message_id,
        message.model_dump_json(),
    )
    return message


def messages(reading: DatabaseView, session_id: str) -> list[SessionMessage]:
    rows = reading.rows("SELECT body FROM messages WHERE session_id = ? ORDER BY position", session_id)
    return [SessionMessage.model_validate_json(row["body"]) for row in rows]


# Reading


def record(reading: DatabaseView, session_id: str) -> SessionRecord:
    """
    Raises:
        SessionNotFoundError: there is none.
    """
    row = _known(reading, session_id)
    live = reading.rows(f"{LIVE_TURNS} AND session_id = ? ORDER BY position", session_id)
    return SessionRecord(**_fields(row, live))


def snapshot(reading: DatabaseView, session_id: str) -> SessionSnapshot:
    """A session as it is in this view, whose newest event is its cursor.

    Raises:
        SessionNotFoundError: there is none.
    """
    row = _known(reading, session_id)
    live = reading.rows(f"{LIVE_TURNS} AND session_id = ? ORDER BY position", session_id)
    fields = _fields(row, live)
    return SessionSnapshot(
        **fields,
        messages=messages(reading, session_id),
        partial_text=partial_text(reading, session_id, fields["active_turn_id"]),
        permissions=waiting_permissions(reading, session_id),
        cursor=reading.latest_seq,
    )


def partial_text(reading: DatabaseView, session_id: str, turn_id: str | None) -> str:
    """What the log has of the message that a turn is writing."""
    if turn_id is None:
        return ""
    rows = reading.rows(
        "SELECT data FROM events WHERE session_id = ? AND turn_id = ? AND event = 'turn.token' AND seq > coalesce("
        "(SELECT max(seq) FROM events WHERE session_id = ? AND turn_id = ? AND event = 'message.done'), 0)"
        " ORDER BY seq",
        *(session_id, turn_id, session_id, turn_id),
    )
    return "".join(json.loads(row["data"])["text"] for row in rows)


def permission_record(row: Row) -> PermissionRecord:
    fields = {name: row[name] for name in PermissionRecord.model_fields}
    return PermissionRecord(**{**fields, "arguments": json.loads(row["arguments"])})


def waiting_permissions(reading: DatabaseView, session_id: str | None = None) -> list[PermissionRecord]:
    """Those that nobody has decided, of one session or of all, the oldest first."""
    rows = reading.rows(
        "SELECT * FROM permissions WHERE decision IS NULL AND session_id = coalesce(?, session_id)"
        " ORDER BY requested_at, permission_id",
        session_id,
    )
    return [permission_record(row) for row in rows]


def listed(
    reading: DatabaseView,
    *,
    limit: int = 50,
    cursor: str | None = None,
    archived: bool | None = False,
    q: str | None = None,
) -> SessionList:
    """A page of sessions, the last updated first.

    Args:
        limit: 1 to ``LIST_LIMIT``.
        cursor: Of the page before.
        archived: None lists both kinds.
        q: In the title or the id, whatever its case.
    """
    conditions: list[str] = ["1"]
    parameters: list[object] = []
    if archived is not None:
        conditions.append("archived = ?")
        parameters.append(int(archived))
    if cursor is not None:
        conditions.append("(updated_at, session_id) < (?, ?)")
        parameters += _read_cursor(cursor)
    if q:
        pattern = "%" + q.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        conditions.append("(title LIKE ? ESCAPE '\\' OR session_id LIKE ? ESCAPE '\\')")
        parameters += [pattern, pattern]
    sql = f"SELECT * FROM sessions WHERE {' AND '.join(conditions)} ORDER BY updated_at DESC, session_id DESC LIMIT ?"
    rows = reading.rows(sql, *parameters, limit + 1)
    live: dict[str, list[Row]] = {}
    for turn in reading.rows(f"{LIVE_TURNS} ORDER BY position"):
        live.setdefault(turn["session_id"], []).append(turn)
    found = [SessionRecord(**_fields(row, live.get(row["session_id"], ()))) for row in rows[:limit]]
    return SessionList(sessions=found, next_cursor=_cursor(found[-1]) if len(rows) > limit else None)


def ids(reading: DatabaseView, session_ids: Iterable[str] = ()) -> list[str]:
    """Of the sessions that are not archived, or which of these there are."""
    wanted = sorted(session_ids)
    if not wanted:
        return [row["session_id"] for row in reading.rows("SELECT session_id FROM sessions WHERE archived = 0")]
    return [session_id for session_id in wanted if _row(reading, session_id) is not None]


# Cursors of lists


def _cursor(last: SessionRecord) -> str:
    return base64.urlsafe_b64encode(f"{last.updated_at} {last.session_id}".encode()).decode().rstrip("=")


def _read_cursor(text: str) -> list[str]:
    try:
        parts = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode().split(" ")
    except (binascii.Error, UnicodeError, ValueError):
        parts = []
    if len(parts) != 2:
        raise InvalidRequestError(
            f"cursor is {text!r:.80}; give next_cursor of the page before, or leave it out", param="cursor"
        )
    return parts


# Rows

_FIELDS = ("title", "model", "system_prompt", "tools", "metadata")


def _row(reading: DatabaseView, session_id: str) -> Row | None:
    return reading.row("SELECT * FROM sessions WHERE session_id = ?", session_id)


def _known(reading: DatabaseView, session_id: str) -> Row:
    if (row := _row(reading, session_id)) is None:
        raise SessionNotFoundError(f"no session {session_id!r:.80}; GET /v3/sessions lists them")
    return row


def _insert(transaction: Transaction, session_id: str, fields: dict[str, Any], *, forked_from: str | None) -> None:
    values = {
        "session_id": session_id,
        **_encoded(fields),
        "archived": 0,
        "revision": 1,
        "forked_from": forked_from,
        "created_at": transaction.now,
        "updated_at": transaction.now,
    }
    marks = ", ".join("?" * len(values))
    transaction.run(f"INSERT INTO sessions ({', '.join(values)}) VALUES ({marks})", *values.values())


def _created(transaction: Transaction, session_id: str) -> SessionRecord:
    made = record(transaction, session_id)
    transaction.append("session.created", SessionChanged(session=made), session_id=session_id)
    return made


def _encoded(fields: dict[str, Any]) -> dict[str, Any]:
    """Values as the table has them."""
    encoded = dict(fields)
    for name in set(AS_JSON) & set(fields):
        encoded[name] = None if fields[name] is None else json.dumps(fields[name], ensure_ascii=False)
    if len(encoded.get("metadata") or "") > METADATA_CHARACTERS:
        raise InvalidRequestError(
            f"metadata has {len(encoded['metadata'])} characters as JSON, the limit is {METADATA_CHARACTERS}",
            param="metadata",
        )
    if "archived" in encoded:
        encoded["archived"] = int(encoded["archived"])
    return encoded


def _fields(row: Row, live: Iterable[Row]) -> dict[str, Any]:
    """The fields of a record: the row's, and what its turns that have not ended make of it."""
    live = list(live)
    active = next((turn for turn in live if turn["status"] != "queued"), None)
    state = active or (live[0] if live else None)
    return {
        **{name: row[name] for name in ("session_id", "title", "model", "system_prompt", "forked_from")},
        **{name: row[name] for name in ("revision", "created_at", "updated_at")},
        "tools": json.loads(row["tools"]) if row["tools"] is not None else None,
        "metadata": json.loads(row["metadata"]),
        "archived": bool(row["archived"]),
        "status": STATUS[state["status"]] if state else "idle",
        "active_turn_id": active["turn_id"] if active else None,
        "queued_turn_ids": [turn["turn_id"] for turn in live if turn["status"] == "queued"],
    }
