"""The event log as its readers see it: pages after a cursor, from memory where they are new, else from the database."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.store import DatabaseView, Store, StoredEvent, Transaction, stored_event
from lmx_lab.errors import CursorExpiredError

PRUNED = "pruned_seq"
SCANNED = 5000
"""Events of the ring looked at for one page, so that a narrow filter does not hold the loop."""


@dataclass(frozen=True, kw_only=True)
class EventFilter:
    """Which events a reader wants; empty sets let everything pass."""

    session_ids: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    """Kinds of events; ``turn.*`` is every kind that begins so."""

    def passes(self, event: StoredEvent) -> bool:
        if self.session_ids and event.session_id not in self.session_ids:
            return False
        return not self.types or event.event in self.types or f"{event.event.partition('.')[0]}.*" in self.types

    def condition(self) -> tuple[str, tuple[str, ...]]:
        """The same in SQL, with its parameters."""
        parts, parameters = ["1"], []
        if self.session_ids:
            parts.append(f"session_id IN ({_marks(self.session_ids)})")
            parameters += sorted(self.session_ids)
        if self.types:
            kinds = "substr(event, 1, instr(event, '.')) || '*'"
            parts.append(f"(event IN ({_marks(self.types)}) OR {kinds} IN ({_marks(self.types)}))")
            parameters += [*sorted(self.types), *sorted(self.types)]
        return " AND ".join(parts), tuple(parameters)


def _marks(values: frozenset[str]) -> str:
    return ", ".join("?" * len(values))


EVERYTHING = EventFilter()


@dataclass(frozen=True, kw_only=True)
class LogPage:
    events: tuple[StoredEvent, ...]
    through: int
    """The cursor after this page: nothing that the filter lets pass is between its last event and here."""


class EventLog:
    """Readers of one store: any number, none of which can delay it or each other. On the store's loop.

    The newest events are kept encoded in a ring, shared by all readers.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._seqs: list[int] = []
        self._ring: list[StoredEvent] = []
        self._ring_bytes = 0
        self._ring_after = store.issued_seq
        """All events after it are in the ring."""
        self._grown: asyncio.Future[None] | None = None
        self._pruned_seq = 0
        self.latest_seq = store.issued_seq
        """Of what readers can have."""
        store.publish = self._publish

    async def start(self) -> None:
        """Read what is known of pruned events."""
        self._pruned_seq = await self._store.read(_pruned_seq)

    @property
    def oldest_seq(self) -> int:
        """The first that was not pruned."""
        return self._pruned_seq + 1

    @property
    def stream_id(self) -> str:
        return self._store.stream_id

    def check(self, after: int, stream_id: str | None = None) -> None:
        """
        Raises:
            CursorExpiredError: what came after this cursor is not, or not yet, in this log. 0 is always good: it asks
                for what there is.
        """
        if stream_id is not None and stream_id != self.stream_id:
            raise CursorExpiredError(
                f"the cursor is of another log, {stream_id!r:.80}; begin anew", reason="other-stream", param="stream_id"
            )
        # Not latest_seq: a reader of the database may be a moment ahead of what is published.
        if after > self._store.issued_seq:
            newest = self._store.issued_seq
            raise CursorExpiredError(
                f"the cursor is {after}, the newest event {newest}; begin anew", reason="ahead", param="after"
            )
        _check_kept(after, self._pruned_seq)

    def grown(self) -> asyncio.Future[None]:
        """Done when there are more events than now. Take it before looking what there is; do not cancel it."""
        if self._grown is None:
            self._grown = asyncio.get_running_loop().create_future()
        return self._grown

    async def wait(self, after: int, timeout_s: float | None = None) -> bool:
        """Return when there are events after this cursor; False if there were none in time."""
        if self.latest_seq > after:
            return True
        # Not wait_for: the future is everybody's.
        done, _ = await asyncio.wait({self.grown()}, timeout=timeout_s)
        return bool(done)

    async def page(self, after: int, only: EventFilter = EVERYTHING, limit: int | None = None) -> LogPage:
        """The next events after this cursor, at most ``limit``; possibly none, with a cursor that went on.

        Raises:
            CursorExpiredError: the log was cut faster than this reader reads.
        """
        limit = min(limit or self._limits.page_events, self._limits.page_events)
        if after >= self._ring_after:
            return self._ring_page(after, only, limit)
        return await self._store.read(lambda reading: self._stored_page(reading, after, only, limit))

    def _ring_page(self, after: int, only: EventFilter, limit: int) -> LogPage:
        first = bisect_right(self._seqs, after)
        events: list[StoredEvent] = []
        through, left = after, self._limits.page_bytes
        for event in self._ring[first : first + SCANNED]:
            through = event.seq
            if only is EVERYTHING or only.passes(event):
                events.append(event)
                left -= len(event.text)
                if left <= 0 or len(events) == limit:
                    break
        return LogPage(events=tuple(events), through=through)

    def _stored_page(self, reading: DatabaseView, after: int, only: EventFilter, limit: int) -> LogPage:
        # By this very view: the log may have been cut since the cursor was checked.
        _check_kept(after, _pruned_seq(reading))
        condition, parameters = only.condition()
        sql = f"SELECT * FROM events WHERE seq > ? AND {condition} ORDER BY seq LIMIT ?"
        events: list[StoredEvent] = []
        left = self._limits.page_bytes
        for row in reading.each(sql, after, *parameters, limit):
            events.append(stored_event(row, self.stream_id))
            left -= len(events[-1].text)
            if left <= 0:
                break
        full = left <= 0 or len(events) == limit
        return LogPage(events=tuple(events), through=events[-1].seq if full else max(after, reading.latest_seq))

    # What the store publishes

    def _publish(self, events: Sequence[StoredEvent]) -> None:
        self._seqs += [event.seq for event in events]
        self._ring += events
        self._ring_bytes += sum(len(event.text) for event in events)
        self._trim()
        self.latest_seq = self._seqs[-1] if self._seqs else events[-1].seq
        grown, self._grown = self._grown, None
        if grown is not None and not grown.done():
            grown.set_result(None)

    def _trim(self) -> None:
        """Down to the limits, and a quarter less, so that it is not done at every event."""
        limits = self._limits
        if len(self._ring) <= limits.ring_events and self._ring_bytes <= limits.ring_bytes:
            return
        gone = 0
        while gone < len(self._ring) and (
            len(self._ring) - gone > limits.ring_events * 3 // 4 or self._ring_bytes > limits.ring_bytes * 3 // 4
        ):
            self._ring_bytes -= len(self._ring[gone].text)
            gone += 1
        self._ring_after = self._seqs[gone - 1]
        del self._seqs[:gone], self._ring[:gone]

    # What is kept

    def pruned(self, seq: int) -> None:
        """Events up to this one are gone from the database."""
        self._pruned_seq = max(self._pruned_seq, seq)


def _check_kept(after: int, pruned_seq: int) -> None:
    if 0 < after < pruned_seq:
        raise CursorExpiredError(
            f"the cursor is {after}, and events up to {pruned_seq} are kept no more; begin anew",
            reason="pruned",
            param="after",
        )


def _pruned_seq(reading: DatabaseView) -> int:
    row = reading.row("SELECT value FROM meta WHERE key = ?", PRUNED)
    return int(row["value"]) if row else 0


def note_pruned(transaction: Transaction, seq: int) -> None:
    """Remember it for the next start."""
    transaction.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", PRUNED, str(seq))
