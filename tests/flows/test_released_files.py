"""Files that released versions have written are read, and files of newer versions are refused.

A folder ``files_of_N`` has the files that version N wrote: databases as SQL, made with ``sqlite3.Connection.iterdump``.
A release that changes the tables of a database adds a folder.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lmx_lab import Steer
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.bench import load
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import sessions
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.store import Store
from lmx_lab.errors import InvalidRequestError
from lmx_lab.evals.experiments import Experiments
from lmx_lab.instrument.store import RecordStore

pytestmark = pytest.mark.anyio

RELEASES = sorted(Path(__file__).parent.glob("files_of_*"))


@pytest.fixture(params=RELEASES, ids=lambda folder: folder.name)
def written(request, tmp_path):
    """The folder with the files of one release, with databases in place of their statements."""
    for file in request.param.iterdir():
        if file.suffix == ".sql":
            with closing(sqlite3.connect(tmp_path / f"{file.stem}.db")) as connection:
                connection.executescript(file.read_text())
        else:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_recordings_caches_and_experiments(written):
    with closing(RecordStore(written / "recording.db")) as store:
        records = list(store)
        assert [record.text for record in records] == ["Say hello.", "Repeat a", "Repeat b", "Repeat", "Say hello."]
        assert records[0].request["prompt"]["messages"] == [{"role": "user", "content": "Say hello."}]
        assert records[0].provenance.versions["lmx-lab"] == "0.1.0"
    with closing(AnswerCache(written / "cache.db")) as cache:
        assert list(cache.df["answer"]) == ["Repeat a", "Repeat b"]
    (evaluation,) = Experiments(written / "experiments.db")
    assert (evaluation.name, evaluation.score.mean, list(evaluation.df["answer"])) == ("first", 0.0, ["Repeat"])


async def test_the_sessions_of_a_daemon(written):
    store = await Store.open(written / "daemon.db")
    try:
        (session_id,) = await store.read(sessions.list_ids)
        snapshot = await store.read(lambda view: sessions.read_snapshot(view, session_id))
        events = (await EventLog(store, Limits()).read_page(0)).events
    finally:
        await store.close()
    assert snapshot.title == "a session"
    assert [message.role for message in snapshot.messages] == ["user", "assistant"]
    assert [each.event for each in events][-2:] == ["turn.done", "daemon.stopping"]


def test_runs_of_benchmarks_and_steering_vectors(written):
    assert list(load(written / "bench.jsonl")["output_tokens"]) == [2, 2]
    vector = Steer.load(written / "steer.safetensors")
    assert (vector.layer, vector.scale, vector.vector.tolist(), vector.source) == (2, 3.0, [1.0, 0.5], {"pairs": 1})


def test_files_of_newer_versions_are_refused(written):
    run = (written / "bench.jsonl").read_text()
    (written / "bench.jsonl").write_text(run.replace('"lmx_lab_bench": 1', '"lmx_lab_bench": 2', 1))
    refusal = (
        r" was written by a newer version of LMX Lab \(its version is 2, and this version reads 1: update lmx-lab\)$"
    )
    with pytest.raises(InvalidRequestError, match=refusal):
        load(written / "bench.jsonl")
    # The lengths in the header of a file of tensors do not change.
    vector = (written / "steer.safetensors").read_bytes()
    (written / "steer.safetensors").write_bytes(vector.replace(b"steering vector 1", b"steering vector 2"))
    with pytest.raises(InvalidRequestError, match=refusal):
        Steer.load(written / "steer.safetensors")
