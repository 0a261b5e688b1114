"""Track a daemon's sessions from its events: their state, streamed text, and calls that wait for a decision."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from lmx_lab.panels.text import clip
from lmx_lab.wire.events import (
    DaemonEvent,
    MessageDoneEvent,
    PermissionRequestEvent,
    PermissionResolvedEvent,
    ResetFrame,
    SessionCreatedEvent,
    SessionDeletedEvent,
    SessionUpdatedEvent,
    SnapshotFrame,
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

MAX_SESSIONS = 200
MAX_MESSAGES = 64
"""Maximum number of messages of the running turn that are kept."""
MAX_CHARACTERS = 20_000
"""Maximum length of a message's text, and of a turn's text in a view. Only the end of a longer text is kept."""
MAX_PERMISSIONS = 100
VIEW_PERMISSIONS = 20
"""Maximum number of permissions in a view, oldest first. The others are shown when these are decided."""
ARGUMENT_CHARACTERS = 20_000
"""Maximum length of a call's arguments in a view."""
NAME_CHARACTERS = 60
ID_CHARACTERS = 8
"""Length of the end of a session's id, which is shown if the session has no title."""


def short_id(session_id: str) -> str:
    """Return the end of an id; ids of the same minute have the same beginning."""
    return session_id if len(session_id) <= ID_CHARACTERS else f"…{session_id[-ID_CHARACTERS:]}"


class SessionView:
    """The state of one session, as far as events describe it."""

    def __init__(self, session_id: str, number: int) -> None:
        self.session_id = session_id
        self.number = number
        """Sessions are numbered in the order of their first events."""
        self.title: str | None = None
        self.status = "idle"
        self.turn_id: str | None = None
        self.activity = ""
        """The current activity, or the end of the last turn."""
        self.cursor = 0
        """Events up to this cursor were included in the snapshot."""
        self._texts: dict[str, str] = {}
        """The texts of the running or last turn by message id. The empty id has the partial text of a snapshot."""
        self._thoughts = ""

    @property
    def name(self) -> str:
        return clip(self.title or short_id(self.session_id), NAME_CHARACTERS)

    def view(self) -> dict[str, Any]:
        """Return the session as an entry of a view's list."""
        return {"id": self.session_id, "name": self.name, "status": self.status}

    def live_view(self) -> dict[str, Any]:
        """Return the session with its text."""
        text = "\n\n".join(self._texts.values())[-MAX_CHARACTERS:]
        return self.view() | {
            "activity": clip(self.activity, MAX_CHARACTERS),
            "thoughts": clip(self._thoughts, MAX_CHARACTERS),
            "text": clip(text, MAX_CHARACTERS),
        }

    def set_record(self, record: SessionRecord) -> None:
        self.title, self.status, self.turn_id = record.title, record.status, record.active_turn_id

    def begin(self, turn_id: str | None) -> None:
        self.status, self.turn_id, self.activity, self._thoughts = "running", turn_id, "", ""
        self._texts.clear()

    def begin_if_idle(self, turn_id: str | None) -> None:
        """Begin a turn, unless its start was received already."""
        if self.turn_id != turn_id or self.status == "idle":
            self.begin(turn_id)

    def end(self, activity: str) -> None:
        self.status, self.turn_id, self.activity = "idle", None, activity

    def append_text(self, message_id: str, text: str) -> None:
        before = self._texts.get(message_id) or self._texts.pop("", "")
        self._set(message_id, before + text)

    def append_thoughts(self, text: str) -> None:
        self._thoughts = (self._thoughts + text)[-MAX_CHARACTERS:]

    def set_text(self, message_id: str, text: str) -> None:
        """Replace the streamed text of a message by the complete one."""
        self._texts.pop("", None)
        self._set(message_id, text)

    def resume(self, partial_text: str) -> None:
        self._texts, self._thoughts, self.activity = {}, "", ""
        if partial_text:
            self._set("", partial_text)

    def _set(self, message_id: str, text: str) -> None:
        self._texts[message_id] = text[-MAX_CHARACTERS:]
        if len(self._texts) > MAX_MESSAGES:
            del self._texts[next(iter(self._texts))]


class SessionTracker:
    """The sessions that had events, at most the latest ``MAX_SESSIONS``."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionView] = {}
        """The sessions by id, in the order of their latest events."""
        self._permissions: dict[str, PermissionRecord] = {}
        self._count = 0

    def add(self, event: DaemonEvent) -> None:
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
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return session

    def clear(self) -> None:
        self._sessions.clear()
        self._permissions.clear()

    def remove_permission(self, permission_id: str) -> None:
        """Remove a permission that was decided in this panel; its event follows."""
        self._permissions.pop(permission_id, None)

    # Views

    def view(self) -> list[dict[str, Any]]:
        """Return all sessions, newest first."""
        newest_first = sorted(self._sessions.values(), key=lambda session: -session.number)
        return [session.view() for session in newest_first]

    def name(self, session_id: str) -> str:
        """Return the title of a session, or the end of its id if it has no title or is not known."""
        session = self._sessions.get(session_id)
        return session.name if session is not None else short_id(session_id)

    def live(self, session_id: str) -> dict[str, Any]:
        """Return one session with its text; empty if it is not known."""
        session = self._sessions.get(session_id)
        return session.live_view() if session is not None else {}

    def permissions(self) -> list[dict[str, Any]]:
        """Return the calls that wait for a decision, at most the oldest ``VIEW_PERMISSIONS``."""
        return [self._permission_view(record) for record in islice(self._permissions.values(), VIEW_PERMISSIONS)]

    def _permission_view(self, record: PermissionRecord) -> dict[str, Any]:
        arguments = json.dumps(record.arguments, ensure_ascii=False, indent=1)
        return {
            "id": record.permission_id,
            "tool": clip(record.tool, 200),
            "session": self.name(record.session_id),
            "arguments": clip(arguments, ARGUMENT_CHARACTERS),
            "omitted": max(0, len(arguments) - ARGUMENT_CHARACTERS),
            "expires_at": record.expires_at,
        }

    # Effects of the events

    def _on_record(self, session: SessionView, event: SessionCreatedEvent | SessionUpdatedEvent) -> None:
        session.set_record(event.data.session)

    def _on_deleted(self, session: SessionView, event: SessionDeletedEvent) -> None:
        self._sessions.pop(session.session_id, None)
        self._remove_permissions(session.session_id)

    def _on_snapshot(self, session: SessionView, event: SnapshotFrame) -> None:
        it = event.data.session
        session.set_record(it)
        session.cursor = it.cursor
        session.resume(it.partial_text)
        self._remove_permissions(session.session_id)
        for record in it.permissions:
            self._add_permission(record)

    def _on_queued(self, session: SessionView, event: TurnQueuedEvent) -> None:
        if session.status == "idle":
            session.status = "queued"

    def _on_started(self, session: SessionView, event: TurnStartedEvent) -> None:
        session.begin(event.turn_id)

    def _on_progress(self, session: SessionView, event: TurnProgressEvent) -> None:
        session.activity = event.data.note

    def _on_token(self, session: SessionView, event: TurnTokenEvent) -> None:
        session.begin_if_idle(event.turn_id)
        session.append_text(event.data.message_id, event.data.text)
        session.activity = ""

    def _on_thinking(self, session: SessionView, event: TurnThinkingEvent) -> None:
        session.begin_if_idle(event.turn_id)
        session.append_thoughts(event.data.text)

    def _on_message(self, session: SessionView, event: MessageDoneEvent) -> None:
        message = event.data.message
        if message.role == "assistant" and (message.content or message.message_id):
            session.set_text(message.message_id or "", message.content)

    def _on_tool(self, session: SessionView, event: ToolStartEvent) -> None:
        session.activity = f"running {event.data.name}"

    def _on_tool_end(self, session: SessionView, event: ToolEndEvent) -> None:
        session.activity = f"{event.data.name}: {event.data.status}"

    def _on_permission_request(self, session: SessionView, event: PermissionRequestEvent) -> None:
        session.status = "waiting"
        self._add_permission(event.data.permission)

    def _on_permission_resolved(self, session: SessionView, event: PermissionResolvedEvent) -> None:
        self._permissions.pop(event.data.permission.permission_id, None)
        if session.status == "waiting":
            session.status = "running"

    def _on_done(self, session: SessionView, event: TurnDoneEvent) -> None:
        stats = event.stats
        session.end(
            f"{event.data.stop_reason} · {stats.completion_tokens} tokens · {stats.tokens_per_second:.1f} tok/s"
        )
        self._remove_permissions(session.session_id, event.turn_id)

    def _on_failed(self, session: SessionView, event: TurnErrorEvent) -> None:
        session.end(event.data.error.message)
        self._remove_permissions(session.session_id, event.turn_id)

    def _add_permission(self, record: PermissionRecord) -> None:
        if record.decision is None:
            self._permissions[record.permission_id] = record
        if len(self._permissions) > MAX_PERMISSIONS:
            del self._permissions[next(iter(self._permissions))]

    def _remove_permissions(self, session_id: str, turn_id: str | None = None) -> None:
        gone = [
            record.permission_id
            for record in self._permissions.values()
            if record.session_id == session_id and turn_id in {None, record.turn_id}
        ]
        for permission_id in gone:
            del self._permissions[permission_id]


_HANDLERS: Mapping[type, Callable[[SessionTracker, SessionView, Any], None]] = {
    SessionCreatedEvent: SessionTracker._on_record,
    SessionUpdatedEvent: SessionTracker._on_record,
    SessionDeletedEvent: SessionTracker._on_deleted,
    SnapshotFrame: SessionTracker._on_snapshot,
    TurnQueuedEvent: SessionTracker._on_queued,
    TurnStartedEvent: SessionTracker._on_started,
    TurnProgressEvent: SessionTracker._on_progress,
    TurnTokenEvent: SessionTracker._on_token,
    TurnThinkingEvent: SessionTracker._on_thinking,
    MessageDoneEvent: SessionTracker._on_message,
    ToolStartEvent: SessionTracker._on_tool,
    ToolEndEvent: SessionTracker._on_tool_end,
    PermissionRequestEvent: SessionTracker._on_permission_request,
    PermissionResolvedEvent: SessionTracker._on_permission_resolved,
    TurnDoneEvent: SessionTracker._on_done,
    TurnErrorEvent: SessionTracker._on_failed,
}
