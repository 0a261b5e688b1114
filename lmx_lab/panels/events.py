"""The events panel: what the daemon does, row by row as it happens, and the decisions it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import html
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, ClassVar

import traitlets

from lmx_lab.backend import Source
from lmx_lab.client.event_receiver import ConnectionState
from lmx_lab.errors import HostingError, InvalidRequestError, LabError, NotFoundError
from lmx_lab.frames import pandas_for
from lmx_lab.panels.event_rows import COLUMNS, GROUPS, MOST_ROWS, EventLog, Filter, Row
from lmx_lab.panels.event_sessions import Sessions
from lmx_lab.panels.event_source import EventSource
from lmx_lab.panels.panel import Panel, number_field, text_field
from lmx_lab.panels.rerank import shown
from lmx_lab.panels.workbench import Workbench
from lmx_lab.wire.admin import Sample
from lmx_lab.wire.event_stream import ResetFrame
from lmx_lab.wire.events import DaemonEvent

log = logging.getLogger(__name__)
WINDOW_ROWS = 100
"""In a frame, and at most in the answer to a request."""
SNAPSHOT_ROWS = 40
SEARCH_CHARACTERS = 200
TURN_EVENTS = 200
"""After so many the loop's other work has its turn, however fast events come."""
NO_DAEMON = "No daemon runs for this lab: lmx_lab.launch(daemon=True) starts one."


class EventsPanel(Panel):
    """The daemon's events as rows, with filters; the running text of a session; tools that wait for a decision.

    The last 5,000 rows are kept, here and not in the browser: a view has a window of at most 100 and asks for others.
    What comes of one message's text is a single row that grows. Events are read as long as the panel is open, whether
    or not anybody looks at it. ``df`` has the rows.
    """

    SCRIPTS = ("panel.js", "keyed.js", "events.js")
    STYLES = ("panel.css", "events.css")
    REQUESTS: ClassVar[frozenset[str]] = frozenset(
        {"rows", "event", "filter", "decide", "cancel", "clear", "reconnect"}
    )

    connection = traitlets.Dict().tag(sync=True)
    """``{state, words, place, error}``; states are those of a ``ConnectionState``, and ``none``: without a daemon."""
    frame = traitlets.Dict().tag(sync=True)
    """The newest rows that pass: ``{counting, base, total, first, rows, said}``. Rows that pass are counted from 0 on,
    also when the oldest make room: those that there are have the numbers from ``base`` to ``base + total``. With
    another ``counting`` they are counted anew."""
    filter = traitlets.Dict().tag(sync=True)
    """``{groups, session, text}``; for all views."""
    sessions: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """``{id, name, status}`` each."""
    live = traitlets.Dict().tag(sync=True)
    """Of the filter's session: ``{id, name, status, remark, thoughts, text}``; empty without one."""
    permissions: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """Calls that wait: ``{id, tool, session, arguments, left_out, expires_at}``."""

    def __init__(self, workbench: Workbench, **traits: Any) -> None:
        self._log = EventLog()
        self._sessions = Sessions()
        self._source: EventSource | None = None
        self._reader: asyncio.Task[None] | None = None
        self._stream: tuple[str, int] | None = None
        """The log that was read, and how far."""
        self._outage: tuple[Row, float] | None = None
        """The mark of the lost connection, and since when it is."""
        self._connection = ConnectionState(state="connecting")
        self._is_stale = False
        self._is_closed = False
        super().__init__(workbench, **{**self._drawn(), **traits})

    # The workbench's calls

    def tick(self, source: Source, sample: Sample | None) -> None:
        super().tick(source, sample)
        if self._is_closed:
            return
        if self.workbench.events is not self._source:
            self._follow(self.workbench.events)
        # A workbench that rested has ended the reader.
        elif self._source is not None and (self._reader is None or self._reader.cancelled()):
            self._read()

    def _follow(self, source: EventSource | None) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._source, self._reader, self._outage = source, None, None
        self._sessions.clear()
        self._connection = ConnectionState(state="connecting")
        if source is not None:
            if self._log.count:
                self._log.mark("connection.other", f"another daemon is shown from here on: {source.place}", "warn")
            self._read()
        self._redraw()

    def close(self) -> None:
        task, self._is_closed = self._reader, True
        if task is not None and not task.done():
            with contextlib.suppress(RuntimeError):  # its loop is closed, and the reader has ended
                task.get_loop().call_soon_threadsafe(task.cancel)
        super().close()

    # Events

    def _read(self) -> None:
        assert self._source is not None
        self._reader = asyncio.create_task(self._events(self._source), name="read a daemon's events")

    async def _events(self, source: EventSource) -> None:
        error: LabError | None = None
        count = 0
        try:
            async with aclosing(source.events()) as events:
                async for event in events:
                    self._take(event)
                    self._redraw()
                    count += 1
                    if count % TURN_EVENTS == 0:
                        await asyncio.sleep(0)
        except LabError as exc:
            error = exc
        except Exception:
            log.exception("a daemon's events could not be read")
            error = HostingError("a bug in the panel; the kernel's log has the details")
        except asyncio.CancelledError:
            # The workbench rests, or another daemon is shown: no mark in the log is due.
            if source is self._source:
                self._connection = ConnectionState(state="closed")
                self._redraw()
            raise
        if source is self._source and self._connection.state != "closed":
            self._connected(ConnectionState(state="closed", error=error))
            self._redraw()

    def _take(self, event: DaemonEvent | ConnectionState) -> None:
        if isinstance(event, ConnectionState):
            self._connected(event)
            return
        if isinstance(event, ResetFrame):
            self._stream = (event.stream_id, event.data.cursor)
        elif event.seq is not None:
            if self._stream is not None and self._stream[0] == event.stream_id and event.seq <= self._stream[1]:
                return  # a reader that begins anew hears the end of what it knows again
            self._stream = (event.stream_id, event.seq)
        self._log.take(event)
        self._sessions.take(event)

    def _connected(self, now: ConnectionState) -> None:
        self._connection = now
        why = f": {now.error.message}" if now.error is not None else ""
        if now.state == "waiting":
            if self._outage is None:
                self._outage = (self._log.mark("connection.lost", "", "warn"), time.monotonic())
            attempts = f" ({now.attempts} attempts have failed)" if now.attempts > 1 else ""
            self._log.change_mark(self._outage[0], f"no connection to the daemon{attempts}{why}")
        elif now.state == "live" and self._outage is not None:
            away_s = time.monotonic() - self._outage[1]
            self._outage = None
            self._log.mark(
                "connection.again", f"connected again after {away_s:.1f} s; what was missed is above", "good"
            )
        elif now.state == "closed":
            self._outage = None
            self._log.mark("connection.closed", f"the connection has ended for good{why}", "bad")

    # Down

    def _redraw(self) -> None:
        """With the next frame; however much happens until then, it is put into words once."""
        if not self._is_stale:
            self._is_stale = True
            self.show()

    def flush(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self._waiting |= self._drawn()
        super().flush()

    def _drawn(self) -> dict[str, Any]:
        rows = self._log.filter
        return {
            "connection": self._connection_seen(),
            "frame": self._log.window(None, WINDOW_ROWS) | {"said": self._said()},
            "filter": {"groups": sorted(rows.groups), "session": rows.session_id, "text": rows.text},
            "sessions": self._sessions.seen(),
            "live": self._sessions.live(rows.session_id) if rows.session_id else {},
            "permissions": self._sessions.waiting(),
        }

    def _said(self) -> str:
        """How much there is, in words."""
        passing, kept, lost = len(self._log.passing), len(self._log), self._log.lost
        words = f"{kept:,} rows" if passing == kept else f"{passing:,} of {kept:,} rows"
        return f"{words}; {lost:,} older ones are no longer here" if lost else words

    def _connection_seen(self) -> dict[str, str]:
        now, source = self._connection, self._source
        if source is None:
            return {"state": "none", "words": NO_DAEMON, "place": "", "error": ""}
        words = now.state.replace("-", " ")
        if now.state == "waiting":
            again = "soon" if now.retry_in_s is None else f"within {now.retry_in_s:.0f} s"
            words = f"no connection; next attempt {again}"
        error = now.error.message if now.error is not None else ""
        return {"state": now.state, "words": words, "place": source.place, "error": error}

    # Requests

    async def do_rows(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """``count`` of the rows that pass, from number ``first`` on or, if that has made room, from the first."""
        first = number_field(fields, "first", low=0, high=2**53, default=0)
        count = number_field(fields, "count", low=1, high=WINDOW_ROWS, default=WINDOW_ROWS)
        return self._log.window(int(first), int(count))

    async def do_event(self, fields: Mapping[str, Any]) -> str:
        """A row's event as JSON, for the clipboard or the eye."""
        number = int(number_field(fields, "row", low=0, high=2**53, default=-1))
        row = self._log.row(number)
        if row is None:
            raise NotFoundError(f"row {number} is no longer kept: the last {MOST_ROWS:,} are")
        return row.as_json()

    async def do_filter(self, fields: Mapping[str, Any]) -> None:
        """``groups``, ``session``, ``text``: what is left out stays."""
        now = self._log.filter
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
                    f"{name} is {value!r:.60}; it must be a text of at most {SEARCH_CHARACTERS} characters", param=name
                )
        # Half a character, which JavaScript's texts may contain, cannot be sent back as UTF-8.
        text = text.encode("utf-8", "replace").decode("utf-8")
        self._log.filter = Filter(groups=frozenset(groups), session_id=session, text=text)
        self._redraw()

    async def do_decide(self, fields: Mapping[str, Any]) -> None:
        """``decision`` allow or deny of a permission, with the ``scope`` once or session."""
        permission_id = text_field(fields, "permission", most=SEARCH_CHARACTERS)
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
        self._sessions.decided(permission_id)
        self._redraw()

    async def do_cancel(self, fields: Mapping[str, Any]) -> None:
        """Stop the running turn of a session."""
        await self._daemon().cancel(text_field(fields, "session", most=SEARCH_CHARACTERS))

    async def do_clear(self, fields: Mapping[str, Any]) -> None:
        """Forget the rows; sessions and what waits for a decision stay."""
        self._log.clear()
        self._outage = None
        self._redraw()

    async def do_reconnect(self, fields: Mapping[str, Any]) -> None:
        """Begin anew where the connection has ended for good."""
        self._daemon()
        if self._reader is None or self._reader.done():
            self._connection = ConnectionState(state="connecting")
            self._read()
            self._redraw()

    def _daemon(self) -> EventSource:
        if self._source is None:
            raise HostingError(NO_DAEMON)
        return self._source

    # For cells, and without a kernel

    @property
    def df(self) -> Any:
        """The rows as a pandas data frame, the oldest first: ``time`` (UTC), ``seq``, ``event``, ``session_id``,
        ``turn_id``, ``batches``, ``text`` and the event as ``json``. Filters do not matter. A message's streamed text
        is one row of so many ``batches``; marks of the connection have no ``seq``.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = pandas_for("df")
        frame = pandas.DataFrame(self._log.cells(), columns=list(COLUMNS))
        frame["time"] = pandas.to_datetime(frame["time"], utc=True, format="ISO8601")
        frame["seq"] = frame["seq"].astype("Int64")
        return frame

    def snapshot_html(self) -> str:
        now = self._connection_seen()
        rows = self._log.window(None, SNAPSHOT_ROWS)["rows"]
        where = html.escape(f"{now['words']}, {now['place']}" if now["place"] else now["words"])
        caption = f"Events: {where}; {html.escape(self._said())}, of which the last {len(rows)} are here"
        head = "".join(f"<th {_LEFT}>{name}</th>" for name in ("time (UTC)", "event", "session", "what"))
        body = "".join(_snapshot_row(row) for row in rows)
        return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


_LEFT = "style='text-align:left'"


def _snapshot_row(row: Mapping[str, Any]) -> str:
    kind = row["kind"] if row["batches"] == 1 else f"{row['kind']} \N{MULTIPLICATION SIGN}{row['batches']}"
    cells = (row["at"][11:23], kind, row["session"], shown(row["text"], 200))
    return "<tr>" + "".join(f"<td {_LEFT}>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
