"""Read the event log in pages after a cursor: recent events from memory, older ones from the database."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.store import DatabaseView, Store, StoredEvent, Transaction, event_from_row, placeholders
from lmx_lab.errors import CursorExpiredError

PRUNED_KEY = "pruned_seq"
"""Key in the table ``meta`` of the highest ``seq`` that was pruned."""


@dataclass(frozen=True, kw_only=True)
class EventFilter:
    """The events that a reader receives. An empty set matches every event."""

    session_ids: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    """Names of events. ``turn.*`` stands for all names with that prefix."""

    def matches(self, event: StoredEvent) -> bool:
        """Return whether the event passes the filter."""
        if self.session_ids and event.session_id not in self.session_ids:
            return False
        return not self.types or event.event in self.types or f"{event.event.partition('.')[0]}.*" in self.types

    def to_sql(self) -> tuple[str, tuple[str, ...]]:
        """Return the filter as a condition in SQL, with its parameters."""
        conditions, parameters = ["1"], []
        if self.session_ids:
            conditions.append(f"session_id IN ({placeholders(self.session_ids)})")
            parameters += sorted(self.session_ids)
        if self.types:
            group = "substr(event, 1, instr(event, '.')) || '*'"
            conditions.append(f"(event IN ({placeholders(self.types)}) OR {group} IN ({placeholders(self.types)}))")
            parameters += [*sorted(self.types), *sorted(self.types)]
        return " AND ".join(conditions), tuple(parameters)


ALL_EVENTS = EventFilter()


@dataclass(frozen=True, kw_only=True)
class LogPage:
    """Some consecutive events of the log that match a filter."""

    events: tuple[StoredEvent, ...]
    through: int
    """Cursor after this page: no matching event lies between the page's last event and this ``seq``."""


class EventLog:
    """The event log for any number of readers, which delay neither the writer nor each other.

    The most recent events are kept encoded in a ring buffer that all readers share. Use it on the store's event loop.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._seqs: list[int] = []
        self._ring: list[StoredEvent] = []
        self._ring_bytes = 0
        self._ring_after = store.issued_seq
        """All events after this ``seq`` are in the ring."""
        self._growth: asyncio.Future[None] | None = None
        self._pruned_seq = 0
        self.latest_seq = store.issued_seq
        """``seq`` of the newest event that readers can receive."""
        self.latest_event = ""
        """Name of that event; empty if this process has not written it."""
        store.publish = self._publish

    async def start(self) -> None:
        """Load which events were pruned."""
        self._pruned_seq = await self._store.read(_read_pruned_seq)

    @property
    def in_memory(self) -> tuple[int, int]:
        """Number and size in bytes of the events that are kept in memory."""
        return len(self._ring), self._ring_bytes

    @property
    def oldest_seq(self) -> int:
        """The lowest ``seq`` that was not pruned."""
        return self._pruned_seq + 1

    @property
    def stream_id(self) -> str:
        """Id of the database, in which the cursors are valid."""
        return self._store.stream_id

    def check_cursor(self, after: int, stream_id: str | None = None) -> None:
        """Check that the log contains all events after a cursor. 0 is always valid: it stands for all that are kept.

        Raises:
            CursorExpiredError: The cursor belongs to another log, is ahead of this one, or its events were pruned.
        """
        if stream_id is not None and stream_id != self.stream_id:
            raise CursorExpiredError(
                f"the cursor belongs to another log, {stream_id!r:.80}; read again from the beginning",
                reason="other-stream",
                param="stream_id",
            )
        # Not latest_seq: a reader of the database may have seen an event that is not published yet.
        newest = self._store.issued_seq
        if after > newest:
            raise CursorExpiredError(
                f"the cursor is {after}, but the newest event is {newest}; read again from the beginning",
                reason="ahead",
                param="after",
            )
        _check_kept(after, self._pruned_seq)

    def watch(self) -> asyncio.Future[None]:
        """Return a future that is done when the log has more events than now.

        Call this before reading a page, so that no event is missed in between. All readers share the future: do not
        cancel it.
        """
        if self._growth is None:
            self._growth = asyncio.get_running_loop().create_future()
        return self._growth

    async def wait(self, after: int, timeout_s: float | None = None) -> bool:
        """Wait until there are events after a cursor. Returns False if there were none within the timeout."""
        if self.latest_seq > after:
            return True
        # Not wait_for, which would cancel the shared future.
        done, _ = await asyncio.wait({self.watch()}, timeout=timeout_s)
        return bool(done)

    async def read_page(self, after: int, only: EventFilter = ALL_EVENTS, limit: int | None = None) -> LogPage:
        """Return the next matching events after a cursor.

        The page can be empty although there are later events that match: continue from ``through``.

        Args:
            limit: Maximum number of events; ``limits.page_events`` by default and at most.

        Raises:
            CursorExpiredError: The events after the cursor were pruned in the meantime.
        """
        limit = min(limit or self._limits.page_events, self._limits.page_events)
        if after < self._ring_after:
            return await self._store.read(lambda view: self._read_store(view, after, only, limit))
        first = bisect_right(self._seqs, after)
        events: list[StoredEvent] = []
        through, bytes_left = after, self._limits.page_bytes
        # Limited, so that a filter that few events match does not block the loop.
        for event in self._ring[first : first + 5000]:
            through = event.seq
            if only is ALL_EVENTS or only.matches(event):
                events.append(event)
                bytes_left -= event.size_bytes
                if bytes_left <= 0 or len(events) == limit:
                    break
        return LogPage(events=tuple(events), through=through)

    def _read_store(self, view: DatabaseView, after: int, only: EventFilter, limit: int) -> LogPage:
        # Checked again in this view, because events may have been pruned since the cursor was checked.
        _check_kept(after, _read_pruned_seq(view))
        condition, parameters = only.to_sql()
        sql = f"SELECT * FROM events WHERE seq > ? AND {condition} ORDER BY seq LIMIT ?"
        events: list[StoredEvent] = []
        bytes_left = self._limits.page_bytes
        for row in view.iterate(sql, after, *parameters, limit):
            events.append(event_from_row(row, self.stream_id))
            bytes_left -= events[-1].size_bytes
            if bytes_left <= 0:
                break
        is_full = bytes_left <= 0 or len(events) == limit
        return LogPage(events=tuple(events), through=events[-1].seq if is_full else max(after, view.latest_seq))

    # Written by the store

    def _publish(self, events: Sequence[StoredEvent]) -> None:
        self._seqs += [event.seq for event in events]
        self._ring += events
        self._ring_bytes += sum(event.size_bytes for event in events)
        limits, removed = self._limits, 0
        if len(self._ring) > limits.ring_events or self._ring_bytes > limits.ring_bytes:
            # Shrink to three quarters of the limits, so that this is not done at every event.
            while removed < len(self._ring) and (
                len(self._ring) - removed > limits.ring_events * 3 // 4 or self._ring_bytes > limits.ring_bytes * 3 // 4
            ):
                self._ring_bytes -= self._ring[removed].size_bytes
                removed += 1
            self._ring_after = self._seqs[removed - 1]
            del self._seqs[:removed], self._ring[:removed]
        self.latest_seq, self.latest_event = events[-1].seq, events[-1].event
        growth, self._growth = self._growth, None
        if growth is not None and not growth.done():
            growth.set_result(None)

    # Pruning

    def set_pruned(self, seq: int) -> None:
        """Note that the events up to this one were deleted from the database."""
        self._pruned_seq = max(self._pruned_seq, seq)


def _check_kept(after: int, pruned_seq: int) -> None:
    if 0 < after < pruned_seq:
        raise CursorExpiredError(
            f"the cursor is {after}, but events up to {pruned_seq} were deleted; read again from the beginning",
            reason="pruned",
            param="after",
        )


def _read_pruned_seq(view: DatabaseView) -> int:
    row = view.fetch_one("SELECT value FROM meta WHERE key = ?", PRUNED_KEY)
    return int(row["value"]) if row else 0


def record_pruned(tx: Transaction, seq: int) -> None:
    """Record in the database that the events up to this one are deleted."""
    tx.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", PRUNED_KEY, str(seq))
