"""Permissions in the database: asked for, decided by somebody, or resolved without, each with its event."""

from __future__ import annotations

import json
from typing import Any, Literal

from lmx_lab.daemon.clock import iso, unix_s
from lmx_lab.daemon.sessions import permission_record
from lmx_lab.daemon.storage.store import Row, Transaction
from lmx_lab.errors import (
    AlreadyResolvedError,
    InvalidRequestError,
    PermissionExpiredError,
    PermissionNotFoundError,
)
from lmx_lab.wire.events import PermissionRequest, PermissionResolved
from lmx_lab.wire.sessions import Decision, PermissionRecord


def ask(
    tx: Transaction,
    *,
    permission_id: str,
    session_id: str,
    turn_id: str,
    call_id: str,
    tool: str,
    arguments: dict[str, Any],
    timeout_s: float,
) -> None:
    """Ask for a permission; the turn waits."""
    record = PermissionRecord(
        permission_id=permission_id,
        session_id=session_id,
        turn_id=turn_id,
        call_id=call_id,
        tool=tool,
        arguments=arguments,
        requested_at=tx.now,
        expires_at=iso(unix_s(tx.now) + timeout_s),
    )
    tx.run(
        "INSERT INTO permissions (permission_id, session_id, turn_id, call_id, tool, arguments, requested_at,"
        " expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        *(permission_id, session_id, turn_id, call_id, tool, json.dumps(arguments, ensure_ascii=False)),
        *(record.requested_at, record.expires_at),
    )
    tx.run("UPDATE turns SET status = 'waiting' WHERE session_id = ? AND turn_id = ?", session_id, turn_id)
    tx.append("permission.request", PermissionRequest(permission=record), session_id=session_id, turn_id=turn_id)


def decide(tx: Transaction, permission_id: str, body: Decision) -> PermissionRecord:
    """Somebody's yes or no.

    Raises:
        PermissionNotFoundError: there is none.
        AlreadyResolvedError: somebody was quicker.
        PermissionExpiredError: nobody was quick enough, or the turn was stopped.
        InvalidRequestError: a denial for the whole session, which nothing remembers.
    """
    if body.decision == "deny" and body.scope == "session":
        raise InvalidRequestError(
            "a denial is for one call; leave scope out, or take the tool out of the session's tools", param="scope"
        )
    row = tx.row("SELECT * FROM permissions WHERE permission_id = ?", permission_id)
    if row is None:
        raise PermissionNotFoundError(f"no permission {permission_id!r:.80}; GET /v3/permissions lists those that wait")
    if row["resolved_by"] == "client":
        raise AlreadyResolvedError(f"{permission_id!r} was decided before: {row['decision']} ({row['scope']})")
    if row["resolved_by"] is not None:
        why = f"nobody decided until {row['expires_at']}" if row["resolved_by"] == "expiry" else "its turn was stopped"
        raise PermissionExpiredError(f"{permission_id!r} can no longer be decided: {why}")
    if body.decision == "allow" and body.scope == "session":
        tx.run("INSERT OR IGNORE INTO grants (session_id, tool) VALUES (?, ?)", row["session_id"], row["tool"])
    return _resolve(tx, row, decision=body.decision, scope=body.scope, by="client")


def expire(tx: Transaction, permission_id: str) -> bool:
    """Nobody has decided in time, which is a no; False if somebody has."""
    row = tx.row("SELECT * FROM permissions WHERE permission_id = ? AND decision IS NULL", permission_id)
    if row is not None:
        _resolve(tx, row, decision="deny", scope="once", by="expiry")
    return row is not None


def withdraw(tx: Transaction, session_id: str, turn_id: str) -> None:
    """The turn is stopped: what it asked for is denied."""
    rows = tx.rows(
        "SELECT * FROM permissions WHERE session_id = ? AND turn_id = ? AND decision IS NULL ORDER BY permission_id",
        *(session_id, turn_id),
    )
    for row in rows:
        _resolve(tx, row, decision="deny", scope="once", by="cancel")


def _resolve(
    tx: Transaction,
    row: Row,
    *,
    decision: Literal["allow", "deny"],
    scope: Literal["once", "session"],
    by: Literal["client", "expiry", "cancel"],
) -> PermissionRecord:
    tx.run(
        "UPDATE permissions SET decision = ?, scope = ?, resolved_by = ? WHERE permission_id = ?",
        *(decision, scope, by, row["permission_id"]),
    )
    key = row["session_id"], row["turn_id"]
    tx.run(
        "UPDATE turns SET status = 'running' WHERE session_id = ? AND turn_id = ? AND status = 'waiting' AND NOT EXISTS"
        " (SELECT 1 FROM permissions WHERE session_id = ? AND turn_id = ? AND decision IS NULL)",
        *(*key, *key),
    )
    record = permission_record(row).model_copy(update={"decision": decision, "scope": scope, "resolved_by": by})
    tx.append("permission.resolved", PermissionResolved(permission=record), session_id=key[0], turn_id=key[1])
    return record
