"""Sessions as the events describe them: state, streamed text, calls that wait for a decision."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from lmx_lab.panels.rerank import shown
from lmx_lab.wire.event_stream import ResetFrame, SnapshotFrame
from lmx_lab.wire.events import (
    DaemonEvent,
    MessageDoneEvent,
    PermissionRequestEvent,
    PermissionResolvedEvent,
    SessionCreatedEvent,
    SessionDeletedEvent,
    SessionUpdatedEvent,
    ToolEndEvent,
    ToolStartEvent,
    TurnDoneEvent,
    TurnErrorEvent,
    TurnProgressEvent,
    TurnQueuedEvent,
    TurnStartedEvent,
    TurnThinkingEvent,
    TurnTokenEvent,
)
from lmx_lab.wire.sessions import PermissionRecord, SessionRecord

MOST_SESSIONS = 200
MOST_MESSAGES = 64
"""Maximum number of messages kept of the running turn."""
MOST_CHARACTERS = 20_000
"""Maximum length of a message's text, and of a turn in a view; the end is kept."""
MOST_PERMISSIONS = 100
SHOWN_PERMISSIONS = 20
"""Permissions in a view, the oldest first; others follow when these are decided."""
ARGUMENT_CHARACTERS = 20_000
"""Maximum length of a call's arguments in a view."""
NAME_CHARACTERS = 60
ID_CHARACTERS = 8
"""Length of the end of a session's id that is shown without a title."""


class SessionView:
    """One session, as far as events describe it."""

    def __init__(self, session_id: str, number: int) -> None:
        self.session_id = session_id
        self.number = number
        """Sessions are numbered in the order of their first events."""
        self.title: str | None = None
        self.status = "idle"
        self.turn_id: str | None = None
        self.remark = ""
        """The current activity, or the end of the last turn."""
        self.cursor = 0
        """Events up to this cursor were included in the snapshot."""
        self._texts: dict[str, str] = {}
        """Texts of the running or last turn by message; the empty id is the partial text of a snapshot."""
        self._thoughts = ""

    @property
    def name(self) -> str:
        # Ids of the same minute have the same beginning.
        end = self.session_id[-ID_CHARACTERS:]
        return shown(self.title or (self.session_id if end == self.session_id else f"…{end}"), NAME_CHARACTERS)

    def seen(self) -> dict[str, Any]:
        """The session as an entry of a view's list."""
        return {"id": self.session_id, "name": self.name, "status": self.status}

    def live(self) -> dict[str, Any]:
        """The session as a view shows it alone."""
        text = "\n\n".join(self._texts.values())[-MOST_CHARACTERS:]
        return self.seen() | {
            "remark": shown(self.remark, MOST_CHARACTERS),
            "thoughts": shown(self._thoughts, MOST_CHARACTERS),
            "text": shown(text, MOST_CHARACTERS),
        }

    def is_now(self, record: SessionRecord) -> None:
        self.title, self.status, self.turn_id = record.title, record.status, record.active_turn_id

    def begins(self, turn_id: str | None) -> None:
        self.status, self.turn_id, self.remark, self._thoughts = "running", turn_id, "", ""
        self._texts.clear()

    def runs(self, turn_id: str | None) -> None:
        """Note that a turn runs, whose start may have been missed."""
        if self.turn_id != turn_id or self.status == "idle":
            self.begins(turn_id)

    def ends(self, remark: str) -> None:
        self.status, self.turn_id, self.remark = "idle", None, remark

    def writes(self, message_id: str, text: str) -> None:
        before = self._texts.get(message_id) or self._texts.pop("", "")
        self._set(message_id, before + text)

    def thinks(self, text: str) -> None:
        self._thoughts = (self._thoughts + text)[-MOST_CHARACTERS:]

    def wrote(self, message_id: str, text: str) -> None:
        """Set a complete message, which replaces its streamed text."""
        self._texts.pop("", None)
        self._set(message_id, text)

    def resumes(self, partial_text: str) -> None:
        self._texts, self._thoughts, self.remark = {}, "", ""
        if partial_text:
            self._set("", partial_text)

    def _set(self, message_id: str, text: str) -> None:
        self._texts[message_id] = text[-MOST_CHARACTERS:]
        if len(self._texts) > MOST_MESSAGES:
            del self._texts[next(iter(self._texts))]


class Sessions:
    """The sessions with events, at most the latest ``MOST_SESSIONS``."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionView] = {}
        """In the order of their latest events."""
        self._permissions: dict[str, PermissionRecord] = {}
        self._count = 0

    def take(self, event: DaemonEvent) -> None:
        handler = _HANDLERS.get(type(event))
        if handler is None:
            return
        if event.session_id is None:
            if isinstance(event, ResetFrame):
                self._permissions.clear()
            return
        session = self._latest(event.session_id)
        # Events that the snapshot includes are skipped.
        if event.seq is None or event.seq > session.cursor:
            handler(self, session, event)

    def _latest(self, session_id: str) -> SessionView:
        session = self._sessions.pop(session_id, None)
        if session is None:
            self._count += 1
            session = SessionView(session_id, self._count)
        self._sessions[session_id] = session
        if len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return session

    def clear(self) -> None:
        self._sessions.clear()
        self._permissions.clear()

    def decided(self, permission_id: str) -> None:
        """Remove a permission that was decided; its event follows."""
        self._permissions.pop(permission_id, None)

    # Out

    def seen(self) -> list[dict[str, Any]]:
        """All sessions for a view, the newest first."""
        newest_first = sorted(self._sessions.values(), key=lambda session: -session.number)
        return [session.seen() for session in newest_first]

    def live(self, session_id: str) -> dict[str, Any]:
        """One session with its text; empty if it is not known."""
        session = self._sessions.get(session_id)
        return session.live() if session is not None else {}

    def waiting(self) -> list[dict[str, Any]]:
        """The calls that wait for a decision, at most the oldest ``SHOWN_PERMISSIONS``."""
        return [self._asked(record) for record in islice(self._permissions.values(), SHOWN_PERMISSIONS)]

    def _asked(self, record: PermissionRecord) -> dict[str, Any]:
        arguments = json.dumps(record.arguments, ensure_ascii=False, indent=1)
        session = self._sessions.get(record.session_id)
        return {
            "id": record.permission_id,
            "tool": shown(record.tool, 200),
            "session": session.name if session is not None else record.session_id,
            "arguments": shown(arguments, ARGUMENT_CHARACTERS),
            "left_out": max(0, len(arguments) - ARGUMENT_CHARACTERS),
            "expires_at": record.expires_at,
        }

    # Effects of the events

    def _record(self, session: SessionView, event: SessionCreatedEvent | SessionUpdatedEvent) -> None:
        session.is_now(event.data.session)

    def _deleted(self, session: SessionView, event: SessionDeletedEvent) -> None:
        self._sessions.pop(session.session_id, None)
        self._withdraw(session.session_id)

    def _snapshot(self, session: SessionView, event: SnapshotFrame) -> None:
        it = event.data.session
        session.is_now(it)
        session.cursor = it.cursor
        session.resumes(it.partial_text)
        self._withdraw(session.session_id)
        for record in it.permissions:
            self._wait(record)

    def _queued(self, session: SessionView, event: TurnQueuedEvent) -> None:
        if session.status == "idle":
            session.status = "queued"

    def _started(self, session: SessionView, event: TurnStartedEvent) -> None:
        session.begins(event.turn_id)

    def _progress(self, session: SessionView, event: TurnProgressEvent) -> None:
        session.remark = event.data.note

    def _token(self, session: SessionView, event: TurnTokenEvent) -> None:
        session.runs(event.turn_id)
        session.writes(event.data.message_id, event.data.text)
        session.remark = ""

    def _thinking(self, session: SessionView, event: TurnThinkingEvent) -> None:
        session.runs(event.turn_id)
        session.thinks(event.data.text)

    def _message(self, session: SessionView, event: MessageDoneEvent) -> None:
        message = event.data.message
        if message.role == "assistant" and (message.content or message.message_id):
            session.wrote(message.message_id or "", message.content)

    def _tool(self, session: SessionView, event: ToolStartEvent) -> None:
        session.remark = f"runs {event.data.name}"

    def _tool_end(self, session: SessionView, event: ToolEndEvent) -> None:
        session.remark = f"{event.data.name}: {event.data.status}"

    def _asks(self, session: SessionView, event: PermissionRequestEvent) -> None:
        session.status = "waiting"
        self._wait(event.data.permission)

    def _resolved(self, session: SessionView, event: PermissionResolvedEvent) -> None:
        self._permissions.pop(event.data.permission.permission_id, None)
        if session.status == "waiting":
            session.status = "running"

    def _done(self, session: SessionView, event: TurnDoneEvent) -> None:
        stats = event.stats
        session.ends(
            f"{event.data.stop_reason} · {stats.completion_tokens} tokens · {stats.tokens_per_second:.1f} tokens/s"
        )
        self._withdraw(session.session_id, event.turn_id)

    def _failed(self, session: SessionView, event: TurnErrorEvent) -> None:
        session.ends(event.data.error.message)
        self._withdraw(session.session_id, event.turn_id)

    def _wait(self, record: PermissionRecord) -> None:
        if record.decision is None:
            self._permissions[record.permission_id] = record
        if len(self._permissions) > MOST_PERMISSIONS:
            del self._permissions[next(iter(self._permissions))]

    def _withdraw(self, session_id: str, turn_id: str | None = None) -> None:
        gone = [
            record.permission_id
            for record in self._permissions.values()
            if record.session_id == session_id and turn_id in {None, record.turn_id}
        ]
        for permission_id in gone:
            del self._permissions[permission_id]


_HANDLERS: Mapping[type, Callable[[Sessions, SessionView, Any], None]] = {
    SessionCreatedEvent: Sessions._record,
    SessionUpdatedEvent: Sessions._record,
    SessionDeletedEvent: Sessions._deleted,
    SnapshotFrame: Sessions._snapshot,
    TurnQueuedEvent: Sessions._queued,
    TurnStartedEvent: Sessions._started,
    TurnProgressEvent: Sessions._progress,
    TurnTokenEvent: Sessions._token,
    TurnThinkingEvent: Sessions._thinking,
    MessageDoneEvent: Sessions._message,
    ToolStartEvent: Sessions._tool,
    ToolEndEvent: Sessions._tool_end,
    PermissionRequestEvent: Sessions._asks,
    PermissionResolvedEvent: Sessions._resolved,
    TurnDoneEvent: Sessions._done,
    TurnErrorEvent: Sessions._failed,
}
