"""Creating, changing, listing, forking and deleting sessions, and their events."""

import json

import pytest

from lmx_lab import errors
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import sessions
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.wire.sessions import ChangeSession, CreateSession, ForkSession, SessionList, SessionMessage

pytestmark = pytest.mark.anyio


async def create(store, **fields):
    record, _ = await store.write(lambda tx: sessions.create(tx, CreateSession(**fields)))
    return record


async def change(store, session_id, **fields):
    return await store.write(lambda tx: sessions.change(tx, session_id, ChangeSession(**fields)))


async def page(store, **options):
    return SessionList.model_validate_json(await store.read(lambda r: sessions.list_page(r, **options)), strict=True)


async def events(store):
    rows = await store.read(lambda r: r.fetch_all("SELECT event, data FROM events ORDER BY seq"))
    return [(row["event"], json.loads(row["data"])) for row in rows]


def turn(tx, session_id, turn_id, status):
    ended = tx.now if status == "done" else None
    tx.execute(
        "INSERT INTO turns (session_id, turn_id, status, content, digest, queued_at, ended_at)"
        " VALUES (?, ?, ?, 'hello', '', ?, ?)",
        *(session_id, turn_id, status, tx.now, ended),
    )
    message = SessionMessage(role="user", content=f"in {turn_id}", turn_id=turn_id)
    sessions.add_message(tx, session_id, message)


async def test_creating_a_session_with_an_existing_id_returns_it_unchanged(store):
    first = await create(store, session_id="mine", title="one")
    again, is_new = await store.write(lambda tx: sessions.create(tx, CreateSession(session_id="mine", title="two")))
    assert not is_new
    assert again == first
    assert [event for event, _ in await events(store)] == ["session.created"]


async def test_generated_ids_are_unique(store):
    made = [(await create(store)).session_id for _ in range(3)]
    assert all(session_id.startswith("ses_") for session_id in made)
    assert len(set(made)) == 3


async def test_a_session_can_be_created_with_a_history(store):
    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi", "turn_id": "of_elsewhere"}]
    made = await create(store, messages=history, metadata={"a": [1, None]}, tools=["time__*"])
    shown = await store.read(lambda r: sessions.read_snapshot(r, made.session_id))
    assert [(m.role, m.content, m.turn_id) for m in shown.messages] == [
        ("user", "hello", None),
        ("assistant", "hi", None),
    ]
    assert all((m.message_id or "").startswith("msg_") for m in shown.messages)
    assert (shown.metadata, shown.tools, shown.status, shown.cursor) == ({"a": [1, None]}, ["time__*"], "idle", 1)


async def test_a_change_sets_only_the_fields_that_it_contains(store):
    made = await create(store, title="one", system_prompt="be brief", tools=["a"])
    changed = await change(store, made.session_id, title=None, archived=True)
    assert (changed.title, changed.system_prompt, changed.tools) == (None, "be brief", ["a"])
    assert (changed.archived, changed.revision) == (True, 2)
    assert (await events(store))[-1] == ("session.updated", {"session": changed.model_dump()})


async def test_a_change_at_an_outdated_revision_is_refused(store):
    made = await create(store)
    await change(store, made.session_id, title="theirs", revision=1)
    with pytest.raises(errors.RevisionConflictError, match="is at revision 2"):
        await change(store, made.session_id, title="mine", revision=1)
    shown = await store.read(lambda r: sessions.read(r, made.session_id))
    assert shown.title == "theirs"


async def test_metadata_that_are_too_long_are_refused(store):
    with pytest.raises(errors.InvalidRequestError, match="65536"):
        await create(store, metadata={"long": "x" * 70_000})
    assert await events(store) == []


async def test_deleting_a_session_deletes_its_messages_and_turns(store):
    made = await create(store, messages=[{"role": "user", "content": "secret"}])
    await store.write(lambda tx: turn(tx, made.session_id, "t1", "done"))
    assert await store.write(lambda tx: sessions.delete(tx, made.session_id))
    assert not await store.write(lambda tx: sessions.delete(tx, made.session_id))
    with pytest.raises(errors.SessionNotFoundError, match=made.session_id):
        await store.read(lambda r: sessions.read_snapshot(r, made.session_id))
    for table in ("messages", "turns"):
        assert await store.read(lambda r, table=table: r.fetch_all(f"SELECT * FROM {table}")) == []
    assert [event for event, _ in await events(store)] == ["session.created", "session.deleted"]


@pytest.mark.parametrize(
    ("turns", "status", "active", "queued"),
    [
        ([], "idle", None, []),
        ([("a", "done")], "idle", None, []),
        ([("a", "queued")], "queued", None, ["a"]),
        ([("a", "done"), ("b", "running"), ("c", "queued")], "running", "b", ["c"]),
        ([("b", "waiting"), ("c", "queued"), ("d", "queued")], "waiting", "b", ["c", "d"]),
    ],
)
async def test_the_status_of_a_session_is_that_of_its_turns(store, turns, status, active, queued):
    made = await create(store)
    for turn_id, of_turn in turns:
        await store.write(lambda tx, t=turn_id, s=of_turn: turn(tx, made.session_id, t, s))
    (shown,) = (await page(store)).sessions
    assert (shown.status, shown.active_turn_id, shown.queued_turn_ids) == (status, active, queued)
    assert shown == await store.read(lambda r: sessions.read(r, made.session_id))


async def test_a_list_has_the_same_records_as_the_sessions(store):
    made = [
        await create(store),
        await create(
            store,
            title='A "title"\n\\ 東京 \x00\x7f😀',
            model="m",
            system_prompt="",
            tools=[],
            metadata={"a": [1.5, None]},
        ),
        await create(store, tools=["look", "a'b"], metadata={"deep": {"er": "}'\\"}}),
        await create(store, metadata={"not in JSON": float("nan"), "large": 10**30}),
    ]
    made.append(await change(store, (await create(store)).session_id, title="changed", archived=True))
    made.append(await store.write(lambda tx: sessions.fork(tx, made[1].session_id, ForkSession())))
    await store.write(lambda tx: turn(tx, made[2].session_id, "t", "running"))
    text = await store.read(lambda r: sessions.list_page(r, archived=None))
    records = await store.read(
        lambda r: [json.loads(sessions.read(r, each.session_id).model_dump_json()) for each in made]
    )
    assert sorted(json.loads(text)["sessions"], key=lambda each: each["session_id"]) == sorted(
        records, key=lambda each: each["session_id"]
    )


async def test_the_pages_of_a_list_contain_every_session_once(store):
    made = [(await create(store, title=f"number {at}")).session_id for at in range(25)]
    found = []
    cursor = None
    while True:
        shown = await page(store, limit=4, cursor=cursor)
        found += [record.session_id for record in shown.sessions]
        if (cursor := shown.next_cursor) is None:
            break
    assert sorted(found) == sorted(made)
    assert len(found) == 25


@pytest.mark.parametrize("cursor", ["x", "eHg", "%%%", "ä", "é" * 5000, "AAAA"])
async def test_an_invalid_cursor_of_a_list_is_refused(store, cursor):
    with pytest.raises(errors.InvalidRequestError, match="next_cursor"):
        await store.read(lambda r: sessions.list_page(r, cursor=cursor))


async def test_a_list_can_be_searched(store):
    await create(store, title="Wind and 100% rain")
    await create(store, title="wind_mill")
    archived = await create(store, title="old WIND")
    await change(store, archived.session_id, archived=True)

    async def titles(**options):
        return {record.title for record in (await page(store, **options)).sessions}

    assert await titles(q="WIND") == {"Wind and 100% rain", "wind_mill"}
    assert await titles(q="100%") == {"Wind and 100% rain"}
    assert await titles(q="d_m") == {"wind_mill"}
    assert await titles(q="' OR 1=1 --") == set()
    assert await titles(q="wind", archived=True) == {"old WIND"}
    assert len(await titles(archived=None)) == 3


async def test_a_fork_has_the_messages_up_to_a_turn(store):
    made = await create(store, title="one", model="m", messages=[{"role": "user", "content": "before"}])
    for turn_id, status in (("t1", "done"), ("t2", "done"), ("t3", "running")):
        await store.write(lambda tx, t=turn_id, s=status: turn(tx, made.session_id, t, s))

    async def fork(**fields):
        forked = await store.write(lambda tx: sessions.fork(tx, made.session_id, ForkSession(**fields)))
        assert (forked.forked_from, forked.status, forked.model) == (made.session_id, "idle", "m")
        shown = await store.read(lambda r: sessions.read_snapshot(r, forked.session_id))
        return [message.content for message in shown.messages]

    assert await fork() == ["before", "in t1", "in t2"]
    assert await fork(through_turn_id="t1", title="two") == ["before", "in t1"]
    with pytest.raises(errors.TurnInProgressError):
        await fork(through_turn_id="t3")
    with pytest.raises(errors.TurnNotFoundError):
        await fork(through_turn_id="t9")
    with pytest.raises(errors.SessionNotFoundError):
        await store.write(lambda tx: sessions.fork(tx, "none", ForkSession()))


async def test_the_cursor_of_a_snapshot_is_the_newest_event_of_its_view(store):
    log = EventLog(store, Limits())
    made = await create(store)
    await change(store, made.session_id, title="two")
    shown = await store.read(lambda r: sessions.read_snapshot(r, made.session_id))
    assert shown.cursor == log.latest_seq == 2
