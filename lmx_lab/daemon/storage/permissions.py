"""Read and write permissions in the database: requested by a turn, then decided by a client, expired or withdrawn.

All functions work within the caller's transaction. Every change appends its event.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from lmx_lab.daemon.encoding import parse_timestamp, timestamp
from lmx_lab.daemon.storage.store import DatabaseView, Row, Transaction, TurnKey
from lmx_lab.errors import (
    AlreadyResolvedError,
    InvalidRequestError,
    PermissionExpiredError,
    PermissionNotFoundError,
)
from lmx_lab.wire.events import PermissionRequest, PermissionResolved
from lmx_lab.wire.sessions import Decision, PermissionRecord, ToolCall


def request(
    tx: Transaction, key: TurnKey, *, permission_id: str, call: ToolCall, arguments: dict[str, Any], timeout_s: float
) -> None:
    """Request a permission for one call. The turn's status becomes ``waiting``.

    Args:
        timeout_s: Seconds until the permission expires.
    """
    record = PermissionRecord(
        permission_id=permission_id,
        session_id=key.session_id,
        turn_id=key.turn_id,
        call_id=call.call_id,
        tool=call.name,
        arguments=arguments,
        requested_at=tx.now,
        expires_at=timestamp(parse_timestamp(tx.now) + timeout_s),
    )
    tx.insert("permissions", {**record.model_dump(), "arguments": json.dumps(arguments, ensure_ascii=False)})
    tx.execute("UPDATE turns SET status = 'waiting' WHERE session_id = ? AND turn_id = ?", key.session_id, key.turn_id)
    tx.append_to_turn(key, "permission.request", PermissionRequest(permission=record))


def list_pending(view: DatabaseView, session_id: str | None = None) -> list[PermissionRecord]:
    """Return the permissions without a decision, of one session or of all, oldest first."""
    rows = view.fetch_all(
        "SELECT * FROM permissions WHERE decision IS NULL AND session_id = coalesce(?, session_id)"
        " ORDER BY requested_at, permission_id",
        session_id,
    )
    return [_parse(row) for row in rows]


def decide(tx: Transaction, permission_id: str, body: Decision) -> PermissionRecord:
    """Record a client's decision and return the resolved permission.

    Raises:
        PermissionNotFoundError: The permission does not exist.
        AlreadyResolvedError: A client has decided before.
        PermissionExpiredError: The permission has expired, or its turn was stopped.
        InvalidRequestError: The decision denies a tool for the whole session, which is not supported.
    """
    if body.decision == "deny" and body.scope == "session":
        raise InvalidRequestError(
            "scope is 'session', but a denial applies to one call; omit scope, or remove the tool from the session's "
            "tools",
            param="scope",
        )
    row = tx.fetch_one("SELECT * FROM permissions WHERE permission_id = ?", permission_id)
    if row is None:
        raise PermissionNotFoundError(
            f"no permission {permission_id!r:.80}; GET /v3/permissions lists the pending permissions"
        )
    if row["resolved_by"] == "client":
        raise AlreadyResolvedError(
            f"permission {permission_id!r} was decided before: {row['decision']} ({row['scope']})"
        )
    if row["resolved_by"] is not None:
        expired = row["resolved_by"] == "expiry"
        reason = f"it expired at {row['expires_at']}" if expired else "its turn was stopped"
        raise PermissionExpiredError(f"permission {permission_id!r} can no longer be decided: {reason}")
    if body.decision == "allow" and body.scope == "session":
        tx.execute("INSERT OR IGNORE INTO grants (session_id, tool) VALUES (?, ?)", row["session_id"], row["tool"])
    return _resolve(tx, row, decision=body.decision, scope=body.scope, resolved_by="client")


def expire(tx: Transaction, permission_id: str) -> bool:
    """Deny a permission that has no decision. Returns whether this changed it."""
    row = tx.fetch_one("SELECT * FROM permissions WHERE permission_id = ? AND decision IS NULL", permission_id)
    if row is not None:
        _resolve(tx, row, decision="deny", scope="once", resolved_by="expiry")
    return row is not None


def withdraw(tx: Transaction, key: TurnKey) -> None:
    """Deny all pending permissions of a turn that is stopped."""
    rows = tx.fetch_all(
        "SELECT * FROM permissions WHERE session_id = ? AND turn_id = ? AND decision IS NULL ORDER BY permission_id",
        *(key.session_id, key.turn_id),
    )
    for row in rows:
        _resolve(tx, row, decision="deny", scope="once", resolved_by="cancel")


def _resolve(
    tx: Transaction,
    row: Row,
    *,
    decision: Literal["allow", "deny"],
    scope: Literal["once", "session"],
    resolved_by: Literal["client", "expiry", "cancel"],
) -> PermissionRecord:
    tx.execute(
        "UPDATE permissions SET decision = ?, scope = ?, resolved_by = ? WHERE permission_id = ?",
        *(decision, scope, resolved_by, row["permission_id"]),
    )
    key = TurnKey(session_id=row["session_id"], turn_id=row["turn_id"])
    tx.execute(
        "UPDATE turns SET status = 'running' WHERE session_id = ? AND turn_id = ? AND status = 'waiting' AND NOT EXISTS"
        " (SELECT 1 FROM permissions WHERE session_id = ? AND turn_id = ? AND decision IS NULL)",
        *(key.session_id, key.turn_id, key.session_id, key.turn_id),
    )
    resolution = {"decision": decision, "scope": scope, "resolved_by": resolved_by}
    record = _parse(row).model_copy(update=resolution)
    tx.append_to_turn(key, "permission.resolved", PermissionResolved(permission=record))
    return record


def _parse(row: Row) -> PermissionRecord:
    fields = {name: row[name] for name in PermissionRecord.model_fields}
    return PermissionRecord(**{**fields, "arguments": json.loads(row["arguments"])})
