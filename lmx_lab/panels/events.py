"""The events panel: a daemon's events as rows, the text of a session, and calls that wait for a decision."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import traitlets

from lmx_lab.backend import Backend
from lmx_lab.client.subscription import ConnectionState
from lmx_lab.errors import HostingError, InvalidRequestError, NotFoundError, counted
from lmx_lab.panels.event_log import COLUMNS, GROUPS, MAX_ROWS, EventRow, EventRows, RowFilter, SessionTracker
from lmx_lab.panels.panel import Panel, number_field, text_field
from lmx_lab.panels.workbench import EventSource, Workbench
from lmx_lab.results.frames import make_table
from lmx_lab.results.tables import html_table
from lmx_lab.sanitize import clip, replace_surrogates
from lmx_lab.wire.admin import Sample
from lmx_lab.wire.events import DaemonEvent, ResetFrame

WINDOW_ROWS = 100
"""Number of rows in a frame, and maximum number of rows in the reply to a request."""
SEARCH_CHARACTERS = 200
NO_DAEMON = "This lab has no daemon; lmx_lab.launch(daemon=True) starts one."


class EventsPanel(Panel):
    """Shows the daemon's events as rows with filters, the text of a session, and tool calls that wait for a decision.

    The last 5,000 rows are kept in Python. A view has a window of at most 100 rows, and requests other rows when they
    are needed. The streamed text of a message is a single row that grows. Events are read as long as the panel is open,
    even if no view displays it. ``df`` has the rows.
    """

    SCRIPTS = ("elements.js", "panel.js", "events.js")
    STYLES = ("panel.css", "events.css")
    NEEDS_DAEMON = True
    FULL_WIDTH = True

    connection = traitlets.Dict().tag(sync=True)
    """``{state, text, place, error}``; the state is that of a ``ConnectionState``, or ``none`` without a daemon."""
    frame = traitlets.Dict().tag(sync=True)
    """The newest rows that pass the filter: ``{numbering, base, total, first, rows, summary}``. Passing rows are
    numbered from 0, and keep their numbers when the oldest are removed: existing rows have the numbers from ``base`` to
    ``base + total - 1``. The numbers start at 0 again when ``numbering`` changes."""
    filter = traitlets.Dict().tag(sync=True)
    """``{groups, session, text}``; all views share it."""
    sessions: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """``{id, name, status}`` of each session."""
    live = traitlets.Dict().tag(sync=True)
    """The filter's session: ``{id, name, status, activity, thoughts, text}``; empty without one."""
    permissions: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """Calls that wait for a decision: ``{id, tool, session, arguments, omitted, expires_at}``."""

    def __init__(self, workbench: Workbench, **traits: Any) -> None:
        self._rows = EventRows()
        self._sessions = SessionTracker()
        self._source: EventSource | None = None
        self._is_suspended = False
        """Whether the events are read again when the workbench continues."""
        self._stream: tuple[str, int] | None = None
        """Id of the daemon's log, and the cursor of the last event that was read."""
        self._outage: tuple[EventRow, float] | None = None
        """The mark of a lost connection, and the time at which it was lost."""
        self._connection = ConnectionState(state="connecting")
        self._is_stale = False
        super().__init__(workbench, **{**self._drawn(), **traits})

    # Called by the workbench

    def tick(self, backend: Backend, sample: Sample | None) -> None:
        super().tick(backend, sample)
        if self.comm is None:  # The panel was closed.
            return
        if (source := self.workbench.events) is not self._source:
            if self.task is not None:
                self.task.cancel()
            self._source, self.task, self._outage = source, None, None
            self._sessions.clear()
            self._connection = ConnectionState(state="connecting")
            if source is not None:
                if self._rows.count:
                    self._rows.mark("connection.other", f"events of another daemon follow: {source.place}", "warn")
                self._read()
            self._redraw()
        elif self._is_suspended:
            self._read()

    # Events

    def _read(self) -> None:
        source = self._daemon()

        async def read() -> None:
            count = 0
            async with aclosing(source.events()) as events:
                async for event in events:
                    self._receive_event(event)
                    self._redraw()
                    count += 1
                    # Other tasks of the loop may run, even if events arrive faster than they are read.
                    if count % 200 == 0:
                        await asyncio.sleep(0)

        def ended(error: str | None) -> None:
            self._is_suspended = error is None
            if error is None:  # The workbench was suspended, which needs no mark.
                self._connection = ConnectionState(state="closed")
            elif self._connection.state != "closed":
                reason = HostingError(error) if error else None
                self._set_connection(ConnectionState(state="closed", error=reason))
            self._redraw()

        self._is_suspended = False
        self.run_job(read(), ended)

    def _receive_event(self, event: DaemonEvent | ConnectionState) -> None:
        if isinstance(event, ConnectionState):
            self._set_connection(event)
            return
        if isinstance(event, ResetFrame):
            self._stream = (event.stream_id, event.data.cursor)
        elif event.seq is not None:
            if self._stream is not None and self._stream[0] == event.stream_id and event.seq <= self._stream[1]:
                return  # A new reader receives the last events again.
            self._stream = (event.stream_id, event.seq)
        self._rows.add(event)
        self.workbench.static_views.mark_changed(ended=event.event in ("turn.done", "turn.error"))
        self._sessions.add(event)

    def _set_connection(self, now: ConnectionState) -> None:
        self._connection = now
        why = f": {now.error.message}" if now.error is not None else ""
        if now.state == "waiting":
            if self._outage is None:
                self._outage = (self._rows.mark("connection.lost", "", "warn"), time.monotonic())
            attempts = f" ({now.attempts} attempts have failed)" if now.attempts > 1 else ""
            self._rows.change_mark(self._outage[0], f"no connection to the daemon{attempts}{why}")
        elif now.state == "live" and self._outage is not None:
            away_s = time.monotonic() - self._outage[1]
            self._outage = None
            self._rows.mark("connection.again", f"reconnected after {away_s:.1f} s; missed events are above", "good")
        elif now.state == "closed":
            self._outage = None
            self._rows.mark("connection.closed", f"the connection was closed{why}", "bad")

    # State

    def _redraw(self) -> None:
        """Update all traits with the next frame. They are computed only once for all events until then."""
        if not self._is_stale:
            self._is_stale = True
            self.show()

    def flush(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self._pending |= self._drawn()
        super().flush()

    def _drawn(self) -> dict[str, Any]:
        rows = self._rows.filter
        return {
            "connection": self._connection_view(),
            "frame": self._rows.window(None, WINDOW_ROWS) | {"summary": self._summary()},
            "filter": {"groups": sorted(rows.groups), "session": rows.session_id, "text": rows.text},
            "sessions": self._sessions.view(),
            "live": self._sessions.live(rows.session_id) if rows.session_id else {},
            "permissions": self._sessions.permissions(),
        }

    def _summary(self) -> str:
        """Describe the number of rows."""
        passing, kept, removed = len(self._rows.passing), len(self._rows), self._rows.removed
        count = counted(kept, "row") if passing == kept else f"{passing:,} of {counted(kept, 'row')}"
        return f"{count}; older rows were removed: {removed:,}" if removed else count

    def _connection_view(self) -> dict[str, str]:
        now, source = self._connection, self._source
        if source is None:
            return {"state": "none", "text": NO_DAEMON, "place": "", "error": ""}
        text = now.state.replace("-", " ")
        if now.state == "waiting":
            when = "soon" if now.retry_in_s is None else f"within {now.retry_in_s:.0f} s"
            text = f"no connection; next attempt {when}"
        error = now.error.message if now.error is not None else ""
        return {"state": now.state, "text": text, "place": source.place, "error": error}

    # Requests

    async def do_rows(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``count`` passing rows, starting at number ``first``, or at the oldest if that was removed."""
        first = number_field(fields, "first", low=0, high=2**53, default=0)
        count = number_field(fields, "count", low=1, high=WINDOW_ROWS, default=WINDOW_ROWS)
        return self._rows.window(int(first), int(count))

    async def do_event(self, fields: Mapping[str, Any]) -> str:
        """Return a row's event as JSON."""
        number = int(number_field(fields, "row", low=0, high=2**53, default=-1))
        row = self._rows.row(number)
        if row is None:
            raise NotFoundError(f"row {number} was removed; the last {MAX_ROWS:,} are kept")
        return row.as_json()

    async def do_filter(self, fields: Mapping[str, Any]) -> None:
        """Set ``groups``, ``session`` and ``text`` of the filter; missing ones stay unchanged."""
        now = self._rows.filter
        groups, session, text = (
            fields.get("groups", list(now.groups)),
            fields.get("session", now.session_id),
            fields.get("text", now.text),
        )
        if not isinstance(groups, list) or not all(group in GROUPS for group in groups):
            raise InvalidRequestError(f"groups is {groups!r:.60}; it must be a list of {GROUPS}", param="groups")
        for name, value in (("session", session), ("text", text)):
            if not isinstance(value, str) or len(value) > SEARCH_CHARACTERS:
                raise InvalidRequestError(
                    f"{name} is {value!r:.60}; it must be a string of at most {SEARCH_CHARACTERS} characters",
                    param=name,
                )
        self._rows.filter = RowFilter(groups=frozenset(groups), session_id=session, text=replace_surrogates(text))
        self._redraw()

    async def do_decide(self, fields: Mapping[str, Any]) -> None:
        """Decide about a ``permission``: ``decision`` is allow or deny, ``scope`` is once or session."""
        permission_id = text_field(fields, "permission", limit=SEARCH_CHARACTERS)
        decision, scope = fields.get("decision"), fields.get("scope", "once")
        match decision, scope:
            case (("allow" | "deny"), ("once" | "session")):
                await self._daemon().decide(permission_id, decision, scope)
            case _:
                raise InvalidRequestError(
                    f"decision is {decision!r:.40} and scope {scope!r:.40}; "
                    "they are allow or deny, and once or session",
                    param="decision",
                )
        self._sessions.remove_permission(permission_id)
        self._redraw()

    async def do_cancel(self, fields: Mapping[str, Any]) -> None:
        """Cancel the running turn of a session."""
        await self._daemon().cancel(text_field(fields, "session", limit=SEARCH_CHARACTERS))

    async def do_clear(self, fields: Mapping[str, Any]) -> None:
        """Remove all rows, but neither sessions nor calls that wait for a decision."""
        self._rows.clear()
        self._outage = None
        self._redraw()

    async def do_reconnect(self, fields: Mapping[str, Any]) -> None:
        """Connect again, if the connection was closed."""
        self._daemon()
        if self.task is None:
            self._connection = ConnectionState(state="connecting")
            self._read()
            self._redraw()

    def _daemon(self) -> EventSource:
        if self._source is None:
            raise HostingError(NO_DAEMON)
        return self._source

    # Data frames and saved notebooks

    @property
    def df(self) -> Any:
        """All rows as a pandas data frame, oldest first, without regard to the filter.

        The columns are ``time`` (UTC), ``seq``, ``event``, ``session_id``, ``turn_id``, ``batches``, ``text`` and the
        event as ``json``. The streamed text of a message is one row; ``batches`` is its number of events. Marks of the
        connection have no ``seq``.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return make_table(self._rows.cells(), COLUMNS)

    def snapshot_html(self) -> str:
        now = self._connection_view()
        rows = self._rows.window(None, 40)["rows"]
        where = f"{now['text']}, {now['place']}" if now["place"] else now["text"]
        shown = []
        for row in rows:
            count = "" if row["batches"] == 1 else f" \N{MULTIPLICATION SIGN}{row['batches']}"
            session = self._sessions.name(row["session"])
            shown.append([row["at"][11:23], row["kind"] + count, session, clip(row["text"], 200)])
        caption = f"Events: {where}; {self._summary()}, the last {len(rows)} below"
        return html_table(("time (UTC)", "event", "session", "content"), shown, caption=caption)
