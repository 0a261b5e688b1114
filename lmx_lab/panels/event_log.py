"""Keep what the events panel shows, bounded in size: the latest events as rows, and the state of each session.

``SessionTracker`` knows the state of a session, its streamed text, and its calls that wait for a decision.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, get_args

from lmx_lab.errors import counted
from lmx_lab.sanitize import UNSAFE, clip
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
    Tone,
    ToolEndEvent,
    ToolOutputEvent,
    ToolStartEvent,
    Topic,
    TurnDoneEvent,
    TurnErrorEvent,
    TurnProgressEvent,
    TurnQueuedEvent,
    TurnStartedEvent,
    TurnThinkingEvent,
    TurnTokenEvent,
    UnknownEvent,
    topic_of,
)
from lmx_lab.wire.sessions import PermissionRecord, SessionRecord

GROUPS = tuple(topic for topic in get_args(Topic) if topic != "stream")
"""Topics that a filter may name."""
MARKS = ("stream", "connection")
"""Prefixes of the names of marks, which are rows about the connection. No filter hides marks."""
ROW_CHARACTERS = 2000
"""Number of characters of a row's text that are kept and searched."""
MAX_ROWS = 5000
MAX_EVENT_CHARACTERS = 1_000_000
"""Maximum length of one event as JSON. Only the beginning of a longer event is kept."""
MAX_GROWN_CHARACTERS = 100_000
"""Maximum length of the text in a growing row. Only the end of a longer text is kept."""
VIEW_CHARACTERS = 240
"""Maximum length of a row's text in a view."""
ENVELOPE = ("event", "seq", "at", "session_id", "turn_id")
COLUMNS = {
    **{"time": "time", "seq": "Int64", "event": "str", "session_id": "str", "turn_id": "str", "batches": "int64"},
    **{"text": "str", "json": "str"},
}
"""Columns of the table of all rows, and their types in a data frame."""
MAX_TURN_CHARACTERS = 20_000
"""Maximum length of a message's text, and of a turn's text in a view. Only the end of a longer text is kept."""


class EventRow:
    """The row of an event or of a mark. All ``turn.token`` events of a message share one row, which grows."""

    __slots__ = (
        *("number", "kind", "topic", "is_mark", "tone", "at", "seq", "session_id", "turn_id", "message_id"),
        *("batches", "_content", "_json", "_pieces", "_size"),
    )

    def __init__(self, number: int, kind: str, at: str, *, content: str = "", tone: Tone = "", text: str = "") -> None:
        self.number = number
        """Rows are numbered in order; the number never changes."""
        self.kind, self.at, self.tone = kind, at, tone
        self.topic = topic_of(kind)
        self.is_mark = kind.partition(".")[0] in MARKS
        self.seq: int | None = None
        self.session_id: str | None = None
        self.turn_id: str | None = None
        self.message_id: str | None = None
        """Id of the message; set only in growing rows."""
        self.batches = 1
        self._content, self._json = content, text
        self._pieces: list[str] | None = None
        self._size = len(content) + len(text)

    @classmethod
    def of(cls, number: int, event: DaemonEvent) -> EventRow:
        """Return the row of an event."""
        row = cls(number, event.event, event.at, tone=event.display_tone)
        row.seq, row.session_id, row.turn_id = event.seq, event.session_id, event.turn_id
        if isinstance(event, TurnTokenEvent | TurnThinkingEvent):
            row.message_id = event.data.message_id
            row._pieces = [event.data.text[-MAX_GROWN_CHARACTERS:]]
            event = event.model_copy(update={"data": event.data.model_copy(update={"text": ""})})
        else:
            row._content = event.display_text()[:ROW_CHARACTERS]
        row._json = event.model_dump_json()
        if len(row._json) > MAX_EVENT_CHARACTERS:
            cut = {"cut_at": MAX_EVENT_CHARACTERS, "beginning": row._json[:MAX_EVENT_CHARACTERS]}
            row._json = json.dumps(
                {name: getattr(event, name) for name in ENVELOPE} | {"data": cut}, ensure_ascii=False
            )
        row._size = len(row._content) + len(row._json) + sum(map(len, row._pieces or ()))
        return row

    @property
    def size(self) -> int:
        """Approximate size in bytes, with one byte per character, and 500 bytes for a row without its texts."""
        return 500 + self._size

    @property
    def content(self) -> str:
        """At most ``ROW_CHARACTERS`` characters: the end of a growing text, the beginning of other texts."""
        return self._content if self._pieces is None else self._text()[-ROW_CHARACTERS:]

    def grow(self, event: TurnTokenEvent | TurnThinkingEvent) -> None:
        """Add a batch of the same message."""
        assert self._pieces is not None
        self._pieces.append(event.data.text)
        self.seq = event.seq
        self.batches += 1
        self._size += len(event.data.text)
        if len(self._pieces) > 256 or self._size > 2 * MAX_GROWN_CHARACTERS:
            text = "".join(self._pieces)
            self._pieces = [text[-MAX_GROWN_CHARACTERS:]]
            self._size -= len(text) - len(self._pieces[0])

    def _text(self) -> str:
        # Must not change the row: a cell reads it on another thread.
        return "".join(self._pieces or ())[-MAX_GROWN_CHARACTERS:]

    def view(self) -> dict[str, Any]:
        """Return the row as a view shows it."""
        content = self.content if self._pieces is None else " ".join(self.content[-VIEW_CHARACTERS:].split())
        return {
            "id": self.number,
            "at": self.at,
            "kind": self.kind,
            "batches": self.batches,
            "session": self.session_id or "",
            "text": clip(content, VIEW_CHARACTERS),
            "tone": self.tone,
            "mark": self.is_mark,
            "grows": self._pieces is not None,
        }

    def record(self) -> dict[str, Any]:
        """Return the event as it was received. For a growing row, this is its first event with the text of all events
        and the last ``seq``."""
        event: dict[str, Any] = json.loads(self._json)
        if self._pieces is not None:
            event["data"]["text"] = self._text()
            event |= {"seq": self.seq, "batches": self.batches}
        return {name: event[name] for name in ENVELOPE if name in event} | event

    def as_json(self) -> str:
        """Return ``record`` as indented JSON, in which unsafe characters are escaped."""
        text = json.dumps(self.record(), ensure_ascii=False, indent=2)
        return UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], text)

    def cells(self) -> tuple[Any, ...]:
        """Return the values in the order of ``COLUMNS``."""
        text = self._text() if self._pieces is not None else self._content
        record = json.dumps(self.record(), ensure_ascii=False)
        return (self.at, self.seq, self.kind, self.session_id, self.turn_id, self.batches, text, record)


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """The filter that selects which rows are shown. Marks are always shown."""

    groups: frozenset[str] = frozenset(GROUPS)
    session_id: str = ""
    """Show only rows of this session; empty for all rows."""
    text: str = ""
    """Show only rows whose kind, session or text contains this text, ignoring case."""

    @property
    def is_empty(self) -> bool:
        return self == RowFilter()

    def passes(self, row: EventRow) -> bool:
        if row.is_mark:
            return True
        if row.topic not in self.groups or (self.session_id and row.session_id != self.session_id):
            return False
        needle = self.text.casefold()
        return not needle or needle in f"{row.kind} {row.session_id or ''} {row.content}".casefold()


class EventRows:
    """All rows, and those that pass a filter. Passing rows are numbered from the first row that has passed the filter
    since it was set.

    Args:
        max_bytes: Maximum size of all rows together, as JSON.
    """

    def __init__(self, *, max_bytes: int = 16_000_000) -> None:
        self._max_bytes = max_bytes
        self._rows: deque[EventRow] = deque()
        self._growing: dict[tuple[str, str], EventRow] = {}
        """The growing rows by kind and message id, without removed rows."""
        self._filter = RowFilter()
        self._passing: list[EventRow] | None = None
        self._bytes = 0
        self.count = 0
        """Number of rows that were added so far."""
        self.removed = 0
        """Number of rows that were removed to make room since the last ``clear``."""
        self.base = 0
        """Number of passing rows that were removed since the filter was set."""
        self._numbering = 0
        """Changes whenever the numbers of passing rows start at 0 again."""

    # Add

    def add(self, event: DaemonEvent) -> None:
        """Add an event, as a new row or to the growing row of its message."""
        if not isinstance(event, TurnTokenEvent | TurnThinkingEvent):
            if isinstance(event, ResetFrame):
                # Text after the gap does not continue the text before it.
                self._growing.clear()
            self._add(EventRow.of(self.count, event))
            return
        row = self._growing.get((event.event, event.data.message_id))
        if row is None:
            row = self._growing[event.event, event.data.message_id] = EventRow.of(self.count, event)
            self._add(row)
            return
        before = row.size
        row.grow(event)
        self._bytes += row.size - before
        self._passing = None
        self._make_room()

    def mark(self, kind: str, text: str, tone: Tone) -> EventRow:
        """Add a mark, and return its row."""
        # In the daemon's format.
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        row = EventRow(self.count, kind, now, content=text, tone=tone, text=json.dumps({"event": kind, "data": text}))
        self._add(row)
        return row

    def change_mark(self, row: EventRow, text: str) -> None:
        """Change the text of a mark."""
        row._content = text
        row._json = json.dumps({"event": row.kind, "at": row.at, "data": text})
        self._passing = None

    def clear(self) -> None:
        """Remove all rows."""
        self._rows.clear()
        self._growing.clear()
        self._bytes = self.removed = 0
        self._renumber()

    def _add(self, row: EventRow) -> None:
        self._rows.append(row)
        self._bytes += row.size
        self.count += 1
        self._passing = None
        self._make_room()

    def _make_room(self) -> None:
        while len(self._rows) > 1 and (len(self._rows) > MAX_ROWS or self._bytes > self._max_bytes):
            row = self._rows.popleft()
            self._bytes -= row.size
            self.removed += 1
            self.base += self._filter.passes(row)
            if row.message_id is not None and self._growing.get((row.kind, row.message_id)) is row:
                del self._growing[row.kind, row.message_id]

    # Read

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """Approximate size of all rows."""
        return self._bytes

    @property
    def filter(self) -> RowFilter:
        return self._filter

    @filter.setter
    def filter(self, value: RowFilter) -> None:
        self._filter = value
        self._renumber()

    def _renumber(self) -> None:
        self._passing, self.base = None, 0
        self._numbering += 1

    @property
    def passing(self) -> Sequence[EventRow]:
        """The passing rows, oldest first."""
        if self._passing is None:
            self._passing = [row for row in self._rows if self._filter.is_empty or self._filter.passes(row)]
        return self._passing

    def window(self, first: int | None, count: int) -> dict[str, Any]:
        """Return ``count`` passing rows, starting at number ``first``, or the newest if it is None."""
        passing = self.passing
        at = max(0, len(passing) - count) if first is None else max(0, first - self.base)
        rows = [row.view() for row in passing[at : at + count]]
        first = self.base + at
        return {"numbering": self._numbering, "base": self.base, "total": len(passing), "first": first, "rows": rows}

    def row(self, number: int) -> EventRow | None:
        """Return the row with this number; None if it was removed."""
        at = number - self._rows[0].number if self._rows else -1
        return next(islice(self._rows, at, at + 1), None) if at >= 0 else None

    def cells(self) -> Iterable[tuple[Any, ...]]:
        """Return the values of all rows in the order of ``COLUMNS``. Can be called while rows are added."""
        return [row.cells() for row in list(self._rows)]


def short_id(session_id: str) -> str:
    """Return the end of an id; ids of the same minute have the same beginning."""
    return session_id if len(session_id) <= 8 else f"…{session_id[-8:]}"


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
        return clip(self.title or short_id(self.session_id), 60)

    def view(self) -> dict[str, Any]:
        """Return the session as an entry of a view's list."""
        return {"id": self.session_id, "name": self.name, "status": self.status}

    def live_view(self) -> dict[str, Any]:
        """Return the session with its text."""
        text = "\n\n".join(self._texts.values())[-MAX_TURN_CHARACTERS:]
        return self.view() | {
            "activity": clip(self.activity, MAX_TURN_CHARACTERS),
            "thoughts": clip(self._thoughts, MAX_TURN_CHARACTERS),
            "text": clip(text, MAX_TURN_CHARACTERS),
        }

    def apply(self, event: DaemonEvent) -> None:
        """Change the state by an event."""
        match event:
            case SessionCreatedEvent() | SessionUpdatedEvent():
                self._set_record(event.data.session)
            case TurnQueuedEvent() if self.status == "idle":
                self.status = "queued"
            case TurnStartedEvent():
                self._begin(event.turn_id)
            case TurnProgressEvent():
                self.activity = event.data.note
            case ToolStartEvent():
                self.activity = f"running {event.data.name}"
            case ToolEndEvent():
                self.activity = f"{event.data.name}: {event.data.status}"
            case PermissionRequestEvent():
                self.status = "waiting"
            case PermissionResolvedEvent() if self.status == "waiting":
                self.status = "running"
            case TurnDoneEvent():
                tokens, speed = event.stats.completion_tokens, event.stats.tokens_per_second
                self._end(f"{event.data.stop_reason} · {counted(tokens, 'token')} · {speed:.1f} tok/s")
            case TurnErrorEvent():
                self._end(event.data.error.message)
            case _:
                self._apply_text(event)

    def _apply_text(self, event: DaemonEvent) -> None:
        if isinstance(event, TurnTokenEvent | TurnThinkingEvent) and (
            self.turn_id != event.turn_id or self.status == "idle"
        ):
            # The start of the turn was not received.
            self._begin(event.turn_id)
        match event:
            case TurnTokenEvent():
                number = event.data.message_id
                before = self._texts.get(number) or self._texts.pop("", "")
                self._set_text(number, before + event.data.text)
                self.activity = ""
            case TurnThinkingEvent():
                self._thoughts = (self._thoughts + event.data.text)[-MAX_TURN_CHARACTERS:]
            case MessageDoneEvent(data=data) if data.message.role == "assistant":
                if data.message.content or data.message.message_id:
                    # The complete text replaces the streamed one.
                    self._texts.pop("", None)
                    self._set_text(data.message.message_id or "", data.message.content)
            case SnapshotFrame():
                it = event.data.session
                self._set_record(it)
                self.cursor = it.cursor
                self._texts, self._thoughts, self.activity = {}, "", ""
                if it.partial_text:
                    self._set_text("", it.partial_text)

    def _set_record(self, record: SessionRecord) -> None:
        self.title, self.status, self.turn_id = record.title, record.status, record.active_turn_id

    def _begin(self, turn_id: str | None) -> None:
        self.status, self.turn_id, self.activity, self._thoughts = "running", turn_id, "", ""
        self._texts.clear()

    def _end(self, activity: str) -> None:
        self.status, self.turn_id, self.activity = "idle", None, activity

    def _set_text(self, message_id: str, text: str) -> None:
        self._texts[message_id] = text[-MAX_TURN_CHARACTERS:]
        if len(self._texts) > 64:
            del self._texts[next(iter(self._texts))]


class SessionTracker:
    """The sessions that had events, at most the latest 200, and at most 100 calls that wait for a decision."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionView] = {}
        """The sessions by id, in the order of their latest events."""
        self._permissions: dict[str, PermissionRecord] = {}
        self._count = 0

    def add(self, event: DaemonEvent) -> None:
        session_id = event.session_id
        if isinstance(event, ResetFrame) and session_id is None:
            self._permissions.clear()
        if session_id is None or isinstance(event, ToolOutputEvent | UnknownEvent):
            return
        session = self._sessions.pop(session_id, None)
        if session is None:
            self._count += 1
            session = SessionView(session_id, self._count)
        self._sessions[session_id] = session
        if len(self._sessions) > 200:
            del self._sessions[next(iter(self._sessions))]
        # Events that the snapshot includes are skipped.
        if event.seq is None or event.seq > session.cursor:
            session.apply(event)
            match event:
                case SessionDeletedEvent():
                    self._sessions.pop(session_id, None)
                    self._remove_permissions(session_id)
                case SnapshotFrame():
                    self._remove_permissions(session_id)
                    for record in event.data.session.permissions:
                        self._add_permission(record)
                case PermissionRequestEvent():
                    self._add_permission(event.data.permission)
                case PermissionResolvedEvent():
                    self._permissions.pop(event.data.permission.permission_id, None)
                case TurnDoneEvent() | TurnErrorEvent():
                    self._remove_permissions(session_id, event.turn_id)

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
        """Return the calls that wait for a decision: the 20 oldest; the others follow when these are decided."""
        views = []
        most = 20_000  # characters of a call's arguments
        for record in islice(self._permissions.values(), 20):
            arguments = json.dumps(record.arguments, ensure_ascii=False, indent=1)
            views.append(
                {
                    "id": record.permission_id,
                    "tool": clip(record.tool, 200),
                    "session": self.name(record.session_id),
                    "arguments": clip(arguments, most),
                    "omitted": max(0, len(arguments) - most),
                    "expires_at": record.expires_at,
                }
            )
        return views

    # Calls that wait for a decision

    def _add_permission(self, record: PermissionRecord) -> None:
        if record.decision is None:
            self._permissions[record.permission_id] = record
        if len(self._permissions) > 100:
            del self._permissions[next(iter(self._permissions))]

    def _remove_permissions(self, session_id: str, turn_id: str | None = None) -> None:
        gone = [
            record.permission_id
            for record in self._permissions.values()
            if record.session_id == session_id and turn_id in {None, record.turn_id}
        ]
        for permission_id in gone:
            del self._permissions[permission_id]
