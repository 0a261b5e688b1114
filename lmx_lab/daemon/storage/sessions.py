"""Read and write sessions and their messages in the database.

All functions work within the transaction, or the view of the database, that the caller passes. A function that changes
a session also appends the event about it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Any

from lmx_lab.daemon.encoding import to_json
from lmx_lab.daemon.storage import permissions
from lmx_lab.daemon.storage.store import DatabaseView, Row, Transaction
from lmx_lab.errors import (
    InvalidRequestError,
    RevisionConflictError,
    SessionNotFoundError,
    TurnInProgressError,
    TurnNotFoundError,
)
from lmx_lab.wire.base import new_id
from lmx_lab.wire.events import SessionChanged, SessionDeleted, TurnText
from lmx_lab.wire.sessions import (
    METADATA_CHARACTERS,
    ChangeSession,
    CreateSession,
    ForkSession,
    SessionFields,
    SessionMessage,
    SessionRecord,
    SessionSnapshot,
    SessionStatus,
)

LIST_LIMIT = 2000
"""Maximum number of sessions on one page of the list."""
STATUS: dict[str, SessionStatus] = {"running": "running", "waiting": "waiting", "queued": "queued"}
"""The status of a session by the status of its turn."""
JSON_COLUMNS = ("tools", "metadata")
_RECORD_VALUES = {
    **{name: f"json_quote({name})" for name in ("session_id", "title", "model", "system_prompt")},
    "tools": "coalesce(tools, 'null')",
    "metadata": "metadata",
    "archived": "CASE WHEN archived THEN 'true' ELSE 'false' END",
    "revision": "revision",
    **{name: f"json_quote({name})" for name in ("created_at", "updated_at", "forked_from")},
    "status": "json_quote('idle')",
    "active_turn_id": "'null'",
    "queued_turn_ids": "'[]'",
}
_RECORD_MEMBERS = "||','||".join(f"'\"{name}\":'||{value}" for name, value in _RECORD_VALUES.items())
IDLE_RECORD = f"CASE WHEN json_valid(metadata) THEN '{{'||{_RECORD_MEMBERS}||'}}' END"
"""SQL of the ``SessionRecord`` of a session without unfinished turns, as JSON; NULL if its metadata contains numbers
that JSON does not allow, such as NaN. A list of 2,000 sessions takes a third of the time that it takes with records in
Python (measured)."""
UNFINISHED = "status IN ('queued', 'running', 'waiting')"
"""Condition of turns that have not ended. SQLite uses their partial index only for exactly this text."""


def create(tx: Transaction, body: CreateSession) -> tuple[SessionRecord, bool]:
    """Create a session, unless its id exists already.

    Returns:
        The new or the existing session, which is not changed, and whether it is new.
    """
    session_id = body.session_id or new_id("ses")
    if body.session_id is not None and _find_row(tx, session_id) is not None:
        return read(tx, session_id), False
    columns = {name: getattr(body, name) for name in SessionFields.model_fields}
    _insert(tx, session_id, {**columns, "metadata": body.metadata or {}}, forked_from=None)
    for message in body.messages:
        add_message(tx, session_id, message.model_copy(update={"turn_id": None}))
    return _append_created(tx, session_id), True


def fork(tx: Transaction, session_id: str, body: ForkSession) -> SessionRecord:
    """Create a session with the messages of another one, and without its turns.

    Raises:
        SessionNotFoundError: The session does not exist.
        TurnNotFoundError: The session has no turn ``through_turn_id``.
        TurnInProgressError: The turn ``through_turn_id`` has not ended.
    """
    row = _get_row(tx, session_id)
    through = body.through_turn_id
    if through is None:
        last = tx.fetch_one("SELECT max(position) AS position FROM turns WHERE session_id = ?", session_id)
    else:
        last = tx.fetch_one(
            "SELECT position, ended_at FROM turns WHERE session_id = ? AND turn_id = ?", session_id, through
        )
        if last is None:
            raise TurnNotFoundError(f"no turn {through!r:.80} in session {session_id!r:.80}", param="through_turn_id")
        if last["ended_at"] is None:
            raise TurnInProgressError(
                f"turn {through!r:.80} has not ended; wait for its end or cancel it before forking"
            )
    assert last is not None
    fork_id = new_id("ses")
    columns = {name: row[name] for name in SessionFields.model_fields}
    columns |= {name: json.loads(row[name]) for name in JSON_COLUMNS if row[name]}
    columns["title"] = body.title if "title" in body.model_fields_set else columns["title"]
    _insert(tx, fork_id, columns, forked_from=session_id)
    # In SQL, because other writers would wait while the messages of a long session are parsed.
    tx.execute(
        "INSERT INTO messages (session_id, message_id, body)"
        " SELECT ?, m.message_id, json_set(m.body, '$.turn_id', NULL) FROM messages m"
        " LEFT JOIN turns t ON t.session_id = m.session_id AND t.turn_id = m.turn_id"
        " WHERE m.session_id = ? AND (t.position IS NULL OR (t.ended_at IS NOT NULL AND t.position <= ?))"
        " ORDER BY m.position",
        *(fork_id, session_id, last["position"] or 0),
    )
    return _append_created(tx, fork_id)


def change(tx: Transaction, session_id: str, body: ChangeSession) -> SessionRecord:
    """Set the fields that the body contains.

    Raises:
        SessionNotFoundError: The session does not exist.
        RevisionConflictError: The revision of the session differs from the one in the body.
    """
    row = _get_row(tx, session_id)
    if body.revision is not None and body.revision != row["revision"]:
        raise RevisionConflictError(
            f"revision is {body.revision}, but session {session_id!r} is at revision {row['revision']}; "
            "read the session again, then change it",
            param="revision",
        )
    fields = {name: getattr(body, name) for name in body.model_fields_set - {"revision"}}
    if fields.get("metadata", ...) is None:
        fields["metadata"] = {}
    columns = {**_encode(fields), "revision": row["revision"] + 1, "updated_at": tx.now}
    assignments = ", ".join(f"{name} = ?" for name in columns)
    tx.execute(f"UPDATE sessions SET {assignments} WHERE session_id = ?", *columns.values(), session_id)
    changed = read(tx, session_id)
    tx.append("session.updated", SessionChanged(session=changed), session_id=session_id)
    return changed


def touch(tx: Transaction, session_id: str) -> None:
    """Set ``updated_at`` to the current time, so that the session is first in lists."""
    tx.execute("UPDATE sessions SET updated_at = ? WHERE session_id = ?", tx.now, session_id)


def delete(tx: Transaction, session_id: str) -> bool:
    """Delete a session whose turns have ended, with its messages, turns and permissions.

    Returns:
        Whether the session existed.
    """
    if not tx.execute("DELETE FROM sessions WHERE session_id = ?", session_id):
        return False
    seq = tx.append("session.deleted", SessionDeleted(session_id=session_id), session_id=session_id)
    tx.execute("INSERT INTO deleted_sessions VALUES (?, ?, ?)", seq, session_id, tx.now)
    return True


# Messages


def add_message(tx: Transaction, session_id: str, message: SessionMessage) -> SessionMessage:
    """Append a message to the history and return it. A message without an id receives one."""
    if message.message_id is None:
        message = message.model_copy(update={"message_id": new_id("msg")})
    row = {"session_id": session_id, "turn_id": message.turn_id, "message_id": message.message_id}
    tx.insert("messages", {**row, "body": message.model_dump_json()})
    return message


def read_message_texts(view: DatabaseView, session_id: str, turn_id: str | None = None) -> list[str]:
    """Return the history of a session, or the messages of one of its turns, as JSON, oldest message first."""
    rows = view.fetch_all(
        "SELECT body FROM messages WHERE session_id = ? AND (? IS NULL OR turn_id = ?) ORDER BY position",
        *(session_id, turn_id, turn_id),
    )
    return [row["body"] for row in rows]


def parse_messages(texts: Iterable[str]) -> list[SessionMessage]:
    """Parse messages as ``read_message_texts`` returns them. 2,000 of them take 21 to 37 ms."""
    return [SessionMessage.model_validate_json(text) for text in texts]


def read_partial_message(view: DatabaseView, session_id: str, turn_id: str) -> SessionMessage | None:
    """Return the message that a turn is writing, as far as the log contains it; None if there is no such message."""
    rows = view.fetch_all(
        "SELECT event, data FROM events WHERE session_id = ? AND turn_id = ?"
        " AND event IN ('turn.token', 'turn.thinking') AND seq > coalesce("
        "(SELECT max(seq) FROM events WHERE session_id = ? AND turn_id = ? AND event = 'message.done'), 0)"
        " ORDER BY seq",
        *(session_id, turn_id, session_id, turn_id),
    )
    if not rows:
        return None
    pieces = [(row["event"], TurnText.model_validate_json(row["data"])) for row in rows]
    return SessionMessage(
        message_id=pieces[-1][1].message_id,
        role="assistant",
        content="".join(piece.text for event, piece in pieces if event == "turn.token"),
        reasoning_content="".join(piece.text for event, piece in pieces if event == "turn.thinking") or None,
        turn_id=turn_id,
    )


# Reading


def read(view: DatabaseView, session_id: str) -> SessionRecord:
    """Return a session without its messages.

    Raises:
        SessionNotFoundError: The session does not exist.
    """
    row = _get_row(view, session_id)
    turns = view.fetch_all(
        f"SELECT turn_id, status FROM turns WHERE {UNFINISHED} AND session_id = ? ORDER BY position", session_id
    )
    active = next((turn for turn in turns if turn["status"] != "queued"), None)
    current = active or (turns[0] if turns else None)
    return SessionRecord(
        **{name: row[name] for name in ("session_id", "title", "model", "system_prompt", "forked_from")},
        **{name: row[name] for name in ("revision", "created_at", "updated_at")},
        tools=json.loads(row["tools"]) if row["tools"] is not None else None,
        metadata=json.loads(row["metadata"]),
        archived=bool(row["archived"]),
        status=STATUS[current["status"]] if current else "idle",
        active_turn_id=active["turn_id"] if active else None,
        queued_turn_ids=[turn["turn_id"] for turn in turns if turn["status"] == "queued"],
    )


def read_snapshot(view: DatabaseView, session_id: str) -> SessionSnapshot:
    """Return the whole state of a session. Its cursor is the newest event of the view.

    Raises:
        SessionNotFoundError: The session does not exist.
    """
    record = read(view, session_id)
    partial = None
    if record.active_turn_id is not None:
        partial = read_partial_message(view, session_id, record.active_turn_id)
    return SessionSnapshot(
        **record.model_dump(),
        messages=parse_messages(read_message_texts(view, session_id)),
        partial_text="" if partial is None else partial.content,
        permissions=permissions.list_pending(view, session_id),
        cursor=view.latest_seq,
    )


def list_page(
    view: DatabaseView,
    *,
    limit: int = 50,
    cursor: str | None = None,
    archived: bool | None = False,
    q: str | None = None,
) -> str:
    """Return one page of the sessions, the last updated first, as the JSON of a ``SessionList``.

    Args:
        limit: Maximum number of sessions, from 1 to ``LIST_LIMIT``.
        cursor: ``next_cursor`` of the previous page.
        archived: Whether to list archived sessions or the others. None lists both.
        q: Text that the title or the id contains, in upper or lower case.

    Raises:
        InvalidRequestError: The cursor is not valid.
    """
    conditions: list[str] = ["1"]
    parameters: list[object] = []
    if archived is not None:
        conditions.append("archived = ?")
        parameters.append(int(archived))
    if cursor is not None:
        conditions.append("(updated_at, session_id) < (?, ?)")
        try:
            padded = cursor + "=" * (-len(cursor) % 4)
            parts = base64.b64decode(padded, altchars=b"-_", validate=True).decode().split(" ")
        except (binascii.Error, UnicodeError, ValueError):
            parts = []
        if len(parts) != 2:
            raise InvalidRequestError(
                f"cursor is {cursor!r:.80}, which is not valid; use next_cursor of the previous page, or omit it",
                param="cursor",
            )
        parameters += parts
    if q:
        pattern = "%" + q.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        conditions.append("(title LIKE ? ESCAPE '\\' OR session_id LIKE ? ESCAPE '\\')")
        parameters += [pattern, pattern]
    sql = (
        f"SELECT session_id, updated_at, {IDLE_RECORD} AS record FROM sessions WHERE {' AND '.join(conditions)}"
        " ORDER BY updated_at DESC, session_id DESC LIMIT ?"
    )
    # One more row than the limit shows whether there is another page.
    rows = view.fetch_all(sql, *parameters, limit + 1)
    busy = {turn["session_id"] for turn in view.fetch_all(f"SELECT session_id FROM turns WHERE {UNFINISHED}")}
    records = [
        to_json(read(view, row["session_id"])) if row["session_id"] in busy or row["record"] is None else row["record"]
        for row in rows[:limit]
    ]
    next_cursor = None
    if len(rows) > limit:
        last = f"{rows[limit - 1]['updated_at']} {rows[limit - 1]['session_id']}"
        next_cursor = base64.urlsafe_b64encode(last.encode()).decode().rstrip("=")
    return f'{{"sessions":[{",".join(records)}],"next_cursor":{json.dumps(next_cursor)}}}'


def count_rows(view: DatabaseView) -> dict[str, int]:
    """Return the numbers of sessions, turns, pending permissions and MCP servers."""
    row = view.fetch_one(
        "SELECT (SELECT count(*) FROM sessions) AS sessions, (SELECT count(*) FROM turns) AS turns,"
        " (SELECT count(*) FROM permissions WHERE decision IS NULL) AS permissions,"
        " (SELECT count(*) FROM mcp_servers) AS mcp_servers"
    )
    assert row is not None
    return dict(row)


def list_ids(view: DatabaseView, session_ids: Iterable[str] = ()) -> list[str]:
    """Return those of the given ids whose session exists; without ids, those of all sessions that are not archived."""
    requested = sorted(session_ids)
    if not requested:
        return [row["session_id"] for row in view.fetch_all("SELECT session_id FROM sessions WHERE archived = 0")]
    return [session_id for session_id in requested if _find_row(view, session_id) is not None]


# Rows


def _find_row(view: DatabaseView, session_id: str) -> Row | None:
    return view.fetch_one("SELECT * FROM sessions WHERE session_id = ?", session_id)


def _get_row(view: DatabaseView, session_id: str) -> Row:
    if (row := _find_row(view, session_id)) is None:
        raise SessionNotFoundError(f"no session {session_id!r:.80}; GET /v3/sessions lists the sessions")
    return row


def _insert(tx: Transaction, session_id: str, columns: dict[str, Any], *, forked_from: str | None) -> None:
    first = {"archived": 0, "revision": 1, "created_at": tx.now, "updated_at": tx.now}
    tx.insert("sessions", {"session_id": session_id, "forked_from": forked_from, **_encode(columns), **first})


def _append_created(tx: Transaction, session_id: str) -> SessionRecord:
    created = read(tx, session_id)
    tx.append("session.created", SessionChanged(session=created), session_id=session_id)
    return created


def _encode(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert values of the API to values of the table's columns.

    Raises:
        InvalidRequestError: The metadata is too long.
    """
    columns = dict(fields)
    for name in set(JSON_COLUMNS) & set(fields):
        columns[name] = None if fields[name] is None else json.dumps(fields[name], ensure_ascii=False)
    if len(columns.get("metadata") or "") > METADATA_CHARACTERS:
        raise InvalidRequestError(
            f"metadata has {len(columns['metadata'])} characters as JSON, the limit is {METADATA_CHARACTERS}",
            param="metadata",
        )
    if "archived" in columns:
        columns["archived"] = int(columns["archived"])
    return columns
