"""The tables of the database, as numbered migrations.

An older database is copied, and gets the migrations that it lacks, when the daemon opens it.
"""

from __future__ import annotations

MIGRATIONS = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

    -- AUTOINCREMENT: the number of a deleted event is never used again.
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at TEXT NOT NULL,
        event TEXT NOT NULL,
        session_id TEXT,
        turn_id TEXT,
        data TEXT NOT NULL,
        stats TEXT
    ) STRICT;
    CREATE INDEX events_of_sessions ON events (session_id, seq);
    CREATE INDEX streamed_events ON events (session_id, turn_id) WHERE event IN ('turn.token', 'turn.thinking');

    CREATE TABLE sessions (
        session_id TEXT PRIMARY KEY,
        title TEXT,
        model TEXT,
        system_prompt TEXT,
        tools TEXT,
        metadata TEXT NOT NULL,
        archived INTEGER NOT NULL,
        revision INTEGER NOT NULL,
        forked_from TEXT,
        created_at TEXT NOT NULL,
        updated_at TEXT NOT NULL
    ) STRICT;
    CREATE INDEX sessions_by_update ON sessions (archived, updated_at, session_id);

    CREATE TABLE messages (
        position INTEGER PRIMARY KEY AUTOINCREMENT,
        session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
        turn_id TEXT,
        message_id TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX messages_of_sessions ON messages (session_id, position);

    CREATE TABLE turns (
        position INTEGER PRIMARY KEY AUTOINCREMENT,
        session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
        turn_id TEXT NOT NULL,
        status TEXT NOT NULL,
        content TEXT NOT NULL,
        overrides TEXT,
        digest TEXT NOT NULL,
        stop_reason TEXT,
        text TEXT NOT NULL DEFAULT '',
        error TEXT,
        stats TEXT,
        queued_at TEXT NOT NULL,
        started_at TEXT,
        ended_at TEXT,
        folded INTEGER NOT NULL DEFAULT 0,
        UNIQUE (session_id, turn_id)
    ) STRICT;
    CREATE INDEX turns_that_go_on ON turns (session_id, position) WHERE status IN ('queued', 'running', 'waiting');

    CREATE INDEX turns_to_fold ON turns (ended_at) WHERE folded = 0 AND ended_at IS NOT NULL;

    -- Deleted sessions whose events have not been deleted yet.
    CREATE TABLE deleted_sessions (
        seq INTEGER PRIMARY KEY,
        session_id TEXT NOT NULL,
        deleted_at TEXT NOT NULL
    ) STRICT;

    -- Calls whose tool.start is in the log.
    CREATE TABLE tool_calls (
        session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
        turn_id TEXT NOT NULL,
        call_id TEXT NOT NULL,
        name TEXT NOT NULL,
        status TEXT,
        started_at TEXT NOT NULL,
        PRIMARY KEY (session_id, turn_id, call_id)
    ) STRICT, WITHOUT ROWID;

    CREATE TABLE permissions (
        permission_id TEXT PRIMARY KEY,
        session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
        turn_id TEXT NOT NULL,
        call_id TEXT NOT NULL,
        tool TEXT NOT NULL,
        arguments TEXT NOT NULL,
        requested_at TEXT NOT NULL,
        expires_at TEXT NOT NULL,
        decision TEXT,
        scope TEXT,
        resolved_by TEXT
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX permissions_of_sessions ON permissions (session_id);
    CREATE INDEX permissions_that_wait ON permissions (requested_at) WHERE decision IS NULL;

    -- Tools that a session may call without another permission.
    CREATE TABLE grants (
        session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
        tool TEXT NOT NULL,
        PRIMARY KEY (session_id, tool)
    ) STRICT, WITHOUT ROWID;

    CREATE TABLE mcp_servers (
        name TEXT PRIMARY KEY,
        config TEXT NOT NULL,
        created_at TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
)
