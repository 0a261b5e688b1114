BEGIN TRANSACTION;
CREATE TABLE deleted_sessions (
        seq INTEGER PRIMARY KEY,
        session_id TEXT NOT NULL,
        deleted_at TEXT NOT NULL
    ) STRICT;
CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at TEXT NOT NULL,
        event TEXT NOT NULL,
        session_id TEXT,
        turn_id TEXT,
        data TEXT NOT NULL,
        stats TEXT
    ) STRICT;
INSERT INTO "events" VALUES(1,'2026-11-30T12:57:37.964Z','daemon.started',NULL,NULL,'{"daemon_id":"dmn_01m8p8gh9s3wcmpxw8p9v7prdc","version":"0.1.0"}',NULL);
INSERT INTO "events" VALUES(2,'2026-11-30T12:57:38.649Z','session.created','ses_01m8p8gj2ex66vaaqd898cv1y0',NULL,'{"session":{"session_id":"ses_01m8p8gj2ex66vaaqd898cv1y0","title":"a session","model":null,"system_prompt":null,"tools":null,"metadata":{},"archived":false,"revision":1,"created_at":"2026-11-30T12:57:38.649Z","updated_at":"2026-11-30T12:57:38.649Z","status":"idle","active_turn_id":null,"queued_turn_ids":[],"forked_from":null}}',NULL);
INSERT INTO "events" VALUES(3,'2026-11-30T12:57:38.662Z','turn.queued','ses_01m8p8gj2ex66vaaqd898cv1y0','trn_01m8p8gj2vhcw3bhbjfhphrf7b','{"message":{"message_id":"msg_16c53fe611340190678d634c2f","role":"user","content":"Say hello.","reasoning_content":null,"tool_calls":[],"call_id":null,"turn_id":"trn_01m8p8gj2vhcw3bhbjfhphrf7b"},"ahead":0}',NULL);
INSERT INTO "events" VALUES(4,'2026-11-30T12:57:38.662Z','turn.started','ses_01m8p8gj2ex66vaaqd898cv1y0','trn_01m8p8gj2vhcw3bhbjfhphrf7b','{"model":null}',NULL);
INSERT INTO "events" VALUES(5,'2026-11-30T12:57:38.662Z','turn.progress','ses_01m8p8gj2ex66vaaqd898cv1y0','trn_01m8p8gj2vhcw3bhbjfhphrf7b','{"step":1,"note":""}',NULL);
INSERT INTO "events" VALUES(6,'2026-11-30T12:57:38.672Z','model.status',NULL,NULL,'{"url":"http://127.0.0.1:44137","reachable":true,"model":"echo","error":null}',NULL);
INSERT INTO "events" VALUES(7,'2026-11-30T12:57:38.672Z','turn.token','ses_01m8p8gj2ex66vaaqd898cv1y0','trn_01m8p8gj2vhcw3bhbjfhphrf7b','{"message_id":"msg_01m8p8gj374jmat5jedj1es0z6","text":"Say hello."}',NULL);
INSERT INTO "events" VALUES(8,'2026-11-30T12:57:38.672Z','message.done','ses_01m8p8gj2ex66vaaqd898cv1y0','trn_01m8p8gj2vhcw3bhbjfhphrf7b','{"message":{"message_id":"msg_01m8p8gj374jmat5jedj1es0z6","role":"assistant","content":"Say hello.","reasoning_content":null,"tool_calls":[],"call_id":null,"turn_id":"trn_01m8p8gj2vhcw3bhbjfhphrf7b"}}',NULL);
INSERT INTO "events" VALUES(9,'2026-11-30T12:57:38.672Z','turn.done','ses_01m8p8gj2ex66vaaqd898cv1y0','trn_01m8p8gj2vhcw3bhbjfhphrf7b','{"stop_reason":"end","text":"Say hello.","stats":{"tokens":6,"prompt_tokens":16,"completion_tokens":6,"tool_calls":0,"steps":1,"elapsed_s":0.009611,"tokens_per_second":0.0,"ttft_ms":7.754}}','{"tokens":6,"prompt_tokens":16,"completion_tokens":6,"tool_calls":0,"steps":1,"elapsed_s":0.009611,"tokens_per_second":0.0,"ttft_ms":7.754}');
INSERT INTO "events" VALUES(10,'2026-11-30T12:57:38.675Z','daemon.stopping',NULL,NULL,'{"mode":"drain"}',NULL);
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
CREATE TABLE messages (
        position INTEGER PRIMARY KEY AUTOINCREMENT,
        session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
        turn_id TEXT,
        message_id TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "messages" VALUES(1,'ses_01m8p8gj2ex66vaaqd898cv1y0','trn_01m8p8gj2vhcw3bhbjfhphrf7b','msg_16c53fe611340190678d634c2f','{"message_id":"msg_16c53fe611340190678d634c2f","role":"user","content":"Say hello.","reasoning_content":null,"tool_calls":[],"call_id":null,"turn_id":"trn_01m8p8gj2vhcw3bhbjfhphrf7b"}');
INSERT INTO "messages" VALUES(2,'ses_01m8p8gj2ex66vaaqd898cv1y0','trn_01m8p8gj2vhcw3bhbjfhphrf7b','msg_01m8p8gj374jmat5jedj1es0z6','{"message_id":"msg_01m8p8gj374jmat5jedj1es0z6","role":"assistant","content":"Say hello.","reasoning_content":null,"tool_calls":[],"call_id":null,"turn_id":"trn_01m8p8gj2vhcw3bhbjfhphrf7b"}');
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "meta" VALUES('stream_id','stm_01m8p8ghak7hx3087m4ww2jpck');
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
INSERT INTO "sessions" VALUES('ses_01m8p8gj2ex66vaaqd898cv1y0','a session',NULL,NULL,NULL,'{}',0,1,NULL,'2026-11-30T12:57:38.649Z','2026-11-30T12:57:38.672Z');
CREATE TABLE tool_calls (
        session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
        turn_id TEXT NOT NULL,
        call_id TEXT NOT NULL,
        name TEXT NOT NULL,
        status TEXT,
        started_at TEXT NOT NULL,
        PRIMARY KEY (session_id, turn_id, call_id)
    ) STRICT, WITHOUT ROWID;
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
INSERT INTO "turns" VALUES(1,'ses_01m8p8gj2ex66vaaqd898cv1y0','trn_01m8p8gj2vhcw3bhbjfhphrf7b','done','Say hello.',NULL,'bb3c7135073ddb36aa9b925df7f1fab0b8c602a8730546b022d6404f43e9fb46','end','Say hello.',NULL,'{"tokens":6,"prompt_tokens":16,"completion_tokens":6,"tool_calls":0,"steps":1,"elapsed_s":0.009611,"tokens_per_second":0.0,"ttft_ms":7.754}','2026-11-30T12:57:38.662Z','2026-11-30T12:57:38.662Z','2026-11-30T12:57:38.672Z',0);
CREATE INDEX events_of_sessions ON events (session_id, seq);
CREATE INDEX streamed_events ON events (session_id, turn_id) WHERE event IN ('turn.token', 'turn.thinking');
CREATE INDEX sessions_by_update ON sessions (archived, updated_at, session_id);
CREATE INDEX messages_of_sessions ON messages (session_id, position);
CREATE INDEX turns_that_go_on ON turns (session_id, position) WHERE status IN ('queued', 'running', 'waiting');
CREATE INDEX turns_to_fold ON turns (ended_at) WHERE folded = 0 AND ended_at IS NOT NULL;
CREATE INDEX permissions_of_sessions ON permissions (session_id);
CREATE INDEX permissions_that_wait ON permissions (requested_at) WHERE decision IS NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',10);
INSERT INTO "sqlite_sequence" VALUES('turns',1);
INSERT INTO "sqlite_sequence" VALUES('messages',2);
COMMIT;
PRAGMA application_id = 0;
PRAGMA user_version = 1;
