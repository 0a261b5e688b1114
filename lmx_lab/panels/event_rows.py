"""Keep the rows of the events panel: the latest events, bounded in number and in bytes."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, get_args

from lmx_lab.panels.text import clip
from lmx_lab.wire.events import DaemonEvent, ResetFrame, Tone, Topic, TurnThinkingEvent, TurnTokenEvent, topic_of

GROUPS = tuple(topic for topic in get_args(Topic) if topic != "stream")
"""Topics that a filter may name."""
MARKS = ("stream", "connection")
"""Prefixes of the names of marks, which are rows about the connection. No filter hides marks."""
CHARACTERS = 2000
"""Number of characters of a row's text that are kept and searched."""
MAX_ROWS = 5000
MAX_BYTES = 16_000_000
"""Maximum size of all rows together, as JSON."""
MAX_EVENT_CHARACTERS = 1_000_000
"""Maximum length of one event as JSON. Only the beginning of a longer event is kept."""
MAX_GROWN_CHARACTERS = 100_000
"""Maximum length of the text in a growing row. Only the end of a longer text is kept."""
MAX_PIECES = 256
"""Maximum number of a row's pieces of text; if there are more, they are joined into one."""
ROW_BYTES = 500
"""Approximate size of a row without its texts."""
VIEW_CHARACTERS = 240
"""Maximum length of a row's text in a view."""
# Direction marks and terminal controls, with which an event could be displayed as a different one.
_UNSAFE = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ENVELOPE = ("event", "seq", "at", "session_id", "turn_id")
COLUMNS = {
    **{"time": "time", "seq": "Int64", "event": "str", "session_id": "str", "turn_id": "str", "batches": "int64"},
    **{"text": "str", "json": "str"},
}
"""Columns of the table of all rows, and their types in a data frame."""


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
            row._content = event.display_text()[:CHARACTERS]
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
        """Approximate size in bytes, with one byte per character."""
        return ROW_BYTES + self._size

    @property
    def content(self) -> str:
        """At most ``CHARACTERS`` characters of the text: the end of a growing text, the beginning of other texts."""
        return self._content if self._pieces is None else self._text()[-CHARACTERS:]

    def grow(self, event: TurnTokenEvent | TurnThinkingEvent) -> None:
        """Add a batch of the same message."""
        assert self._pieces is not None
        self._pieces.append(event.data.text)
        self.seq = event.seq
        self.batches += 1
        self._size += len(event.data.text)
        if len(self._pieces) > MAX_PIECES or self._size > 2 * MAX_GROWN_CHARACTERS:
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
        """Return ``record`` as indented JSON, in which control characters are escaped."""
        text = json.dumps(self.record(), ensure_ascii=False, indent=2)
        return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)

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
        return self == _EVERYTHING

    def passes(self, row: EventRow) -> bool:
        if row.is_mark:
            return True
        if row.topic not in self.groups or (self.session_id and row.session_id != self.session_id):
            return False
        needle = self.text.casefold()
        return not needle or needle in f"{row.kind} {row.session_id or ''} {row.content}".casefold()


_EVERYTHING = RowFilter()


class EventRows:
    """All rows, and those that pass a filter. Passing rows are numbered from the first row that has passed the filter
    since it was set."""

    def __init__(self) -> None:
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
        row = EventRow(
            self.count, kind, now_iso(), content=text, tone=tone, text=json.dumps({"event": kind, "data": text})
        )
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
        while len(self._rows) > 1 and (len(self._rows) > MAX_ROWS or self._bytes > MAX_BYTES):
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


def now_iso() -> str:
    """Return the current time in the daemon's format."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
