"""Test ``lab.map``: rows, templates, typed columns, errors in rows, the cache, and the ends of a run."""

import asyncio
import math
import random
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from typing import Annotated, Literal

import pandas as pd
import pydantic
import pytest

import lmx_lab
from lmx_lab.batch.answers import RowAnswer
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.errors import (
    BatchStoppedError,
    ContextLengthError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
    QueueFullError,
)
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.notebook.remote import RemoteBackend
from tests.support.labs import serving
from tests.support.waiting import interrupt

TRIP = {"city": str, "days": int, "far": bool, "kind": Literal["sea", "hills"]}
WAIT_S = 60.0


class Sent:
    """Counts the requests through a kind of backend, and how many run at the same time. ``before`` is called with each
    request.
    """

    def __init__(self, monkeypatch, kind=LocalBackend):
        self.requests = []
        self.most_at_once = 0
        self._running = 0
        generate = kind.generate

        async def counted(backend, request, *, batch=False):
            self.requests.append(request)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            try:
                await self.before(len(self.requests))
                return await generate(backend, request, batch=batch)
            finally:
                self._running -= 1

        monkeypatch.setattr(kind, "generate", counted)

    async def before(self, count):
        await asyncio.sleep(0)


@pytest.fixture
def sent(monkeypatch):
    return Sent(monkeypatch)


def test_rows_have_the_same_index_and_errors_are_in_their_rows(lab):
    frame = pd.DataFrame({"text": ["a {b} {{c}}", None, "d", math.nan], "n": [1, 2, 3, 4]}, index=["x", "x", "y", "z"])
    answers = lab.map(frame, "{n:02d}: {text}")
    assert list(answers.index) == ["x", "x", "y", "z"]
    assert answers["answer"].tolist() == ["01: a {b} {{c}}", None, "03: d", None]
    assert answers["finish_reason"].tolist() == ["stop", None, "stop", None]
    assert "text" in answers["error"].iloc[1]
    assert answers["error"].isna().tolist() == [True, False, True, False]
    assert answers["output_tokens"].dtype == "Int64"
    assert (answers["total_s"].dropna() > 0).all()
    assert lab.requests[-1].record.batch
    assert answers.attrs["interrupted"] is False
    with pytest.raises(InvalidRequestError, match=r"'x'.*text"):
        lab.map(frame, "{text}", errors="raise")


def test_kinds_of_rows_and_prompts(lab):
    assert lab.map("one", "say {text}")["answer"].tolist() == ["say one"]
    assert lab.map(pd.Series(["a", "b"], name="review"), "{review}!")["answer"].tolist() == ["a!", "b!"]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "<{text}>"}]}]
    assert lab.map([{"text": "a"}, {"text": "b"}], messages)["answer"].tolist() == ["<a>", "<b>"]
    made = lab.map([{"n": 1}, {"n": 0}], lambda row: f"{6 // row['n']}")
    assert made["answer"].tolist() == ["6", None]
    assert "ZeroDivisionError" in made["error"][1]


def test_an_iterable_gives_an_iterator_that_reads_a_limited_number_of_rows_ahead(lab):
    read = []

    def rows():
        for number in range(10_000):
            read.append(number)
            yield {"n": number}

    answers = lab.map(rows(), "{n}")
    assert [next(answers)["answer"] for _ in range(20)] == [str(number) for number in range(20)]
    answers.close()
    assert len(read) < 1000
    assert list(answers) == []

    async def collect():
        return [each["answer"] async for each in await lab.amap(iter(["a", None, "b"]), "{text}")]

    assert asyncio.run(collect()) == ["a", None, "b"]
    with pytest.raises(InvalidRequestError, match="columns are n"):
        next(lab.map(rows(), "{text}"))


def test_closing_the_iterator_cancels_running_requests(lab, sent):
    cancelled = threading.Event()

    async def before(count):
        if count > 1:
            try:
                await asyncio.sleep(WAIT_S)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    sent.before = before
    answers = lab.map(iter(["a", "b"]), "{text}")
    assert next(answers)["answer"] == "a"
    answers.close()
    assert cancelled.wait(WAIT_S / 2)


def test_typed_columns_of_a_dictionary_a_model_and_a_json_schema(lab):
    class Trip(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=10)
        days: int | None

        @pydantic.field_validator("city")
        @classmethod
        def _has_name(cls, city: str) -> str:
            if not city:
                raise ValueError("the city has no name")
            return city

    row = '{"city":"Rome","days":3,"far":true,"kind":"sea"}'
    typed = lab.map([row, "anything"], "{text}", schema=TRIP)
    assert typed.loc[0, ["city", "days", "far", "kind"]].tolist() == ["Rome", 3, True, "sea"]
    assert (typed["days"].dtype, typed["far"].dtype) == ("Int64", "boolean")
    assert typed["error"].isna().all()

    checked = lab.map(['{"city":"Rome","days":null}', '{"city":"","days":1}'], "{text}", schema=Trip)
    assert checked["days"].isna().all()
    assert checked["days"].dtype == "Int64"
    assert checked["city"].tolist() == ["Rome", None]
    assert "no name" in checked["error"][1]

    days = {"type": "integer", "maximum": 10**20}
    huge = {"type": "object", "properties": {"days": days}, "required": ["days"]}
    large = lab.map([f'{{"days":{10**20}}}', '{"days":7}'], "{text}", schema=huge)
    assert large["days"].tolist() == [pd.NA, 7]
    assert "64-bit" in large["error"][0]
    number = {**huge, "properties": {"days": {"type": "number", "maximum": 10**390}}}
    # A bound that is no float does not limit the value, but numbers have a limited number of digits.
    assert lab.map([f'{{"days":{10**390}}}'], "{text}", schema=number)["days"].tolist() == [1e18]
    assert lab.map(["[1,2]"], "{text}", schema={"type": "array", "items": {"type": "integer"}})["value"][0] == [1, 2]
    assert "max_tokens" in lab.map([row], "{text}", schema=TRIP, max_tokens=3)["error"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "{texts}"}, "columns are text"),
        ({"prompt": "{text"}, "malformed"),
        ({"prompt": "{text!r}"}, "conversions"),
        ({"prompt": 3}, "template"),
        ({"prompt": asyncio.sleep}, "is async; pass a plain function"),
        ({"schema": {"error": str}}, "rename"),
        ({"schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}}, "."),
        ({"schema": 3}, "JSON schema"),
        ({"temperature": -1}, "temperature"),
        ({"tools": []}, "tools"),
        ({"n": 0}, "n is 0"),
        ({"errors": "ignore"}, "errors"),
        ({"retry": "all"}, "retry"),
        ({"cache": True}, "cache is True"),
        ({"frame": 5}, "data frame"),
    ],
)
def test_invalid_arguments_are_refused_before_the_first_row(lab, arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        lab.map(**{"frame": ["a"] * 3, "prompt": "{text}", **arguments})


def test_seeds_are_derived_and_each_row_has_n_answers(lab, sent):
    answers = lab.map(["a", "a", "b"], "{text}", n=2, seed=1)
    assert answers.index.tolist() == [0, 0, 1, 1, 2, 2]
    assert answers["sample"].tolist() == [0, 1] * 3
    seeds = {request.seed for request in sent.requests}
    assert len(seeds) == 6
    lab.map(["b", "a"], "{text}", seed=1)
    assert {request.seed for request in sent.requests[6:]} < seeds  # They do not depend on the order of rows.


def test_requests_are_sent_as_the_engine_has_room_and_again_after_a_refusal(lab, sent):
    async def before(count):
        await asyncio.sleep(0)
        if count % 5 == 2:
            raise QueueFullError("full", retry_after_s=0.01)

    sent.before = before
    answers = lab.map([str(number) for number in range(100)], "{text}")
    assert answers["answer"].tolist() == [str(number) for number in range(100)]
    assert len(sent.requests) > 100
    assert sent.most_at_once <= 6


def test_a_second_run_computes_only_what_is_missing(lab, sent, tmp_path):
    path = tmp_path / "answers.db"
    rows = ["a", "b", "a", "long " * 40_000]
    first = lab.map(rows, "{text}", cache=path, temperature=0)
    assert first["error"].notna().tolist() == [False, False, False, True]
    assert path.stat().st_mode & 0o077 == 0
    sent.requests.clear()
    pd.testing.assert_frame_equal(lab.map(rows, "{text}", cache=path, temperature=0), first)
    assert not sent.requests
    lab.map(["b", "c", *rows], "{text}", cache=path, temperature=0)
    assert [request.messages[0].content for request in sent.requests] == ["c", "b"]  # A second "b".
    sent.requests.clear()
    lab.map(rows, "{text}", cache=path, temperature=0, retry="errors")
    assert len(sent.requests) == 1
    lab.map(rows[:2], "{text}", cache=path, temperature=1)
    lab.map(rows[:2], "{text}", cache=path, temperature=0, system="s")
    assert len(sent.requests) == 5
    with pytest.raises(ContextLengthError):
        lab.map(rows, "{text}", cache=path, temperature=0, errors="raise")
    stored = AnswerCache(path, read_only=True)
    empty = AnswerCache(tmp_path / "empty.db")
    assert empty.df.dtypes.to_dict() == stored.df.dtypes.to_dict()
    assert [str(stored.df[name].dtype) for name in ("at", "output_tokens")] == ["datetime64[us, UTC]", "Int64"]
    empty.close()
    assert stored.df["answer"].dropna().tolist().count("a") >= 2
    assert set(stored.df["model"]) == {"echo"}
    stored.close()
    with pytest.raises(LabError, match="open it again"):
        _ = stored.df
    with pytest.raises(InvalidRequestError):
        AnswerCache(tmp_path / "none.db", read_only=True)


def test_a_file_of_another_program_is_refused_and_two_processes_may_share_one(lab, tmp_path):
    (tmp_path / "notes.txt").write_text("not a database" * 100)
    with pytest.raises(InvalidRequestError, match="another path"):
        lab.map(["a"], "{text}", cache=tmp_path / "notes.txt")

    async def share():
        one, two = AnswerCache(tmp_path / "a.db"), AnswerCache(tmp_path / "a.db")
        caches = [one, two]
        await asyncio.gather(*(caches[at % 2].add({f"{at // 3}": RowAnswer(text="x")}, "m") for at in range(30)))
        keys = [str(at) for at in range(1200)]
        assert await one.find(keys) == await two.find(keys) == {str(at): RowAnswer(text="x") for at in range(10)}
        one.close()
        two.close()
        two.close()

    asyncio.run(share())


def test_an_unloaded_model_ends_the_run_with_one_error_and_the_answers_are_kept(lab, sent, tmp_path):
    rows, path = [str(number) for number in range(50)], tmp_path / "a.db"
    unloads = []

    async def before(count):
        if count == 20 and not unloads:
            unloads.append(count)
            await lab.aunload()

    sent.before = before
    with pytest.raises(BatchStoppedError, match=r"echo.*a\.db") as stopped:
        lab.map(rows, "{text}", cache=path)
    with pytest.raises(NotLoadedError):
        lab.map(rows, "{text}", cache=path)
    lab.load("echo")
    done = stopped.value.frame["answer"].dropna()
    assert 0 < len(done) < 50
    assert done.tolist() == [rows[at] for at in done.index]
    sent.requests.clear()
    assert lab.map(rows, "{text}", cache=path)["answer"].tolist() == rows
    assert len(sent.requests) == 50 - len(done)


def test_an_interrupt_returns_the_answers_so_far(lab, sent):
    async def before(count):
        if count == 10:
            interrupt()
        if count >= 10:
            await asyncio.sleep(WAIT_S)

    sent.before = before
    answers = lab.map([str(number) for number in range(20)], "{text}")
    assert answers.attrs["interrupted"] is True
    assert len(answers) == 20
    assert 0 < answers["answer"].notna().sum() < 10
    assert (answers["error"].notna() == answers["answer"].isna()).all()


KILLED = """
import os, sys
import lmx_lab
from lmx_lab.notebook.remote import RemoteBackend

url, cache, log, rows = sys.argv[1:]
generate, begun = RemoteBackend.generate, os.open(log, os.O_WRONLY | os.O_APPEND)

async def logged(backend, request, *, batch=False):
    os.write(begun, f"{request.messages[0].content}\\n".encode())
    return await generate(backend, request, batch=batch)

RemoteBackend.generate = logged
with lmx_lab.attach(url) as lab:
    lab.map([f"row {number}" for number in range(int(rows))], "{text}", cache=cache)
"""


def stored_answers(path):
    """Return the number of answers in a cache that another process writes."""
    threading.Event().wait(0.02)
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path)) as connection:
        try:
            return connection.execute("SELECT count(*) FROM answers").fetchone()[0]
        except sqlite3.OperationalError:  # The table was not created yet.
            return 0


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_after_kills_at_random_moments_only_missing_rows_are_computed(kills, monkeypatch, tmp_path):
    slots, count, moments = 4, 50 + 20 * kills, random.Random(20)
    cache, log, rows = tmp_path / "a.db", tmp_path / "log", [f"row {number}" for number in range(count)]
    log.touch()
    stored = begun = 0
    with (
        serving(tmp_path, "echo", slots=slots, echo_tokens_per_s=40) as lab,
        lmx_lab.attach(lab.url) as attached,
    ):
        for _ in range(kills):
            goal = stored + moments.randrange(1, 12)
            child = subprocess.Popen([sys.executable, "-c", KILLED, lab.url, str(cache), str(log), str(count)])
            try:
                while stored_answers(cache) < goal:
                    assert child.poll() is None
            finally:
                child.kill()
                child.wait()
            new, started = stored_answers(cache) - stored, len(log.read_text().splitlines()) - begun
            # The started rows are those that were stored, and those that were being answered.
            assert new <= started <= new + slots + 2
            stored, begun = stored + new, begun + started
        assert kills <= stored < count
        sent = Sent(monkeypatch, RemoteBackend)
        resumed = attached.map(rows, "{text}", cache=cache)
        assert len(sent.requests) == count - stored
        whole = attached.map(rows, "{text}", cache=tmp_path / "b.db")
    compared = ["answer", "finish_reason", "error", "prompt_tokens", "output_tokens"]
    assert resumed["answer"].tolist() == rows
    pd.testing.assert_frame_equal(resumed[compared], whole[compared])
    assert stored_answers(cache) == count


class Trip(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=8)
    days: int = pydantic.Field(ge=0, le=99)
    price: float = pydantic.Field(ge=0, le=100)
    far: bool
    kind: Literal["sea", "hills"]
    stops: list[Annotated[int, pydantic.Field(ge=0, le=9)]] = pydantic.Field(max_length=3)
    guide: Literal["Ann", "Bob"] | None


@pytest.mark.slow
@pytest.mark.parametrize("files", ["tiny", "tiny_gguf"])
@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.long)])
def test_sampled_answers_have_valid_columns_and_are_computed_once(count, files, request, tmp_path):
    """``make bench`` computes 1,000 rows with each engine."""
    found = request.getfixturevalue(files)
    frame = pd.DataFrame({"text": [f"Row {number}" for number in range(count)]})
    options = {"schema": Trip, "temperature": 1.0, "seed": 3, "max_tokens": 400, "cache": tmp_path / "a.db"}
    with serving(tmp_path, getattr(found, "path", found), slots=4, threads=1) as lab:
        first, second = [lab.map(frame, "{text}", **options) for _ in range(2)]
    assert first["error"].isna().all(), first["error"].dropna().tolist()[:3]
    assert [str(first[name].dtype) for name in ("days", "price", "far")] == ["Int64", "float64", "boolean"]
    columns = first[list(Trip.model_fields)].astype(object).where(lambda values: values.notna(), None)
    for text, values in zip(first["answer"], columns.to_dict("records"), strict=True):
        assert Trip.model_validate_json(text) == Trip.model_validate(values)
    assert first["answer"].nunique() > 0.9 * count
    pd.testing.assert_frame_equal(second, first)
