"""The database: transactions, order, full disks, and files that are not valid databases."""

import asyncio
import json
import sqlite3
import stat
import sys
from types import SimpleNamespace

import pytest

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.store import Store
from lmx_lab.errors import HostingError, StoppingError, StorageFullError
from lmx_lab.wire.events import SessionDeleted, ToolOutput

pytestmark = pytest.mark.anyio


def deleted(session_id):
    return SessionDeleted(session_id=session_id)


async def test_an_event_is_published_before_its_write_returns(store):
    log = EventLog(store, Limits())
    seq = await store.write(lambda tx: tx.append("session.deleted", deleted("a"), session_id="a"))
    assert log.latest_seq == seq
    (event,) = (await log.read_page(0)).events
    envelope = json.loads(event.text)
    assert envelope.pop("at").endswith("Z")
    assert envelope == {
        "event": "session.deleted",
        "seq": seq,
        "stream_id": store.stream_id,
        "session_id": "a",
        "turn_id": None,
        "data": {"session_id": "a"},
    }


async def test_a_failed_transaction_leaves_neither_state_nor_event(store):
    log = EventLog(store, Limits())

    def fail(tx):
        tx.execute("INSERT INTO meta VALUES ('half', 'done')")
        tx.append("session.deleted", deleted("a"))
        raise ValueError("as an example")

    with pytest.raises(ValueError, match="as an example"):
        await store.write(fail)
    assert await store.read(lambda r: r.fetch_one("SELECT * FROM meta WHERE key = 'half'")) is None
    assert (await log.read_page(0)).events == ()
    assert log.latest_seq == 0


async def test_a_write_whose_caller_was_cancelled_is_completed(store):
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slowly(tx):
        loop.call_soon_threadsafe(begun.set)
        tx.append("session.deleted", deleted("a"))

    log = EventLog(store, Limits())
    writing = asyncio.create_task(store.write(slowly))
    await begun.wait()
    writing.cancel()
    assert await log.wait(0, 10)


async def test_concurrent_writes_have_seqs_in_the_order_in_which_readers_see_them(store):
    log = EventLog(store, Limits())
    seqs = await asyncio.gather(
        *(store.write(lambda tx, at=at: tx.append("session.deleted", deleted(str(at)))) for at in range(200))
    )
    assert sorted(seqs) == list(range(1, 201))
    assert [event.seq for event in (await log.read_page(0, limit=500)).events] == list(range(1, 201))


async def test_a_seq_is_never_used_twice(tmp_path):
    store = await Store.open(tmp_path / "daemon.db")
    first = await store.write(lambda tx: tx.append("session.deleted", deleted("a")))
    await store.write(lambda tx: tx.execute("DELETE FROM events"))
    stream_id = store.stream_id
    await store.close()
    store = await Store.open(tmp_path / "daemon.db")
    assert store.stream_id == stream_id
    assert store.issued_seq == first
    assert await store.write(lambda tx: tx.append("session.deleted", deleted("a"))) == first + 1
    await store.close()


async def test_only_the_user_can_read_the_files(store):
    await store.write(lambda tx: tx.append("session.deleted", deleted("a")))
    files = list(store.path.parent.glob("daemon.*"))
    assert len(files) >= 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


async def test_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / "daemon.db").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostingError, match="cannot be opened"):
        await Store.open(tmp_path / "daemon.db")


@pytest.mark.parametrize("damage", ["other", "empty", "half", "cut off"])
async def test_a_damaged_database_is_reported_and_not_changed(tmp_path, damage):
    path = tmp_path / "daemon.db"
    store = await Store.open(path)
    await store.close()
    whole = path.read_bytes()
    content = {"other": b"no database " * 1000, "empty": b"", "half": whole[: len(whole) // 2], "cut off": whole[:-1]}[
        damage
    ]
    path.write_bytes(content)
    with pytest.raises(HostingError, match=r"is damaged .*move it away"):
        await Store.open(path)
    assert path.read_bytes() == content


async def test_a_database_that_was_created_only_in_part_is_created_again(tmp_path):
    (tmp_path / "daemon.new").write_bytes(b"")
    store = await Store.open(tmp_path / "daemon.db")
    await store.close()
    assert not (tmp_path / "daemon.new").exists()


async def test_a_database_of_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "daemon.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(HostingError, match="newer version"):
        await Store.open(path)


async def test_a_closed_store_refuses_writes(tmp_path):
    store = await Store.open(tmp_path / "daemon.db")
    await store.close()
    await store.close()
    with pytest.raises(StoppingError):
        await store.write(lambda tx: tx.append("session.deleted", deleted("a")))


# A full disk, simulated by SQLite's limit of pages, which causes the same error.


async def limit_pages(store, pages=None, **options):
    """Limit the size of the database, by default to its current size."""

    def limit(tx):
        most = pages or tx.fetch_one("PRAGMA page_count")["page_count"]
        tx.fetch_one(f"PRAGMA max_page_count = {most}")

    await store.write(limit, **options)


def long_event(tx):
    return tx.append("tool.output", ToolOutput(call_id="c", text="x" * 100_000))


async def test_a_write_on_a_full_disk_fails_and_changes_nothing(store):
    await limit_pages(store)
    with pytest.raises(StorageFullError, match="free disk space"):
        await store.write(long_event)
    assert await store.read(lambda r: r.fetch_all("SELECT * FROM events")) == []


async def test_on_a_full_disk_the_reserve_is_used_for_writing_ends(store, monkeypatch):
    reserve = store.path.with_suffix(".reserve")
    assert reserve.stat().st_size > 10**6
    room = 0
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=room))
    await limit_pages(store)
    with pytest.raises(StorageFullError):
        await store.write(long_event)
    assert not reserve.exists()
    # Deleting the reserve has freed this space.
    await limit_pages(store, 1_000_000, ending=True)
    with pytest.raises(StorageFullError):
        await store.write(long_event)
    assert await store.write(lambda tx: tx.append("session.deleted", deleted("a")), ending=True)
    room = 10**9
    assert await store.write(long_event)
    assert reserve.exists()


async def test_the_reserve_is_not_created_from_the_last_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2_500_000))
    (tmp_path / "daemon.reserve").write_bytes(b"a part of one")
    store = await Store.open(tmp_path / "daemon.db")
    assert not (tmp_path / "daemon.reserve").exists()
    await store.close()


@pytest.mark.slow
async def test_a_full_file_system_stops_only_the_writing(tmp_path):
    """With a limit of the operating system on the size of files, in a separate process."""
    program = f"""
import asyncio, resource
from pathlib import Path
from types import SimpleNamespace
from lmx_lab.daemon.storage.store import Store
from lmx_lab.errors import StorageFullError
from lmx_lab.wire.events import ToolOutput

async def main():
    store = await Store.open(Path({str(tmp_path / "daemon.db")!r}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    written = 0
    try:
        while True:
            await store.write(lambda tx: tx.append("tool.output", ToolOutput(call_id="c", text="x" * 50_000)))
            written += 1
    except StorageFullError:
        rows = await store.read(lambda r: r.fetch_all("SELECT seq FROM events"))
        print(written, len(rows), (await store.read(lambda r: r.fetch_one("PRAGMA integrity_check")))[0])
    await store.close()

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    written, kept, verdict = out.decode().split() or (err.decode(), "", "")
    assert written == kept
    assert int(written) > 2
    assert verdict == "ok"
