"""A model-based test of cursors: readers connect and disconnect while events are written and pruned, with crashes."""

import asyncio
import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.event_log import EventFilter, EventLog
from lmx_lab.daemon.storage.retention import delete_expired
from lmx_lab.daemon.storage.store import Store
from lmx_lab.errors import CursorExpiredError
from lmx_lab.wire.events import SessionDeleted, TurnText

LIMITS = Limits(ring_events=8, ring_bytes=5000, page_events=5, keep_events=40)
SESSIONS = ("a", "b", "c")
KINDS = ("turn.token", "turn.done", "session.deleted")
FILTERS = (
    EventFilter(),
    EventFilter(session_ids=frozenset("a")),
    EventFilter(session_ids=frozenset("bc"), types=frozenset({"turn.*"})),
    EventFilter(types=frozenset({"session.deleted", "turn.done"})),
)


@dataclass
class Reader:
    """A client with its filter, its cursor and the events that it has received."""

    only: EventFilter
    cursor: int
    seen: list[int] = field(default_factory=list)
    began: int = 0
    resets: int = 0


class LogAndReaders(RuleBasedStateMachine):
    """The model is a list of all events that were written, and the seq up to which they were pruned."""

    readers = Bundle("readers")

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.written = []
        self.pruned = 0
        self.everybody = []
        self.store: Store
        self.log: EventLog
        self.open()

    def run(self, work):
        return self.loop.run_until_complete(work)

    def open(self):
        async def opening():
            self.store = await Store.open(Path(self.folder.name) / "daemon.db")
            self.log = EventLog(self.store, LIMITS)
            await self.log.start()

        self.run(opening())

    @rule(session=st.sampled_from(SESSIONS), kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=12))
    def write(self, session, kinds):
        def work(tx):
            data = TurnText(message_id="m", text="text " * 20)
            return [tx.append(kind, data, session_id=session) for kind in kinds]

        seqs = self.run(self.store.write(work))
        self.written += [(seq, session, kind) for seq, kind in zip(seqs, kinds, strict=True)]

    @rule(session=st.sampled_from(SESSIONS))
    def fail_to_write(self, session):
        def work(tx):
            tx.append("session.deleted", SessionDeleted(session_id=session), session_id=session)
            raise ValueError("as an example")

        with pytest.raises(ValueError, match="as an example"):
            self.run(self.store.write(work))

    @rule()
    def prune(self):
        self.run(delete_expired(self.store, self.log, LIMITS))
        if len(self.kept()) > LIMITS.keep_events:
            self.pruned = self.kept()[-LIMITS.keep_events - 1][0]

    @rule()
    def crash(self):
        """Close and open the database: everything else is lost."""
        self.run(self.store.close())
        self.open()

    @rule(target=readers, only=st.sampled_from(FILTERS), back=st.integers(0, 30))
    def connect(self, only, back):
        cursor = max(0, self.log.latest_seq - back)
        reader = Reader(only=only, cursor=cursor, began=cursor)
        self.everybody.append(reader)
        return reader

    @rule(reader=readers, pages=st.integers(1, 4))
    def read(self, reader, pages):
        """Read some pages; the client continues later from the cursor of the last one."""
        if 0 < reader.cursor < self.pruned:
            with pytest.raises(CursorExpiredError) as caught:
                self.log.check_cursor(reader.cursor)
            assert caught.value.reason == "pruned"
            reader.cursor = reader.began = self.log.latest_seq
            reader.seen.clear()
            return
        self.log.check_cursor(reader.cursor)
        if reader.cursor == 0:
            reader.began = max(reader.began, self.pruned) if not reader.seen else reader.began
        for _ in range(pages):
            page = self.run(self.log.read_page(reader.cursor, reader.only))
            assert page.through >= reader.cursor
            assert len(page.events) <= LIMITS.page_events
            reader.seen += [event.seq for event in page.events]
            reader.cursor = page.through

    @rule(reader=readers)
    def catch_up(self, reader):
        self.read(reader, 100)
        if reader.began >= self.pruned:
            assert reader.seen == self.expected(reader)

    @rule(ahead=st.integers(1, 10))
    def connect_ahead_of_the_log(self, ahead):
        with pytest.raises(CursorExpiredError) as caught:
            self.log.check_cursor(self.log.latest_seq + ahead)
        assert caught.value.reason == "ahead"

    @invariant()
    def events_are_received_once_and_in_order(self):
        for reader in self.everybody:
            assert reader.seen == sorted(set(reader.seen))

    @invariant()
    def no_event_before_the_cursor_is_lost(self):
        for reader in self.everybody:
            if reader.began >= self.pruned:
                assert reader.seen == [seq for seq in self.expected(reader) if seq <= reader.cursor]

    @invariant()
    def latest_seq_is_the_last_written_event(self):
        assert self.log.latest_seq == (self.written[-1][0] if self.written else 0)

    def kept(self):
        return [event for event in self.written if event[0] > self.pruned]

    def expected(self, reader):
        def passes(session, kind):
            kinds = reader.only.types
            return (not reader.only.session_ids or session in reader.only.session_ids) and (
                not kinds or kind in kinds or (kind.startswith("turn.") and "turn.*" in kinds)
            )

        return [seq for seq, session, kind in self.written if seq > reader.began and passes(session, kind)]

    def teardown(self):
        self.run(self.store.close())
        self.loop.close()
        self.folder.cleanup()


TestLogAndReaders = LogAndReaders.TestCase
TestLogAndReaders.settings = settings(
    max_examples=settings().max_examples * 2 // 5,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.anyio
async def test_a_cursor_of_another_database_is_refused(store):
    log = EventLog(store, LIMITS)
    log.check_cursor(0, stream_id=store.stream_id)
    with pytest.raises(CursorExpiredError) as caught:
        log.check_cursor(0, stream_id="stm_other")
    assert caught.value.reason == "other-stream"


# A character of three bytes, so that characters and bytes differ.
CHARACTERS = pytest.mark.parametrize(("character", "size"), [("x", 1), ("語", 3)])


@pytest.mark.anyio
@CHARACTERS
async def test_the_ring_is_bounded_in_events_and_bytes(store, character, size):
    log = EventLog(store, replace(LIMITS, ring_bytes=3000, page_events=10))
    for _ in range(50):
        await store.write(lambda tx: tx.append("turn.token", TurnText(message_id="m", text=character * (501 // size))))
        count, size_bytes = log.in_memory
        newest = (await log.read_page(log.latest_seq - count)).events
        assert (len(newest), sum(len(event.text.encode()) for event in newest)) == (count, size_bytes)
        assert count <= 8
        assert size_bytes <= 3000
    await store.write(lambda tx: tx.append("turn.token", TurnText(message_id="m", text=character * (5000 // size))))
    assert log.in_memory == (0, 0)
    assert [event.seq for event in (await log.read_page(50)).events] == [51]


@pytest.mark.anyio
async def test_an_event_has_no_line_ends_that_only_unicode_has(store):
    log, text = EventLog(store, LIMITS), "a\u2028b\u2029c\x85d"
    await store.write(lambda tx: tx.append("turn.token", TurnText(message_id="m", text=text)))
    [event] = (await log.read_page(0)).events
    assert event.text.splitlines() == [event.text]
    assert json.loads(event.text)["data"]["text"] == text


@pytest.mark.anyio
async def test_the_last_pruned_event_is_the_first_cursor_that_can_be_resumed(store):
    log = EventLog(store, LIMITS)
    for _ in range(LIMITS.keep_events + 7):
        await store.write(lambda tx: tx.append("turn.token", TurnText(message_id="m", text="x")))
    await delete_expired(store, log, LIMITS)
    assert log.oldest_seq == 8
    log.check_cursor(7)
    with pytest.raises(CursorExpiredError):
        log.check_cursor(6)
    with pytest.raises(CursorExpiredError):
        await log.read_page(6)
    again = EventLog(store, LIMITS)
    await again.start()
    assert again.oldest_seq == 8


@pytest.mark.anyio
@CHARACTERS
@pytest.mark.parametrize("ring_events", [100, 1], ids=["from memory", "from the database"])
async def test_pages_with_long_events_contain_fewer_events(store, ring_events, character, size):
    log = EventLog(store, Limits(ring_events=ring_events, page_bytes=5000))
    for _ in range(10):
        await store.write(lambda tx: tx.append("turn.token", TurnText(message_id="m", text=character * (2000 // size))))
    await store.write(lambda tx: tx.append("turn.token", TurnText(message_id="m", text=character * (20_000 // size))))
    sizes, cursor = [], 0
    while cursor < log.latest_seq:
        page = await log.read_page(cursor)
        sizes.append(len(page.events))
        cursor = page.through
    assert sizes == [3, 3, 3, 2]
